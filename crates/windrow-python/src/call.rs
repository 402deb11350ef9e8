//! The parts that every operator call shares: cached plans, scratch memory, the interpreter lock.

use crate::array::{Array, Family};
use crate::error::{IntoPy, exception};
use crate::output::{EmptyTensor, scratch};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use windrow::{Activation, Device, Filter, PlanOptions, Workspace};

/// Plans of earlier calls by what they compute. Making a plan costs more than running it on a
/// small tensor; a program calls with a few specs again and again.
///
/// The mutex is held for looking only: a plan is made with it and the interpreter lock released.
/// Two threads that miss the same plan at once make two, of which the first one stays.
pub(crate) struct PlanCache<S, P>(Mutex<Entries<S, P>>);

/// The one used last comes first.
type Entries<S, P> = Vec<Box<Entry<S, P>>>;

struct Entry<S, P> {
    spec: S,
    device: Device,
    plan: Arc<P>,
}

/// A network has a few dozen different layers, and three plans for each of them in training.
const CAPACITY: usize = 256;

impl<S: PartialEq + Clone + Send + Sync, P: Send + Sync> PlanCache<S, P> {
    pub(crate) const fn new() -> Self {
        PlanCache(Mutex::new(Vec::new()))
    }

    /// The plan for `spec` on `device`.
    pub(crate) fn get(
        &self,
        py: Python<'_>,
        spec: &S,
        device: Device,
        make: impl FnOnce(&S, &PlanOptions) -> windrow::Result<P> + Send,
    ) -> PyResult<Arc<P>> {
        if let Some(plan) = find(&mut self.entries(), spec, device) {
            return Ok(plan);
        }
        let options = PlanOptions::default().with_device(device);
        let plan = py.detach(|| make(spec, &options)).py()?;
        Ok(self.keep(py, spec.clone(), device, Arc::new(plan)))
    }

    /// Keeps a plan, and gives what is kept: another one that was there before.
    pub(crate) fn keep(&self, py: Python<'_>, spec: S, device: Device, plan: Arc<P>) -> Arc<P> {
        let mut entries = self.entries();
        if let Some(first) = find(&mut entries, &spec, device) {
            return first;
        }
        let oldest = if entries.len() == CAPACITY { entries.pop() } else { None };
        entries.insert(0, Box::new(Entry { spec, device, plan: plan.clone() }));
        // What a plan frees may take its time: not under the mutex.
        drop(entries);
        py.detach(|| drop(oldest));
        plan
    }

    /// The plan that was kept for `spec` on `device`.
    pub(crate) fn find(&self, spec: &S, device: Device) -> Option<Arc<P>> {
        find(&mut self.entries(), spec, device)
    }

    /// All plans, the one used last first.
    pub(crate) fn plans(&self) -> Vec<Arc<P>> {
        self.entries().iter().map(|entry| entry.plan.clone()).collect()
    }

    fn entries(&self) -> MutexGuard<'_, Entries<S, P>> {
        // The list is whole between any two statements that change it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn find<S: PartialEq, P>(entries: &mut Entries<S, P>, spec: &S, device: Device) -> Option<Arc<P>> {
    let i = entries.iter().position(|e| e.device == device && e.spec == *spec)?;
    entries[..=i].rotate_right(1);
    Some(entries[0].plan.clone())
}

/// Scratch memory up to this size is kept by each thread: on a tiny tensor allocating it would
/// cost more than the work. Larger blocks come from the library's cache.
const KEPT_BYTES: usize = 64 << 10;

thread_local! {
    /// The workspace; None before the first call and during one.
    static KEPT: Cell<Option<Workspace>> = const { Cell::new(None) };
}

/// The number of elements below which a call keeps the interpreter lock: releasing it and taking it back costs as much
/// as the work.
const RELEASE_FROM: usize = 16 << 10;

/// A stand-in for the number of elements: the work may compile kernels, so the interpreter lock is released however few
/// elements there are.
pub(crate) const RELEASE: usize = usize::MAX;

/// Runs `work` on the device and stream of `like`, with a workspace of `bytes` bytes, the
/// interpreter lock released unless `elements` are few and nothing is waited for.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    like: &Array<'_>,
    bytes: usize,
    elements: usize,
    work: impl FnOnce(&mut Workspace) -> windrow::Result<T> + Send,
) -> PyResult<T> {
    let on = On { device: like.device, family: &like.family, is_staged: like.is_staged() };
    run_with(py, &on, bytes, elements, None, work)
}

/// Where a call's work is done.
pub(crate) struct On<'a, 'py> {
    pub(crate) device: Device,
    /// The library of the tensors, which gives the stream and the memory.
    pub(crate) family: &'a Family<'py>,
    /// True if the tensors were copied to the device for this call.
    pub(crate) is_staged: bool,
}

/// [`run`], with scratch memory of PyTorch as `empty` gives it, which is at least `bytes` long.
pub(crate) fn run_with<T: Send>(
    py: Python<'_>,
    on: &On<'_, '_>,
    bytes: usize,
    elements: usize,
    empty: Option<&EmptyTensor>,
    work: impl FnOnce(&mut Workspace) -> windrow::Result<T> + Send,
) -> PyResult<T> {
    let mut wait = false;
    let mut lent = None;
    let keep = on.device == Device::Cpu && bytes <= KEPT_BYTES;
    let mut workspace = match on.device {
        Device::Cpu if keep => match KEPT.take() {
            Some(workspace) => workspace,
            None => Workspace::new(Device::Cpu, KEPT_BYTES).py()?,
        },
        Device::Cpu => Workspace::new(Device::Cpu, bytes).py()?,
        gpu => {
            let stream = on.family.current_stream(gpu)?;
            // What a library does on its own streams is ordered neither before nor after ours,
            // unless it tells its stream: `__dlpack__` was asked to order the legacy default stream
            // after it, and the end is waited for.
            wait = stream.is_none() || on.is_staged;
            let stream = stream.unwrap_or(null_mut());
            match on.family {
                Family::Exchange(_, torch) | Family::Torch(torch) if bytes > 0 && !on.is_staged => {
                    let (tensor, memory) = match empty {
                        Some(empty) => scratch(py, empty)?,
                        None => scratch(py, &EmptyTensor::bytes_beside(torch, bytes)?)?,
                    };
                    lent = Some(tensor);
                    // SAFETY: the current stream and the tensor live for the whole call, and then the tensor's allocator
                    // gives the memory to later work on this stream only.
                    unsafe { Workspace::on_memory(gpu, stream, memory, bytes) }.py()?
                }
                // SAFETY: the current stream lives, as does the default one, for the whole call.
                _ => unsafe { Workspace::on_stream(gpu, stream, bytes) }.py()?,
            }
        }
    };
    let work = || {
        let result = work(&mut workspace)?;
        if wait {
            workspace.synchronize()?;
        }
        Ok(result)
    };
    let result = if elements < RELEASE_FROM && !wait { work() } else { py.detach(work) };
    if keep {
        KEPT.set(Some(workspace));
    }
    drop(lent);
    result.map_err(exception)
}

/// Parses an option that is a word.
pub(crate) fn word<T: std::str::FromStr<Err = windrow::Error>>(s: &str) -> PyResult<T> {
    s.parse().py()
}

/// [`word`] where `None` stands for the default.
pub(crate) fn word_or_default<T>(s: Option<&str>) -> PyResult<T>
where
    T: std::str::FromStr<Err = windrow::Error> + Default,
{
    s.map_or_else(|| Ok(T::default()), word)
}

/// An accuracy, and whether the bits of an image must not depend on the batch: the package says both in one text, such
/// as `half batch_invariant`.
pub(crate) fn without_batch_invariant(accuracy: Option<&str>) -> (Option<&str>, bool) {
    const WORD: &str = "batch_invariant";
    match accuracy.map(|text| (text, text.strip_suffix(WORD))) {
        Some((_, Some(rest))) => (Some(rest.trim_end()).filter(|rest| !rest.is_empty()), true),
        Some((text, None)) => (Some(text), false),
        None => (None, false),
    }
}

/// Whether a filter is kept, as plans take it.
pub(crate) fn filter_of(is_kept: bool) -> Filter {
    if is_kept { Filter::Kept } else { Filter::Changing }
}

/// An activation by its name.
#[derive(Clone, Copy)]
pub(crate) struct ActivationName(Activation);

impl ActivationName {
    pub(crate) fn or_none(name: Option<Self>) -> Activation {
        name.map_or_else(Activation::default, |name| name.0)
    }
}

impl<'py> FromPyObject<'_, 'py> for ActivationName {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Ok(name) = given.extract::<&str>() else {
            let given = given.repr()?;
            let names = Activation::ALL.iter().map(|a| format!("\"{a}\"")).collect::<Vec<_>>();
            let message = format!("`activation` is {given}, expected None, {}", names.join(", "));
            return Err(PyTypeError::new_err(message));
        };
        word(name).map(ActivationName)
    }
}
