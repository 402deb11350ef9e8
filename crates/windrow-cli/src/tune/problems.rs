//! What is tuned: the cases of `windrow bench`.

use super::Tune;
use crate::bench::{by_x, causal_conv1d, conv2d, gelu};
use crate::failure::Failure;
use crate::operator::Operator;
use windrow::tuning::{Report, Search};
use windrow::{CausalConv1dPlan, Conv2dPlan, GeluPlan, PlanOptions, Result};

type Tuner = Box<dyn Fn(&Search) -> Result<Report>>;
type Measurer = Box<dyn Fn(&[&str], &Search) -> Result<Report>>;

/// One operator on one set of shapes.
pub(super) struct Problem {
    pub(super) op: &'static str,
    pub(super) name: String,
    pub(super) shape: String,
    /// Operations of the direct algorithm, or bytes, that make a rate of a time.
    pub(super) work: f64,
    pub(super) unit: &'static str,
    /// The algorithm whose threads per block are of interest.
    pub(super) blocked: &'static str,
    /// Searches and remembers.
    pub(super) tune: Tuner,
    /// Measures configurations, of which the first is the model's.
    pub(super) measure: Measurer,
}

pub(super) const GFLOPS: &str = "GFLOP/s";
const GBPS: &str = "GB/s";

/// Makes the two closures of a problem for a plan and its spec.
macro_rules! searches {
    ($plan:ty, $spec:expr, $options:expr) => {{
        let (spec, options): (_, PlanOptions) = ($spec, $options);
        let again = spec.clone();
        let measure = move |texts: &[&str], how: &Search| {
            let parsed: Result<Vec<_>> = texts.iter().map(|text| text.parse()).collect();
            <$plan>::measure(&again, &options, &parsed?, how)
        };
        (Box::new(move |how: &Search| <$plan>::tune(&spec, &options, how)), Box::new(measure))
    }};
}

pub(super) fn all(args: &Tune) -> std::result::Result<Vec<Problem>, Failure> {
    let options = args.options()?;
    let mut all = Vec::new();
    for operator in Operator::chosen(&args.operators) {
        for &dtype in &args.dtype {
            match operator {
                Operator::Conv2d => {
                    for layer in args.layers()? {
                        let mut spec = conv2d::spec(&layer, dtype)?;
                        spec.accuracy = args.accuracy;
                        let shape = conv2d::shape(&spec);
                        let work = spec.flops()?;
                        let (tune, measure) = searches!(Conv2dPlan, spec, options);
                        let (op, name, unit) = ("conv2d", layer.name, GFLOPS);
                        let blocked = "winograd_gemm_f2";
                        all.push(Problem { op, name, shape, work, unit, blocked, tune, measure });
                    }
                }
                Operator::Gelu => {
                    for spec in gelu::specs(dtype)? {
                        let (op, unit) = ("gelu", GBPS);
                        let all_algorithms = GeluPlan::algorithms(&spec, args.device);
                        let blocked = all_algorithms.first().map_or("", |a| a.name());
                        let name = format!("{} {dtype}", spec.approximate.name());
                        let shape = by_x(spec.x.shape());
                        let work = (spec.x.bytes() + spec.y.bytes()) as f64;
                        let (tune, measure) = searches!(GeluPlan, spec, options);
                        all.push(Problem { op, name, shape, work, unit, blocked, tune, measure });
                    }
                }
                Operator::CausalConv1d => {
                    for spec in causal_conv1d::specs(dtype, args.full)? {
                        let (op, unit, blocked) = ("causal_conv1d", GBPS, "direct");
                        let layout = causal_conv1d::layout(&spec);
                        let (name, shape) = (format!("{layout} {dtype}"), by_x(spec.x.shape()));
                        let work = (spec.x.bytes() + spec.y.bytes()) as f64;
                        let (tune, measure) = searches!(CausalConv1dPlan, spec, options);
                        all.push(Problem { op, name, shape, work, unit, blocked, tune, measure });
                    }
                }
            }
        }
    }
    Ok(all)
}
