//! GELU: `y = gelu(x + bias) * gate`, exact or in its tanh form, with gradients.
//!
//! - exact: `gelu(x) = 0.5 x erfc(-x / sqrt 2)`;
//! - tanh: `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
//!
//! Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.

mod cpu;
mod cuda;
pub(crate) mod random;
mod reference;
mod spec;
#[cfg(test)]
mod tests;
mod tuning;
pub(crate) mod verify;

pub use spec::{GeluAlgorithm, GeluSpec, HalfMath};
pub use tuning::GeluConfiguration;

use crate::cpu::{Isa, resolve_threads};
use crate::tensor::{check_device, check_disjoint, check_view};
use crate::tuning::{Report, Search};
use crate::verify::Comparison;
use crate::{
    Approximate, Device, Error, PlanOptions, Result, Tensor, TensorMut, TensorRef, Verify,
    Workspace,
};

/// The inputs of a run; see [`GeluSpec`] for shapes and types.
#[derive(Clone, Copy, Debug)]
pub struct GeluArgs<'a> {
    /// The input.
    pub x: TensorRef<'a>,
    /// Added to `x` along its last dimension.
    pub bias: Option<TensorRef<'a>>,
    /// Multiplies the activation.
    pub gate: Option<TensorRef<'a>>,
}

/// The gradients that a backward run computes: those that are given.
#[derive(Debug, Default)]
pub struct GeluGrads<'a> {
    /// Gradient of `x`: its shape and type, any strides without overlap.
    pub dx: Option<TensorMut<'a>>,
    /// Gradient of `gate`: its shape and type, any strides without overlap.
    pub dgate: Option<TensorMut<'a>>,
    /// Gradient of `bias`: `[last dimension of x]`, f32 or the type of `x`. Summed in f32 with
    /// compensation and the same bits on any number of threads.
    pub dbias: Option<TensorMut<'a>>,
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
/// let args = GeluArgs { x: TensorRef::new(&x, &[2, 3])?, bias: None, gate: None };
/// plan.run(&args, TensorMut::new(&mut y, &[2, 3])?, &mut workspace)?;
/// assert!((y[4] - 0.841192).abs() < 1e-6);
/// # Ok::<(), windrow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct GeluPlan {
    spec: GeluSpec,
    algorithm: GeluAlgorithm,
    options: PlanOptions,
    isa: Isa,
    /// On CUDA the compiled kernel.
    cuda: Option<cuda::Forward>,
}

impl GeluPlan {
    /// A plan with the configuration that [`PlanOptions::tuning`] gives.
    ///
    /// # Errors
    /// What is wrong with the spec: [`Error::DType`], [`Error::Shape`], [`Error::Rank`],
    /// [`Error::OverlappingOutput`], [`Error::Unsupported`]; for CUDA [`Error::NoDevice`] and
    /// [`Error::Backend`].
    pub fn new(spec: &GeluSpec, options: &PlanOptions) -> Result<Self> {
        spec.check()?;
        if let Some(tuned) = tuning::decide(spec, options)? {
            return Self::with_configuration(spec, &tuned, options);
        }
        match Self::algorithms(spec, options.device)[..] {
            [fastest, ..] => Self::with_algorithm(spec, fastest, options),
            [] => Err(Error::unsupported(
                "gelu with half_math native",
                "it takes f16 or bf16 on CUDA, without bias and gate",
            )),
        }
    }

    /// A plan with this algorithm and the model's parameters.
    ///
    /// # Errors
    /// As [`GeluPlan::new`], and [`Error::Unsupported`] if the algorithm cannot compute this spec on
    /// this device.
    pub fn with_algorithm(
        spec: &GeluSpec,
        algorithm: GeluAlgorithm,
        options: &PlanOptions,
    ) -> Result<Self> {
        Self::with_configuration(spec, &GeluConfiguration::new(algorithm), options)
    }

    /// A plan with this configuration.
    ///
    /// # Errors
    /// As [`GeluPlan::with_algorithm`], and [`Error::Unsupported`] if the algorithm has not
    /// the parameters or cannot run with them.
    pub fn with_configuration(
        spec: &GeluSpec,
        configuration: &GeluConfiguration,
        options: &PlanOptions,
    ) -> Result<Self> {
        Self::on_isa(spec, configuration, options, Isa::best())
    }

    /// As [`GeluPlan::with_configuration`], with the instructions of `isa`.
    pub(crate) fn on_isa(
        spec: &GeluSpec,
        configuration: &GeluConfiguration,
        options: &PlanOptions,
        isa: Isa,
    ) -> Result<Self> {
        spec.check()?;
        let algorithm = configuration.algorithm;
        let all = Self::algorithms(spec, options.device);
        if !all.contains(&algorithm) {
            let names: Vec<_> = all.iter().map(|a| a.name()).collect();
            return Err(Error::unsupported(
                format!("gelu {} on {}", algorithm.name(), options.device),
                format!("this spec can be computed by {}", names.join(", ")),
            ));
        }
        configuration.check(options)?;
        let cuda = match options.device {
            Device::Cpu => None,
            Device::Cuda(index) => Some(cuda::Forward::new(index, spec, configuration)?),
        };
        let plan = GeluPlan { spec: *spec, algorithm, options: *options, isa, cuda };
        crate::tuning::announce("gelu", options.device, &plan.configuration());
        Ok(plan)
    }

    /// Every configuration that [`GeluPlan::tune`] measures, the model's choice first.
    ///
    /// # Errors
    /// As [`GeluPlan::new`].
    pub fn configurations(
        spec: &GeluSpec,
        options: &PlanOptions,
    ) -> Result<Vec<GeluConfiguration>> {
        tuning::configurations(spec, options)
    }

    /// Measures the configurations on dense tensors of its own, compares the fastest one's result with the oracle,
    /// and keeps it for plans with [`Tuning::Cached`](crate::Tuning::Cached).
    ///
    /// # Errors
    /// As [`GeluPlan::new`], and what running the model's choice can give.
    pub fn tune(spec: &GeluSpec, options: &PlanOptions, search: &Search) -> Result<Report> {
        tuning::tune(spec, options, search)
    }

    /// Measures these configurations as [`GeluPlan::tune`] does, of which the first is what gains refer to. Nothing
    /// is kept.
    ///
    /// # Errors
    /// Those of making and running the first, [`Error::Parameter`] if there is none.
    pub fn measure(
        spec: &GeluSpec,
        options: &PlanOptions,
        configurations: &[GeluConfiguration],
        search: &Search,
    ) -> Result<Report> {
        tuning::measure(spec, options, configurations, search)
    }

    /// All algorithms that can compute this spec, the fastest first. None if the spec is wrong.
    pub fn algorithms(spec: &GeluSpec, device: Device) -> Vec<GeluAlgorithm> {
        match device {
            _ if spec.check().is_err() => Vec::new(),
            Device::Cpu if spec.half_math == HalfMath::Native => Vec::new(),
            Device::Cpu => vec![GeluAlgorithm::Cpu],
            Device::Cuda(_) => cuda::algorithms(spec),
        }
    }

    /// The algorithm chosen.
    pub fn algorithm(&self) -> GeluAlgorithm {
        self.algorithm
    }

    /// The algorithm and all of its parameters.
    pub fn configuration(&self) -> GeluConfiguration {
        match &self.cuda {
            Some(cuda) => cuda.configuration(),
            None => GeluConfiguration::new(self.algorithm),
        }
    }

    /// What it computes.
    pub fn spec(&self) -> &GeluSpec {
        &self.spec
    }

    /// Where it runs.
    pub fn device(&self) -> Device {
        self.options.device
    }

    /// Bytes of workspace that [`GeluPlan::backward`] needs for the gradient of a bias;
    /// [`GeluPlan::run`] needs none.
    pub fn workspace_bytes(&self) -> usize {
        match self.spec.bias {
            Some(_) if self.cuda.is_some() => cuda::workspace_bytes(&self.spec),
            Some(_) => cpu::Partition::new(self.spec.x.shape()).workspace_bytes(),
            None => 0,
        }
    }

    /// Algorithm, and instruction set and threads or the launch, in one line.
    pub fn explain(&self) -> String {
        if let Some(cuda) = &self.cuda {
            return format!("gelu by {}: one pass, {}", self.configuration(), cuda.explain());
        }
        format!(
            "gelu by {}: one pass in {} vectors on {} threads",
            self.configuration(),
            self.isa.name(),
            resolve_threads(self.options.threads)
        )
    }

    /// Computes `y = gelu(x + bias) * gate`. `y` may be exactly `x` (same address and layout), else
    /// it shares no memory with an input.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`] or [`Error::Strides`] if a view does not fit the spec,
    /// [`Error::Aliasing`], [`Error::WrongDevice`]; with [`Verify::On`] [`Error::Verification`].
    pub fn run(
        &self,
        args: &GeluArgs<'_>,
        mut y: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        self.check_args(args, workspace)?;
        check_view("y", y.desc(), &self.spec.y)?;
        check_device("y", y.device(), self.options.device)?;
        if y.as_ptr() != args.x.as_ptr() || y.layout() != args.x.layout() {
            check_disjoint("y", &y, "x", &args.x)?;
        }
        for (name, input) in [("bias", &args.bias), ("gate", &args.gate)] {
            if let Some(input) = input {
                check_disjoint("y", &y, name, input)?;
            }
        }
        // Before the run, which may overwrite x.
        let expected = match self.options.verify {
            Verify::Off => None,
            Verify::On => Some(self.oracle_forward(&self.oracle_inputs(args)?)),
        };
        match &self.cuda {
            Some(cuda) => cuda.run(args, &y, workspace)?,
            None => cpu::forward(self.isa, self.threads(), &self.spec, args, y.reborrow()),
        }
        match expected {
            None => Ok(()),
            Some(expected) => {
                workspace.synchronize()?;
                self.expect("y", &y.as_ref(), &expected)
            }
        }
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
        self.check_args(args, workspace)?;
        self.check_grads(args, dy, &grads)?;
        if let Some(cuda) = &self.cuda {
            cuda.backward(&self.spec, args, dy, &grads, workspace)?;
        } else {
            let GeluGrads { dx, dgate, dbias } = &mut grads;
            let again = GeluGrads {
                dx: dx.as_mut().map(TensorMut::reborrow),
                dgate: dgate.as_mut().map(TensorMut::reborrow),
                dbias: dbias.as_mut().map(TensorMut::reborrow),
            };
            cpu::backward(self.isa, self.threads(), &self.spec, args, dy, again, workspace)?;
        }
        if self.options.verify == Verify::On {
            workspace.synchronize()?;
            // Without elements there may be no memory for a gradient that is not asked for.
            let summed = grads.dbias.is_some() || !self.spec.x.layout.is_empty();
            let last = self.spec.x.shape().last().copied().unwrap_or(1);
            let last = if summed { last } else { 0 };
            let inputs = self.oracle_inputs(args)?;
            let expected = reference::backward(&inputs, &dy.to_f64_vec()?, last);
            for (what, got, want) in [
                ("dx", &grads.dx, &expected.dx),
                ("dgate", &grads.dgate, &expected.dgate),
                ("dbias", &grads.dbias, &expected.dbias),
            ] {
                if let Some(got) = got {
                    self.expect(what, &got.as_ref(), want)?;
                }
            }
        }
        Ok(())
    }

    /// Compares a result of [`GeluPlan::run`] with the f64 oracle. The inputs must not have been
    /// overwritten by it.
    ///
    /// # Errors
    /// As [`GeluPlan::run`] for inputs and `y` that do not fit the spec, [`Error::WrongDevice`].
    pub fn compare(&self, args: &GeluArgs<'_>, y: &TensorRef<'_>) -> Result<Comparison> {
        self.check_inputs(args)?;
        check_view("y", y.desc(), &self.spec.y)?;
        self.comparison(y, &self.oracle_forward(&self.oracle_inputs(args)?))
    }

    fn threads(&self) -> usize {
        resolve_threads(self.options.threads)
    }

    fn check_args(&self, args: &GeluArgs<'_>, workspace: &Workspace) -> Result<()> {
        check_device("workspace", workspace.device(), self.options.device)?;
        self.check_inputs(args)
    }

    fn check_inputs(&self, args: &GeluArgs<'_>) -> Result<()> {
        check_view("x", args.x.desc(), &self.spec.x)?;
        check_device("x", args.x.device(), self.options.device)?;
        for (name, given, expected) in
            [("bias", &args.bias, &self.spec.bias), ("gate", &args.gate, &self.spec.gate)]
        {
            match (given, expected) {
                (Some(given), Some(expected)) => {
                    check_view(name, given.desc(), expected)?;
                    check_device(name, given.device(), self.options.device)?;
                }
                (None, None) => {}
                (Some(_), None) => return Err(Error::parameter(name, "given", "none, as planned")),
                (None, Some(_)) => return Err(Error::parameter(name, "none", "one, as planned")),
            }
        }
        Ok(())
    }

    fn check_grads(
        &self,
        args: &GeluArgs<'_>,
        dy: &TensorRef<'_>,
        grads: &GeluGrads<'_>,
    ) -> Result<()> {
        let GeluSpec { x, .. } = &self.spec;
        crate::tensor::check_tensor("dy", dy.desc(), x.dtype, x.shape())?;
        check_device("dy", dy.device(), self.options.device)?;
        for (name, grad, input, planned) in [
            ("dgate", &grads.dgate, "gate", self.spec.gate.is_some()),
            ("dbias", &grads.dbias, "bias", self.spec.bias.is_some()),
        ] {
            if grad.is_some() && !planned {
                return Err(Error::unsupported(name, format!("the plan has no {input}")));
            }
        }
        for (name, grad) in [("dx", &grads.dx), ("dgate", &grads.dgate)] {
            if let Some(grad) = grad {
                crate::tensor::check_tensor(name, grad.desc(), x.dtype, x.shape())?;
            }
        }
        if let (Some(grad), Some(&last)) = (&grads.dbias, x.shape().last()) {
            spec::check_bias("dbias", grad.desc(), x.dtype, last)?;
        }
        let outputs = [("dx", &grads.dx), ("dgate", &grads.dgate), ("dbias", &grads.dbias)];
        for (i, (name, output)) in outputs.iter().enumerate() {
            let Some(output) = output else { continue };
            check_device(name, output.device(), self.options.device)?;
            check_disjoint(name, output, "x", &args.x)?;
            check_disjoint(name, output, "dy", dy)?;
            for (other, input) in [("bias", &args.bias), ("gate", &args.gate)] {
                if let Some(input) = input {
                    check_disjoint(name, output, other, input)?;
                }
            }
            for (other, second) in &outputs[i + 1..] {
                if let Some(second) = second {
                    check_disjoint(name, output, other, &second.as_ref())?;
                }
            }
        }
        Ok(())
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
    fn oracle_forward(&self, inputs: &reference::Inputs) -> reference::Expected {
        let mut expected = reference::forward(inputs);
        if self.spec.half_math == HalfMath::Native {
            expected.scale = inputs.x.iter().map(|x| x.abs()).collect();
        }
        expected
    }

    fn comparison(
        &self,
        got: &TensorRef<'_>,
        expected: &reference::Expected,
    ) -> Result<Comparison> {
        let tolerance = verify::tolerance(&self.spec, self.options.device);
        Comparison::of(got, &expected.want, &expected.scale, tolerance)
    }

    fn expect(
        &self,
        what: &str,
        got: &TensorRef<'_>,
        expected: &reference::Expected,
    ) -> Result<()> {
        self.comparison(got, expected)?
            .into_result(&format!("gelu {} {what}", self.algorithm.name()))
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
    one_call(GeluArgs { x: *x, bias: None, gate: None }, approximate)
}

/// `gelu(a) * b`, the gated form of transformer feed-forward layers (Shazeer, arXiv:2002.05202).
/// `a` and `b` have one shape and type; strides are free.
///
/// # Errors
/// As [`gelu`], and [`Error::Shape`] if the shapes differ.
pub fn geglu(a: &TensorRef<'_>, b: &TensorRef<'_>, approximate: Approximate) -> Result<Tensor> {
    one_call(GeluArgs { x: *a, bias: None, gate: Some(*b) }, approximate)
}

fn one_call(args: GeluArgs<'_>, approximate: Approximate) -> Result<Tensor> {
    let spec = GeluSpec::new(*args.x.desc(), approximate)?;
    let spec = GeluSpec { gate: args.gate.map(|g| *g.desc()), ..spec };
    let plan = GeluPlan::new(&spec, &PlanOptions::default())?;
    let mut y = Tensor::uninitialised(spec.y)?;
    plan.run(&args, y.as_mut(), &mut Workspace::empty())?;
    Ok(y)
}
