use super::*;
use crate::conv2d::{Conv2dAlgorithm, Conv2dParams};
use crate::plan::{CandidateRuns, SearchTask};
use crate::tuning::{Benchmark, Search, Tunable, random_input};
use crate::{Accuracy, DType, Tile, Tuning, Verify};
use std::num::NonZeroUsize;
use std::time::Duration;

fn spec(n: usize, c: usize, k: usize, size: usize) -> Conv2dSpec {
    let x = TensorDesc::contiguous(DType::F32, &[n, c, size, size]).unwrap();
    let w = TensorDesc::contiguous(DType::F32, &[k, c, 3, 3]).unwrap();
    Conv2dSpec::new(x, w, &Conv2dParams::default()).unwrap()
}

fn options(threads: usize) -> PlanOptions {
    PlanOptions { threads: NonZeroUsize::new(threads), ..Default::default() }
}

#[test]
fn configurations_parse_back() {
    for spec in [spec(1, 3, 8, 9), spec(2, 40, 70, 20)] {
        for threads in [1, 2] {
            let all = Conv2dPlan::configurations(&spec, &options(threads)).unwrap();
            for c in &all {
                assert_eq!(c.to_string().parse::<Conv2dConfiguration>().unwrap(), *c);
                let plan = Conv2dPlan::with_configuration(&spec, c, &options(threads)).unwrap();
                assert_eq!(plan.configuration(), *c, "a complete one is taken as it is");
                assert!(plan.explain().contains(&c.to_string()), "{}", plan.explain());
            }
            let distinct = (0..all.len()).all(|i| !all[..i].contains(&all[i]));
            assert!(distinct && all.len() > 4, "{all:?}");
            let direct = Conv2dAlgorithm::Direct;
            assert!(all.iter().all(|c| c.algorithm != direct), "methods are named: {all:?}");
            let model = Conv2dPlan::new(&spec, &options(threads)).unwrap();
            assert_eq!(all[0], model.configuration());
        }
    }
}

/// A search runs on dense tensors, whose method may not compute the strides that were given.
#[test]
fn configurations_take_the_strides_that_are_given() {
    let x = Layout::with_order(&[1, 3, 20, 20], &[0, 2, 3, 1]).unwrap();
    let strides: Vec<isize> = x.strides().iter().map(|stride| 2 * stride).collect();
    let w = TensorDesc::contiguous(DType::F32, &[32, 3, 3, 3]).unwrap();
    for x in [x, Layout::strided(&[1, 3, 20, 20], &strides).unwrap()] {
        let x = TensorDesc::new(DType::F32, x);
        let spec = Conv2dSpec::new(x, w, &Conv2dParams::default()).unwrap();
        for c in Conv2dPlan::configurations(&spec, &options(2)).unwrap() {
            let plan = Conv2dPlan::with_configuration(&spec, &c, &options(2));
            assert!(plan.is_ok(), "{c}: {plan:?}");
        }
    }
}

#[test]
fn every_configuration_computes_the_same() {
    let spec = spec(2, 9, 40, 17);
    let options = PlanOptions { verify: Verify::On, ..options(3) };
    let x = random_input(1, spec.x, 0.0, 1.0).unwrap();
    let w = random_input(2, spec.w, -1.0, 1.0).unwrap();
    let args =
        Conv2dArgs { x: x.as_ref(), w: Weights::Raw(w.as_ref()), bias: None, residual: None };
    for c in Conv2dPlan::configurations(&spec, &options).unwrap() {
        let plan = Conv2dPlan::with_configuration(&spec, &c, &options).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        let mut y = crate::Tensor::uninitialised(spec.y).unwrap();
        plan.run(&args, y.as_mut(), &mut workspace).unwrap_or_else(|e| panic!("{c}: {e}"));
    }
}

#[test]
fn right_results_are_accepted_and_wrong_ones_are_not() {
    let x = TensorDesc::contiguous(DType::F32, &[2, 6, 9, 8]).unwrap();
    let w = TensorDesc::contiguous(DType::F32, &[4, 3, 3, 3]).unwrap();
    let grouped = Conv2dParams { groups: 2, ..Default::default() };
    for spec in [spec(3, 16, 24, 14), Conv2dSpec::new(x, w, &grouped).unwrap()] {
        let problem = SearchTask::<Conv2d>::new(&spec, &options(2)).unwrap();
        let candidates = problem.candidates().unwrap();
        let mut runs = CandidateRuns::new(&problem, &candidates).unwrap();
        for (candidate, configuration) in candidates.iter().enumerate() {
            assert!(!runs.is_right(candidate).unwrap(), "nothing has run");
            runs.prepare(candidate).unwrap();
            assert!(runs.verify(candidate).unwrap(), "{configuration}");
            // An element of the last image's last channel.
            let mut y = runs.y.as_mut().unwrap();
            let offset = y.desc().layout.len() - 1;
            // SAFETY: y is contiguous and ours.
            unsafe { *y.as_mut_ptr().cast::<f32>().add(offset) += 1.0 };
            assert!(!runs.is_right(candidate).unwrap(), "{configuration}");
        }
    }
}

#[test]
fn accuracy_limits_the_candidates() {
    let exact = Conv2dSpec { accuracy: Accuracy::Exact, ..spec(1, 32, 32, 12) };
    let all = Conv2dPlan::configurations(&exact, &options(1)).unwrap();
    assert!(all.iter().all(|c| !c.algorithm.is_winograd()), "{all:?}");
    let problem = SearchTask::<Conv2d>::new(&exact, &options(1)).unwrap();
    assert!(!problem.is_valid(&"winograd_gemm_f4".parse().unwrap()));
    assert!(problem.is_valid(&"direct threads=1".parse().unwrap()));
    assert!(!problem.is_valid(&"direct threads=2".parse().unwrap()), "more than the plan may use");
}

#[test]
fn foreign_parameters_are_refused() {
    let spec = spec(1, 8, 8, 8);
    for bad in [
        "direct tiles=4",
        "direct_planar tiles=4",
        "direct_runs",
        "im2col_gemm vectors=2",
        "winograd_gemm_f4 block=128",
        "winograd_row",
        "winograd_gemm_f4 tiles=8 block=100",
    ] {
        let configuration = bad.parse().unwrap();
        let plan = Conv2dPlan::with_configuration(&spec, &configuration, &options(2));
        assert!(matches!(plan, Err(Error::Unsupported { .. })), "{bad}");
    }
    for bad in ["", "direct tiles=0", "direct tile=4", "conv", "direct direct"] {
        assert!(bad.parse::<Conv2dConfiguration>().is_err(), "{bad}");
    }
    let zero = Conv2dConfiguration {
        tiles: Some(0),
        ..Conv2dConfiguration::new(Conv2dAlgorithm::WinogradGemm(Tile::F4))
    };
    assert!(Conv2dPlan::with_configuration(&spec, &zero, &options(2)).is_err());
}

#[test]
fn problems_are_told_apart_and_large_batches_are_not() {
    let key = |spec: &Conv2dSpec, threads| {
        SearchTask::<Conv2d>::new(spec, &options(threads)).unwrap().key()
    };
    let base = spec(2, 8, 16, 20);
    assert_eq!(key(&base, 2), "conv2d f32 2x8x20x20 16x8x3x3 nchw-nchw fp32 2 threads");
    let params = Conv2dParams { padding: [1, 1], stride: [2, 1], ..Default::default() };
    let more = Conv2dSpec::new(base.x, base.w, &params).unwrap();
    assert_eq!(
        key(&more, 1),
        "conv2d f32 2x8x20x20 16x8x3x3 stride 2x1 padding 1x1 nchw-nchw fp32 1 threads"
    );
    assert_ne!(key(&spec(3, 8, 16, 20), 2), key(&base, 2));
    assert_eq!(key(&spec(5000, 8, 16, 50), 2), key(&spec(4000, 8, 16, 50), 2));
}

#[test]
fn a_search_ends_with_a_plan_that_is_right() {
    let spec = spec(1, 16, 24, 14);
    let search = Tuning::Search { budget: Duration::from_millis(20) };
    let options = PlanOptions { tuning: search, ..options(2) };
    let plan = Conv2dPlan::new(&spec, &options).unwrap();
    let cached = PlanOptions { tuning: Tuning::Cached, ..options };
    let again = Conv2dPlan::new(&spec, &cached).unwrap();
    assert_eq!(plan.configuration(), again.configuration());
    let report = Conv2dPlan::tune(
        &spec,
        &options,
        &Search { budget: Duration::from_millis(20), exhaustive: false },
    );
    let report = report.unwrap();
    assert_eq!(report.candidates.len(), Conv2dPlan::configurations(&spec, &options).unwrap().len());
    assert!(report.winner().refused.is_none() && report.gain() > 0.9, "{report:?}");
}

#[test]
fn nothing_to_compute_is_nothing_to_tune() {
    let options =
        PlanOptions { tuning: Tuning::Search { budget: Duration::from_millis(1) }, ..options(1) };
    assert!(Conv2dPlan::new(&spec(0, 8, 8, 8), &options).is_ok());
}
