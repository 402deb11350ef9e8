use super::*;
use windrow_candle::TensorExt;

fn candle_gelu(x: &Tensor, approximate: Approximate) -> Tensor {
    candle_activation(x, Activation::Gelu(approximate)).unwrap()
}

const FORMS: [Approximate; 2] = [Approximate::None, Approximate::Tanh];

#[test]
fn equals_candles_for_every_type_and_layout() {
    for device in devices() {
        for approximate in FORMS {
            for dtype in DTYPES {
                let x = (numbers((3, 5, 7), 1, &device) * 3.0).unwrap().to_dtype(dtype).unwrap();
                for x in [x.clone(), x.transpose(0, 2).unwrap(), x.narrow(2, 2, 4).unwrap()] {
                    let exact = candle_gelu(&x.to_dtype(DType::F32).unwrap(), approximate);
                    let y = x.windrow_gelu(approximate).unwrap();
                    assert!(y.is_contiguous());
                    assert_close(&y, &exact.to_dtype(dtype).unwrap(), tolerance(dtype));
                }
            }
        }
    }
}

#[test]
fn empty_and_scalar_tensors() {
    for device in devices() {
        let empty = Tensor::zeros((2, 0, 3), DType::F32, &device).unwrap();
        assert_eq!(empty.windrow_gelu(Approximate::None).unwrap().dims(), [2, 0, 3]);
        let one = Tensor::new(1f32, &device).unwrap().windrow_gelu(Approximate::None).unwrap();
        assert!((one.to_scalar::<f32>().unwrap() - 0.841_344_8).abs() < 1e-6);
    }
}

#[test]
fn bias_and_gate() {
    for device in devices() {
        let (x, gate) = (numbers((4, 6), 1, &device), numbers((6, 4), 2, &device).t().unwrap());
        let bias = numbers(6, 3, &device);
        for approximate in FORMS {
            let shifted = candle_gelu(&x.broadcast_add(&bias).unwrap(), approximate);
            let y = x.windrow_gelu_with(Some(&bias), None, approximate).unwrap();
            assert_close(&y, &shifted, 5e-6);
            let y = x.windrow_gelu_with(Some(&bias), Some(&gate), approximate).unwrap();
            assert_close(&y, &shifted.mul(&gate).unwrap(), 5e-6);
            let y = x.windrow_gelu_with(None, Some(&gate), approximate).unwrap();
            assert_close(&y, &candle_gelu(&x, approximate).mul(&gate).unwrap(), 5e-6);
        }
    }
}

#[test]
fn gradients_of_all_inputs() {
    for device in devices() {
        let (x, gate) = (var((4, 6), 1, &device), var((4, 6), 2, &device));
        let bias = var(6, 3, &device);
        for approximate in FORMS {
            let plain = |x: &Tensor| candle_gelu(x, approximate);
            let ours = x.windrow_gelu(approximate).unwrap();
            assert_same_gradients(&[&x], &ours, &plain(&x), 2e-5);
            let ours = x.windrow_gelu_with(Some(&bias), Some(&gate), approximate).unwrap();
            let theirs = plain(&x.broadcast_add(&bias).unwrap()).mul(&gate).unwrap();
            assert_same_gradients(&[&x, &bias, &gate], &ours, &theirs, 2e-5);
            let strided = x.t().unwrap();
            let ours =
                strided.windrow_gelu_with(None, Some(&gate.t().unwrap()), approximate).unwrap();
            let theirs = plain(&strided).mul(&gate.t().unwrap()).unwrap();
            assert_same_gradients(&[&x, &gate], &ours, &theirs, 2e-5);
        }
        // The gradient of a sum is one number for all elements.
        let gradients = x.windrow_gelu(Approximate::None).unwrap().sum_all().unwrap().backward();
        assert_eq!(gradients.unwrap().get(&x).unwrap().dims(), [4, 6]);
    }
}

#[test]
fn in_place_writes_the_view_and_nothing_else() {
    for device in devices() {
        let base = numbers((4, 6), 1, &device);
        let (before, part) = (base.copy().unwrap(), base.narrow(1, 1, 3).unwrap());
        let (bias, gate) = (numbers(3, 2, &device), numbers((4, 3), 3, &device));
        let want = before.narrow(1, 1, 3).unwrap();
        let want = want.windrow_gelu_with(Some(&bias), Some(&gate), Approximate::Tanh).unwrap();
        part.windrow_gelu_in_place(Some(&bias), Some(&gate), Approximate::Tanh).unwrap();
        assert_close(&part, &want, 1e-6);
        for untouched in [0, 4, 5] {
            let (now, then) = (base.get_on_dim(1, untouched), before.get_on_dim(1, untouched));
            assert_eq!(values(&now.unwrap()), values(&then.unwrap()));
        }
    }
}

#[test]
fn errors_name_what_is_wrong() {
    for device in devices() {
        let form = Approximate::None;
        let x = numbers((4, 6), 1, &device);
        let long = Tensor::zeros((2, 2), DType::F64, &device).unwrap();
        assert_error(long.windrow_gelu(form), &["gelu", "`x` is f64", "f32, f16 or bf16"]);
        let bytes = Tensor::zeros((2, 2), DType::U8, &device).unwrap();
        assert_error(bytes.windrow_gelu(form), &["U8", "gelu"]);
        let nine = numbers(vec![1; 9], 1, &device);
        assert_error(nine.windrow_gelu(form), &["gelu", "9 dimensions"]);
        let gate = numbers((4, 5), 1, &device);
        assert_error(x.windrow_gelu_with(None, Some(&gate), form), &["`gate`", "[4, 5]", "[4, 6]"]);

        let tracked = var((4, 6), 1, &device);
        assert_error(tracked.windrow_gelu_in_place(None, None, form), &["gradient", "detached"]);
        let (left, right) = (x.narrow(1, 0, 3).unwrap(), x.narrow(1, 3, 3).unwrap());
        assert_error(left.windrow_gelu_in_place(None, Some(&right), form), &["storage", "`gate`"]);
        let repeated = numbers((1, 6), 1, &device).expand((4, 6)).unwrap();
        assert!(repeated.windrow_gelu_in_place(None, None, form).is_err());
    }
}
