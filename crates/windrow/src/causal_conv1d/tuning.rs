//! The search among configurations of a causal convolution.

use super::reference::Reference;
use super::{
    CausalConv1d, CausalConv1dAlgorithm, CausalConv1dArgs, CausalConv1dConfiguration,
    CausalConv1dOutputs, CausalConv1dPlan, CausalConv1dSpec, comparison,
};
use crate::cpu::resolve_threads;
use crate::plan::{Measured, PlanInputs, Tuned, dense, joined};
use crate::verification::{Comparison, compare_parts};
use crate::{Device, Error, PlanOptions, Result, TensorDesc, TensorMut, TensorRef, Workspace};

impl CausalConv1dConfiguration {
    /// Rejects parameters that the algorithm does not have on the device of the options, or with which it cannot run.
    pub(super) fn check_parameters(&self, options: &PlanOptions) -> Result<()> {
        let task = self.channels.is_some() || self.tokens.is_some();
        let foreign = match options.device == Device::Cpu {
            true => task && self.algorithm != CausalConv1dAlgorithm::Direct,
            false => task || self.threads.is_some(),
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

/// The number of channels (for a dense convolution, output channels) that a search compares with the oracle at the
/// beginning, and as many at the end.
const SAMPLED_CHANNELS: usize = 4;

/// `bdl`, `bld`: dimensions by falling stride.
fn order(desc: &TensorDesc) -> &'static str {
    if desc.strides()[1] < desc.strides()[2] { "bld" } else { "bdl" }
}

impl Measured for CausalConv1d {
    type SearchData = ();

    fn y(spec: &CausalConv1dSpec) -> &TensorDesc {
        &spec.y
    }

    fn range(_: &'static str) -> (f64, f64) {
        (-1.0, 1.0)
    }

    fn run(
        bound: &PlanInputs<'_, CausalConv1d>,
        _: &(),
        y: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        bound.plan.run(&bound.args(), CausalConv1dOutputs::new(y), workspace)
    }

    fn compare(
        plan: &CausalConv1dPlan,
        args: &CausalConv1dArgs<'_>,
        y: &TensorRef<'_>,
    ) -> Result<Comparison> {
        comparison::compare_output(&plan.reference(args)?, y)
    }

    /// Compares the first and the last output channels.
    fn compare_ends(
        plan: &CausalConv1dPlan,
        args: &CausalConv1dArgs<'_>,
        y: &TensorRef<'_>,
        count: Option<usize>,
    ) -> Result<Comparison> {
        compare_parts(y.shape()[1], count.unwrap_or(SAMPLED_CHANNELS), |channels| {
            let mut some = *args;
            some.weight = args.weight.narrow(0, channels.clone())?;
            some.bias = args.bias.map(|bias| bias.narrow(0, channels.clone())).transpose()?;
            if !plan.problem.dense {
                some.x = args.x.narrow(1, channels.clone())?;
                let states = args.initial_states.map(|s| s.narrow(1, channels.clone()));
                some.initial_states = states.transpose()?;
            }
            let problem = super::Problem::new(some.x.desc(), some.weight.desc())?
                .with_dilation(plan.problem.dilation)?;
            let reference = Reference::new(problem, plan.spec.activation, &some)?;
            comparison::compare_output(&reference, &y.narrow(1, channels)?)
        })
    }
}

impl Tuned for CausalConv1d {
    /// The same spec with dense tensors. Each of them keeps the order of its dimensions in memory. Each row is one
    /// sequence that begins with zeros, and has one output.
    fn plain(spec: &CausalConv1dSpec, _: &PlanOptions) -> Result<CausalConv1dSpec> {
        let mut plain = CausalConv1dSpec::new(dense(&spec.x)?, dense(&spec.weight)?)?
            .with_output(dense(&spec.whole_output()?)?)
            .with_activation(spec.activation)
            .with_dilation(spec.dilation);
        plain.bias = spec.bias.as_ref().map(dense).transpose()?;
        Ok(plain)
    }

    fn key(spec: &CausalConv1dSpec, options: &PlanOptions) -> String {
        let CausalConv1dSpec { x, weight, y, activation, dilation, .. } = spec;
        let (dtype, activation) = (x.dtype, activation.name());
        let (shape, filter) = (joined(x.shape()), joined(weight.shape()));
        let (from, to) = (order(x), order(y));
        let mut key = format!("causal_conv1d {dtype} {shape} {filter} {from}-{to} {activation}");
        if *dilation > 1 {
            key += &format!(" dilation {dilation}");
        }
        match options.device == Device::Cpu {
            true => format!("{key} {} threads", resolve_threads(options.threads)),
            false => key,
        }
    }
}

#[cfg(all(test, feature = "tuning"))]
mod tests {
    use super::*;
    use crate::plan::{CandidateRuns, SearchTask};
    use crate::tuning::{Benchmark, Search, Tunable};
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
            let problem = SearchTask::<CausalConv1d>::new(&spec, &options(2)).unwrap();
            let all = problem.candidates().unwrap();
            assert_eq!(all[0], CausalConv1dPlan::new(&spec, &options(2)).unwrap().configuration());
            let mut runs = CandidateRuns::new(&problem, &all).unwrap();
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
