//! The exchange of the communicator's id among the ranks of a job: rank 0 listens, the others come to it.
//!
//! A rank says hello (magic number, number of ranks, its rank) and gets a status byte and the id
//! once all have come. Nothing waits beyond the deadline; a stranger on the port is sent away
//! without holding up anybody.

use super::Job;
use crate::{Error, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// NCCL's unique id.
pub(super) type Id = [u8; 128];

const MAGIC: [u8; 8] = *b"windrow1";
const HELLO: usize = 24;
const PAUSE: Duration = Duration::from_millis(2);

const WELCOME: u8 = 0;
const OTHER_WORLD: u8 = 1;
const RANK_TAKEN: u8 = 2;

/// Sends the id that `make` makes on rank 0 to every rank.
///
/// # Errors
/// [`Error::Parallel`] if not all ranks have come by the deadline, the port is in use, or a rank
/// belongs to another job; what `make` returns.
pub(super) fn exchange(
    job: &Job,
    deadline: Instant,
    make: impl FnOnce() -> Result<Id>,
) -> Result<Id> {
    let port = job.port + 1;
    let fail = |detail: String| Error::Parallel {
        rank: job.rank,
        world: job.world,
        what: format!("meeting the other ranks at {} port {port}", job.address),
        detail,
    };
    if job.rank == 0 {
        let id = make()?;
        let listener = TcpListener::bind(("::", port))
            .or_else(|_| TcpListener::bind(("0.0.0.0", port)))
            .map_err(|e| fail(format!("listening: {e}")))?;
        host(&listener, job.world, &id, deadline).map_err(fail)?;
        Ok(id)
    } else {
        join(job, port, deadline).map_err(fail)
    }
}

fn hello(rank: usize, world: usize) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..16].copy_from_slice(&(world as u64).to_le_bytes());
    bytes[16..].copy_from_slice(&(rank as u64).to_le_bytes());
    bytes
}

/// A connection whose hello has not arrived in full.
struct Guest {
    stream: TcpStream,
    bytes: [u8; HELLO],
    len: usize,
}

enum Arrival {
    Waiting,
    Rank(usize),
    Refused(u8),
    Gone,
}

impl Guest {
    fn poll(&mut self, world: usize) -> Arrival {
        while self.len < HELLO {
            match self.stream.read(&mut self.bytes[self.len..]) {
                Ok(0) => return Arrival::Gone,
                Ok(n) => self.len += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Arrival::Waiting,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Arrival::Gone,
            }
        }
        if self.bytes[..8] != MAGIC {
            return Arrival::Gone;
        }
        let word = |at: usize| {
            self.bytes[at..at + 8].iter().rev().fold(0u64, |word, &b| word << 8 | u64::from(b))
        };
        match (word(8), word(16)) {
            (theirs, rank) if theirs == world as u64 && (1..theirs).contains(&rank) => {
                Arrival::Rank(rank as usize)
            }
            _ => Arrival::Refused(OTHER_WORLD),
        }
    }
}

fn host(listener: &TcpListener, world: usize, id: &Id, deadline: Instant) -> Result<(), String> {
    listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    let mut guests: Vec<Guest> = Vec::new();
    let mut ranks: Vec<Option<TcpStream>> = (1..world).map(|_| None).collect();
    while ranks.iter().any(Option::is_none) {
        if let Ok((stream, _)) = listener.accept()
            && stream.set_nonblocking(true).is_ok()
        {
            guests.push(Guest { stream, bytes: [0; HELLO], len: 0 });
            continue;
        }
        for mut guest in std::mem::take(&mut guests) {
            match guest.poll(world) {
                Arrival::Waiting => guests.push(guest),
                Arrival::Gone => {}
                Arrival::Rank(rank) if ranks[rank - 1].is_none() => {
                    ranks[rank - 1] = Some(guest.stream)
                }
                Arrival::Rank(rank) => {
                    // Also tells the one that came first: nobody knows which of the two is right.
                    for stream in [Some(guest.stream), ranks[rank - 1].take()].into_iter().flatten()
                    {
                        answer(stream, RANK_TAKEN, id);
                    }
                    return Err(format!("two processes say that they are rank {rank}"));
                }
                Arrival::Refused(status) => answer(guest.stream, status, id),
            }
        }
        if Instant::now() >= deadline {
            let missing: Vec<_> =
                (1..world).filter(|r| ranks[r - 1].is_none()).map(|r| r.to_string()).collect();
            return Err(format!(
                "of {world} ranks these have not come in time: {}",
                missing.join(", ")
            ));
        }
        std::thread::sleep(PAUSE);
    }
    ranks.into_iter().flatten().for_each(|stream| answer(stream, WELCOME, id));
    Ok(())
}

/// A rank that has gone meanwhile is noticed by the first collective operation.
fn answer(mut stream: TcpStream, status: u8, id: &Id) {
    let _ = stream.set_nonblocking(false);
    let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
    let mut bytes = vec![status];
    bytes.extend_from_slice(id);
    let _ = stream.write_all(&bytes);
}

fn join(job: &Job, port: u16, deadline: Instant) -> Result<Id, String> {
    loop {
        let left = |what: &dyn std::fmt::Display| {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() { Err(format!("no answer in time: {what}")) } else { Ok(left) }
        };
        // Rank 0 may start later than this one.
        let mut stream = match connect(job, port, left(&"the time-out is too short")?) {
            Ok(stream) => stream,
            Err(e) => {
                left(&e)?;
                std::thread::sleep(PAUSE * 10);
                continue;
            }
        };
        let mut bytes = [0; 129];
        let talked = stream
            .write_all(&hello(job.rank, job.world))
            .and_then(|()| stream.set_read_timeout(Some(left(&"greeting").unwrap_or(PAUSE))))
            .and_then(|()| stream.read_exact(&mut bytes));
        match talked {
            Ok(()) => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Err(format!("no answer in time: {e}"));
            }
            // It may be an earlier job's rank 0 that is going away.
            Err(e) => {
                left(&e)?;
                std::thread::sleep(PAUSE * 10);
                continue;
            }
        }
        return match bytes[0] {
            WELCOME => Ok(std::array::from_fn(|i| bytes[1 + i])),
            OTHER_WORLD => {
                Err(format!("rank 0 belongs to a job of another size than {}", job.world))
            }
            _ => Err(format!("two processes say that they are rank {}", job.rank)),
        };
    }
}

fn connect(job: &Job, port: u16, left: Duration) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in (job.address.as_str(), port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left.min(Duration::from_secs(5))) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// A port such that the next one was free a moment ago.
    fn port() -> u16 {
        loop {
            let port = TcpListener::bind("[::]:0").unwrap().local_addr().unwrap().port();
            if port > 1024 {
                return port - 1;
            }
        }
    }

    fn job(rank: usize, world: usize, port: u16) -> Job {
        Job { rank, world, local_rank: 0, address: "localhost".into(), port }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(300)
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    const ID: Id = [42; 128];

    #[test]
    fn all_ranks_get_the_id_in_whatever_order_they_come() {
        let port = port();
        let ranks: Vec<_> = [2, 0, 3, 1]
            .map(|rank| {
                let rank = thread::spawn(move || exchange(&job(rank, 4, port), later(), || Ok(ID)));
                thread::sleep(Duration::from_millis(20));
                rank
            })
            .into();
        ranks.into_iter().for_each(|r| assert_eq!(r.join().unwrap().unwrap(), ID));
    }

    #[test]
    fn one_rank_waits_for_nobody() {
        assert_eq!(exchange(&job(0, 1, port()), soon(), || Ok(ID)).unwrap(), ID);
    }

    #[test]
    fn missing_ranks_are_named_and_strangers_ignored() {
        let port = port();
        let host = thread::spawn(move || {
            exchange(&job(0, 3, port), Instant::now() + Duration::from_secs(1), || Ok(ID))
        });
        thread::sleep(Duration::from_millis(50));
        let silent = TcpStream::connect(("localhost", port + 1)).unwrap();
        let mut loud = TcpStream::connect(("localhost", port + 1)).unwrap();
        loud.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let two = thread::spawn(move || exchange(&job(2, 3, port), later(), || Ok(ID)));
        let message = host.join().unwrap().unwrap_err().to_string();
        assert!(
            message.contains("not come in time: 1") && message.contains("rank 0 of 3"),
            "{message}"
        );
        drop(silent);
        // Nobody answers rank 2 any more; a host of the next try does.
        let (again, one) = (job(0, 3, port), job(1, 3, port));
        let one = thread::spawn(move || exchange(&one, later(), || Ok(ID)));
        assert_eq!(exchange(&again, later(), || Ok([7; 128])).unwrap(), [7; 128]);
        assert_eq!(one.join().unwrap().unwrap(), [7; 128]);
        assert_eq!(two.join().unwrap().unwrap(), [7; 128]);
    }

    #[test]
    fn a_rank_without_host_stops_in_time() {
        let start = Instant::now();
        let error = exchange(&job(1, 2, port()), soon(), || Ok(ID)).unwrap_err();
        assert!(matches!(error, Error::Parallel { rank: 1, world: 2, .. }), "{error}");
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_host_that_never_answers_is_left_in_time() {
        let port = port();
        let _silent = TcpListener::bind(("::", port + 1)).unwrap();
        let error = exchange(&job(1, 2, port), soon(), || Ok(ID)).unwrap_err();
        assert!(error.to_string().contains("in time"), "{error}");
    }

    #[test]
    fn ranks_of_another_job_and_twins_are_refused() {
        let port = port();
        let host = thread::spawn(move || exchange(&job(0, 3, port), later(), || Ok(ID)));
        let error = exchange(&job(1, 2, port), later(), || Ok(ID)).unwrap_err();
        assert!(error.to_string().contains("another size"), "{error}");
        let twins = [1, 1]
            .map(|rank| thread::spawn(move || exchange(&job(rank, 3, port), later(), || Ok(ID))));
        for twin in twins {
            let error = twin.join().unwrap().unwrap_err();
            assert!(error.to_string().contains("two processes"), "{error}");
        }
        assert!(host.join().unwrap().unwrap_err().to_string().contains("rank 1"));
    }

    #[test]
    fn a_port_in_use_and_a_failed_id_are_errors() {
        let port = port();
        let _other = TcpListener::bind(("::", port + 1)).unwrap();
        let error = exchange(&job(0, 2, port), soon(), || Ok(ID)).unwrap_err();
        assert!(error.to_string().contains("listening"), "{error}");
        let error = exchange(&job(0, 2, port), soon(), || Err(Error::unsupported("ids", "test")));
        assert!(matches!(error, Err(Error::Unsupported { .. })));
    }
}
