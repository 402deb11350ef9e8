//! Configurations of GELU: an algorithm with its parameters.

use super::GeluAlgorithm;
use crate::plan::configuration;

configuration! {
    /// An algorithm and its parameters. If a parameter is `None`, the cost model chooses it, or the algorithm does not
    /// have it. As text a configuration has the form `f16x8_pack block=128 unroll=2`.
    GeluConfiguration: GeluAlgorithm {
        /// On GPUs: threads of a block, a power of two from 32 to 1024.
        block,
        /// On GPUs: memory accesses per thread, up to 8, if the tensors are contiguous.
        unroll,
    }
}
