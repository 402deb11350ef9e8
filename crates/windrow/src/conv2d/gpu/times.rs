//! What algorithms are expected to take on CUDA, in microseconds.

use super::cudnn::turned::Turned;
use super::grouped::Groups;
use super::implicit_gemm;
use super::winograd_row::WinogradRow;
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem, Tile};
use crate::dtype::not_computed;
use crate::gpu::Gpu;
use crate::{Accuracy, Activation, DType};

/// Expected microseconds of packing: a launch, and the filter read and written at what a copy has on an H200.
pub(super) fn pack_micros(spec: &Conv2dSpec, p: &Problem, algorithm: Conv2dAlgorithm) -> f64 {
    let parts = match spec.x.dtype {
        DType::F32 if is_strict(spec) => 2,
        DType::F32 | DType::F16 | DType::BF16 | not_computed!() => 1,
    };
    let source = p.r * p.s * spec.w.dtype.size();
    let packed = match algorithm {
        Conv2dAlgorithm::WinogradGemm(tile) => 2 * tile.alpha() * tile.alpha() * parts,
        Conv2dAlgorithm::WinogradRow => 2 * 15 * parts,
        Conv2dAlgorithm::ImplicitGemm => 2 * p.r * p.s * parts,
        _ => source,
    };
    3.0 + 0.26e-6 * (p.k * p.c_group() * (source + packed)) as f64
}

pub(super) fn tiles(p: &Problem, tile: Tile) -> usize {
    p.n * p.oh.div_ceil(tile.m()) * p.ow.div_ceil(tile.m())
}

pub(super) fn is_strict(spec: &Conv2dSpec) -> bool {
    spec.x.dtype == DType::F32 && spec.accuracy <= Accuracy::Fp32
}

/// True if the channels of a pixel are whole 16-byte vectors.
pub(super) fn has_vectors(spec: &Conv2dSpec, p: &Problem) -> bool {
    let vector = 16 / spec.x.dtype.size();
    p.c.is_multiple_of(vector) && p.k.is_multiple_of(vector)
}

/// How often the fused kernel's blocks fill the device: a block computes two units of 192 outputs of 64
/// channels. In strict f32 with the outputs beside the image, of which 14 columns have a fifth.
pub(super) fn row_rounds(spec: &Conv2dSpec, p: &Problem, multiprocessors: u32) -> f64 {
    let rounds = if is_strict(spec) {
        WinogradRow::rounds(p, !is_channels_last(&spec.y.layout), multiprocessors)
    } else {
        let blocks = (p.n * p.oh * p.ow) as f64 / 384.0 * p.k.div_ceil(64) as f64;
        blocks / f64::from(multiprocessors)
    };
    if rounds < 4.0 { rounds.ceil() } else { rounds }
}

/// Expected microseconds of the fused kernel: every round takes its steps of 16 input channels. Like the
/// following, fitted to 51 layers on an H200 (`benchmarks/record/2026-11-22-h200/conv2d-algorithms-f32.csv`).
pub(super) fn row_micros(spec: &Conv2dSpec, p: &Problem, multiprocessors: u32) -> f64 {
    let step = match spec.x.dtype {
        _ if is_strict(spec) => 3.8,
        DType::F32 => 2.0,
        DType::F16 | DType::BF16 | not_computed!() => 1.4,
    };
    // Pixels that are no whole vectors are copied, and stored element by element.
    let slower = is_channels_last(&spec.y.layout) && !has_vectors(spec, p);
    let micros = 10.0 + step * row_rounds(spec, p, multiprocessors) * p.c.div_ceil(16) as f64;
    if slower { 2.0 * micros } else { micros }
}

/// Expected microseconds of the stages: launches, passes over x, V, M and y, products.
pub(super) fn staged_micros(spec: &Conv2dSpec, p: &Problem, tile: Tile) -> f64 {
    // Passes over x, halves for an element of V.
    let (reads, parts) = match spec.x.dtype {
        DType::F32 => (2.0, if is_strict(spec) { 3 } else { 1 }),
        DType::F16 | DType::BF16 | not_computed!() => (1.0, 1),
    };
    let elements = (tiles(p, tile) * tile.alpha() * tile.alpha()) as f64;
    let bytes = |channels: usize, pixels: usize| {
        (p.n * spec.x.dtype.size()) as f64 * channels as f64 * pixels as f64
    };
    let images = reads * bytes(p.c, p.h * p.w) + bytes(p.k, p.oh * p.ow);
    let megabytes = 1e-6 * (2.0 * elements * (2 * parts * p.c + 4 * p.k) as f64 + images);
    13.0 + 0.26 * megabytes + 2e-9 * elements * (parts * p.c * p.k) as f64
}

/// Expected microseconds of cuDNN's kernels. In strict f32 few blocks, which sum all terms, leave the device idle.
pub(super) fn cudnn_micros(spec: &Conv2dSpec, p: &Problem) -> f64 {
    let (per_gflop, per_term) = match spec.x.dtype {
        // Of groups of 4 to 32 channels (ResNeXt-50).
        _ if is_strict(spec) && p.groups > 1 => (27.0 * (1.0 + 40.0 / p.k_group() as f64), 0.0232),
        _ if is_strict(spec) => (27.0, 0.0232),
        DType::F32 => (2.6, 0.0),
        DType::F16 | DType::BF16 | not_computed!() => return cudnn_half_micros(spec, p),
    };
    (10.0 + per_gflop * 1e-9 * p.flops()).max(3.5 + per_term * p.taps() as f64)
}

/// Expected microseconds of the pass behind cuDNN's kernel: a launch, y read and written, and what is added read.
pub(super) fn cudnn_pass_micros(spec: &Conv2dSpec, p: &Problem) -> f64 {
    if !has_pass(spec) && !Turned::suits(spec, p) {
        return 0.0;
    }
    let tensors = if spec.residual { 3 } else { 2 };
    let megabytes = 1e-6 * (tensors * p.n * p.k * p.oh * p.ow * spec.y.dtype.size()) as f64;
    2.0 + megabytes / 3.0
}

/// True if something is left to do behind cuDNN's kernel.
pub(super) fn has_pass(spec: &Conv2dSpec) -> bool {
    spec.bias.is_some() || spec.residual || spec.activation != Activation::Identity
}

/// Expected microseconds of sums in groups of some channels: a launch, terms one after the other, then tensors and products,
/// of which channels-last ones read filters more slowly.
fn few_channels_micros(spec: &Conv2dSpec, p: &Problem, megabytes: f64) -> f64 {
    let per_gflop = match (is_channels_last(&spec.y.layout), p.stride == [1, 1]) {
        (false, true) => 33.0,
        (false, false) => 42.0,
        (true, true) => 40.0,
        (true, false) => 60.0,
    };
    3.5 + 0.05 * p.taps() as f64 + 0.22 * megabytes + per_gflop * 1e-9 * p.flops()
}

/// As [`cudnn_micros`], of halves: few blocks, products, which pixels of no whole vectors make slow, or passes over x and y,
/// which are more where they are not channels-last.
fn cudnn_half_micros(spec: &Conv2dSpec, p: &Problem) -> f64 {
    let few = 3.0 + 0.0017 * p.taps() as f64;
    let per_flop = match p.groups > 1 || p.c.is_multiple_of(8) {
        true => 1.3e-9 * (1.0 + 80.0 / p.k_group().max(1) as f64),
        // Of the 3, 4 and 6 channels of first layers.
        false => 30e-9,
    };
    let products = per_flop * p.flops();
    let megabytes = |elements: usize| 1e-6 * (p.n * elements * spec.x.dtype.size()) as f64;
    let (x, y) = (megabytes(p.c * p.h * p.w), megabytes(p.k * p.oh * p.ow));
    let plain = p.r * p.s == 1 && p.stride == [1, 1];
    let copies = match () {
        () if plain || is_channels_last(&spec.y.layout) => 0.0,
        () if Turned::suits(spec, p) => 2.5 + 0.57 * x,
        () => 5.0 + 2.0 * (x + y) / 2.6,
    };
    few.max(products).max((x + y) / 3.6) + copies
}

/// The same of a data gradient that is no convolution of dy, by cuDNN or, for few channels, sums of one thread.
pub(super) fn gathered_data_micros(spec: &Conv2dSpec, p: &Problem) -> f64 {
    match p.c_group() < 8 {
        true => 10.0 + 300e-9 * p.flops(),
        false => cudnn_micros(spec, p),
    }
}

/// Expected microseconds of cuDNN's weight gradient in strict f32.
pub(super) fn gathered_weight_micros(p: &Problem) -> f64 {
    10.0 + 40e-9 * p.flops()
}

/// Time that the model expects, in microseconds.
pub(crate) fn cost(
    gpu: &Gpu,
    spec: &Conv2dSpec,
    p: &Problem,
    configuration: &Conv2dConfiguration,
) -> f64 {
    micros(spec, p, configuration, gpu.info.multiprocessors)
}

pub(super) fn micros(
    spec: &Conv2dSpec,
    p: &Problem,
    configuration: &Conv2dConfiguration,
    multiprocessors: u32,
) -> f64 {
    let gflop = 1e-9 * p.flops();
    match configuration.algorithm {
        Conv2dAlgorithm::ImplicitGemm => {
            implicit_gemm::micros(multiprocessors, spec, p, configuration)
        }
        Conv2dAlgorithm::WinogradRow => row_micros(spec, p, multiprocessors),
        Conv2dAlgorithm::WinogradGemm(tile) => staged_micros(spec, p, tile),
        Conv2dAlgorithm::Direct if Groups::supports(p) => {
            let pixels = p.n * (p.c * p.h * p.w + p.k * p.oh * p.ow);
            let megabytes = 1e-6 * (pixels * spec.x.dtype.size()) as f64;
            match p.c_group() {
                1 => 3.5 + 0.24 * megabytes + 33.0 * gflop,
                _ => few_channels_micros(spec, p, megabytes),
            }
        }
        Conv2dAlgorithm::Direct => 10.0 + 300.0 * gflop,
        Conv2dAlgorithm::Cudnn => cudnn_micros(spec, p) + cudnn_pass_micros(spec, p),
        _ => 10.0 + 50.0 * gflop,
    }
}
