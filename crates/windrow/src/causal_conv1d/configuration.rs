//! Configurations of a causal convolution: an algorithm with its parameters.

use super::CausalConv1dAlgorithm;
use crate::plan::configuration;

configuration! {
    /// An algorithm and its parameters. A parameter that is `None` is chosen by the model, or is none of the
    /// algorithm's. Written and parsed as `direct channels=16 tokens=2048 threads=2`.
    CausalConv1dConfiguration: CausalConv1dAlgorithm {
        /// `direct` on the CPU: the most channels of a task, rounded up to vectors.
        channels,
        /// `direct` on the CPU: the most tokens of a task.
        tokens,
        /// CPU threads, at most as many as the plan may use.
        threads,
    }
}
