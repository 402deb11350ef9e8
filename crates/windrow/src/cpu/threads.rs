//! Splitting work over threads.
//!
//! The caller takes tasks as long as there are any, helpers beside it. Whoever does not come, comes late or
//! ends early costs only speed: the caller waits for tasks that have begun, never for a thread to arrive,
//! and runs nothing but its own tasks meanwhile.

use super::pool;
use std::any::Any;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock};

/// Most threads that a plan uses, however many it is given: each may own scratch memory.
pub(crate) const MAX_THREADS: usize = 1024;

/// How many threads a plan uses unless told otherwise: the environment variable
/// `WINDROW_NUM_THREADS`, else the size of the rayon pool that the caller is in, else the number
/// of cores; 1 if no threads can be started, and without the feature `threads`.
pub fn num_threads() -> usize {
    static FROM_ENV: LazyLock<Option<usize>> = LazyLock::new(|| {
        let value = std::env::var("WINDROW_NUM_THREADS").ok()?;
        match value.parse() {
            Ok(n) if n > 0 => Some(n),
            _ => {
                tracing::warn!("WINDROW_NUM_THREADS={value} is not a positive number; ignored");
                None
            }
        }
    });
    FROM_ENV.or_else(pool::size).unwrap_or(1)
}

/// The number of threads that a plan's option means.
pub(crate) fn resolve_threads(option: Option<NonZeroUsize>) -> usize {
    option.map_or_else(num_threads, NonZeroUsize::get).min(MAX_THREADS)
}

/// Calls the closure once on each thread of a group of which the caller is one, and returns when
/// all calls have. The group may be of any size, and of another at each time. What a team leaves undone,
/// its caller does.
pub type Team = fn(&(dyn Fn() + Sync));

static TEAM: OnceLock<Team> = OnceLock::new();

/// Takes threads from another library for all work of this process that is split from now on,
/// instead of from rayon; the first call counts.
///
/// For a library which keeps its threads waiting in a loop, as OpenMP's runtimes do: ours would have to
/// share the cores with those.
pub fn use_team(team: Team) {
    // A second team would be no better than the first.
    let _ = TEAM.set(team);
}

/// Calls `task(i)` for every `i` in `0..tasks`, on at most `threads` threads of which the caller
/// is one. Tasks are handed out one at a time in order, so a late thread costs nothing but its
/// share. With one thread or one task nothing but the caller runs.
///
/// Other threads come from [`use_team`], else from the rayon pool that the caller is in, or from
/// rayon's global one. Without the feature `threads` there is only a team.
///
/// # Panics
/// With what the first task that panicked was stopped by; tasks that had not begun then are left out.
pub(crate) fn parallel_for(threads: usize, tasks: usize, task: impl Fn(usize) + Sync) {
    parallel_for_workers(threads, tasks, |_, i| task(i));
}

/// As [`parallel_for`], calling `task(worker, i)`: no two tasks with the same
/// `worker < min(threads, tasks)` run at the same time, so that each worker can own scratch memory.
pub(crate) fn parallel_for_workers(
    threads: usize,
    tasks: usize,
    task: impl Fn(usize, usize) + Sync,
) {
    let helpers = threads.min(tasks).saturating_sub(1);
    if helpers == 0 {
        (0..tasks).for_each(|i| task(0, i));
        return;
    }
    let next = AtomicUsize::new(0);
    let panicked = Mutex::new(None);
    let work = |worker| {
        let tasks = || {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= tasks {
                    break;
                }
                task(worker, i);
            }
        };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(tasks)) {
            next.store(usize::MAX / 2, Ordering::Relaxed);
            lock(&panicked).get_or_insert(payload);
        }
    };
    match TEAM.get() {
        Some(team) => on_team(*team, helpers + 1, &work),
        None => pool::run(helpers, &work),
    }
    let panicked: Option<Box<dyn Any + Send>> = lock(&panicked).take();
    if let Some(payload) = panicked {
        resume_unwind(payload);
    }
}

/// Nothing of ours panics while it holds one of these locks.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Calls `work` with each of `0..workers` on another thread of the team, as far as it has threads; what
/// is left then is done here.
fn on_team(team: Team, workers: usize, work: &(dyn Fn(usize) + Sync)) {
    let arrived = AtomicUsize::new(0);
    team(&|| {
        let worker = arrived.fetch_add(1, Ordering::Relaxed);
        if worker < workers {
            work(worker);
        }
    });
    // All calls of the team have returned: its closure cannot outlive them.
    work(0);
}

/// A pointer that tasks on several threads write through, each to its own part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendPtr<T>(pub *mut T);

// SAFETY: whoever dereferences it promises that no two threads touch the same element.
unsafe impl<T> Send for SendPtr<T> {}
// SAFETY: sharing it gives no more than a copy does, and that is up to whoever dereferences it.
unsafe impl<T> Sync for SendPtr<T> {}

impl<T> SendPtr<T> {
    /// The pointer; a method, so that closures capture the whole `SendPtr`.
    #[inline(always)]
    pub(crate) fn get(self) -> *mut T {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for (threads, tasks) in [(1, 5), (2, 0), (2, 1), (2, 1000), (8, 3), (64, 1000)] {
            let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            parallel_for(threads, tasks, |i| {
                counts[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn workers_do_not_overlap() {
        let busy: Vec<AtomicUsize> = (0..3).map(|_| AtomicUsize::new(0)).collect();
        parallel_for_workers(3, 200, |worker, _| {
            assert_eq!(busy[worker].fetch_add(1, Ordering::SeqCst), 0);
            std::thread::yield_now();
            busy[worker].fetch_sub(1, Ordering::SeqCst);
        });
    }

    #[test]
    fn team_of_any_size() {
        fn three(work: &(dyn Fn() + Sync)) {
            std::thread::scope(|scope| {
                scope.spawn(work);
                scope.spawn(work);
                work();
            });
        }
        for (team, workers, called) in [
            (three as Team, 2, 2),
            (three, 3, 3),
            (three, 8, 3),
            ((|work| work()) as Team, 8, 1),
            ((|_| {}) as Team, 8, 0),
        ] {
            let counts: Vec<AtomicUsize> = (0..workers).map(|_| AtomicUsize::new(0)).collect();
            on_team(team, workers, &|worker| {
                counts[worker].fetch_add(1, Ordering::Relaxed);
            });
            let counts: Vec<usize> = counts.into_iter().map(AtomicUsize::into_inner).collect();
            // The caller finishes as worker 0.
            let expected = |i| usize::from(i < called) + usize::from(i == 0);
            assert!(counts.iter().enumerate().all(|(i, &c)| c == expected(i)), "{counts:?}");
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_next_call_works() {
        for threads in [1, 4] {
            let panic = std::panic::catch_unwind(|| {
                parallel_for(threads, 100, |i| assert!(i != 37, "task {i}"));
            });
            let message = *panic.unwrap_err().downcast::<String>().unwrap();
            assert!(message.contains("task 37"), "{message}");
            let done = AtomicUsize::new(0);
            parallel_for(threads, 100, |_| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.into_inner(), 100);
        }
    }

    #[test]
    fn one_thread_stays_with_the_caller() {
        let caller = std::thread::current().id();
        parallel_for(1, 10, |_| assert_eq!(std::thread::current().id(), caller));
    }
}
