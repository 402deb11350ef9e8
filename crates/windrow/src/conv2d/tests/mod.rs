//! Every algorithm on every instruction set against the oracle.

mod errors;
mod filters;
mod invariance;
mod layers;
mod no_data;
mod plans;
mod rounding;
mod strided;
mod transposed;

use super::*;
use crate::cpu::Isa;
use crate::verification::{Comparison, random};
use crate::{Activation, DType, Error, Layout, TensorDesc, TensorMut, Verify, bf16, f16};
use proptest::prelude::*;
use strided::{ARRANGEMENTS, Arrangement, Strided, layout};

/// A convolution that tests run.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub x: [usize; 4],
    /// k, r, s
    pub filter: [usize; 3],
    pub params: Conv2dParams,
    pub dtype: DType,
    pub bias: Option<DType>,
    pub forms: [Arrangement; 3],
}

/// The instruction sets that can run here; f16 has no AMX.
fn isas(dtype: DType) -> Vec<Isa> {
    if dtype == DType::F16 { Isa::available() } else { Isa::tested() }
}

impl Case {
    pub(super) fn spec(&self) -> Result<Conv2dSpec> {
        let [k, r, s] = self.filter;
        let desc = |shape, form| TensorDesc { dtype: self.dtype, layout: layout(&shape, form) };
        let x = desc(self.x, self.forms[0]);
        let w = desc([k, self.x[1] / self.params.groups.max(1), r, s], self.forms[1]);
        let mut spec = Conv2dSpec::new(x, w, &self.params)?;
        // Something is added to every second height.
        spec.residual = spec.y.shape()[2] % 2 == 1;
        spec.y = desc(spec.y.shape().try_into().unwrap(), self.forms[2]);
        if let Some(dtype) = self.bias {
            spec.bias = Some(TensorDesc::contiguous(dtype, &[k])?);
        }
        Ok(spec)
    }

    /// x, w, bias, residual
    pub(super) fn inputs(&self, spec: &Conv2dSpec) -> [Option<Strided>; 4] {
        let make = |desc: &TensorDesc, seed| Strided::new(desc.dtype, desc.layout, seed);
        let residual = spec.residual.then(|| make(&spec.y, 5));
        let bias = spec.bias.as_ref().map(|b| make(b, 3));
        [Some(make(&spec.x, 1)), Some(make(&spec.w, 2)), bias, residual]
    }

    /// Runs every algorithm on every instruction set that has it.
    pub(super) fn check(&self) {
        let Ok(spec) = self.spec() else { return };
        self.check_algorithms(&spec, Conv2dAlgorithm::ALL);
    }

    /// Runs direct sums on every instruction set.
    fn check_direct(&self) {
        self.check_algorithms(&self.spec().unwrap(), &[Conv2dAlgorithm::Direct]);
    }

    fn check_algorithms(&self, spec: &Conv2dSpec, algorithms: &[Conv2dAlgorithm]) {
        let [x, w, bias, residual] = self.inputs(spec);
        let (x, w) = (x.unwrap(), w.unwrap());
        let problem = spec.problem().unwrap();
        for &algorithm in algorithms {
            let mut want = None;
            for isa in isas(self.dtype) {
                if !cpu::algorithms(spec, &problem, isa).unwrap().contains(&algorithm) {
                    continue;
                }
                let mut results = Vec::new();
                for threads in [1, 3] {
                    let options =
                        PlanOptions { threads: threads.try_into().ok(), ..Default::default() };
                    let plan = Conv2dPlan::on_isa(
                        spec,
                        &Conv2dConfiguration::new(algorithm),
                        &options,
                        isa,
                    )
                    .unwrap();
                    let mut ws = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
                    // What an earlier use left in the workspace must not matter.
                    ws.take(plan.workspace_bytes()).unwrap().fill(0xff);
                    let mut y = Strided::new(self.dtype, spec.y.layout, 4);
                    let before = y.split().1;
                    let [bias, residual] =
                        [&bias, &residual].map(|t| t.as_ref().map(Strided::view));
                    let args =
                        Conv2dArgs::new(x.view(), w.view()).with_bias(bias).with_residual(residual);
                    plan.run(&args, y.view_mut(), &mut ws).unwrap();
                    let (result, outside) = y.split();
                    assert!(before == outside, "{algorithm} on {isa:?} wrote beside y: {self:?}");
                    if threads > 1 {
                        results.push(result);
                        continue;
                    }
                    let want = want.get_or_insert_with(|| {
                        let w = w.view().to_f64_vec().unwrap();
                        plan.expected(&args, &w).unwrap()
                    });
                    let (values, scale) = (&want.values, &want.scale);
                    let c = Comparison::of(&y.view(), values, scale, plan.tolerance()).unwrap();
                    assert!(
                        c.passed(),
                        "{algorithm} on {isa:?}: {c}\n{self:?}\n{}",
                        plan.explain()
                    );
                    results.push(result);
                }
                assert!(results[0] == results[1], "threads change {algorithm}: {self:?}");
            }
        }
    }
}

impl Case {
    /// Runs the three gradients on every instruction set.
    fn check_backward(&self) {
        let Ok(spec) = self.spec() else { return };
        let spec = Conv2dSpec { activation: Activation::Identity, ..spec };
        let problem = spec.problem().unwrap();
        let make = |desc: &TensorDesc, seed| Strided::new(desc.dtype, desc.layout, seed);
        let (x, w, dy) = (make(&spec.x, 1), make(&spec.w, 2), make(&spec.y, 3));
        let f64s = |t: &Strided| t.view().to_f64_vec().unwrap();
        let half = TensorDesc { dtype: self.dtype, layout: spec.w.layout };
        let bias = TensorDesc::contiguous(self.bias.unwrap_or(DType::F32), &[problem.k]).unwrap();
        let mut want = None;
        for isa in isas(self.dtype) {
            let mut results = Vec::new();
            for threads in [1, 3] {
                let options =
                    PlanOptions { threads: threads.try_into().ok(), ..Default::default() };
                let algorithm = Conv2dAlgorithm::Direct;
                let plan =
                    Conv2dPlan::on_isa(&spec, &Conv2dConfiguration::new(algorithm), &options, isa)
                        .unwrap();
                let bytes = plan.backward_workspace_bytes().unwrap();
                let mut ws = Workspace::new(Device::Cpu, bytes).unwrap();
                ws.take(bytes).unwrap().fill(0xff);
                let (mut dx, mut dw, mut db) = (make(&spec.x, 4), make(&half, 5), make(&bias, 6));
                let before = [dx.split().1, dw.split().1];
                plan.backward_data(&w.view(), &dy.view(), dx.view_mut(), &mut ws).unwrap();
                plan.backward_weight(&x.view(), &dy.view(), dw.view_mut(), &mut ws).unwrap();
                plan.backward_bias(&dy.view(), db.view_mut(), &mut ws).unwrap();
                assert!(before == [dx.split().1, dw.split().1], "wrote outside: {self:?}");
                let want = want.get_or_insert_with(|| {
                    let (x, w, dy) = (f64s(&x), f64s(&w), f64s(&dy));
                    [
                        plan.expected_data(&w, &dy).unwrap(),
                        plan.expected_weight(&x, &dy).unwrap(),
                        reference::backward_bias(&problem, &dy).unwrap(),
                    ]
                });
                let tolerances = plan.gradient_tolerances().unwrap();
                for (i, got) in [&dx, &dw, &db].into_iter().enumerate() {
                    let (values, scale) = (&want[i].values, &want[i].scale);
                    let c = Comparison::of(&got.view(), values, scale, tolerances[i]).unwrap();
                    assert!(c.passed(), "{} on {isa:?}: {c}\n{self:?}", ["dx", "dw", "db"][i]);
                }
                results.push([dx.split().0, dw.split().0, db.split().0]);
            }
            assert!(results[0] == results[1], "threads change a gradient: {self:?}");
        }
    }
}

fn activation() -> impl Strategy<Value = Activation> {
    prop::sample::select(Activation::ALL.to_vec())
}

fn form() -> impl Strategy<Value = Arrangement> {
    prop::sample::select(ARRANGEMENTS.to_vec())
}

prop_compose! {
    /// Small convolutions of every kind.
    pub(super) fn any_case()(
        (n, groups, c_group, k_group) in (0usize..3, 1usize..4, 0usize..6, 0usize..9),
        many in prop::option::weighted(0.2, 20usize..60),
        (h, w) in (0usize..12, 0usize..40),
        (r, s) in (1usize..5, 1usize..5),
        stride in [1usize..4, 1usize..4],
        padding in [0usize..5, 0usize..5],
        dilation in [1usize..4, 1usize..4],
        dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::BF16]),
        bias in 0usize..3,
        activation in activation(),
        forms in [form(), form(), form()],
    ) -> Case {
        // Now and then enough channels for several panels.
        let (c_group, k_group) = many.map_or((c_group, k_group), |m| (m, 61 - m));
        Case {
            x: [n, groups * c_group, h, w],
            filter: [groups * k_group, r, s],
            params: Conv2dParams { stride, padding, dilation, groups, activation, ..Default::default() },
            dtype,
            bias: [None, Some(dtype), Some(DType::F32)][bias],
            forms,
        }
    }
}

prop_compose! {
    /// Depthwise convolutions.
    fn depthwise()(case in any_case(), c in 1usize..70, multiplier in 1usize..3) -> Case {
        let [n, _, h, w] = case.x;
        let [_, r, s] = case.filter;
        let params = Conv2dParams { groups: c, ..case.params };
        Case { x: [n, c, h, w], filter: [c * multiplier, r, s], params, ..case }
    }
}

prop_compose! {
    /// The convolutions that Winograd's algorithm can compute.
    pub(super) fn three_by_three()(case in any_case(), c in 0usize..24, k in 0usize..40) -> Case {
        let [n, _, h, w] = case.x;
        let params = Conv2dParams { padding: case.params.padding, activation: case.params.activation, ..Default::default() };
        Case { x: [n, c, h, w], filter: [k, 3, 3], params, ..case }
    }
}

/// Rows of more pixels than some algorithms take at once.
#[test]
fn wide_images() {
    for (c, w, form) in
        [(3, 301, Arrangement::Nchw), (30, 75, Arrangement::Nchw), (30, 75, Arrangement::Gaps)]
    {
        let params = Conv2dParams { padding: [1, 0], ..Default::default() };
        let forms = [Arrangement::Nchw, Arrangement::Nchw, form];
        Case { x: [2, c, 6, w], filter: [7, 3, 3], params, dtype: DType::F32, bias: None, forms }
            .check();
    }
}

/// Direct sums of bf16 over blocks of more pixels than are summed at once: odd and even numbers of
/// channels and taps, filters larger than the padding, strides, dilation, gaps, every way to y.
#[test]
fn images_of_bf16() {
    let cases = [
        ([2, 3, 21, 50], [8, 3, 3], [1, 1], [0, 0], [1, 1]),
        ([1, 3, 33, 37], [9, 3, 3], [1, 1], [1, 1], [1, 1]),
        ([1, 4, 40, 112], [4, 5, 4], [2, 2], [2, 1], [1, 1]),
        ([1, 1, 30, 61], [5, 7, 7], [3, 2], [9, 3], [1, 2]),
        ([1, 1, 700, 3], [4, 3, 2], [1, 1], [0, 1], [5, 1]),
        ([1, 70, 14, 14], [6, 1, 1], [1, 1], [0, 0], [1, 1]),
        ([2, 2, 3, 1100], [12, 2, 1], [1, 3], [1, 2], [1, 1]),
    ];
    let activations = [Activation::Identity, Activation::Relu, Activation::Silu];
    for (i, (x, filter, stride, padding, dilation)) in cases.into_iter().enumerate() {
        for (activation, form) in
            activations.into_iter().zip([Arrangement::Nchw, Arrangement::Nchw, Arrangement::Gaps])
        {
            let params =
                Conv2dParams { stride, padding, dilation, activation, ..Default::default() };
            let forms = [ARRANGEMENTS[i % 4], Arrangement::Nchw, form];
            for forms in [forms, [Arrangement::Nchw, Arrangement::Gaps, Arrangement::Reversed]] {
                let bias = Some(DType::F32).filter(|_| i % 2 == 0);
                Case { x, filter, params, dtype: DType::BF16, bias, forms }.check();
            }
        }
    }
}

/// Tiles of bf16: images that are copied and others that are multiplied where they lie, channels and pixels that
/// fill tiles and blocks and others, several images, slabs and blocks of channels, every way to y.
#[test]
fn tiles_of_bf16() {
    let one = ([1, 1], [0, 0], [1, 1], 1);
    let cases = [
        ([2, 32, 9, 20], [33, 3, 3], ([1, 1], [1, 1], [1, 1], 1)),
        ([1, 40, 21, 17], [16, 3, 2], ([2, 1], [0, 1], [1, 1], 1)),
        ([3, 3, 30, 31], [20, 7, 7], ([2, 2], [3, 3], [1, 1], 1)),
        ([1, 64, 6, 70], [70, 1, 3], ([1, 3], [0, 2], [1, 2], 1)),
        ([2, 36, 7, 7], [48, 3, 3], ([1, 1], [2, 2], [3, 2], 2)),
        ([1, 17, 40, 3], [5, 2, 1], ([3, 1], [4, 0], [7, 1], 1)),
        ([1, 5, 3, 600], [3, 1, 2], ([1, 1], [0, 0], [1, 300], 1)),
        // Pixels that hold what all taps read, or those of a row: next to each other and not, in parts of rows.
        ([2, 3, 20, 40], [36, 3, 3], ([1, 1], [1, 1], [1, 1], 1)),
        ([1, 3, 13, 18], [32, 3, 3], ([2, 2], [1, 1], [1, 1], 1)),
        ([1, 2, 9, 40], [33, 3, 3], ([1, 1], [2, 2], [2, 2], 1)),
        ([2, 1, 12, 34], [64, 5, 5], ([1, 3], [4, 5], [2, 1], 1)),
        ([1, 8, 6, 20], [17, 2, 7], ([1, 1], [0, 3], [1, 1], 1)),
        ([1, 4, 5, 37], [8, 1, 2], ([3, 1], [1, 3], [3, 3], 1)),
        ([1, 3, 4, 1100], [5, 2, 3], ([1, 1], [1, 0], [1, 1], 1)),
        // Where they lie: rows that follow each other, gaps between them, as many pixels as are summed at once.
        ([2, 32, 5, 9], [40, 1, 1], one),
        ([1, 64, 4, 8], [7, 1, 1], one),
        ([1, 32, 3, 35], [33, 1, 1], ([2, 1], [0, 0], [1, 1], 1)),
        ([1, 64, 2, 67], [34, 1, 1], ([1, 2], [0, 0], [1, 1], 2)),
    ];
    let activations = [Activation::Relu, Activation::Silu];
    for (i, (x, filter, (stride, padding, dilation, groups))) in cases.into_iter().enumerate() {
        for (j, [from, to]) in
            ARRANGEMENTS.map(|x| ARRANGEMENTS.map(|y| [x, y])).concat().into_iter().enumerate()
        {
            let activation = activations[(i + j) % 2];
            let params = Conv2dParams {
                stride,
                padding,
                dilation,
                groups,
                activation,
                ..Default::default()
            };
            let bias = [Some(DType::F32), None][j % 2];
            let forms = [from, ARRANGEMENTS[i % 4], to];
            let case = Case { x, filter, params, dtype: DType::BF16, bias, forms };
            case.check_direct();
            case.check_backward();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_algorithm_agrees_with_the_oracle(case in any_case()) {
        case.check();
    }

    #[test]
    fn gradients_agree_with_the_oracle(case in any_case()) {
        case.check_backward();
    }

    #[test]
    fn three_by_three_gradients_agree_with_the_oracle(case in three_by_three()) {
        case.check_backward();
    }

    #[test]
    fn depthwise_gradients_agree_with_the_oracle(case in depthwise()) {
        case.check_backward();
    }

    #[test]
    fn three_by_three_agrees_with_the_oracle(case in three_by_three()) {
        case.check();
    }

    #[test]
    fn depthwise_agrees_with_the_oracle(case in depthwise()) {
        case.check();
    }
}
