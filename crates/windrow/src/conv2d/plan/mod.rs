//! A convolution bound to a device and an algorithm.

mod cache;
mod checksum;
mod comparison;
mod packed;

use super::backward::Backward;
use super::cpu::{self, choose, floats, floats_mut, supported};
use super::cuda::{self, Operands};
use super::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem, tuning};
use crate::cpu::{Isa, resolve_threads};
use crate::cuda::Gpu;
use crate::tensor::{check_device, check_disjoint, check_optional_view, check_view};
use crate::tuning::{Report, Search};
use crate::{
    Device, Error, PlanOptions, Result, TensorDesc, TensorMut, TensorRef, Verify, Workspace,
};
use packed::{PackedData, filter};
use std::num::NonZeroUsize;
use std::sync::OnceLock;

pub use cache::FilterCache;
pub(super) use comparison::{compare, values};
pub use packed::{PackedWeights, Weights};

/// The inputs of a run.
#[derive(Clone, Copy, Debug)]
pub struct Conv2dArgs<'a> {
    /// Input [n, c, h, w], with the spec's type, shape and strides.
    pub x: TensorRef<'a>,
    /// Filter.
    pub w: Weights<'a>,
    /// Bias `[k]`, if the spec has one.
    pub bias: Option<TensorRef<'a>>,
}

/// A [`Conv2dSpec`] that was checked and bound to a device and an algorithm.
///
/// ```
/// use windrow::*;
/// let x = Tensor::from_slice(&[1f32; 16], &[1, 1, 4, 4])?;
/// let w = Tensor::from_slice(&[1f32; 9], &[1, 1, 3, 3])?;
/// let spec = Conv2dSpec::new(*x.desc(), *w.desc(), &Conv2dParams::default())?;
/// let plan = Conv2dPlan::new(&spec, &PlanOptions::default())?;
/// let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes())?;
/// let packed = plan.pack_weights(&w.as_ref(), &mut workspace)?;
/// let mut y = Tensor::uninitialised(spec.y)?;
/// let args = Conv2dArgs { x: x.as_ref(), w: Weights::Packed(&packed), bias: None };
/// plan.run(&args, y.as_mut(), &mut workspace)?;
/// assert_eq!(y.to_vec::<f32>()?, [9.0; 4]);
/// # Ok::<(), windrow::Error>(())
/// ```
#[derive(Debug)]
pub struct Conv2dPlan {
    spec: Conv2dSpec,
    pub(super) problem: Problem,
    algorithm: Conv2dAlgorithm,
    backend: Backend,
    pub(super) verify: Verify,
    backward: OnceLock<Backward>,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // a plan has one
enum Backend {
    Cpu { engine: cpu::Engine, isa: Isa, threads: usize },
    Cuda { engine: Box<cuda::Engine>, gpu: &'static Gpu },
}

impl Conv2dPlan {
    /// A plan with the configuration that [`PlanOptions::tuning`] gives, among the algorithms that the spec's
    /// [`Accuracy`](crate::Accuracy) allows.
    ///
    /// # Errors
    /// As [`Conv2dSpec::new`], for fields that were changed since and for y and bias:
    /// [`Error::OverlappingOutput`] if elements of y share memory. On CUDA [`Error::NoDevice`],
    /// [`Error::Backend`] if kernels cannot be compiled or loaded, [`Error::Unsupported`] for 2^30
    /// and more images, pixels of an image or filter taps. With [`Tuning::Search`](crate::Tuning::Search) what running
    /// the plan can give.
    pub fn new(spec: &Conv2dSpec, options: &PlanOptions) -> Result<Self> {
        let problem = spec.problem()?;
        if let Some(tuned) = tuning::decide(spec, options)? {
            return Self::with_configuration(spec, &tuned, options);
        }
        let algorithm = match options.device {
            Device::Cpu => choose(spec, &problem, Isa::best(), options.filter),
            Device::Cuda(index) => {
                cuda::Engine::best(Gpu::get(index)?, spec, &problem, options.filter)?
            }
        };
        Self::with_algorithm(spec, algorithm, options)
    }

    /// A plan with an algorithm of the caller's choice, whatever the spec's accuracy, and the model's
    /// parameters.
    ///
    /// # Errors
    /// As [`Conv2dPlan::new`], and [`Error::Unsupported`] if the algorithm is not one of
    /// [`Conv2dPlan::algorithms`].
    pub fn with_algorithm(
        spec: &Conv2dSpec,
        algorithm: Conv2dAlgorithm,
        options: &PlanOptions,
    ) -> Result<Self> {
        Self::with_configuration(spec, &Conv2dConfiguration::new(algorithm), options)
    }

    /// A plan with a configuration of the caller's choice, whatever the spec's accuracy.
    ///
    /// # Errors
    /// As [`Conv2dPlan::with_algorithm`], and [`Error::Unsupported`] if the algorithm has not
    /// the parameters or cannot run with them.
    pub fn with_configuration(
        spec: &Conv2dSpec,
        configuration: &Conv2dConfiguration,
        options: &PlanOptions,
    ) -> Result<Self> {
        let problem = spec.problem()?;
        configuration.check(options)?;
        let algorithm = configuration.algorithm;
        let plan = if let Device::Cuda(index) = options.device {
            let gpu = Gpu::get(index)?;
            let engine =
                Box::new(cuda::Engine::new(gpu, spec, &problem, configuration, options.tuning)?);
            let backend = Backend::Cuda { engine, gpu };
            Self::with_backend(spec, problem, algorithm, backend, options)
        } else if supported(&problem).contains(&algorithm) {
            Self::build(spec, problem, configuration, Isa::best(), options)
        } else {
            return Err(Error::unsupported(
                format!("conv2d by {algorithm} on {}", options.device),
                "Winograd computes 3x3 filters of stride and dilation 1 in one group; direct and \
                 im2col_gemm compute everything",
            ));
        };
        crate::tuning::announce("conv2d", options.device, &plan.configuration());
        Ok(plan)
    }

    /// Every configuration that [`Conv2dPlan::tune`] measures, the model's choice first.
    ///
    /// # Errors
    /// As [`Conv2dPlan::new`].
    pub fn configurations(
        spec: &Conv2dSpec,
        options: &PlanOptions,
    ) -> Result<Vec<Conv2dConfiguration>> {
        tuning::configurations(spec, options)
    }

    /// Measures the configurations on tensors of its own, compares the fastest one's result with the oracle,
    /// and keeps it for plans with [`Tuning::Cached`](crate::Tuning::Cached). Tensors are dense, with dimensions in the
    /// spec's order; on the CPU a large batch is represented by some images of it.
    ///
    /// # Errors
    /// As [`Conv2dPlan::new`], and what running the model's choice can give.
    pub fn tune(spec: &Conv2dSpec, options: &PlanOptions, search: &Search) -> Result<Report> {
        tuning::tune(spec, options, search)
    }

    /// Measures these configurations as [`Conv2dPlan::tune`] does, of which the first is what gains refer to. Nothing
    /// is kept.
    ///
    /// # Errors
    /// Those of making and running the first, [`Error::Parameter`] if there is none.
    pub fn measure(
        spec: &Conv2dSpec,
        options: &PlanOptions,
        configurations: &[Conv2dConfiguration],
        search: &Search,
    ) -> Result<Report> {
        tuning::measure(spec, options, configurations, search)
    }

    /// Every algorithm that can compute the spec on a device, whatever its accuracy; none if the
    /// spec is invalid.
    pub fn algorithms(spec: &Conv2dSpec, device: Device) -> Vec<Conv2dAlgorithm> {
        let Ok(problem) = spec.problem() else { return Vec::new() };
        match device {
            Device::Cpu => supported(&problem),
            Device::Cuda(index) => Gpu::get(index)
                .map(|gpu| cuda::Engine::supported(gpu, spec, &problem))
                .unwrap_or_default(),
        }
    }

    /// For tests, which try every instruction set.
    pub(crate) fn build(
        spec: &Conv2dSpec,
        problem: Problem,
        configuration: &Conv2dConfiguration,
        isa: Isa,
        options: &PlanOptions,
    ) -> Self {
        let threads = resolve_threads(options.threads).min(most_threads());
        let threads = configuration.threads.map_or(threads, |fewer| fewer.min(threads));
        let engine = cpu::Engine::new(spec, &problem, configuration, isa, threads);
        let backend = Backend::Cpu { engine, isa, threads };
        Self::with_backend(spec, problem, configuration.algorithm, backend, options)
    }

    fn with_backend(
        spec: &Conv2dSpec,
        problem: Problem,
        algorithm: Conv2dAlgorithm,
        backend: Backend,
        options: &PlanOptions,
    ) -> Self {
        let (verify, backward) = (options.verify, OnceLock::new());
        Conv2dPlan { spec: spec.clone(), problem, algorithm, backend, verify, backward }
    }

    /// Where its tensors and workspace must be.
    pub(super) fn device(&self) -> Device {
        match &self.backend {
            Backend::Cpu { .. } => Device::Cpu,
            Backend::Cuda { gpu, .. } => gpu.device(),
        }
    }

    /// The algorithm.
    pub fn algorithm(&self) -> Conv2dAlgorithm {
        self.algorithm
    }

    /// The algorithm and all of its parameters.
    pub fn configuration(&self) -> Conv2dConfiguration {
        match &self.backend {
            Backend::Cpu { engine, threads, .. } => {
                let threads = Some(*threads);
                Conv2dConfiguration { threads, ..engine.configuration(self.algorithm) }
            }
            Backend::Cuda { engine, .. } => engine.configuration(self.algorithm),
        }
    }

    /// What it computes.
    pub fn spec(&self) -> &Conv2dSpec {
        &self.spec
    }

    /// Bytes of workspace that [`Conv2dPlan::run`] needs with [`Weights::Raw`].
    pub fn workspace_bytes(&self) -> usize {
        self.raw_bytes() + self.packed_workspace_bytes()
    }

    /// Bytes of workspace that [`Conv2dPlan::run`] needs with [`Weights::Packed`].
    pub fn packed_workspace_bytes(&self) -> usize {
        match &self.backend {
            Backend::Cpu { engine, .. } => engine.workspace_bytes(self.problem.k),
            Backend::Cuda { engine, .. } => engine.scratch_bytes(),
        }
    }

    /// Bytes of workspace that [`Conv2dPlan::run`] needs with these weights.
    pub fn workspace_bytes_for(&self, weights: &Weights<'_>) -> usize {
        match weights {
            Weights::Packed(_) | Weights::Cached(..) => self.packed_workspace_bytes(),
            Weights::Raw(_) => self.workspace_bytes(),
        }
    }

    /// Configuration, what follows from it, and memory in one line.
    pub fn explain(&self) -> String {
        let (place, blocking) = match &self.backend {
            Backend::Cpu { engine, isa, .. } => (isa.name().to_owned(), engine.explain()),
            Backend::Cuda { engine, gpu } => (gpu.device().to_string(), engine.explain()),
        };
        format!(
            "conv2d by {} on {place} at accuracy {}: {blocking}; workspace {} bytes",
            self.configuration(),
            self.spec.accuracy.name(),
            self.workspace_bytes()
        )
    }

    /// Computes y.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::Strides`] if a view is not as in the spec;
    /// [`Error::WrongDevice`]; [`Error::Aliasing`] if y shares memory with an input; [`Error::OutOfMemory`] with
    /// [`Weights::Cached`];
    /// [`Error::Parameter`] if the bias is missing or one too many, if the filter was packed for
    /// another plan, or if the workspace is too small; [`Error::Verification`] under
    /// [`Verify::On`] only.
    pub fn run(
        &self,
        args: &Conv2dArgs<'_>,
        mut y: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        check_device("workspace", workspace.device(), self.device())?;
        self.check(args, &y)?;
        let bytes = self.workspace_bytes_for(&args.w);
        match &self.backend {
            Backend::Cpu { engine, .. } => {
                let memory = workspace.take(bytes)?;
                if y.layout().is_empty() {
                    return Ok(());
                }
                let (x, bias, activation) = (&args.x, args.bias.as_ref(), self.spec.activation);
                let kept;
                let weights = match args.w {
                    Weights::Cached(w, cache) => {
                        kept = cache.get(self, &w)?;
                        Weights::Packed(&kept)
                    }
                    weights => weights,
                };
                match weights {
                    Weights::Raw(w) => {
                        let (packed, scratch) = memory.split_at_mut(self.raw_bytes());
                        let packed = floats_mut(packed);
                        engine.run_raw(&w, packed, x, bias, activation, &mut y, scratch);
                    }
                    Weights::Packed(PackedWeights { data: PackedData::Host(data), .. }) => {
                        let packed = floats(data.as_slice());
                        engine.run(packed, x, bias, activation, &mut y, memory);
                    }
                    Weights::Packed(packed) => return Err(self.packed_elsewhere(packed)),
                    Weights::Cached(..) => unreachable!("packed above"),
                }
            }
            Backend::Cuda { engine, gpu } => {
                let (stream, memory) = workspace.take_on(gpu, bytes)?;
                if y.layout().is_empty() {
                    return Ok(());
                }
                let bias = args.bias.map(|b| b.as_ptr());
                let operands = Operands { x: args.x.as_ptr(), bias, y: y.as_mut_ptr() };
                // SAFETY: the views were checked against the spec and are on the device; the
                // workspace holds the packed filter and the scratch memory.
                unsafe {
                    let run = |packed, scratch| engine.run(stream, packed, operands, scratch);
                    match args.w {
                        Weights::Raw(w) => {
                            let packed = engine.packed(stream, w.as_ptr(), memory)?;
                            run(packed, memory.add(self.raw_bytes()))?;
                        }
                        Weights::Cached(w, _) if engine.reads_in_place(w.as_ptr()) => {
                            run(w.as_ptr(), memory)?;
                        }
                        Weights::Cached(w, cache) => {
                            let packs = cache.packs();
                            let pack = packs.lease(engine, self.packing(), stream, w.as_ptr())?;
                            run(pack.as_ptr(), memory)?;
                        }
                        Weights::Packed(PackedWeights {
                            data: PackedData::Device(data), ..
                        }) if std::ptr::eq(data.gpu(), *gpu) => {
                            let outcome = run(data.as_mut_ptr().cast_const(), memory);
                            data.used_on(stream)?;
                            outcome?;
                        }
                        Weights::Packed(packed) => return Err(self.packed_elsewhere(packed)),
                    }
                }
            }
        }
        if self.verify == Verify::Off {
            return Ok(());
        }
        // Of a filter packed by a plan that did not verify only the packed form is known.
        let Some(w) = filter(&args.w)? else { return Ok(()) };
        if self.device() != Device::Cpu {
            workspace.synchronize()?;
        }
        let comparison = self.comparison(args, &w, &y.as_ref())?;
        comparison.into_result(&format!("conv2d by {}", self.algorithm))
    }

    fn check(&self, args: &Conv2dArgs<'_>, y: &TensorMut<'_>) -> Result<()> {
        self.check_inputs(args)?;
        self.check_view("y", y.desc(), y.device(), &self.spec.y)?;
        check_disjoint("y", y, "x", &args.x)?;
        if let Weights::Raw(w) | Weights::Cached(w, _) = &args.w {
            check_disjoint("y", y, "w", w)?;
        }
        args.bias.iter().try_for_each(|bias| check_disjoint("y", y, "bias", bias))
    }

    fn check_inputs(&self, args: &Conv2dArgs<'_>) -> Result<()> {
        let Conv2dArgs { x, w, bias } = args;
        self.check_view("x", x.desc(), x.device(), &self.spec.x)?;
        match w {
            Weights::Raw(w) | Weights::Cached(w, _) => {
                self.check_view("w", w.desc(), w.device(), &self.spec.w)?;
            }
            Weights::Packed(packed) if !self.accepts(packed) => {
                return Err(Error::parameter(
                    "w",
                    format!("{:?}", packed.packing),
                    format!("a filter packed for a plan with {:?}", self.packing()),
                ));
            }
            Weights::Packed(_) => {}
        }
        if let Some(bias) = bias {
            check_device("bias", bias.device(), self.device())?;
        }
        check_optional_view("bias", bias.as_ref().map(TensorRef::desc), self.spec.bias.as_ref())
    }

    /// How gradients are computed: decided when the first one is asked for.
    ///
    /// # Errors
    /// On CUDA as [`Conv2dPlan::new`].
    pub(super) fn backward(&self) -> Result<&Backward> {
        if let Some(backward) = self.backward.get() {
            return Ok(backward);
        }
        let (spec, problem) = (&self.spec, &self.problem);
        let backward = match self.backend {
            Backend::Cpu { isa, threads, .. } => Backward::on_cpu(spec, problem, isa, threads),
            Backend::Cuda { gpu, .. } => {
                // Also while a stream is captured.
                let make = || cuda::Gradients::new(gpu, spec, problem, self.algorithm);
                Backward::Cuda(gpu, Box::new(gpu.despite_captures(make)?))
            }
        };
        Ok(self.backward.get_or_init(|| backward))
    }

    /// Checks a view against what the spec says of it.
    pub(super) fn check_view(
        &self,
        arg: &'static str,
        given: &TensorDesc,
        device: Device,
        expected: &TensorDesc,
    ) -> Result<()> {
        check_device(arg, device, self.device())?;
        check_view(arg, given, expected)
    }
}

/// Threads beyond which a plan takes no more, however many it is given: each has scratch memory of its own.
fn most_threads() -> usize {
    4 * std::thread::available_parallelism().map_or(1, NonZeroUsize::get).max(16)
}
