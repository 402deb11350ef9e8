//! Outputs of a split on GPUs: parameters of `output_of` in parameters.cuh.

use crate::causal_conv1d::problem::OUTPUTS;
use crate::causal_conv1d::split::Split;
use crate::gpu::KernelSpec;
use crate::{TensorDesc, TensorMut};

/// The number of outputs behind the first one.
const FURTHER: usize = OUTPUTS - 1;

/// Strides and first channels of the outputs behind the first one; zeros for those that do not exist.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Further {
    pub strides: [[isize; 3]; FURTHER],
    pub first: [usize; FURTHER],
}

impl Further {
    /// Strides and first channels of a spec's outputs.
    pub(crate) fn of<'a>(outputs: impl Iterator<Item = &'a TensorDesc> + Clone) -> Self {
        let mut further = Further::default();
        let channels = Split::of(outputs.clone()).channels();
        for (i, output) in outputs.enumerate().skip(1) {
            further.strides[i - 1] = super::strides(Some(output));
            further.first[i - 1] = channels[i].start;
        }
        further
    }
}

/// The addresses at which channel 0 of these outputs would lie.
pub(crate) fn further_addresses(
    outputs: [Option<&TensorMut<'_>>; FURTHER],
    strides: &[[isize; 3]; FURTHER],
    first: &[usize; FURTHER],
) -> [usize; FURTHER] {
    std::array::from_fn(|i| {
        outputs[i].map_or(0, |output| {
            let before = (first[i] * output.dtype().size()).wrapping_mul(strides[i][1] as usize);
            (output.as_ptr() as usize).wrapping_sub(before)
        })
    })
}

/// The kernel for this number of outputs. With one output the kernel is as if there were no others.
pub(crate) fn define_outputs(kernel: KernelSpec, outputs: usize) -> KernelSpec {
    if outputs > 1 { kernel.define("OUTPUTS", outputs) } else { kernel }
}
