//! Ways to compute the gradient of x: as a convolution of dy, or in parts.

use super::super::choice::choose;
use super::super::method::{Method, Prepared, Run, Task};
use super::super::methods::prepare;
use super::super::shared::epilogue::Residual;
use super::super::shared::stencil::Stencil;
use super::super::shared::tolerance;
use super::super::{AMX, GROUPED, IM2COL, PLANAR, PLANE, RUNS, TRANSPOSED, amx, bf16_pairs, runs};
use crate::conv2d::mirrored::{mirrored, mirrored_view};
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Tile};
use crate::lists::{collected, room_for};
use crate::{Activation, Filter, Result, TensorMut, TensorRef};

/// A gradient of x, bound to methods.
#[derive(Debug)]
pub(crate) struct DataGradient {
    /// True if the filter is the mirrored one.
    is_mirrored: bool,
    /// Run one after the other, each writes its part of dx; the first may write zeros over all.
    parts: Vec<Box<dyn Prepared>>,
}

impl DataGradient {
    pub(crate) fn tile(&self) -> Option<Tile> {
        self.parts.first().and_then(|part| part.tile())
    }

    pub(crate) fn tolerance(&self) -> f64 {
        self.parts.iter().map(|part| part.tolerance()).fold(tolerance(0), f64::max)
    }

    /// Bytes of memory for a run.
    pub(crate) fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.raw_bytes()).max().unwrap_or(0)
    }

    /// The gradient into `dx`, which has elements, of views that agree with the spec, with [`DataGradient::bytes`] of
    /// memory.
    pub(crate) fn run(
        &self,
        w: &TensorRef<'_>,
        dy: &TensorRef<'_>,
        dx: &mut TensorMut<'_>,
        memory: &mut [u8],
    ) {
        let mirrored = if self.is_mirrored { mirrored_view(w) } else { None };
        let w = mirrored.as_ref().unwrap_or(w);
        for part in &self.parts {
            let (bias, residual, activation) = (None, Residual::NONE, Activation::Identity);
            let workspace = &mut *memory;
            part.run_raw(
                w,
                Run { x: dy, initial: None, bias, residual, activation, y: dx, workspace },
            );
        }
    }
}

/// A convolution of dy by the mirrored filter, if that is faster than the parts.
pub(super) fn by_mirrored(task: &Task<'_>) -> Result<Option<DataGradient>> {
    let Some(spec) = mirrored(task.spec, task.problem) else { return Ok(None) };
    let Ok(problem) = spec.problem() else { return Ok(None) };
    let task = Task::new(&spec, &problem, task.isa, task.threads)?
        .with_batch_invariant(task.batch_invariant);
    // Its filter is packed on each run.
    let algorithm = choose(&task, Filter::Changing);
    let pays = match algorithm {
        Conv2dAlgorithm::Direct => {
            amx::computes(&task) || bf16_pairs::computes(&task) || runs::pays(&task)
        }
        other => other.is_winograd(),
    };
    if !pays {
        return Ok(None);
    }
    let part = prepare(&task, &Conv2dConfiguration::new(algorithm))?;
    let parts = collected(part)?;
    Ok((!parts.is_empty()).then_some(DataGradient { is_mirrored: true, parts }))
}

/// Parts that are summed by tiles.
pub(super) fn by_tiles(task: &Task<'_>) -> Result<Option<DataGradient>> {
    if !amx::pays(task, Filter::Changing) {
        return Ok(None);
    }
    by_parts(task, &[&AMX])
}

/// Parts that are summed tap by tap, of few channels.
pub(super) fn by_taps(task: &Task<'_>) -> Result<Option<DataGradient>> {
    if !task.problem.prefers_direct() {
        return Ok(None);
    }
    by_parts(task, &[&RUNS, &GROUPED, &TRANSPOSED, &PLANE, &PLANAR])
}

/// Parts that are matrix products.
pub(super) fn by_products(task: &Task<'_>) -> Result<Option<DataGradient>> {
    by_parts(task, &[&IM2COL])
}

/// The parts of dx, each by the first method that supports it.
fn by_parts(task: &Task<'_>, methods: &[&dyn Method]) -> Result<Option<DataGradient>> {
    let &Task { spec, problem: p, isa, threads, batch_invariant, .. } = task;
    let stencils = Stencil::backward_data(spec, p)?;
    let written: usize = stencils.iter().map(Stencil::pixels).sum();
    let zero = (written < p.n * p.h * p.w).then(|| Stencil::zero(spec, p));
    let mut parts = room_for(stencils.len() + 1)?;
    for stencil in zero.into_iter().chain(stencils) {
        let part = Task { spec, problem: p, stencil, isa, threads, batch_invariant };
        for method in methods {
            // A method looks at the stencil alone, not at its algorithm's parameters.
            let configuration = Conv2dConfiguration::new(method.algorithms()[0]);
            if let Some(prepared) = method.prepare(&part, &configuration)? {
                parts.push(prepared);
                break;
            }
        }
    }
    Ok(Some(DataGradient { is_mirrored: false, parts }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::{Conv2dParams, Conv2dSpec};
    use crate::cpu::Isa;
    use crate::{DType, Layout, TensorDesc};

    /// The stencil of dy, whose channels are neighbours too.
    #[test]
    fn gradients_of_few_channels_are_summed_by_runs() {
        for isa in Isa::available().into_iter().filter(|isa| !isa.has_tiles()) {
            for ([c, k, r], order, runs) in [
                ([32, 3, 3], [0, 2, 3, 1], true),
                ([32, 16, 5], [0, 2, 3, 1], true),
                ([32, 3, 3], [0, 1, 2, 3], false),
                ([3, 64, 3], [0, 2, 3, 1], false),
            ] {
                let layout = Layout::with_order(&[2, c, 20, 21], &order).unwrap();
                let params = Conv2dParams { padding: [r / 2; 2], ..Default::default() };
                let x = TensorDesc::new(DType::F32, layout);
                let spec = Conv2dSpec::new(
                    x,
                    TensorDesc::contiguous(DType::F32, &[k, c, r, r]).unwrap(),
                    &params,
                )
                .unwrap();
                let problem = spec.problem().unwrap();
                let task = Task::new(&spec, &problem, isa, 2).unwrap();
                let data = by_mirrored(&task).unwrap();
                let algorithm = data.map(|data| data.parts[0].configuration().algorithm);
                let by_runs = algorithm == Some(Conv2dAlgorithm::DirectRuns);
                assert_eq!(by_runs, runs && !isa.is_small(), "{isa:?} {spec:?}");
            }
        }
    }
}
