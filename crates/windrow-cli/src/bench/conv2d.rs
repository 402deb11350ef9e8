//! Convolution layers: 3x3, stride 1, no padding, NCHW, filter packed once.

use super::layers::Layer;
use super::subject::{self, About, Direct};
use super::{Entry, Selection, Work};
use windrow::{Conv2d, Conv2dAlgorithm, Conv2dParams, Conv2dSpec, DType, TensorDesc};

/// Output channels of an image that are compared with the oracle at each end.
const SAMPLED_CHANNELS: usize = 2;

pub(super) fn entries(s: &Selection<'_>, layers: Vec<Layer>) -> windrow::Result<Vec<Entry>> {
    let typed = layers.iter().flat_map(|layer| {
        let dtypes = s.dtypes(&[DType::F32]).iter();
        dtypes.map(move |&dtype| about(layer, spec(layer, dtype)?))
    });
    subject::entries(s, typed)
}

fn about(layer: &Layer, spec: Conv2dSpec) -> windrow::Result<About<Conv2d>> {
    Ok(About {
        algorithm: None,
        name: layer.name.clone(),
        dtype: spec.x.dtype,
        shape: shape(&spec),
        work: Work::Flops(spec.flops()?),
        sampled: SAMPLED_CHANNELS,
        direct: Direct::Algorithm(Conv2dAlgorithm::Direct),
        spec,
    })
}

pub(crate) fn spec(layer: &Layer, dtype: DType) -> windrow::Result<Conv2dSpec> {
    let x = TensorDesc::contiguous(dtype, &[layer.n, layer.c, layer.h, layer.w])?;
    let w = TensorDesc::contiguous(dtype, &[layer.k, layer.c, 3, 3])?;
    Conv2dSpec::new(x, w, &Conv2dParams::default())
}

pub(crate) fn shape(spec: &Conv2dSpec) -> String {
    format!("{} k{}", super::by_x(spec.x.shape()), spec.w.shape()[0])
}
