//! Splitting work over threads.
//!
//! The caller and its helper threads take tasks until none is left. Each thread starts with its own share and then
//! steals from the others'. A helper that starts late or not at all costs only speed, because the caller waits for
//! tasks that have started, not for helpers to start. If [`use_team`] set a team of threads, the caller waits until all
//! of the team have returned, but not inside of [`with_team`](super::with_team). While it waits, it runs no other jobs
//! of the rayon pool.

use super::float_mode::FloatMode;
use super::{crew, pool};
use std::any::Any;
use std::cell::Cell;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock};

/// The maximum number of threads of a plan. There is a limit because each thread may need scratch memory of its own.
pub(crate) const MAX_THREADS: usize = 1024;

/// The minimum number of threads for which the bandwidth of the last-level cache limits each of them.
pub(crate) const MANY_THREADS: usize = 8;

/// True if this process can run at least [`MANY_THREADS`] threads. It does not depend on the plan's thread count,
/// because it selects between algorithms that round differently, and results must not change with that count.
pub(crate) fn has_many_cores() -> bool {
    static MANY: LazyLock<bool> = LazyLock::new(|| {
        std::thread::available_parallelism().is_ok_and(|cores| cores.get() >= MANY_THREADS)
    });
    *MANY
}

/// The default number of threads of a plan. It is the value of `WINDROW_NUM_THREADS` if that is set. Otherwise it is
/// the size of the caller's rayon pool, or else of rayon's global pool. It is 1 if there is no pool.
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

/// The number of threads for `PlanOptions::threads`: the given number or [`num_threads`], at most [`MAX_THREADS`].
pub(crate) fn resolve_threads(option: Option<NonZeroUsize>) -> usize {
    option.map_or_else(num_threads, NonZeroUsize::get).min(MAX_THREADS)
}

/// A function that calls the closure once on each thread of a team, the caller included, and returns after all of these
/// calls. The team may have any size, and a different size in each call. The caller runs the tasks that the team has
/// not run.
pub type Team = fn(&(dyn Fn() + Sync));

static TEAM: OnceLock<Team> = OnceLock::new();

/// Sets the function by which this process runs all later parallel work, instead of rayon. Only the first call has an
/// effect.
///
/// This is for programs whose other thread pool spins while idle, as OpenMP runtimes do: rayon's threads would compete
/// with the spinning ones for the cores.
pub fn use_team(team: Team) {
    // Later calls are ignored.
    let _ = TEAM.set(team);
}

/// The team of [`use_team`].
pub(super) fn team() -> Option<Team> {
    TEAM.get().copied()
}

/// Calls `task(i)` for every `i` in `0..tasks`, on at most `threads` threads of which the caller is one. Each thread
/// begins with its own contiguous share of the tasks, in order. Calls of the same sizes have the same shares, so that a
/// thread finds in its cache what it wrote in the call before. A thread that finishes its share takes tasks from the
/// others' shares, so a late thread delays nothing but its own tasks. With one thread or one task only the caller runs.
///
/// Other threads come from [`use_team`] if a team was set, otherwise from the rayon pool that the caller is in or from
/// rayon's global one. Without the feature `threads` they come only from [`use_team`].
///
/// # Panics
/// If a task panics, with the payload of the first panic. Tasks that had not started are skipped.
pub(crate) fn parallel_for(threads: usize, tasks: usize, task: impl Fn(usize) + Sync) {
    parallel_for_workers(threads, tasks, |_, i| task(i));
}

/// Runs tasks as [`parallel_for`] does, and calls `task(worker, i)`. No two tasks with the same `worker < min(threads,
/// tasks)` run at the same time, so each worker can own scratch memory. The caller is worker 0. All tasks run with the
/// caller's floating-point mode (rounding, flush-to-zero).
pub(crate) fn parallel_for_workers(
    threads: usize,
    tasks: usize,
    task: impl Fn(usize, usize) + Sync,
) {
    let helpers = threads.min(tasks).min(MAX_THREADS).saturating_sub(1);
    if helpers == 0 {
        (0..tasks).for_each(|i| task(0, i));
        return;
    }
    let shares = Shares::new(helpers + 1, tasks);
    let mode = FloatMode::current();
    let panicked = Mutex::new(None);
    let work = || {
        let Some(worker) = shares.claim() else { return };
        let _mode = mode.enter();
        let tasks = || shares.tasks(worker).for_each(|i| task(worker, i));
        if let Err(payload) = catch_unwind(AssertUnwindSafe(tasks)) {
            shares.stop();
            lock(&panicked).get_or_insert(payload);
        }
    };
    if !crew::run(&work) {
        match team() {
            Some(team) => on_team(team, &work),
            None => pool::run(helpers, &work),
        }
    }
    let panicked: Option<Box<dyn Any + Send>> = lock(&panicked).take();
    if let Some(payload) = panicked {
        resume_unwind(payload);
    }
}

/// The guard of a mutex, poisoned or not. Poisoning can be ignored because no code here panics while it holds the lock.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Calls `work` on each thread of the team. Then runs the remaining tasks on the current thread.
fn on_team(team: Team, work: &(dyn Fn() + Sync)) {
    team(work);
    // The team has returned, and so have all its calls of `work`. No thread can still use the closure.
    work();
}

thread_local! {
    /// The worker index that this thread had when it last helped another thread; 0 if it never did.
    static WORKER: Cell<usize> = const { Cell::new(0) };
}

/// An identifier of this thread, unique among the threads that are alive.
pub(super) fn this_thread() -> usize {
    WORKER.with(|worker| std::ptr::from_ref(worker).addr())
}

/// The maximum number of shares of a call. If there are more workers, several begin with the same share. The limit
/// keeps the shares on the stack.
const MOST_SHARES: usize = 32;

/// The tasks of a call, shared out to its workers.
struct Shares {
    /// The shares; those after the first `count` are empty.
    shares: [Share; MOST_SHARES],
    count: usize,
    workers: usize,
    /// A bit for each worker, set when a thread has claimed that worker index.
    claimed: [AtomicU64; MAX_THREADS / 64],
    caller: usize,
}

/// The remaining tasks of a share, in a cache line of its own.
#[repr(align(64))]
struct Share {
    next: AtomicUsize,
    end: usize,
}

impl Shares {
    /// Shares of `tasks` tasks for at most [`MAX_THREADS`] workers.
    fn new(workers: usize, tasks: usize) -> Self {
        let count = workers.min(MOST_SHARES);
        let (size, rest) = (tasks / count, tasks % count);
        let start = |i: usize| if i < count { i * size + i.min(rest) } else { tasks };
        let share = |i| Share { next: AtomicUsize::new(start(i)), end: start(i + 1) };
        Shares {
            shares: std::array::from_fn(share),
            count,
            workers,
            // Only the bit of the caller, worker 0, is set.
            claimed: std::array::from_fn(|i| AtomicU64::new(u64::from(i == 0))),
            caller: this_thread(),
        }
    }

    /// The worker index of this thread, or `None` if all are taken. It is 0 for the caller. Another thread gets the
    /// index that it had last time if that is free, otherwise the lowest free one.
    fn claim(&self) -> Option<usize> {
        if this_thread() == self.caller {
            return Some(0);
        }
        let last = WORKER.get();
        let claim = |&worker: &usize| {
            let bit = 1 << (worker % 64);
            worker < self.workers
                && self.claimed[worker / 64].fetch_or(bit, Ordering::Relaxed) & bit == 0
        };
        let worker = std::iter::once(last).chain(1..self.workers).find(claim)?;
        // Keep the remembered index if this call has too few workers for it.
        if last < self.workers {
            WORKER.set(worker);
        }
        Some(worker)
    }

    /// Tasks that have not begun: the worker's own, then those of the workers after it.
    fn tasks(&self, worker: usize) -> impl Iterator<Item = usize> {
        let (before, after) = self.shares[..self.count].split_at(worker % self.count);
        after.iter().chain(before).flat_map(|share| std::iter::from_fn(|| share.take()))
    }

    /// Skips all tasks that have not started.
    fn stop(&self) {
        for share in &self.shares {
            share.next.store(usize::MAX / 2, Ordering::Relaxed);
        }
    }
}

impl Share {
    fn take(&self) -> Option<usize> {
        // An empty share is only read. So threads that look for work do not invalidate each other's cache line.
        if self.next.load(Ordering::Relaxed) >= self.end {
            return None;
        }
        let i = self.next.fetch_add(1, Ordering::Relaxed);
        (i < self.end).then_some(i)
    }
}

/// A pointer that tasks on several threads write through, each to its own part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendPtr<T>(pub *mut T);

// SAFETY: whoever dereferences it promises that no two threads touch the same element.
unsafe impl<T> Send for SendPtr<T> {}
// SAFETY: a shared reference gives only a copy of the pointer; whoever dereferences that is responsible.
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
        for (threads, tasks) in
            [(1, 5), (2, 0), (2, 1), (2, 1000), (8, 3), (64, 1000), (MAX_THREADS, 5000)]
        {
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

    /// A team of three threads: two new ones and the caller.
    fn three(work: &(dyn Fn() + Sync)) {
        std::thread::scope(|scope| {
            scope.spawn(work);
            scope.spawn(work);
            work();
        });
    }

    #[test]
    fn team_of_any_size() {
        for (team, workers, called) in [
            (three as Team, 2, 2),
            (three, 3, 3),
            (three, 8, 3),
            ((|work| work()) as Team, 8, 1),
            ((|_| {}) as Team, 8, 0),
        ] {
            let shares = Shares::new(workers, workers);
            let counts: Vec<AtomicUsize> = (0..workers).map(|_| AtomicUsize::new(0)).collect();
            on_team(team, &|| {
                if let Some(worker) = shares.claim() {
                    counts[worker].fetch_add(1, Ordering::Relaxed);
                }
            });
            let counts: Vec<usize> = counts.into_iter().map(AtomicUsize::into_inner).collect();
            // The caller finishes as worker 0.
            let expected = |i| usize::from(i < called) + usize::from(i == 0);
            assert!(counts.iter().enumerate().all(|(i, &c)| c == expected(i)), "{counts:?}");
        }
    }

    #[test]
    fn shares_are_contiguous_and_even() {
        for (workers, tasks) in [(2, 2), (2, 7), (3, 3), (3, 100), (16, 50), (32, 33), (100, 128)] {
            let shares = Shares::new(workers, tasks);
            let count = workers.min(MOST_SHARES);
            let mut at = 0;
            for share in &shares.shares[..count] {
                assert_eq!(share.next.load(Ordering::Relaxed), at);
                assert!((tasks / count..=tasks.div_ceil(count)).contains(&(share.end - at)));
                at = share.end;
            }
            assert_eq!(at, tasks);
            let all: Vec<usize> = shares.tasks(workers - 1).collect();
            assert_eq!(all.len(), tasks);
        }
    }

    #[test]
    fn who_is_done_takes_from_the_others() {
        let shares = Shares::new(3, 10);
        let mut first = shares.tasks(1);
        assert_eq!(first.next(), Some(4));
        assert_eq!(shares.tasks(0).take(5).collect::<Vec<_>>(), [0, 1, 2, 3, 5]);
        assert_eq!(first.collect::<Vec<_>>(), [6, 7, 8, 9]);
        assert_eq!(shares.tasks(2).next(), None);

        let shares = Shares::new(2, 6);
        assert_eq!(shares.tasks(1).next(), Some(3));
        shares.stop();
        assert_eq!(shares.tasks(0).chain(shares.tasks(1)).next(), None);
    }

    #[test]
    fn a_thread_is_the_same_worker_again() {
        let calls: Vec<Shares> = [3, 3, 2, 3].map(|workers| Shares::new(workers, 9)).into();
        assert_eq!(calls[0].claim(), Some(0));
        let calls = &calls;
        std::thread::scope(|scope| {
            // The two threads claim one after the other; in the second call their order is reversed.
            let (to_other, from_first) = std::sync::mpsc::channel();
            let (to_first, from_other) = std::sync::mpsc::channel();
            scope.spawn(move || {
                assert_eq!(calls[0].claim(), Some(1));
                to_other.send(()).unwrap();
                from_other.recv().unwrap();
                assert_eq!(calls[1].claim(), Some(1));
                assert_eq!(calls[3].claim(), Some(1));
            });
            scope.spawn(move || {
                from_first.recv().unwrap();
                assert_eq!(calls[0].claim(), Some(2));
                assert_eq!(calls[1].claim(), Some(2));
                // There is no worker 2, and 1 is free.
                assert_eq!(calls[2].claim(), Some(1));
                assert_eq!(calls[3].claim(), Some(2));
                to_first.send(()).unwrap();
            });
        });
        assert_eq!(calls[3].claim(), Some(0));
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

    #[cfg(feature = "threads")]
    #[test]
    fn tasks_run_in_the_callers_mode() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let before = FloatMode::current();
        pool.install(|| {
            for mode in [before, before.flushing(), before] {
                let (both, modes) = (std::sync::Barrier::new(2), Mutex::new(Vec::new()));
                let entered = mode.enter();
                parallel_for(2, 2, |_| {
                    both.wait();
                    lock(&modes).push(FloatMode::current());
                });
                drop(entered);
                assert_eq!(modes.into_inner().unwrap(), [mode; 2]);
            }
            let panic = std::panic::catch_unwind(|| {
                let both = std::sync::Barrier::new(2);
                let _entered = before.flushing().enter();
                parallel_for(2, 2, |_| {
                    both.wait();
                    panic!("on both threads");
                });
            });
            assert!(panic.is_err());
        });
        // Threads that helped have their own mode again.
        assert_eq!(pool.broadcast(|_| FloatMode::current()), [before; 2]);
    }

    #[test]
    fn one_thread_stays_with_the_caller() {
        let caller = std::thread::current().id();
        parallel_for(1, 10, |_| assert_eq!(std::thread::current().id(), caller));
    }
}
