//! Random test cases. A case is a random valid spec of an operator; it is run in several ways (conv2d: with a raw, a
//! packed and a cached filter) and compared with the oracle.

use super::choices::{Choices, mix};
use super::data::Held;
use super::{Check, Comparison};
use crate::cpu::Isa;
use crate::{Device, Error, Result};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A function that makes a random case of an operator, runs it and checks the results.
pub(crate) type Run = fn(&mut Choices<'_>, &mut Trial) -> Result<()>;

/// Runs a case on the CPU with each instruction set in turn, or on a GPU.
pub(crate) fn trial(run: Run, choices: &mut Choices<'_>, device: Device) -> Outcome {
    let mut trial = Trial::new(device);
    let result = catch_unwind(AssertUnwindSafe(|| run(choices, &mut trial)));
    let Trial { mut outcome, .. } = trial;
    match result {
        Ok(Ok(())) => {}
        Ok(Err(error)) => outcome.failures.push(format!("refused: {error}")),
        Err(panic) => outcome.failures.push(format!("panicked: {}", message(panic.as_ref()))),
    }
    outcome
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

/// The result of a random case.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// Operator, spec and options.
    pub description: String,
    /// Elements compared with the oracle.
    pub elements: usize,
    /// The failures, one message each.
    pub failures: Vec<String>,
    /// The name of each target (an instruction set of the CPU, or a GPU) with a hash of the bits of all its results.
    pub digests: Vec<(String, u64)>,
}

/// The state of a running random case.
pub(crate) struct Trial {
    device: Device,
    outcome: Outcome,
}

/// A target of a case: an instruction set of the CPU, or a GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane {
    index: usize,
    pub(crate) isa: Isa,
}

impl Trial {
    fn new(device: Device) -> Self {
        let names = match device {
            Device::Cpu => Isa::tested().iter().map(|isa| isa.name().to_owned()).collect(),
            Device::Cuda(_) | Device::Hip(_) => vec![device.to_string()],
        };
        let digests = names.into_iter().map(|name| (name, 0)).collect();
        Trial { device, outcome: Outcome { digests, ..Outcome::default() } }
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// The targets on which the case has to run.
    pub(crate) fn lanes(&self) -> Vec<Lane> {
        let isas = match self.device {
            Device::Cpu => Isa::tested(),
            Device::Cuda(_) | Device::Hip(_) => vec![Isa::best()],
        };
        isas.into_iter().enumerate().map(|(index, isa)| Lane { index, isa }).collect()
    }

    /// Sets the description of the case. Call it before anything runs.
    pub(crate) fn describe(&mut self, description: String) {
        self.outcome.description = description;
    }

    pub(crate) fn fail(&mut self, what: impl Into<String>) {
        self.outcome.failures.push(what.into());
    }

    /// Records comparisons and their failures. `how` says which run was checked.
    pub(crate) fn check(&mut self, lane: Lane, how: &str, checks: Vec<Check>) {
        for Check { what, comparison } in checks {
            self.compare(lane, how, what, &comparison);
        }
    }

    pub(crate) fn compare(&mut self, lane: Lane, how: &str, what: &str, comparison: &Comparison) {
        self.outcome.elements += comparison.count();
        if !comparison.passed() {
            let name = &self.outcome.digests[lane.index].0;
            self.outcome.failures.push(format!("{what} of {how} on {name}: {comparison}"));
        }
    }

    /// Adds a result to the digest, checks that the bytes around it were not written, and returns the bits of its
    /// elements.
    pub(crate) fn result(&mut self, lane: Lane, what: &str, result: &Held) -> Result<Vec<u64>> {
        let bits: Vec<u64> = result
            .values()?
            .into_iter()
            .map(|value| if value.is_nan() { f64::NAN.to_bits() } else { value.to_bits() })
            .collect();
        let digest = &mut self.outcome.digests[lane.index].1;
        for bits in &bits {
            *digest = mix(digest.wrapping_add(*bits));
        }
        if !result.is_intact_around()? {
            let name = &self.outcome.digests[lane.index].0;
            self.outcome.failures.push(format!("memory beside {what} was written on {name}"));
        }
        Ok(bits)
    }

    /// Fails unless the result is an error of one of these kinds.
    pub(crate) fn expect_error<T>(&mut self, what: &str, result: Result<T>, kinds: &[&str]) {
        match result {
            Ok(_) => self.fail(format!("{what} was accepted, expected an error {kinds:?}")),
            Err(error) if !kinds.contains(&kind(&error)) => {
                self.fail(format!("{what}: {error:?}, expected {kinds:?}"));
            }
            Err(_) => {}
        }
    }
}

/// The name of an error's variant.
fn kind(error: &Error) -> &'static str {
    match error {
        Error::Rank { .. } => "Rank",
        Error::Shape { .. } => "Shape",
        Error::DType { .. } => "DType",
        Error::Strides { .. } => "Strides",
        Error::OverlappingOutput { .. } => "OverlappingOutput",
        Error::Aliasing { .. } => "Aliasing",
        Error::Parameter { .. } => "Parameter",
        Error::Index { .. } => "Index",
        Error::SizeOverflow { .. } => "SizeOverflow",
        Error::Unsupported { .. } => "Unsupported",
        Error::OutOfMemory { .. } => "OutOfMemory",
        _ => "another",
    }
}
