//! The choice of a configuration: by a model, from earlier measurements, or by a search.
//!
//! A configuration is an algorithm with its parameters, as [`Conv2dConfiguration`](crate::Conv2dConfiguration).
//! `XPlan::tune` measures all candidates of a problem and keeps the winner in a file for the device's
//! model; plans with [`Tuning::Cached`] find it there.

pub(crate) mod cache;
mod device;
mod search;
#[cfg(test)]
mod tests;

pub(crate) use search::{Clock, Contest};
pub use search::{Search, Stop};

use crate::plan::{Operator, Tuned};
use crate::verification::random_tensor;
use crate::{CausalConv1d, Conv2d, Device, Error, Gelu, Result, Tensor, TensorDesc, Tuning};
use cache::{Entries, Entry, Known};
use search::{MODEL, Spread, SystemClock, search};
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// One problem of an operator: what a room tells the search.
pub(crate) trait Tunable {
    type Configuration: Copy + PartialEq + Display + FromStr<Err = Error>;

    fn device(&self) -> Device;
    /// What is computed, in words and numbers; on the CPU with the number of threads.
    fn key(&self) -> String;
    /// Every candidate, the model's choice first.
    fn candidates(&self) -> Result<Vec<Self::Configuration>>;
    /// Time that the model expects, in any unit.
    fn cost(&self, configuration: &Self::Configuration) -> Result<f64>;
    /// Whether a configuration from a file may be used.
    fn is_valid(&self, configuration: &Self::Configuration) -> bool;
    /// By what a search measures.
    fn clock(&self) -> Box<dyn Clock> {
        Box::new(SystemClock::new())
    }
    /// What runs these candidates.
    fn contest<'a>(
        &'a self,
        candidates: &'a [Self::Configuration],
    ) -> Result<Box<dyn Contest + 'a>>;
}

/// The measurements of a search.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// The problem that was computed.
    pub problem: String,
    /// Every candidate, the model's choice first.
    pub candidates: Vec<Measured>,
    /// The winner, by its place in `candidates`.
    pub chosen: usize,
    /// The reason why the search ended.
    pub stop: Stop,
    /// The reason why the winner could not be kept on disk, if it should have been.
    pub not_kept: Option<String>,
}

/// A candidate of a search.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Measured {
    /// The configuration.
    pub configuration: String,
    /// Time that the model expects, relative to that of its choice.
    pub expected: f64,
    /// Median seconds of a call; `None` if it was not measured.
    pub seconds: Option<f64>,
    /// The number of measurements.
    pub samples: usize,
    /// The reason why it was left out, if it was.
    pub refused: Option<String>,
}

impl Report {
    /// The candidate that won.
    pub fn winner(&self) -> &Measured {
        &self.candidates[self.chosen]
    }

    /// The model's choice.
    pub fn model(&self) -> &Measured {
        &self.candidates[MODEL]
    }

    /// Time of the model's choice over that of the winner.
    pub fn gain(&self) -> f64 {
        match (self.model().seconds, self.winner().seconds) {
            (Some(model), Some(winner)) => model / winner,
            _ => 1.0,
        }
    }
}

/// The configuration that a plan should take; `None` for the model's. The problem is made only if there is
/// something to look up.
///
/// # Errors
/// Those of a search, and without the device.
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

/// Measures configurations, of which the first is the model's choice or what else gains refer to.
///
/// # Errors
/// Those of making and running the first; [`Error::Parameter`] without any.
pub(crate) fn measure<T: Tunable>(
    problem: &T,
    configurations: &[T::Configuration],
    how: &Search,
) -> Result<Report> {
    let Some(first) = configurations.first() else {
        return Err(Error::parameter("configurations", "none", "at least one"));
    };
    let model_cost = problem.cost(first)?;
    let mut contest = problem.contest(configurations)?;
    let outcome = search(configurations.len(), how, &mut *contest, &*problem.clock())?;
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

/// Measures all candidates and keeps the winner.
///
/// # Errors
/// Those of making and running the model's choice.
pub(crate) fn tune<T: Tunable>(problem: &T, how: &Search) -> Result<(T::Configuration, Report)> {
    let candidates = problem.candidates()?;
    let mut report = measure(problem, &candidates, how)?;
    if let (Some(seconds), Some(model_seconds)) = (report.winner().seconds, report.model().seconds)
    {
        // In whole nanoseconds, for readers.
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

/// A tensor of random numbers that repeat after a million, for inputs of any size in no time.
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

/// The file that keeps the table of a device; `None` if there is no folder for it.
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

/// Adds the entries of a table to what is known of the device model that it names; those of
/// the same problems are replaced. Processes that have looked up a configuration for such a device already do
/// not see them. An entry of no operator, or of a configuration that this version does not know, is left out with a
/// warning. Returns the number of the others.
///
/// # Errors
/// [`Error::Parameter`] if the text is no table of this library version, or the table cannot be written.
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

/// Whether some plan could take the configuration: a problem's key begins with its operator.
fn is_known(problem: &str, configuration: &str) -> bool {
    let is_configuration = match problem.split(' ').next() {
        Some(Gelu::NAME) => is_configuration::<Gelu>,
        Some(CausalConv1d::NAME) => is_configuration::<CausalConv1d>,
        Some(Conv2d::NAME) => is_configuration::<Conv2d>,
        _ => return false,
    };
    is_configuration(configuration)
}

fn is_configuration<O: Tuned>(text: &str) -> bool {
    text.parse::<O::Configuration>().is_ok()
}
