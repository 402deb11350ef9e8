//! The problems to tune: the cases of `windrow bench`.

use super::Tune;
use crate::bench::{by_x, causal_conv1d, conv2d, gelu};
use crate::failure::Failure;
use crate::operator::Operator;
use windrow::internal::Tuned;
use windrow::tuning::{Report, Search};
use windrow::{CausalConv1d, Conv2d, Gelu, GeluPlan, Plan, PlanOptions, Result};

type Tuner = Box<dyn Fn(&Search) -> Result<Report>>;
type Measurer = Box<dyn Fn(&[&str], &Search) -> Result<Report>>;

/// An operator with one set of shapes.
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

impl Problem {
    fn new<O: Tuned>(
        spec: O::Spec,
        options: PlanOptions,
        (name, shape): (String, String),
        (work, unit): (f64, &'static str),
        blocked: &'static str,
    ) -> Self {
        let again = spec.clone();
        let measure = move |texts: &[&str], how: &Search| {
            let parsed: Result<Vec<_>> = texts.iter().map(|text| text.parse()).collect();
            Plan::<O>::measure(&again, &options, &parsed?, how)
        };
        let tune = Box::new(move |how: &Search| Plan::<O>::tune(&spec, &options, how));
        Problem { op: O::NAME, name, shape, work, unit, blocked, tune, measure: Box::new(measure) }
    }
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
                        let what = (layer.name, conv2d::shape(&spec));
                        let (work, blocked) = ((spec.flops()?, GFLOPS), "winograd_gemm_f2");
                        all.push(Problem::new::<Conv2d>(spec, options, what, work, blocked));
                    }
                }
                Operator::Gelu => {
                    for spec in gelu::specs(dtype)? {
                        let all_algorithms = GeluPlan::algorithms(&spec, args.device);
                        let blocked = all_algorithms.first().map_or("", |a| a.name());
                        let name = format!("{} {dtype}", spec.approximate.name());
                        let what = (name, by_x(spec.x.shape()));
                        let work = ((spec.x.bytes() + spec.y.bytes()) as f64, GBPS);
                        all.push(Problem::new::<Gelu>(spec, options, what, work, blocked));
                    }
                }
                Operator::CausalConv1d => {
                    for spec in causal_conv1d::specs(dtype, args.full)? {
                        let name = format!("{} {dtype}", causal_conv1d::layout(&spec));
                        let what = (name, by_x(spec.x.shape()));
                        let work = ((spec.x.bytes() + spec.y.bytes()) as f64, GBPS);
                        all.push(Problem::new::<CausalConv1d>(spec, options, what, work, "direct"));
                    }
                }
                // Its configurations are not searched.
                Operator::Conv3d => {}
            }
        }
    }
    Ok(all)
}
