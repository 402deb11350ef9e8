//! The norm of heads on GPUs: in the kernel that computes them, or behind it.

use super::{Further, GRID, along_channels, define_outputs, output_address, source, strides};
use crate::causal_conv1d::HeadNorm;
use crate::causal_conv1d::gpu::shared::further_addresses;
use crate::gpu::{Gpu, Kernel, KernelSpec, Launch, Stream, params, type_name};
use crate::{Activation, Result, TensorDesc, TensorMut};

source!(NORM, "norm.cu");

const THREADS: usize = 512;
/// The channels of a thread.
const CHANNELS: usize = 8;
/// `NORM_BLOCK` of norm.cuh.
const BLOCK: usize = 256;

params! {
    /// `Params` of norm.cu.
    #[derive(Default)]
    pub(crate) struct Params {
        y: usize,
        y_stride: [isize; 3],
        further_y: [usize; 2],
        further_stride: [[isize; 3]; 2],
        further_first: [usize; 2],
        batch: usize,
        length: usize,
        norm_channels: usize,
        head: usize,
        epsilon: f32,
    }
}

/// The number of channels that have a norm.
pub(crate) fn norm_channels<'a>(
    norm: Option<HeadNorm>,
    outputs: impl Iterator<Item = &'a TensorDesc>,
) -> usize {
    let taken = outputs.enumerate().filter(|&(i, _)| norm.is_some() && HeadNorm::takes(i));
    taken.map(|(_, output)| output.shape()[1]).sum()
}

/// True if a kernel whose threads have `vector` neighbouring channels each can divide heads before it stores them:
/// a head then belongs to the threads of one warp.
pub(crate) fn fits_in_warp(norm: HeadNorm, vector: usize) -> bool {
    let width = norm.width();
    width.is_power_of_two()
        && width.is_multiple_of(vector)
        && width / vector <= 32
        && width <= BLOCK
}

/// The kernel of threads with `vector` neighbouring channels; it divides heads by their norm if it can.
pub(crate) fn define_norm(kernel: KernelSpec, norm: Option<HeadNorm>, vector: usize) -> KernelSpec {
    match norm.filter(|&norm| fits_in_warp(norm, vector)) {
        Some(norm) => kernel.define("HEAD", norm.width()),
        None => kernel,
    }
}

/// The kernel behind one that does not divide heads.
#[derive(Clone, Debug)]
pub(crate) struct NormBehind {
    norm: HeadNorm,
    kernel: &'static Kernel,
    params: Params,
    launch: Launch,
}

/// The kernel that divides the heads of these outputs.
fn kernel_spec<'a>(
    norm: HeadNorm,
    mut outputs: impl Iterator<Item = &'a TensorDesc> + Clone,
) -> Option<KernelSpec> {
    let count = outputs.clone().count();
    let y = outputs.next()?;
    let groups = norm.width().div_ceil(CHANNELS).next_power_of_two().min(BLOCK / CHANNELS);
    let kernel = KernelSpec::new(&NORM, format!("causal_conv1d_norm_{}", y.dtype))
        .define("T", type_name(y.dtype))
        .define("W", type_name(y.dtype))
        .define_activation("ACT", Activation::Identity)
        .define("WIDTH", 0)
        .define("THREADS", THREADS)
        .define("GROUPS", groups)
        .define("ALONG_CHANNELS", u8::from(along_channels(y.strides())))
        .params::<Params>()
        .overlapped(true);
    Some(define_outputs(kernel, count))
}

impl NormBehind {
    /// The kernel for the outputs [b, channels, l] of a spec; `None` without a norm, or with nothing to divide.
    pub(crate) fn of<'a>(
        gpu: &'static Gpu,
        norm: Option<HeadNorm>,
        outputs: impl Iterator<Item = &'a TensorDesc> + Clone,
    ) -> Result<Option<Self>> {
        let channels = norm_channels(norm, outputs.clone());
        let (Some(norm), Some(y)) = (norm, outputs.clone().next()) else { return Ok(None) };
        let Some(kernel) = kernel_spec(norm, outputs.clone()) else { return Ok(None) };
        let further = Further::of(outputs);
        let &[batch, _, length] = y.shape() else { return Ok(None) };
        let groups: usize = kernel.value_of("GROUPS").and_then(|n| n.parse().ok()).unwrap_or(1);
        let positions = batch.saturating_mul(length);
        let params = Params {
            y_stride: strides(Some(y)),
            further_stride: further.strides,
            further_first: further.first,
            batch,
            length,
            norm_channels: channels,
            head: norm.width(),
            epsilon: norm.epsilon(),
            ..Params::default()
        };
        let launch = Launch {
            grid: [
                positions.div_ceil(THREADS / groups) as u32,
                (channels / norm.width()).min(GRID) as u32,
                1,
            ],
            block: [THREADS as u32, 1, 1],
        };
        Ok(Some(NormBehind { norm, kernel: gpu.kernel(&kernel)?, params, launch }))
    }

    pub(crate) fn norm(&self) -> HeadNorm {
        self.norm
    }

    /// Divides the heads of these outputs, which are not empty.
    ///
    /// # Safety
    /// The outputs have the spec's sizes and strides and are valid on this device.
    pub(crate) unsafe fn run(
        &self,
        stream: &Stream,
        y: &TensorMut<'_>,
        further: [Option<&TensorMut<'_>>; 2],
    ) -> Result<()> {
        let Params { further_stride, further_first, .. } = &self.params;
        let params = Params {
            y: output_address(Some(y)),
            further_y: further_addresses(further, further_stride, further_first),
            ..self.params
        };
        // SAFETY: `Params` is the kernel's structure (it compares its size); the rest is promised by the caller.
        unsafe { self.kernel.launch(stream, self.launch, &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Layout};

    #[test]
    fn kernels_compile_without_spills() {
        let mut kernels = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for order in [[0, 1, 2], [0, 2, 1]] {
                for width in [1, 6, 128, 1000] {
                    let layout = Layout::with_order(&[2, 4 * width, 9], &order).unwrap();
                    let y = TensorDesc { dtype, layout };
                    for outputs in [&[y][..], &[y, y, y]] {
                        kernels.extend(kernel_spec(HeadNorm::new(width), outputs.iter()));
                    }
                }
            }
        }
        crate::gpu::compile_tests::check_compiles_in_turn(&kernels);
    }

    #[test]
    fn heads_fit_in_a_warp_if_its_lanes_have_them() {
        let fits = |width, vector| fits_in_warp(HeadNorm::new(width), vector);
        assert!(fits(128, 4) && fits(128, 8) && fits(256, 8) && fits(8, 8) && fits(1, 1));
        assert!(!fits(128, 2) && !fits(96, 8) && !fits(4, 8) && !fits(512, 16));
    }
}
