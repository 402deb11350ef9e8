use super::*;
use windrow_candle::{Conv2dParams, TensorExt};

/// n, c, h, w, k, filter, stride, padding, dilation, groups
const CASES: [[usize; 10]; 8] = [
    [2, 3, 9, 11, 5, 3, 1, 1, 1, 1],
    [1, 16, 20, 13, 24, 3, 1, 1, 1, 1],
    [1, 4, 12, 12, 6, 3, 2, 1, 1, 2],
    [2, 6, 10, 9, 6, 3, 1, 2, 2, 6],
    [1, 5, 7, 7, 4, 1, 1, 0, 1, 1],
    [1, 3, 17, 15, 8, 7, 2, 3, 1, 1],
    [1, 8, 11, 11, 8, 5, 3, 0, 2, 4],
    [1, 64, 14, 14, 32, 3, 1, 0, 1, 1],
];

fn params(case: &[usize; 10], activation: Activation) -> Conv2dParams {
    let [.., stride, padding, dilation, groups] = *case;
    let (stride, padding, dilation) = ([stride; 2], [padding; 2], [dilation; 2]);
    Conv2dParams::default()
        .with_stride(stride)
        .with_padding(padding)
        .with_dilation(dilation)
        .with_groups(groups)
        .with_activation(activation)
}

fn tensors(case: &[usize; 10], device: &Device) -> (Tensor, Tensor, Tensor) {
    let [n, c, h, w, k, filter, .., groups] = *case;
    let weight = numbers((k, c / groups, filter, filter), 2, device);
    (numbers((n, c, h, w), 1, device), weight, numbers(k, 3, device))
}

/// candle's convolution, bias and activation, on the CPU: through cuDNN its f32 is TF32.
pub(crate) fn plain(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    [stride, padding, dilation, groups]: [usize; 4],
    activation: Activation,
) -> Tensor {
    let host = |t: &Tensor| t.to_device(&Device::Cpu).unwrap();
    let y = host(x).conv2d(&host(weight), padding, stride, dilation, groups).unwrap();
    let y = match bias {
        Some(bias) => y.broadcast_add(&host(bias).reshape((1, (), 1, 1)).unwrap()).unwrap(),
        None => y,
    };
    candle_activation(&y, activation).unwrap().to_device(x.device()).unwrap()
}

#[test]
fn equals_candles() {
    for device in devices() {
        for (i, case) in CASES.iter().enumerate() {
            let activation = Activation::ALL[i % Activation::ALL.len()];
            let (x, weight, bias) = tensors(case, &device);
            let options = case[6..].try_into().unwrap();
            for dtype in DTYPES {
                let cast = |t: &Tensor| t.to_dtype(dtype).unwrap();
                let wide = |t: &Tensor| cast(t).to_dtype(DType::F32).unwrap();
                for bias in [None, Some(&bias)] {
                    let wide_bias = bias.map(wide);
                    let want =
                        plain(&wide(&x), &wide(&weight), wide_bias.as_ref(), options, activation);
                    let bias = bias.map(cast);
                    let params = params(case, activation);
                    let y =
                        cast(&x).windrow_conv2d(&cast(&weight), bias.as_ref(), &params).unwrap();
                    assert_close(&y, &cast(&want), tolerance(dtype));
                }
            }
        }
    }
}

#[test]
fn channels_last_and_other_views_are_read_in_place() {
    for device in devices() {
        let (x, weight, bias) = tensors(&CASES[1], &device);
        let want = plain(&x, &weight, Some(&bias), [1, 1, 1, 1], Activation::Relu);
        let params = params(&CASES[1], Activation::Relu);
        let last = x.permute((0, 2, 3, 1)).unwrap().contiguous().unwrap();
        let last = last.permute((0, 3, 1, 2)).unwrap();
        let y = last.windrow_conv2d(&weight, Some(&bias), &params).unwrap();
        assert!(y.permute((0, 2, 3, 1)).unwrap().is_contiguous());
        assert_close(&y, &want, 5e-6);

        let turned = x.transpose(2, 3).unwrap();
        let part = turned.narrow(2, 1, 10).unwrap();
        let want =
            plain(&part.contiguous().unwrap(), &weight, None, [1, 1, 1, 1], Activation::Relu);
        assert_close(&part.windrow_conv2d(&weight, None, &params).unwrap(), &want, 5e-6);
    }
}

#[test]
fn gradients_equal_candles() {
    let cases = CASES.iter().enumerate();
    for (device, (i, case)) in devices().iter().flat_map(|d| cases.clone().map(move |c| (d, c))) {
        let (x, weight, bias) = tensors(case, device);
        let [x, weight, bias] = [x, weight, bias].map(|t| Var::from_tensor(&t).unwrap());
        let options = case[6..].try_into().unwrap();
        for activation in [Activation::Identity, Activation::ALL[i % Activation::ALL.len()]] {
            let params = params(case, activation);
            let ours = x.windrow_conv2d(&weight, Some(&bias), &params).unwrap();
            let theirs = plain(&x, &weight, Some(&bias), options, activation);
            assert_same_gradients(&[&x, &weight, &bias], &ours, &theirs, 2e-5);
        }
    }
}

#[test]
fn gradients_of_views_and_of_sums() {
    let device = Device::Cpu;
    let (wide, weight) = (var((2, 9, 10, 8), 1, &device), var((5, 6, 3, 3), 2, &device));
    let x = wide.permute((0, 3, 1, 2)).unwrap().narrow(1, 1, 6).unwrap();
    let params = Conv2dParams::default().with_padding([1, 1]);
    let ours = x.windrow_conv2d(&weight, None, &params).unwrap();
    let x = x.contiguous().unwrap();
    let theirs = plain(&x, &weight, None, [1, 1, 1, 1], Activation::Identity);
    assert_same_gradients(&[&wide, &weight], &ours, &theirs, 2e-5);
    // Here the gradient of y is one number for all elements.
    let (ours, theirs) = (ours.sum_all().unwrap(), theirs.sum_all().unwrap());
    let (ours, theirs) = (ours.backward().unwrap(), theirs.backward().unwrap());
    assert_close(ours.get(&weight).unwrap(), theirs.get(&weight).unwrap(), 2e-5);
    // Only what needs a gradient gets one.
    let fixed = weight.as_detached_tensor();
    let y = wide.windrow_conv2d(&fixed.narrow(1, 0, 1).unwrap(), None, &params);
    assert!(y.is_err(), "9 channels are not 1");
}

#[test]
fn errors_name_what_is_wrong() {
    for device in devices() {
        let (x, weight, bias) = tensors(&CASES[0], &device);
        let params = Conv2dParams::default();
        let narrow = weight.narrow(1, 0, 2).unwrap();
        assert_error(x.windrow_conv2d(&narrow, None, &params), &["conv2d", "[5, 2, 3, 3]"]);
        let half = weight.to_dtype(DType::F16).unwrap();
        assert_error(x.windrow_conv2d(&half, None, &params), &["`w` is f16"]);
        let short = bias.narrow(0, 0, 4).unwrap();
        assert_error(x.windrow_conv2d(&weight, Some(&short), &params), &["`bias`", "[4]"]);
        let none = params.with_stride([0, 1]);
        assert_error(x.windrow_conv2d(&weight, None, &none), &["stride", "at least 1"]);
        let small = x.narrow(2, 0, 2).unwrap();
        assert_error(small.windrow_conv2d(&weight, None, &params), &["conv2d", "[5, 3, 3, 3]"]);
    }
}
