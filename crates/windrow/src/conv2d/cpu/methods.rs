//! Functions that search the list of the CPU's methods. Their only error is [`OutOfMemory`](crate::Error::OutOfMemory),
//! if there is no memory for a list of the filter's taps.

use super::METHODS;
use super::method::{Found, Method, Task};
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::cpu::Isa;
use crate::{Accuracy, Filter, Result};

/// The methods of an algorithm.
fn methods_of(algorithm: Conv2dAlgorithm) -> impl Iterator<Item = &'static dyn Method> {
    METHODS.into_iter().filter(move |method| method.algorithms().contains(&algorithm))
}

/// The first method of an algorithm that supports the task.
fn method_for(task: &Task<'_>, algorithm: Conv2dAlgorithm) -> Result<Option<&'static dyn Method>> {
    for method in methods_of(algorithm) {
        if method.supports(task)? {
            return Ok(Some(method));
        }
    }
    Ok(None)
}

/// The algorithms that can compute a task, whatever their accuracy.
pub(crate) fn supported(task: &Task<'_>) -> Result<Vec<Conv2dAlgorithm>> {
    let mut found = Vec::new();
    for method in METHODS {
        if method.supports(task)? {
            for &algorithm in method.algorithms() {
                if !found.contains(&algorithm) {
                    found.push(algorithm);
                }
            }
        }
    }
    Ok(found)
}

/// The algorithms that can compute a convolution with an instruction set, whatever their accuracy.
pub(crate) fn algorithms(spec: &Conv2dSpec, p: &Problem, isa: Isa) -> Result<Vec<Conv2dAlgorithm>> {
    supported(&Task::new(spec, p, isa, 1)?)
}

/// The task, prepared by the first method of the configuration's algorithm that supports it. `None` if no method
/// supports the task.
pub(crate) fn prepare(task: &Task<'_>, configuration: &Conv2dConfiguration) -> Found {
    for method in methods_of(configuration.algorithm) {
        if let Some(prepared) = method.prepare(task, configuration)? {
            return Ok(Some(prepared));
        }
    }
    Ok(None)
}

/// True if an accuracy allows an algorithm.
pub(crate) fn allows(accuracy: Accuracy, algorithm: Conv2dAlgorithm) -> bool {
    methods_of(algorithm).any(|method| method.allows(accuracy))
}

/// The names of an algorithm's parameters, without `threads`. Each parameter is a positive number.
pub(crate) fn parameters(algorithm: Conv2dAlgorithm) -> &'static [&'static str] {
    methods_of(algorithm).next().map_or(&[], Method::parameters)
}

/// The configurations of an algorithm that a search tries in addition to the cost model's choice.
pub(crate) fn candidates(algorithm: Conv2dAlgorithm, threads: usize) -> Vec<Conv2dConfiguration> {
    methods_of(algorithm).flat_map(|method| method.candidates(algorithm, threads)).collect()
}

/// The expected time of an algorithm. The unit is the time of one f32 multiplication in vectorised code.
pub(crate) fn cost(task: &Task<'_>, algorithm: Conv2dAlgorithm, filter: Filter) -> Result<f64> {
    let method = method_for(task, algorithm)?;
    Ok(method.map_or(f64::INFINITY, |method| method.cost(task, algorithm, filter)))
}
