//! Helpers from rayon's pool.

use super::threads::{MAX_THREADS, lock};
use std::cell::OnceCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex};

/// The size of the pool that the caller is in, or of the global one; `None` if no threads can be started.
pub(super) fn size() -> Option<usize> {
    has_pool().then(rayon::current_num_threads)
}

/// True if the caller is in a rayon pool or there is a global one. Asking rayon for a pool whose threads cannot start
/// would panic.
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

/// A gate that lets helper threads join a call as long as the caller is still working on it.
struct Gate {
    state: Mutex<GateState>,
    left: Condvar,
}

struct GateState {
    /// `None` once the caller waits for the helpers that are still running.
    work: Option<Work>,
    inside: usize,
}

/// The caller's closure, whose lifetime the gate keeps.
#[derive(Clone, Copy)]
struct Work(*const (dyn Fn() + Sync));

// SAFETY: what it points to may be called from any thread.
unsafe impl Send for Work {}

impl Gate {
    /// Calls the work if the gate is still open.
    fn enter(&self) {
        let work = {
            let mut state = lock(&self.state);
            let Some(work) = state.work else { return };
            state.inside += 1;
            work
        };
        // SAFETY: `run` does not return before `inside` is 0 again, and the closure lives as long as that
        // call. It does not panic: it keeps the panics of tasks.
        unsafe { (*work.0)() };
        let mut state = lock(&self.state);
        state.inside -= 1;
        if state.inside == 0 {
            self.left.notify_all();
        }
    }

    /// Closes the gate and waits until no helper is running.
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

/// The number of times that a caller checks its gate before it sleeps: about 50 microseconds.
const SPINS: usize = 64;

/// The limit for jobs that a thread has queued in rayon and that have not started; above it, a call queues no more.
/// Without a limit they would pile up while all threads of the pool are busy.
const MOST_WAITING: usize = 4 * MAX_THREADS;

thread_local! {
    static WAITING: OnceCell<Arc<AtomicUsize>> = const { OnceCell::new() };
}

/// Calls `work` on this thread, and up to `helpers` times on idle threads of rayon's pool.
///
/// Unlike rayon's scopes, this never runs another job on the caller's thread while it waits. Such a job could be
/// another iteration of the caller's own parallel loop, which would find its workspace in use.
pub(super) fn run(helpers: usize, work: &(dyn Fn() + Sync)) {
    if !has_pool() {
        return work();
    }
    let waiting = WAITING.with(|waiting| Arc::clone(waiting.get_or_init(Arc::default)));
    if waiting.load(Ordering::Relaxed) > MOST_WAITING {
        return work();
    }
    // SAFETY: only the lifetime changes; `Gate::enter` says why it is kept.
    let erased = unsafe {
        std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync)>(work)
    };
    let state = GateState { work: Some(Work(erased)), inside: 0 };
    let gate = Arc::new(Gate { state: Mutex::new(state), left: Condvar::new() });
    waiting.fetch_add(helpers, Ordering::Relaxed);
    for _ in 0..helpers {
        let (gate, waiting) = (Arc::clone(&gate), Arc::clone(&waiting));
        rayon::spawn(move || {
            waiting.fetch_sub(1, Ordering::Relaxed);
            gate.enter();
        });
    }
    // It does not panic.
    work();
    gate.close();
}

#[cfg(test)]
mod tests {
    use super::super::threads::parallel_for;
    use super::*;

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
