//! Configurations of GELU: an algorithm with its parameters.

use super::GeluAlgorithm;
use crate::plan::configuration;

configuration! {
    /// An algorithm and its parameters. A parameter that is `None` is chosen by the model, or is none of the
    /// algorithm's. Written and parsed as `f16x8_pack block=128 unroll=2`.
    GeluConfiguration: GeluAlgorithm {
        /// CUDA: threads of a block, a power of two from 32 to 1024.
        block,
        /// CUDA: accesses of a thread where all elements lie in one row, up to 8.
        unroll,
    }
}
