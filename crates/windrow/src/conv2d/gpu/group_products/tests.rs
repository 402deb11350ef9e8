use super::*;
use crate::conv2d::Conv2dParams;
use crate::{Activation, Approximate, Layout};

/// A convolution of `groups` groups with `c` and `k` channels each.
fn spec(
    dtype: DType,
    [n, groups, c, k]: [usize; 4],
    size: usize,
    taps: usize,
    stride: usize,
) -> (Conv2dSpec, Problem) {
    let layout = Layout::with_order(&[n, groups * c, size, size], &[0, 2, 3, 1]).unwrap();
    let w = TensorDesc::contiguous(dtype, &[groups * k, c, taps, taps]).unwrap();
    let params = Conv2dParams {
        padding: [taps / 2; 2],
        stride: [stride; 2],
        groups,
        accuracy: Accuracy::Tf32,
        activation: Activation::Gelu(Approximate::None),
        ..Default::default()
    };
    let spec = Conv2dSpec::new(TensorDesc { dtype, layout }, w, &params).unwrap();
    let problem = spec.problem().unwrap();
    (spec, problem)
}

fn chosen(dtype: DType, sizes: [usize; 4], size: usize, stride: usize) -> [usize; 5] {
    let (spec, p) = spec(dtype, sizes, size, 3, stride);
    let tile = Tile::choose(132, &spec, &p).unwrap();
    [tile.images, tile.rows, tile.columns, tile.together, tile.groups]
}

#[test]
fn tiles_fit_shared_memory_and_fill_the_gpu() {
    assert_eq!(chosen(DType::F32, [64, 2, 24, 24], 56, 1), [1, 14, 14, 7, 2]);
    assert_eq!(chosen(DType::F32, [64, 14, 24, 24], 14, 1), [1, 14, 14, 7, 2]);
    assert_eq!(chosen(DType::F16, [64, 14, 24, 24], 14, 1), [1, 14, 14, 7, 2]);
    assert_eq!(chosen(DType::F16, [64, 37, 24, 24], 7, 1), [2, 7, 7, 7, 4]);
    assert_eq!(chosen(DType::F32, [64, 14, 24, 24], 28, 2), [1, 14, 7, 2, 1]);
    assert_eq!(chosen(DType::F32, [1, 14, 24, 24], 14, 1), [1, 14, 1, 1, 1]);
    assert_eq!(chosen(DType::BF16, [64, 4, 64, 64], 14, 1), [1, 14, 2, 2, 2]);
}

#[test]
fn domain() {
    let on = |spec: &Conv2dSpec, p: &Problem| {
        let task = Task::on_h200(spec, p).by(Conv2dAlgorithm::ImplicitGemm);
        GroupProductsMethod.computes(&task)
    };
    let with = |sizes: [usize; 4]| {
        let (spec, p) = spec(DType::F16, sizes, 14, 3, 1);
        on(&spec, &p)
    };
    assert!(with([2, 2, 8, 8]) && with([2, 3, 64, 8]) && with([2, 3, 24, 40]));
    assert!(!with([2, 1, 24, 24]) && !with([2, 2, 12, 16]) && !with([2, 2, 16, 4]));
    assert!(!with([2, 2, 72, 8]) && !with([2, 2, 8, 72]));
    let (mut tf32, p) = spec(DType::F32, [2, 2, 24, 24], 14, 3, 1);
    assert!(on(&tf32, &p));
    tf32.accuracy = Accuracy::Fp32;
    assert!(!on(&tf32, &p));
    let (far, p) = spec(DType::F16, [2, 2, 24, 24], 14, 3, 1);
    let p = Problem { dilation: [1 << 20; 2], ..p };
    assert!(!on(&far, &p), "a tile does not fit");
    let rows =
        TensorDesc { dtype: DType::F16, layout: Layout::contiguous(&[2, 48, 14, 14]).unwrap() };
    let (last, p) = spec(DType::F16, [2, 2, 24, 24], 14, 3, 1);
    assert!(!on(&Conv2dSpec { x: rows, ..last }, &p));
}

#[test]
fn leads_where_the_accuracy_allows_it() {
    let leads = |stride, c, accuracy| {
        let (mut spec, p) = spec(DType::F16, [8, 4, c, 24], 14, 3, stride);
        spec.accuracy = accuracy;
        GroupProductsMethod.leads(&Task::on_h200(&spec, &p))
    };
    assert!(leads(1, 8, Accuracy::Fp32) && leads(2, 16, Accuracy::Half));
    assert!(!leads(1, 8, Accuracy::Exact), "sums on tensor cores");
    assert!(!leads(2, 8, Accuracy::Fp32), "cuDNN may be faster");
}

#[test]
fn kernels_compile_without_spills() {
    let mut kernels = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (sizes, size, taps, stride) in [
            ([64, 2, 24, 24], 56, 3, 1),
            ([64, 5, 24, 24], 56, 3, 2),
            ([64, 37, 24, 24], 7, 3, 1),
            ([64, 4, 8, 16], 28, 1, 1),
            ([2, 4, 32, 32], 28, 5, 1),
            ([64, 4, 64, 64], 14, 3, 1),
        ] {
            let (spec, p) = spec(dtype, sizes, size, taps, stride);
            let tile = Tile::choose(132, &spec, &p).unwrap();
            kernels.push(filter_kernel(&spec, &p));
            kernels.push(product(&spec, &p, tile, true));
            kernels.push(product(&spec.clone().with_residual(true), &p, tile, size % 8 == 0));
            kernels.push(product(&spec.with_activation(Activation::Relu), &p, tile, true));
        }
    }
    crate::gpu::compile_tests::check_compiles_in_turn(&kernels);
}
