use crate::conv2d::{Kept, run};
use candle_core::{Module, Result, Tensor};
use candle_nn::{BatchNorm, Conv2dConfig, VarBuilder};
use std::sync::Arc;
use windrow::{Accuracy, Activation, Conv2dParams, Filter};

/// A replacement of [`candle_nn::Conv2d`]: bias and activation are fused with the convolution, and the packed filter is
/// cached until the filter changes.
///
/// A checksum of the filter on every call finds out whether it has changed ([`windrow::FilterCache`]). A filter that
/// takes part in gradients is packed on every call. [`Conv2d::freeze`] is for filters that do not change. Clones share
/// the packed filter.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{Conv2dConfig, VarBuilder};
/// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu); // or from a safetensors file
/// let config = Conv2dConfig { padding: 1, ..Default::default() };
/// let conv = windrow_candle::nn::conv2d(3, 64, 3, config, vb)?;
/// let y = conv.forward(&Tensor::zeros((1, 3, 32, 32), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.dims(), [1, 64, 32, 32]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Conv2d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: Conv2dConfig,
    params: Conv2dParams,
    kept: Arc<Kept>,
}

impl Conv2d {
    /// A layer with `weight` [k, c/groups, r, s] and bias `[k]`. cuDNN's algorithm in the configuration is ignored.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: Conv2dConfig) -> Self {
        let params = Conv2dParams::default()
            .with_stride([config.stride; 2])
            .with_padding([config.padding; 2])
            .with_dilation([config.dilation; 2])
            .with_groups(config.groups);
        Conv2d { weight, bias, config, params, kept: Arc::default() }
    }

    /// The layer with an activation after the bias.
    #[must_use]
    pub fn with_activation(self, activation: Activation) -> Self {
        self.with_params(|params| params.activation = activation)
    }

    /// The layer with another accuracy than [`Accuracy::Fp32`].
    #[must_use]
    pub fn with_accuracy(self, accuracy: Accuracy) -> Self {
        self.with_params(|params| params.accuracy = accuracy)
    }

    fn with_params(mut self, change: impl FnOnce(&mut Conv2dParams)) -> Self {
        change(&mut self.params);
        Conv2d { kept: Arc::default(), ..self }
    }

    /// The stride, padding, dilation and groups.
    pub fn config(&self) -> &Conv2dConfig {
        &self.config
    }

    /// The filter [k, c/groups, r, s].
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias `[k]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// The layer that computes this one followed by `bn` in evaluation mode.
    ///
    /// # Errors
    /// A batch norm without weight and bias, or of another number of channels. A layer that has an activation: it would
    /// lie between convolution and batch norm.
    pub fn absorb_bn(&self, bn: &BatchNorm) -> Result<Self> {
        if self.params.activation != Activation::Identity {
            candle_core::bail!(
                "conv2d: an activation lies between the convolution and the batch norm"
            )
        }
        let plain = candle_nn::Conv2d::new(self.weight.clone(), self.bias.clone(), self.config);
        let absorbed = Conv2d::from(plain.absorb_bn(bn)?);
        Ok(absorbed.with_accuracy(self.params.accuracy))
    }

    /// Your promise that the filter, variable or not, does not change from now on. It is compared with the packed
    /// filter once more, and not in later calls. Clones are frozen too.
    pub fn freeze(&self) {
        self.kept.filter.set_frozen(true);
    }

    /// The end of the promise of [`Conv2d::freeze`]: call it before the filter changes.
    pub fn unfreeze(&self) {
        self.kept.filter.set_frozen(false);
    }
}

impl From<candle_nn::Conv2d> for Conv2d {
    fn from(layer: candle_nn::Conv2d) -> Self {
        Conv2d::new(layer.weight().clone(), layer.bias().cloned(), *layer.config())
    }
}

impl Module for Conv2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // With gradients come changes.
        let changing = self.weight.track_op() && !self.kept.filter.is_frozen();
        let filter = if changing { Filter::Changing } else { Filter::Kept };
        run(x, &self.weight, self.bias.as_ref(), &self.params, &self.kept, filter)
    }
}

/// A layer from `weight` and `bias` of `vb`, as [`candle_nn::conv2d`] makes it.
///
/// # Errors
/// A parameter that is missing or has another shape.
pub fn conv2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: Conv2dConfig,
    vb: VarBuilder<'_>,
) -> Result<Conv2d> {
    candle_nn::conv2d(in_channels, out_channels, kernel_size, config, vb).map(Conv2d::from)
}

/// A layer from `weight` of `vb`, as [`candle_nn::conv2d_no_bias`] makes it.
///
/// # Errors
/// A parameter that is missing or has another shape.
pub fn conv2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: Conv2dConfig,
    vb: VarBuilder<'_>,
) -> Result<Conv2d> {
    candle_nn::conv2d_no_bias(in_channels, out_channels, kernel_size, config, vb).map(Conv2d::from)
}
