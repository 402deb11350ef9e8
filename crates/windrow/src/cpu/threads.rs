//! Splitting work over threads.
//!
//! The caller takes tasks as long as there are any, helpers beside it. Whoever does not come, comes late or
//! ends early costs only speed: the caller waits for tasks that have begun, never for a thread to arrive,
//! and runs nothing but its own tasks meanwhile.

use std::any::Any;
use std::cell::OnceCell;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock};

/// Most threads that a plan uses, however many it is given: each may own scratch memory.
pub(crate) const MAX_THREADS: usize = 1024;

/// How many threads a plan uses unless told otherwise: the environment variable
/// `WINDROW_NUM_THREADS`, else the size of the rayon pool that the caller is in, else the number
/// of cores; 1 if no threads can be started.
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
    FROM_ENV.unwrap_or_else(|| if has_pool() { rayon::current_num_threads() } else { 1 })
}

/// The number of threads that a plan's option means.
pub(crate) fn resolve_threads(option: Option<NonZeroUsize>) -> usize {
    option.map_or_else(num_threads, NonZeroUsize::get).min(MAX_THREADS)
}

/// Whether the caller is in a rayon pool or there is a global one. Asking for one that cannot start its
/// threads would panic.
fn has_pool() -> bool {
    static GLOBAL: LazyLock<bool> = LazyLock::new(|| {
        // Refused without a source if there is one already.
        let refused = rayon::ThreadPoolBuilder::new().build_global().err();
        let cause = refused.as_ref().and_then(std::error::Error::source);
        if let Some(cause) = cause {
            tracing::warn!(%cause, "no threads can be started; work stays on the caller's");
        }
        cause.is_none()
    });
    rayon::current_thread_index().is_some() || *GLOBAL
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
/// rayon's global one.
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
        None if has_pool() => on_rayon(helpers, &work),
        None => work(0),
    }
    let panicked: Option<Box<dyn Any + Send>> = lock(&panicked).take();
    if let Some(payload) = panicked {
        resume_unwind(payload);
    }
}

/// Nothing of ours panics while it holds one of these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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

/// Where helpers enter as long as the caller is at work.
struct Gate {
    state: Mutex<GateState>,
    left: Condvar,
}

struct GateState {
    /// `None` once the caller waits for the helpers inside to leave.
    work: Option<Work>,
    inside: usize,
}

/// The caller's closure, whose lifetime the gate keeps.
#[derive(Clone, Copy)]
struct Work(*const (dyn Fn(usize) + Sync));

// SAFETY: what it points to may be called from any thread.
unsafe impl Send for Work {}

impl Gate {
    /// Calls the work with `worker` if the gate is still open.
    fn enter(&self, worker: usize) {
        let work = {
            let mut state = lock(&self.state);
            let Some(work) = state.work else { return };
            state.inside += 1;
            work
        };
        // SAFETY: `on_rayon` does not return before `inside` is 0 again, and the closure lives as long as that
        // call. It does not panic: it keeps the panics of tasks.
        unsafe { (*work.0)(worker) };
        let mut state = lock(&self.state);
        state.inside -= 1;
        if state.inside == 0 {
            self.left.notify_all();
        }
    }

    /// Lets nobody in any more and waits until nobody is inside.
    fn close(&self) {
        lock(&self.state).work = None;
        // A task takes some microseconds, falling asleep and waking up more.
        for _ in 0..SPINS {
            if lock(&self.state).inside == 0 {
                return;
            }
            (0..32).for_each(|_| std::hint::spin_loop());
        }
        let state = lock(&self.state);
        drop(self.left.wait_while(state, |state| state.inside > 0));
    }
}

/// Looks at a gate before its caller falls asleep: about 50 microseconds.
const SPINS: usize = 64;

/// Calls that one thread has asked rayon for and that no thread has taken yet, at most. Where nobody takes
/// them (all are busy with loops of their own) they would pile up.
const MOST_WAITING: usize = 4 * MAX_THREADS;

thread_local! {
    static WAITING: OnceCell<Arc<AtomicUsize>> = const { OnceCell::new() };
}

/// Calls `work(0)`, and `work` with each of `1..=helpers` on the threads of rayon's pool that have nothing
/// else to do.
///
/// Unlike rayon's scopes this never runs a foreign job on the caller's thread while it waits: such a job
/// could be the caller's own loop, which finds its workspace in use.
fn on_rayon(helpers: usize, work: &(dyn Fn(usize) + Sync)) {
    let waiting = WAITING.with(|waiting| Arc::clone(waiting.get_or_init(Arc::default)));
    if waiting.load(Ordering::Relaxed) > MOST_WAITING {
        return work(0);
    }
    // SAFETY: only the lifetime changes; `Gate::enter` says why it is kept.
    let erased = unsafe {
        std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(
            work,
        )
    };
    let state = GateState { work: Some(Work(erased)), inside: 0 };
    let gate = Arc::new(Gate { state: Mutex::new(state), left: Condvar::new() });
    waiting.fetch_add(helpers, Ordering::Relaxed);
    for worker in 1..=helpers {
        let (gate, waiting) = (Arc::clone(&gate), Arc::clone(&waiting));
        rayon::spawn(move || {
            waiting.fetch_sub(1, Ordering::Relaxed);
            gate.enter(worker);
        });
    }
    // It does not panic.
    work(0);
    gate.close();
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
    fn no_foreign_job_runs_on_the_caller() {
        use rayon::prelude::*;
        use std::cell::RefCell;
        thread_local!(static BUSY: RefCell<()> = const { RefCell::new(()) });
        let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
        pool.install(|| {
            (0..200).into_par_iter().for_each(|_| {
                BUSY.with(|busy| {
                    let _busy = busy.borrow_mut();
                    parallel_for(4, 16, |_| std::thread::yield_now());
                });
            });
        });
    }

    #[test]
    fn calls_do_not_pile_up_in_a_busy_pool() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        pool.install(|| {
            let waiting = || WAITING.with(|w| w.get().map_or(0, |w| w.load(Ordering::Relaxed)));
            for _ in 0..2 * MOST_WAITING {
                parallel_for(3, 2, |_| {});
            }
            assert!((1..=MOST_WAITING + 3).contains(&waiting()), "{}", waiting());
        });
    }

    #[test]
    fn one_thread_stays_with_the_caller() {
        let caller = std::thread::current().id();
        parallel_for(1, 10, |_| assert_eq!(std::thread::current().id(), caller));
    }

    #[test]
    fn nested_in_a_users_pool() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let sum = AtomicUsize::new(0);
        pool.install(|| {
            parallel_for(3, 10, |i| {
                parallel_for(2, 10, |j| {
                    sum.fetch_add(i * j, Ordering::Relaxed);
                });
            });
        });
        assert_eq!(sum.into_inner(), 45 * 45);
    }
}
