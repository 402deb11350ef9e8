use super::conv2d::plain;
use super::*;
use candle_core::{Module, ModuleT};
use candle_nn::{BatchNorm, Conv2dConfig, VarBuilder, VarMap};
use std::collections::HashMap;
use windrow_candle::{TensorExt, nn};

const CONFIG: Conv2dConfig =
    Conv2dConfig { padding: 1, stride: 1, dilation: 1, groups: 1, cudnn_fwd_algo: None };

fn builder(device: &Device) -> VarBuilder<'static> {
    let tensors = HashMap::from([
        ("conv.weight".to_string(), numbers((8, 4, 3, 3), 1, device)),
        ("conv.bias".to_string(), numbers(8, 2, device)),
        ("short.weight".to_string(), numbers((6, 1, 4), 3, device)),
        ("short.bias".to_string(), numbers(6, 4, device)),
    ]);
    VarBuilder::from_tensors(tensors, DType::F32, device)
}

#[test]
fn conv2d_takes_the_place_of_candles() {
    // On the CPU: through cuDNN candle's f32 is TF32.
    let host = builder(&Device::Cpu).pp("conv");
    let theirs = candle_nn::conv2d(4, 8, 3, CONFIG, host.clone()).unwrap();
    let without_bias = candle_nn::conv2d_no_bias(4, 8, 3, CONFIG, host).unwrap();
    for device in devices() {
        let want = |layer: &candle_nn::Conv2d, x: &Tensor| {
            let y = layer.forward(&x.to_device(&Device::Cpu).unwrap()).unwrap();
            y.to_device(&device).unwrap()
        };
        let vb = builder(&device).pp("conv");
        let ours = nn::conv2d(4, 8, 3, CONFIG, vb.clone()).unwrap();
        assert_eq!(ours.config(), theirs.config());
        // More layouts than are remembered, some of them twice.
        for size in [9, 10, 9, 12, 13, 14, 15, 10, 9] {
            let x = numbers((2, 4, size, size), 5, &device);
            assert_close(&ours.forward(&x).unwrap(), &want(&theirs, &x), 5e-6);
        }
        let x = numbers((2, 4, 9, 9), 5, &device);
        let relu = ours.clone().with_activation(Activation::Relu);
        assert_close(&relu.forward(&x).unwrap(), &want(&theirs, &x).relu().unwrap(), 5e-6);
        let exact = ours.with_accuracy(windrow_candle::Accuracy::Exact);
        assert_close(&exact.forward(&x).unwrap(), &want(&theirs, &x), 5e-6);
        let bare = nn::conv2d_no_bias(4, 8, 3, CONFIG, vb).unwrap();
        assert!(bare.bias().is_none());
        assert_close(&bare.forward(&x).unwrap(), &want(&without_bias, &x), 5e-6);
    }
}

#[test]
fn a_packed_filter_lets_gradients_through_to_the_input() {
    let device = Device::Cpu;
    let conv = nn::conv2d(4, 8, 3, CONFIG, builder(&device).pp("conv")).unwrap();
    let conv = conv.with_activation(Activation::Silu);
    let x = var((2, 4, 9, 9), 5, &device);
    let theirs = plain(&x, conv.weight(), conv.bias(), [1, 1, 1, 1], Activation::Silu);
    assert_same_gradients(&[&x], &conv.forward(&x).unwrap(), &theirs, 2e-5);
}

#[test]
fn a_filter_that_is_trained_is_used_as_it_is_now() {
    for device in devices() {
        let variables = VarMap::new();
        let vb = VarBuilder::from_varmap(&variables, DType::F32, &device);
        let conv = nn::conv2d(4, 8, 3, CONFIG, vb).unwrap();
        let x = numbers((2, 4, 9, 9), 5, &device);
        let before = conv.forward(&x).unwrap();
        for var in variables.all_vars() {
            var.set(&(var.as_tensor() * 2.0).unwrap()).unwrap();
        }
        assert_close(&conv.forward(&x).unwrap(), &(before * 2.0).unwrap(), 5e-6);
    }
}

/// candle writes into the storage of a variable, which tensors that are none may share.
#[test]
fn a_filter_that_shares_storage_with_a_variable_is_used_as_it_is_now() {
    for device in devices() {
        let weight = var((8, 4, 3, 3), 1, &device);
        let conv = nn::Conv2d::new(weight.as_detached_tensor(), None, CONFIG);
        let x = numbers((2, 4, 9, 9), 5, &device);
        let before = conv.forward(&x).unwrap();
        assert_close(&conv.forward(&x).unwrap(), &before, 0.0);
        weight.set(&(weight.as_tensor() * 2.0).unwrap()).unwrap();
        assert_close(&conv.forward(&x).unwrap(), &(&before * 2.0).unwrap(), 5e-6);
        // The same through another alias, by an operator that writes in place.
        weight.as_detached_tensor().windrow_gelu_in_place(None, None, Approximate::None).unwrap();
        let want = plain(&x, &weight.as_detached_tensor(), None, [1; 4], Activation::Identity);
        assert_close(&conv.forward(&x).unwrap(), &want, 5e-6);
        // A single element.
        weight.slice_set(&numbers((1, 4, 3, 3), 9, &device), 0, 3).unwrap();
        let want = plain(&x, &weight.as_detached_tensor(), None, [1; 4], Activation::Identity);
        assert_close(&conv.forward(&x).unwrap(), &want, 5e-6);
    }
}

#[test]
fn a_frozen_filter_is_not_looked_at_until_it_is_thawed() {
    let device = Device::Cpu;
    for weight in [var((8, 4, 3, 3), 1, &device), var((8, 4, 3, 3), 2, &device)] {
        let detached = nn::Conv2d::new(weight.as_detached_tensor(), None, CONFIG);
        for conv in [detached, nn::Conv2d::new(weight.as_tensor().clone(), None, CONFIG)] {
            let x = numbers((2, 4, 9, 9), 5, &device);
            conv.forward(&x).unwrap();
            weight.set(&(weight.as_tensor() * 2.0).unwrap()).unwrap();
            // What was packed before is compared once more.
            conv.freeze();
            let frozen = conv.forward(&x).unwrap();
            let want = plain(&x, &weight.as_detached_tensor(), None, [1; 4], Activation::Identity);
            assert_close(&frozen, &want, 5e-6);
            weight.set(&(weight.as_tensor() * 2.0).unwrap()).unwrap();
            assert_close(&conv.clone().forward(&x).unwrap(), &frozen, 0.0);
            conv.unfreeze();
            assert_close(&conv.forward(&x).unwrap(), &(frozen * 2.0).unwrap(), 5e-6);
        }
    }
}

#[test]
fn threads_may_make_the_first_call_together() {
    for device in devices() {
        let conv = nn::conv2d(4, 8, 3, CONFIG, builder(&device).pp("conv")).unwrap();
        let x = numbers((2, 4, 9, 9), 5, &device);
        let want = plain(&x, conv.weight(), conv.bias(), [1; 4], Activation::Identity);
        let start = std::sync::Barrier::new(32);
        std::thread::scope(|scope| {
            for _ in 0..32 {
                let (conv, x, want, start) = (&conv, &x, &want, &start);
                scope.spawn(move || {
                    start.wait();
                    (0..4).for_each(|_| assert_close(&conv.forward(x).unwrap(), want, 5e-6));
                });
            }
        });
    }
}

/// Gradients through a layer that has made its plans before, and through one that is frozen.
#[test]
fn gradients_are_right_on_every_step() {
    let device = Device::Cpu;
    let (weight, x) = (var((8, 4, 3, 3), 1, &device), var((2, 4, 9, 9), 5, &device));
    let conv = nn::Conv2d::new(weight.as_tensor().clone(), None, CONFIG);
    for step in 0..4 {
        if step == 3 {
            conv.freeze();
        }
        let ours = conv.forward(&x).unwrap();
        let theirs = plain(&x, &weight, None, [1; 4], Activation::Identity);
        assert_close(&ours, &theirs, 5e-6);
        assert_same_gradients(&[&x, &weight], &ours, &theirs, 2e-5);
        if step < 2 {
            weight.set(&(weight.as_tensor() * 1.5).unwrap()).unwrap();
        }
    }
}

#[test]
fn batch_norm_is_absorbed() {
    let device = Device::Cpu;
    let (mean, scale) = (numbers(8, 6, &device), numbers(8, 7, &device));
    let variance = numbers(8, 8, &device).sqr().unwrap();
    let bn = BatchNorm::new(8, mean.clone(), variance, scale, mean, 1e-3).unwrap();
    let conv = nn::conv2d(4, 8, 3, CONFIG, builder(&device).pp("conv")).unwrap();
    let x = numbers((2, 4, 9, 9), 5, &device);
    let want = bn.forward_t(&conv.forward(&x).unwrap(), false);
    assert_close(&conv.absorb_bn(&bn).unwrap().forward(&x).unwrap(), &want.unwrap(), 2e-5);
    assert_error(conv.with_activation(Activation::Relu).absorb_bn(&bn), &["activation"]);
}

#[test]
fn prefill_and_steps_equal_the_whole_sequence() {
    for device in devices() {
        let vb = builder(&device).pp("short");
        let conv = nn::causal_conv1d(6, 4, Activation::Silu, vb.clone()).unwrap();
        let x = numbers((2, 6, 9), 5, &device);
        let whole = conv.forward(&x).unwrap();
        let plain = super::causal_conv1d::plain(&x, conv.weight(), conv.bias(), Activation::Silu);
        assert_close(&whole, &plain, 5e-6);
        let (start, state) = conv.prefill(&x.narrow(2, 0, 5).unwrap(), None).unwrap();
        let mut parts = vec![start];
        for t in 5..9 {
            parts.push(conv.step(&x.narrow(2, t, 1).unwrap(), &state).unwrap());
        }
        assert_close(&Tensor::cat(&parts, 2).unwrap(), &whole, 5e-6);
        let zeros = conv.zero_state(2, DType::F32, &device).unwrap();
        let (again, _) = conv.prefill(&x, Some(&zeros)).unwrap();
        assert_close(&again, &whole, 1e-6);
        let bare = nn::causal_conv1d_no_bias(6, 4, Activation::Silu, vb).unwrap();
        assert!(bare.bias().is_none());
    }
}

#[test]
fn a_weight_of_another_form_is_refused() {
    let dense = numbers((6, 2, 4), 1, &Device::Cpu);
    let layer = nn::CausalConv1d::new(dense, None, Activation::Identity);
    assert_error(layer, &["weight", "[6, 2, 4]", "[d, 1, width]"]);
}

#[test]
fn activations_are_read_from_the_same_configuration() {
    for device in devices() {
        let x = (numbers((4, 6), 1, &device) * 2.0).unwrap();
        for name in ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "mish"] {
            let text = format!("\"{name}\"");
            let theirs: candle_nn::Activation = serde_json::from_str(&text).unwrap();
            let ours: nn::Activation = serde_json::from_str(&text).unwrap();
            assert_eq!(ours, nn::Activation::from(theirs));
            assert_close(&ours.forward(&x).unwrap(), &theirs.forward(&x).unwrap(), 5e-6);
        }
    }
}
