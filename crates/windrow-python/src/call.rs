//! What every operator call shares: plans kept for later calls, scratch memory, the interpreter
//! lock.

use crate::array::Array;
use crate::error::{IntoPy, exception};
use pyo3::prelude::*;
use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};
use windrow::{Device, PlanOptions, Workspace};

/// Plans of earlier calls by what they compute. Making a plan costs more than running it on a
/// small tensor; a program calls with a few specs again and again.
pub(crate) struct PlanCache<S, P>(Mutex<Vec<Entry<S, P>>>);

struct Entry<S, P> {
    spec: S,
    device: Device,
    plan: Arc<P>,
}

/// A network has a few dozen different layers.
const CAPACITY: usize = 64;

impl<S: PartialEq + Clone, P> PlanCache<S, P> {
    pub(crate) const fn new() -> Self {
        PlanCache(Mutex::new(Vec::new()))
    }

    /// The plan for `spec` on `device`.
    pub(crate) fn get(
        &self,
        spec: &S,
        device: Device,
        make: impl FnOnce(&S, &PlanOptions) -> windrow::Result<P>,
    ) -> PyResult<Arc<P>> {
        let mut plans = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(i) = plans.iter().position(|e| e.device == device && e.spec == *spec) {
            let plan = plans[i].plan.clone();
            if i > 0 {
                // Plans in use move to the front, unused ones to the end, where they are dropped.
                plans.swap(i, i - 1);
            }
            return Ok(plan);
        }
        let options = PlanOptions { device, ..PlanOptions::default() };
        let plan = Arc::new(make(spec, &options).py()?);
        plans.truncate(CAPACITY - 1);
        plans.push(Entry { spec: spec.clone(), device, plan: plan.clone() });
        Ok(plan)
    }
}

/// Scratch memory up to this size is kept by each thread: on a tiny tensor allocating it would
/// cost more than the work. Larger blocks come from the library's cache.
const KEPT_BYTES: usize = 64 << 10;

thread_local! {
    /// None before the first call and during one.
    static KEPT: Cell<Option<Workspace>> = const { Cell::new(None) };
}

/// Below this many elements a call keeps the interpreter lock: handing it over and taking it back
/// costs as much as the work.
const RELEASE_FROM: usize = 16 << 10;

/// Runs `work` on the device and stream of `like`, with a workspace of `bytes` bytes, the
/// interpreter lock released unless `elements` are few.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    like: &Array<'_>,
    bytes: usize,
    elements: usize,
    work: impl FnOnce(&mut Workspace) -> windrow::Result<T> + Send,
) -> PyResult<T> {
    let mut wait = false;
    let keep = like.device == Device::Cpu && bytes <= KEPT_BYTES;
    let mut workspace = match like.device {
        Device::Cpu if keep => match KEPT.take() {
            Some(workspace) => workspace,
            None => Workspace::new(Device::Cpu, KEPT_BYTES).py()?,
        },
        Device::Cpu => Workspace::new(Device::Cpu, bytes).py()?,
        Device::Cuda(index) => {
            let stream = like.family.current_stream(index)?;
            // What a library does on its own streams is ordered neither before nor after ours,
            // unless it tells its stream: `__dlpack__` was asked to order the legacy default stream
            // after it, and the end is waited for.
            wait = stream.is_none() || like.is_staged();
            // SAFETY: the current stream lives, as does the default one, for the whole call.
            unsafe { Workspace::on_stream(index, stream.unwrap_or(null_mut()), bytes) }.py()?
        }
    };
    let work = || {
        let result = work(&mut workspace)?;
        if wait {
            workspace.synchronize()?;
        }
        Ok(result)
    };
    let result = if elements < RELEASE_FROM { work() } else { py.detach(work) };
    if keep {
        KEPT.set(Some(workspace));
    }
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
