//! Configurations of a convolution, and the search among them.

use super::plan::{compare, values};
use super::spec::is_channels_last;
use super::{
    Conv2dAlgorithm, Conv2dArgs, Conv2dPlan, Conv2dSpec, PackedWeights, Weights, cpu, cuda,
};
use crate::cpu::resolve_threads;
use crate::cuda::Gpu;
use crate::tuning::{self, Contest, Report, Search, Tunable, dense, joined, parameters};
use crate::verify::Placed;
use crate::{
    Accuracy, Device, Error, Filter, Layout, PlanOptions, Result, TensorDesc, Tuning, Verify,
    Workspace,
};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// An algorithm and its parameters. A parameter that is `None` is chosen by the model, or is none of the
/// algorithm's. Written and parsed as `winograd_gemm_f4 tiles=36 vectors=4 parts=1 threads=2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Conv2dConfiguration {
    /// The algorithm.
    pub algorithm: Conv2dAlgorithm,
    /// `winograd_gemm`: the most tiles of a block (CPU) or chunk (CUDA); blocks are made equal.
    pub tiles: Option<usize>,
    /// `winograd_gemm` on the CPU: vectors of output channels between two output transforms.
    pub vectors: Option<usize>,
    /// `winograd_gemm` on the CPU: parts of the output channels that are separate tasks.
    pub parts: Option<usize>,
    /// CPU threads, at most as many as the plan may use.
    pub threads: Option<usize>,
    /// `winograd_gemm` on CUDA: threads of a block of the transforms, a multiple of 32 up to 1024.
    pub block: Option<usize>,
}

const NAMES: [&str; 5] = ["tiles", "vectors", "parts", "threads", "block"];

impl Conv2dConfiguration {
    /// An algorithm with the model's parameters.
    pub const fn new(algorithm: Conv2dAlgorithm) -> Self {
        let [tiles, vectors, parts, threads, block] = [None; 5];
        Conv2dConfiguration { algorithm, tiles, vectors, parts, threads, block }
    }
}

impl Conv2dConfiguration {
    /// Refuses parameters that the algorithm has not, on the device of the options, or cannot run with.
    pub(super) fn check(&self, options: &PlanOptions) -> Result<()> {
        let staged = matches!(self.algorithm, Conv2dAlgorithm::WinogradGemm(_));
        let on_cpu = options.device == Device::Cpu;
        let takes = [staged, staged && on_cpu, staged && on_cpu, on_cpu, staged && !on_cpu];
        let foreign =
            self.values().iter().zip(takes).any(|(value, takes)| value.is_some() && !takes);
        let zero = self.values().contains(&Some(0));
        let odd = self.block.is_some_and(|block| block % 32 != 0 || block > 1024);
        if foreign || zero || odd {
            return Err(Error::unsupported(
                format!("conv2d with {self} on {}", options.device),
                "winograd_gemm has tiles, on the CPU vectors and parts, on CUDA block (a multiple of 32 up to \
                 1024); every algorithm has threads on the CPU; numbers are positive",
            ));
        }
        Ok(())
    }

    fn values(&self) -> [Option<usize>; 5] {
        [self.tiles, self.vectors, self.parts, self.threads, self.block]
    }
}

impl fmt::Display for Conv2dConfiguration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named: [_; 5] = std::array::from_fn(|i| (NAMES[i], self.values()[i]));
        parameters::write(f, self.algorithm.name(), named)
    }
}

impl FromStr for Conv2dConfiguration {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let (algorithm, [tiles, vectors, parts, threads, block]) = parameters::parse(s, NAMES)?;
        let algorithm = algorithm.parse()?;
        Ok(Conv2dConfiguration { algorithm, tiles, vectors, parts, threads, block })
    }
}

/// A convolution as the search sees it. On the CPU a large batch is represented by as many images as
/// are more than the caches hold: blocks of tiles do not care for the rest.
pub(super) struct Problem {
    spec: Conv2dSpec,
    options: PlanOptions,
}

/// An algorithm that should take this many times as long as the best is tried with the model's parameters only.
const HOPELESS: f64 = 2.0;
/// Bytes of x and y beyond which more images change nothing on the CPU.
const ENOUGH_BYTES: usize = 96 << 20;

impl Problem {
    pub(super) fn new(spec: &Conv2dSpec, options: &PlanOptions) -> Result<Self> {
        let n = spec.problem()?.n;
        let image = (spec.x.layout.len() + spec.y.layout.len()) / n.max(1) * spec.x.dtype.size();
        let n = match options.device {
            Device::Cpu => n.min(ENOUGH_BYTES.div_ceil(image.max(1))),
            Device::Cuda(_) => n,
        };
        let images = |desc: &TensorDesc| {
            let shape = [&[n], &desc.shape()[1..]].concat();
            let layout = Layout::strided(&shape, desc.strides())?;
            dense(&TensorDesc { layout, ..*desc })
        };
        let (x, y) = (images(&spec.x)?, images(&spec.y)?);
        let w = TensorDesc::contiguous(spec.w.dtype, spec.w.shape())?;
        let bias = spec.bias.map(|b| TensorDesc::contiguous(b.dtype, b.shape())).transpose()?;
        let options = PlanOptions { tuning: Tuning::Model, verify: Verify::Off, ..*options };
        Ok(Problem { spec: Conv2dSpec { x, w, y, bias, ..spec.clone() }, options })
    }

    fn threads(&self) -> usize {
        resolve_threads(self.options.threads)
    }

    /// Algorithms within the spec's accuracy.
    fn algorithms(&self) -> Vec<Conv2dAlgorithm> {
        let mut all = Conv2dPlan::algorithms(&self.spec, self.options.device);
        all.retain(|&algorithm| match self.options.device {
            Device::Cpu => !algorithm.is_winograd() || self.spec.accuracy != Accuracy::Exact,
            Device::Cuda(_) => cuda::allows(&self.spec, algorithm),
        });
        all
    }

    /// Values of the parameters that are worth a try, beside the model's.
    fn variants(&self, algorithm: Conv2dAlgorithm) -> Vec<Conv2dConfiguration> {
        let base = Conv2dConfiguration::new(algorithm);
        let mut all = vec![base];
        match (self.options.device, algorithm) {
            (Device::Cpu, Conv2dAlgorithm::WinogradGemm(_)) => {
                for tiles in [12, 24, 36, 48, 72] {
                    for vectors in [2, 4, 8, 16] {
                        let blocking = Conv2dConfiguration {
                            tiles: Some(tiles),
                            vectors: Some(vectors),
                            ..base
                        };
                        all.push(blocking);
                    }
                }
                let threads = self.threads();
                all.extend((threads > 1).then_some(threads).into_iter().flat_map(|threads| {
                    [1, threads].map(|parts| Conv2dConfiguration { parts: Some(parts), ..base })
                }));
            }
            (Device::Cuda(_), Conv2dAlgorithm::WinogradGemm(_)) => {
                for shift in 13..19 {
                    all.push(Conv2dConfiguration { tiles: Some(1 << shift), ..base });
                }
                for block in [64, 256, 512] {
                    all.push(Conv2dConfiguration { block: Some(block), ..base });
                }
            }
            _ => {}
        }
        if self.options.device == Device::Cpu && self.threads() > 1 && self.is_small() {
            all.push(Conv2dConfiguration { threads: Some(1), ..base });
        }
        all
    }

    /// With the parameters that a plan would have.
    fn complete(&self, variant: &Conv2dConfiguration) -> Result<Conv2dConfiguration> {
        match self.options.device {
            Device::Cpu => {
                let plan = Conv2dPlan::with_configuration(&self.spec, variant, &self.options)?;
                Ok(plan.configuration())
            }
            Device::Cuda(index) => {
                let problem = self.spec.problem()?;
                Ok(cuda::complete(Gpu::get(index)?, &self.spec, &problem, variant))
            }
        }
    }

    /// Whether handing out the work may cost more than a second thread gains.
    fn is_small(&self) -> bool {
        self.spec.flops().is_ok_and(|flops| flops < 5e7)
    }
}

/// The configuration that a plan should take; `None` for the model's.
pub(super) fn decide(
    spec: &Conv2dSpec,
    options: &PlanOptions,
) -> Result<Option<Conv2dConfiguration>> {
    if spec.y.layout.is_empty() {
        return Ok(None);
    }
    tuning::decide(options.device, options.tuning, || Problem::new(spec, options))
}

/// Every candidate.
pub(super) fn configurations(
    spec: &Conv2dSpec,
    options: &PlanOptions,
) -> Result<Vec<Conv2dConfiguration>> {
    Problem::new(spec, options)?.candidates()
}

/// Measures some configurations.
pub(super) fn measure(
    spec: &Conv2dSpec,
    options: &PlanOptions,
    configurations: &[Conv2dConfiguration],
    how: &Search,
) -> Result<Report> {
    tuning::measure(&Problem::new(spec, options)?, configurations, how)
}

/// Measures the candidates, and keeps the winner.
pub(super) fn tune(spec: &Conv2dSpec, options: &PlanOptions, how: &Search) -> Result<Report> {
    tuning::tune(&Problem::new(spec, options)?, how).map(|(_, report)| report)
}

/// `nchw`, `nhwc`: dimensions by falling stride.
fn order(desc: &TensorDesc) -> &'static str {
    if is_channels_last(&desc.layout) { "nhwc" } else { "nchw" }
}

impl Tunable for Problem {
    type Configuration = Conv2dConfiguration;

    fn device(&self) -> Device {
        self.options.device
    }

    fn key(&self) -> String {
        let Conv2dSpec { x, w, y, stride, padding, dilation, groups, .. } = &self.spec;
        let (dtype, accuracy) = (x.dtype, self.spec.accuracy.name());
        let mut key = format!("conv2d {dtype} {} {}", joined(x.shape()), joined(w.shape()));
        for (name, values, default) in
            [("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)]
        {
            if *values != [default; 2] {
                key += &format!(" {name} {}", joined(values));
            }
        }
        if *groups > 1 {
            key += &format!(" groups {groups}");
        }
        key += &format!(" {}-{} {accuracy}", order(x), order(y));
        if self.options.device == Device::Cpu {
            key += &format!(" {} threads", self.threads());
            if self.options.filter == Filter::Changing {
                key += " packing";
            }
        }
        key
    }

    fn candidates(&self) -> Result<Vec<Conv2dConfiguration>> {
        let mut all = vec![Conv2dPlan::new(&self.spec, &self.options)?.configuration()];
        let algorithms = self.algorithms();
        let costs = algorithms.iter().map(|&a| self.cost(&Conv2dConfiguration::new(a)));
        let costs: Vec<f64> = costs.collect::<Result<_>>()?;
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        for (algorithm, cost) in algorithms.into_iter().zip(costs) {
            // Blocking does not make up for so much.
            let worth = if cost <= HOPELESS * least { usize::MAX } else { 1 };
            for variant in self.variants(algorithm).into_iter().take(worth) {
                // In full, so that two ways of writing the same are one candidate.
                let configuration = self.complete(&variant)?;
                if !all.contains(&configuration) {
                    all.push(configuration);
                }
            }
        }
        Ok(all)
    }

    fn cost(&self, configuration: &Conv2dConfiguration) -> Result<f64> {
        let problem = self.spec.problem()?;
        Ok(match self.options.device {
            Device::Cpu => cpu::cost(&problem, configuration.algorithm, self.options.filter),
            Device::Cuda(index) => {
                cuda::cost(Gpu::get(index)?, &self.spec, &problem, configuration)
            }
        })
    }

    fn is_valid(&self, configuration: &Conv2dConfiguration) -> bool {
        self.algorithms().contains(&configuration.algorithm)
            && configuration.threads.is_none_or(|threads| threads <= self.threads())
    }

    fn contest<'a>(
        &'a self,
        candidates: &'a [Conv2dConfiguration],
    ) -> Result<Box<dyn Contest + 'a>> {
        Ok(Box::new(Runs::new(self, candidates)?))
    }
}

/// Candidates on tensors of their own, which they share.
struct Runs<'a> {
    problem: &'a Problem,
    candidates: &'a [Conv2dConfiguration],
    /// Those that were prepared, and what they pack.
    plans: Vec<Option<Conv2dPlan>>,
    packed: Vec<PackedWeights>,
    workspace: Workspace,
    x: Placed,
    w: Placed,
    bias: Option<Placed>,
    y: Placed,
}

/// Output channels that are compared with the oracle at each end, of the first and the last image.
const SAMPLED_CHANNELS: usize = 2;

impl<'a> Runs<'a> {
    fn new(problem: &'a Problem, candidates: &'a [Conv2dConfiguration]) -> Result<Self> {
        let Problem { spec, options } = problem;
        // Activations behind a ReLU, and weights of mean zero.
        let place = |seed, desc, low| {
            Placed::new(tuning::random_input(seed, desc, low, 1.0)?, options.device)
        };
        Ok(Runs {
            problem,
            candidates,
            plans: candidates.iter().map(|_| None).collect(),
            packed: Vec::new(),
            workspace: Workspace::new(options.device, 0)?,
            x: place(1, spec.x, 0.0)?,
            w: place(2, spec.w, -1.0)?,
            bias: spec.bias.map(|desc| place(3, desc, -1.0)).transpose()?,
            y: Placed::output(spec.y, options.device)?,
        })
    }

    /// Whether the filter is packed before the runs. On CUDA packing is a small part of a run.
    fn is_kept(&self) -> bool {
        let PlanOptions { device, filter, .. } = self.problem.options;
        filter == Filter::Kept || device != Device::Cpu
    }

    /// Whether what a candidate has written agrees with the oracle.
    fn is_right(&self, candidate: usize) -> Result<bool> {
        let Some(plan) = &self.plans[candidate] else { return Ok(false) };
        let Conv2dSpec { y, groups, .. } = &self.problem.spec;
        let [n, k] = [y.shape()[0], y.shape()[1]];
        // Groups of channels belong to inputs of their own, so all of them are compared.
        let sampled = if *groups > 1 { k } else { k.min(SAMPLED_CHANNELS) };
        Ok(self.agrees(plan, 0..1, 0..sampled)? && self.agrees(plan, n - 1..n, k - sampled..k)?)
    }

    /// Some channels of an image of a plan's output against the oracle.
    fn agrees(
        &self,
        plan: &Conv2dPlan,
        image: Range<usize>,
        channels: Range<usize>,
    ) -> Result<bool> {
        let x = self.x.as_ref().narrow(0, image.clone())?;
        let w = self.w.as_ref().narrow(0, channels.clone())?;
        let bias =
            self.bias.as_ref().map(|b| b.as_ref().narrow(0, channels.clone())).transpose()?;
        let y = self.y.as_ref().narrow(0, image)?.narrow(1, channels)?;
        let part = Conv2dSpec::new(*x.desc(), *w.desc(), &self.problem.spec.params())?;
        let want = plan.expected_of(&part.problem()?, &x, &values(&w)?, bias.as_ref())?;
        let comparison = compare(&y, &want, plan.tolerance())?;
        Ok(comparison.passed() && comparison.count() > 0)
    }
}

impl Contest for Runs<'_> {
    fn prepare(&mut self, candidate: usize) -> Result<()> {
        if self.plans[candidate].is_some() {
            return Ok(());
        }
        let Problem { spec, options } = self.problem;
        let plan = Conv2dPlan::with_configuration(spec, &self.candidates[candidate], options)?;
        if plan.workspace_bytes() > self.workspace.len() {
            self.workspace = Workspace::new(options.device, plan.workspace_bytes())?;
        }
        if self.is_kept() && !self.packed.iter().any(|packed| plan.accepts(packed)) {
            self.packed.push(plan.pack_weights(&self.w.as_ref(), &mut self.workspace)?);
        }
        self.plans[candidate] = Some(plan);
        Ok(())
    }

    fn run(&mut self, candidate: usize, times: usize) -> Result<()> {
        let Some(plan) = &self.plans[candidate] else { return Ok(()) };
        let packed = self.packed.iter().find(|packed| plan.accepts(packed));
        let w = packed.map_or(Weights::Raw(self.w.as_ref()), Weights::Packed);
        let args =
            Conv2dArgs { x: self.x.as_ref(), w, bias: self.bias.as_ref().map(Placed::as_ref) };
        for _ in 0..times {
            plan.run(&args, self.y.as_mut(), &mut self.workspace)?;
        }
        self.workspace.synchronize()
    }

    fn verify(&mut self, candidate: usize) -> Result<bool> {
        self.run(candidate, 1)?;
        self.is_right(candidate)
    }
}

#[cfg(test)]
mod tests;
