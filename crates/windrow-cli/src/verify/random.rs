//! `windrow verify --random`: random cases of every operator against the oracle.

use super::{LISTED_FAILURES, Verify, pool};
use crate::failure::Failure;
use crate::print;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};
use windrow::verify::{Outcome, operator_of_case, random_case};

/// The number of failures after which no further case begins.
const MOST_FAILURES: usize = 100;

/// Random cases instead of the fixed ones.
#[derive(Debug, clap::Args)]
pub(super) struct Random {
    /// Run random cases for this many seconds instead of the fixed cases
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "60")]
    random: Option<f64>,
    /// With --random: the seed, which gives the same cases on every machine [default: from the clock]
    #[arg(long, requires = "random")]
    seed: Option<u64>,
    /// With --random: run this many cases, however long they take
    #[arg(long, value_name = "NUMBER", requires = "random", conflicts_with = "case")]
    cases: Option<u64>,
    /// With --random: run only the case of this number, which a failure prints
    #[arg(long, value_name = "NUMBER", requires = "random")]
    case: Option<u64>,
    /// With --random: print a hash of all results for each instruction set
    #[arg(long, requires = "random")]
    digest: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    seed: u64,
    device: String,
    cases: usize,
    seconds: f64,
    elements: usize,
    /// The digests by instruction set, or of the device.
    digests: BTreeMap<String, String>,
    failures: Vec<Failed>,
}

#[derive(Debug, Serialize)]
struct Failed {
    case: u64,
    description: String,
    details: Vec<String>,
    /// The command that runs the case again.
    command: String,
}

impl Random {
    pub(super) fn is_asked_for(&self) -> bool {
        self.random.is_some()
    }

    /// The numbers of the cases to run.
    fn numbers(&self) -> Result<Box<dyn Iterator<Item = u64> + Send>, Failure> {
        if let Some(case) = self.case {
            return Ok(Box::new(case..=case));
        }
        if let Some(cases) = self.cases {
            return Ok(Box::new(0..cases));
        }
        let seconds = self.random.unwrap_or_default();
        let time = Duration::try_from_secs_f64(seconds)
            .map_err(|_| Failure::Input(format!("--random is {seconds}, expected seconds")))?;
        let start = Instant::now();
        Ok(Box::new((0..).take_while(move |_| start.elapsed() < time)))
    }
}

pub(super) fn run(args: &Verify) -> Result<(), Failure> {
    let random = &args.random;
    let seed = random.seed.unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        now.map_or(0, |now| now.as_secs())
    });
    let chosen = args.chosen();
    let start = Instant::now();
    let failed = AtomicUsize::new(0);
    let numbers = random.numbers()?.filter(|&case| {
        let op = operator_of_case(case);
        random.case.is_some() || chosen.iter().any(|name| op.starts_with(name))
    });
    // After an illegal access every later call on the device fails, millions within a minute.
    let numbers = numbers.take_while(|_| failed.load(Ordering::Relaxed) < MOST_FAILURES);
    let outcomes = pool::over(args.threads(), numbers, |case| {
        let mut outcome = random_case(seed, case, args.device);
        if !outcome.failures.is_empty() {
            failed.fetch_add(1, Ordering::Relaxed);
        } else if random.case.is_none() {
            outcome.description.clear();
        }
        (case, outcome)
    });
    let mut report = Report {
        seed,
        device: args.device.to_string(),
        cases: outcomes.len(),
        seconds: start.elapsed().as_secs_f64(),
        elements: 0,
        digests: BTreeMap::new(),
        failures: Vec::new(),
    };
    let mut digests = BTreeMap::new();
    for (case, outcome) in outcomes {
        if random.case.is_some() && !args.json {
            print::out(format!("{}\n", outcome.description))?;
        }
        report.elements += outcome.elements;
        for (name, digest) in &outcome.digests {
            let sum: &mut u64 = digests.entry(name.clone()).or_default();
            *sum = sum.wrapping_add(digest.wrapping_mul(2 * case + 1));
        }
        report.add(case, outcome);
    }
    report.digests = digests.into_iter().map(|(name, sum)| (name, format!("{sum:016x}"))).collect();
    let printed = print::out(match args.json {
        true => print::json(&report),
        false => report.text(random.digest),
    });
    match report.failures.len() {
        0 => printed,
        n => Err(Failure::Verification(format!("{n} of {} random cases failed", report.cases))),
    }
}

impl Report {
    fn add(&mut self, case: u64, outcome: Outcome) {
        if outcome.failures.is_empty() {
            return;
        }
        let (seed, device) = (self.seed, &self.device);
        self.failures.push(Failed {
            case,
            description: outcome.description,
            details: outcome.failures,
            command: format!(
                "windrow verify --device {device} --random --seed {seed} --case {case}"
            ),
        });
    }

    fn text(&self, digest: bool) -> String {
        let mut text = String::new();
        for failed in self.failures.iter().take(LISTED_FAILURES) {
            text += &format!("FAIL {}\n", failed.description);
            failed.details.iter().for_each(|detail| text += &format!("     {detail}\n"));
            text += &format!("     {}\n", failed.command);
        }
        let Report { seed, device, cases, seconds, elements, failures, .. } = self;
        text += &format!(
            "{cases} random cases of seed {seed} on {device} in {seconds:.0} s, {} failures; {elements} elements\n",
            failures.len()
        );
        if digest {
            for (name, digest) in &self.digests {
                text += &format!("digest of {cases} cases on {name}: {digest}\n");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_says_how_to_run_it_again() {
        let mut report = Report {
            seed: 3,
            device: "cpu".into(),
            cases: 9,
            seconds: 1.0,
            elements: 5,
            digests: BTreeMap::from([("avx2".into(), "00ff".into())]),
            failures: Vec::new(),
        };
        report.add(1, Outcome::default());
        let mut failed = Outcome::default();
        failed.description = "gelu".into();
        failed.failures.push("y differs".into());
        report.add(7, failed);
        let text = report.text(true);
        assert!(text.contains("FAIL gelu\n     y differs\n"), "{text}");
        assert!(
            text.contains("windrow verify --device cpu --random --seed 3 --case 7\n"),
            "{text}"
        );
        assert!(text.contains("1 failures") && text.contains("on avx2: 00ff"), "{text}");
    }
}
