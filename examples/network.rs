//! A small convolutional network on a photograph, layer by layer through plans that share one
//! workspace: all memory is taken before the first run, and a run takes none.
//!
//! `cargo run --release --example network`

use std::error::Error;
use std::path::Path;
use std::time::Instant;
use windrow::verify::random_tensor;
use windrow::{
    Activation, Approximate, Conv2dArgs, Conv2dParams, Conv2dPlan, Conv2dSpec, DType, Device,
    Layout, PackedWeights, PlanOptions, Tensor, TensorDesc, Workspace,
};

/// Output channels and stride of each 3x3 layer.
const LAYERS: [(usize, usize); 6] = [(32, 1), (64, 2), (64, 1), (128, 2), (128, 1), (128, 1)];
const IMAGES: usize = 2;

struct Layer {
    plan: Conv2dPlan,
    weights: PackedWeights,
    bias: Tensor,
    y: Tensor,
}

fn main() -> Result<(), Box<dyn Error>> {
    let x = photographs()?;
    let (layers, mut workspace) = build(*x.desc())?;
    let mut layers = layers;
    println!("workspace for all layers: {} KiB", workspace.len() / 1024);

    for round in ["first", "second"] {
        let mut input = &x;
        let mut total = 0.0;
        for layer in &mut layers {
            let args =
                Conv2dArgs::new(input.as_ref(), &layer.weights).with_bias(layer.bias.as_ref());
            let start = Instant::now();
            layer.plan.run(&args, layer.y.as_mut(), &mut workspace)?;
            let ms = start.elapsed().as_secs_f64() * 1e3;
            total += ms;
            if round == "second" {
                let gflops = layer.plan.spec().flops()? / ms / 1e6;
                println!(
                    "{:?} -> {:?}: {ms:.2} ms, {gflops:.0} GFLOP/s, {}",
                    input.shape(),
                    layer.y.shape(),
                    layer.plan.algorithm()
                );
            }
            input = &layer.y;
        }
        println!("{round} round: {total:.2} ms");
    }
    Ok(())
}

/// Plans, filters and outputs of all layers, and one workspace large enough for each of them.
fn build(x: TensorDesc) -> windrow::Result<(Vec<Layer>, Workspace)> {
    let options = PlanOptions::default();
    let mut plans = Vec::new();
    let mut x = x;
    for (k, stride) in LAYERS {
        let w = TensorDesc::contiguous(x.dtype, &[k, x.shape()[1], 3, 3])?;
        let bias = TensorDesc::contiguous(DType::F32, &[k])?;
        let params = Conv2dParams::default()
            .with_stride([stride; 2])
            .with_padding([1, 1])
            .with_activation(Activation::Gelu(Approximate::Tanh));
        let spec = Conv2dSpec::new(x, w, &params)?.with_bias(bias);
        x = spec.y;
        plans.push(Conv2dPlan::new(&spec, &options)?);
    }
    let bytes = plans.iter().map(Conv2dPlan::workspace_bytes);
    let mut workspace = Workspace::for_sizes(Device::Cpu, bytes)?;
    let mut layers = Vec::new();
    for (seed, plan) in (1..).zip(plans) {
        let spec = plan.spec();
        // Variance 2 / inputs keeps the magnitudes from layer to layer.
        let range = (6.0 / (9 * spec.x.shape()[1]) as f64).sqrt();
        let w = random_tensor(seed, spec.w, -range, range)?;
        let bias = Tensor::zeros(DType::F32, &[spec.w.shape()[0]])?;
        let y = Tensor::uninitialised(spec.y)?;
        let weights = plan.pack_weights(&w.as_ref(), &mut workspace)?;
        layers.push(Layer { plan, weights, bias, y });
    }
    Ok((layers, workspace))
}

/// The photograph twice, [n, c, h, w] in channels-last memory as it comes from the file.
fn photographs() -> Result<Tensor, Box<dyn Error>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/rocket.jpg");
    let image = image::open(path)?.to_rgb8();
    let shape = [IMAGES, 3, image.height() as usize, image.width() as usize];
    let layout = Layout::with_order(&shape, &[0, 2, 3, 1])?;
    let mut x = Tensor::uninitialised(TensorDesc::new(DType::F32, layout))?;
    let values = image.iter().cycle().map(|&v| (f32::from(v) / 255.0 - 0.5).to_ne_bytes());
    for (to, value) in x.as_bytes_mut().chunks_exact_mut(4).zip(values) {
        to.copy_from_slice(&value);
    }
    Ok(x)
}
