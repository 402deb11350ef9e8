//! Plans, caches and teams of threads, used by many at once.

use crate::common::{Conv, options, small};
use std::process::Command;
use std::sync::Barrier;
use windrow::cpu::{Team, use_team, with_team};
use windrow::verify::random_tensor;
use windrow::{Conv2dArgs, Conv2dPlan, Device, FilterCache, Tensor, Verify, Weights, Workspace};

const THREADS: usize = 32;

/// Calls `run` with the number of each thread, on all of them at once.
fn at_once(run: impl Fn(usize) + Sync) {
    let start = Barrier::new(THREADS);
    let (start, run) = (&start, &run);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                start.wait();
                run(thread);
            });
        }
    });
}

#[test]
fn one_plan_from_many_threads() {
    for call in small() {
        // Gradients are planned, and filters packed, when they are first asked for: by all threads at once.
        let run = call.plan(Verify::Off).unwrap();
        let first = std::sync::OnceLock::new();
        at_once(|_| {
            for _ in 0..2 {
                let got = run().unwrap();
                assert_eq!(got, *first.get_or_init(|| got), "{}", call.name);
            }
        });
        assert_eq!(call.results(Verify::Off), Ok(first.into_inner().unwrap()), "{}", call.name);
    }
}

#[test]
fn many_plans_side_by_side() {
    let calls = small();
    let want: Vec<_> = calls.iter().map(|call| call.results(Verify::Off).unwrap()).collect();
    at_once(|thread| {
        for i in 0..calls.len() {
            let i = (i + thread * 5) % calls.len();
            assert_eq!(calls[i].results(Verify::Off), Ok(want[i]), "{}", calls[i].name);
        }
    });
}

/// Threads that take turns with five filters find each in the cache, or pack it; nobody gets another's.
#[test]
fn one_cache_of_filters_that_change() {
    let conv = Conv::new([1, 8, 12, 12], [9, 8, 3, 3]);
    let mut spec = conv.spec();
    spec.bias = None;
    let x = random_tensor(1, spec.x, -1.0, 1.0).unwrap();
    let filters: Vec<_> =
        (2..7).map(|seed| random_tensor(seed, spec.w, -1.0, 1.0).unwrap()).collect();
    let plans = Conv2dPlan::algorithms(&spec, Device::Cpu)
        .into_iter()
        .map(|algorithm| Conv2dPlan::with_algorithm(&spec, algorithm, &options(Verify::Off)));
    let plans: Vec<_> = plans.map(Result::unwrap).collect();
    let run = |plan: &Conv2dPlan, w: Weights<'_>| {
        let mut y = Tensor::uninitialised(spec.y).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        let args = Conv2dArgs::new(x.as_ref(), w);
        plan.run(&args, y.as_mut(), &mut workspace).unwrap();
        y.as_bytes().to_vec()
    };
    let raw = |plan| filters.iter().map(|w| run(plan, Weights::Raw(w.as_ref()))).collect();
    let want: Vec<Vec<_>> = plans.iter().map(raw).collect();
    let cache = FilterCache::new();
    at_once(|thread| {
        for turn in 0..60 {
            let (i, j) = ((turn / 3) % plans.len(), (turn * 7 + thread) % filters.len());
            let got = run(&plans[i], Weights::Cached(filters[j].as_ref(), &cache));
            assert!(got == want[i][j], "{} with filter {j}", plans[i].algorithm());
            if thread == 0 && turn % 20 == 19 {
                cache.clear();
            }
        }
    });
}

/// Set in the processes that tests start: what to do there.
const WHAT: &str = "WINDROW_TEST_PROCESS";

/// Teams by name: of whatever size, and some that come late.
const TEAMS: [(&str, Team); 4] = [
    ("nobody", |_| {}),
    ("one", |work| work()),
    ("several", |work| {
        std::thread::scope(|scope| (0..5).for_each(|_| drop(scope.spawn(work))));
    }),
    ("late", |work| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(1));
                work();
            });
        });
    }),
];

/// The child process of a test below; does nothing otherwise.
#[test]
fn a_process_of_its_own() {
    let Ok(what) = std::env::var(WHAT) else { return };
    let calls = small();
    let all = || -> Vec<_> { calls.iter().map(|call| call.results(Verify::Off)).collect() };
    let want = all();
    assert!(want.iter().all(Result::is_ok));
    #[cfg(target_os = "linux")]
    if what == "fork" {
        // SAFETY: no other thread holds a lock: the pool's are idle, the test runner waits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child, after a minute if it hangs.
            unsafe {
                libc::alarm(60);
                libc::_exit(i32::from(all() != want));
            }
        }
        let mut status = 0;
        // SAFETY: waits for the child above.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child's calls");
        assert_eq!(all(), want);
        return;
    }
    let (_, team) = TEAMS.into_iter().find(|(name, _)| *name == what).unwrap();
    use_team(team);
    assert_eq!(all(), want);
    assert_eq!(with_team(all), want);
}

fn start(what: &str) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["concurrency::a_process_of_its_own", "--exact", "--nocapture"])
        .env(WHAT, what)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {}\n{said}", output.status);
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{what}");
}

#[test]
fn teams_that_leave_work_undone_change_no_result() {
    TEAMS.iter().for_each(|(name, _)| start(name));
}

#[cfg(target_os = "linux")]
#[test]
fn a_forked_process_computes_the_same() {
    start("fork");
}
