//! The constants of the cost model, in one file for each GPU model that was measured.

mod h200;

use crate::gpu::Gpu;

/// The data of a GPU on which expected times depend.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chip {
    pub(super) multiprocessors: u32,
    /// Bytes of the second-level cache.
    pub(super) l2_cache: usize,
    pub(super) rates: &'static Rates,
}

impl Chip {
    /// The data of `gpu`. Only an H200 was measured, so every GPU has an H200's rates; [`Chip::borrowed`] says if these
    /// are not its own.
    pub(super) fn of(gpu: &Gpu) -> Self {
        let info = &gpu.info;
        Chip { multiprocessors: info.multiprocessors, l2_cache: info.l2_cache, rates: &h200::RATES }
    }

    /// The GPU model whose rates are used for `gpu`; `None` if both have the same architecture.
    pub(super) fn borrowed(gpu: &Gpu) -> Option<&'static str> {
        let rates = Chip::of(gpu).rates;
        (gpu.info.architecture != rates.architecture).then_some(rates.chip)
    }

    /// The data of an H200 with this number of multiprocessors, for tests of choices.
    #[cfg(test)]
    pub(super) fn h200(multiprocessors: u32) -> Self {
        Chip { multiprocessors, l2_cache: 50 << 20, rates: &h200::RATES }
    }
}

/// The measured rates of a GPU model, in microseconds.
#[derive(Debug)]
pub(super) struct Rates {
    /// The GPU model that was measured, and the architecture that its kernels are compiled for.
    pub(super) chip: &'static str,
    pub(super) architecture: &'static str,
    pub(super) packing: Packing,
    pub(super) direct: Plain,
    pub(super) im2col_gemm: Plain,
    pub(super) grouped: Grouped,
    pub(super) group_products: GroupProducts,
    pub(super) winograd_row: WinogradRow,
    pub(super) winograd_gemm: WinogradGemm,
    pub(super) implicit_gemm: ImplicitGemm,
    pub(super) cudnn: Cudnn,
    pub(super) gradients: Gradients,
}

/// The time of packing a filter: for a launch, and for each byte that is read or written.
#[derive(Debug)]
pub(super) struct Packing {
    pub(super) launch: f64,
    pub(super) byte: f64,
}

/// The time of a kernel that is limited by its arithmetic.
#[derive(Debug)]
pub(super) struct Plain {
    pub(super) launch: f64,
    pub(super) gflop: f64,
}

/// The time of sums in groups of few channels.
#[derive(Debug)]
pub(super) struct Grouped {
    pub(super) launch: f64,
    /// The time for groups of one channel: for a megabyte of x and y, and for a GFLOP.
    pub(super) depthwise: [f64; 2],
    /// The time for groups of a few channels: for a term of a sum, and for a megabyte.
    pub(super) term: f64,
    pub(super) megabyte: f64,
    /// The time for groups of a few channels with y in NCHW: for a GFLOP of stride 1, and for one of other strides.
    pub(super) nchw_gflop: [f64; 2],
    /// The same if y is channels-last: filters are read more slowly.
    pub(super) nhwc_gflop: [f64; 2],
}

/// The time of products in groups: for a launch, for a term of a sum, and for a megabyte of tensors; for a GFLOP of f32 and of
/// f16 and bf16.
#[derive(Debug)]
pub(super) struct GroupProducts {
    pub(super) launch: f64,
    pub(super) term: f64,
    pub(super) megabyte: f64,
    pub(super) gflop: [f64; 2],
}

/// The time of the fused kernel: for a launch, and for a round's step of 16 input channels.
#[derive(Debug)]
pub(super) struct WinogradRow {
    pub(super) launch: f64,
    /// f32 as three products.
    pub(super) split_step: f64,
    pub(super) f32_step: f64,
    pub(super) half_step: f64,
    /// The factor if pixels are not whole vectors: they are copied, and stored element by element.
    pub(super) unaligned: f64,
}

/// The time of non-fused Winograd: for the launches, for a megabyte of x, V, M and y, and for a product.
#[derive(Debug)]
pub(super) struct WinogradGemm {
    pub(super) launches: f64,
    pub(super) megabyte: f64,
    pub(super) product: f64,
}

/// The time of a step of 64 terms, and the time of a tile in addition to its steps.
pub(super) type StepAndTile = (f64, f64);

/// The time of one product whose x the copy engine brings, in steps of 128 bytes a pixel.
#[derive(Debug)]
pub(super) struct Product {
    /// Two blocks of a multiprocessor; one of 64, 128 and 256 channels.
    pub(super) together: StepAndTile,
    pub(super) blocks: [StepAndTile; 3],
    /// Strips that three columns of the filter read, with 64, 96, 128 and 192 channels. A step has half as many channels.
    pub(super) strips: [StepAndTile; 4],
    /// Exchange of parts, with what each doubling adds: in blocks of 64 channels, and in others.
    pub(super) exchange: [(f64, f64); 2],
    /// Megabytes of x, y and the residual in a microsecond.
    pub(super) megabytes: f64,
}

/// The time of the gathered product of `implicit_gemm`.
#[derive(Debug)]
pub(super) struct ImplicitGemm {
    pub(super) launch: f64,
    pub(super) tf32_product: Product,
    /// Of f16 and bf16. The exchange is the same if threads gather x.
    pub(super) half_product: Product,
    /// f16 and bf16 gathered by threads: blocks of 64 channels with whole sums and with parts; of 128 and 256 channels.
    pub(super) half: [StepAndTile; 4],
    /// f32 in blocks of 64 and of 128 channels, by what is gathered; neighbouring pixels far apart in any block.
    pub(super) apart: StepAndTile,
    pub(super) elements: [StepAndTile; 2],
    pub(super) channels: [StepAndTile; 2],
    pub(super) pixels: [StepAndTile; 2],
    /// Exchange of parts in three products.
    pub(super) exchange: f64,
    /// f16 and bf16: a copy of x with its bytes, and a block of 16384 outputs that are stored one by one.
    pub(super) copy: (f64, f64),
    pub(super) stores: f64,
}

/// The time of cuDNN's kernels on tensor cores: a launch; and a term of the few blocks that sum all of them, the products, or
/// the bytes, whichever takes longest.
#[derive(Debug)]
pub(super) struct CudnnSums {
    pub(super) launch: f64,
    pub(super) term: f64,
    /// An operation, and the number of channels of a group for which it doubles.
    pub(super) flop: f64,
    pub(super) group: f64,
    /// Megabytes of x and y in a microsecond.
    pub(super) megabytes: f64,
}

/// The time of cuDNN's kernels and of the passes around them.
#[derive(Debug)]
pub(super) struct Cudnn {
    /// f32 that is not rounded to TF32: a launch, a GFLOP, and the number of channels of a group for which it doubles.
    pub(super) launch: f64,
    pub(super) f32_gflop: f64,
    pub(super) f32_group: f64,
    /// Few blocks that sum all terms: a launch and a term.
    pub(super) few_launch: f64,
    pub(super) f32_term: f64,
    pub(super) tf32: CudnnSums,
    pub(super) half: CudnnSums,
    /// An operation of f16 and bf16 whose channels are no whole vectors.
    pub(super) half_unaligned_flop: f64,
    /// The cost of layout changes between NCHW and channels-last: by Windrow, a launch and a megabyte of x; by cuDNN,
    /// launches, and megabytes in a microsecond.
    pub(super) turn: (f64, f64),
    pub(super) own_turn: (f64, f64),
    /// The cost of a pass after the kernel: a launch, and megabytes in a microsecond.
    pub(super) pass: (f64, f64),
}

/// The time of f32 gradients with kernels that the forward direction does not use.
#[derive(Debug)]
pub(super) struct Gradients {
    /// dx of few channels by one thread each.
    pub(super) few_data: (f64, f64),
    /// cuDNN's dw.
    pub(super) cudnn_weight: (f64, f64),
    /// dw by products: launches, and a byte of operands that are split.
    pub(super) split: (f64, f64),
}
