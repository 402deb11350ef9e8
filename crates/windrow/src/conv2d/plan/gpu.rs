//! The engine that computes a convolution on GPUs.

use super::packed::{PackedData, PackedForm, Packing};
use super::{Conv2d, Conv2dArgs, Conv2dPlan, PackedWeights, Weights};
use crate::conv2d::gpu::{self as methods, Backward, Operands, Prepared, Task, WeightOperands};
use crate::conv2d::mirrored::mirrored_view;
use crate::conv2d::winograd_reference::Stages;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration};
use crate::gpu as device;
use crate::plan::{Engine, Setup};
use crate::try_once_lock::TryOnceLock;
use crate::{Device, PlanOptions, Result, TensorMut, TensorRef, Workspace};

/// The engine on GPUs: a plan's prepared convolution and its gradients.
#[derive(Debug)]
pub struct Gpu {
    pub(super) prepared: Box<dyn Prepared>,
    pub(super) gpu: &'static device::Gpu,
    algorithm: Conv2dAlgorithm,
    backward: TryOnceLock<Box<Backward>>,
}

/// The GPU of a plan, and the description of the convolution that is given to methods.
fn task<'a>(setup: &Setup<'a, Conv2d, Device>) -> Result<(&'static device::Gpu, Task<'a>)> {
    let gpu = device::Gpu::get(setup.place)?;
    let options = setup.options.with_filter(setup.options.counted_filter());
    Ok((gpu, Task::new(gpu, setup.spec, setup.problem, &options)))
}

/// Calls `run` with the filter in the form that it takes, and with the memory that is left for scratch: all of it if the
/// packed filter has memory of its own.
///
/// # Errors
/// Those of packing and of `run`, and [`Error::WrongDevice`](crate::Error::WrongDevice) for a filter that is packed on
/// another device.
///
/// # Safety
/// A filter that is given as a view must be on the stream's GPU, and `memory` large enough for the packed filter if it is
/// given as [`Weights::Raw`].
pub(in crate::conv2d) unsafe fn with_filter(
    prepared: &dyn Prepared,
    gpu: &'static device::Gpu,
    stream: &device::Stream,
    packing: Packing,
    w: &Weights<'_>,
    memory: *mut u8,
    run: impl FnOnce(*const u8, *mut u8) -> Result<()>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        match *w {
            Weights::Raw(w) => {
                let packed = prepared.packed(stream, w.as_ptr(), memory)?;
                run(packed, memory.add(prepared.packed_bytes()))
            }
            Weights::Cached(w, _) if prepared.reads_in_place(w.as_ptr()) => run(w.as_ptr(), memory),
            Weights::Cached(w, cache) => {
                let pack = cache.packs().lease(prepared, packing, stream, w.as_ptr())?;
                run(pack.as_ptr(), memory)
            }
            Weights::Packed(PackedWeights { data: PackedData::Device(data), .. })
                if std::ptr::eq(data.gpu(), gpu) =>
            {
                let outcome = run(data.as_mut_ptr().cast_const(), memory);
                data.used_on(stream)?;
                outcome
            }
            Weights::Packed(packed) => Err(packed.elsewhere(gpu.device())),
        }
    }
}

impl Engine<Conv2d> for Gpu {
    type Place = Device;

    fn algorithms(setup: &Setup<'_, Conv2d, Device>) -> Result<Vec<Conv2dAlgorithm>> {
        let (gpu, task) = task(setup)?;
        Ok(methods::supported(gpu, &task))
    }

    fn choose(setup: &Setup<'_, Conv2d, Device>) -> Result<Conv2dAlgorithm> {
        let (gpu, task) = task(setup)?;
        methods::best(gpu, &task)
    }

    fn new(setup: &Setup<'_, Conv2d, Device>, configuration: &Conv2dConfiguration) -> Result<Self> {
        let (gpu, task) = task(setup)?;
        let prepared = methods::prepare(gpu, &task.with(configuration))?;
        let algorithm = configuration.algorithm;
        Ok(Gpu { prepared, gpu, algorithm, backward: TryOnceLock::default() })
    }

    fn configuration(&self) -> Conv2dConfiguration {
        self.prepared.configuration(self.algorithm)
    }

    fn workspace_bytes(&self) -> usize {
        self.raw_bytes() + self.scratch_bytes()
    }

    fn explain(&self, plan: &Conv2dPlan) -> String {
        let borrowed = methods::borrowed_rates(self.gpu);
        let borrowed = borrowed.map(|chip| format!(", chosen by the rates of an {chip}"));
        let explained = self.prepared.explain() + borrowed.as_deref().unwrap_or_default();
        super::explained(plan, &plan.device().to_string(), &explained)
    }

    fn candidates(setup: &Setup<'_, Conv2d, Device>) -> Result<Vec<Conv2dAlgorithm>> {
        let mut all = Self::algorithms(setup)?;
        let (_, task) = task(setup)?;
        all.retain(|&algorithm| methods::allows(&task.by(algorithm)));
        Ok(all)
    }

    fn variants(
        setup: &Setup<'_, Conv2d, Device>,
        algorithm: Conv2dAlgorithm,
    ) -> Vec<Conv2dConfiguration> {
        let mut all = vec![Conv2dConfiguration::new(algorithm)];
        // Without the GPU there is nothing to search for.
        all.extend(
            task(setup).map_or_else(|_| Vec::new(), |(_, t)| methods::candidates(&t.by(algorithm))),
        );
        all
    }

    fn complete(
        setup: &Setup<'_, Conv2d, Device>,
        configuration: &Conv2dConfiguration,
    ) -> Result<Conv2dConfiguration> {
        Ok(methods::complete(&task(setup)?.1.with(configuration)))
    }

    fn cost(setup: &Setup<'_, Conv2d, Device>, configuration: &Conv2dConfiguration) -> Result<f64> {
        Ok(methods::micros(&task(setup)?.1.with(configuration)))
    }
}

impl Gpu {
    /// Bytes of workspace for the packed form of a filter that is given as [`Weights::Raw`].
    pub(super) fn raw_bytes(&self) -> usize {
        self.prepared.packed_bytes()
    }

    pub(super) fn packed_bytes(&self) -> usize {
        self.prepared.packed_bytes()
    }

    pub(super) fn kept_bytes(&self, w: &TensorRef<'_>) -> usize {
        if self.prepared.reads_in_place(w.as_ptr()) { 0 } else { self.prepared.packed_bytes() }
    }

    /// Bytes of workspace for a run, not counting the packed filter.
    pub(super) fn scratch_bytes(&self) -> usize {
        self.prepared.scratch_bytes()
    }

    /// Bytes of workspace for a run with an input at x's address, not counting the packed filter.
    pub(super) fn scratch_bytes_for(&self, x: &TensorRef<'_>) -> usize {
        self.prepared.scratch_bytes_for(x.as_ptr(), None)
    }

    pub(super) fn form(&self) -> PackedForm {
        PackedForm::Cuda(self.prepared.packed_form())
    }

    /// Computes y. The caller has checked the views, and that y shares no memory with an input.
    pub(super) fn run(
        &self,
        plan: &Conv2dPlan,
        args: &Conv2dArgs<'_>,
        y: &mut TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let Gpu { prepared, gpu, .. } = self;
        let (stream, memory) =
            workspace.take_on(gpu, plan.workspace_bytes_for(&args.x, &args.w))?;
        if y.layout().is_empty() {
            return Ok(());
        }
        let [bias, residual] =
            [&args.bias, &args.residual].map(|view| view.as_ref().map(TensorRef::as_ptr));
        let (x, initial, y) = (args.x.as_ptr(), None, y.as_mut_ptr());
        // SAFETY: the views were checked against the spec and are on the device; the workspace holds the packed
        // filter and the scratch memory.
        unsafe {
            with_filter(&**prepared, gpu, stream, plan.packing(), &args.w, memory, |packed, at| {
                let operands = Operands { x, bias, residual, initial, y, scratch: at };
                prepared.run(stream, packed, operands)
            })
        }
    }

    /// The side m of the output tile; `None` if the algorithm is not one of Winograd's.
    pub(super) fn tile(&self) -> Option<usize> {
        self.prepared.tile()
    }

    pub(super) fn tolerance(&self) -> f64 {
        self.prepared.tolerance()
    }

    pub(super) fn winograd_stages(
        &self,
        w: &TensorRef<'_>,
        x: &TensorRef<'_>,
    ) -> Result<Option<Stages<Vec<f32>>>> {
        self.prepared.winograd_stages(self.gpu, w, x)
    }

    /// The tolerances of U, V and M, as in [`Cpu::stage_tolerances`](super::Cpu::stage_tolerances).
    pub(super) fn stage_tolerances(&self, transforms: f64, sums: f64) -> [f64; 3] {
        let (stored, multiplied) = self.prepared.operand_roundings();
        let m = 2.0 * (sums + transforms + multiplied);
        [transforms + stored, transforms + stored, m]
    }

    pub(super) fn underflows(&self) -> [f64; 2] {
        self.prepared.underflows()
    }

    /// The gradients, with their kernels loaded. They are prepared when the first gradient is requested, even if a
    /// stream is being captured at that time.
    fn backward(&self, plan: &Conv2dPlan) -> Result<&Backward> {
        let spec = plan.spec.clone().with_residual(false);
        let options = PlanOptions::default().with_batch_invariant(plan.options.batch_invariant);
        let task = Task::new(self.gpu, &spec, &plan.problem, &options);
        let make = || Backward::new(self.gpu, &task.by(self.algorithm));
        let backward = self.backward.get(|| self.gpu.despite_captures(make).map(Box::new))?;
        Ok(backward)
    }

    /// Bytes of workspace that are enough for each of the gradients.
    pub(in crate::conv2d) fn gradient_bytes(&self, plan: &Conv2dPlan) -> Result<usize> {
        Ok(self.backward(plan)?.scratch_bytes())
    }

    /// Computes the gradient of x. The caller has made the same checks as for [`Gpu::run`].
    pub(in crate::conv2d) fn data(
        &self,
        plan: &Conv2dPlan,
        [w, dy]: [&TensorRef<'_>; 2],
        dx: &mut TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let gradient = &self.backward(plan)?.data;
        let (stream, scratch) = workspace.take_on(self.gpu, gradient.scratch_bytes())?;
        if dx.layout().is_empty() {
            return Ok(());
        }
        let filter = match mirrored_view(w) {
            Some(w) if gradient.is_mirrored() => w.as_ptr(),
            _ => w.as_ptr(),
        };
        let (x, y) = (dy.as_ptr(), dx.as_mut_ptr());
        let operands = Operands { x, bias: None, residual: None, initial: None, y, scratch };
        // SAFETY: the views were checked against the spec and are on the device.
        unsafe { gradient.run(stream, filter, operands) }
    }

    /// Computes the gradient of the filter. The caller has made the same checks as for [`Gpu::run`].
    pub(in crate::conv2d) fn weight(
        &self,
        plan: &Conv2dPlan,
        [x, dy]: [&TensorRef<'_>; 2],
        dw: &mut TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let gradients = self.backward(plan)?;
        let (stream, scratch) = workspace.take_on(self.gpu, gradients.weight_bytes())?;
        let (x, dy, desc) = (x.as_ptr(), dy.as_ptr(), *dw.desc());
        let operands = WeightOperands { x, dy, dw: dw.as_mut_ptr(), desc: &desc, scratch };
        // SAFETY: the views were checked against the spec and are on the device.
        unsafe { gradients.weight(stream, &operands) }
    }

    /// Computes the gradient of the bias. The caller has made the same checks as for [`Gpu::run`].
    pub(in crate::conv2d) fn bias(
        &self,
        plan: &Conv2dPlan,
        dy: &TensorRef<'_>,
        db: &mut TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let gradient = &self.backward(plan)?.bias;
        let (stream, scratch) = workspace.take_on(self.gpu, gradient.scratch_bytes())?;
        let out = (db.as_mut_ptr(), db.desc());
        // SAFETY: the views were checked against the spec and are on the device.
        unsafe { gradient.run(stream, dy.as_ptr(), out, scratch) }
    }

    /// The side of the output tile, as in [`Cpu::data_tile`](super::Cpu::data_tile).
    pub(in crate::conv2d) fn data_tile(&self, plan: &Conv2dPlan) -> Result<Option<usize>> {
        Ok(self.backward(plan)?.data.tile())
    }

    /// The same for the weight gradient.
    pub(in crate::conv2d) fn weight_tile(&self, plan: &Conv2dPlan) -> Result<Option<usize>> {
        Ok(self.backward(plan)?.weight_tile())
    }

    /// The tolerances of the gradients of x, the filter and the bias.
    pub(in crate::conv2d) fn gradient_tolerances(&self, plan: &Conv2dPlan) -> Result<[f64; 3]> {
        Ok(self.backward(plan)?.tolerances())
    }
}
