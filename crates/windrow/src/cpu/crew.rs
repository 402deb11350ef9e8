//! Threads of a team that stay for several pieces of parallel work, one after the other.
//!
//! Starting a team and waiting for all of it costs some microseconds for each piece, and far more if one of its threads
//! has to wait for a core that other programs use. A crew is started once. For each piece the caller waits only for
//! helpers that are inside.

use super::threads::{Team, lock, team, this_thread};
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// The number of times that a thread looks for what it waits for before it sleeps, with so many pauses between: about 50
/// microseconds. A piece of work often takes no longer than that, so a thread looks often.
const SPINS: usize = 512;
const PAUSES: usize = 4;
/// The time that helpers wait for the caller to begin. In a team that runs them before the caller it would never begin.
const BEGIN: Duration = Duration::from_millis(20);

/// The bit of `Crew::state` that is set while helpers may enter.
const OPEN: usize = 1 << (usize::BITS - 1);
/// The round after the last.
const END: usize = usize::MAX;

thread_local! {
    /// The crew that this thread leads, if it is between two pieces of work; else null.
    static CREW: Cell<*const Crew> = const { Cell::new(null()) };
}

/// Calls `work`. If [`use_team`](super::use_team) set a team, this starts the team once, for all parallel work that the
/// caller does in `work`. Without it the team is started for each piece. While `work` runs, other code finds the team's
/// threads busy.
///
/// # Panics
/// If `work` panics, with its payload.
pub fn with_team<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    match team() {
        Some(team) => together(team, work),
        None => work(),
    }
}

fn together<R: Send>(team: Team, work: impl FnOnce() -> R + Send) -> R {
    if !CREW.get().is_null() {
        return work();
    }
    let (crew, caller) = (Crew::new(), this_thread());
    let (waiting, done) = (Mutex::new(Some(work)), Mutex::new(None));
    team(&|| {
        if this_thread() != caller {
            return crew.help();
        }
        let work = lock(&waiting).take();
        if let Some(work) = work {
            let result = catch_unwind(AssertUnwindSafe(|| crew.lead(work)));
            lock(&done).replace(result);
        }
    });
    // If the team has not called on this thread.
    let work = lock(&waiting).take();
    if let Some(work) = work {
        return work();
    }
    let done = lock(&done).take().expect("the work has been called");
    done.unwrap_or_else(|payload| resume_unwind(payload))
}

/// Calls `work` on this thread and on the helpers of the crew that it leads. Returns false, and does nothing, if it
/// leads none.
pub(super) fn run(work: &(dyn Fn() + Sync)) -> bool {
    // Parallel work inside of `work` is not for the crew, which is busy.
    let crew = CREW.replace(null());
    // SAFETY: `Crew::lead` takes the pointer back before the crew's life ends.
    let Some(led) = (unsafe { crew.as_ref() }) else { return false };
    led.run(work);
    CREW.set(crew);
    true
}

struct Crew {
    /// The number of the piece of work: 0 before the caller has begun, [`END`] after the last one.
    round: AtomicUsize,
    /// [`OPEN`], and the number of helpers that are inside or look whether they may enter.
    state: AtomicUsize,
    /// The piece of work. The caller writes it while nobody is inside and the crew is not open.
    work: UnsafeCell<*const (dyn Fn() + Sync)>,
    /// The number of threads that sleep or are about to.
    sleeping: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

// SAFETY: `work` is read only by helpers that are inside, and not written meanwhile; it may be called from any thread.
unsafe impl Sync for Crew {}

impl Crew {
    fn new() -> Self {
        Crew {
            round: AtomicUsize::new(0),
            state: AtomicUsize::new(0),
            work: UnsafeCell::new(null::<fn()>() as *const (dyn Fn() + Sync)),
            sleeping: AtomicUsize::new(0),
            lock: Mutex::new(()),
            changed: Condvar::new(),
        }
    }

    /// Calls `work` on the caller's thread, whose parallel work is the crew's meanwhile. Then sends the helpers home.
    fn lead<R>(&self, work: impl FnOnce() -> R) -> R {
        struct Led<'a>(&'a Crew);
        impl Drop for Led<'_> {
            fn drop(&mut self) {
                CREW.set(null());
                self.0.round.store(END, Ordering::SeqCst);
                self.0.wake();
            }
        }
        let led = Led(self);
        self.round.store(1, Ordering::SeqCst);
        self.wake();
        CREW.set(led.0);
        work()
    }

    /// Calls a piece of work on this thread and on helpers. It must not panic.
    fn run(&self, work: &(dyn Fn() + Sync)) {
        // SAFETY: only the lifetime changes. No helper calls it after this function.
        let erased = unsafe {
            std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync)>(work)
        };
        // SAFETY: the crew is not open, and the last call has waited until nobody was inside.
        unsafe { *self.work.get() = erased };
        self.state.fetch_or(OPEN, Ordering::SeqCst);
        self.round.fetch_add(1, Ordering::SeqCst);
        self.wake();
        work();
        self.state.fetch_and(!OPEN, Ordering::SeqCst);
        self.wait(|| self.state.load(Ordering::SeqCst) == 0);
    }

    /// Takes part in all pieces of work.
    fn help(&self) {
        let mut seen = 0;
        loop {
            self.wait(|| self.round.load(Ordering::SeqCst) != seen);
            seen = self.round.load(Ordering::SeqCst);
            if [0, END].contains(&seen) {
                return;
            }
            if self.state.fetch_add(1, Ordering::SeqCst) & OPEN != 0 {
                // SAFETY: the caller waits until this helper has left. The work does not panic.
                unsafe { (**self.work.get())() };
            }
            if self.state.fetch_sub(1, Ordering::SeqCst) == 1 {
                self.wake();
            }
        }
    }

    /// Waits until something is so, or until the caller has not begun in time.
    fn wait(&self, is_so: impl Fn() -> bool) {
        for _ in 0..SPINS {
            if is_so() {
                return;
            }
            (0..PAUSES).for_each(|_| std::hint::spin_loop());
        }
        let mut guard = lock(&self.lock);
        self.sleeping.fetch_add(1, Ordering::SeqCst);
        while !is_so() {
            let waited = self.changed.wait_timeout(guard, BEGIN);
            let (held, time) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
            guard = held;
            if time.timed_out() && self.round.load(Ordering::SeqCst) == 0 {
                break;
            }
        }
        self.sleeping.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes threads that sleep, after something has changed.
    fn wake(&self) {
        if self.sleeping.load(Ordering::SeqCst) > 0 {
            // Who has counted itself but does not sleep yet holds the lock.
            drop(lock(&self.lock));
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::threads::{parallel_for, parallel_for_workers};
    use super::*;

    /// Two new threads and the caller.
    fn three(work: &(dyn Fn() + Sync)) {
        std::thread::scope(|scope| {
            scope.spawn(work);
            scope.spawn(work);
            work();
        });
    }

    fn before_the_caller(work: &(dyn Fn() + Sync)) {
        std::thread::scope(|scope| scope.spawn(work).join().unwrap());
        work();
    }

    fn after_the_caller(work: &(dyn Fn() + Sync)) {
        work();
        std::thread::scope(|scope| scope.spawn(work).join().unwrap());
    }

    fn without_the_caller(work: &(dyn Fn() + Sync)) {
        std::thread::scope(|scope| scope.spawn(work).join().unwrap());
    }

    const TEAMS: [Team; 7] = [
        three,
        before_the_caller,
        after_the_caller,
        without_the_caller,
        |work| work(),
        |work| (0..3).for_each(|_| work()),
        |_| {},
    ];

    #[test]
    fn every_task_of_every_piece_runs_once() {
        for team in TEAMS {
            let counts: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
            let sum = together(team, || {
                for (piece, counts) in counts.chunks(10).enumerate() {
                    if piece == 50 {
                        // Helpers sleep.
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    let busy: [AtomicUsize; 3] = Default::default();
                    parallel_for_workers(3, counts.len(), |worker, i| {
                        assert_eq!(busy[worker].fetch_add(1, Ordering::SeqCst), 0);
                        counts[i].fetch_add(1, Ordering::Relaxed);
                        busy[worker].fetch_sub(1, Ordering::SeqCst);
                    });
                    // The piece is done, and the next one may use what it used.
                    assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
                counts.len()
            });
            assert_eq!(sum, 1000);
        }
    }

    #[test]
    fn helpers_take_part_in_each_piece() {
        together(three, || {
            for _ in 0..100 {
                // Each task waits for the others.
                let barrier = std::sync::Barrier::new(3);
                parallel_for(3, 3, |_| {
                    barrier.wait();
                });
            }
        });
    }

    #[test]
    fn parallel_work_inside_of_tasks_and_of_the_crew() {
        let sum = AtomicUsize::new(0);
        together(three, || {
            together(three, || {
                parallel_for(3, 10, |i| {
                    parallel_for(2, 10, |j| {
                        sum.fetch_add(i * j, Ordering::Relaxed);
                    });
                });
            });
        });
        assert_eq!(sum.into_inner(), 45 * 45);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_next_call_works() {
        for team in TEAMS {
            let panic = catch_unwind(|| {
                together(team, || parallel_for(3, 100, |i| assert!(i != 37, "task {i}")));
            });
            let message = *panic.unwrap_err().downcast::<String>().unwrap();
            assert!(message.contains("task 37"), "{message}");
            assert!(CREW.get().is_null());
            assert_eq!(together(team, || 7), 7);
        }
    }
}
