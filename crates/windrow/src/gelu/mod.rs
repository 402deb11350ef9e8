//! GELU: `y = gelu(x + bias) * gate`, exact or in its tanh form, with gradients.
//!
//! - exact: `gelu(x) = 0.5 x erfc(-x / sqrt 2)`;
//! - tanh: `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
//!
//! Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.

mod cpu;
mod engine;
mod gpu;
pub(crate) mod random;
mod reference;
mod spec;
#[cfg(test)]
mod tests;
mod tuning;
pub(crate) mod verify;

pub use spec::{GeluAlgorithm, GeluSpec, HalfMath};
pub use tuning::GeluConfiguration;

use crate::forms::setters;
use crate::plan::{self, Backend, Checks, Operator, Plan, Type, inputs};
use crate::verification::{Check, Expected};
use crate::{Approximate, Error, PlanOptions, Result, Tensor, TensorMut, TensorRef, Workspace};
use engine::Cpu;

/// The inputs of a run; see [`GeluSpec`] for shapes and types.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct GeluArgs<'a> {
    /// The input.
    pub x: TensorRef<'a>,
    /// The bias, added to `x` along its last dimension.
    pub bias: Option<TensorRef<'a>>,
    /// The gate, which the activation is multiplied by.
    pub gate: Option<TensorRef<'a>>,
}

/// The gradients that a backward run computes: those that are given.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct GeluGrads<'a> {
    /// Gradient of `x`: its shape and type, any strides without overlap.
    pub dx: Option<TensorMut<'a>>,
    /// Gradient of `gate`: its shape and type, any strides without overlap.
    pub dgate: Option<TensorMut<'a>>,
    /// Gradient of `bias`: `[last dimension of x]`, f32 or the type of `x`. Summed in f32 with
    /// compensation and the same bits on any number of threads.
    pub dbias: Option<TensorMut<'a>>,
}

impl<'a> GeluArgs<'a> {
    /// Arguments with an input and nothing else.
    pub fn new(x: TensorRef<'a>) -> Self {
        GeluArgs { x, bias: None, gate: None }
    }
}

setters! {
    GeluArgs<'a> {
        ? with_bias(bias: TensorRef<'a>);
        ? with_gate(gate: TensorRef<'a>);
    }
}

setters! {
    GeluGrads<'a> {
        ? with_dx(dx: TensorMut<'a>);
        ? with_dgate(dgate: TensorMut<'a>);
        ? with_dbias(dbias: TensorMut<'a>);
    }
}

/// A checked [`GeluSpec`] on a device.
///
/// ```
/// use windrow::{Approximate, DType, GeluArgs, GeluPlan, GeluSpec, PlanOptions, TensorDesc};
/// use windrow::{TensorMut, TensorRef, Workspace};
///
/// let desc = TensorDesc::contiguous(DType::F32, &[2, 3])?;
/// let plan = GeluPlan::new(&GeluSpec::new(desc, Approximate::Tanh)?, &PlanOptions::default())?;
/// let mut workspace = Workspace::for_sizes(plan.device(), [plan.workspace_bytes()])?;
///
/// let (x, mut y) = ([-3.0f32, -1.0, -0.0, 0.5, 1.0, 3.0], [0.0f32; 6]);
/// let args = GeluArgs::new(TensorRef::new(&x, &[2, 3])?);
/// plan.run(&args, TensorMut::new(&mut y, &[2, 3])?, &mut workspace)?;
/// assert!((y[4] - 0.841192).abs() < 1e-6);
/// # Ok::<(), windrow::Error>(())
/// ```
pub type GeluPlan = Plan<Gelu>;

/// The operator GELU as data.
#[derive(Clone, Copy, Debug)]
pub struct Gelu;

impl Operator for Gelu {
    const NAME: &'static str = "gelu";
    inputs!(GeluSpec, GeluArgs: x; ? bias, gate);
    type Spec = GeluSpec;
    type Problem = ();
    type Configuration = GeluConfiguration;
    type Args<'a> = GeluArgs<'a>;
    type Cpu = engine::Cpu;
    type Gpu = engine::Gpu;

    fn problem(spec: &GeluSpec) -> Result<()> {
        spec.check()
    }

    fn tuned(spec: &GeluSpec, options: &PlanOptions) -> Result<Option<GeluConfiguration>> {
        plan::decide::<Self>(spec, options)
    }
}

impl GeluPlan {
    /// Computes `y = gelu(x + bias) * gate`. `y` may be exactly `x` (same address and layout), else
    /// it shares no memory with an input.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`] or [`Error::Strides`] if a view does not fit the spec,
    /// [`Error::Aliasing`], [`Error::WrongDevice`]; with [`Verify::On`](crate::Verify::On) [`Error::Verification`].
    pub fn run(
        &self,
        args: &GeluArgs<'_>,
        mut y: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let mut checks = self.check_run(args, workspace)?;
        let in_place = y.as_ptr() == args.x.as_ptr() && y.layout() == args.x.layout();
        checks.write_over("y", Some(&y), Some(&self.spec.y), in_place.then_some("x"))?;
        self.verified(
            &mut y,
            workspace,
            |_| self.oracle_forward(&self.oracle_inputs(args)?),
            |y, workspace| match &self.backend {
                Backend::Cpu(Cpu { isa, threads, .. }) => {
                    cpu::forward(*isa, *threads, &self.spec, args, y.reborrow());
                    Ok(())
                }
                Backend::Gpu(gpu) => gpu.forward.run(args, y, workspace),
            },
            |y, expected| Ok(vec![expected.check("y", &y.as_ref(), self.tolerance())?]),
        )
    }

    /// [`GeluPlan::run`] where `y` holds the input and takes the output. The spec's `x` and `y` must
    /// be the same.
    ///
    /// # Errors
    /// As [`GeluPlan::run`].
    pub fn run_in_place(
        &self,
        y: TensorMut<'_>,
        bias: Option<TensorRef<'_>>,
        gate: Option<TensorRef<'_>>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        // SAFETY: the same memory as `y`, which is borrowed for this call; kernels read an element
        // before they write it and make no references.
        let x = unsafe { TensorRef::from_raw(y.as_ptr().cast(), *y.desc(), y.device()) };
        self.run(&GeluArgs { x, bias, gate }, y, workspace)
    }

    /// Computes the gradients in `grads` from `dy`, the gradient of the output (shape and type of
    /// `y`, any strides). Outputs share no memory with inputs or each other.
    ///
    /// # Errors
    /// As [`GeluPlan::run`], and [`Error::Unsupported`] if a gradient is asked for of an input that
    /// the spec has not.
    pub fn backward(
        &self,
        args: &GeluArgs<'_>,
        dy: &TensorRef<'_>,
        mut grads: GeluGrads<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let mut checks = self.check_run(args, workspace)?;
        self.check_grads(&mut checks, dy, &grads)?;
        self.verified(
            &mut grads,
            workspace,
            |_| Ok(()),
            |grads, workspace| match &self.backend {
                Backend::Cpu(Cpu { isa, threads, .. }) => {
                    let again = GeluGrads {
                        dx: grads.dx.as_mut().map(TensorMut::reborrow),
                        dgate: grads.dgate.as_mut().map(TensorMut::reborrow),
                        dbias: grads.dbias.as_mut().map(TensorMut::reborrow),
                    };
                    cpu::backward(*isa, *threads, &self.spec, args, dy, again, workspace)
                }
                Backend::Gpu(gpu) => gpu.forward.backward(&self.spec, args, dy, grads, workspace),
            },
            |grads, ()| self.grads_checks(args, dy, grads),
        )
    }

    fn check_grads(
        &self,
        checks: &mut Checks,
        dy: &TensorRef<'_>,
        grads: &GeluGrads<'_>,
    ) -> Result<()> {
        let GeluSpec { x, bias, gate, .. } = &self.spec;
        let (dtype, shape) = (x.dtype, x.shape());
        for (name, grad, input, planned) in [
            ("dgate", &grads.dgate, "gate", gate.is_some()),
            ("dbias", &grads.dbias, "bias", bias.is_some()),
        ] {
            if grad.is_some() && !planned {
                return Err(Error::unsupported(name, format!("the plan has no {input}")));
            }
        }
        checks.read_strided("dy", dy, dtype, shape)?;
        checks.gradient("dx", grads.dx.as_ref(), Type::Exactly(dtype), shape)?;
        checks.gradient("dgate", grads.dgate.as_ref(), Type::Exactly(dtype), shape)?;
        let last = &shape[shape.len().saturating_sub(1)..];
        checks.gradient("dbias", grads.dbias.as_ref(), Type::OrF32(dtype), last)
    }

    /// The gradients that were asked for.
    fn grads_checks(
        &self,
        args: &GeluArgs<'_>,
        dy: &TensorRef<'_>,
        grads: &GeluGrads<'_>,
    ) -> Result<Vec<Check>> {
        // Without elements there may be no memory for a gradient that is not asked for.
        let summed = grads.dbias.is_some() || !self.spec.x.layout.is_empty();
        let last = self.spec.x.shape().last().copied().unwrap_or(1);
        let last = if summed { last } else { 0 };
        let want = reference::backward(&self.oracle_inputs(args)?, &dy.to_f64_vec()?, last)?;
        [
            ("dx", &grads.dx, &want.dx),
            ("dgate", &grads.dgate, &want.dgate),
            ("dbias", &grads.dbias, &want.dbias),
        ]
        .into_iter()
        .filter_map(|(what, got, want)| {
            Some(want.check(what, &got.as_ref()?.as_ref(), self.tolerance()))
        })
        .collect()
    }

    fn oracle_inputs(&self, args: &GeluArgs<'_>) -> Result<reference::Inputs> {
        Ok(reference::Inputs {
            x: args.x.to_f64_vec()?,
            bias: args.bias.map(|b| b.to_f64_vec()).transpose()?,
            gate: args.gate.map(|g| g.to_f64_vec()).transpose()?,
            approximate: self.spec.approximate,
        })
    }

    /// The oracle's output. Native half arithmetic has errors relative to `x`.
    fn oracle_forward(&self, inputs: &reference::Inputs) -> Result<Expected> {
        let mut expected = reference::forward(inputs)?;
        if self.spec.half_math == HalfMath::Native {
            for (scale, x) in expected.scale.iter_mut().zip(&inputs.x) {
                *scale = x.abs();
            }
        }
        Ok(expected)
    }

    /// How far an element may be off, relative to its scale.
    fn tolerance(&self) -> f64 {
        verify::tolerance(&self.spec, self.options.device)
    }
}

/// `gelu(x)` of any shape and strides, in f32, f16 or bf16, on the CPU.
///
/// # Errors
/// [`Error::DType`], [`Error::WrongDevice`], [`Error::OutOfMemory`].
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

/// `gelu(a) * b`, the gated form of transformer feed-forward layers (Shazeer, arXiv:2002.05202).
/// `a` and `b` have one shape and type; strides are free.
///
/// # Errors
/// As [`gelu`], and [`Error::Shape`] if the shapes differ.
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
