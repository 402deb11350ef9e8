//! Mixed calls of every operator from many threads for a long time: results stay what they were, bit by bit, and
//! memory what it was after the first minute.
//!
//! ```text
//! cargo run --release -p windrow --example soak -- MINUTES [THREADS]
//! ```
//!
//! Status 1 if a result differs from the first one of its call, or the resident memory ends more than a tenth and 64 MiB
//! above the most of the first minute. Memory is looked at on Linux.

#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use windrow::verify::random_case;
use windrow::{Device, Verify};

/// Random cases beside the calls with shared plans.
const CASES: u64 = 150;
const FIRST_MINUTE: Duration = Duration::from_secs(60);

/// Something to call again and again, and a hash of its first results.
struct Item {
    name: String,
    call: Box<dyn Fn() -> u64 + Send + Sync>,
    first: OnceLock<u64>,
}

impl Item {
    fn new(name: String, call: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Item { name, call: Box::new(call), first: OnceLock::new() }
    }
}

fn items() -> Vec<Item> {
    let mut items = Vec::new();
    for call in common::small() {
        let run = call.plan(Verify::Off).expect("small problems are planned");
        items.push(Item::new(call.name.clone(), move || run().expect("small problems run")));
        // A plan of its own each time.
        items.push(Item::new(format!("{} planned anew", call.name), move || {
            call.results(Verify::Off).expect("small problems run")
        }));
    }
    items.extend((0..CASES).map(|case| {
        Item::new(format!("random case {case} of seed 1"), move || {
            let outcome = random_case(1, case, Device::Cpu);
            assert!(outcome.failures.is_empty(), "{outcome:#?}");
            let mut hasher = DefaultHasher::new();
            outcome.digests.hash(&mut hasher);
            hasher.finish()
        })
    }));
    items
}

/// Bytes of memory that this process holds; 0 where the system does not say.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let minutes = arguments.next().and_then(|text| text.parse::<f64>().ok());
    let threads = arguments.next().map_or(Some(8), |text| text.parse::<usize>().ok());
    let (Some(minutes), Some(threads)) = (minutes, threads) else {
        eprintln!("usage: soak MINUTES [THREADS]");
        return ExitCode::from(2);
    };
    let length = Duration::from_secs_f64(60.0 * minutes);
    let items = items();
    let (calls, wrong) = (AtomicU64::new(0), AtomicU64::new(0));
    let (start, most_at_first) = (Instant::now(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (items, calls, wrong) = (&items, &calls, &wrong);
            scope.spawn(move || {
                // Each thread goes another way through the list.
                let mut at = thread * items.len() / threads.max(1);
                while start.elapsed() < length {
                    let item = &items[at % items.len()];
                    let got = (item.call)();
                    if got != *item.first.get_or_init(|| got) {
                        wrong.fetch_add(1, Ordering::Relaxed);
                        eprintln!("other results than the first ones: {}", item.name);
                    }
                    calls.fetch_add(1, Ordering::Relaxed);
                    at += 1 + thread;
                }
            });
        }
        while start.elapsed() < length {
            if start.elapsed() < FIRST_MINUTE {
                most_at_first.fetch_max(resident(), Ordering::Relaxed);
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    });
    let (first, last) = (most_at_first.into_inner(), resident());
    let seen = items.iter().filter(|item| item.first.get().is_some()).count();
    println!(
        "{} calls of {seen} of {} kinds from {threads} threads in {:.1} minutes, {} with other results; resident memory \
         {} MiB at most in the first minute, {} MiB at the end",
        calls.into_inner(),
        items.len(),
        start.elapsed().as_secs_f64() / 60.0,
        wrong.load(Ordering::Relaxed),
        first >> 20,
        last >> 20
    );
    let grew = last > first + first / 10 + (64 << 20);
    ExitCode::from(u8::from(grew || wrong.into_inner() > 0))
}
