//! The block of Mamba-2, Qwen3-Next and Qwen3.5 that a short convolution opens, in candle: a prompt at once and
//! then token by token give the same as the whole sequence.
//!
//! ```sh
//! cargo run --release -p windrow-candle --example candle_short_convolution
//! ```
//!
//! The weights are written to a safetensors file first and loaded from it, under the names of such
//! checkpoints.

use candle_core::{DType, Device, Module, Result, Tensor, safetensors};
use candle_nn::{Linear, VarBuilder, linear_no_bias};
use std::collections::HashMap;
use std::time::Instant;
use windrow_candle::{Activation, nn::CausalConv1d, nn::causal_conv1d};

const HIDDEN: usize = 512;
const INNER: usize = 1536;
const WIDTH: usize = 4;
const PROMPT: usize = 256;
const NEW: usize = 32;

/// `out_proj(silu(conv(value)) * silu(gate))` with `value` and `gate` of one projection.
struct Block {
    in_proj: Linear,
    conv1d: CausalConv1d,
    out_proj: Linear,
}

impl Block {
    fn load(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Block {
            in_proj: linear_no_bias(HIDDEN, 2 * INNER, vb.pp("in_proj"))?,
            conv1d: causal_conv1d(INNER, WIDTH, Activation::Silu, vb.pp("conv1d"))?,
            out_proj: linear_no_bias(INNER, HIDDEN, vb.pp("out_proj"))?,
        })
    }

    /// The next tokens x [b, l, hidden], and the state after them; from the start if there is none.
    fn forward(&self, x: &Tensor, state: Option<Tensor>) -> Result<(Tensor, Tensor)> {
        let projected = self.in_proj.forward(x)?;
        // [b, d, l] with channels next to each other: a view of the projection, read where it is.
        let value = projected.narrow(2, 0, INNER)?.transpose(1, 2)?;
        let (value, state) = match (x.dim(1)?, state) {
            (1, Some(state)) => (self.conv1d.step(&value, &state)?, state),
            (_, state) => self.conv1d.prefill(&value, state.as_ref())?,
        };
        let gate = projected.narrow(2, INNER, INNER)?.silu()?;
        // The convolution's output lies as its input: this is a view, too.
        let gated = value.transpose(1, 2)?.mul(&gate)?;
        Ok((self.out_proj.forward(&gated)?, state))
    }
}

fn write_weights(file: &std::path::Path) -> Result<()> {
    let weight = |shape: &[usize], inputs: usize| {
        Tensor::randn(0f32, 1.0 / (inputs as f32).sqrt(), shape, &Device::Cpu)
    };
    let tensors = HashMap::from([
        ("in_proj.weight", weight(&[2 * INNER, HIDDEN], HIDDEN)?),
        ("conv1d.weight", weight(&[INNER, 1, WIDTH], WIDTH)?),
        ("conv1d.bias", weight(&[INNER], 4)?),
        ("out_proj.weight", weight(&[HIDDEN, INNER], INNER)?),
    ]);
    safetensors::save(&tensors, file)
}

fn main() -> Result<()> {
    let device = if cfg!(feature = "cuda") { Device::new_cuda(0)? } else { Device::Cpu };
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("block.safetensors");
    write_weights(&file)?;
    let tensors = safetensors::load(&file, &device)?;
    let block = Block::load(VarBuilder::from_tensors(tensors, DType::F32, &device))?;

    let x = Tensor::randn(0f32, 1.0, (1, PROMPT + NEW, HIDDEN), &device)?;
    let (whole, _) = block.forward(&x, None)?;

    let start = Instant::now();
    let (y, mut state) = block.forward(&x.narrow(1, 0, PROMPT)?, None)?;
    let prefill = start.elapsed();
    let mut parts = vec![y];
    let start = Instant::now();
    for token in PROMPT..PROMPT + NEW {
        let (y, next) = block.forward(&x.narrow(1, token, 1)?, Some(state))?;
        parts.push(y);
        state = next;
    }
    device.synchronize()?;
    let decode = start.elapsed() / NEW as u32;

    let largest = |t: &Tensor| t.abs()?.max_all()?.to_scalar::<f32>();
    let difference = largest(&Tensor::cat(&parts, 1)?.sub(&whole)?)? / largest(&whole)?;
    println!(
        "{PROMPT} tokens at once in {prefill:.2?}, then {NEW} one by one in {decode:.2?} each"
    );
    println!(
        "largest difference to the whole sequence at once: {difference:.1e} of the largest element"
    );
    if difference > 1e-5 {
        candle_core::bail!("prefill and decode differ")
    }
    Ok(())
}
