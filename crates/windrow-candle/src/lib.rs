//! Windrow's operators for [candle](https://github.com/huggingface/candle) tensors: causal conv1d, conv2d, conv3d
//! and GELU on candle's own memory, without copies, with gradients.
//!
//! [`TensorExt`] adds the operators to [`Tensor`]; [`nn`] has layers that take the place of
//! `candle_nn`'s.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use windrow_candle::{Activation, CausalConv1dOptions, TensorExt};
//!
//! let x = Tensor::new(&[[[1f32, 2., 3., 4.]]], &Device::Cpu)?; // [b, d, l]
//! let weight = Tensor::new(&[[10f32, 1.]], &Device::Cpu)?; // [d, width]
//! let y = x.causal_conv1d(&weight, &CausalConv1dOptions::default())?;
//! assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1., 12., 23., 34.]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! # What holds for all operators
//!
//! - The element types are f32, f16 and bf16. Inputs may have any strides. Tensors are on the CPU or, with the feature
//!   `cuda`, on CUDA devices, where work is ordered on the stream of candle's device.
//! - A result is a new tensor. It is row-major. If the input of a convolution is channels-last, its result is too.
//! - Options and accuracy are those of the [`windrow`] crate, whose pages say more.
//! - The error for a wrong argument names the argument, what was given and what was expected. An error of a device is
//!   [`candle_core::Error::Cuda`] with a [`windrow::Error`] in it.
//! - With the environment variable `WINDROW_VERIFY=1` each result is compared with a reference implementation in f64
//!   (the *oracle*).

mod causal_conv1d;
mod conv2d;
mod conv3d;
#[cfg(feature = "cuda")]
mod cuda;
mod gelu;
mod in_place;
pub mod nn;
mod op;
mod storage;

pub use causal_conv1d::{CausalConv1dOptions, CausalConv1dUpdateOptions};
pub use windrow::{
    Accuracy, Activation, Approximate, Conv2dParams, Conv3dParams, NegativeSlope, TimePadding,
};

use candle_core::{Result, Tensor};

/// The README's program, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Windrow's operators on candle's tensors. If candle has a method of the same name, the name of Windrow's begins with
/// `windrow_`.
pub trait TensorExt {
    /// GELU of each element, exact or in its tanh form; see [`windrow::GeluSpec`].
    ///
    /// # Errors
    /// A type that is not f32, f16 or bf16, or more than 8 dimensions.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use windrow_candle::{Approximate, TensorExt};
    /// let x = Tensor::new(&[-5.5f32, 0., 1.], &Device::Cpu)?;
    /// let y = x.windrow_gelu(Approximate::None)?.to_vec1::<f32>()?;
    /// assert!((y[0] / -1.0444259e-7 - 1.0).abs() < 1e-6); // exact in the tail
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    fn windrow_gelu(&self, approximate: Approximate) -> Result<Tensor>;

    /// `gelu(x + bias) * gate`. `bias` is `[last dimension of x]`, f32 or of x's type. `gate` has x's shape and type.
    /// With a gate this is GEGLU.
    ///
    /// # Errors
    /// Those of [`windrow_gelu`](Self::windrow_gelu), and shapes and types of bias and gate that do not match x.
    fn windrow_gelu_with(
        &self,
        bias: Option<&Tensor>,
        gate: Option<&Tensor>,
        approximate: Approximate,
    ) -> Result<Tensor>;

    /// [`windrow_gelu_with`](Self::windrow_gelu_with) in place.
    ///
    /// # Errors
    /// Those of [`windrow_gelu_with`](Self::windrow_gelu_with), and a tensor that takes part in a gradient, has
    /// elements that share memory, or shares storage with bias or gate.
    fn windrow_gelu_in_place(
        &self,
        bias: Option<&Tensor>,
        gate: Option<&Tensor>,
        approximate: Approximate,
    ) -> Result<()>;

    /// Causal convolution of x [b, d, l] with `weight` [d, width] (depthwise), or [d_out, d, width]; see
    /// [`windrow::CausalConv1dSpec`]. The result is [b, d_out, l].
    ///
    /// Gradients flow to x, weight, bias and initial states. If both bias and initial states need a gradient, both must
    /// be of x's type.
    ///
    /// # Errors
    /// Types, shapes or devices that do not match; both `seq_idx` and `cu_seqlens`; `cu_seqlens` that does not rise
    /// from 0 to l.
    fn causal_conv1d(&self, weight: &Tensor, options: &CausalConv1dOptions<'_>) -> Result<Tensor>;

    /// [`causal_conv1d`](Self::causal_conv1d), and the final states [b or sequences, d, (width-1) * dilation]: the last
    /// tokens of each sequence, which a later call takes as initial states. No gradient flows through the final states.
    ///
    /// # Errors
    /// As [`causal_conv1d`](Self::causal_conv1d).
    fn causal_conv1d_with_states(
        &self,
        weight: &Tensor,
        options: &CausalConv1dOptions<'_>,
    ) -> Result<(Tensor, Tensor)>;

    /// One step of decoding: the convolution of new tokens x [b, d, l] that follow those in
    /// `conv_state` [b, d, width-1 or more], which is advanced in place; see
    /// [`windrow::CausalConv1dUpdateSpec`]. A step has no gradient.
    ///
    /// # Errors
    /// Types, shapes or devices that do not match; indices out of range; a state that takes part in a gradient or
    /// shares storage with another argument.
    fn causal_conv1d_update(
        &self,
        conv_state: &Tensor,
        weight: &Tensor,
        options: &CausalConv1dUpdateOptions<'_>,
    ) -> Result<Tensor>;

    /// Convolution of x [n, c, h, w] with `weight` [k, c/groups, r, s] and bias `[k]` (f32 or x's type); see
    /// [`windrow::Conv2dSpec`]. [`nn::Conv2d`] caches the packed filter; this function packs it on every call.
    ///
    /// # Errors
    /// Types, shapes or options that do not match.
    fn windrow_conv2d(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
        params: &Conv2dParams,
    ) -> Result<Tensor>;

    /// Convolution of videos or volumes x [n, c, t, h, w] with `weight` [k, c/groups, kt, r, s] and bias `[k]` (f32 or
    /// x's type); see [`windrow::Conv3dSpec`]. It has no gradient.
    ///
    /// # Errors
    /// Types, shapes or options that do not match; tensors on a GPU; a gradient through the result.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use windrow_candle::{Conv3dParams, TensorExt, TimePadding};
    /// let x = Tensor::new(&[1f32, 2., 3.], &Device::Cpu)?.reshape((1, 1, 3, 1, 1))?; // three frames of one pixel
    /// let weight = Tensor::new(&[100f32, 10., 1.], &Device::Cpu)?.reshape((1, 1, 3, 1, 1))?;
    /// let params = Conv3dParams::default().with_time_padding(TimePadding::Causal);
    /// let y = x.conv3d(&weight, None, &params)?;
    /// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1., 12., 123.]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    fn conv3d(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
        params: &Conv3dParams,
    ) -> Result<Tensor>;
}

impl TensorExt for Tensor {
    fn windrow_gelu(&self, approximate: Approximate) -> Result<Tensor> {
        gelu::gelu(self, None, None, approximate)
    }

    fn windrow_gelu_with(
        &self,
        bias: Option<&Tensor>,
        gate: Option<&Tensor>,
        approximate: Approximate,
    ) -> Result<Tensor> {
        gelu::gelu(self, bias, gate, approximate)
    }

    fn windrow_gelu_in_place(
        &self,
        bias: Option<&Tensor>,
        gate: Option<&Tensor>,
        approximate: Approximate,
    ) -> Result<()> {
        gelu::gelu_in_place(self, bias, gate, approximate)
    }

    fn causal_conv1d(&self, weight: &Tensor, options: &CausalConv1dOptions<'_>) -> Result<Tensor> {
        causal_conv1d::causal_conv1d(self, weight, options)
    }

    fn causal_conv1d_with_states(
        &self,
        weight: &Tensor,
        options: &CausalConv1dOptions<'_>,
    ) -> Result<(Tensor, Tensor)> {
        causal_conv1d::causal_conv1d_with_states(self, weight, options)
    }

    fn causal_conv1d_update(
        &self,
        conv_state: &Tensor,
        weight: &Tensor,
        options: &CausalConv1dUpdateOptions<'_>,
    ) -> Result<Tensor> {
        causal_conv1d::causal_conv1d_update(self, conv_state, weight, options)
    }

    fn windrow_conv2d(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
        params: &Conv2dParams,
    ) -> Result<Tensor> {
        conv2d::conv2d(self, weight, bias, params)
    }

    fn conv3d(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
        params: &Conv3dParams,
    ) -> Result<Tensor> {
        conv3d::conv3d(self, weight, bias, params)
    }
}
