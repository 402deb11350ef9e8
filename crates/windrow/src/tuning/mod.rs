//! The choice of a configuration: by a cost model, from earlier measurements, or by a search.
//!
//! A configuration is an algorithm with its parameters, for example
//! [`Conv2dConfiguration`](crate::Conv2dConfiguration). [`Plan::tune`](crate::Plan::tune) measures the candidates for a
//! spec, within a time budget, and saves the winner in a file, the *table* of this type of device. Plans with
//! [`Tuning::Cached`] read it from there. [`table_path`] says where the file is. [`export`] and [`import`] move tables
//! between machines.

pub(crate) mod cache;
mod device;
mod search;
#[cfg(test)]
mod tests;

pub(crate) use search::{Benchmark, Clock};
pub use search::{Search, Stop};

use crate::plan::Tuned;
use crate::verification::random_tensor;
use crate::{Device, Error, Result, Tensor, TensorDesc, Tuning};
use cache::{Entries, Entry, Known};
use search::{MODEL, Spread, SystemClock, search};
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The interface of a search to a problem: a spec with plan options and, on the CPU, a number of threads.
pub(crate) trait Tunable {
    type Configuration: Copy + PartialEq + Display + FromStr<Err = Error>;

    fn device(&self) -> Device;
    /// The key of the problem in a table: operator, types, sizes and options, and on the CPU the number of threads.
    fn key(&self) -> String;
    /// The candidates, the cost model's choice first.
    fn candidates(&self) -> Result<Vec<Self::Configuration>>;
    /// The run time that the cost model predicts, in arbitrary units.
    fn cost(&self, configuration: &Self::Configuration) -> Result<f64>;
    /// True if a configuration from a file may be used.
    fn is_valid(&self, configuration: &Self::Configuration) -> bool;
    /// The clock of a search.
    fn clock(&self) -> Box<dyn Clock> {
        Box::new(SystemClock::new())
    }
    /// The object that prepares, runs and verifies `candidates`.
    fn benchmark<'a>(
        &'a self,
        candidates: &'a [Self::Configuration],
    ) -> Result<Box<dyn Benchmark + 'a>>;
}

/// The measurements of a search.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// The key of the problem in a table: operator, types, sizes and options.
    pub problem: String,
    /// The candidates, the cost model's choice first.
    pub candidates: Vec<Measured>,
    /// The index of the winner in `candidates`: the fastest candidate that is correct, and faster than the first
    /// candidate by more than the noise and by at least 2 %. If there is none, it is the first candidate.
    pub chosen: usize,
    /// The reason why the search ended.
    pub stop: Stop,
    /// The error message if the winner could not be saved. `None` if it was saved, or if nothing had to be saved.
    pub not_kept: Option<String>,
}

/// A candidate of a search.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Measured {
    /// The configuration as text.
    pub configuration: String,
    /// The predicted run time, divided by that of the first candidate.
    pub expected: f64,
    /// The median seconds of a call; `None` if the candidate was not measured.
    pub seconds: Option<f64>,
    /// The number of measurements.
    pub samples: usize,
    /// The reason why the candidate was rejected or not measured; `None` otherwise.
    pub refused: Option<String>,
}

impl Report {
    /// The winner, at [`Report::chosen`].
    pub fn winner(&self) -> &Measured {
        &self.candidates[self.chosen]
    }

    /// The first candidate: the cost model's choice or, if the caller gave the configurations, the first of them.
    pub fn model(&self) -> &Measured {
        &self.candidates[MODEL]
    }

    /// The speedup of the winner over the cost model's choice; 1 if one of them was not measured.
    pub fn gain(&self) -> f64 {
        match (self.model().seconds, self.winner().seconds) {
            (Some(model), Some(winner)) => model / winner,
            _ => 1.0,
        }
    }
}

/// The configuration that a plan should use; `None` for the cost model's choice. `problem` is called only if a table
/// has entries, or for [`Tuning::Search`].
///
/// # Errors
/// Errors of a search; [`Error::NoDevice`] or [`Error::Backend`] if the device cannot be used.
pub(crate) fn decide<T: Tunable>(
    device: Device,
    tuning: Tuning,
    problem: impl FnOnce() -> Result<T>,
) -> Result<Option<T::Configuration>> {
    let budget = match tuning {
        Tuning::Model => return Ok(None),
        Tuning::Cached => None,
        Tuning::Search { budget } => Some(budget),
    };
    let known = Known::of(device)?;
    if budget.is_none() && known.is_empty() {
        return Ok(None);
    }
    let problem = &problem()?;
    let key = problem.key();
    if let Some(found) = known.found(&key).and_then(|text| valid(problem, &key, &text)) {
        return Ok(Some(found));
    }
    if let Some(budget) = budget {
        let (found, report) = tune(problem, &Search { budget, exhaustive: false })?;
        if let Some(error) = report.not_kept {
            tracing::warn!(%error, "what was found by tuning cannot be written");
        }
        return Ok(Some(found));
    }
    Ok(known.shipped(&key).and_then(|text| valid(problem, &key, text)))
}

/// The configuration of an entry, if it can be used.
fn valid<T: Tunable>(problem: &T, key: &str, text: &str) -> Option<T::Configuration> {
    let configuration = text.parse().ok().filter(|c| problem.is_valid(c));
    if configuration.is_none() {
        tracing::warn!(problem = key, configuration = text, "a tuned configuration is ignored");
    }
    configuration
}

/// Measures configurations. The first is the baseline of gains: usually the cost model's choice.
///
/// # Errors
/// Errors of making or running the first configuration; [`Error::Parameter`] if `configurations` is empty.
pub(crate) fn measure<T: Tunable>(
    problem: &T,
    configurations: &[T::Configuration],
    how: &Search,
) -> Result<Report> {
    let Some(first) = configurations.first() else {
        return Err(Error::parameter("configurations", "none", "at least one"));
    };
    let model_cost = problem.cost(first)?;
    let mut benchmark = problem.benchmark(configurations)?;
    let outcome = search(configurations.len(), how, &mut *benchmark, &*problem.clock())?;
    let measured = configurations.iter().enumerate().map(|(i, configuration)| {
        Ok(Measured {
            configuration: configuration.to_string(),
            expected: problem.cost(configuration)? / model_cost,
            seconds: Spread::of(&outcome.samples[i]).map(|s| s.median),
            samples: outcome.samples[i].len(),
            refused: outcome.refused[i].clone(),
        })
    });
    Ok(Report {
        problem: problem.key(),
        candidates: measured.collect::<Result<_>>()?,
        chosen: outcome.chosen,
        stop: outcome.stop,
        not_kept: None,
    })
}

/// Measures the candidates and saves the winner.
///
/// # Errors
/// Errors of making and running the cost model's choice.
pub(crate) fn tune<T: Tunable>(problem: &T, how: &Search) -> Result<(T::Configuration, Report)> {
    let candidates = problem.candidates()?;
    let mut report = measure(problem, &candidates, how)?;
    if let (Some(seconds), Some(model_seconds)) = (report.winner().seconds, report.model().seconds)
    {
        // Milliseconds, rounded to whole nanoseconds so that the file is easy to read.
        let ms = |seconds: f64| (seconds * 1e9).round() / 1e6;
        let entry = Entry {
            configuration: report.winner().configuration.clone(),
            ms: ms(seconds),
            model: report.model().configuration.clone(),
            model_ms: ms(model_seconds),
        };
        let known = Known::of(problem.device())?;
        let kept = known.remember(Entries::from([(report.problem.clone(), entry)]));
        report.not_kept = kept.err().map(|error| error.to_string());
    }
    Ok((candidates[report.chosen], report))
}

/// A tensor of random numbers with a period of 1,000,003 elements, so that large inputs are made quickly.
pub(crate) fn random_input(seed: u64, desc: TensorDesc, low: f64, high: f64) -> Result<Tensor> {
    const PERIOD: usize = 1_000_003;
    let period = TensorDesc::contiguous(desc.dtype, &[desc.layout.len().clamp(1, PERIOD)])?;
    let numbers = random_tensor(seed, period, low, high)?;
    let mut tensor = Tensor::uninitialised(desc)?;
    for part in tensor.as_bytes_mut().chunks_mut(numbers.as_bytes().len()) {
        part.copy_from_slice(&numbers.as_bytes()[..part.len()]);
    }
    Ok(tensor)
}

/// The file with the table of a device; `None` if there is no folder for it.
///
/// # Errors
/// [`Error::NoDevice`], [`Error::Backend`].
pub fn table_path(device: Device) -> Result<Option<PathBuf>> {
    let name = Known::of(device)?.device.file_name();
    Ok(cache::directory().map(|directory| directory.join(name)))
}

/// The table of this machine's results for a device, as text for [`import`].
///
/// # Errors
/// [`Error::NoDevice`], [`Error::Backend`].
pub fn export(device: Device) -> Result<String> {
    let known = Known::of(device)?;
    Ok(cache::print(&known.device, &known.user()))
}

/// Merges the entries of a table into the file for the type of device that the table names. An entry for the same
/// problem replaces the old one. A process that has already looked up a configuration for such a device, this one
/// included, does not see the new entries. An entry is skipped with a warning if its operator or its configuration is
/// unknown to this version. Returns the number of entries that were merged.
///
/// # Errors
/// [`Error::Parameter`] if the text is not a table of this version of the library, or if the table cannot be written.
pub fn import(table: &str) -> Result<usize> {
    let expected = "a table that `windrow tune --export` of the same version wrote";
    let (device, mut entries) =
        cache::parse(table).map_err(|reason| Error::parameter("table", reason, expected))?;
    entries.retain(|problem, entry| {
        let is_known = is_known(problem, &entry.configuration);
        if !is_known {
            let configuration = &*entry.configuration;
            tracing::warn!(
                problem,
                configuration,
                "an entry of a tuning table is no configuration of this version"
            );
        }
        is_known
    });
    let bad = |reason: &dyn Display| {
        Error::parameter("WINDROW_TUNE_CACHE", reason, "a folder that can be written")
    };
    let directory = cache::directory().ok_or_else(|| bad(&"no folder"))?;
    cache::store(&directory, &device, &entries)
        .map_err(|error| bad(&format!("{}: {error}", directory.display())))?;
    Ok(entries.len())
}

/// True if the operator named at the start of the key can parse the configuration.
fn is_known(problem: &str, configuration: &str) -> bool {
    let name = problem.split(' ').next();
    let operator = crate::TUNABLE.iter().find(|operator| Some(operator.name) == name);
    operator.is_some_and(|operator| (operator.is_configuration)(configuration))
}

/// What the tables need to know of an operator.
pub(crate) struct TunableOperator {
    name: &'static str,
    /// The test whether a text is a configuration of the operator.
    is_configuration: fn(&str) -> bool,
}

impl TunableOperator {
    pub(crate) const fn of<O: Tuned>() -> Self {
        TunableOperator {
            name: O::NAME,
            is_configuration: |text| text.parse::<O::Configuration>().is_ok(),
        }
    }
}
