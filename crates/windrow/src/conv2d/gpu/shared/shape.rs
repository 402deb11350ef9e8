//! Fields that the parameters of several kernels begin with (`conv2d.cuh`).

use super::parameters::strides;
use crate::conv2d::gpu::Operands;
use crate::conv2d::{Conv2dSpec, Problem};
use crate::gpu::params;
use crate::{DType, TensorDesc};

params! {
    /// The tensor that a kernel writes, and the bias and residual that it adds.
    pub(crate) struct Output {
        pub(crate) bias: *const u8,
        pub(crate) residual: *const u8,
        pub(crate) y: *mut u8,
        pub(crate) y_strides as [y_n, y_k, y_h, y_w]: [i64; 4],
        pub(crate) bias_stride: i64,
        /// True if the bias is f32 and the elements are f16 or bf16.
        pub(crate) bias_is_float: i32,
        k: i32,
        oh: i32,
        ow: i32,
    }

    /// A convolution from x to y, or from dy to dx in a data gradient.
    pub(crate) struct ConvShape: Output {
        pub(crate) x: *const u8,
        pub(crate) x_strides as [x_n, x_c, x_h, x_w]: [i64; 4],
        pub(crate) h: i32,
        pub(crate) w: i32,
        pub(crate) stride as [stride_h, stride_w]: [i32; 2],
        pub(crate) pad as [pad_h, pad_w]: [i32; 2],
        pub(crate) dilation as [dilation_h, dilation_w]: [i32; 2],
    }
}

impl Output {
    pub(crate) fn new(spec: &Conv2dSpec, y: &TensorDesc, operands: &Operands) -> Self {
        let (bias, bias_stride, bias_is_float) = match (&spec.bias, operands.bias) {
            (Some(desc), Some(at)) => (at, desc.strides()[0] as i64, desc.dtype == DType::F32),
            _ => (std::ptr::null(), 0, false),
        };
        Output {
            bias,
            residual: operands.residual(),
            y: operands.y,
            y_strides: strides(y),
            bias_stride,
            bias_is_float: i32::from(bias_is_float),
            k: y.shape()[1] as i32,
            oh: y.shape()[2] as i32,
            ow: y.shape()[3] as i32,
        }
    }
}

impl ConvShape {
    pub(crate) fn new(
        spec: &Conv2dSpec,
        p: &Problem,
        [x, y]: [&TensorDesc; 2],
        operands: &Operands,
    ) -> Self {
        ConvShape {
            base: Output::new(spec, y, operands),
            x: operands.x,
            x_strides: strides(x),
            h: x.shape()[2] as i32,
            w: x.shape()[3] as i32,
            stride: p.stride.map(|v| v as i32),
            pad: p.padding.map(|v| v as i32),
            dilation: p.dilation.map(|v| v as i32),
        }
    }
}
