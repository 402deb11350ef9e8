//! The rates of an H200 (compute capability 9.0). They are fitted to the measured times of 51 layers in f32
//! (`benchmarks/record/2026-11-22-h200/conv2d-algorithms-f32.csv`). Those of `implicit_gemm` are fitted to 46 layers of
//! ResNet-50 at batch 1, 8 and 64. Those on tensor cores in one product, and cuDNN's, are fitted to 50 layers in TF32
//! and bf16, with one image and with many, and with and without bias, activation and residual.

use super::{
    Cudnn, CudnnSums, Gradients, GroupProducts, Grouped, ImplicitGemm, Packing, Plain, Product,
    Rates, WinogradGemm, WinogradRow,
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
    group_products: GroupProducts { launch: 2.3, term: 0.009, megabyte: 0.45, gflop: [2.9, 1.1] },
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
        tf32_product: Product {
            together: (0.61, 0.8),
            blocks: [(0.31, 0.7), (0.34, 2.1), (0.60, 5.3)],
            strips: [(0.48, 1.8), (0.71, 1.9), (0.94, 1.8), (1.29, 6.4)],
            exchange: [(0.8, 0.1), (3.0, 0.0)],
            megabytes: 3.9,
        },
        half_product: Product {
            together: (0.58, 0.7),
            blocks: [(0.26, 0.9), (0.33, 1.7), (0.66, 2.4)],
            strips: [(0.49, 0.9), (0.70, 1.2), (0.94, 1.3), (1.23, 6.0)],
            exchange: [(0.9, 0.35), (1.3, 0.6)],
            megabytes: 3.8,
        },
        half: [(0.70, 0.8), (0.45, 1.1), (0.49, 1.0), (0.68, 2.1)],
        apart: (5.0, 3.0),
        elements: [(1.72, 1.2), (1.97, 2.5)],
        channels: [(0.92, 1.4), (1.24, 3.0)],
        pixels: [(0.91, 1.8), (1.27, 2.9)],
        exchange: 1.8,
        copy: (2.5, 0.57e-6),
        stores: 8.0,
    },
    cudnn: Cudnn {
        launch: 10.0,
        f32_gflop: 27.0,
        f32_group: 40.0,
        few_launch: 3.5,
        f32_term: 0.0232,
        tf32: CudnnSums { launch: 3.8, term: 0.0031, flop: 2.1e-9, group: 73.0, megabytes: 3.9 },
        half: CudnnSums { launch: 4.0, term: 0.0019, flop: 1.06e-9, group: 98.0, megabytes: 3.8 },
        half_unaligned_flop: 30e-9,
        turn: (2.5, 0.57),
        own_turn: (5.0, 2.6),
        pass: (2.4, 3.0),
    },
    gradients: Gradients {
        few_data: (10.0, 300e-9),
        cudnn_weight: (10.0, 40e-9),
        split: (20.0, 0.3e-6),
    },
};
