//! The engine that computes a convolution on the CPU.

use super::packed::PackedForm;
use super::{Conv2d, Conv2dArgs, Conv2dPlan, FilterCache, PackedWeights, Weights};
use crate::conv2d::cpu::{self, Backward, Prepared, Residual, Run, Task, floats_mut};
use crate::conv2d::winograd_reference::Stages;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Tile};
use crate::cpu::Isa;
use crate::plan::{Engine, Setup};
use crate::try_once_lock::TryOnceLock;
use crate::{Activation, Result, TensorMut, TensorRef, Workspace};
use std::num::NonZeroUsize;
use std::sync::Arc;

/// The engine on the CPU: a plan's prepared convolution and its gradients.
#[derive(Debug)]
pub struct Cpu {
    pub(super) prepared: Box<dyn Prepared>,
    tolerance: f64,
    pub(super) isa: Isa,
    pub(super) threads: usize,
    backward: TryOnceLock<Backward>,
}

/// The number of threads of a convolution: as many as the plan may use, or the configuration says. It is limited because
/// each thread has scratch memory of its own.
pub(in crate::conv2d) fn threads(may_use: usize, configuration: &Conv2dConfiguration) -> usize {
    let most = 4 * std::thread::available_parallelism().map_or(1, NonZeroUsize::get).max(16);
    let threads = may_use.min(most);
    configuration.threads.map_or(threads, |fewer| fewer.min(threads))
}

/// The allowed error of sums of this error, rounded to f16/bf16 before the activation if that is applied in a second
/// pass over y.
pub(in crate::conv2d) fn stored(sums: f64, spec: &Conv2dSpec) -> f64 {
    let dtype = spec.y.dtype;
    let is_stored = cpu::follows(spec) && dtype.is_half();
    sums + if is_stored { dtype.unit_roundoff() } else { 0.0 }
}

/// The description of the convolution that is given to methods.
fn task<'a>(setup: &Setup<'a, Conv2d, Isa>, threads: usize) -> Result<Task<'a>> {
    let task = Task::new(setup.spec, setup.problem, setup.place, threads)?;
    Ok(task.with_batch_invariant(setup.options.batch_invariant))
}

impl Engine<Conv2d> for Cpu {
    type Place = Isa;

    fn algorithms(setup: &Setup<'_, Conv2d, Isa>) -> Result<Vec<Conv2dAlgorithm>> {
        cpu::algorithms(setup.spec, setup.problem, setup.place)
    }

    fn choose(setup: &Setup<'_, Conv2d, Isa>) -> Result<Conv2dAlgorithm> {
        Ok(cpu::choose(&task(setup, setup.threads())?, setup.options.counted_filter()))
    }

    fn new(setup: &Setup<'_, Conv2d, Isa>, configuration: &Conv2dConfiguration) -> Result<Self> {
        let threads = threads(setup.threads(), configuration);
        let task = task(setup, threads)?;
        let Some(prepared) = cpu::prepare(&task, configuration)? else {
            return Err(setup.unsupported(configuration.algorithm, &cpu::supported(&task)?));
        };
        let tolerance = stored(prepared.tolerance(), setup.spec);
        Ok(Cpu { prepared, tolerance, isa: setup.place, threads, backward: TryOnceLock::default() })
    }

    fn configuration(&self) -> Conv2dConfiguration {
        let threads = Some(self.threads);
        Conv2dConfiguration { threads, ..self.prepared.configuration() }
    }

    fn workspace_bytes(&self) -> usize {
        self.prepared.raw_bytes().max(self.scratch_bytes())
    }

    fn explain(&self, plan: &Conv2dPlan) -> String {
        super::explained(plan, self.isa.name(), &self.prepared.explain())
    }

    fn candidates(setup: &Setup<'_, Conv2d, Isa>) -> Result<Vec<Conv2dAlgorithm>> {
        let mut all = Self::algorithms(setup)?;
        all.retain(|&algorithm| cpu::allows(setup.spec.accuracy, algorithm));
        Ok(all)
    }

    fn variants(
        setup: &Setup<'_, Conv2d, Isa>,
        algorithm: Conv2dAlgorithm,
    ) -> Vec<Conv2dConfiguration> {
        let (base, threads) = (Conv2dConfiguration::new(algorithm), setup.threads());
        let mut all = vec![base];
        all.extend(cpu::candidates(algorithm, threads));
        // Handing out the work may cost more than a second thread gains.
        if threads > 1 && setup.problem.flops() < 5e7 {
            all.push(Conv2dConfiguration { threads: Some(1), ..base });
        }
        all
    }

    fn cost(setup: &Setup<'_, Conv2d, Isa>, configuration: &Conv2dConfiguration) -> Result<f64> {
        cpu::cost(&task(setup, setup.threads())?, configuration.algorithm, setup.options.filter)
    }
}

impl Cpu {
    pub(super) fn packed_bytes(&self) -> usize {
        self.prepared.packed_bytes()
    }

    pub(super) fn kept_bytes(&self, _: &TensorRef<'_>) -> usize {
        if self.prepared.reads_filter() { 0 } else { self.packed_bytes() }
    }

    /// Bytes of workspace for a run, not counting the packed filter.
    pub(super) fn scratch_bytes(&self) -> usize {
        self.prepared.workspace_bytes()
    }

    /// The same as [`Cpu::scratch_bytes`]: on the CPU it does not depend on the address of x.
    pub(super) fn scratch_bytes_for(&self, _: &TensorRef<'_>) -> usize {
        self.scratch_bytes()
    }

    pub(super) fn form(&self) -> PackedForm {
        let method = self.prepared.configuration().algorithm;
        PackedForm::Cpu { method, width: self.prepared.packed_width() }
    }

    /// Computes y. The caller has checked the views, and that y shares no memory with an input.
    pub(super) fn run(
        &self,
        plan: &Conv2dPlan,
        args: &Conv2dArgs<'_>,
        y: &mut TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let memory = workspace.take(plan.workspace_bytes_for(&args.x, &args.w))?;
        if y.layout().is_empty() {
            return Ok(());
        }
        let (x, bias) = (&args.x, args.bias.as_ref());
        let follows = cpu::follows(&plan.spec);
        let activation = if follows { Activation::Identity } else { plan.spec.activation };
        let residual = Residual::new(args.residual.as_ref(), y);
        let kept;
        let weights = match args.w {
            Weights::Cached(w, _) if self.prepared.reads_filter() => Weights::Raw(w),
            Weights::Cached(w, cache) => {
                kept = self.kept(plan, &w, cache)?;
                Weights::Packed(&kept)
            }
            weights => weights,
        };
        match weights {
            Weights::Raw(w) => {
                let run =
                    Run { x, initial: None, bias, residual, activation, y, workspace: memory };
                self.prepared.run_raw(&w, run);
            }
            Weights::Packed(packed) => {
                let elements = packed.elements().ok_or_else(|| packed.elsewhere(plan.device()))?;
                let run =
                    Run { x, initial: None, bias, residual, activation, y, workspace: memory };
                self.prepared.run(elements, run);
            }
            Weights::Cached(..) => unreachable!("packed above"),
        }
        if follows {
            cpu::activate(y, plan.spec.activation, self.isa, self.threads);
        }
        Ok(())
    }

    /// The packed filter of a cache.
    pub(super) fn kept(
        &self,
        plan: &Conv2dPlan,
        w: &TensorRef<'_>,
        cache: &FilterCache,
    ) -> Result<Arc<PackedWeights>> {
        cache.get(plan.packing(), self.threads, w, || plan.pack_on_cpu(self, w))
    }

    /// The side m of the output tile; `None` if the algorithm is not one of Winograd's.
    pub(super) fn tile(&self) -> Option<usize> {
        self.prepared.tile().map(Tile::m)
    }

    pub(super) fn tolerance(&self) -> f64 {
        self.tolerance
    }

    pub(super) fn winograd_stages(
        &self,
        w: &TensorRef<'_>,
        x: &TensorRef<'_>,
    ) -> Result<Option<Stages<Vec<f32>>>> {
        self.prepared.winograd_stages(w, x)
    }

    /// The tolerances of Winograd's intermediate tensors: the transformed filter U, the transformed input V and their
    /// products M. `transforms` and `sums` are the errors of two transforms in a row and of the sums. U is computed in
    /// f64, so its tolerance is that of f64; the comparison allows for its rounding to f32.
    pub(super) fn stage_tolerances(&self, transforms: f64, sums: f64) -> [f64; 3] {
        [1e-12, transforms, sums + transforms]
    }

    fn backward(&self, plan: &Conv2dPlan) -> Result<&Backward> {
        self.backward.get(|| {
            let task = Task::new(&plan.spec, &plan.problem, self.isa, self.threads)?;
            Backward::new(task.with_batch_invariant(plan.options.batch_invariant))
        })
    }

    /// Bytes of workspace that are enough for each of the gradients.
    pub(in crate::conv2d) fn gradient_bytes(&self, plan: &Conv2dPlan) -> Result<usize> {
        let backward = self.backward(plan)?;
        Ok(backward.data.bytes().max(backward.weight_bytes()))
    }

    /// Computes the gradient of x. The caller has made the same checks as for [`Cpu::run`].
    pub(in crate::conv2d) fn data(
        &self,
        plan: &Conv2dPlan,
        [w, dy]: [&TensorRef<'_>; 2],
        dx: &mut TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let Backward { data, .. } = self.backward(plan)?;
        let memory = workspace.take(data.bytes())?;
        if !dx.layout().is_empty() {
            data.run(w, dy, dx, memory);
        }
        Ok(())
    }

    /// Computes the gradient of the filter. The caller has made the same checks as for [`Cpu::run`].
    pub(in crate::conv2d) fn weight(
        &self,
        plan: &Conv2dPlan,
        [x, dy]: [&TensorRef<'_>; 2],
        dw: &mut TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let backward = self.backward(plan)?;
        let scratch = workspace.take(backward.weight_bytes())?;
        backward.weight.run(x, dy, dw, floats_mut(scratch));
        Ok(())
    }

    /// Computes the gradient of the bias. The caller has made the same checks as for [`Cpu::run`].
    pub(in crate::conv2d) fn bias(
        &self,
        plan: &Conv2dPlan,
        dy: &TensorRef<'_>,
        db: &mut TensorMut<'_>,
        _: &mut Workspace,
    ) -> Result<()> {
        self.backward(plan)?.bias.run(dy, db);
        Ok(())
    }

    /// The side m of the output tile; `None` if the data gradient is not computed by one of Winograd's algorithms.
    pub(in crate::conv2d) fn data_tile(&self, plan: &Conv2dPlan) -> Result<Option<usize>> {
        Ok(self.backward(plan)?.data.tile().map(Tile::m))
    }

    /// The same for the weight gradient.
    pub(in crate::conv2d) fn weight_tile(&self, plan: &Conv2dPlan) -> Result<Option<usize>> {
        Ok(self.backward(plan)?.weight.tile().map(Tile::m))
    }

    /// The tolerances of the gradients of x, the filter and the bias.
    pub(in crate::conv2d) fn gradient_tolerances(&self, plan: &Conv2dPlan) -> Result<[f64; 3]> {
        let Backward { data, weight, bias } = self.backward(plan)?;
        Ok([data.tolerance(), weight.tolerance(), bias.tolerance()])
    }
}
