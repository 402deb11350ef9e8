//! The rates of an H200 (compute capability 9.0). They are fitted to the measured times of 51 layers in f32
//! (`benchmarks/record/2026-11-22-h200/conv2d-algorithms-f32.csv`). Those of `implicit_gemm` are fitted to 46 layers of
//! ResNet-50 at batch 1, 8 and 64, and in f16 and bf16 to 27 layers of ResNet-50 and of larger images.

use super::{
    Cudnn, Gradients, Grouped, ImplicitGemm, Packing, Plain, Rates, WinogradGemm, WinogradRow,
};

pub(super) static RATES: Rates = Rates {
    chip: "H200",
    architecture: "sm_90",
    packing: Packing { launch: 3.0, byte: 0.26e-6 },
    direct: Plain { launch: 10.0, gflop: 300.0 },
    im2col_gemm: Plain { launch: 10.0, gflop: 50.0 },
    grouped: Grouped {
        launch: 3.5,
        depthwise: [0.24, 33.0],
        term: 0.05,
        megabyte: 0.22,
        nchw_gflop: [33.0, 42.0],
        nhwc_gflop: [40.0, 60.0],
    },
    winograd_row: WinogradRow {
        launch: 10.0,
        split_step: 3.8,
        f32_step: 2.0,
        half_step: 1.4,
        unaligned: 2.0,
    },
    winograd_gemm: WinogradGemm { launches: 13.0, megabyte: 0.26, product: 2e-9 },
    implicit_gemm: ImplicitGemm {
        launch: 2.3,
        together: (0.58, 1.2),
        maps: [(0.25, 1.2), (0.33, 1.3), (0.61, 2.0)],
        half: [(0.70, 0.8), (0.45, 1.1), (0.49, 1.0), (0.68, 2.1)],
        apart: (5.0, 3.0),
        elements: [(1.72, 1.2), (1.97, 2.5)],
        channels: [(0.92, 1.4), (1.24, 3.0)],
        pixels: [(0.91, 1.8), (1.27, 2.9)],
        exchange: 1.8,
        half_exchange: [(0.9, 0.35), (1.3, 0.6)],
        copy: (2.5, 0.57e-6),
        stores: 8.0,
    },
    cudnn: Cudnn {
        launch: 10.0,
        f32_gflop: 27.0,
        f32_group: 40.0,
        few_launch: 3.5,
        f32_term: 0.0232,
        tf32_gflop: 2.6,
        half_few_launch: 3.0,
        half_term: 0.0017,
        half_flop: 1.3e-9,
        half_group: 80.0,
        half_unaligned_flop: 30e-9,
        half_megabytes: 3.6,
        turn: (2.5, 0.57),
        own_turn: (5.0, 2.6),
        pass: (2.0, 3.0),
    },
    gradients: Gradients {
        few_data: (10.0, 300e-9),
        cudnn_weight: (10.0, 40e-9),
        split: (20.0, 0.3e-6),
    },
};
