use crate::{CausalConv1dOptions, CausalConv1dUpdateOptions, TensorExt};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Conv1dConfig, VarBuilder};
use windrow::Activation;

/// The short convolution of Mamba, Qwen3-Next and similar models: depthwise, over the last `width` tokens, with a state
/// for decoding.
///
/// A replacement of a `candle_nn::Conv1d` with `groups` = channels and `padding` = `width - 1`. Models drop the last
/// `width - 1` tokens of that layer's result; this layer does not compute them.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use windrow_candle::{Activation, nn::CausalConv1d};
/// let device = &Device::Cpu;
/// let conv = CausalConv1d::new(Tensor::randn(0f32, 1., (64, 1, 4), device)?, None, Activation::Silu)?;
/// let x = Tensor::randn(0f32, 1., (2, 64, 10), device)?;
/// let (y, state) = conv.prefill(&x.narrow(2, 0, 9)?, None)?;
/// let last = conv.step(&x.narrow(2, 9, 1)?, &state)?;
/// assert_eq!((y.dims(), last.dims(), state.dims()), (&[2, 64, 9][..], &[2, 64, 1][..], &[2, 64, 3][..]));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CausalConv1d {
    /// [d, width]
    weight: Tensor,
    bias: Option<Tensor>,
    activation: Activation,
}

impl CausalConv1d {
    /// A layer with `weight` [d, 1, width], as checkpoints have it, or [d, width], and bias `[d]`.
    ///
    /// # Errors
    /// A weight that has neither 2 dimensions nor 3 of which the second is 1.
    pub fn new(weight: Tensor, bias: Option<Tensor>, activation: Activation) -> Result<Self> {
        let weight = match *weight.dims() {
            [_, 1, _] => weight.squeeze(1)?,
            [_, _] => weight,
            ref other => candle_core::bail!(
                "causal_conv1d: `weight` has shape {other:?}, expected [d, 1, width] or [d, width]"
            ),
        };
        Ok(CausalConv1d { weight, bias, activation })
    }

    /// The filter [d, width].
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias `[d]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// The activation after the bias.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// The state before the first token of `batch` sequences: zeros [batch, d, width-1].
    ///
    /// # Errors
    /// [`candle_core::Error::Cuda`] if the device is out of memory.
    pub fn zero_state(&self, batch: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let (d, width) = self.weight.dims2()?;
        Tensor::zeros((batch, d, width.saturating_sub(1)), dtype, device)
    }

    /// The convolution of x [b, d, l] that continues from `state` (zeros if `None`), and the state after it.
    ///
    /// # Errors
    /// As [`TensorExt::causal_conv1d`].
    pub fn prefill(&self, x: &Tensor, state: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        x.causal_conv1d_with_states(&self.weight, &self.options(state))
    }

    /// The convolution of the next tokens x [b, d, l], usually one; `state` is advanced in place.
    ///
    /// # Errors
    /// As [`TensorExt::causal_conv1d_update`].
    pub fn step(&self, x: &Tensor, state: &Tensor) -> Result<Tensor> {
        let options = CausalConv1dUpdateOptions {
            bias: self.bias.as_ref(),
            activation: self.activation,
            ..Default::default()
        };
        x.causal_conv1d_update(state, &self.weight, &options)
    }

    fn options<'a>(&'a self, state: Option<&'a Tensor>) -> CausalConv1dOptions<'a> {
        CausalConv1dOptions {
            bias: self.bias.as_ref(),
            activation: self.activation,
            initial_states: state,
            ..Default::default()
        }
    }
}

/// The convolution of whole sequences x [b, d, l], from a state of zeros.
impl Module for CausalConv1d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.causal_conv1d(&self.weight, &self.options(None))
    }
}

/// A layer from `weight` [d, 1, width] and `bias` `[d]` of `vb`.
///
/// # Errors
/// A parameter that is missing or has another shape.
pub fn causal_conv1d(
    channels: usize,
    width: usize,
    activation: Activation,
    vb: VarBuilder<'_>,
) -> Result<CausalConv1d> {
    let config = Conv1dConfig { groups: channels, ..Default::default() };
    let conv = candle_nn::conv1d(channels, channels, width, config, vb)?;
    CausalConv1d::new(conv.weight().clone(), conv.bias().cloned(), activation)
}

/// A layer from `weight` [d, 1, width] of `vb`.
///
/// # Errors
/// A parameter that is missing or has another shape.
pub fn causal_conv1d_no_bias(
    channels: usize,
    width: usize,
    activation: Activation,
    vb: VarBuilder<'_>,
) -> Result<CausalConv1d> {
    let config = Conv1dConfig { groups: channels, ..Default::default() };
    let conv = candle_nn::conv1d_no_bias(channels, channels, width, config, vb)?;
    CausalConv1d::new(conv.weight().clone(), None, activation)
}
