//! `windrow verify`: every operator, algorithm, element type and layout against the f64 oracle.

mod cover;
mod pool;
mod random;

use crate::bench::progress;
use crate::failure::Failure;
use crate::machine::check_device;
use crate::operator::Operator;
use crate::print;
use crate::table::{Columns, scientific};
use random::Random;
use serde::Serialize;
use std::collections::HashMap;
use std::num::NonZeroUsize;
use windrow::Device;
use windrow::verify::{self, Case, Check, KernelLaunches};

/// Compare every operator with its f64 reference (the oracle); exit status 1 if one differs.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  windrow verify
  windrow verify conv2d --quick --device cuda:0
  windrow verify --json > report.json
  windrow verify --random 60 --seed 1")]
pub(crate) struct Verify {
    /// Operators to check [default: all]
    operators: Vec<Operator>,
    /// cpu, cuda:INDEX or hip:INDEX
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// Only two cases for each algorithm, element type and layout
    #[arg(long)]
    quick: bool,
    /// On a GPU: stop an operator's cases as soon as each of its kernels was launched
    #[arg(long, conflicts_with = "quick")]
    kernels: bool,
    /// Threads that run cases [default: one for each core]
    #[arg(long)]
    threads: Option<NonZeroUsize>,
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    random: Random,
}

impl Verify {
    /// The names of the operators to check.
    fn chosen(&self) -> Vec<&'static str> {
        Operator::chosen(&self.operators).into_iter().map(Operator::name).collect()
    }

    fn threads(&self) -> usize {
        let threads = self.threads.map(Ok).unwrap_or_else(std::thread::available_parallelism);
        threads.map_or(1, NonZeroUsize::get)
    }
}

/// The same comparison over all cases of an algorithm, element type and layout.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    op: &'static str,
    device: String,
    algorithm: String,
    dtype: &'static str,
    layout: String,
    /// The thing that was compared: the result, or an intermediate stage.
    check: &'static str,
    cases: usize,
    elements: usize,
    error_count: usize,
    max_abs_err: f64,
    max_rel_err: f64,
    rms_rel_err: f64,
    verified: bool,
}

/// A case that failed, and how.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct FailedCase {
    case: String,
    detail: String,
}

#[derive(Debug, Default, PartialEq, Serialize)]
struct Report {
    rows: Vec<Row>,
    failures: Vec<FailedCase>,
    /// The kernels that plans can launch on a GPU.
    kernels: Vec<Kernel>,
}

/// The number of launches of a kernel by the cases.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Kernel {
    kernel: String,
    launches: u64,
    /// `launched`, `missed`, `not listed`, `not for this device`, or `not asked for`.
    status: &'static str,
}

const CASES_IF_QUICK: usize = 2;
/// The number of failed cases that are listed below the tables; JSON has all.
const LISTED_FAILURES: usize = 20;

pub(crate) fn run(args: &Verify) -> Result<(), Failure> {
    check_device(args.device)?;
    if args.random.is_asked_for() {
        return random::run(args);
    }
    let chosen = args.chosen();
    let mut cases = verify::cases(args.device);
    // An operator's cases may name its part: causal_conv1d_update.
    cases.retain(|case| chosen.iter().any(|name| case.op.starts_with(name)));
    if args.quick {
        keep_few(&mut cases);
    }
    let covering = if args.kernels { cover::order(&mut cases, args.device) } else { 0 };
    if cases.is_empty() {
        return Err(Failure::Input(format!("nothing to verify on {}", args.device)));
    }
    let bar = progress(cases.len() as u64);
    let cases = cases.into_iter().enumerate().filter(|(i, case)| {
        !args.kernels || *i < covering || cover::has_open(args.device, case.op)
    });
    let done = pool::over(args.threads(), cases, |(_, mut case)| {
        bar.set_message(format!("{case:?}"));
        let result = (case.run)();
        bar.inc(1);
        // What its cases share is freed after the last of them.
        case.run = Box::new(|| Ok(Vec::new()));
        (case, result)
    });
    let (mut report, total) = (Report::default(), done.len());
    for (case, result) in done {
        report.add(args.device, &case, result);
    }
    bar.finish_and_clear();
    if args.device != Device::Cpu {
        let kernels = verify::kernel_launches(args.device)?;
        report.kernels = kernels.into_iter().map(|k| Kernel::new(k, &chosen)).collect();
    }

    let printed = print::out(match args.json {
        true => print::json(&report),
        false => report.tables(total),
    });
    report.verdict(total, args.quick)?;
    printed
}

impl Kernel {
    /// The report of kernels, with the operators that were checked.
    fn new(k: KernelLaunches, chosen: &[&str]) -> Self {
        // An operator may be a part of one: causal_conv1d_update.
        let asked = k.operator.is_none_or(|op| chosen.iter().any(|name| op.starts_with(name)));
        let status = match k.launches {
            _ if !k.listed => "not listed",
            1.. => "launched",
            _ if !k.for_device => "not for this device",
            _ if !asked => "not asked for",
            _ => "missed",
        };
        Kernel { kernel: k.kernel, launches: k.launches, status }
    }
}

/// For each case the number of earlier cases with the same algorithm, element type and layout.
fn places(cases: &[Case]) -> Vec<usize> {
    let mut seen = HashMap::new();
    let place = |c: &Case| {
        let count = seen.entry((c.op, c.algorithm.clone(), c.dtype, c.layout.clone())).or_insert(0);
        *count += 1;
        *count - 1
    };
    cases.iter().map(place).collect()
}

/// The first cases of each algorithm, element type and layout.
fn keep_few(cases: &mut Vec<Case>) {
    let mut places = places(cases).into_iter();
    cases.retain(|_| places.next().is_some_and(|place| place < CASES_IF_QUICK));
}

impl Report {
    fn add(&mut self, device: Device, case: &Case, result: windrow::Result<Vec<Check>>) {
        let fail = |detail: String| FailedCase { case: format!("{case:?}"), detail };
        let checks = match result {
            Ok(checks) => checks,
            Err(e) => return self.failures.push(fail(e.to_string())),
        };
        for Check { what, comparison: c, .. } in checks {
            if !c.passed() {
                self.failures.push(fail(format!("{what}: {c}")));
            }
            let row = self.row(device, case, what);
            row.cases += 1;
            row.elements += c.count();
            row.error_count += c.errors();
            row.max_abs_err = row.max_abs_err.max(c.max_abs());
            row.max_rel_err = row.max_rel_err.max(c.max_rel());
            row.rms_rel_err = row.rms_rel_err.max(c.rms_rel());
            row.verified &= c.passed();
        }
    }

    fn row(&mut self, device: Device, case: &Case, check: &'static str) -> &mut Row {
        let same = |r: &Row| {
            (r.op, &r.algorithm, r.dtype, &r.layout, r.check)
                == (case.op, &case.algorithm, case.dtype.name(), &case.layout, check)
        };
        let i = self.rows.iter().position(same).unwrap_or_else(|| {
            self.rows.push(Row {
                op: case.op,
                device: device.to_string(),
                algorithm: case.algorithm.clone(),
                dtype: case.dtype.name(),
                layout: case.layout.clone(),
                check,
                cases: 0,
                elements: 0,
                error_count: 0,
                max_abs_err: 0.0,
                max_rel_err: 0.0,
                rms_rel_err: 0.0,
                verified: true,
            });
            self.rows.len() - 1
        });
        &mut self.rows[i]
    }

    /// Kernels that no case launched, or that the list does not have.
    fn open_kernels(&self) -> impl Iterator<Item = &Kernel> {
        self.kernels.iter().filter(|k| ["missed", "not listed"].contains(&k.status))
    }

    /// An error if a case failed, or if a kernel of the operators was not checked; `quick` cases launch a part of them.
    fn verdict(&self, total: usize, quick: bool) -> Result<(), Failure> {
        let message = match (self.failures.len(), self.open_kernels().count()) {
            (0, 0) => return Ok(()),
            (0, _) if quick => return Ok(()),
            (0, n) => format!("{n} kernels were not checked or are not listed"),
            (differ, _) => format!("{differ} of {total} cases differ from the oracle"),
        };
        Err(Failure::Verification(message))
    }

    fn tables(&self, total: usize) -> String {
        let mut text = String::new();
        for rows in self.rows.chunk_by(|a, b| a.op == b.op) {
            let mut table = Columns::new(&[
                "algorithm",
                "type",
                "layout",
                "check",
                ">cases",
                ">wrong",
                ">elements",
                ">max abs",
                ">max rel",
                ">rms rel",
                "",
            ]);
            for r in rows {
                table.row(vec![
                    r.algorithm.clone(),
                    r.dtype.into(),
                    r.layout.clone(),
                    r.check.into(),
                    r.cases.to_string(),
                    r.error_count.to_string(),
                    r.elements.to_string(),
                    scientific(r.max_abs_err),
                    scientific(r.max_rel_err),
                    scientific(r.rms_rel_err),
                    if r.verified { "ok".into() } else { "FAIL".into() },
                ]);
            }
            text += &format!("{} on {}\n\n{table}\n", rows[0].op, rows[0].device);
        }
        for FailedCase { case, detail } in self.failures.iter().take(LISTED_FAILURES) {
            text += &format!("FAIL {case}\n     {detail}\n");
        }
        if !self.kernels.is_empty() {
            let count = |status| self.kernels.iter().filter(|k| k.status == status).count();
            text += &format!(
                "{} kernels launched and checked, {} not for this device\n",
                count("launched"),
                count("not for this device")
            );
            self.open_kernels().for_each(|k| text += &format!("     {}: {}\n", k.status, k.kernel));
        }
        let failed = self.failures.len();
        let elements: usize = self.rows.iter().map(|r| r.elements).sum();
        let errors: usize = self.rows.iter().map(|r| r.error_count).sum();
        text + &format!(
            "{total} cases, {failed} failures; {elements} elements, {errors} outside the tolerance\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use windrow::DType;
    use windrow::verify::Comparison;

    fn case(name: &str) -> Case {
        Case::new("gelu", "cpu", DType::F32, "contiguous", name, || Ok(Vec::new()))
    }

    fn check(got: f64) -> Check {
        let mut comparison = Comparison::new(DType::F32, 1e-6);
        comparison.add(got, 1.0, 1.0);
        Check::new("y", comparison)
    }

    #[test]
    fn cases_of_a_kind_share_a_row() {
        let mut report = Report::default();
        report.add(Device::Cpu, &case("a"), Ok(vec![check(1.0)]));
        report.add(Device::Cpu, &case("b"), Ok(vec![check(1.5)]));
        let [row] = &report.rows[..] else { panic!("{report:?}") };
        assert_eq!((row.cases, row.elements, row.error_count), (2, 2, 1));
        assert_eq!((row.max_abs_err, row.verified), (0.5, false));
        let text = report.tables(2);
        assert!(text.contains("FAIL gelu cpu f32 contiguous b"), "{text}");
        assert!(text.contains("2 cases, 1 failures; 2 elements, 1 outside"), "{text}");
    }

    #[test]
    fn a_case_that_cannot_run_has_failed() {
        let mut report = Report::default();
        let error = windrow::Error::unsupported("this", "of that");
        report.add(Device::Cpu, &case("a"), Err(error));
        assert_eq!(report.failures.len(), 1);
    }

    #[test]
    fn kernels_that_no_case_launched_are_named() {
        let kernel = |kernel: &str, operator, launches, for_device, listed| {
            let mut counted = KernelLaunches::new(kernel, launches);
            (counted.operator, counted.for_device, counted.listed) = (operator, for_device, listed);
            Kernel::new(counted, &["gelu", "causal_conv1d"])
        };
        let update = Some("causal_conv1d_update");
        let kernels = vec![
            kernel("a.cu a", Some("gelu"), 2, true, true),
            kernel("b.cu b MASK=1", update, 0, true, true),
            kernel("c.cu c", Some("gelu"), 0, false, true),
            kernel("d.cu d", None, 1, true, false),
            kernel("e.cu e", Some("conv2d"), 0, true, true),
        ];
        let mut report = Report { kernels, ..Report::default() };
        let text = report.tables(0);
        assert!(text.contains("1 kernels launched and checked, 1 not for this device"), "{text}");
        assert!(text.contains("missed: b.cu b MASK=1"), "{text}");
        assert!(text.contains("not listed: d.cu d"), "{text}");
        assert_eq!(report.open_kernels().count(), 2);
        assert!(report.verdict(1, false).is_err() && report.verdict(1, true).is_ok());
        report.kernels.retain(|k| !["missed", "not listed"].contains(&k.status));
        assert!(report.verdict(1, false).is_ok());
    }

    #[test]
    fn quick_keeps_two_of_a_kind() {
        let mut cases: Vec<_> = ["a", "b", "c"].into_iter().map(case).collect();
        cases.push(Case::new("gelu", "cpu", DType::F32, "strided", "d", || Ok(Vec::new())));
        keep_few(&mut cases);
        assert_eq!(cases.iter().map(|c| c.name.as_str()).collect::<String>(), "abd");
    }
}
