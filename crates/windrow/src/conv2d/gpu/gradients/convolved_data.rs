//! Data gradients that are convolutions: either a convolution of dy with the mirrored filter, or a transposed
//! convolution, which runs on every GPU.

use crate::conv2d::gpu::Operands;
use crate::conv2d::gpu::choice;
use crate::conv2d::gpu::general::{Direction, General, Sums};
use crate::conv2d::gpu::gradient::{DataGradient, GradientMethod};
use crate::conv2d::gpu::grouped::GroupedMethod;
use crate::conv2d::gpu::method::Method;
use crate::conv2d::gpu::methods;
use crate::conv2d::gpu::prepared::Prepared;
use crate::conv2d::gpu::task::Task;
use crate::conv2d::mirrored::mirrored;
use crate::conv2d::{Conv2dAlgorithm, Conv2dSpec, Problem};
use crate::gpu::{Gpu, Stream};
use crate::{Activation, Layout, Result, TensorDesc};

/// The convolution with the mirrored filter, if a method faster than plain sums computes it.
pub(super) struct MirroredMethod;

impl GradientMethod<dyn DataGradient> for MirroredMethod {
    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Option<Box<dyn DataGradient>>> {
        let &Task { spec, problem, .. } = task;
        let mirror = mirrored(spec, problem).or_else(|| mirrored_depthwise(spec, problem));
        let Some(mirror) = mirror else { return Ok(None) };
        let Ok(p) = mirror.problem() else { return Ok(None) };
        let task = task.gradient(&mirror, &p);
        let algorithm = choice::best(gpu, &task)?;
        let is_ahead = match algorithm {
            Conv2dAlgorithm::Direct => GroupedMethod.computes(&task),
            other => other != Conv2dAlgorithm::Im2colGemm,
        };
        if !is_ahead {
            return Ok(None);
        }
        Ok(Some(Box::new(Mirrored(methods::prepare(gpu, &task.by(algorithm))?))))
    }
}

#[derive(Debug)]
struct Mirrored(Box<dyn Prepared>);

impl DataGradient for Mirrored {
    fn is_mirrored(&self) -> bool {
        true
    }

    fn tile(&self) -> Option<usize> {
        self.0.tile()
    }

    fn scratch_bytes(&self) -> usize {
        self.0.packed_bytes() + self.0.scratch_bytes()
    }

    fn tolerance(&self) -> f64 {
        self.0.tolerance()
    }

    unsafe fn run(&self, stream: &Stream, w: *const u8, operands: Operands) -> Result<()> {
        let scratch = operands.scratch.wrapping_add(self.0.packed_bytes());
        // SAFETY: the caller's promise.
        unsafe {
            let packed = self.0.packed(stream, w, operands.scratch)?;
            self.0.run(stream, packed, Operands { scratch, ..operands })
        }
    }
}

/// A transposed convolution by the kernels of [`General`], for gradients that no other method computes.
pub(super) struct TransposedMethod;

impl GradientMethod<dyn DataGradient> for TransposedMethod {
    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Option<Box<dyn DataGradient>>> {
        let sums = if task.is_few() { Sums::Direct } else { Sums::Im2colGemm };
        let direction = Direction::BackwardData;
        let general = General::new(gpu, task, sums, direction, true)?;
        Ok(Some(Box::new(Transposed(general))))
    }
}

#[derive(Debug)]
struct Transposed(General);

impl DataGradient for Transposed {
    fn scratch_bytes(&self) -> usize {
        self.0.packed_bytes()
    }

    fn tolerance(&self) -> f64 {
        self.0.tolerance()
    }

    unsafe fn run(&self, stream: &Stream, w: *const u8, operands: Operands) -> Result<()> {
        // SAFETY: the caller's promise; these kernels need no scratch memory.
        unsafe {
            let packed = self.0.packed(stream, w, operands.scratch)?;
            self.0.run(stream, packed, operands)
        }
    }
}

/// The spec as in [`mirrored`], for depthwise convolutions: the filter keeps its place.
fn mirrored_depthwise(spec: &Conv2dSpec, p: &Problem) -> Option<Conv2dSpec> {
    let padding =
        |d: usize| (([p.r, p.s][d] - 1).checked_mul(p.dilation[d])?).checked_sub(p.padding[d]);
    let &[k, _, r, s] = spec.w.shape() else { return None };
    let strides = spec.w.strides();
    if p.stride != [1, 1] || p.groups == 1 || p.c_group() != 1 || p.k_group() != 1 {
        return None;
    }
    let w = Layout::strided(&[k, 1, r, s], &[strides[0], strides[1], -strides[2], -strides[3]]);
    Some(Conv2dSpec {
        x: spec.y,
        w: TensorDesc { layout: w.ok()?, ..spec.w },
        y: spec.x,
        bias: None,
        padding: [padding(0)?, padding(1)?],
        activation: Activation::Identity,
        ..spec.clone()
    })
}
