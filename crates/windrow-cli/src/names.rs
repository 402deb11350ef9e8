//! Options whose values are names: help and completions list them.

use clap::builder::{
    NonEmptyStringValueParser, PossibleValue, PossibleValuesParser, TypedValueParser,
};
use clap::{Arg, Command};
use std::borrow::Cow;
use std::ffi::OsStr;
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
    Activations
}

/// A parser of activations. Help and completions list those without a slope.
#[derive(Clone)]
struct Activations;

impl Activations {
    fn listed() -> impl Iterator<Item = PossibleValue> {
        Activation::ALL.iter().filter_map(|a| match (a, a.name()) {
            (_, Cow::Owned(_)) => None,
            (Activation::Identity, Cow::Borrowed(name)) => Some(plain(name).alias("none")),
            (Activation::Silu, Cow::Borrowed(name)) => Some(plain(name).alias("swish")),
            (_, Cow::Borrowed(name)) => Some(plain(name)),
        })
    }
}

impl TypedValueParser for Activations {
    type Value = Activation;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<Activation, clap::Error> {
        match value.to_str() {
            Some(name) if name.contains('(') => {
                let parser = NonEmptyStringValueParser::new();
                parser.try_map(|name| name.parse::<Activation>()).parse_ref(command, arg, value)
            }
            _ => of(Self::listed()).parse_ref(command, arg, value),
        }
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(Self::listed()))
    }
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
