//! The search among an operator's configurations: candidates, their runs, and the comparison of their results.

use super::operator::{Algorithm, Configuration, Engine, Operator, Setup, Tuned};
use super::plan_inputs::PlanInputs;
use super::planned::{Plan, on_device};
use crate::cpu::{Isa, resolve_threads};
use crate::tuning::{self, Benchmark, Report, Search, Tunable, random_input};
use crate::{Device, Placed, PlanOptions, Result, Tuning, Verify, Workspace};

/// The limit for trying all parameters of an algorithm: its predicted time, divided by that of the fastest algorithm.
/// Above the limit only the cost model's parameters are tried, because better parameters do not make an algorithm twice
/// as fast.
const HOPELESS: f64 = 2.0;

/// The search for the fastest configuration of a spec. It measures with dense tensors.
pub(crate) struct SearchTask<O: Operator> {
    spec: O::Spec,
    problem: O::Problem,
    options: PlanOptions,
    /// The spec with the user's strides. A candidate must support these too, because a kernel may reject strides that
    /// the dense tensors do not have, for example a very large stride of a dimension of size 1.
    given: O::Spec,
}

impl<O: Tuned> SearchTask<O> {
    pub(crate) fn new(spec: &O::Spec, options: &PlanOptions) -> Result<Self> {
        O::problem(spec)?;
        let options = PlanOptions { tuning: Tuning::Model, verify: Verify::Off, ..*options };
        let given = spec.clone();
        let spec = O::plain(spec, &options)?;
        Ok(SearchTask { problem: O::problem(&spec)?, spec, options, given })
    }

    fn candidate_algorithms(&self) -> Result<Vec<Algorithm<O>>> {
        let mut all = on_device!(O::candidates, &self.spec, &self.problem, &self.options)?;
        let supported = Plan::<O>::algorithms(&self.given, self.options.device);
        all.retain(|algorithm| supported.contains(algorithm));
        Ok(all)
    }

    /// The configuration with all parameters of its plan, so that two configurations with the same effect are one
    /// candidate.
    fn complete(&self, configuration: &O::Configuration) -> Result<O::Configuration> {
        on_device!(O::complete, &self.spec, &self.problem, &self.options, configuration)
    }
}

impl<O: Tuned> Tunable for SearchTask<O> {
    type Configuration = O::Configuration;

    fn device(&self) -> Device {
        self.options.device
    }

    fn key(&self) -> String {
        O::key(&self.spec, &self.options)
    }

    fn candidates(&self) -> Result<Vec<O::Configuration>> {
        let SearchTask { spec, problem, options, .. } = self;
        let of = O::Configuration::of;
        let algorithms = self.candidate_algorithms()?;
        let chosen = on_device!(O::choose, spec, problem, options)?;
        // The method that completes a configuration may not support the user's strides. Then the configuration stays as
        // it is.
        let complete = |configuration: O::Configuration| {
            let completed = self.complete(&configuration)?;
            let is_given = algorithms.contains(&completed.algorithm());
            Result::Ok(if is_given { completed } else { configuration })
        };
        let mut all = Vec::new();
        if algorithms.contains(&chosen) {
            all.push(complete(of(chosen))?);
        }
        let costs = algorithms.iter().map(|&algorithm| self.cost(&of(algorithm)));
        let costs = costs.collect::<Result<Vec<f64>>>()?;
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        for (&algorithm, cost) in algorithms.iter().zip(costs) {
            let worth = if cost <= HOPELESS * least { usize::MAX } else { 1 };
            let variants = on_device!(O::variants, spec, problem, options, algorithm);
            for variant in variants.into_iter().take(worth) {
                let configuration = complete(variant)?;
                if !all.contains(&configuration) {
                    all.push(configuration);
                }
            }
        }
        Ok(all)
    }

    fn cost(&self, configuration: &O::Configuration) -> Result<f64> {
        on_device!(O::cost, &self.spec, &self.problem, &self.options, configuration)
    }

    fn is_valid(&self, configuration: &O::Configuration) -> bool {
        let most = resolve_threads(self.options.threads);
        self.candidate_algorithms().is_ok_and(|all| all.contains(&configuration.algorithm()))
            && configuration.check(&self.options).is_ok()
            && configuration.threads().is_none_or(|threads| threads <= most)
    }

    fn benchmark<'a>(
        &'a self,
        candidates: &'a [O::Configuration],
    ) -> Result<Box<dyn Benchmark + 'a>> {
        Ok(Box::new(CandidateRuns::new(self, candidates)?))
    }
}

/// The measured configuration for a plan; `None` to use the cost model's.
pub(crate) fn decide<O: Tuned>(
    spec: &O::Spec,
    options: &PlanOptions,
) -> Result<Option<O::Configuration>> {
    if O::y(spec).layout.is_empty() || !O::has_choice(options.device) {
        return Ok(None);
    }
    tuning::decide(options.device, options.tuning, || SearchTask::<O>::new(spec, options))
}

/// The candidates of a search for this spec.
pub(super) fn configurations<O: Tuned>(
    spec: &O::Spec,
    options: &PlanOptions,
) -> Result<Vec<O::Configuration>> {
    SearchTask::<O>::new(spec, options)?.candidates()
}

/// Measures the given configurations.
pub(super) fn measure<O: Tuned>(
    spec: &O::Spec,
    options: &PlanOptions,
    configurations: &[O::Configuration],
    how: &Search,
) -> Result<Report> {
    tuning::measure(&SearchTask::<O>::new(spec, options)?, configurations, how)
}

/// Measures the candidates and saves the winner.
pub(super) fn tune<O: Tuned>(
    spec: &O::Spec,
    options: &PlanOptions,
    how: &Search,
) -> Result<Report> {
    tuning::tune(&SearchTask::<O>::new(spec, options)?, how).map(|(_, report)| report)
}

/// The plans of the candidates, and the tensors that all of them use.
pub(crate) struct CandidateRuns<'a, O: Tuned> {
    problem: &'a SearchTask<O>,
    candidates: &'a [O::Configuration],
    /// The plan of each candidate; `None` until the candidate is prepared.
    plans: Vec<Option<Plan<O>>>,
    kept: O::SearchData,
    workspace: Workspace,
    inputs: Vec<Option<Placed>>,
    pub(crate) y: Placed,
}

/// The plan of a prepared candidate, with its inputs. The function takes two fields of [`CandidateRuns`] in place of
/// `self`, so that the caller can borrow the other fields mutably.
fn bound<'a, O: Tuned>(
    plans: &'a [Option<Plan<O>>],
    inputs: &'a [Option<Placed>],
    candidate: usize,
) -> Option<PlanInputs<'a, O>> {
    Some(PlanInputs::new(plans[candidate].as_ref()?, inputs))
}

impl<'a, O: Tuned> CandidateRuns<'a, O> {
    pub(crate) fn new(
        problem: &'a SearchTask<O>,
        candidates: &'a [O::Configuration],
    ) -> Result<Self> {
        let (spec, device) = (&problem.spec, problem.options.device);
        let inputs = (1..).zip(O::INPUTS).map(|(seed, input)| {
            let Some(desc) = (input.desc)(spec) else { return Ok(None) };
            let (low, high) = O::range(input.name);
            Placed::new(random_input(seed, *desc, low, high)?, device).map(Some)
        });
        Ok(CandidateRuns {
            problem,
            candidates,
            plans: candidates.iter().map(|_| None).collect(),
            kept: O::SearchData::default(),
            workspace: Workspace::new(device, 0)?,
            inputs: inputs.collect::<Result<_>>()?,
            y: Placed::output(*O::y(spec), device)?,
        })
    }

    /// True if the results of a candidate agree with the oracle.
    pub(crate) fn is_right(&self, candidate: usize) -> Result<bool> {
        let Some(bound) = bound(&self.plans, &self.inputs, candidate) else {
            return Ok(false);
        };
        let y = self.y.as_ref();
        let comparison = O::compare_ends(bound.plan, &bound.args(), &y, None)?;
        Ok(comparison.passed() && comparison.count() > 0)
    }
}

impl<O: Tuned> Benchmark for CandidateRuns<'_, O> {
    fn prepare(&mut self, candidate: usize) -> Result<()> {
        if self.plans[candidate].is_some() {
            return Ok(());
        }
        let SearchTask { spec, options, .. } = self.problem;
        let plan = Plan::with_configuration(spec, &self.candidates[candidate], options)?;
        if plan.workspace_bytes() > self.workspace.len() {
            self.workspace = Workspace::new(options.device, plan.workspace_bytes())?;
        }
        self.plans[candidate] = Some(plan);
        let Some(bound) = bound(&self.plans, &self.inputs, candidate) else {
            return Ok(());
        };
        O::prepare(&bound, &mut self.kept, &mut self.workspace)
    }

    fn run(&mut self, candidate: usize, times: usize) -> Result<()> {
        let Some(bound) = bound(&self.plans, &self.inputs, candidate) else {
            return Ok(());
        };
        for _ in 0..times {
            O::run(&bound, &self.kept, self.y.as_mut()?, &mut self.workspace)?;
        }
        self.workspace.synchronize()
    }

    fn verify(&mut self, candidate: usize) -> Result<bool> {
        self.run(candidate, 1)?;
        self.is_right(candidate)
    }
}
