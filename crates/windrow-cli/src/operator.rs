//! The operators by name.

/// An operator, as the command line names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Operator {
    /// GELU and its gated form
    Gelu,
    /// Causal depthwise 1-D convolution
    #[value(name = "causal-conv1d", alias = "causal_conv1d")]
    CausalConv1d,
    /// 2-D convolution
    Conv2d,
}

impl Operator {
    /// The name in reports and in the library.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Operator::Gelu => "gelu",
            Operator::CausalConv1d => "causal_conv1d",
            Operator::Conv2d => "conv2d",
        }
    }

    /// The operators named, all if none is.
    pub(crate) fn chosen(named: &[Operator]) -> Vec<Operator> {
        let all = [Operator::Gelu, Operator::CausalConv1d, Operator::Conv2d];
        all.into_iter().filter(|o| named.is_empty() || named.contains(o)).collect()
    }
}
