//! Plans of convolutions made ahead of their calls, several at the same time: each may compile kernels for seconds.

use crate::access::is_for_rocm;
use crate::call::{filter_of, word};
use crate::conv2d::{Key, Named, PLANS, make_plan};
use crate::dlpack::DLDataType;
use crate::error::IntoPy;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use windrow::{Conv2dPlan, Conv2dSpec, Device, Filter, Layout, PlanOptions, TensorDesc};

/// A convolution by the types, shapes and strides of its tensors, in a dictionary.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Described<'py> {
    /// `cpu` or `cuda:0`, as PyTorch names it.
    device: String,
    dtype: String,
    /// Shape and strides.
    x: (Vec<usize>, Vec<isize>),
    weight: (Vec<usize>, Vec<isize>),
    has_bias: bool,
    residual: bool,
    named: Named<'py>,
    is_kept: bool,
    /// No plan is made if the cost model chooses one of these algorithms.
    unless: Vec<String>,
    /// If the packed filter has more bytes than this, the plan that packs on each call is made, too.
    much: Option<usize>,
}

/// A plan to make.
struct Task {
    key: Key,
    device: Device,
    unless: Vec<String>,
    much: Option<usize>,
}

impl Task {
    fn new(py: Python<'_>, described: Described<'_>) -> PyResult<Self> {
        let dtype = DLDataType::from_name(&described.dtype).and_then(DLDataType::dtype);
        let unknown = || PyTypeError::new_err(format!("unknown type {}", described.dtype));
        let dtype = dtype.ok_or_else(unknown)?;
        let desc = |(shape, strides): &(Vec<usize>, Vec<isize>)| {
            Layout::strided(shape, strides).map(|layout| TensorDesc::new(dtype, layout)).py()
        };
        let weight = desc(&described.weight)?;
        let outputs = [described.weight.0.first().copied().unwrap_or(0)];
        let bias = described.has_bias.then(|| Layout::contiguous(&outputs)).transpose().py()?;
        let (params, memory, batch_invariant) = described.named.parts(py)?;
        let spec = Conv2dSpec::new(desc(&described.x)?, weight, &params).py()?;
        let spec = spec
            .with_bias(bias.map(|layout| TensorDesc::new(dtype, layout)))
            .with_residual(described.residual);
        let device = match word(&described.device)? {
            Device::Cuda(index) if is_for_rocm(py)? => Device::Hip(index),
            device => device,
        };
        let key = (spec, None, filter_of(described.is_kept), memory, batch_invariant);
        Ok(Task { key, device, unless: described.unless, much: described.much })
    }

    /// Makes the plan. `None` if it was made before, or if the cost model chooses an algorithm that needs none.
    fn make(&self) -> windrow::Result<Option<Conv2dPlan>> {
        let (spec, _, filter, memory, batch_invariant) = &self.key;
        let options = PlanOptions::default().with_device(self.device);
        let chosen = options.with_filter(*filter).with_memory(*memory);
        let chosen = chosen.with_batch_invariant(*batch_invariant);
        let is_needed = self.unless.is_empty() || {
            let choice = Conv2dPlan::choice(spec, &chosen)?;
            self.unless.iter().all(|name| name != choice.name())
        };
        match is_needed && PLANS.find(&self.key, self.device).is_none() {
            true => make_plan(&self.key, &options).map(Some),
            false => Ok(None),
        }
    }
}

/// Makes the plans that `conv2d` would make for these convolutions, on up to `threads` threads, and no more than this
/// process has CPUs.
///
/// Returns an error's message for each convolution that has no plan, otherwise None.
#[pyfunction]
pub(crate) fn conv2d_prepare(
    py: Python<'_>,
    convolutions: Vec<Described<'_>>,
    threads: usize,
) -> PyResult<Vec<Option<String>>> {
    let mut errors = vec![None; convolutions.len()];
    let (mut places, mut tasks, mut also) = (Vec::new(), Vec::new(), Vec::new());
    for (place, described) in convolutions.into_iter().enumerate() {
        match Task::new(py, described) {
            Ok(task) => {
                places.push(place);
                tasks.push(task);
            }
            Err(error) => errors[place] = Some(error.to_string()),
        }
    }
    let made = py.detach(|| all(&tasks, threads));
    for ((place, task), made) in places.into_iter().zip(&tasks).zip(made) {
        errors[place] = made.as_ref().err().map(ToString::to_string);
        let Ok(Some(plan)) = made else { continue };
        if task.much.is_some_and(|much| plan.packed_bytes() > much) {
            let key = (task.key.0.clone(), None, Filter::Changing, task.key.3, task.key.4);
            also.push(Task { key, device: task.device, unless: Vec::new(), much: None });
        }
        PLANS.keep(py, task.key.clone(), task.device, Arc::new(plan));
    }
    for (task, made) in also.iter().zip(py.detach(|| all(&also, threads))) {
        if let Ok(Some(plan)) = made {
            PLANS.keep(py, task.key.clone(), task.device, Arc::new(plan));
        }
    }
    Ok(errors)
}

/// The outcome of each task.
fn all(tasks: &[Task], threads: usize) -> Vec<windrow::Result<Option<Conv2dPlan>>> {
    let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(tasks.len())));
    let work = || {
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(task) = tasks.get(place) else { break };
            let outcome = (place, task.make());
            outcomes.lock().unwrap_or_else(PoisonError::into_inner).push(outcome);
        }
    };
    // A container's limit counts, too.
    let cpus = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    std::thread::scope(|scope| {
        for _ in 1..threads.min(cpus).min(tasks.len()) {
            scope.spawn(work);
        }
        work();
    });
    let mut outcomes = outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
    outcomes.sort_by_key(|(place, _)| *place);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}
