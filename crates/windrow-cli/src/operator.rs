//! The operators by name.

use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, Error};

/// An operator, as the command line names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Operator {
    /// GELU and its gated form
    Gelu,
    /// Causal 1-D convolution, depthwise or dense
    #[value(name = "causal-conv1d", alias = "causal_conv1d")]
    CausalConv1d,
    /// 2-D convolution
    Conv2d,
    /// 3-D convolution
    Conv3d,
}

impl Operator {
    /// The name in reports and in the library.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Operator::Gelu => "gelu",
            Operator::CausalConv1d => "causal_conv1d",
            Operator::Conv2d => "conv2d",
            Operator::Conv3d => "conv3d",
        }
    }

    /// A parser of the operators whose configurations are searched: that of conv3d is always the cost model's.
    pub(crate) fn tuned() -> impl TypedValueParser<Value = Operator> {
        let tuned = |operator: &&Operator| **operator != Operator::Conv3d;
        let names = Operator::value_variants().iter().filter(tuned);
        let names = PossibleValuesParser::new(names.filter_map(Operator::to_possible_value));
        names.try_map(|name| Operator::from_str(&name, false))
    }

    /// The operators named, all if none is.
    pub(crate) fn chosen(named: &[Operator]) -> Vec<Operator> {
        Operator::value_variants()
            .iter()
            .copied()
            .filter(|o| named.is_empty() || named.contains(o))
            .collect()
    }
}

/// Says which operator is meant by a name that is a part of an operator's, as `conv1d` is; clap finds what is nearest
/// in letters. An operator in place of a command is one of `run`.
pub(crate) fn suggest(mut error: Error, is_run: bool) -> Error {
    if let Some(ContextValue::String(name)) = error.get(ContextKind::InvalidSubcommand) {
        let start = if is_run { "" } else { "run " };
        let meant: Vec<_> = meant_by(name).map(|operator| format!("{start}{operator}")).collect();
        if !meant.is_empty() {
            error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(meant));
        }
    }
    if let Some(ContextValue::String(name)) = error.get(ContextKind::InvalidValue)
        && let Some(ContextValue::Strings(valid)) = error.get(ContextKind::ValidValue)
        && let Some(operator) = meant_by(name).find(|operator| valid.contains(operator))
    {
        error.insert(ContextKind::SuggestedValue, ContextValue::String(operator));
    }
    error
}

/// The operators whose names have all of this one.
fn meant_by(name: &str) -> impl Iterator<Item = String> + use<> {
    let name = name.to_lowercase().replace('_', "-");
    let operators = Operator::value_variants().iter().filter_map(Operator::to_possible_value);
    let names = operators.map(|value| value.get_name().to_owned());
    names.filter(move |operator| name.len() > 3 && operator.contains(&name))
}
