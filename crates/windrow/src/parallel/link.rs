//! One rank's connection with the others, under a deadline.
//!
//! Whatever is asked of the engine happens soon or not at all: the call must be accepted and its
//! work be done within the time-out. A thread of the link watches the work, so that a caller who
//! waits for a stream (and not for the link) is released as well. The first failure aborts the
//! engine, is kept, and answers every later call.

use crate::{Error, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What does the communicating: NCCL, or a test's puppet. Errors are its own words.
pub(super) trait Engine: Send + 'static {
    /// A piece of work on the device.
    type Work: Send + Sync + 'static;
    /// False while the latest call is in progress.
    fn is_ready(&mut self) -> Result<bool, String>;
    /// True once the work is done.
    fn is_done(work: &Self::Work) -> Result<bool, String>;
    /// Begins to leave the group in good order; done when ready.
    fn finalize(&mut self) -> Result<(), String>;
    /// Releases what was finalized.
    fn destroy(&mut self);
    /// Stops work under way, and releases everything at once.
    fn abort(&mut self);
}

/// How often the watching thread looks.
const WATCH: Duration = Duration::from_millis(20);
/// How often a waiting caller looks.
const POLL: Duration = Duration::from_micros(20);
/// How long a call may be in progress before its caller sleeps: one that needs no new connection is
/// accepted within this time, and a sleep lasts several times as long.
const PROMPT: Duration = Duration::from_micros(200);

pub(super) struct Link<E: Engine> {
    shared: Arc<Shared<E>>,
    watch: Option<JoinHandle<()>>,
}

struct Shared<E: Engine> {
    rank: usize,
    world: usize,
    timeout: Duration,
    state: Mutex<State<E>>,
    changed: Condvar,
    /// Why somebody else in this process wants the link to fail; seen also while the state is held.
    doom: OnceLock<String>,
}

struct State<E: Engine> {
    engine: E,
    pending: VecDeque<Pending<E>>,
    failure: Option<Error>,
    closing: bool,
}

struct Pending<E: Engine> {
    work: Arc<E::Work>,
    deadline: Instant,
    what: &'static str,
}

impl<E: Engine> Link<E> {
    /// Takes an engine whose connection is being made, and waits until it is.
    ///
    /// # Errors
    /// [`Error::Parallel`].
    pub(super) fn new(engine: E, rank: usize, world: usize, timeout: Duration) -> Result<Self> {
        let state = State { engine, pending: VecDeque::new(), failure: None, closing: false };
        let shared = Arc::new(Shared {
            rank,
            world,
            timeout,
            state: Mutex::new(state),
            changed: Condvar::new(),
            doom: OnceLock::new(),
        });
        shared.until_ready(&mut shared.lock(), "connecting")?;
        let watched = shared.clone();
        let watch = std::thread::Builder::new()
            .name(format!("windrow rank {rank}"))
            .spawn(move || watched.watch())
            .map_err(|e| shared.fail(&mut shared.lock(), "starting a thread", e.to_string()))?;
        Ok(Link { shared, watch: Some(watch) })
    }

    /// Asks the engine for something, then for the work that this put on the device.
    ///
    /// # Errors
    /// [`Error::Parallel`] now and from now on, if the engine does not accept it in time; what
    /// `work` returns.
    pub(super) fn start(
        &self,
        what: &'static str,
        call: impl FnOnce(&mut E) -> Result<(), String>,
        work: impl FnOnce() -> Result<E::Work>,
    ) -> Result<Arc<E::Work>> {
        let shared = &*self.shared;
        let mut state = shared.lock();
        shared.check(&mut state)?;
        call(&mut state.engine).map_err(|e| shared.fail(&mut state, what, e))?;
        shared.until_ready(&mut state, what)?;
        let work = Arc::new(work()?);
        let deadline = Instant::now() + shared.timeout;
        state.pending.push_back(Pending { work: work.clone(), deadline, what });
        shared.changed.notify_all();
        Ok(work)
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// [`Error::Parallel`] if that fails or takes too long.
    pub(super) fn finish(&self) -> Result<()> {
        loop {
            let mut state = self.shared.lock();
            self.shared.advance(&mut state)?;
            if state.pending.is_empty() {
                return Ok(());
            }
            drop(state);
            std::thread::sleep(POLL);
        }
    }

    /// For another thread, to abort while this one waits.
    pub(super) fn handle(&self) -> Handle<E> {
        Handle(self.shared.clone())
    }

    /// Leaves the group: in good order within the time-out, else by aborting. All ranks of a process
    /// have to do this at the same time.
    pub(super) fn close(&mut self) {
        let _ = self.finish();
        let shared = &*self.shared;
        let mut state = shared.lock();
        if state.failure.is_none() {
            let finalized =
                state.engine.finalize().map_err(|e| shared.fail(&mut state, "leaving", e));
            if finalized.and_then(|()| shared.until_ready(&mut state, "leaving")).is_ok() {
                state.engine.destroy();
            }
        }
        state.closing = true;
        shared.changed.notify_all();
        drop(state);
        if let Some(watch) = self.watch.take() {
            // It has nothing to say.
            let _ = watch.join();
        }
    }
}

/// Lets go of a link from outside.
pub(super) struct Handle<E: Engine>(Arc<Shared<E>>);

impl<E: Engine> Handle<E> {
    /// Aborts, because something else in this process failed.
    pub(super) fn fail(&self, reason: &str) {
        let _ = self.0.doom.set(reason.to_owned());
        // The error is kept for the calls that can return it.
        let _ = self.0.check(&mut self.0.lock());
    }
}

impl<E: Engine> Drop for Link<E> {
    fn drop(&mut self) {
        if self.watch.is_some() {
            self.close();
        }
    }
}

impl<E: Engine> Shared<E> {
    fn lock(&self) -> MutexGuard<'_, State<E>> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Aborts the engine and keeps the error, unless there is one already.
    fn fail(&self, state: &mut State<E>, what: &str, detail: String) -> Error {
        if state.failure.is_none() {
            state.engine.abort();
            state.pending.clear();
        }
        let (rank, world) = (self.rank, self.world);
        let error = Error::Parallel { rank, world, what: what.into(), detail };
        self.changed.notify_all();
        state.failure.get_or_insert(error).clone()
    }

    fn check(&self, state: &mut State<E>) -> Result<()> {
        if let Some(error) = &state.failure {
            return Err(error.clone());
        }
        match self.doom.get() {
            Some(reason) => Err(self.fail(state, "working together", reason.clone())),
            None => Ok(()),
        }
    }

    fn until_ready(&self, state: &mut State<E>, what: &'static str) -> Result<()> {
        let start = Instant::now();
        loop {
            self.check(state)?;
            match state.engine.is_ready() {
                Ok(true) => return Ok(()),
                Ok(false) if start.elapsed() < PROMPT => std::thread::yield_now(),
                Ok(false) if start.elapsed() < self.timeout => std::thread::sleep(POLL),
                Ok(false) => return Err(self.fail(state, what, self.late())),
                Err(e) => return Err(self.fail(state, what, e)),
            }
        }
    }

    fn late(&self) -> String {
        format!("the other ranks did not take part within {} s", self.timeout.as_secs_f64())
    }

    /// Forgets work that is done; fails for work that never will be.
    fn advance(&self, state: &mut State<E>) -> Result<()> {
        self.check(state)?;
        while let Some(Pending { work, deadline, what }) = state.pending.front() {
            let (what, late) = (*what, Instant::now() >= *deadline);
            match E::is_done(work) {
                Ok(true) => state.pending.pop_front(),
                Ok(false) if late => return Err(self.fail(state, what, self.late())),
                Ok(false) => {
                    return match state.engine.is_ready() {
                        Ok(_) => Ok(()),
                        Err(e) => Err(self.fail(state, what, e)),
                    };
                }
                Err(e) => return Err(self.fail(state, what, e)),
            };
        }
        Ok(())
    }

    fn watch(&self) {
        let mut state = self.lock();
        while !state.closing {
            state = if state.pending.is_empty() {
                self.changed.wait(state).unwrap_or_else(|e| e.into_inner())
            } else {
                self.changed.wait_timeout(state, WATCH).unwrap_or_else(|e| e.into_inner()).0
            };
            // The error is kept for the calls that can return it.
            let _ = self.advance(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

    /// An engine that does what a test tells it.
    #[derive(Clone, Default)]
    struct Puppet(Arc<Strings>);

    #[derive(Default)]
    struct Strings {
        busy: AtomicBool,
        broken: AtomicBool,
        aborts: AtomicUsize,
        destroyed: AtomicBool,
    }

    type Work = Arc<AtomicBool>;

    impl Engine for Puppet {
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
        fn finalize(&mut self) -> Result<(), String> {
            Ok(())
        }
        fn destroy(&mut self) {
            self.0.destroyed.store(true, SeqCst);
        }
        fn abort(&mut self) {
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
        assert!(puppet.0.destroyed.load(SeqCst));
        assert_eq!(puppet.0.aborts.load(SeqCst), 0);
    }

    #[test]
    fn a_connection_that_is_not_made_is_given_up() {
        let puppet = Puppet::default();
        puppet.0.busy.store(true, SeqCst);
        let error = Link::new(puppet.clone(), 1, 2, SHORT).err().unwrap();
        assert!(message(error).contains("connecting"));
        assert_eq!(puppet.0.aborts.load(SeqCst), 1);
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

    /// Nobody calls the link while the work hangs: the thread aborts it.
    #[test]
    fn work_that_hangs_is_aborted_while_nobody_asks() {
        let puppet = Puppet::default();
        let link = link(&puppet, SHORT);
        start(&link, &Work::default()).unwrap();
        let patience = Instant::now() + Duration::from_secs(60);
        while puppet.0.aborts.load(SeqCst) == 0 && Instant::now() < patience {
            std::thread::sleep(POLL);
        }
        assert!(message(link.finish().unwrap_err()).contains("gathering"));
        drop(link);
        assert_eq!(puppet.0.aborts.load(SeqCst), 1);
        assert!(!puppet.0.destroyed.load(SeqCst));
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

    /// Another rank of the process fails while this one's call is in progress, or its work hangs.
    #[test]
    fn doom_reaches_a_link_that_waits() {
        for busy in [true, false] {
            let puppet = Puppet::default();
            let link = link(&puppet, LONG);
            puppet.0.busy.store(busy, SeqCst);
            std::thread::scope(|s| {
                let waiting = s.spawn(|| {
                    start(&link, &Work::default())?;
                    link.finish()
                });
                std::thread::sleep(SHORT);
                link.handle().fail("rank 0: no memory");
                let text = message(waiting.join().unwrap().unwrap_err());
                assert!(text.contains("no memory"), "{text}");
            });
            assert_eq!(puppet.0.aborts.load(SeqCst), 1);
        }
    }
}
