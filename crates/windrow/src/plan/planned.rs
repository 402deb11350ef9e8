//! The plan of any operator: a checked spec, bound to a device and an algorithm.

use super::checks::Checks;
use super::operator::{Algorithm, Configuration, Engine, Measured, Operator, Setup, Tuned};
#[cfg(feature = "tuning")]
use super::search;
use crate::cpu::Isa;
use crate::tensor::{check_device, check_view};
#[cfg(feature = "tuning")]
use crate::tuning::{Report, Search};
use crate::verification::{Check, Comparison, require};
use crate::{Device, PlanOptions, Result, TensorRef, Verify, Workspace};

/// A checked spec that is bound to a device, with an algorithm and its prepared kernels. A plan is made once and run
/// many times.
///
/// The type aliases [`GeluPlan`](crate::GeluPlan), [`CausalConv1dPlan`](crate::CausalConv1dPlan),
/// [`CausalConv1dUpdatePlan`](crate::CausalConv1dUpdatePlan),
/// [`CausalConv1dServingPlan`](crate::CausalConv1dServingPlan) and [`Conv2dPlan`](crate::Conv2dPlan) name the plans of
/// the operators.
///
/// # Memory
///
/// A run allocates no memory for data: its tensors and its workspace are the caller's. There are these exceptions:
///
/// - With [`Verify::On`](crate::Verify::On), a run allocates what the comparison with the oracle needs.
/// - With a [`FilterCache`](crate::FilterCache), a run allocates the packed filter if the cache does not have it yet.
/// - On a GPU, the first run with index tensors allocates a record of some bytes, once per device, in which kernels
///   report wrong indices. The first run of a gradient loads its kernels, which takes memory.
#[derive(Clone, Debug)]
pub struct Plan<O: Operator> {
    pub(crate) spec: O::Spec,
    pub(crate) problem: O::Problem,
    pub(crate) options: PlanOptions,
    algorithm: Algorithm<O>,
    pub(crate) backend: Backend<O::Cpu, O::Gpu>,
}

/// The engine of a plan: the one for the CPU or the one for GPUs.
#[derive(Clone, Debug)]
pub enum Backend<C, G> {
    /// The CPU.
    Cpu(C),
    /// A GPU.
    Gpu(G),
}

/// Calls a function of the operator's engine for the device of the options. Only this macro and `Plan::on_isa`
/// distinguish the kinds of devices.
macro_rules! on_device {
    ($operator:ident::$function:ident, $spec:expr, $problem:expr, $options:expr $(, $more:expr)*) => {
        match $options.device {
            Device::Cpu => {
                let (spec, problem, options) = ($spec, $problem, $options);
                let setup = Setup { spec, problem, options, place: Isa::best() };
                <$operator::Cpu as Engine<$operator>>::$function(&setup $(, $more)*)
            }
            place @ (Device::Cuda(_) | Device::Hip(_)) => {
                let (spec, problem, options) = ($spec, $problem, $options);
                let setup = Setup { spec, problem, options, place };
                <$operator::Gpu as Engine<$operator>>::$function(&setup $(, $more)*)
            }
        }
    };
}

#[cfg(feature = "tuning")]
pub(super) use on_device;

/// Calls a method of a plan's engine.
macro_rules! engine {
    ($plan:expr, $engine:ident => $value:expr) => {
        match &$plan.backend {
            $crate::plan::Backend::Cpu($engine) => $value,
            $crate::plan::Backend::Gpu($engine) => $value,
        }
    };
}

pub(crate) use engine;

/// Returns [`Error::Unsupported`] if the options ask for bits that do not depend on the batch, and the operator does not
/// have them on this device.
fn check_batch_invariant<O: Operator>(spec: &O::Spec, options: &PlanOptions) -> Result<()> {
    if options.batch_invariant { O::check_batch_invariant(spec, options.device) } else { Ok(()) }
}

/// The measured configuration, which is not used if the bits must not depend on the batch.
fn tuned<O: Operator>(spec: &O::Spec, options: &PlanOptions) -> Result<Option<O::Configuration>> {
    if options.batch_invariant { Ok(None) } else { O::tuned(spec, options) }
}

impl<O: Operator> Plan<O> {
    /// A plan with the configuration that is chosen as [`PlanOptions::tuning`] says. Only algorithms that the spec's
    /// accuracy allows are considered.
    ///
    /// # Errors
    /// For a wrong spec [`Error::Rank`](crate::Error::Rank), [`Error::Shape`](crate::Error::Shape),
    /// [`Error::DType`](crate::Error::DType), [`Error::Parameter`](crate::Error::Parameter),
    /// [`Error::OverlappingOutput`](crate::Error::OverlappingOutput),
    /// [`Error::SizeOverflow`](crate::Error::SizeOverflow), [`Error::Unsupported`](crate::Error::Unsupported). On a GPU
    /// [`Error::NoDevice`](crate::Error::NoDevice), and [`Error::Backend`](crate::Error::Backend) if kernels cannot be
    /// compiled or loaded; [`Error::Unsupported`](crate::Error::Unsupported) if there is no `batch_invariant` plan. With
    /// [`Tuning::Search`](crate::Tuning::Search) also the errors of a run, and
    /// [`Error::Unsupported`](crate::Error::Unsupported) in a build without the feature `tuning`.
    pub fn new(spec: &O::Spec, options: &PlanOptions) -> Result<Self> {
        let problem = O::problem(spec)?;
        check_batch_invariant::<O>(spec, options)?;
        if let Some(tuned) = tuned::<O>(spec, options)? {
            return Self::with_configuration(spec, &tuned, options);
        }
        let algorithm = on_device!(O::choose, spec, &problem, options)?;
        Self::with_algorithm(spec, algorithm, options)
    }

    /// The algorithm that [`Plan::new`] chooses. No kernels are compiled or loaded to find it, except with
    /// [`Tuning::Search`](crate::Tuning::Search), which runs the candidates.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn choice(
        spec: &O::Spec,
        options: &PlanOptions,
    ) -> Result<<O::Configuration as Configuration>::Algorithm> {
        let problem = O::problem(spec)?;
        check_batch_invariant::<O>(spec, options)?;
        match tuned::<O>(spec, options)? {
            Some(tuned) => Ok(tuned.algorithm()),
            None => on_device!(O::choose, spec, &problem, options),
        }
    }

    /// A plan with an algorithm of the caller's choice and the cost model's parameters. The accuracy of the spec does
    /// not limit the choice.
    ///
    /// # Errors
    /// As [`Plan::new`], and [`Error::Unsupported`](crate::Error::Unsupported) if the algorithm is not one of
    /// [`Plan::algorithms`].
    pub fn with_algorithm(
        spec: &O::Spec,
        algorithm: <O::Configuration as Configuration>::Algorithm,
        options: &PlanOptions,
    ) -> Result<Self> {
        Self::with_configuration(spec, &O::Configuration::of(algorithm), options)
    }

    /// A plan with a configuration of the caller's choice. The accuracy of the spec does not limit the choice.
    ///
    /// # Errors
    /// As [`Plan::with_algorithm`], and [`Error::Unsupported`](crate::Error::Unsupported) if the algorithm does not
    /// have these parameters or cannot run with them.
    pub fn with_configuration(
        spec: &O::Spec,
        configuration: &O::Configuration,
        options: &PlanOptions,
    ) -> Result<Self> {
        Self::on_isa(spec, configuration, options, Isa::best())
    }

    /// A plan like that of [`Plan::with_configuration`]. On the CPU it uses the instruction set `isa`.
    pub(crate) fn on_isa(
        spec: &O::Spec,
        configuration: &O::Configuration,
        options: &PlanOptions,
        isa: Isa,
    ) -> Result<Self> {
        let problem = O::problem(spec)?;
        check_batch_invariant::<O>(spec, options)?;
        configuration.check(options)?;
        let backend = match options.device {
            Device::Cpu => {
                let setup = Setup { spec, problem: &problem, options, place: isa };
                Backend::Cpu(O::Cpu::new(&setup, configuration)?)
            }
            place @ (Device::Cuda(_) | Device::Hip(_)) => {
                let setup = Setup { spec, problem: &problem, options, place };
                Backend::Gpu(O::Gpu::new(&setup, configuration)?)
            }
        };
        let (spec, options, algorithm) = (spec.clone(), *options, configuration.algorithm());
        let plan = Plan { spec, problem, options, algorithm, backend };
        let (device, configuration) = (options.device, plan.configuration());
        tracing::debug!(operator = O::NAME, %device, %configuration, "planned");
        Ok(plan)
    }

    /// The algorithms that can compute this spec on a device, whatever their accuracy, in no particular order. The list
    /// is empty if the spec is wrong.
    pub fn algorithms(
        spec: &O::Spec,
        device: Device,
    ) -> Vec<<O::Configuration as Configuration>::Algorithm> {
        let Ok(problem) = O::problem(spec) else { return Vec::new() };
        let options = PlanOptions { device, ..PlanOptions::default() };
        on_device!(O::algorithms, spec, &problem, &options).unwrap_or_default()
    }

    /// The algorithm of the plan.
    pub fn algorithm(&self) -> <O::Configuration as Configuration>::Algorithm {
        self.algorithm
    }

    /// The algorithm and all of its parameters.
    pub fn configuration(&self) -> O::Configuration {
        engine!(self, engine => engine.configuration())
    }

    /// The spec that the plan computes.
    pub fn spec(&self) -> &O::Spec {
        &self.spec
    }

    /// The device that the plan runs on.
    pub fn device(&self) -> Device {
        self.options.device
    }

    /// The size in bytes of the workspace that a run needs.
    pub fn workspace_bytes(&self) -> usize {
        engine!(self, engine => engine.workspace_bytes())
    }

    /// One line of text with the configuration, the device, and how the work is divided: block sizes and threads on the
    /// CPU, the launch on a GPU.
    pub fn explain(&self) -> String {
        let how = engine!(self, engine => engine.explain(self));
        format!("{} by {}{how}", O::NAME, self.configuration())
    }

    /// Checks that the inputs of a run agree with the spec.
    pub(crate) fn check_inputs(&self, args: &O::Args<'_>) -> Result<Checks> {
        let mut checks = Checks::new(self.options.device);
        for (input, view) in O::inputs(args).iter().zip(O::views(args)) {
            checks.read(input.name, view, (input.desc)(&self.spec))?;
        }
        Ok(checks)
    }

    /// Checks the inputs as [`Plan::check_inputs`] does, and the device of the workspace.
    pub(crate) fn check_run(&self, args: &O::Args<'_>, workspace: &Workspace) -> Result<Checks> {
        check_device("workspace", workspace.device(), self.options.device)?;
        self.check_inputs(args)
    }

    /// Calls `run`. With [`Verify::On`] it also calls `before` and `checks`. `before` is called before the run, and
    /// takes from the inputs what the oracle needs and the run may overwrite. `checks` compares the result with the
    /// oracle.
    pub(crate) fn verified<T, W>(
        &self,
        written: &mut W,
        workspace: &mut Workspace,
        before: impl FnOnce(&W) -> Result<T>,
        run: impl FnOnce(&mut W, &mut Workspace) -> Result<()>,
        checks: impl FnOnce(&W, T) -> Result<Vec<Check>>,
    ) -> Result<()> {
        if self.options.verify == Verify::Off {
            return run(written, workspace);
        }
        let before = before(written)?;
        run(written, workspace)?;
        workspace.synchronize()?;
        require(&format!("{} {}", O::NAME, self.algorithm), checks(written, before)?)
    }
}

#[cfg(not(feature = "tuning"))]
impl<O: Tuned> Plan<O> {
    /// The algorithms that compute the spec, each with the cost model's parameters, in no particular order. Other
    /// parameters are tried only with the feature `tuning`.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn configurations(spec: &O::Spec, options: &PlanOptions) -> Result<Vec<O::Configuration>> {
        O::problem(spec)?;
        let algorithms = Self::algorithms(spec, options.device);
        Ok(algorithms.into_iter().map(O::Configuration::of).collect())
    }
}

#[cfg(feature = "tuning")]
impl<O: Tuned> Plan<O> {
    /// The candidates of [`Plan::tune`], the cost model's choice first.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn configurations(spec: &O::Spec, options: &PlanOptions) -> Result<Vec<O::Configuration>> {
        search::configurations::<O>(spec, options)
    }

    /// Measures the configurations on tensors that it makes, compares the result of the fastest one with the oracle,
    /// and saves that configuration for plans with [`Tuning::Cached`](crate::Tuning::Cached). The tensors are dense;
    /// the order of their dimensions in memory is that of the spec's strides. On the CPU, a convolution of a large
    /// batch is measured with fewer images.
    ///
    /// # Errors
    /// As [`Plan::new`], and the errors of a run of the cost model's choice.
    pub fn tune(spec: &O::Spec, options: &PlanOptions, search: &Search) -> Result<Report> {
        search::tune::<O>(spec, options, search)
    }

    /// Measures these configurations as [`Plan::tune`] does. Gains are relative to the first one. Nothing is saved.
    ///
    /// # Errors
    /// Those of making and running the first configuration; [`Error::Parameter`](crate::Error::Parameter) if there is
    /// none.
    pub fn measure(
        spec: &O::Spec,
        options: &PlanOptions,
        configurations: &[O::Configuration],
        search: &Search,
    ) -> Result<Report> {
        search::measure::<O>(spec, options, configurations, search)
    }
}

impl<O: Measured> Plan<O> {
    /// Compares the output of a run with the f64 oracle. The run must not have overwritten its inputs.
    ///
    /// # Errors
    /// Those of a run if the inputs or `y` do not fit the spec; for device memory also
    /// [`Error::Backend`](crate::Error::Backend).
    pub fn compare(&self, args: &O::Args<'_>, y: &TensorRef<'_>) -> Result<Comparison> {
        self.check_compared(args, y)?;
        O::compare(self, args, y)
    }

    /// Compares as [`Plan::compare`] does, but only the first `count` and the last `count` slices of `y`, for results
    /// that are too large for the oracle. A slice is an output channel, for GELU an entry of the first dimension. Of a
    /// batch of images, the first channels of the first image and the last channels of the last one are compared, or
    /// all channels of both if the convolution has groups. If the filter is packed or cached, all of `y` is compared.
    ///
    /// # Errors
    /// As [`Plan::compare`].
    pub fn compare_ends(
        &self,
        args: &O::Args<'_>,
        y: &TensorRef<'_>,
        count: usize,
    ) -> Result<Comparison> {
        self.check_compared(args, y)?;
        O::compare_ends(self, args, y, Some(count))
    }

    fn check_compared(&self, args: &O::Args<'_>, y: &TensorRef<'_>) -> Result<()> {
        self.check_inputs(args)?;
        check_device("y", y.device(), self.options.device)?;
        check_view("y", y.desc(), O::y(&self.spec))
    }
}
