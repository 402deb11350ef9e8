//! The convolutions of VGG-16 in candle, with candle's layers and with Windrow's from the same weights.
//!
//! ```sh
//! cargo run --release -p windrow-candle --example candle_vgg
//! ```

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Conv2dConfig, VarBuilder, VarMap};
use std::time::{Duration, Instant};
use windrow_candle::{Activation, nn};

/// Output channels of each layer; `None` halves the image.
const LAYERS: [Option<usize>; 18] = {
    let (a, b, c, d) = (Some(64), Some(128), Some(256), Some(512));
    [a, a, None, b, b, None, c, c, c, None, d, d, d, None, d, d, d, None]
};
const SIZE: usize = 224;
const REPEATS: usize = 3;

/// A stack of 3x3 convolutions with ReLU, and pooling.
struct Stack(Vec<Layer>);

enum Layer {
    Conv(Box<dyn Module>),
    Pool,
}

impl Stack {
    fn new(
        layer: impl Fn(usize, usize, VarBuilder<'_>) -> Result<Box<dyn Module>>,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let (mut layers, mut channels) = (Vec::new(), 3);
        for (i, out) in LAYERS.into_iter().enumerate() {
            layers.push(match out {
                Some(out) => Layer::Conv(layer(channels, out, vb.pp(format!("features.{i}")))?),
                None => Layer::Pool,
            });
            channels = out.unwrap_or(channels);
        }
        Ok(Stack(layers))
    }
}

impl Module for Stack {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, layer| match layer {
            Layer::Conv(conv) => conv.forward(&x),
            Layer::Pool => x.max_pool2d(2),
        })
    }
}

const CONFIG: Conv2dConfig =
    Conv2dConfig { padding: 1, stride: 1, dilation: 1, groups: 1, cudnn_fwd_algo: None };

fn candles(c: usize, k: usize, vb: VarBuilder<'_>) -> Result<Box<dyn Module>> {
    let conv = candle_nn::conv2d(c, k, 3, CONFIG, vb)?;
    Ok(Box::new(candle_nn::func(move |x| conv.forward(x)?.relu())))
}

fn windrows(c: usize, k: usize, vb: VarBuilder<'_>) -> Result<Box<dyn Module>> {
    Ok(Box::new(nn::conv2d(c, k, 3, CONFIG, vb)?.with_activation(Activation::Relu)))
}

/// The weights without their gradients, as from a file, so that filters are packed once.
fn detached(weights: &VarMap, device: &Device) -> Result<VarBuilder<'static>> {
    let weights = weights.data().lock().expect("nobody else has it");
    let tensors = weights
        .iter()
        .map(|(name, var)| Ok((name.clone(), var.as_detached_tensor().to_device(device)?)))
        .collect::<Result<_>>()?;
    Ok(VarBuilder::from_tensors(tensors, DType::F32, device))
}

fn main() -> Result<()> {
    let device = if cfg!(feature = "cuda") { Device::new_cuda(0)? } else { Device::Cpu };
    let weights = VarMap::new();
    // Made by the first stack that asks for them.
    let theirs = Stack::new(candles, &VarBuilder::from_varmap(&weights, DType::F32, &device))?;
    let ours = Stack::new(windrows, &detached(&weights, &device)?)?;

    let image = Tensor::randn(0f32, 1.0, (1, 3, SIZE, SIZE), &device)?;
    // On the CPU: on a GPU candle's convolutions may be cuDNN's in TF32.
    let reference = Stack::new(candles, &detached(&weights, &Device::Cpu)?)?;
    let want = reference.forward(&image.to_device(&Device::Cpu)?)?;
    let got = ours.forward(&image)?.to_device(&Device::Cpu)?;
    let largest = |t: &Tensor| t.abs()?.max_all()?.to_scalar::<f32>();
    let difference = largest(&got.sub(&want)?)? / largest(&want)?;

    let mut times = [Duration::MAX; 2];
    for _ in 0..REPEATS {
        for (stack, time) in [&theirs, &ours].into_iter().zip(&mut times) {
            let start = Instant::now();
            stack.forward(&image)?;
            device.synchronize()?;
            *time = start.elapsed().min(*time);
        }
    }
    println!("candle {:.1?}, windrow {:.1?} an image of {SIZE}x{SIZE}", times[0], times[1]);
    println!("largest difference: {difference:.1e} of the largest element");
    if difference > 1e-4 {
        candle_core::bail!("the stacks differ")
    }
    Ok(())
}
