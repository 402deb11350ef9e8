//! Configurations of a convolution: an algorithm with its parameters.

use super::Conv2dAlgorithm;
use crate::plan::configuration;

configuration! {
    /// An algorithm and its parameters. If a parameter is `None`, the cost model chooses it, or the algorithm does not
    /// have it. As text a configuration has the form `winograd_gemm_f4 tiles=36 vectors=4 parts=1 threads=2`.
    Conv2dConfiguration: Conv2dAlgorithm {
        /// `winograd_gemm`: the largest number of tiles of a block (CPU) or chunk (GPU); blocks are made equal.
        /// `implicit_gemm`: the tiles of 128 pixels of a block, 1 or 2.
        tiles,
        /// `winograd_gemm` on the CPU: vectors of output channels between two output transforms.
        vectors,
        /// `winograd_gemm` on the CPU: parts of the output channels that are separate tasks. `implicit_gemm`: parts of the
        /// sums, 1, 2, 4 or 8.
        parts,
        /// CPU threads, at most as many as the plan may use.
        threads,
        /// `winograd_gemm` on GPUs: the threads of a transform's block, a multiple of 32 up to 1024. `implicit_gemm`:
        /// the output channels of a block, 64, 128 or, in one product, 96, 192 or 256.
        block,
    }
}
