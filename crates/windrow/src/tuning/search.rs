//! Interleaved successive halving: finds the fastest of several candidates on a machine with noisy timings.

use crate::forms::setters;
use crate::{Error, Result};
use std::time::{Duration, Instant};

/// A source of time; tests use a fake one.
pub(crate) trait Clock {
    /// The time since a fixed but arbitrary moment.
    fn now(&self) -> Duration;
}

/// The system's clock.
pub(crate) struct SystemClock(Instant);

impl SystemClock {
    pub(crate) fn new() -> Self {
        SystemClock(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

/// The candidates of a benchmark, addressed by index; index 0 is the cost model's choice.
pub(crate) trait Benchmark {
    /// Prepares a candidate, for example compiles its kernels. This time counts neither as a measurement nor towards
    /// the budget.
    fn prepare(&mut self, candidate: usize) -> Result<()>;
    /// Runs a candidate `times` times and waits until it has finished.
    fn run(&mut self, candidate: usize, times: usize) -> Result<()>;
    /// Runs a candidate once and says whether its result agrees with the oracle.
    fn verify(&mut self, candidate: usize) -> Result<bool>;
}

/// The limits of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Search {
    /// The time for measuring one problem. The time to prepare candidates (on a GPU, to compile kernels) and to compare
    /// with the oracle is not included.
    pub budget: Duration,
    /// Whether to give every candidate the same number of measurements, 7 to 30, instead of dropping slower ones round
    /// by round. A candidate that is more than 4 times slower than the best in its first calls is still dropped. The
    /// budget counts only after the 7th pass.
    pub exhaustive: bool,
}

impl Search {
    /// A search that measures for at most this time.
    pub const fn new(budget: Duration) -> Self {
        Search { budget, exhaustive: false }
    }
}

setters! {
    Search {
        with_exhaustive(exhaustive: bool);
    }
}

/// The reason why a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stop {
    /// The search has a result: one candidate is faster by more than the noise, or the last one left cannot be told
    /// apart from the cost model's choice.
    Decided,
    /// The time was used up.
    Budget,
    /// The end of an exhaustive search: every remaining candidate was measured equally often.
    Exhausted,
}

/// The result of a search.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Seconds of a call, for each candidate in the order measured.
    pub(crate) samples: Vec<Vec<f64>>,
    /// For each candidate, the reason why it was rejected, if it was.
    pub(crate) refused: Vec<Option<String>>,
    pub(crate) chosen: usize,
    pub(crate) stop: Stop,
}

/// The index of the cost model's choice.
pub(crate) const MODEL: usize = 0;
/// The target duration of a measurement in seconds. A shorter call is repeated to reach it.
const MEASUREMENT_SECONDS: f64 = 1e-3;
const MAX_TIMES: f64 = 10_000.0;
/// A candidate whose first calls are slower than the best by more than this factor is dropped at once.
const HOPELESS: f64 = 4.0;
/// The minimum number of passes of a round.
const MIN_ROUND: usize = 3;
/// The maximum number of passes of a round.
const MAX_ROUND: usize = 30;
/// The minimum number of measurements of a candidate before it can be dropped as slower, or decide the search.
const ENOUGH: usize = 7;
/// The minimum relative gain over the cost model's choice. A smaller gain is not worth another configuration.
const MIN_GAIN: f64 = 0.02;

/// The median of a candidate's measurements, and its uncertainty.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    /// Half width of the range that holds the median with 95 % confidence (McGill, Tukey and Larsen, 1978).
    notch: f64,
}

impl Spread {
    /// The statistics of some samples; `None` if there are none.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        let quantile = |q: f64| {
            let at = q * last as f64;
            let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
            low + (high - low) * at.fract()
        };
        let notch = 1.58 * (quantile(0.75) - quantile(0.25)) / (sorted.len() as f64).sqrt();
        Some(Spread { median: quantile(0.5), notch })
    }

    /// True if this is faster by more than the spread of both.
    fn is_ahead(&self, other: &Spread) -> bool {
        self.median + self.notch < other.median - other.notch
    }
}

/// The fastest of `count` candidates whose result agrees with the oracle.
///
/// # Errors
/// The error of running the cost model's choice, if it fails. [`Error::Verification`] if its result is wrong. Other
/// candidates that fail are skipped.
pub(crate) fn search(
    count: usize,
    search: &Search,
    benchmark: &mut dyn Benchmark,
    clock: &dyn Clock,
) -> Result<Outcome> {
    let mut state = State {
        benchmark,
        clock,
        start: clock.now(),
        budget: search.budget,
        samples: vec![Vec::new(); count],
        times: vec![1; count],
        refused: vec![None; count],
    };
    let live = state.warm_up(search.exhaustive)?;
    let stop = match search.exhaustive {
        true => state.exhaust(live)?,
        false => state.halve(live)?,
    };
    let chosen = state.accept()?;
    Ok(Outcome { samples: state.samples, refused: state.refused, chosen, stop })
}

struct State<'a> {
    benchmark: &'a mut dyn Benchmark,
    clock: &'a dyn Clock,
    start: Duration,
    budget: Duration,
    samples: Vec<Vec<f64>>,
    /// The number of calls in one measurement, for each candidate.
    times: Vec<usize>,
    refused: Vec<Option<String>>,
}

impl State<'_> {
    /// Runs every candidate, to warm up caches, pages and clocks. Returns the candidates that stay in the search.
    fn warm_up(&mut self, whatever_the_budget: bool) -> Result<Vec<usize>> {
        let mut live = Vec::new();
        let mut best = f64::INFINITY;
        for i in 0..self.samples.len() {
            if i != MODEL && !whatever_the_budget && self.is_over() {
                self.refused[i] = Some("not measured: the time was used up".into());
                continue;
            }
            match self.first_calls(i, best) {
                Ok(seconds) => {
                    best = best.min(seconds);
                    if seconds <= HOPELESS * best {
                        live.push(i);
                    }
                }
                Err(error) if i == MODEL => return Err(error),
                Err(error) => self.refused[i] = Some(error.to_string()),
            }
        }
        live.retain(|&i| i == MODEL || self.samples[i][0] <= HOPELESS * best);
        for &i in &live {
            // The first call was a warm-up.
            self.samples[i].clear();
        }
        Ok(live)
    }

    /// The seconds of a call. Also sets the number of calls in a measurement. A candidate that is dropped keeps its
    /// only call as its measurement.
    fn first_calls(&mut self, i: usize, best: f64) -> Result<f64> {
        let before = self.clock.now();
        self.benchmark.prepare(i)?;
        self.start += self.clock.now() - before;
        let mut seconds = self.timed(i, 1)?;
        if seconds <= HOPELESS * best || i == MODEL {
            seconds = self.timed(i, 1)?;
            self.times[i] = (MEASUREMENT_SECONDS / seconds).ceil().clamp(1.0, MAX_TIMES) as usize;
        }
        self.samples[i].push(seconds);
        Ok(seconds)
    }

    /// Runs a candidate `times` times and returns the mean time of a call in seconds.
    fn timed(&mut self, i: usize, times: usize) -> Result<f64> {
        let start = self.clock.now();
        self.benchmark.run(i, times)?;
        // If the clock is too coarse, the elapsed time may be zero. Avoid a later division by zero.
        let elapsed = (self.clock.now() - start).max(Duration::from_nanos(20));
        Ok(elapsed.as_secs_f64() / times as f64)
    }

    fn is_over(&self) -> bool {
        self.clock.now() - self.start >= self.budget
    }

    /// Measures each live candidate once; drops those that fail.
    fn pass(&mut self, live: &mut Vec<usize>) -> Result<()> {
        let mut failed = Vec::new();
        for &i in live.iter() {
            match self.timed(i, self.times[i]) {
                Ok(seconds) => self.samples[i].push(seconds),
                Err(error) if i == MODEL => return Err(error),
                Err(error) => {
                    self.refused[i] = Some(error.to_string());
                    failed.push(i);
                }
            }
        }
        live.retain(|i| !failed.contains(i));
        Ok(())
    }

    /// The median time of a call in seconds; infinite if there is no measurement.
    fn median(&self, i: usize) -> f64 {
        Spread::of(&self.samples[i]).map_or(f64::INFINITY, |s| s.median)
    }

    /// Drops the slower half of the candidates in each round until the cost model's choice and one more are left. Then
    /// it measures until these two can be told apart, or until the round ends; then they count as equal.
    fn halve(&mut self, mut live: Vec<usize>) -> Result<Stop> {
        if live.len() == 1 {
            for _ in 0..ENOUGH {
                self.pass(&mut live)?;
            }
        }
        while live.len() > 1 {
            let rounds = live.len().ilog2() + 1;
            let left = self.budget.saturating_sub(self.clock.now() - self.start);
            let end = self.clock.now() + left / rounds;
            for pass in 0..MAX_ROUND {
                if pass >= MIN_ROUND && self.clock.now() >= end {
                    break;
                }
                self.pass(&mut live)?;
                if self.drop_slow(&mut live) {
                    return Ok(Stop::Decided);
                }
                if self.is_over() && pass + 1 >= MIN_ROUND {
                    return Ok(Stop::Budget);
                }
            }
            let mut others: Vec<usize> = live.iter().copied().filter(|&i| i != MODEL).collect();
            if others.len() <= 1 {
                // The round is over and the two still cannot be told apart, so they count as equal.
                return Ok(Stop::Decided);
            }
            others.sort_by(|&a, &b| self.median(a).total_cmp(&self.median(b)));
            others.truncate(others.len().div_ceil(2));
            live.retain(|&i| i == MODEL || others.contains(&i));
        }
        Ok(Stop::Decided)
    }

    /// Drops candidates that are slower than the best by more than the spread; true if only the best and the cost
    /// model's choice are left, and these can be told apart.
    fn drop_slow(&self, live: &mut Vec<usize>) -> bool {
        let spread = |i: usize| {
            (self.samples[i].len() >= ENOUGH).then(|| Spread::of(&self.samples[i])).flatten()
        };
        let best = live.iter().filter_map(|&i| Some((i, spread(i)?)));
        let Some((best, ahead)) = best.min_by(|a, b| a.1.median.total_cmp(&b.1.median)) else {
            return false;
        };
        let is_behind = |i: usize| spread(i).is_some_and(|s| ahead.is_ahead(&s));
        live.retain(|&i| i == MODEL || !is_behind(i));
        match live[..] {
            [only] => only == best,
            [_, _] => live.contains(&best) && best != MODEL && is_behind(MODEL),
            _ => false,
        }
    }

    /// Measures all live candidates in passes: at least 7 and at most 30, and no more after the 7th if the budget is
    /// used up.
    fn exhaust(&mut self, mut live: Vec<usize>) -> Result<Stop> {
        for pass in 0..MAX_ROUND {
            if pass >= ENOUGH && self.is_over() {
                break;
            }
            self.pass(&mut live)?;
        }
        Ok(Stop::Exhausted)
    }

    /// The fastest candidate that is faster than the cost model's choice by more than the noise and by at least 2 %,
    /// and whose result is right; otherwise the cost model's choice.
    fn accept(&mut self) -> Result<usize> {
        let Some(model) = Spread::of(&self.samples[MODEL]) else { return Ok(MODEL) };
        let mut faster: Vec<(usize, Spread)> = (1..self.samples.len())
            .filter(|&i| self.refused[i].is_none() && self.samples[i].len() >= MIN_ROUND)
            .filter_map(|i| Some((i, Spread::of(&self.samples[i])?)))
            .filter(|(_, s)| s.is_ahead(&model) && s.median < (1.0 - MIN_GAIN) * model.median)
            .collect();
        faster.sort_by(|a, b| a.1.median.total_cmp(&b.1.median));
        for (i, _) in faster {
            match self.benchmark.verify(i) {
                Ok(true) => return Ok(i),
                Ok(false) => self.refused[i] = Some("its result differs from the oracle".into()),
                Err(error) => self.refused[i] = Some(error.to_string()),
            }
        }
        if self.benchmark.verify(MODEL)? {
            return Ok(MODEL);
        }
        Err(Error::Verification {
            op: "the model's choice, in a search".into(),
            detail: "its result differs from the oracle".into(),
        })
    }
}
