//! The data gradient as a convolution of dy by the mirrored filter.

use super::{Conv2dSpec, Problem};
use crate::{Activation, Layout, TensorDesc, TensorRef};

/// The data gradient of a convolution of stride 1 as a convolution of dy: by the mirrored filter, with input and output
/// channels swapped. `None` if it is not such a convolution.
pub(super) fn mirrored(spec: &Conv2dSpec, p: &Problem) -> Option<Conv2dSpec> {
    let padding = |d: usize| ([p.r, p.s][d] - 1).checked_sub(p.padding[d]);
    if p.stride != [1, 1] || p.dilation != [1, 1] || p.groups != 1 {
        return None;
    }
    Some(Conv2dSpec {
        x: spec.y,
        w: TensorDesc { layout: mirrored_layout(&spec.w.layout)?, ..spec.w },
        y: spec.x,
        bias: None,
        residual: false,
        padding: [padding(0)?, padding(1)?],
        activation: Activation::Identity,
        ..spec.clone()
    })
}

/// The layout of a filter [k, c, r, s] as [c, k, r, s] with rows and columns in reverse order.
fn mirrored_layout(w: &Layout) -> Option<Layout> {
    let (shape, strides) = (w.shape(), w.strides());
    Layout::strided(
        &[shape[1], shape[0], shape[2], shape[3]],
        &[strides[1], strides[0], -strides[2], -strides[3]],
    )
    .ok()
}

/// The view of a filter that [`mirrored_layout`] describes.
pub(super) fn mirrored_view<'a>(w: &TensorRef<'a>) -> Option<TensorRef<'a>> {
    let desc = TensorDesc { layout: mirrored_layout(w.layout())?, dtype: w.dtype() };
    let last = w.layout().offset(&[0, 0, w.shape()[2] - 1, w.shape()[3] - 1]);
    let ptr = w.as_ptr().wrapping_offset(last * w.dtype().size() as isize);
    // SAFETY: the same elements: counted from the last row and column, backwards.
    Some(unsafe { TensorRef::from_raw(ptr.cast(), desc, w.device()) })
}
