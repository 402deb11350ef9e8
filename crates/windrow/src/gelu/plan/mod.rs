//! Plans for GELU, and their runs.

mod cpu;
mod gpu;
mod gradients;

use super::{GeluAlgorithm, GeluArgs, GeluConfiguration, GeluSpec, HalfMath, reference};
use crate::activation::CUDA_HALF_POLYNOMIALS;
use crate::plan::{self, Operator, Plan, engine, inputs};
use crate::verification::Expected;
use crate::{DType, Device, Error, PlanOptions, Result, TensorMut, TensorRef, Workspace};

pub use cpu::Cpu;
pub use gpu::Gpu;

/// A [`GeluSpec`] that was checked and bound to a device and an algorithm.
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

/// The operator GELU, as a type parameter of [`Plan`].
#[derive(Clone, Copy, Debug)]
pub struct Gelu;

impl Operator for Gelu {
    const NAME: &'static str = "gelu";
    inputs!(GeluSpec, GeluArgs: x; ? bias, gate);
    type Spec = GeluSpec;
    type Problem = ();
    type Configuration = GeluConfiguration;
    type Args<'a> = GeluArgs<'a>;
    type Cpu = Cpu;
    type Gpu = Gpu;

    fn problem(spec: &GeluSpec) -> Result<()> {
        spec.check()
    }

    fn tuned(spec: &GeluSpec, options: &PlanOptions) -> Result<Option<GeluConfiguration>> {
        plan::decide::<Self>(spec, options)
    }
}

/// The first of the algorithms, which are sorted from fastest to slowest; an error if there is none.
fn first(algorithms: Vec<GeluAlgorithm>) -> Result<GeluAlgorithm> {
    algorithms.first().copied().ok_or_else(|| {
        Error::unsupported(
            "gelu with half_math native",
            "it takes f16 or bf16 on a GPU, without bias and gate",
        )
    })
}

impl GeluPlan {
    /// Computes `y = gelu(x + bias) * gate`. `y` may be the same tensor as `x` (same address and layout). Otherwise it
    /// must not share memory with an input.
    ///
    /// # Errors
    /// - [`Error::Shape`], [`Error::DType`] or [`Error::Strides`] if a view does not agree with the spec;
    /// - [`Error::Parameter`] if the spec has a bias or a gate and the arguments do not, or the reverse;
    /// - [`Error::Aliasing`], [`Error::WrongDevice`], [`Error::WorkspaceTooSmall`];
    /// - [`Error::Backend`], on a GPU;
    /// - [`Error::Verification`] or [`Error::OutOfMemory`], with [`Verify::On`](crate::Verify::On).
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
            |y, workspace| engine!(self, engine => engine.run(self, args, y, workspace)),
            |y, expected| Ok(vec![expected.check("y", &y.as_ref(), self.tolerance())?]),
        )
    }

    /// Runs in place: `y` contains the input and is overwritten by the output. The spec's `x` and `y` must be equal.
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

    pub(super) fn oracle_inputs(&self, args: &GeluArgs<'_>) -> Result<reference::Inputs> {
        Ok(reference::Inputs {
            x: args.x.to_f64_vec()?,
            bias: args.bias.map(|b| b.to_f64_vec()).transpose()?,
            gate: args.gate.map(|g| g.to_f64_vec()).transpose()?,
            approximate: self.spec.approximate,
        })
    }

    /// The oracle's output. For [`HalfMath::Native`] the scales are `|x|`, because its errors are proportional to `x`.
    pub(super) fn oracle_forward(&self, inputs: &reference::Inputs) -> Result<Expected> {
        let mut expected = reference::forward(inputs)?;
        if self.spec.half_math == HalfMath::Native {
            for (scale, x) in expected.scale.iter_mut().zip(&inputs.x) {
                *scale = x.abs();
            }
        }
        Ok(expected)
    }

    /// The largest allowed relative error of a result before it is rounded to the output type.
    ///
    /// - f32: 8 roundings for the activation (4 units in the last place), and one each for the bias, the gate and the
    ///   product with `dy`.
    /// - f16 and bf16: the same, because they are computed in f32, and in addition the error of shorter polynomials.
    /// - [`HalfMath::Native`]: 8 roundings to f16 or bf16 and 3e-4 for the error of the approximation, relative to `x`.
    pub(super) fn tolerance(&self) -> f64 {
        /// See `cpu/table.rs`.
        const CPU_HALF_POLYNOMIALS: f64 = 5e-5;
        let (dtype, roundings) = (self.spec.x.dtype, 11.0 * DType::F32.unit_roundoff());
        match self.options.device {
            _ if !dtype.is_half() => roundings,
            Device::Cpu => roundings + CPU_HALF_POLYNOMIALS,
            _ if self.spec.half_math == HalfMath::Native => 8.0 * dtype.unit_roundoff() + 3e-4,
            _ => roundings + CUDA_HALF_POLYNOMIALS,
        }
    }
}
