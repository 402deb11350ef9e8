//! A convolution bound to a device and an algorithm.

use super::backward::{Backward, compare};
use super::cpu::winograd::{FUSED_TILE, best_tile};
use super::cpu::{self, floats, floats_mut};
use super::cuda::{self, Operands};
use super::reference::Expected;
use super::spec::is_channels_last;
use super::winograd_reference::Stages;
use super::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem, Tile, reference, tuning};
use crate::buffer::Buffer;
use crate::cpu::{Isa, resolve_threads};
use crate::cuda::{DeviceBuffer, Gpu, download};
use crate::tensor::{check_device, check_disjoint, check_tensor};
use crate::tuning::{Report, Search};
use crate::verify::Comparison;
use crate::{
    Accuracy, Activation, DType, Device, Error, PlanOptions, Result, TensorDesc, TensorMut,
    TensorRef, Verify, Workspace,
};
use std::sync::OnceLock;

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

/// The filter of a run.
#[derive(Clone, Copy, Debug)]
pub enum Weights<'a> {
    /// [k, c/groups, r, s] with the spec's type and strides; packed into the workspace on every run.
    Raw(TensorRef<'a>),
    /// Packed once by [`Conv2dPlan::pack_weights`].
    Packed(&'a PackedWeights),
}

/// What the form of a packed filter depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Packing {
    algorithm: Conv2dAlgorithm,
    /// k, c/groups, r, s
    filter: [usize; 4],
    groups: usize,
    form: Form,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Form {
    Cpu {
        /// Channels that lie next to each other.
        width: usize,
    },
    Cuda(cuda::PackedForm),
}

/// A filter in the form that an algorithm reads: made once by [`Conv2dPlan::pack_weights`], used by
/// any number of runs, also of other plans whose algorithm, filter shape and packing are the same
/// (batch, image size, padding and element type may differ).
///
/// On CUDA, dropping it waits until the device is idle, since runs may still read it.
#[derive(Debug)]
pub struct PackedWeights {
    packing: Packing,
    data: PackedData,
    /// The filter itself, kept by plans that verify.
    source: Option<Vec<f64>>,
}

#[derive(Debug)]
enum PackedData {
    Host(Buffer),
    Device(&'static Gpu, DeviceBuffer),
}

impl Drop for PackedData {
    fn drop(&mut self) {
        if let PackedData::Device(gpu, _) = self {
            // An error here was or will be reported by a call that can return it.
            let _ = gpu.synchronize();
        }
    }
}

impl PackedWeights {
    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        match &self.data {
            PackedData::Host(data) => data.len(),
            PackedData::Device(_, data) => data.len(),
        }
    }

    /// The algorithm it is packed for.
    pub fn algorithm(&self) -> Conv2dAlgorithm {
        self.packing.algorithm
    }

    /// Changes the sign of the first element, to see whether anybody notices.
    #[cfg(test)]
    pub(super) fn spoil(&mut self) {
        if let PackedData::Host(data) = &mut self.data {
            data.as_mut_slice()[3] ^= 0x80;
        }
    }
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
    /// [`Accuracy`] allows.
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
            Device::Cpu => choose(spec, &problem),
            Device::Cuda(index) => cuda::Engine::best(Gpu::get(index)?, spec, &problem)?,
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
            let engine = Box::new(cuda::Engine::new(gpu, spec, &problem, configuration)?);
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
        let threads = resolve_threads(options.threads);
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

    /// Packs a filter [k, c/groups, r, s] of the spec's type and strides for any number of runs.
    /// The memory is its own, not the workspace's. On CUDA this waits for the workspace's stream.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::Strides`] if `w` is not as in the spec,
    /// [`Error::WrongDevice`], [`Error::OutOfMemory`].
    pub fn pack_weights(
        &self,
        w: &TensorRef<'_>,
        workspace: &mut Workspace,
    ) -> Result<PackedWeights> {
        check_device("workspace", workspace.device(), self.device())?;
        self.check_view("w", w.desc(), w.device(), &self.spec.w)?;
        let data = match &self.backend {
            Backend::Cpu { engine, .. } => {
                let mut data = Buffer::new(self.packed_bytes())?;
                engine.pack(w, floats_mut(data.as_mut_slice()));
                PackedData::Host(data)
            }
            Backend::Cuda { engine, gpu } => {
                let mut data = workspace.allocate_on(gpu, self.packed_bytes())?;
                let (stream, _) = workspace.take_on(gpu, 0)?;
                // SAFETY: the view was checked against the spec, the memory is as large as asked
                // for.
                unsafe { engine.pack(stream, w.as_ptr(), data.as_mut_ptr())? };
                // Runs on other streams may use it from here on.
                stream.synchronize()?;
                PackedData::Device(gpu, data)
            }
        };
        let source = (self.verify == Verify::On).then(|| values(w)).transpose()?;
        Ok(PackedWeights { packing: self.packing(), data, source })
    }

    /// True if `packed` was packed for this plan or one with the same packing.
    pub fn accepts(&self, packed: &PackedWeights) -> bool {
        packed.packing == self.packing()
    }

    /// Computes y.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::Strides`] if a view is not as in the spec;
    /// [`Error::WrongDevice`]; [`Error::Aliasing`] if y shares memory with an input;
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
        let bytes = match args.w {
            Weights::Raw(_) => self.workspace_bytes(),
            Weights::Packed(_) => self.packed_workspace_bytes(),
        };
        match &self.backend {
            Backend::Cpu { engine, .. } => {
                let memory = workspace.take(bytes)?;
                if y.layout().is_empty() {
                    return Ok(());
                }
                let (x, bias, activation) = (&args.x, args.bias.as_ref(), self.spec.activation);
                match args.w {
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
                    let (packed, scratch) = match args.w {
                        Weights::Raw(w) => {
                            engine.pack(stream, w.as_ptr(), memory)?;
                            (memory.cast_const(), memory.add(self.raw_bytes()))
                        }
                        Weights::Packed(PackedWeights {
                            data: PackedData::Device(packed_on, data),
                            ..
                        }) if std::ptr::eq(*packed_on, *gpu) => (data.as_ptr(), memory),
                        Weights::Packed(packed) => return Err(self.packed_elsewhere(packed)),
                    };
                    engine.run(stream, packed, operands, scratch)?;
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

    /// Compares a result of [`Conv2dPlan::run`] with the f64 oracle.
    ///
    /// # Errors
    /// As [`Conv2dPlan::run`] for inputs and `y` that do not fit the spec, [`Error::WrongDevice`],
    /// [`Error::Unsupported`] for a filter packed by a plan without [`Verify::On`].
    pub fn compare(&self, args: &Conv2dArgs<'_>, y: &TensorRef<'_>) -> Result<Comparison> {
        self.check_inputs(args)?;
        self.check_view("y", y.desc(), y.device(), &self.spec.y)?;
        let w = filter(&args.w)?.ok_or_else(|| {
            let reason = "it was packed by a plan that does not verify; give the filter itself";
            Error::unsupported("comparing the result of a packed filter", reason)
        })?;
        self.comparison(args, &w, y)
    }

    fn comparison(
        &self,
        args: &Conv2dArgs<'_>,
        w: &[f64],
        y: &TensorRef<'_>,
    ) -> Result<Comparison> {
        let want = self.expected(&args.x, w, args.bias.as_ref())?;
        compare(y, &want, self.tolerance())
    }

    /// What [`Conv2dPlan::run`] should give, with the scale that the plan's tolerance refers to.
    pub(crate) fn expected(
        &self,
        x: &TensorRef<'_>,
        w: &[f64],
        bias: Option<&TensorRef<'_>>,
    ) -> Result<Expected> {
        let bias = bias.map(values).transpose()?;
        let (x, activation) = (values(x)?, self.spec.activation);
        let mut want = reference::forward(&self.problem, &x, w, bias.as_deref(), activation);
        let tile = match &self.backend {
            Backend::Cpu { engine, .. } => engine.tile().map(Tile::m),
            Backend::Cuda { engine, .. } => engine.tile(),
        };
        if let Some(tile) = tile {
            let tiles = reference::winograd_scale(&self.problem, tile, &x, w);
            want.scale.iter_mut().zip(tiles).for_each(|(scale, tile)| *scale += tile);
        }
        Ok(want)
    }

    fn check(&self, args: &Conv2dArgs<'_>, y: &TensorMut<'_>) -> Result<()> {
        self.check_inputs(args)?;
        self.check_view("y", y.desc(), y.device(), &self.spec.y)?;
        check_disjoint("y", y, "x", &args.x)?;
        if let Weights::Raw(w) = &args.w {
            check_disjoint("y", y, "w", w)?;
        }
        args.bias.iter().try_for_each(|bias| check_disjoint("y", y, "bias", bias))
    }

    fn check_inputs(&self, args: &Conv2dArgs<'_>) -> Result<()> {
        let Conv2dArgs { x, w, bias } = args;
        self.check_view("x", x.desc(), x.device(), &self.spec.x)?;
        match w {
            Weights::Raw(w) => self.check_view("w", w.desc(), w.device(), &self.spec.w)?,
            Weights::Packed(packed) if !self.accepts(packed) => {
                return Err(Error::parameter(
                    "w",
                    format!("{:?}", packed.packing),
                    format!("a filter packed for a plan with {:?}", self.packing()),
                ));
            }
            Weights::Packed(_) => {}
        }
        match (bias, &self.spec.bias) {
            (None, None) => Ok(()),
            (Some(bias), Some(desc)) => self.check_view("bias", bias.desc(), bias.device(), desc),
            (Some(_), None) => Err(Error::parameter("bias", "given", "none, as in the spec")),
            (None, Some(_)) => Err(Error::parameter("bias", "missing", "a bias, as in the spec")),
        }
    }

    /// How far an element may be off, relative to its scale.
    pub(crate) fn tolerance(&self) -> f64 {
        let sums = match &self.backend {
            Backend::Cpu { engine, .. } => engine.tolerance(),
            Backend::Cuda { engine, .. } => engine.tolerance(),
        };
        match self.spec.activation {
            Activation::Identity | Activation::Relu => sums,
            // Slopes reach 1.13; the functions themselves are within 4 units in the last place.
            _ => 1.13 * sums + 8.0 * DType::F32.unit_roundoff(),
        }
    }

    /// The im2col matrix [group, term, pixel] that the algorithm multiplies, and the oracle's; `None`
    /// for one that has none.
    pub(crate) fn im2col(&self, x: &TensorRef<'_>) -> Result<Option<(Vec<f32>, Vec<f64>)>> {
        let Backend::Cpu { engine, .. } = &self.backend else { return Ok(None) };
        let Some(matrix) = engine.im2col(x) else { return Ok(None) };
        Ok(Some((matrix, reference::im2col(&self.problem, &x.to_f64_vec()?))))
    }

    /// What the stages of Winograd's algorithm form; `None` for other algorithms.
    pub(crate) fn winograd_stages(
        &self,
        w: &TensorRef<'_>,
        x: &TensorRef<'_>,
    ) -> Result<Option<Stages<Vec<f32>>>> {
        match &self.backend {
            Backend::Cpu { engine, .. } => engine.winograd_stages(w, x),
            Backend::Cuda { engine, gpu } => engine.winograd_stages(gpu, w, x),
        }
    }

    /// How far elements of U, V and M may be off, relative to their scale.
    pub(crate) fn stage_tolerances(&self, tile: Tile) -> [f64; 3] {
        // Two transforms in a row, each of up to alpha products with a rounded coefficient, and sums.
        let transforms = (4 * tile.alpha()) as f64 * DType::F32.unit_roundoff();
        let sums = self.problem.c as f64 * DType::F32.unit_roundoff();
        match &self.backend {
            // U is formed in f64, so that only the last rounding is left.
            Backend::Cpu { .. } => [1e-12, transforms, sums + transforms],
            Backend::Cuda { engine, .. } => {
                let (stored, multiplied) = engine.operand_roundings();
                let m = 2.0 * (sums + transforms + multiplied);
                [transforms + stored, transforms + stored, m]
            }
        }
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
            Backend::Cuda { gpu, .. } => Backward::Cuda(
                gpu,
                Box::new(cuda::Gradients::new(gpu, spec, problem, self.algorithm)?),
            ),
        };
        Ok(self.backward.get_or_init(|| backward))
    }

    fn packing(&self) -> Packing {
        let p = &self.problem;
        Packing {
            algorithm: self.algorithm,
            filter: [p.k, p.c_group(), p.r, p.s],
            groups: p.groups,
            form: match &self.backend {
                Backend::Cpu { engine, .. } => Form::Cpu { width: engine.packed_width() },
                Backend::Cuda { engine, .. } => Form::Cuda(engine.packed_form()),
            },
        }
    }

    /// Bytes of the packed filter that a run with [`Weights::Raw`] has in the workspace.
    fn raw_bytes(&self) -> usize {
        match &self.backend {
            Backend::Cpu { engine, .. } => {
                (engine.raw_len() * size_of::<f32>()).next_multiple_of(64)
            }
            Backend::Cuda { engine, .. } => engine.packed_bytes(),
        }
    }

    fn packed_bytes(&self) -> usize {
        match &self.backend {
            Backend::Cpu { engine, .. } => {
                (engine.packed_len() * size_of::<f32>()).next_multiple_of(64)
            }
            Backend::Cuda { engine, .. } => engine.packed_bytes(),
        }
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
        check_tensor(arg, given, expected.dtype, expected.shape())?;
        if given.layout != expected.layout {
            return Err(Error::Strides {
                arg,
                given: given.strides().to_vec(),
                expected: format!("{:?}, as in the spec", expected.strides()),
            });
        }
        Ok(())
    }

    fn packed_elsewhere(&self, packed: &PackedWeights) -> Error {
        let given = match &packed.data {
            PackedData::Host(_) => Device::Cpu,
            PackedData::Device(gpu, _) => gpu.device(),
        };
        Error::WrongDevice { arg: "w", given, expected: self.device() }
    }
}

/// All elements in row-major order, from whatever device.
pub(super) fn values(x: &TensorRef<'_>) -> Result<Vec<f64>> {
    match x.device() {
        Device::Cpu => x.to_f64_vec(),
        Device::Cuda(index) => download(x, index)?.as_ref().to_f64_vec(),
    }
}

/// The filter's elements, if they are known.
fn filter(w: &Weights<'_>) -> Result<Option<Vec<f64>>> {
    match w {
        Weights::Raw(w) => values(w).map(Some),
        Weights::Packed(packed) => Ok(packed.source.clone()),
    }
}

/// The algorithms that can compute a problem.
fn supported(p: &Problem) -> Vec<Conv2dAlgorithm> {
    let mut all = vec![Conv2dAlgorithm::Direct, Conv2dAlgorithm::Im2colGemm];
    if p.is_winograd() {
        all.extend(Tile::ALL.map(Conv2dAlgorithm::WinogradGemm));
        all.push(Conv2dAlgorithm::WinogradFused(FUSED_TILE));
    }
    all
}

/// Input channels up to which direct summation is faster than Winograd's algorithm: the sums themselves
/// take less time than the transform of the output.
const DIRECT_CHANNELS: usize = 4;
/// Input channels up to which Winograd's algorithm in one pass is faster than in stages.
const FEW_CHANNELS: usize = 8;

/// The algorithm that should be fastest within the accuracy asked for.
pub(super) fn choose(spec: &Conv2dSpec, p: &Problem) -> Conv2dAlgorithm {
    if p.prefers_direct() {
        return Conv2dAlgorithm::Direct;
    }
    let row_major = !is_channels_last(&spec.y.layout);
    let few = p.c <= DIRECT_CHANNELS && row_major;
    if p.is_winograd() && !few && spec.accuracy != Accuracy::Exact {
        if p.c <= FEW_CHANNELS && row_major {
            return Conv2dAlgorithm::WinogradFused(FUSED_TILE);
        }
        return Conv2dAlgorithm::WinogradGemm(best_tile(p));
    }
    // With few input channels the im2col matrix is many times the input.
    if p.c_group() <= 8 && p.r * p.s > 1 && row_major {
        return Conv2dAlgorithm::Direct;
    }
    Conv2dAlgorithm::Im2colGemm
}
