//! The connection of one rank with the others, with a deadline.
//!
//! Whatever is asked of the transport happens soon or not at all: the call and its work must be done
//! within the time-out. A call may block, and work may hang, so a thread of the link watches both,
//! and releases whoever waits: for the call, for the link, or for a stream. The first failure is
//! kept, and answers every later call.

use crate::{Error, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The transport of a link: NCCL, or a test's puppet. Its errors are its own words.
pub(super) trait Transport: Send + 'static {
    /// A piece of work on the device.
    type Work: Send + Sync + 'static;
    /// False while the transport connects, or the latest call is in progress.
    fn is_ready(&mut self) -> Result<bool, String>;
    /// True once the work is done.
    fn is_done(work: &Self::Work) -> Result<bool, String>;
    /// A function that makes every call return and all work end soon, whatever the other ranks do. It may be called
    /// while another thread is in a call. The transport cannot be used afterwards.
    fn breaker(&self) -> Box<dyn Fn() + Send + Sync>;
    /// Leaves the group, when all work is done.
    fn leave(&mut self) -> Result<(), String>;
    /// Frees everything, after the breaker.
    fn abort(&mut self);
}

/// The interval at which the watching thread looks.
const WATCH: Duration = Duration::from_millis(20);
/// The interval at which a waiting caller looks.
const POLL: Duration = Duration::from_micros(20);

pub(super) struct Link<T: Transport> {
    shared: Arc<Shared<T>>,
    watch: Option<JoinHandle<()>>,
}

struct Shared<T: Transport> {
    rank: usize,
    world: usize,
    timeout: Duration,
    /// Held during calls, which may be long: the watching thread never waits for it.
    transport: Mutex<T>,
    breaker: Box<dyn Fn() + Send + Sync>,
    /// Held while the breaker runs: nobody aborts the transport meanwhile.
    breaking: Mutex<()>,
    failure: OnceLock<Error>,
    /// Held for moments only. Whoever holds it may not wait for the transport.
    watched: Mutex<Watched<T>>,
    /// Wakes the watching thread when there is nothing left to watch.
    closing: Condvar,
}

struct Watched<T: Transport> {
    call: Option<Limit>,
    pending: VecDeque<(Arc<T::Work>, Limit)>,
    closing: bool,
}

/// A piece of work that has to end, and its deadline.
#[derive(Clone, Copy)]
struct Limit {
    what: &'static str,
    deadline: Instant,
}

impl<T: Transport> Link<T> {
    /// The link over a transport that connects; waits until it is ready.
    ///
    /// # Errors
    /// [`Error::Parallel`].
    pub(super) fn new(transport: T, rank: usize, world: usize, timeout: Duration) -> Result<Self> {
        let breaker = transport.breaker();
        let watched = Watched { call: None, pending: VecDeque::new(), closing: false };
        let shared = Arc::new(Shared {
            rank,
            world,
            timeout,
            transport: Mutex::new(transport),
            breaker,
            breaking: Mutex::new(()),
            failure: OnceLock::new(),
            watched: Mutex::new(watched),
            closing: Condvar::new(),
        });
        let watching = shared.clone();
        let watch = std::thread::Builder::new()
            .name(format!("windrow rank {rank}"))
            .spawn(move || watching.watch())
            .map_err(|e| {
                let error = shared.fail("starting a thread", e.to_string());
                shared.transport().abort();
                error
            })?;
        let link = Link { shared, watch: Some(watch) };
        link.shared.call("connecting", &mut link.shared.transport(), |_| Ok(()))?;
        Ok(link)
    }

    /// Asks the transport for something, then for the work that this put on the device.
    ///
    /// # Errors
    /// [`Error::Parallel`] now and from now on, if the transport does not accept it in time; what
    /// `work` returns.
    pub(super) fn start(
        &self,
        what: &'static str,
        call: impl FnOnce(&mut T) -> Result<(), String>,
        work: impl FnOnce() -> Result<T::Work>,
    ) -> Result<Arc<T::Work>> {
        let mut transport = self.shared.transport();
        let limit = self.shared.call(what, &mut transport, call)?;
        let work = Arc::new(work()?);
        self.shared.watched().pending.push_back((work.clone(), limit));
        Ok(work)
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// [`Error::Parallel`] if that fails or takes too long.
    pub(super) fn finish(&self) -> Result<()> {
        while !self.shared.look()? {
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// A handle for another thread, which can release this one while it waits.
    pub(super) fn handle(&self) -> Handle<T> {
        Handle(self.shared.clone())
    }

    /// Leaves the group: in good order within the time-out, else by aborting. All ranks of a process
    /// have to do this at the same time.
    pub(super) fn close(&mut self) {
        let Some(watch) = self.watch.take() else { return };
        // What failed is kept.
        let _ = self.finish();
        let mut transport = self.shared.transport();
        if self.shared.call("leaving", &mut transport, T::leave).is_err() {
            // The failure is seen before everybody was released.
            drop(self.shared.breaking.lock());
            transport.abort();
        }
        drop(transport);
        self.shared.watched().closing = true;
        self.shared.closing.notify_all();
        // It has nothing to say.
        let _ = watch.join();
    }
}

/// A handle that releases a link from outside.
pub(super) struct Handle<T: Transport>(Arc<Shared<T>>);

impl<T: Transport> Handle<T> {
    /// Fails, because something else in this process did.
    pub(super) fn fail(&self, reason: &str) {
        // The error is kept for the calls that can return it.
        let _ = self.0.fail("working together", reason.to_owned());
    }
}

impl<T: Transport> Drop for Link<T> {
    fn drop(&mut self) {
        self.close();
    }
}

impl<T: Transport> Shared<T> {
    fn transport(&self) -> MutexGuard<'_, T> {
        self.transport.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn watched(&self) -> MutexGuard<'_, Watched<T>> {
        self.watched.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Keeps the error and releases everybody, unless there was a failure before.
    fn fail(&self, what: &str, detail: String) -> Error {
        let (rank, world) = (self.rank, self.world);
        let error = Error::Parallel { rank, world, what: what.into(), detail };
        let _breaking = self.breaking.lock().unwrap_or_else(|e| e.into_inner());
        if self.failure.set(error.clone()).is_ok() {
            (self.breaker)();
        }
        self.failure.get().cloned().unwrap_or(error)
    }

    fn check(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// A call of the transport, to its end. Returns until when its work must be done.
    fn call(
        &self,
        what: &'static str,
        transport: &mut T,
        call: impl FnOnce(&mut T) -> Result<(), String>,
    ) -> Result<Limit> {
        self.check()?;
        let limit = Limit { what, deadline: Instant::now() + self.timeout };
        self.watched().call = Some(limit);
        let mut outcome = call(transport).and_then(|()| transport.is_ready());
        // The watching thread ends this at the deadline.
        while outcome == Ok(false) && self.failure.get().is_none() {
            std::thread::sleep(POLL);
            outcome = transport.is_ready();
        }
        self.watched().call = None;
        outcome.map_err(|e| self.fail(what, e))?;
        self.check().map(|()| limit)
    }

    /// Forgets work that is done, and fails for what should be over. True if nothing is left.
    fn look(&self) -> Result<bool> {
        self.check()?;
        match self.overdue() {
            Ok(left) => Ok(!left),
            Err((what, detail)) => Err(self.fail(what, detail)),
        }
    }

    /// True if work is left; or the error that ended it, and how.
    fn overdue(&self) -> Result<bool, (&'static str, String)> {
        let mut watched = self.watched();
        let in_time = |Limit { what, deadline }| match Instant::now() < deadline {
            true => Ok(()),
            false => Err((what, self.late())),
        };
        watched.call.map_or(Ok(()), in_time)?;
        while let Some((work, limit)) = watched.pending.front() {
            match T::is_done(work).map_err(|e| (limit.what, e))? {
                true => drop(watched.pending.pop_front()),
                false => {
                    in_time(*limit)?;
                    break;
                }
            }
        }
        let Some((_, limit)) = watched.pending.front() else { return Ok(false) };
        // A transport that is in a call speaks for itself.
        if let Ok(mut transport) = self.transport.try_lock() {
            transport.is_ready().map_err(|e| (limit.what, e))?;
        }
        Ok(true)
    }

    fn late(&self) -> String {
        format!("the other ranks did not take part within {} s", self.timeout.as_secs_f64())
    }

    fn watch(&self) {
        let mut watched = self.watched();
        while !watched.closing {
            drop(self.closing.wait_timeout(watched, WATCH).unwrap_or_else(|e| e.into_inner()));
            // The error is kept for the calls that can return it.
            let _ = self.look();
            watched = self.watched();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

    /// A transport that does what a test tells it.
    #[derive(Clone, Default)]
    struct Puppet(Arc<Strings>);

    #[derive(Default)]
    struct Strings {
        busy: AtomicBool,
        broken: AtomicBool,
        slow: AtomicBool,
        breaks: AtomicUsize,
        aborts: AtomicUsize,
        left: AtomicBool,
    }

    impl Strings {
        fn ends(&self) -> [usize; 2] {
            [self.breaks.load(SeqCst), self.aborts.load(SeqCst)]
        }
    }

    type Work = Arc<AtomicBool>;

    impl Transport for Puppet {
        type Work = Work;
        fn is_ready(&mut self) -> Result<bool, String> {
            match self.0.broken.load(SeqCst) {
                true => Err("the other end has gone".into()),
                false => Ok(!self.0.busy.load(SeqCst)),
            }
        }
        fn is_done(work: &Work) -> Result<bool, String> {
            Ok(work.load(SeqCst))
        }
        fn breaker(&self) -> Box<dyn Fn() + Send + Sync> {
            let strings = self.0.clone();
            Box::new(move || {
                if strings.slow.load(SeqCst) {
                    std::thread::sleep(SHORT);
                }
                strings.breaks.fetch_add(1, SeqCst);
            })
        }
        fn leave(&mut self) -> Result<(), String> {
            self.0.left.store(true, SeqCst);
            Ok(())
        }
        fn abort(&mut self) {
            assert_eq!(self.0.breaks.load(SeqCst), 1, "nobody is in a call any more");
            self.0.aborts.fetch_add(1, SeqCst);
        }
    }

    const SHORT: Duration = Duration::from_millis(100);
    const LONG: Duration = Duration::from_secs(600);

    fn link(puppet: &Puppet, timeout: Duration) -> Link<Puppet> {
        Link::new(puppet.clone(), 1, 2, timeout).unwrap()
    }

    fn message(error: Error) -> String {
        assert!(matches!(error, Error::Parallel { rank: 1, world: 2, .. }), "{error:?}");
        error.to_string()
    }

    fn start(link: &Link<Puppet>, work: &Work) -> Result<Arc<Work>> {
        link.start("gathering", |_| Ok(()), || Ok(work.clone()))
    }

    #[test]
    fn work_that_is_done_in_time_is_no_failure() {
        let puppet = Puppet::default();
        let link = link(&puppet, LONG);
        let works = [Work::default(), Work::default()];
        works.iter().for_each(|w| drop(start(&link, w).unwrap()));
        let later = works.clone();
        std::thread::spawn(move || {
            std::thread::sleep(SHORT);
            later.iter().for_each(|w| w.store(true, SeqCst));
        });
        link.finish().unwrap();
        assert!(works.iter().all(|w| w.load(SeqCst)));
        drop(link);
        assert!(puppet.0.left.load(SeqCst));
        assert_eq!(puppet.0.ends(), [0, 0]);
    }

    #[test]
    fn a_connection_that_is_not_made_is_given_up() {
        let puppet = Puppet::default();
        puppet.0.busy.store(true, SeqCst);
        puppet.0.slow.store(true, SeqCst);
        let error = Link::new(puppet.clone(), 1, 2, SHORT).err().unwrap();
        assert!(message(error).contains("connecting"));
        assert_eq!(puppet.0.ends(), [1, 1]);
    }

    #[test]
    fn a_call_that_is_not_accepted_is_given_up() {
        let puppet = Puppet::default();
        let link = link(&puppet, SHORT);
        puppet.0.busy.store(true, SeqCst);
        assert!(message(start(&link, &Work::default()).unwrap_err()).contains("within 0.1 s"));
        puppet.0.busy.store(false, SeqCst);
        assert!(start(&link, &Work::default()).is_err(), "a group that failed stays failed");
    }

    /// A call that only ends when it is broken off.
    fn stuck(puppet: &mut Puppet) -> Result<(), String> {
        while puppet.0.breaks.load(SeqCst) == 0 {
            std::thread::sleep(POLL);
        }
        Err("aborted".into())
    }

    #[test]
    fn a_call_that_blocks_is_broken_off() {
        let puppet = Puppet::default();
        let link = link(&puppet, SHORT);
        let refused = link.start("reducing", stuck, || Ok(Work::default()));
        let text = message(refused.unwrap_err());
        assert!(text.contains("reducing") && text.contains("within 0.1 s"), "{text}");
        drop(link);
        assert_eq!(puppet.0.ends(), [1, 1]);
    }

    /// Work that waits for ranks which do not come makes later calls wait: for room in a queue.
    #[test]
    fn work_that_is_late_ends_a_call_that_blocks() {
        let link = link(&Puppet::default(), 4 * SHORT);
        start(&link, &Work::default()).unwrap();
        std::thread::sleep(2 * SHORT);
        let refused = link.start("reducing", stuck, || Ok(Work::default()));
        assert!(message(refused.unwrap_err()).contains("gathering"));
    }

    /// Nobody calls the link while the work hangs: the thread ends it.
    #[test]
    fn work_that_hangs_is_aborted_while_nobody_asks() {
        let puppet = Puppet::default();
        let link = link(&puppet, SHORT);
        start(&link, &Work::default()).unwrap();
        let patience = Instant::now() + Duration::from_secs(60);
        while puppet.0.breaks.load(SeqCst) == 0 && Instant::now() < patience {
            std::thread::sleep(POLL);
        }
        assert!(message(link.finish().unwrap_err()).contains("gathering"));
        drop(link);
        assert_eq!(puppet.0.ends(), [1, 1]);
        assert!(!puppet.0.left.load(SeqCst));
    }

    #[test]
    fn an_error_of_the_engine_ends_the_wait() {
        let puppet = Puppet::default();
        let link = link(&puppet, LONG);
        start(&link, &Work::default()).unwrap();
        puppet.0.broken.store(true, SeqCst);
        assert!(message(link.finish().unwrap_err()).contains("has gone"));
    }

    #[test]
    fn a_refused_call_is_a_failure() {
        let link = link(&Puppet::default(), LONG);
        let refused = link.start("reducing", |_| Err("bad size".into()), || Ok(Work::default()));
        let text = message(refused.unwrap_err());
        assert!(text.contains("reducing") && text.contains("bad size"), "{text}");
    }

    /// Another rank of the process fails while this one's call is in progress or blocks, or its work
    /// hangs.
    #[test]
    fn a_failure_elsewhere_reaches_a_link_that_waits() {
        for (busy, blocks) in [(true, false), (false, true), (false, false)] {
            let puppet = Puppet::default();
            let link = link(&puppet, LONG);
            puppet.0.busy.store(busy, SeqCst);
            std::thread::scope(|s| {
                let waiting = s.spawn(|| {
                    let call = |p: &mut Puppet| if blocks { stuck(p) } else { Ok(()) };
                    link.start("gathering", call, || Ok(Work::default()))?;
                    link.finish()
                });
                std::thread::sleep(SHORT);
                link.handle().fail("rank 0: no memory");
                let text = message(waiting.join().unwrap().unwrap_err());
                assert!(text.contains("no memory"), "{text}");
            });
            drop(link);
            assert_eq!(puppet.0.ends(), [1, 1]);
        }
    }

    /// The first failure is told, whoever comes later.
    #[test]
    fn the_first_failure_is_kept() {
        let puppet = Puppet::default();
        let link = link(&puppet, LONG);
        link.handle().fail("rank 0: no memory");
        link.handle().fail("rank 2: no memory");
        for _ in 0..2 {
            assert!(message(link.finish().unwrap_err()).contains("rank 0: no memory"));
            assert!(message(start(&link, &Work::default()).unwrap_err()).contains("rank 0"));
        }
        assert_eq!(puppet.0.breaks.load(SeqCst), 1);
    }
}
