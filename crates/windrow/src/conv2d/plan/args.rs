//! Inputs of a run.

use super::{FilterCache, PackedWeights};
use crate::forms::setters;
use crate::{Result, TensorRef};
use std::borrow::Cow;

/// The inputs of a run.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Conv2dArgs<'a> {
    /// Input [n, c, h, w], with the spec's type, shape and strides.
    pub x: TensorRef<'a>,
    /// Filter.
    pub w: Weights<'a>,
    /// Bias `[k]`, if the spec has one.
    pub bias: Option<TensorRef<'a>>,
    /// The residual, if the spec has one. It is added before the activation, and has y's type, shape and strides.
    pub residual: Option<TensorRef<'a>>,
}

impl<'a> Conv2dArgs<'a> {
    /// The arguments without bias and residual.
    pub fn new(x: TensorRef<'a>, w: impl Into<Weights<'a>>) -> Self {
        Conv2dArgs { x, w: w.into(), bias: None, residual: None }
    }
}

setters! {
    Conv2dArgs<'a> {
        ? with_bias(bias: TensorRef<'a>);
        ? with_residual(residual: TensorRef<'a>);
    }
}

/// The filter of a run.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Weights<'a> {
    /// A filter [k, c/groups, r, s] with the spec's type and strides. Each run packs it into the workspace, unless the
    /// kernels of a GPU can read it in place.
    Raw(TensorRef<'a>),
    /// A filter that [`Conv2dPlan::pack_weights`](crate::Conv2dPlan::pack_weights) has packed: converted to the form
    /// that the kernels read.
    Packed(&'a PackedWeights),
    /// A filter as in `Raw`. Its packed form is kept in the cache, and is made again if the content of the filter has
    /// changed.
    Cached(TensorRef<'a>, &'a FilterCache),
}

impl<'a> Weights<'a> {
    /// The filter itself; `None` for one that is packed.
    pub(in crate::conv2d) fn view(&self) -> Option<&TensorRef<'a>> {
        match self {
            Weights::Raw(w) | Weights::Cached(w, _) => Some(w),
            Weights::Packed(_) => None,
        }
    }
}

impl<'a> From<TensorRef<'a>> for Weights<'a> {
    fn from(w: TensorRef<'a>) -> Self {
        Weights::Raw(w)
    }
}

impl<'a> From<&'a PackedWeights> for Weights<'a> {
    fn from(packed: &'a PackedWeights) -> Self {
        Weights::Packed(packed)
    }
}

/// The filter's elements; `None` for a filter that was packed by a plan without [`Verify::On`](crate::Verify::On).
pub(in crate::conv2d) fn filter<'a>(w: &Weights<'a>) -> Result<Option<Cow<'a, [f64]>>> {
    match w {
        Weights::Raw(w) | Weights::Cached(w, _) => Ok(Some(w.to_f64_vec()?.into())),
        Weights::Packed(packed) => Ok(packed.source.as_deref().map(Cow::from)),
    }
}
