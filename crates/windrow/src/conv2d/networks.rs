//! Networks for `windrow verify`: the layers of VGG-16 and ResNet-18, with fewer channels, through
//! plans that share one workspace. Each layer reads what the ones before it computed and is compared
//! with the oracle on its own.

use super::{Conv2dArgs, Conv2dParams, Conv2dPlan, Conv2dSpec, Weights};
use crate::verification::{Case, Check, random_tensor, tensor_of};
use crate::{
    Accuracy, Activation, DType, Device, Layout, Placed, PlanOptions, Result, TensorDesc, Workspace,
};

const IMAGES: [usize; 4] = [2, 3, 32, 32];

/// A convolution; its output is tensor i + 1 if it is layer i, and tensor 0 is the images.
#[derive(Clone, Copy, Debug)]
struct Layer {
    input: usize,
    k: usize,
    taps: usize,
    stride: usize,
    activation: Activation,
    /// A tensor that is added to the output, followed by ReLU.
    shortcut: Option<usize>,
}

/// Thirteen 3x3 layers in five blocks. Because there is no pooling, the last layer of a block halves the image.
fn vgg16() -> Vec<Layer> {
    let blocks = [(8, 2), (16, 2), (32, 3), (64, 3), (64, 3)];
    let layers = blocks.iter().flat_map(|&(k, count)| (1..=count).map(move |i| (k, i == count)));
    let layer = |(input, (k, last))| Layer {
        input,
        k,
        taps: 3,
        stride: if last { 2 } else { 1 },
        activation: Activation::Relu,
        shortcut: None,
    };
    layers.enumerate().map(layer).collect()
}

/// A 7x7 stem and four stages of two blocks: two 3x3 layers and a shortcut, 1x1 where sizes change.
fn resnet18() -> Vec<Layer> {
    let conv = |input, k, taps, stride, activation| Layer {
        input,
        k,
        taps,
        stride,
        activation,
        shortcut: None,
    };
    let mut layers = vec![conv(0, 8, 7, 2, Activation::Relu)];
    for (stage, k) in [8, 16, 32, 64].into_iter().enumerate() {
        for block in 0..2 {
            let input = layers.len();
            let stride = if stage > 0 && block == 0 { 2 } else { 1 };
            let mut shortcut = input;
            if stride == 2 {
                layers.push(conv(input, k, 1, stride, Activation::Identity));
                shortcut = layers.len();
            }
            layers.push(conv(input, k, 3, stride, Activation::Relu));
            let second = conv(layers.len(), k, 3, 1, Activation::Identity);
            layers.push(Layer { shortcut: Some(shortcut), ..second });
        }
    }
    layers
}

pub(super) fn cases(device: Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, layers) in [("VGG-16", vgg16()), ("ResNet-18", resnet18())] {
        for (dtype, layout, order, accuracy) in [
            (DType::F32, "contiguous", [0, 1, 2, 3], Accuracy::Fp32),
            (DType::F16, "channels_last", [0, 2, 3, 1], Accuracy::Half),
        ] {
            let layers = layers.clone();
            cases.push(Case {
                op: "conv2d",
                algorithm: "planned".into(),
                dtype,
                layout: layout.into(),
                name: format!("{name}, {} layers, {}", layers.len(), accuracy.name()),
                elements: layers.len() * IMAGES.iter().product::<usize>(),
                run: Box::new(move || run(&layers, dtype, &order, accuracy, device)),
            });
        }
    }
    cases
}

fn run(
    layers: &[Layer],
    dtype: DType,
    order: &[usize],
    accuracy: Accuracy,
    device: Device,
) -> Result<Vec<Check>> {
    let options = PlanOptions { device, ..PlanOptions::default() };
    let mut descs = vec![TensorDesc { dtype, layout: Layout::with_order(&IMAGES, order)? }];
    let mut plans = Vec::new();
    for layer in layers {
        let x = descs[layer.input];
        let w = [layer.k, x.shape()[1], layer.taps, layer.taps];
        let params = Conv2dParams {
            stride: [layer.stride; 2],
            padding: [layer.taps / 2; 2],
            activation: layer.activation,
            accuracy,
            ..Default::default()
        };
        let spec = Conv2dSpec::new(x, TensorDesc::contiguous(dtype, &w)?, &params)?
            .with_bias(TensorDesc::contiguous(DType::F32, &[layer.k])?);
        descs.push(spec.y);
        plans.push(Conv2dPlan::new(&spec, &options)?);
    }
    let sizes = plans.iter().map(Conv2dPlan::packed_workspace_bytes);
    let mut workspace = Workspace::for_sizes(device, sizes)?;

    let mut tensors = vec![Placed::new(random_tensor(1, descs[0], 0.0, 1.0)?, device)?];
    let mut checks = Vec::new();
    for (seed, (layer, plan)) in (2..).zip(layers.iter().zip(&plans)) {
        let spec = plan.spec();
        // Variance 2 / inputs keeps the magnitudes from layer to layer.
        let range = (6.0 / spec.w.shape()[1..].iter().product::<usize>() as f64).sqrt();
        let place =
            |desc, range: f64| Placed::new(random_tensor(seed, desc, -range, range)?, device);
        let w = place(spec.w, range)?;
        let bias = spec.bias.map(|desc| place(desc, 0.1)).transpose()?;
        let packed = plan.pack_weights(&w.as_ref(), &mut workspace)?;
        let x = tensors[layer.input].as_ref();
        let args = |w| Conv2dArgs::new(x, w).with_bias(bias.as_ref().map(Placed::as_ref));
        let mut y = Placed::output(spec.y, device)?;
        plan.run(&args(Weights::Packed(&packed)), y.as_mut()?, &mut workspace)?;
        workspace.synchronize()?;
        let comparison = plan.compare(&args(Weights::Raw(w.as_ref())), &y.as_ref())?;
        checks.push(Check { what: "y", comparison });
        if let Some(shortcut) = layer.shortcut {
            y = add_relu(&y, &tensors[shortcut], device)?;
        }
        tensors.push(y);
    }
    Ok(checks)
}

/// Adds and applies ReLU on the host: there is no operator for it.
fn add_relu(a: &Placed, b: &Placed, device: Device) -> Result<Placed> {
    let desc = *a.as_ref().desc();
    let pairs = a.as_ref().to_f64_vec()?.into_iter().zip(b.as_ref().to_f64_vec()?);
    let sums: Vec<f64> = pairs.map(|(a, b)| (a + b).max(0.0)).collect();
    Placed::new(tensor_of(desc, &sums)?, device)
}
