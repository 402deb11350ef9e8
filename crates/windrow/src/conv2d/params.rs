//! Options of a convolution.

use crate::forms::{names, setters};
use crate::{Accuracy, Activation};

/// Declares the options of a convolution of so many directions.
macro_rules! params {
    ($(#[$about:meta])* $name:ident by $d:literal: $(#[$stride:meta])* stride, $(#[$padding:meta])* padding $(, $(#[$more:meta])* $field:ident: $type:ty => $set:ident)?) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub struct $name {
            $(#[$stride])*
            pub stride: [usize; $d],
            $(#[$padding])*
            pub padding: [usize; $d],
            /// Distance of neighbouring filter taps.
            pub dilation: [usize; $d],
            /// Number of groups, which must divide the channels. Output channels depend only on the input channels of
            /// their group.
            pub groups: usize,
            /// Activation, applied after bias and residual are added to the sum of products.
            pub activation: Activation,
            /// Accuracy, which limits the algorithms that may be chosen.
            pub accuracy: Accuracy,
            $($(#[$more])* pub $field: $type,)?
        }

        impl Default for $name {
            fn default() -> Self {
                $name {
                    stride: [1; $d],
                    padding: [0; $d],
                    dilation: [1; $d],
                    groups: 1,
                    activation: Activation::Identity,
                    accuracy: Accuracy::default(),
                    $($field: <$type>::default(),)?
                }
            }
        }

        setters! {
            $name {
                with_stride(stride: [usize; $d]);
                with_padding(padding: [usize; $d]);
                with_dilation(dilation: [usize; $d]);
                with_groups(groups: usize);
                with_activation(activation: Activation);
                with_accuracy(accuracy: Accuracy);
                $($set($field: $type);)?
            }
        }
    };
}

params! {
    /// The options of a convolution, for [`Conv2dSpec::new`](crate::Conv2dSpec::new) and
    /// [`conv2d`](crate::conv2d::conv2d). The default is stride 1, no padding, dilation 1, one group, no activation,
    /// [`Accuracy::Fp32`].
    Conv2dParams by 2:
    /// Step of the filter over rows (first) and columns (second).
    stride,
    /// Zeros that are added on each side: the first number above and below, the second on the left and on the right.
    padding
}

params! {
    /// The options of a convolution of videos, for [`Conv3dSpec::new`](crate::Conv3dSpec::new) and
    /// [`conv3d`](crate::conv3d()). The default is stride 1, no padding, dilation 1, one group, no activation,
    /// [`Accuracy::Fp32`].
    Conv3dParams by 3:
    /// Step of the filter over frames (first), rows and columns.
    stride,
    /// Zeros that are added on each side: frames before and after (first), rows above and below, columns on the left and
    /// on the right.
    padding,
    /// The frames before the first one.
    time_padding: TimePadding => with_time_padding
}

/// The frames before the first and after the last one of a video.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TimePadding {
    /// Zeros, on both sides: as many frames as the first number of [`Conv3dParams::padding`] says.
    #[default]
    Zeros,
    /// Causal: the `(kt - 1) * dilation` frames that the filter reads before the first one are zeros, or the
    /// `initial_frames` of a run. There are none after the last one, and no other padding of frames.
    Causal,
    /// As `Causal`, with the first frame repeated in place of zeros.
    CausalRepeat,
}

names! {
    TimePadding, "time_padding":
    Zeros = "zeros", Causal = "causal", CausalRepeat = "causal_repeat",
}
