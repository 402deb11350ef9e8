//! Options of a convolution.

use crate::forms::setters;
use crate::{Accuracy, Activation};

/// The options of a convolution, for [`Conv2dSpec::new`](crate::Conv2dSpec::new) and
/// [`conv2d`](crate::conv2d::conv2d). The default is stride 1, no padding, dilation 1, one group, no activation,
/// [`Accuracy::Fp32`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Conv2dParams {
    /// Step of the filter over rows (first) and columns (second).
    pub stride: [usize; 2],
    /// Zeros that are added on each side: the first number above and below, the second on the left and on the right.
    pub padding: [usize; 2],
    /// Distance of neighbouring filter taps.
    pub dilation: [usize; 2],
    /// Number of groups, which must divide the channels. Output channels depend only on the input channels of their
    /// group.
    pub groups: usize,
    /// Activation, applied after bias and residual are added to the sum of products.
    pub activation: Activation,
    /// Accuracy, which limits the algorithms that may be chosen.
    pub accuracy: Accuracy,
}

impl Default for Conv2dParams {
    fn default() -> Self {
        Conv2dParams {
            stride: [1, 1],
            padding: [0, 0],
            dilation: [1, 1],
            groups: 1,
            activation: Activation::Identity,
            accuracy: Accuracy::default(),
        }
    }
}

setters! {
    Conv2dParams {
        with_stride(stride: [usize; 2]);
        with_padding(padding: [usize; 2]);
        with_dilation(dilation: [usize; 2]);
        with_groups(groups: usize);
        with_activation(activation: Activation);
        with_accuracy(accuracy: Accuracy);
    }
}
