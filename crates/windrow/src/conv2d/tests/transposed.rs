//! Transposed convolutions.

use super::*;
use crate::verification::random_tensor;

fn desc(shape: &[usize]) -> TensorDesc {
    TensorDesc::contiguous(DType::F32, shape).unwrap()
}

/// A transposed convolution spreads each of its inputs over the result.
#[test]
fn transposed_convolutions_spread_their_input() {
    let options = PlanOptions { verify: Verify::On, ..Default::default() };
    let (n, k, c, [oh, ow], [r, s]) = (2, 4, 6, [3, 5], [3, 2]);
    for (stride, padding, dilation, groups, output_padding, order) in [
        ([1, 1], [1, 1], [1, 1], 1, [0, 0], [0, 1, 2, 3]),
        ([2, 3], [1, 0], [1, 1], 2, [1, 2], [0, 1, 2, 3]),
        ([3, 1], [0, 2], [2, 3], 1, [2, 0], [0, 2, 3, 1]),
        ([1, 2], [3, 0], [4, 5], 1, [3, 4], [0, 1, 2, 3]),
    ] {
        let params = Conv2dParams { stride, padding, dilation, groups, ..Default::default() };
        let layout = Layout::with_order(&[n, k, oh, ow], &order).unwrap();
        let y = random_tensor(1, TensorDesc { dtype: DType::F32, layout }, -1.0, 1.0).unwrap();
        let w = random_tensor(2, desc(&[k, c / groups, r, s]), -1.0, 1.0).unwrap();
        let spec = Conv2dSpec::transposed(*y.desc(), *w.desc(), &params, output_padding).unwrap();
        let plan = Conv2dPlan::new(&spec, &options).unwrap();
        let bytes = plan.backward_workspace_bytes().unwrap();
        let mut workspace = Workspace::new(Device::Cpu, bytes).unwrap();
        let mut x = Tensor::uninitialised(spec.x).unwrap();
        let longer = (spec.y.shape() != y.shape()).then(|| with_zeros_behind(&y, spec.y.shape()));
        let given = longer.as_ref().unwrap_or(&y).as_ref();
        plan.backward_data(&w.as_ref(), &given, x.as_mut(), &mut workspace).unwrap();

        let covered = [0, 1].map(|d| {
            ([oh, ow][d] - 1) * stride[d] + dilation[d] * ([r, s][d] - 1) + 1 + output_padding[d]
        });
        let [h, width] = [0, 1].map(|d| covered[d] - 2 * padding[d]);
        assert_eq!(spec.x.shape(), [n, c, h, width]);
        let (y, w) = (y.as_ref().to_f64_vec().unwrap(), w.as_ref().to_f64_vec().unwrap());
        let mut want = vec![0.0; n * c * h * width];
        for (i, value) in y.iter().enumerate() {
            let [image, filter, row, column] =
                [i / (k * oh * ow), i / (oh * ow) % k, i / ow % oh, i % ow];
            let first = filter / (k / groups) * (c / groups);
            let taps = c / groups * r * s;
            for (j, tap) in w[filter * taps..][..taps].iter().enumerate() {
                let place = |at: usize, tap: usize, d: usize| {
                    (at * stride[d] + tap * dilation[d]).checked_sub(padding[d])
                };
                let channel = image * c + first + j / (r * s);
                match (place(row, j / s % r, 0), place(column, j % s, 1)) {
                    (Some(p), Some(q)) if p < h && q < width => {
                        want[(channel * h + p) * width + q] += value * tap;
                    }
                    _ => {}
                }
            }
        }
        for (got, want) in x.as_ref().to_f64_vec().unwrap().iter().zip(want) {
            assert!((got - want).abs() < 1e-5, "{got} instead of {want}, {params:?}");
        }
    }
}

/// An image in a larger one of zeros.
fn with_zeros_behind(y: &Tensor, shape: &[usize]) -> Tensor {
    let &[n, k, oh, ow] = y.shape() else { unreachable!("an image") };
    let [rows, columns] = [shape[2], shape[3]];
    let mut values = vec![0f32; n * k * rows * columns];
    for (i, &value) in y.to_vec::<f32>().unwrap().iter().enumerate() {
        values[(i / (oh * ow) * rows + i / ow % oh) * columns + i % ow] = value;
    }
    Tensor::from_slice(&values, shape).unwrap()
}

/// Transposed convolutions of no images, which may have no rows and columns either, in both directions.
#[test]
fn transposed_convolutions_of_no_images() {
    let w = random_tensor(1, desc(&[4, 6, 3, 3]), -1.0, 1.0).unwrap();
    for (y, stride, output_padding, x) in [
        ([0, 4, 4, 0], [1, 1], [0, 0], [0, 6, 6, 2]),
        ([0, 4, 0, 4], [2, 2], [1, 1], [0, 6, 2, 10]),
        ([0, 4, 0, 0], [2, 2], [0, 1], [0, 6, 1, 2]),
        ([0, 4, 5, 5], [1, 1], [0, 0], [0, 6, 7, 7]),
    ] {
        let params = Conv2dParams { stride, ..Default::default() };
        let spec = Conv2dSpec::transposed(desc(&y), *w.desc(), &params, output_padding).unwrap();
        assert_eq!(spec.x.shape(), x);
        let algorithms = Conv2dPlan::algorithms(&spec, Device::Cpu);
        assert!(!algorithms.is_empty());
        for algorithm in algorithms {
            let plan =
                Conv2dPlan::with_algorithm(&spec, algorithm, &PlanOptions::default()).unwrap();
            let bytes = plan.workspace_bytes().max(plan.backward_workspace_bytes().unwrap());
            let mut workspace = Workspace::new(Device::Cpu, bytes).unwrap();
            let mut x = Tensor::uninitialised(spec.x).unwrap();
            let mut y = Tensor::uninitialised(spec.y).unwrap();
            plan.backward_data(&w.as_ref(), &y.as_ref(), x.as_mut(), &mut workspace).unwrap();
            let args = Conv2dArgs::new(x.as_ref(), w.as_ref());
            plan.run(&args, y.as_mut(), &mut workspace).unwrap();
            let mut dw = random_tensor(2, spec.w, 1.0, 2.0).unwrap();
            plan.backward_weight(&x.as_ref(), &y.as_ref(), dw.as_mut(), &mut workspace).unwrap();
            assert!(dw.to_vec::<f32>().unwrap().iter().all(|&dw| dw == 0.0), "{algorithm}");
        }
    }
}
