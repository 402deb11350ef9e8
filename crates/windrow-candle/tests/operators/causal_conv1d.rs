use super::*;
use windrow_candle::{CausalConv1dOptions, TensorExt};

/// candle's way: zeros on the left, one group for each channel.
pub(crate) fn plain(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
) -> Tensor {
    let (d, width) = w.dims2().unwrap();
    let padded = x.pad_with_zeros(2, width - 1, 0).unwrap();
    let y = padded.conv1d(&w.unsqueeze(1).unwrap(), 0, 1, 1, d).unwrap();
    let y = match bias {
        Some(bias) => y.broadcast_add(&bias.reshape((1, d, 1)).unwrap()).unwrap(),
        None => y,
    };
    candle_activation(&y, activation).unwrap()
}

fn options<'a>(bias: Option<&'a Tensor>, activation: Activation) -> CausalConv1dOptions<'a> {
    CausalConv1dOptions { bias, activation, ..Default::default() }
}

#[test]
fn equals_candles_grouped_conv1d() {
    for device in devices() {
        let shapes =
            [(2, 5, 9, 4), (1, 3, 1, 4), (3, 8, 2, 3), (1, 1, 6, 1), (2, 33, 40, 2), (1, 2, 9, 7)];
        for (i, (b, d, l, width)) in shapes.into_iter().enumerate() {
            let activation = Activation::ALL[i % Activation::ALL.len()];
            for dtype in DTYPES {
                let cast = |t: Tensor| t.to_dtype(dtype).unwrap();
                let x = cast(numbers((b, d, l), 1, &device));
                let w = cast(numbers((d, width), 2, &device));
                let bias = cast(numbers(d, 3, &device));
                let f32 = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
                for bias in [None, Some(&bias)] {
                    let wide = bias.map(f32);
                    let want = plain(&f32(&x), &f32(&w), wide.as_ref(), activation);
                    let want = want.to_dtype(dtype).unwrap();
                    let y = x.causal_conv1d(&w, &options(bias, activation)).unwrap();
                    assert_close(&y, &want, tolerance(dtype));
                    // Weight and bias may be f32 beside half inputs.
                    let y = x.causal_conv1d(&f32(&w), &options(wide.as_ref(), activation)).unwrap();
                    assert_close(&y, &want, tolerance(dtype));
                }
            }
        }
    }
}

#[test]
fn dilation_is_that_of_candles_conv1d() {
    for device in devices() {
        let (x, w) = (var((2, 5, 19), 1, &device), var((5, 3), 2, &device));
        let padded = x.pad_with_zeros(2, 8, 0).unwrap();
        let want = padded.conv1d(&w.unsqueeze(1).unwrap(), 0, 1, 4, 5).unwrap();
        let options = CausalConv1dOptions { dilation: 4, ..Default::default() };
        let (y, states) = x.causal_conv1d_with_states(&w, &options).unwrap();
        assert_close(&y, &want, 5e-6);
        assert_close(&states, &x.narrow(2, 11, 8).unwrap(), 0.0);
        let bad = CausalConv1dOptions { dilation: 0, ..Default::default() };
        assert!(x.causal_conv1d(&w, &bad).unwrap_err().to_string().contains("dilation"));
    }
}

#[test]
fn channels_last_input_gives_channels_last_output() {
    for device in devices() {
        let (w, bias) = (numbers((6, 4), 2, &device), numbers(6, 3, &device));
        let x = numbers((2, 9, 6), 1, &device).transpose(1, 2).unwrap();
        let want = plain(&x.contiguous().unwrap(), &w, Some(&bias), Activation::Silu);
        let y = x.causal_conv1d(&w, &options(Some(&bias), Activation::Silu)).unwrap();
        assert!(y.transpose(1, 2).unwrap().is_contiguous());
        assert_close(&y, &want, 5e-6);
        // Part of a wider projection, as models have it.
        let wide =
            numbers((2, 9, 16), 1, &device).narrow(2, 5, 6).unwrap().transpose(1, 2).unwrap();
        let want = plain(&wide.contiguous().unwrap(), &w, None, Activation::Identity);
        let y = wide.causal_conv1d(&w, &options(None, Activation::Identity)).unwrap();
        assert_close(&y, &want, 5e-6);
    }
}

#[test]
fn dense_weight_equals_a_product_for_each_tap() {
    for device in devices() {
        let (x, w) = (var((2, 5, 9), 1, &device), var((7, 5, 3), 2, &device));
        let padded = x.pad_with_zeros(2, 2, 0).unwrap();
        // candle's own gradient of conv1d is wrong for more than one row.
        let want = (0..3)
            .map(|tap| {
                let w = w.narrow(2, tap, 1).unwrap().squeeze(2).unwrap().contiguous().unwrap();
                w.broadcast_matmul(&padded.narrow(2, tap, 9).unwrap().contiguous().unwrap())
                    .unwrap()
            })
            .reduce(|sum, product| sum.add(&product).unwrap())
            .unwrap();
        let y = x.causal_conv1d(&w, &CausalConv1dOptions::default()).unwrap();
        assert_close(&y, &want, 5e-6);
        // On the CPU: candle's convolution through cuDNN is as far from the result as one in TF32.
        let at_host = |t: &Tensor| t.to_device(&Device::Cpu).unwrap();
        let theirs = at_host(&padded).conv1d(&at_host(&w), 0, 1, 1, 1).unwrap();
        assert_close(&at_host(&y), &theirs, 5e-6);
        assert_same_gradients(&[&x, &w], &y, &want, 2e-5);
    }
}

#[test]
fn gradients_equal_those_of_the_plain_formulation() {
    for device in devices() {
        let (w, bias) = (var((6, 4), 2, &device), var(6, 3, &device));
        for &activation in Activation::ALL {
            let x = var((2, 6, 9), 1, &device);
            let ours = x.causal_conv1d(&w, &options(Some(&bias), activation)).unwrap();
            let theirs = plain(&x, &w, Some(&bias), activation);
            assert_same_gradients(&[&x, &w, &bias], &ours, &theirs, 2e-5);

            let last = var((2, 9, 6), 1, &device);
            let x = last.transpose(1, 2).unwrap();
            let ours = x.causal_conv1d(&w, &options(None, activation)).unwrap();
            let theirs = plain(&x.contiguous().unwrap(), &w, None, activation);
            assert_same_gradients(&[&last, &w], &ours, &theirs, 2e-5);
        }
    }
}

#[test]
fn gradients_flow_to_initial_states() {
    for device in devices() {
        let (x, w) = (var((2, 6, 5), 1, &device), var((6, 4), 2, &device));
        let (states, bias) = (var((2, 6, 3), 4, &device), var(6, 3, &device));
        let joined = Tensor::cat(&[states.as_tensor(), x.as_tensor()], 2).unwrap();
        let theirs = |bias: Option<&Tensor>| {
            plain(&joined, &w, bias, Activation::Silu).narrow(2, 3, 5).unwrap()
        };
        for (bias, vars) in
            [(None, vec![&x, &w, &states]), (Some(&bias), vec![&x, &w, &states, &bias])]
        {
            let bias = bias.map(|b| b.as_tensor());
            let options = CausalConv1dOptions {
                initial_states: Some(&states),
                ..options(bias, Activation::Silu)
            };
            let ours = x.causal_conv1d(&w, &options).unwrap();
            assert_close(&ours, &theirs(bias), 5e-6);
            assert_same_gradients(&vars, &ours, &theirs(bias), 2e-5);
        }
        // States that need a gradient beside a bias that needs none.
        let fixed = bias.as_detached_tensor();
        let given = options(Some(&fixed), Activation::Silu);
        let ours =
            x.causal_conv1d(&w, &CausalConv1dOptions { initial_states: Some(&states), ..given });
        assert_same_gradients(&[&x, &w, &states], &ours.unwrap(), &theirs(Some(&fixed)), 2e-5);
    }
}

#[test]
fn gradients_of_half_types_have_the_types_of_their_inputs() {
    for device in devices() {
        let half = |t: Tensor| Var::from_tensor(&t.to_dtype(DType::BF16).unwrap()).unwrap();
        let (x, w) = (half(numbers((2, 6, 9), 1, &device)), var((6, 4), 2, &device));
        let y = x.causal_conv1d(&w, &options(None, Activation::Silu)).unwrap();
        let gradients = y.sum_all().unwrap().backward().unwrap();
        assert_eq!(gradients.get(&x).unwrap().dtype(), DType::BF16);
        assert_eq!(gradients.get(&w).unwrap().dtype(), DType::F32);
    }
}

#[test]
fn errors_name_what_is_wrong() {
    for device in devices() {
        let (x, w) = (numbers((2, 6, 9), 1, &device), numbers((6, 4), 2, &device));
        let none = CausalConv1dOptions::default();
        let shapes = &["causal_conv1d", "weight", "[5, 4]"];
        assert_error(x.causal_conv1d(&numbers((5, 4), 1, &device), &none), shapes);
        assert_error(x.get(0).unwrap().causal_conv1d(&w, &none), &["`x`", "2 dimensions"]);
        let wrong = w.to_dtype(DType::F64).unwrap();
        assert_error(x.causal_conv1d(&wrong, &none), &["weight", "f64"]);
        let bias = numbers(5, 1, &device);
        let options = CausalConv1dOptions { bias: Some(&bias), ..none };
        assert_error(x.causal_conv1d(&w, &options), &["`bias`", "[5]"]);
        let numbers = Tensor::zeros((2, 9), DType::I32, &device).unwrap();
        let both =
            CausalConv1dOptions { seq_idx: Some(&numbers), cu_seqlens: Some(&numbers), ..none };
        assert_error(x.causal_conv1d(&w, &both), &["seq_idx", "cu_seqlens"]);
    }
}

#[test]
fn bad_boundaries_are_refused_before_anything_is_written() {
    let device = Device::Cpu;
    let (x, w) = (numbers((1, 6, 9), 1, &device), numbers((6, 4), 2, &device));
    let bad = Tensor::new(&[0i32, 5, 3, 9], &device).unwrap();
    let options = CausalConv1dOptions { cu_seqlens: Some(&bad), ..Default::default() };
    assert_error(x.causal_conv1d(&w, &options), &["`cu_seqlens`[2] is 3"]);
}
