//! Configurations of GELU, and the search among them.

use super::{GeluAlgorithm, GeluArgs, GeluPlan, GeluSpec, cuda};
use crate::tuning::{self, Contest, Report, Search, Tunable, dense, joined, parameters};
use crate::verify::Placed;
use crate::{Device, Error, PlanOptions, Result, TensorDesc, TensorRef, Tuning, Verify, Workspace};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// An algorithm and its parameters. A parameter that is `None` is chosen by the model, or is none of the
/// algorithm's. Written and parsed as `f16x8_pack block=128 unroll=2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GeluConfiguration {
    /// The algorithm.
    pub algorithm: GeluAlgorithm,
    /// CUDA: threads of a block, a power of two from 32 to 1024.
    pub block: Option<usize>,
    /// CUDA: accesses of a thread where all elements lie in one row, up to 8.
    pub unroll: Option<usize>,
}

const NAMES: [&str; 2] = ["block", "unroll"];
const MAX_UNROLL: usize = 8;

impl GeluConfiguration {
    /// An algorithm with the model's parameters.
    pub const fn new(algorithm: GeluAlgorithm) -> Self {
        GeluConfiguration { algorithm, block: None, unroll: None }
    }

    /// Refuses parameters that the algorithm has not, on the device of the options, or cannot run with.
    pub(super) fn check(&self, options: &PlanOptions) -> Result<()> {
        let GeluConfiguration { block, unroll, .. } = *self;
        let foreign = options.device == Device::Cpu && (block.is_some() || unroll.is_some());
        let bad_block = block.is_some_and(|b| !b.is_power_of_two() || !(32..=1024).contains(&b));
        let bad_unroll = unroll.is_some_and(|u| !(1..=MAX_UNROLL).contains(&u));
        if foreign || bad_block || bad_unroll {
            return Err(Error::unsupported(
                format!("gelu with {self} on {}", options.device),
                "on CUDA block is a power of two from 32 to 1024 and unroll at most 8; there are no parameters \
                 on the CPU",
            ));
        }
        Ok(())
    }
}

impl fmt::Display for GeluConfiguration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = [(NAMES[0], self.block), (NAMES[1], self.unroll)];
        parameters::write(f, self.algorithm.name(), named)
    }
}

impl FromStr for GeluConfiguration {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let (algorithm, [block, unroll]) = parameters::parse(s, NAMES)?;
        Ok(GeluConfiguration { algorithm: algorithm.parse()?, block, unroll })
    }
}

/// GELU as the search sees it: on dense tensors in the spec's order of dimensions.
pub(super) struct Problem {
    spec: GeluSpec,
    options: PlanOptions,
}

impl Problem {
    fn new(spec: &GeluSpec, options: &PlanOptions) -> Result<Self> {
        spec.check()?;
        let (x, y) = (dense(&spec.x)?, dense(&spec.y)?);
        let gate = spec.gate.as_ref().map(dense).transpose()?;
        let bias = spec.bias.map(|b| TensorDesc::contiguous(b.dtype, b.shape())).transpose()?;
        let options = PlanOptions { tuning: Tuning::Model, verify: Verify::Off, ..*options };
        Ok(Problem { spec: GeluSpec { x, y, bias, gate, ..*spec }, options })
    }
}

impl Tunable for Problem {
    type Configuration = GeluConfiguration;

    fn device(&self) -> Device {
        self.options.device
    }

    fn key(&self) -> String {
        let GeluSpec { x, y, bias, gate, approximate, half_math } = &self.spec;
        let mut key = format!("gelu {} {} {}", approximate.name(), x.dtype, joined(x.shape()));
        for (is, what) in [
            (bias.is_some(), "bias"),
            (gate.is_some(), "gate"),
            (x.layout != y.layout, "transposed"),
        ] {
            if is {
                key = format!("{key} {what}");
            }
        }
        if x.dtype.is_half() {
            key = format!("{key} {}", half_math.name());
        }
        key
    }

    fn candidates(&self) -> Result<Vec<GeluConfiguration>> {
        let algorithms = GeluPlan::algorithms(&self.spec, self.options.device);
        let Device::Cuda(index) = self.options.device else {
            return Ok(algorithms.into_iter().map(GeluConfiguration::new).collect());
        };
        let mut all = Vec::new();
        for &algorithm in &algorithms {
            let base = GeluConfiguration::new(algorithm);
            let blocks = [64, 256, 512, 1024].map(|n| GeluConfiguration { block: Some(n), ..base });
            let unrolls = [1, 2, 4].map(|n| GeluConfiguration { unroll: Some(n), ..base });
            for variant in [base].into_iter().chain(blocks).chain(unrolls) {
                let configuration = cuda::complete(index, &self.spec, &variant);
                if !all.contains(&configuration) {
                    all.push(configuration);
                }
            }
        }
        Ok(all)
    }

    /// The bytes, and more of them the less a thread moves at once.
    fn cost(&self, configuration: &GeluConfiguration) -> Result<f64> {
        let algorithms = GeluPlan::algorithms(&self.spec, self.options.device);
        let rank = algorithms.iter().position(|a| *a == configuration.algorithm).unwrap_or(0);
        Ok(1.0 + 0.2 * rank as f64)
    }

    fn is_valid(&self, configuration: &GeluConfiguration) -> bool {
        let algorithms = GeluPlan::algorithms(&self.spec, self.options.device);
        algorithms.contains(&configuration.algorithm) && configuration.check(&self.options).is_ok()
    }

    fn contest<'a>(&'a self, candidates: &'a [GeluConfiguration]) -> Result<Box<dyn Contest + 'a>> {
        Ok(Box::new(Runs::new(self, candidates)?))
    }
}

/// The configuration that a plan should take; `None` for the model's. There is nothing to choose on the CPU.
pub(super) fn decide(spec: &GeluSpec, options: &PlanOptions) -> Result<Option<GeluConfiguration>> {
    if options.device == Device::Cpu || spec.x.layout.is_empty() {
        return Ok(None);
    }
    tuning::decide(options.device, options.tuning, || Problem::new(spec, options))
}

/// Every candidate.
pub(super) fn configurations(
    spec: &GeluSpec,
    options: &PlanOptions,
) -> Result<Vec<GeluConfiguration>> {
    Problem::new(spec, options)?.candidates()
}

/// Measures some configurations.
pub(super) fn measure(
    spec: &GeluSpec,
    options: &PlanOptions,
    configurations: &[GeluConfiguration],
    how: &Search,
) -> Result<Report> {
    tuning::measure(&Problem::new(spec, options)?, configurations, how)
}

/// Measures the candidates, and keeps the winner.
pub(super) fn tune(spec: &GeluSpec, options: &PlanOptions, how: &Search) -> Result<Report> {
    tuning::tune(&Problem::new(spec, options)?, how).map(|(_, report)| report)
}

/// Candidates on tensors of their own, which they share.
struct Runs<'a> {
    problem: &'a Problem,
    candidates: &'a [GeluConfiguration],
    /// Those that were prepared.
    plans: Vec<Option<GeluPlan>>,
    workspace: Workspace,
    x: Placed,
    bias: Option<Placed>,
    gate: Option<Placed>,
    y: Placed,
}

/// Elements that are compared with the oracle at each end.
const SAMPLE: usize = 1 << 16;

impl<'a> Runs<'a> {
    fn new(problem: &'a Problem, candidates: &'a [GeluConfiguration]) -> Result<Self> {
        let Problem { spec, options } = problem;
        let place =
            |seed, desc| Placed::new(tuning::random_input(seed, desc, -6.0, 6.0)?, options.device);
        Ok(Runs {
            problem,
            candidates,
            plans: candidates.iter().map(|_| None).collect(),
            workspace: Workspace::new(options.device, 0)?,
            x: place(1, spec.x)?,
            bias: spec.bias.map(|desc| place(2, desc)).transpose()?,
            gate: spec.gate.map(|desc| place(3, desc)).transpose()?,
            y: Placed::output(spec.y, options.device)?,
        })
    }
}

impl Contest for Runs<'_> {
    fn prepare(&mut self, candidate: usize) -> Result<()> {
        let Problem { spec, options } = self.problem;
        let plan = GeluPlan::with_configuration(spec, &self.candidates[candidate], options)?;
        self.plans[candidate] = Some(plan);
        Ok(())
    }

    fn run(&mut self, candidate: usize, times: usize) -> Result<()> {
        let Some(plan) = &self.plans[candidate] else { return Ok(()) };
        let args = GeluArgs {
            x: self.x.as_ref(),
            bias: self.bias.as_ref().map(Placed::as_ref),
            gate: self.gate.as_ref().map(Placed::as_ref),
        };
        for _ in 0..times {
            plan.run(&args, self.y.as_mut(), &mut self.workspace)?;
        }
        self.workspace.synchronize()
    }

    /// Rows at both ends.
    fn verify(&mut self, candidate: usize) -> Result<bool> {
        self.run(candidate, 1)?;
        let GeluSpec { x, .. } = &self.problem.spec;
        let Some(&rows) = x.shape().first() else { return self.agrees(None) };
        let row = (x.layout.len() / rows.max(1)).max(1);
        let count = (SAMPLE / row).clamp(1, rows);
        Ok(self.agrees(Some(0..count))? && self.agrees(Some(rows - count..rows))?)
    }
}

/// Some rows of the first dimension, or all of a tensor.
fn part<'a>(tensor: &'a Placed, rows: &Option<Range<usize>>) -> Result<TensorRef<'a>> {
    match rows {
        Some(rows) => tensor.as_ref().narrow(0, rows.clone()),
        None => Ok(tensor.as_ref()),
    }
}

impl Runs<'_> {
    /// Some rows of the first dimension, or everything, against the oracle.
    fn agrees(&self, rows: Option<Range<usize>>) -> Result<bool> {
        let Problem { spec, options } = self.problem;
        // The bias of a tensor of one dimension is as long as that.
        let whole_bias = spec.x.shape().len() != 1;
        let (x, y) = (part(&self.x, &rows)?, part(&self.y, &rows)?);
        let gate = self.gate.as_ref().map(|gate| part(gate, &rows)).transpose()?;
        let bias_rows = rows.filter(|_| !whole_bias);
        let bias = self.bias.as_ref().map(|bias| part(bias, &bias_rows)).transpose()?;
        let spec = GeluSpec {
            x: *x.desc(),
            y: *y.desc(),
            bias: bias.map(|b| *b.desc()),
            gate: gate.map(|g| *g.desc()),
            ..*spec
        };
        let args = GeluArgs { x, bias, gate };
        let comparison = GeluPlan::new(&spec, options)?.compare(&args, &y)?;
        Ok(comparison.passed() && comparison.count() > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Approximate, DType};
    use std::time::Duration;

    fn spec() -> GeluSpec {
        let x = TensorDesc::contiguous(DType::F16, &[4, 6]).unwrap();
        GeluSpec::new(x, Approximate::Tanh).unwrap()
    }

    fn on_gpu() -> PlanOptions {
        PlanOptions { device: Device::Cuda(0), ..Default::default() }
    }

    #[test]
    fn configurations_parse_back_and_are_distinct() {
        let problem = Problem::new(&spec(), &on_gpu()).unwrap();
        let all = problem.candidates().unwrap();
        assert_eq!(all[0].algorithm, GeluAlgorithm::F16x8Pack);
        assert!(all.len() > 20);
        for (i, c) in all.iter().enumerate() {
            assert_eq!(c.to_string().parse::<GeluConfiguration>().unwrap(), *c);
            assert!(problem.is_valid(c) && !all[..i].contains(c), "{c}");
            assert!(problem.cost(c).unwrap() >= problem.cost(&all[0]).unwrap());
        }
        assert_eq!(problem.key(), "gelu tanh f16 4x6 float");
    }

    #[test]
    fn bad_parameters_are_refused() {
        let problem = Problem::new(&spec(), &on_gpu()).unwrap();
        for bad in ["f16x8 block=100", "f16x8 block=2048", "f16x8 unroll=9", "f32"] {
            assert!(!problem.is_valid(&bad.parse().unwrap()), "{bad}");
        }
        let cpu = "cpu block=64".parse().unwrap();
        let plan = GeluPlan::with_configuration(&spec(), &cpu, &PlanOptions::default());
        assert!(matches!(plan, Err(Error::Unsupported { .. })));
    }

    #[test]
    fn there_is_one_way_on_the_cpu() {
        let how = Search { budget: Duration::from_millis(1), exhaustive: true };
        let bias = TensorDesc::contiguous(DType::F32, &[6]).unwrap();
        let spec = GeluSpec { bias: Some(bias), gate: Some(spec().x), ..spec() };
        let report = GeluPlan::tune(&spec, &PlanOptions::default(), &how).unwrap();
        assert_eq!((report.candidates.len(), report.chosen), (1, 0));
        assert_eq!(report.winner().configuration, "cpu");
        assert!(report.winner().seconds.is_some());
    }
}
