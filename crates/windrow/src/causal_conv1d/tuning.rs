//! Configurations of a causal convolution, and the search among them.

use super::{
    CausalConv1dAlgorithm, CausalConv1dArgs, CausalConv1dOutputs, CausalConv1dPlan,
    CausalConv1dSpec,
};
use crate::cpu::resolve_threads;
use crate::tuning::{self, Contest, Report, Search, Tunable, dense, joined, parameters};
use crate::verify::Placed;
use crate::{Device, Error, PlanOptions, Result, TensorDesc, TensorRef, Tuning, Verify, Workspace};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// An algorithm and its parameters. A parameter that is `None` is chosen by the model, or is none of the
/// algorithm's. Written and parsed as `direct channels=16 tokens=2048 threads=2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CausalConv1dConfiguration {
    /// The algorithm.
    pub algorithm: CausalConv1dAlgorithm,
    /// `direct` on the CPU: the most channels of a task, rounded up to vectors.
    pub channels: Option<usize>,
    /// `direct` on the CPU: the most tokens of a task.
    pub tokens: Option<usize>,
    /// CPU threads, at most as many as the plan may use.
    pub threads: Option<usize>,
}

const NAMES: [&str; 3] = ["channels", "tokens", "threads"];

impl CausalConv1dConfiguration {
    /// An algorithm with the model's parameters.
    pub const fn new(algorithm: CausalConv1dAlgorithm) -> Self {
        CausalConv1dConfiguration { algorithm, channels: None, tokens: None, threads: None }
    }

    /// Refuses parameters that the algorithm has not, on the device of the options, or cannot run with.
    pub(super) fn check(&self, options: &PlanOptions) -> Result<()> {
        let task = self.channels.is_some() || self.tokens.is_some();
        let foreign = match options.device {
            Device::Cpu => task && self.algorithm != CausalConv1dAlgorithm::Direct,
            Device::Cuda(_) => task || self.threads.is_some(),
        };
        if foreign || [self.channels, self.tokens, self.threads].contains(&Some(0)) {
            return Err(Error::unsupported(
                format!("causal_conv1d with {self} on {}", options.device),
                "on the CPU direct has channels and tokens, and both algorithms threads; numbers are positive; \
                 there are no parameters on CUDA",
            ));
        }
        Ok(())
    }
}

impl fmt::Display for CausalConv1dConfiguration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [channels, tokens, threads] = NAMES;
        let named = [(channels, self.channels), (tokens, self.tokens), (threads, self.threads)];
        parameters::write(f, self.algorithm.name(), named)
    }
}

impl FromStr for CausalConv1dConfiguration {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let (algorithm, [channels, tokens, threads]) = parameters::parse(s, NAMES)?;
        let algorithm = algorithm.parse()?;
        Ok(CausalConv1dConfiguration { algorithm, channels, tokens, threads })
    }
}

/// A causal convolution as the search sees it: on dense tensors in the spec's order of dimensions, each row
/// one sequence that begins with zeros.
pub(super) struct Problem {
    spec: CausalConv1dSpec,
    options: PlanOptions,
}

impl Problem {
    fn new(spec: &CausalConv1dSpec, options: &PlanOptions) -> Result<Self> {
        spec.problem()?;
        let mut plain = CausalConv1dSpec::new(dense(&spec.x)?, dense(&spec.weight)?)?
            .with_output(dense(&spec.y)?)
            .with_activation(spec.activation);
        plain.bias = spec.bias.as_ref().map(dense).transpose()?;
        let options = PlanOptions { tuning: Tuning::Model, verify: Verify::Off, ..*options };
        Ok(Problem { spec: plain, options })
    }

    fn threads(&self) -> usize {
        resolve_threads(self.options.threads)
    }
}

/// `bdl`, `bld`: dimensions by falling stride.
fn order(desc: &TensorDesc) -> &'static str {
    if desc.strides()[1] < desc.strides()[2] { "bld" } else { "bdl" }
}

impl Tunable for Problem {
    type Configuration = CausalConv1dConfiguration;

    fn device(&self) -> Device {
        self.options.device
    }

    fn key(&self) -> String {
        let CausalConv1dSpec { x, weight, y, activation, .. } = &self.spec;
        let (dtype, activation) = (x.dtype, activation.name());
        let (shape, filter) = (joined(x.shape()), joined(weight.shape()));
        let (from, to) = (order(x), order(y));
        let key = format!("causal_conv1d {dtype} {shape} {filter} {from}-{to} {activation}");
        match self.options.device {
            Device::Cpu => format!("{key} {} threads", self.threads()),
            Device::Cuda(_) => key,
        }
    }

    fn candidates(&self) -> Result<Vec<CausalConv1dConfiguration>> {
        let (spec, options) = (&self.spec, &self.options);
        let mut all = vec![CausalConv1dPlan::new(spec, options)?.configuration()];
        for algorithm in CausalConv1dPlan::algorithms(spec, options.device) {
            let base = CausalConv1dConfiguration::new(algorithm);
            let mut variants = vec![base];
            if options.device == Device::Cpu && algorithm == CausalConv1dAlgorithm::Direct {
                for channels in [16, 64, 256, 1024] {
                    for tokens in [64, 256, 1024, 4096] {
                        let (channels, tokens) = (Some(channels), Some(tokens));
                        variants.push(CausalConv1dConfiguration { channels, tokens, ..base });
                    }
                }
                let single = (self.threads() > 1).then_some(1);
                variants.extend(
                    single.map(|one| CausalConv1dConfiguration { threads: Some(one), ..base }),
                );
            }
            for variant in variants {
                // In full, so that two ways of writing the same are one candidate.
                let configuration = match options.device {
                    Device::Cpu => CausalConv1dPlan::with_configuration(spec, &variant, options)?
                        .configuration(),
                    Device::Cuda(_) => variant,
                };
                if !all.contains(&configuration) {
                    all.push(configuration);
                }
            }
        }
        Ok(all)
    }

    /// Bytes: the im2col matrix is written and read besides.
    fn cost(&self, configuration: &CausalConv1dConfiguration) -> Result<f64> {
        let width = self.spec.problem()?.width;
        Ok(match configuration.algorithm {
            CausalConv1dAlgorithm::Direct => 1.0,
            CausalConv1dAlgorithm::Im2colGemm => 1.0 + width as f64,
        })
    }

    fn is_valid(&self, configuration: &CausalConv1dConfiguration) -> bool {
        let algorithms = CausalConv1dPlan::algorithms(&self.spec, self.options.device);
        algorithms.contains(&configuration.algorithm)
            && configuration.check(&self.options).is_ok()
            && configuration.threads.is_none_or(|threads| threads <= self.threads())
    }

    fn contest<'a>(
        &'a self,
        candidates: &'a [CausalConv1dConfiguration],
    ) -> Result<Box<dyn Contest + 'a>> {
        Ok(Box::new(Runs::new(self, candidates)?))
    }
}

/// The configuration that a plan should take; `None` for the model's.
pub(super) fn decide(
    spec: &CausalConv1dSpec,
    options: &PlanOptions,
) -> Result<Option<CausalConv1dConfiguration>> {
    if spec.y.layout.is_empty() {
        return Ok(None);
    }
    tuning::decide(options.device, options.tuning, || Problem::new(spec, options))
}

/// Every candidate.
pub(super) fn configurations(
    spec: &CausalConv1dSpec,
    options: &PlanOptions,
) -> Result<Vec<CausalConv1dConfiguration>> {
    Problem::new(spec, options)?.candidates()
}

/// Measures some configurations.
pub(super) fn measure(
    spec: &CausalConv1dSpec,
    options: &PlanOptions,
    configurations: &[CausalConv1dConfiguration],
    how: &Search,
) -> Result<Report> {
    tuning::measure(&Problem::new(spec, options)?, configurations, how)
}

/// Measures the candidates, and keeps the winner.
pub(super) fn tune(spec: &CausalConv1dSpec, options: &PlanOptions, how: &Search) -> Result<Report> {
    tuning::tune(&Problem::new(spec, options)?, how).map(|(_, report)| report)
}

/// Candidates on tensors of their own, which they share.
struct Runs<'a> {
    problem: &'a Problem,
    candidates: &'a [CausalConv1dConfiguration],
    /// Those that were prepared.
    plans: Vec<Option<CausalConv1dPlan>>,
    workspace: Workspace,
    x: Placed,
    weight: Placed,
    bias: Option<Placed>,
    y: Placed,
}

/// Channels of a depthwise, output channels of a dense convolution that are compared with the oracle at each
/// end.
const SAMPLED_CHANNELS: usize = 4;

impl<'a> Runs<'a> {
    fn new(problem: &'a Problem, candidates: &'a [CausalConv1dConfiguration]) -> Result<Self> {
        let Problem { spec, options } = problem;
        let place =
            |seed, desc| Placed::new(tuning::random_input(seed, desc, -1.0, 1.0)?, options.device);
        Ok(Runs {
            problem,
            candidates,
            plans: candidates.iter().map(|_| None).collect(),
            workspace: Workspace::new(options.device, 0)?,
            x: place(1, spec.x)?,
            weight: place(2, spec.weight)?,
            bias: spec.bias.map(|desc| place(3, desc)).transpose()?,
            y: Placed::output(spec.y, options.device)?,
        })
    }

    /// Some output channels against the oracle.
    fn agrees(&self, channels: Range<usize>) -> Result<bool> {
        let Problem { spec, options } = self.problem;
        let part = |t: TensorRef<'_>, dim| t.narrow(dim, channels.clone()).map(|t| *t.desc());
        let dense = spec.problem()?.dense;
        let x = self.x.as_ref();
        let x = if dense { x } else { x.narrow(1, channels.clone())? };
        let weight = self.weight.as_ref().narrow(0, channels.clone())?;
        let bias = self.bias.as_ref();
        let bias = bias.map(|b| b.as_ref().narrow(0, channels.clone())).transpose()?;
        let y = self.y.as_ref().narrow(1, channels.clone())?;
        let spec = CausalConv1dSpec {
            x: *x.desc(),
            weight: *weight.desc(),
            bias: bias.map(|b| *b.desc()),
            y: part(self.y.as_ref(), 1)?,
            ..spec.clone()
        };
        let args = CausalConv1dArgs { bias, ..CausalConv1dArgs::new(x, weight) };
        let comparison = CausalConv1dPlan::new(&spec, options)?.compare(&args, &y)?;
        Ok(comparison.passed() && comparison.count() > 0)
    }
}

impl Contest for Runs<'_> {
    fn prepare(&mut self, candidate: usize) -> Result<()> {
        let Problem { spec, options } = self.problem;
        let configuration = &self.candidates[candidate];
        let plan = CausalConv1dPlan::with_configuration(spec, configuration, options)?;
        if plan.workspace_bytes() > self.workspace.len() {
            self.workspace = Workspace::new(options.device, plan.workspace_bytes())?;
        }
        self.plans[candidate] = Some(plan);
        Ok(())
    }

    fn run(&mut self, candidate: usize, times: usize) -> Result<()> {
        let Some(plan) = &self.plans[candidate] else { return Ok(()) };
        let bias = self.bias.as_ref().map(Placed::as_ref);
        let args = CausalConv1dArgs {
            bias,
            ..CausalConv1dArgs::new(self.x.as_ref(), self.weight.as_ref())
        };
        for _ in 0..times {
            let outputs = CausalConv1dOutputs { y: self.y.as_mut(), final_states: None };
            plan.run(&args, outputs, &mut self.workspace)?;
        }
        self.workspace.synchronize()
    }

    fn verify(&mut self, candidate: usize) -> Result<bool> {
        self.run(candidate, 1)?;
        let d = self.problem.spec.y.shape()[1];
        let first = 0..d.min(SAMPLED_CHANNELS);
        Ok(self.agrees(first)? && self.agrees(d.saturating_sub(SAMPLED_CHANNELS)..d)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activation, DType, Layout};
    use std::num::NonZeroUsize;
    use std::time::Duration;

    fn spec(shape: [usize; 3], order: [usize; 3], dense: bool) -> CausalConv1dSpec {
        let x =
            TensorDesc { dtype: DType::F32, layout: Layout::with_order(&shape, &order).unwrap() };
        let weight = if dense { vec![24, shape[1], 4] } else { vec![shape[1], 4] };
        let weight = TensorDesc::contiguous(DType::F32, &weight).unwrap();
        let bias = TensorDesc::contiguous(DType::F32, &[weight.shape()[0]]).unwrap();
        CausalConv1dSpec::new(x, weight).unwrap().with_bias(bias).with_activation(Activation::Silu)
    }

    fn options(threads: usize) -> PlanOptions {
        PlanOptions { threads: NonZeroUsize::new(threads), ..Default::default() }
    }

    #[test]
    fn every_configuration_parses_back_and_is_right() {
        for (order, dense) in [([0, 1, 2], false), ([0, 2, 1], false), ([0, 1, 2], true)] {
            let spec = spec([2, 40, 700], order, dense);
            let problem = Problem::new(&spec, &options(2)).unwrap();
            let all = problem.candidates().unwrap();
            assert_eq!(all[0], CausalConv1dPlan::new(&spec, &options(2)).unwrap().configuration());
            let mut runs = Runs::new(&problem, &all).unwrap();
            for (i, c) in all.iter().enumerate() {
                runs.prepare(i).unwrap();
                assert_eq!(c.to_string().parse::<CausalConv1dConfiguration>().unwrap(), *c);
                assert!(problem.is_valid(c) && !all[..i].contains(c), "{c}");
                assert!(runs.verify(i).unwrap(), "{c}");
            }
        }
    }

    #[test]
    fn bad_parameters_are_refused() {
        let spec = spec([1, 16, 64], [0, 1, 2], false);
        for bad in ["im2col_gemm tokens=4", "direct block=3", "direct tokens=0", "none"] {
            let plan = bad.parse().and_then(|c: CausalConv1dConfiguration| {
                CausalConv1dPlan::with_configuration(&spec, &c, &options(1))
            });
            assert!(plan.is_err(), "{bad}");
        }
    }

    #[test]
    fn a_search_finds_a_plan() {
        let spec = spec([1, 32, 256], [0, 2, 1], false);
        let how = Search { budget: Duration::from_millis(10), exhaustive: false };
        let report = CausalConv1dPlan::tune(&spec, &options(2), &how).unwrap();
        assert_eq!(report.problem, "causal_conv1d f32 1x32x256 32x4 bld-bld silu 2 threads");
        let plan = CausalConv1dPlan::new(&spec, &options(2)).unwrap();
        assert_eq!(plan.configuration().to_string(), report.winner().configuration);
    }
}
