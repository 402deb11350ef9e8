//! Results and gradients beside candle's own, on every device that this build and machine have.

mod causal_conv1d;
mod causal_conv1d_states;
mod conv2d;
mod conv3d;
mod gelu;
mod layers;
mod random;

use candle_core::{DType, Device, Error, Result, Shape, Tensor, Var};
use windrow_candle::{Activation, Approximate};

/// The CPU, and a CUDA device if there is one.
pub(crate) fn devices() -> Vec<Device> {
    let cuda = if cfg!(feature = "cuda") { Device::new_cuda(0).ok() } else { None };
    [Device::Cpu].into_iter().chain(cuda).collect()
}

pub(crate) const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Numbers in [-2, 2), the same in every run.
pub(crate) fn numbers(shape: impl Into<Shape>, seed: u64, device: &Device) -> Tensor {
    let shape = shape.into();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 22) as f32 - 2.0
    };
    let data: Vec<f32> = (0..shape.elem_count()).map(|_| next()).collect();
    Tensor::from_vec(data, shape, device).unwrap()
}

pub(crate) fn var(shape: impl Into<Shape>, seed: u64, device: &Device) -> Var {
    Var::from_tensor(&numbers(shape, seed, device)).unwrap()
}

pub(crate) fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Every element within `tolerance` of the largest wanted one.
#[track_caller]
pub(crate) fn assert_close(got: &Tensor, want: &Tensor, tolerance: f32) {
    assert_eq!(got.dims(), want.dims());
    assert_eq!(got.dtype(), want.dtype());
    let (got, want) = (values(got), values(want));
    let scale = want.iter().fold(0f32, |m, w| m.max(w.abs())).max(1e-3);
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        assert!((g - w).abs() <= tolerance * scale, "element {i}: {g}, wanted {w} (scale {scale})");
    }
}

/// The allowed error: the rounding of the result, and a few roundings of f32.
pub(crate) fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        _ => 5e-6,
    }
}

/// candle's own activation.
pub(crate) fn candle_activation(x: &Tensor, activation: Activation) -> Result<Tensor> {
    match activation {
        Activation::Identity => Ok(x.clone()),
        Activation::Relu => x.relu(),
        Activation::Relu6 => x.clamp(0f64, 6f64),
        Activation::LeakyRelu(slope) => x.relu()? - (x.neg()?.relu()? * f64::from(slope.get()))?,
        Activation::Hardswish => x.mul(&((x + 3.0)?.clamp(0f64, 6f64)? / 6.0)?),
        Activation::Silu => x.silu(),
        Activation::Gelu(Approximate::None) => x.gelu_erf(),
        Activation::Gelu(Approximate::Tanh) => x.gelu(),
        other => candle_core::bail!("candle has no {other}"),
    }
}

/// The gradients of `sum(y * g)` for fixed `g`, of both results.
#[track_caller]
pub(crate) fn assert_same_gradients(vars: &[&Var], ours: &Tensor, theirs: &Tensor, tolerance: f32) {
    let g = numbers(theirs.shape(), 77, theirs.device()).to_dtype(theirs.dtype()).unwrap();
    let gradients = |y: &Tensor| y.mul(&g).unwrap().sum_all().unwrap().backward().unwrap();
    let (ours, theirs) = (gradients(ours), gradients(theirs));
    for var in vars {
        assert_close(ours.get(var).unwrap(), theirs.get(var).unwrap(), tolerance);
    }
}

/// The message has each of these words.
#[track_caller]
pub(crate) fn assert_error<T: std::fmt::Debug>(result: Result<T>, words: &[&str]) -> Error {
    let error = result.unwrap_err();
    let message = error.to_string();
    words.iter().for_each(|word| assert!(message.contains(word), "{word:?} is not in {message:?}"));
    error
}
