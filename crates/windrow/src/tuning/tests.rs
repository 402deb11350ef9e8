//! Searches among fake candidates, by a fake clock.

use super::search::{Benchmark, Clock, MODEL, Outcome, Search, Stop, search};
use super::{Tunable, Tuning, measure, tune};
use crate::plan::configuration;
use crate::{Device, Error, Result};
use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::str::FromStr;
use std::time::Duration;

const MS: f64 = 1e-3;
const PREPARATION: f64 = 7.0;

#[derive(Clone, Default)]
struct FakeClock(Rc<Cell<f64>>);

impl Clock for FakeClock {
    fn now(&self) -> Duration {
        Duration::from_secs_f64(self.0.get())
    }
}

/// Candidates that take known times, give or take some noise.
struct Fake {
    clock: FakeClock,
    seconds: Vec<f64>,
    /// Largest relative deviation, upwards.
    noise: f64,
    random: u32,
    wrong: Vec<usize>,
    failing: Vec<usize>,
    calls: Vec<usize>,
    prepared: usize,
    /// The order of measurements.
    order: Vec<usize>,
}

impl Fake {
    fn new(seconds: &[f64], noise: f64) -> Self {
        Fake {
            clock: FakeClock::default(),
            seconds: seconds.to_vec(),
            noise,
            random: 1,
            wrong: Vec::new(),
            failing: Vec::new(),
            calls: vec![0; seconds.len()],
            prepared: 0,
            order: Vec::new(),
        }
    }

    /// Time that was spent on measuring.
    fn measuring(&self) -> Duration {
        Duration::from_secs_f64(self.clock.0.get() - PREPARATION * self.prepared as f64)
    }

    fn search(&mut self, budget: f64, exhaustive: bool) -> Result<Outcome> {
        let clock = self.clock.clone();
        let how = Search { budget: Duration::from_secs_f64(budget), exhaustive };
        search(self.seconds.len(), &how, self, &clock)
    }
}

impl Benchmark for Fake {
    /// Takes long, as a compiler does.
    fn prepare(&mut self, _: usize) -> Result<()> {
        self.clock.0.set(self.clock.0.get() + PREPARATION);
        self.prepared += 1;
        Ok(())
    }

    fn run(&mut self, candidate: usize, times: usize) -> Result<()> {
        if self.failing.contains(&candidate) {
            return Err(Error::unsupported("this candidate", "it fails"));
        }
        self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let noise = self.noise * f64::from(self.random >> 8) / f64::from(1 << 24);
        let elapsed = self.seconds[candidate] * (1.0 + noise) * times as f64;
        self.clock.0.set(self.clock.0.get() + elapsed);
        self.calls[candidate] += times;
        self.order.push(candidate);
        Ok(())
    }

    fn verify(&mut self, candidate: usize) -> Result<bool> {
        Ok(!self.wrong.contains(&candidate))
    }
}

#[test]
fn the_fastest_of_many_wins_in_noise() {
    for noise in [0.0, 0.1, 0.3] {
        let seconds: Vec<f64> =
            (0..30).map(|i| MS * (2.0 + ((i * 7) % 30) as f64 / 10.0)).collect();
        let mut fake = Fake::new(&seconds, noise);
        fake.seconds[0] = 3.0 * MS;
        fake.seconds[17] = 1.2 * MS;
        let outcome = fake.search(2.0, false).unwrap();
        assert_eq!(outcome.chosen, 17, "noise {noise}");
        assert!(fake.measuring() < Duration::from_millis(2100), "{:?}", fake.measuring());
        // Slow candidates are dropped early. The cost model's choice is never dropped.
        let slowest = (1..30).max_by(|&a, &b| fake.seconds[a].total_cmp(&fake.seconds[b])).unwrap();
        assert!(fake.calls[slowest] < fake.calls[17] && fake.calls[slowest] <= fake.calls[MODEL]);
    }
}

#[test]
fn measurements_alternate() {
    let mut fake = Fake::new(&[2.0 * MS, 2.0 * MS, 2.0 * MS], 0.1);
    fake.search(10.0, false).unwrap();
    // After two warm-up calls each.
    assert_eq!(fake.order[..12], [0, 0, 1, 1, 2, 2, 0, 1, 2, 0, 1, 2]);
}

#[test]
fn a_gain_within_the_noise_is_no_gain() {
    let mut fake = Fake::new(&[1.0 * MS, 0.99 * MS, 1.01 * MS], 0.2);
    assert_eq!(fake.search(1.0, false).unwrap().chosen, MODEL);
    // The gain is larger than the noise, but smaller than `MIN_GAIN`.
    let mut fake = Fake::new(&[1.0 * MS, 0.99 * MS], 0.0);
    assert_eq!(fake.search(1.0, false).unwrap().chosen, MODEL);
    let mut fake = Fake::new(&[1.0 * MS, 0.9 * MS], 0.01);
    assert_eq!(fake.search(1.0, false).unwrap().chosen, 1);
}

#[test]
fn it_stops_when_decided() {
    let mut fake = Fake::new(&[2.0 * MS, 1.0 * MS, 3.0 * MS], 0.05);
    let outcome = fake.search(60.0, false).unwrap();
    assert_eq!((outcome.chosen, outcome.stop), (1, Stop::Decided));
    assert!(fake.measuring() < Duration::from_millis(200), "{:?}", fake.measuring());
    let mut alone = Fake::new(&[1.0 * MS], 0.0);
    assert_eq!(alone.search(60.0, false).unwrap().stop, Stop::Decided);
}

#[test]
fn the_budget_ends_it() {
    let seconds: Vec<f64> = (0..20).map(|i| 0.1 + 0.001 * f64::from(i)).collect();
    let mut fake = Fake::new(&seconds, 0.0);
    let outcome = fake.search(1.0, false).unwrap();
    assert_eq!((outcome.chosen, outcome.stop), (MODEL, Stop::Budget));
    assert!(outcome.refused.iter().flatten().any(|r| r.contains("not measured")));
    // The candidates that were measured have a few measurements each, so the search takes longer than its budget.
    assert!(fake.measuring() < Duration::from_secs(5), "{:?}", fake.measuring());
    let mut none = Fake::new(&[1.0, 0.5], 0.0);
    assert_eq!(none.search(0.0, false).unwrap().chosen, MODEL);
}

#[test]
fn hopeless_candidates_run_once() {
    let mut fake = Fake::new(&[1.0 * MS, 50.0 * MS, 0.5 * MS], 0.0);
    let outcome = fake.search(1.0, false).unwrap();
    assert_eq!((fake.calls[1], outcome.samples[1].len(), outcome.chosen), (1, 1, 2));
}

#[test]
fn short_calls_are_repeated() {
    let mut fake = Fake::new(&[1e-6, 0.5e-6], 0.0);
    let outcome = fake.search(0.1, false).unwrap();
    assert!(fake.calls[1] > 1000 * outcome.samples[1].len());
    assert!((outcome.samples[1][0] - 0.5e-6).abs() < 1e-9);
}

#[test]
fn exhaustive_searches_measure_all_alike() {
    let mut fake = Fake::new(&[2.0 * MS, 1.0 * MS, 1.5 * MS, 2.5 * MS], 0.1);
    let outcome = fake.search(0.0, true).unwrap();
    let counts: Vec<usize> = outcome.samples.iter().map(Vec::len).collect();
    assert_eq!((outcome.stop, outcome.chosen), (Stop::Exhausted, 1));
    assert!(counts.iter().all(|&n| n == counts[0] && n >= 7), "{counts:?}");
}

#[test]
fn wrong_results_and_failures_are_refused() {
    let mut fake = Fake::new(&[4.0 * MS, 1.0 * MS, 2.0 * MS, 1.5 * MS], 0.0);
    (fake.wrong, fake.failing) = (vec![1], vec![3]);
    let outcome = fake.search(1.0, true).unwrap();
    assert_eq!(outcome.chosen, 2);
    assert!(outcome.refused[1].as_ref().unwrap().contains("oracle"));
    assert!(outcome.refused[3].as_ref().unwrap().contains("it fails"));
    // Without the cost model's choice there is nothing to fall back on.
    fake.wrong = vec![MODEL, 1, 2];
    assert!(matches!(fake.search(1.0, true), Err(Error::Verification { .. })));
    fake.failing = vec![MODEL];
    assert!(matches!(fake.search(1.0, false), Err(Error::Unsupported { .. })));
}

/// A problem whose configurations are numbers of blocks: the fewer, the faster.
#[derive(Clone)]
struct Blocks {
    name: &'static str,
    most: usize,
    benchmarks: Rc<Cell<usize>>,
    clock: FakeClock,
}

impl Blocks {
    fn new(name: &'static str, most: usize) -> Self {
        Blocks { name, most, benchmarks: Rc::default(), clock: FakeClock::default() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Count(usize);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        configuration::write(f, "blocks", [("n", Some(self.0))])
    }
}

impl FromStr for Count {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match configuration::parse(s, ["n"])? {
            ("blocks", [Some(n)]) => Ok(Count(n)),
            _ => Err(Error::parameter("configuration", s, "blocks n=NUMBER")),
        }
    }
}

fn decide(problem: &Blocks, tuning: Tuning) -> Result<Option<Count>> {
    super::decide(Device::Cpu, tuning, || Ok(problem.clone()))
}

impl Tunable for Blocks {
    type Configuration = Count;

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn key(&self) -> String {
        self.name.into()
    }

    fn candidates(&self) -> Result<Vec<Count>> {
        Ok([self.most, 1].map(Count).to_vec())
    }

    fn cost(&self, count: &Count) -> Result<f64> {
        Ok(2.0 * count.0 as f64)
    }

    fn is_valid(&self, count: &Count) -> bool {
        count.0 <= self.most
    }

    fn clock(&self) -> Box<dyn Clock> {
        Box::new(self.clock.clone())
    }

    fn benchmark<'a>(&'a self, candidates: &'a [Count]) -> Result<Box<dyn Benchmark + 'a>> {
        self.benchmarks.set(self.benchmarks.get() + 1);
        let seconds: Vec<f64> = candidates.iter().map(|c| c.0 as f64 * MS).collect();
        Ok(Box::new(Fake { clock: self.clock.clone(), ..Fake::new(&seconds, 0.1) }))
    }
}

#[test]
fn a_winner_is_remembered_while_it_is_valid() {
    let problem = Blocks::new("remembered", 20);
    assert_eq!(decide(&problem, Tuning::Model).unwrap(), None);
    assert_eq!(decide(&problem, Tuning::Cached).unwrap(), None);
    let search = Tuning::Search { budget: Duration::from_millis(200) };
    assert_eq!(decide(&problem, search).unwrap(), Some(Count(1)));
    assert_eq!(decide(&problem, search).unwrap(), Some(Count(1)));
    assert_eq!(problem.benchmarks.get(), 1, "the second look-up finds the first's winner");
    assert_eq!(decide(&problem, Tuning::Cached).unwrap(), Some(Count(1)));
    assert_eq!(decide(&problem, Tuning::Model).unwrap(), None);
    assert_eq!(decide(&Blocks::new("remembered", 0), Tuning::Cached).unwrap(), None, "not valid");
    assert_eq!(decide(&Blocks::new("another", 20), Tuning::Cached).unwrap(), None);
}

#[test]
fn reports_say_what_was_gained() {
    let problem = Blocks::new("reported", 20);
    let how = Search { budget: Duration::from_millis(200), exhaustive: false };
    let (found, report) = tune(&problem, &how).unwrap();
    assert_eq!((found, report.winner().configuration.as_str()), (Count(1), "blocks n=1"));
    assert_eq!((report.problem.as_str(), report.chosen), ("reported", 1));
    assert_eq!((report.model().expected, report.winner().expected), (1.0, 0.05));
    assert!((15.0..25.0).contains(&report.gain()), "{report:?}");
    // `measure` takes any configurations, not only the problem's candidates, and saves nothing.
    let report = measure(&Blocks::new("measured", 20), &[Count(3), Count(2)], &how).unwrap();
    assert_eq!((report.candidates.len(), report.chosen), (2, 1));
    assert_eq!(decide(&Blocks::new("measured", 20), Tuning::Cached).unwrap(), None);
    assert!(measure(&problem, &[], &how).is_err());
}
