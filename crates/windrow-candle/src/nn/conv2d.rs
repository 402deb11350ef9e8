use crate::conv2d::{Prepared, run};
use candle_core::{Module, Result, Tensor};
use candle_nn::{BatchNorm, Conv2dConfig, VarBuilder};
use std::sync::{Arc, Mutex};
use windrow::{Accuracy, Activation, Conv2dParams};

/// Inputs of this many layouts are remembered.
const REMEMBERED: usize = 4;

/// [`candle_nn::Conv2d`] with bias and activation in one operator with the convolution, and the filter
/// packed once.
///
/// A filter that is a variable may change between calls, as in training: it is packed on each one.
/// Clones share what is packed.
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
    /// The latest last.
    prepared: Arc<Mutex<Vec<Arc<Prepared>>>>,
}

impl Conv2d {
    /// A layer with `weight` [k, c/groups, r, s] and bias `[k]`. cuDNN's algorithm in the configuration
    /// is not looked at.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: Conv2dConfig) -> Self {
        let params = Conv2dParams {
            stride: [config.stride; 2],
            padding: [config.padding; 2],
            dilation: [config.dilation; 2],
            groups: config.groups,
            ..Default::default()
        };
        Conv2d { weight, bias, config, params, prepared: Arc::default() }
    }

    /// With an activation after the bias.
    #[must_use]
    pub fn with_activation(self, activation: Activation) -> Self {
        self.with_params(|params| params.activation = activation)
    }

    /// With another accuracy than [`Accuracy::Fp32`].
    #[must_use]
    pub fn with_accuracy(self, accuracy: Accuracy) -> Self {
        self.with_params(|params| params.accuracy = accuracy)
    }

    fn with_params(mut self, change: impl FnOnce(&mut Conv2dParams)) -> Self {
        change(&mut self.params);
        Conv2d { prepared: Arc::default(), ..self }
    }

    /// Stride, padding, dilation, groups.
    pub fn config(&self) -> &Conv2dConfig {
        &self.config
    }

    /// [k, c/groups, r, s]
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// `[k]`
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// The layer that computes this one followed by `bn`, as at inference.
    ///
    /// # Errors
    /// A batch norm without weight and bias, other sizes; an activation, which lies between the two.
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

    /// A plan for inputs like `x`; with the filter packed unless that may change.
    fn prepare(&self, x: &Tensor) -> Result<Arc<Prepared>> {
        let new = || Prepared::new(x, &self.weight, self.bias.as_ref(), &self.params);
        if self.weight.track_op() {
            return Ok(Arc::new(new()?));
        }
        let mut known = self.prepared.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for (i, prepared) in known.iter().enumerate() {
            if prepared.fits(x)? {
                let prepared = known.remove(i);
                known.push(prepared.clone());
                return Ok(prepared);
            }
        }
        let prepared = Arc::new(new()?.pack(&self.weight)?);
        if known.len() == REMEMBERED {
            known.remove(0);
        }
        known.push(prepared.clone());
        Ok(prepared)
    }
}

impl From<candle_nn::Conv2d> for Conv2d {
    fn from(layer: candle_nn::Conv2d) -> Self {
        Conv2d::new(layer.weight().clone(), layer.bias().cloned(), *layer.config())
    }
}

impl Module for Conv2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        run(x, &self.weight, self.bias.as_ref(), self.prepare(x)?)
    }
}

/// As [`candle_nn::conv2d`]: `weight` and `bias` of `vb`.
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

/// As [`candle_nn::conv2d_no_bias`]: `weight` of `vb`.
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
