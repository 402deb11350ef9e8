//! The code that several methods share: the convolution as a stencil, the way of sums to y, copies, and packing.

pub(super) mod activation;
pub(super) mod axis;
pub(super) mod channels;
pub(super) mod epilogue;
pub(super) mod frames;
pub(super) mod pack;
pub(super) mod rows;
pub(super) mod stencil;
pub(super) mod store;

use crate::cpu::{Kernel, Simd, SimdElement as _};
use crate::dtype::with_element;
use crate::{DType, TensorRef};

/// Strides of a tensor that was checked to have four dimensions.
pub(super) fn strides4(strides: &[isize]) -> [isize; 4] {
    strides.try_into().expect("four dimensions")
}

/// Rounding errors of sums in f32 of which each element passes through up to `additions`, relative
/// to the sum of absolute terms.
pub(super) fn tolerance(additions: usize) -> f64 {
    (additions + 2) as f64 * DType::F32.unit_roundoff()
}

/// Elements of the workspace for the bias in f32, in whole cache lines.
pub(super) fn bias_len(k: usize) -> usize {
    k.next_multiple_of(16)
}

/// Writes the bias of `k` channels, or zeros without one, to the beginning of a workspace, with zeros
/// up to whole cache lines. Gives it and what follows.
pub(super) fn stage_bias<'a>(
    bias: Option<&TensorRef<'_>>,
    k: usize,
    workspace: &'a mut [u8],
) -> (&'a [f32], &'a mut [f32]) {
    let (staged, rest) = floats_mut(workspace).split_at_mut(bias_len(k));
    fill_bias(bias, staged);
    (staged, rest)
}

/// The bias as f32, zeros beyond it.
fn fill_bias(bias: Option<&TensorRef<'_>>, out: &mut [f32]) {
    out.fill(0.0);
    let Some(bias) = bias else { return };
    if bias.dtype() == DType::F32 && bias.strides()[0] == 1 {
        let len = bias.shape()[0];
        // SAFETY: the elements of the bias.
        let bias = unsafe { std::slice::from_raw_parts(bias.as_ptr().cast(), len) };
        return out[..len].copy_from_slice(bias);
    }
    for (k, out) in out[..bias.shape()[0]].iter_mut().enumerate() {
        let offset = k as isize * bias.strides()[0];
        // SAFETY: element k of the bias.
        *out = with_element!(bias.dtype(), T => unsafe {
            bias.as_ptr().cast::<T>().offset(offset).read().to_f32()
        });
    }
}

/// Aligned memory as f32.
pub(crate) fn floats(bytes: &[u8]) -> &[f32] {
    // SAFETY: every bit pattern is an f32.
    let (before, floats, _) = unsafe { bytes.align_to::<f32>() };
    assert!(before.is_empty(), "memory is aligned");
    floats
}

/// Aligned memory as f32.
pub(crate) fn floats_mut(bytes: &mut [u8]) -> &mut [f32] {
    // SAFETY: every bit pattern is an f32.
    let (before, floats, _) = unsafe { bytes.align_to_mut::<f32>() };
    assert!(before.is_empty(), "memory is aligned");
    floats
}

/// Asks an instruction set for the length and number of its vectors.
pub(super) struct Vectors;

impl Kernel for Vectors {
    type Output = (usize, usize);

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (usize, usize) {
        (S::LANES, S::REGISTERS)
    }
}
