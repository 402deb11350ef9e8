//! GELU: `y = gelu(x + bias) * gate`, exact or in its tanh form, with gradients.
//!
//! - exact: `gelu(x) = 0.5 x erfc(-x / sqrt 2)`;
//! - tanh: `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
//!
//! Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.

mod args;
mod configuration;
mod cpu;
mod gpu;
mod plan;
pub(crate) mod random;
mod reference;
mod spec;
#[cfg(test)]
mod tests;
mod tuning;
pub(crate) mod verify;

pub use args::{GeluArgs, GeluGrads};
pub use configuration::GeluConfiguration;
pub use plan::{Gelu, GeluPlan};
pub use spec::{GeluAlgorithm, GeluSpec, HalfMath};

use crate::{Approximate, PlanOptions, Result, Tensor, TensorRef, Workspace};

/// The result `gelu(x)`, computed on the CPU in one call. `x` is f32, f16 or bf16, with any shape (up to 8 dimensions)
/// and any strides.
///
/// # Errors
/// [`Error::DType`](crate::Error::DType), [`Error::WrongDevice`](crate::Error::WrongDevice),
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
///
/// ```
/// use windrow::{Approximate, TensorRef};
/// let y = windrow::gelu(&TensorRef::new(&[-1.0f32, 0.0, 1.0], &[3])?, Approximate::None)?;
/// let y = y.to_vec::<f32>()?;
/// assert!((y[0] + 0.15865525).abs() < 1e-7 && y[1] == 0.0 && (y[2] - 0.8413447).abs() < 1e-7);
/// # Ok::<(), windrow::Error>(())
/// ```
pub fn gelu(x: &TensorRef<'_>, approximate: Approximate) -> Result<Tensor> {
    one_call(GeluArgs::new(*x), approximate)
}

/// The result `gelu(a) * b`, computed on the CPU in one call: the gated form of transformer feed-forward layers
/// (Shazeer, arXiv:2002.05202). `a` and `b` must have the same shape and element type. They may have any strides.
///
/// # Errors
/// As [`gelu`], and [`Error::Shape`](crate::Error::Shape) if the shapes differ.
pub fn geglu(a: &TensorRef<'_>, b: &TensorRef<'_>, approximate: Approximate) -> Result<Tensor> {
    one_call(GeluArgs::new(*a).with_gate(*b), approximate)
}

fn one_call(args: GeluArgs<'_>, approximate: Approximate) -> Result<Tensor> {
    let gate = args.gate.map(|g| *g.desc());
    let spec = GeluSpec::new(*args.x.desc(), approximate)?.with_gate(gate);
    let plan = GeluPlan::new(&spec, &PlanOptions::default())?;
    let mut y = Tensor::uninitialised(spec.y)?;
    plan.run(&args, y.as_mut(), &mut Workspace::empty())?;
    Ok(y)
}
