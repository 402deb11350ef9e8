//! Configurations of a causal convolution: an algorithm with its parameters.

use super::CausalConv1dAlgorithm;
use crate::plan::configuration;

configuration! {
    /// An algorithm and its parameters. If a parameter is `None`, the cost model chooses it, or the algorithm does not
    /// have it. As text a configuration has the form `direct channels=16 tokens=2048 threads=2`.
    CausalConv1dConfiguration: CausalConv1dAlgorithm {
        /// `direct` on the CPU: the largest number of channels of a parallel task, rounded up to vectors.
        channels,
        /// `direct` on the CPU: the largest number of tokens of a parallel task.
        tokens,
        /// CPU threads, at most as many as the plan may use.
        threads,
    }
}
