//! Options whose values are names: help and completions list them.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use std::str::FromStr;
use windrow::{
    Accuracy, Activation, Approximate, CausalConv1dAlgorithm, Conv2dAlgorithm, DType, Error,
    GeluAlgorithm,
};

/// A parser that takes these names.
fn of<T>(names: impl IntoIterator<Item = PossibleValue>) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err = Error> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(names).try_map(|name| name.parse::<T>())
}

fn plain(name: &'static str) -> PossibleValue {
    PossibleValue::new(name)
}

pub(crate) fn activation() -> impl TypedValueParser<Value = Activation> {
    of(Activation::ALL.iter().map(|a| match a {
        Activation::Identity => plain(a.name()).alias("none"),
        Activation::Silu => plain(a.name()).alias("swish"),
        _ => plain(a.name()),
    }))
}

pub(crate) fn approximate() -> impl TypedValueParser<Value = Approximate> {
    of([plain("none").alias("exact"), plain("tanh")])
}

pub(crate) fn accuracy() -> impl TypedValueParser<Value = Accuracy> {
    of(Accuracy::ALL.iter().map(|a| plain(a.name())))
}

/// The types that operators compute with.
pub(crate) fn dtype() -> impl TypedValueParser<Value = DType> {
    of(DType::ALL.iter().filter(|d| d.is_compute()).map(|d| plain(d.name())))
}

pub(crate) fn gelu() -> impl TypedValueParser<Value = GeluAlgorithm> {
    of(GeluAlgorithm::ALL.iter().map(|a| plain(a.name())))
}

pub(crate) fn causal_conv1d() -> impl TypedValueParser<Value = CausalConv1dAlgorithm> {
    of(CausalConv1dAlgorithm::ALL.iter().map(|a| plain(a.name())))
}

pub(crate) fn conv2d() -> impl TypedValueParser<Value = Conv2dAlgorithm> {
    of(Conv2dAlgorithm::ALL.iter().map(|a| plain(a.name())))
}

/// The algorithms of all operators.
pub(crate) fn any_algorithm() -> PossibleValuesParser {
    let mut names: Vec<&str> = Conv2dAlgorithm::ALL.iter().map(|a| a.name()).collect();
    names.extend(CausalConv1dAlgorithm::ALL.iter().map(|a| a.name()));
    names.extend(GeluAlgorithm::ALL.iter().map(|a| a.name()));
    let mut seen = std::collections::HashSet::new();
    names.retain(|name| seen.insert(*name));
    PossibleValuesParser::new(names)
}
