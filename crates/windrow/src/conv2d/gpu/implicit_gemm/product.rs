//! The kernels of the product and the shape of their blocks.

use super::cut::{Cut, Factors, Gather, gather, is_padded, stores_pixels, stores_vectors};
use super::parameters::{Params, VideoParams};
use crate::DType;
use crate::conv2d::gpu::{kernel, source, with_epilogue};
use crate::conv2d::{Conv2dSpec, Problem};
use crate::gpu::{Feature, KernelSpec, Source};

static SPLIT_PRODUCT: Source = source!(
    "implicit_gemm.cu",
    "implicit_gemm.cuh",
    "implicit_gemm_floats.cuh",
    "implicit_gemm_gather.cuh",
    "implicit_gemm_output.cuh",
    "implicit_gemm_special.cuh"
);
static SINGLE_PRODUCT: Source = source!(
    "implicit_gemm_single.cu",
    "implicit_gemm.cuh",
    "implicit_gemm_floats.cuh",
    "implicit_gemm_gather.cuh",
    "implicit_gemm_halves.cuh"
);

/// The exponents of scaled operands, whose largest magnitudes are below 2^(exponent + 1): f16 holds 2^15, and pixels
/// that come later may be larger than those that set the scale.
const INPUT_EXPONENT: i32 = 8;
pub(super) const FILTER_EXPONENT: i32 = 14;
const CONSUMER_WARPS: usize = 8;

/// The product for addresses aligned to 16 bytes, or any.
pub(super) fn product(spec: &Conv2dSpec, p: &Problem, cut: Cut, aligned: bool) -> KernelSpec {
    match cut.is_single() {
        true => single_product(spec, p, cut, aligned),
        false => split_product(spec, p, cut, aligned),
    }
}

fn split_product(spec: &Conv2dSpec, p: &Problem, cut: Cut, aligned: bool) -> KernelSpec {
    let (stage, stages) = (cut.stage_bytes(), cut.stages());
    // Behind the stages: rows of the tile, for each warp constants of its channels and a scale, barriers.
    let of_warps = CONSUMER_WARPS * (2 * cut.block * size_of::<f32>() + 16);
    let shared = stages * (stage + 16) + cut.pixels * 8 + of_warps + 16;
    let product = with_epilogue(kernel(&SPLIT_PRODUCT, "implicit_gemm", DType::F32), spec)
        .needs(Feature::WarpgroupProducts)
        .define("GATHER", gather(spec, p, cut, aligned) as i32)
        .define("PADDED", i32::from(is_padded(p)))
        .define("BLOCK_K", cut.block)
        .define("SPLIT", cut.parts)
        .define("STAGES", stages)
        .define("CHANNELS_LAST_OUT", i32::from(aligned && stores_vectors(&spec.y, p)))
        .define("INPUT_EXPONENT", INPUT_EXPONENT)
        .define("FILTER_EXPONENT", FILTER_EXPONENT)
        .shared_bytes(shared as u32);
    with_params(product, p)
}

/// The product with its parameters, over images or over the frames of a video.
fn with_params(product: KernelSpec, p: &Problem) -> KernelSpec {
    match p.is_video() {
        true => product.define("FRAMES", 1).params::<VideoParams>(),
        false => product.params::<Params>(),
    }
}

fn single_product(spec: &Conv2dSpec, p: &Problem, cut: Cut, aligned: bool) -> KernelSpec {
    let (stage, stages) = (cut.stage_bytes(), cut.stages());
    // Behind the stages: rows of the tile, for each warp the bias of its channels, barriers.
    let of_warps = CONSUMER_WARPS * cut.block * size_of::<f32>();
    let shared = stages * (stage + 16) + cut.pixels * 8 + of_warps;
    let rounds = cut.factors == Factors::Tf32;
    let out = match aligned {
        true if stores_vectors(&spec.y, p) => 1,
        true if stores_pixels(&spec.y) && !rounds && pairs_lie_in_rows(cut, p) => 2,
        _ => 0,
    };
    let product = kernel(&SINGLE_PRODUCT, "implicit_gemm_single", spec.x.dtype);
    let product = if rounds { product.define("TF32", 1) } else { product };
    let product = with_epilogue(product, spec)
        .needs(Feature::WarpgroupProducts)
        .define("GATHER", if cut.maps { Gather::Map } else { Gather::Channels } as i32)
        .define("PADDED", i32::from(!cut.maps && is_padded(p)))
        .define("STRIP", i32::from(cut.strips))
        .define("BLOCK_M", cut.pixels)
        .define("BLOCK_K", cut.block)
        .define("SPLIT", cut.parts)
        .define("STAGES", stages)
        .define("RESIDENT", cut.resident())
        .define("PRODUCERS", cut.producers())
        .define("OUT", out)
        .shared_bytes(shared as u32);
    with_params(product, p)
}

/// True if two neighbouring pixels of the product that begin at an even one lie in one row of y, or none of them does.
pub(super) fn pairs_lie_in_rows(cut: Cut, p: &Problem) -> bool {
    !cut.strips || p.ow.is_multiple_of(2) && cut.pitch(p).is_multiple_of(2)
}

/// The threads of a block.
pub(super) fn threads(cut: Cut) -> usize {
    32 * CONSUMER_WARPS + cut.producers()
}
