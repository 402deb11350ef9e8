//! Causal convolution over sequences: prefill, decoding, training.

/// Builder methods for what specs of whole sequences and of updates both have.
macro_rules! common_options {
    ($spec:ty) => {
        impl $spec {
            /// With a bias, one element for each output channel.
            #[must_use]
            pub fn with_bias(self, bias: TensorDesc) -> Self {
                Self { bias: Some(bias), ..self }
            }

            /// With an activation.
            #[must_use]
            pub fn with_activation(self, activation: Activation) -> Self {
                Self { activation, ..self }
            }

            /// With another layout of the output than the default.
            #[must_use]
            pub fn with_output(self, y: TensorDesc) -> Self {
                Self { y, ..self }
            }
        }
    };
}

mod args;
mod cpu;
mod cuda;
mod engine;
mod plan;
mod problem;
pub(crate) mod random;
mod reference;
mod sample;
mod sequences;
mod spec;
mod tuning;
mod update;
pub(crate) mod verify;

pub use args::{CausalConv1dArgs, CausalConv1dGrads, CausalConv1dOutputs};
pub use plan::{CausalConv1d, CausalConv1dPlan, causal_conv1d};
pub(crate) use problem::Problem;
pub use spec::{CausalConv1dAlgorithm, CausalConv1dSpec};
pub use tuning::CausalConv1dConfiguration;
pub use update::{
    CausalConv1dUpdate, CausalConv1dUpdateArgs, CausalConv1dUpdatePlan, CausalConv1dUpdateSpec,
    causal_conv1d_update,
};

#[cfg(test)]
mod tests;
