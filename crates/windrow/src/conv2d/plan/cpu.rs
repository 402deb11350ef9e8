//! What computes a convolution on the CPU.

use super::packed::{PackedData, PackedForm};
use super::{Conv2d, Conv2dArgs, Conv2dPlan, PackedWeights, Weights};
use crate::conv2d::backward::CpuBackward;
use crate::conv2d::cpu::{self, Residual, Run, floats, floats_mut};
use crate::conv2d::winograd_reference::Stages;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Tile};
use crate::cpu::Isa;
use crate::later::Later;
use crate::plan::{Engine, Setup};
use crate::{Accuracy, Activation, DType, Result, TensorMut, TensorRef, Workspace};
use std::num::NonZeroUsize;

/// On the CPU.
#[derive(Debug)]
pub struct Cpu {
    pub(super) engine: cpu::Forward,
    algorithm: Conv2dAlgorithm,
    /// Output channels.
    k: usize,
    /// Of halves, where the activation reads results that were stored.
    rounding: f64,
    isa: Isa,
    pub(super) threads: usize,
    backward: Later<CpuBackward>,
}

/// Threads beyond which a plan takes no more, however many it is given: each has scratch memory of its own.
fn most_threads() -> usize {
    4 * std::thread::available_parallelism().map_or(1, NonZeroUsize::get).max(16)
}

impl Engine<Conv2d> for Cpu {
    type Place = Isa;

    fn algorithms(setup: &Setup<'_, Conv2d, Isa>) -> Result<Vec<Conv2dAlgorithm>> {
        Ok(cpu::supported(setup.problem))
    }

    fn choose(setup: &Setup<'_, Conv2d, Isa>) -> Result<Conv2dAlgorithm> {
        Ok(cpu::choose(setup.spec, setup.problem, setup.place, setup.options.filter))
    }

    fn new(setup: &Setup<'_, Conv2d, Isa>, configuration: &Conv2dConfiguration) -> Result<Self> {
        let algorithm = configuration.algorithm;
        setup.require(algorithm, &cpu::supported(setup.problem))?;
        let isa = setup.place;
        let threads = setup.threads().min(most_threads());
        let threads = configuration.threads.map_or(threads, |fewer| fewer.min(threads));
        let engine = cpu::Forward::new(setup.spec, setup.problem, configuration, isa, threads)?;
        let (k, backward) = (setup.problem.k, Later::default());
        let dtype = setup.spec.y.dtype;
        let is_stored = cpu::Forward::leaves(setup.spec) && dtype.is_half();
        let rounding = if is_stored { dtype.unit_roundoff() } else { 0.0 };
        Ok(Cpu { engine, algorithm, k, rounding, isa, threads, backward })
    }

    fn configuration(&self) -> Conv2dConfiguration {
        let threads = Some(self.threads);
        Conv2dConfiguration { threads, ..self.engine.configuration(self.algorithm) }
    }

    fn workspace_bytes(&self) -> usize {
        self.engine.raw_bytes(self.k).max(self.scratch_bytes())
    }

    fn explain(&self, plan: &Conv2dPlan) -> String {
        super::explained(plan, self.isa.name(), &self.engine.explain())
    }

    fn candidates(setup: &Setup<'_, Conv2d, Isa>) -> Result<Vec<Conv2dAlgorithm>> {
        let mut all = cpu::supported(setup.problem);
        all.retain(|algorithm| !algorithm.is_winograd() || setup.spec.accuracy != Accuracy::Exact);
        Ok(all)
    }

    fn variants(
        setup: &Setup<'_, Conv2d, Isa>,
        algorithm: Conv2dAlgorithm,
    ) -> Vec<Conv2dConfiguration> {
        let (base, threads) = (Conv2dConfiguration::new(algorithm), setup.threads());
        let mut all = vec![base];
        if let Conv2dAlgorithm::WinogradGemm(_) = algorithm {
            for tiles in [12, 24, 36, 48, 72].map(Some) {
                for vectors in [2, 4, 8, 16].map(Some) {
                    all.push(Conv2dConfiguration { tiles, vectors, ..base });
                }
            }
            if threads > 1 {
                let parts = [1, threads].map(Some);
                all.extend(parts.map(|parts| Conv2dConfiguration { parts, ..base }));
            }
        }
        // Handing out the work may cost more than a second thread gains.
        if threads > 1 && setup.problem.flops() < 5e7 {
            all.push(Conv2dConfiguration { threads: Some(1), ..base });
        }
        all
    }

    fn cost(setup: &Setup<'_, Conv2d, Isa>, configuration: &Conv2dConfiguration) -> Result<f64> {
        let Setup { spec, problem, place, options, .. } = setup;
        Ok(cpu::cost(spec, problem, *place, configuration.algorithm, options.filter))
    }
}

impl Cpu {
    pub(super) fn packed_bytes(&self) -> usize {
        self.engine.packed_bytes()
    }

    pub(super) fn kept_bytes(&self, _: &TensorRef<'_>) -> usize {
        self.packed_bytes()
    }

    /// Bytes of workspace beside a packed filter.
    pub(super) fn scratch_bytes(&self) -> usize {
        self.engine.workspace_bytes(self.k)
    }

    pub(super) fn form(&self) -> PackedForm {
        PackedForm::Cpu { width: self.engine.packed_width() }
    }

    /// Views and aliasing have been checked.
    pub(super) fn run(
        &self,
        plan: &Conv2dPlan,
        args: &Conv2dArgs<'_>,
        y: &mut TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let memory = workspace.take(plan.workspace_bytes_for(&args.w))?;
        if y.layout().is_empty() {
            return Ok(());
        }
        let (x, bias) = (&args.x, args.bias.as_ref());
        let leaves = cpu::Forward::leaves(&plan.spec);
        let activation = if leaves { Activation::Identity } else { plan.spec.activation };
        let residual = Residual::new(args.residual.as_ref(), y);
        let kept;
        let weights = match args.w {
            Weights::Cached(w, cache) => {
                kept = cache.get(plan, self, &w)?;
                Weights::Packed(&kept)
            }
            weights => weights,
        };
        match weights {
            Weights::Raw(w) => {
                let run = Run { x, bias, residual, activation, y, workspace: memory };
                self.engine.run_raw(&w, run);
            }
            Weights::Packed(PackedWeights { data: PackedData::Host(data), .. }) => {
                let run = Run { x, bias, residual, activation, y, workspace: memory };
                self.engine.run(floats(data.as_slice()), run);
            }
            Weights::Packed(packed) => return Err(plan.packed_elsewhere(packed)),
            Weights::Cached(..) => unreachable!("packed above"),
        }
        if leaves {
            cpu::activate(y, plan.spec.activation, self.isa, self.threads);
        }
        Ok(())
    }

    /// Outputs of a tile of one of Winograd's algorithms.
    pub(super) fn tile(&self) -> Option<usize> {
        self.engine.tile().map(Tile::m)
    }

    pub(super) fn tolerance(&self) -> f64 {
        self.engine.tolerance() + self.rounding
    }

    pub(super) fn winograd_stages(
        &self,
        w: &TensorRef<'_>,
        x: &TensorRef<'_>,
    ) -> Result<Option<Stages<Vec<f32>>>> {
        self.engine.winograd_stages(w, x)
    }

    /// Of U, V and M, for roundings of two transforms and of sums. U is formed in f64, so that only the last
    /// rounding is left.
    pub(super) fn stage_tolerances(&self, transforms: f64, sums: f64) -> [f64; 3] {
        [1e-12, transforms, sums + transforms]
    }

    fn backward(&self, plan: &Conv2dPlan) -> Result<&CpuBackward> {
        self.backward.get(|| CpuBackward::new(&plan.spec, &plan.problem, self.isa, self.threads))
    }

    /// Bytes of workspace for any of the gradients.
    pub(in crate::conv2d) fn gradient_bytes(&self, plan: &Conv2dPlan) -> Result<usize> {
        let backward = self.backward(plan)?;
        Ok(backward.data_bytes(&plan.problem).max(backward.gradients.weight_bytes()))
    }

    /// As [`Cpu::run`], the gradient of x.
    pub(in crate::conv2d) fn data(
        &self,
        plan: &Conv2dPlan,
        [w, dy]: [&TensorRef<'_>; 2],
        dx: &mut TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let backward = self.backward(plan)?;
        let memory = workspace.take(backward.data_bytes(&plan.problem))?;
        if !dx.layout().is_empty() {
            backward.data(w, dy, dx, memory);
        }
        Ok(())
    }

    /// As [`Cpu::run`], the gradient of the filter.
    pub(in crate::conv2d) fn weight(
        &self,
        plan: &Conv2dPlan,
        [x, dy]: [&TensorRef<'_>; 2],
        dw: &mut TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let CpuBackward { gradients, .. } = self.backward(plan)?;
        let scratch = workspace.take(gradients.weight_bytes())?;
        gradients.weight(x, dy, dw, floats_mut(scratch));
        Ok(())
    }

    /// As [`Cpu::run`], the gradient of the bias.
    pub(in crate::conv2d) fn bias(
        &self,
        plan: &Conv2dPlan,
        dy: &TensorRef<'_>,
        db: &mut TensorMut<'_>,
        _: &mut Workspace,
    ) -> Result<()> {
        self.backward(plan)?.gradients.bias(dy, db);
        Ok(())
    }

    /// Outputs of a tile, where the data gradient is one of Winograd's.
    pub(in crate::conv2d) fn data_tile(&self, plan: &Conv2dPlan) -> Result<Option<usize>> {
        Ok(self.backward(plan)?.data.as_ref().and_then(cpu::Forward::tile).map(Tile::m))
    }

    /// As [`Cpu::data_tile`], of the weight gradient.
    pub(in crate::conv2d) fn weight_tile(&self, plan: &Conv2dPlan) -> Result<Option<usize>> {
        Ok(self.backward(plan)?.gradients.weight_tile().map(Tile::m))
    }

    /// Of the gradients of x, the filter and the bias.
    pub(in crate::conv2d) fn gradient_tolerances(&self, plan: &Conv2dPlan) -> Result<[f64; 3]> {
        let CpuBackward { data, gradients } = self.backward(plan)?;
        let data = data.as_ref().map_or_else(|| gradients.data_tolerance(), |e| e.tolerance());
        // A row is summed in f32, the rest in f64.
        let bias = (plan.problem.ow + 2) as f64 * DType::F32.unit_roundoff();
        Ok([data, gradients.weight_tolerance(), bias])
    }
}
