//! The search among configurations of GELU.

use super::{Gelu, GeluArgs, GeluConfiguration, GeluPlan, GeluSpec};
use crate::plan::{Measured, PlanInputs, Tuned, dense, joined};
use crate::verification::{Comparison, compare_parts};
use crate::{Device, Error, PlanOptions, Result, TensorDesc, TensorMut, TensorRef, Workspace};

const MAX_UNROLL: usize = 8;

impl GeluConfiguration {
    /// Rejects parameters that the algorithm does not have on the device of the options, or with which it cannot run.
    pub(super) fn check_parameters(&self, options: &PlanOptions) -> Result<()> {
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

/// The number of elements that a search compares with the oracle at the beginning of the output, and as many at its
/// end.
const SAMPLE: usize = 1 << 16;

impl Measured for Gelu {
    type SearchData = ();

    fn y(spec: &GeluSpec) -> &TensorDesc {
        &spec.y
    }

    fn range(_: &'static str) -> (f64, f64) {
        (-6.0, 6.0)
    }

    fn run(
        bound: &PlanInputs<'_, Gelu>,
        _: &(),
        y: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        bound.plan.run(&bound.args(), y, workspace)
    }

    fn compare(plan: &GeluPlan, args: &GeluArgs<'_>, y: &TensorRef<'_>) -> Result<Comparison> {
        plan.oracle_forward(&plan.oracle_inputs(args)?)?.compare(y, plan.tolerance())
    }

    /// Compares the first and the last slices along the first dimension.
    fn compare_ends(
        plan: &GeluPlan,
        args: &GeluArgs<'_>,
        y: &TensorRef<'_>,
        count: Option<usize>,
    ) -> Result<Comparison> {
        let shape = y.shape();
        let Some(&rows) = shape.first() else { return Self::compare(plan, args, y) };
        let sample = SAMPLE / shape[1..].iter().product::<usize>().max(1);
        compare_parts(rows, count.unwrap_or(sample.max(1)), |part| {
            // The bias of a tensor of one dimension is as long as that.
            let bias = match args.bias {
                Some(bias) if shape.len() == 1 => Some(bias.narrow(0, part.clone())?),
                bias => bias,
            };
            let gate = args.gate.map(|gate| gate.narrow(0, part.clone())).transpose()?;
            let args = GeluArgs { x: args.x.narrow(0, part.clone())?, bias, gate };
            Self::compare(plan, &args, &y.narrow(0, part.clone())?)
        })
    }
}

impl Tuned for Gelu {
    /// The same spec with dense tensors. Each of them keeps the order of its dimensions in memory.
    fn plain(spec: &GeluSpec, _: &PlanOptions) -> Result<GeluSpec> {
        let (x, y) = (dense(&spec.x)?, dense(&spec.y)?);
        let gate = spec.gate.as_ref().map(dense).transpose()?;
        let bias = spec.bias.map(|b| TensorDesc::contiguous(b.dtype, b.shape())).transpose()?;
        Ok(GeluSpec { x, y, bias, gate, ..*spec })
    }

    fn key(spec: &GeluSpec, _: &PlanOptions) -> String {
        let GeluSpec { x, y, bias, gate, approximate, half_math } = spec;
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

    /// False on the CPU, which has one algorithm.
    fn has_choice(device: Device) -> bool {
        device != Device::Cpu
    }
}

#[cfg(all(test, feature = "tuning"))]
mod tests {
    use super::*;
    use crate::gelu::GeluAlgorithm;
    use crate::plan::SearchTask;
    use crate::tuning::{Search, Tunable};
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
        let problem = SearchTask::<Gelu>::new(&spec(), &on_gpu()).unwrap();
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
        let problem = SearchTask::<Gelu>::new(&spec(), &on_gpu()).unwrap();
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
