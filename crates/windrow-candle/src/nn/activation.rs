use crate::TensorExt;
use candle_core::{Module, Result, Tensor};
use windrow::Approximate;

/// [`candle_nn::Activation`], read from the same configuration files, with Windrow's GELU, which takes one pass and is
/// accurate for negative inputs too.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use windrow_candle::nn::Activation;
/// let act = Activation::from(candle_nn::Activation::Gelu);
/// let y = act.forward(&Tensor::new(&[1f32], &Device::Cpu)?)?;
/// assert!((y.to_vec1::<f32>()?[0] - 0.8413447).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Deserialize, serde::Serialize)]
#[serde(transparent)]
pub struct Activation(pub candle_nn::Activation);

impl From<candle_nn::Activation> for Activation {
    fn from(activation: candle_nn::Activation) -> Self {
        Activation(activation)
    }
}

impl Module for Activation {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.0 {
            candle_nn::Activation::Gelu => x.windrow_gelu(Approximate::None),
            candle_nn::Activation::NewGelu | candle_nn::Activation::GeluPytorchTanh => {
                x.windrow_gelu(Approximate::Tanh)
            }
            other => other.forward(x),
        }
    }
}
