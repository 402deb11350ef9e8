//! A row of a benchmark: what was run, how fast, how exact.

use super::measure::Limits;
use super::{Case, Description, Work, measure, stats::Stats};
use crate::machine::Machine;
use serde::Serialize;
use windrow::DType;

/// A measured case. Field names are the keys in JSON and the columns in CSV.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// `gelu`, `causal_conv1d`, `conv2d` or `conv3d`.
    pub op: &'static str,
    /// Name of the case: a layer, or the options that distinguish it.
    pub case: String,
    pub device: String,
    pub threads: usize,
    pub dtype: &'static str,
    pub algorithm: String,
    /// Algorithm and parameters.
    pub configuration: String,
    /// Sizes with `x` between them, and the filter's.
    pub shape: String,
    /// The plan's description of itself.
    pub plan: String,
    pub iterations: usize,
    pub ms_median: f64,
    pub ms_min: f64,
    pub ms_p25: f64,
    pub ms_p75: f64,
    pub ms_p95: f64,
    pub ms_max: f64,
    pub ms_mean: f64,
    pub ms_sd: f64,
    /// Standard deviation over mean.
    pub cv: f64,
    /// Counted as the direct algorithm's operations, whatever the algorithm does.
    pub gflops: Option<f64>,
    /// Bytes that have to be read and written, once each.
    pub gbps: Option<f64>,
    /// Rate over `peak`.
    pub peak_share: f64,
    /// f32 FMA rate of the machine in GFLOP/s, or GB/s of copying as many bytes in the same run.
    pub peak: f64,
    pub direct: &'static str,
    pub direct_ms_median: f64,
    /// Median time of the direct algorithm over that of this one.
    pub speedup: f64,
    pub max_abs_err: f64,
    pub max_rel_err: f64,
    pub rms_rel_err: f64,
    /// Elements outside the tolerance.
    pub error_count: usize,
    pub checked_elements: usize,
    pub elements: usize,
    /// Fewer elements were compared with the oracle than the output has.
    pub sampled: bool,
    /// Every compared element lies within the tolerance.
    pub verified: bool,
}

const RUN: usize = 0;
const DIRECT: usize = 1;
const COPY: usize = 2;

impl Row {
    /// Measures and checks a case.
    pub(crate) fn measure(
        case: &mut dyn Case,
        machine: &Machine,
        limits: &Limits,
    ) -> windrow::Result<Self> {
        let Description {
            op,
            name,
            device,
            dtype,
            algorithm,
            configuration,
            shape,
            plan,
            work,
            direct,
        } = case.describe();
        let contestants = match work {
            Work::Flops(_) => 2,
            Work::Bytes(_) => 3,
        };
        let samples = measure::interleave(contestants, limits, |i| match i {
            RUN => case.run(),
            DIRECT => case.run_direct(),
            COPY.. => case.copy(),
        })?;
        let comparison = case.compare()?;

        let of = |i: usize| Stats::of(&samples[i]).expect("every contestant has run");
        let (time, direct_time) = (of(RUN), of(DIRECT));
        let (gflops, gbps, peak) = match work {
            Work::Flops(flops) => (Some(flops / time.median / 1e9), None, machine.peak_gflops),
            Work::Bytes(bytes) => {
                (None, Some(bytes / time.median / 1e9), bytes / of(COPY).median / 1e9)
            }
        };
        let ms = |seconds: f64| seconds * 1e3;
        Ok(Row {
            op,
            case: name,
            device: device.to_string(),
            threads: machine.threads,
            dtype: DType::name(dtype),
            algorithm,
            configuration,
            shape,
            plan,
            iterations: time.count,
            ms_median: ms(time.median),
            ms_min: ms(time.min),
            ms_p25: ms(time.p25),
            ms_p75: ms(time.p75),
            ms_p95: ms(time.p95),
            ms_max: ms(time.max),
            ms_mean: ms(time.mean),
            ms_sd: ms(time.sd),
            cv: time.cv(),
            gflops,
            gbps,
            peak_share: gflops.or(gbps).unwrap_or(0.0) / peak,
            peak,
            direct,
            direct_ms_median: ms(direct_time.median),
            speedup: direct_time.median / time.median,
            max_abs_err: comparison.max_abs(),
            max_rel_err: comparison.max_rel(),
            rms_rel_err: comparison.rms_rel(),
            error_count: comparison.errors(),
            checked_elements: comparison.count(),
            elements: case.elements(),
            sampled: comparison.count() < case.elements(),
            // Of an output without elements there is nothing to compare.
            verified: comparison.passed() && (comparison.count() > 0 || case.elements() == 0),
        })
    }

    /// Rate and its unit.
    pub(crate) fn rate(&self) -> (f64, &'static str) {
        match (self.gflops, self.gbps) {
            (Some(gflops), _) => (gflops, "GFLOP/s"),
            (None, gbps) => (gbps.unwrap_or(0.0), "GB/s"),
        }
    }
}
