//! Convolutions of videos: layers of video decoders, filter packed once.

use super::subject::{self, About, Direct};
use super::{Entry, Selection, Work, by_x};
use windrow::{Conv2dAlgorithm, Conv3d, Conv3dParams, Conv3dSpec, DType, Layout, TensorDesc};

/// Output channels that are compared with the oracle at each end.
const SAMPLED_CHANNELS: usize = 1;

/// A layer: its filter and stride in words, [c, t, h, w], k, filter, stride and padding over frames, rows and columns.
struct Layer {
    name: &'static str,
    x: [usize; 4],
    k: usize,
    filter: [usize; 3],
    stride: [usize; 3],
    padding: [usize; 3],
}

/// A filter of all directions, of frames alone and of one pixel, and half of all directions.
const LAYERS: [Layer; 4] = [
    layer("3x3x3", [96, 6, 480, 832], 96, [3; 3], [1; 3], [1; 3]),
    layer("3x1x1", [384, 6, 120, 208], 384, [3, 1, 1], [1; 3], [1, 0, 0]),
    layer("1x1x1", [96, 6, 240, 416], 192, [1; 3], [1; 3], [0; 3]),
    layer("3x3x3/2", [256, 8, 64, 64], 256, [3; 3], [2; 3], [1; 3]),
];

/// Divisors of the rows and columns, and of the channels, without `--full`. GPUs keep the channels.
const PIXELS: [usize; 2] = [8, 2];
const CHANNELS: usize = 4;

const fn layer(
    name: &'static str,
    x: [usize; 4],
    k: usize,
    filter: [usize; 3],
    stride: [usize; 3],
    padding: [usize; 3],
) -> Layer {
    Layer { name, x, k, filter, stride, padding }
}

pub(super) fn entries(s: &Selection<'_>) -> windrow::Result<Vec<Entry>> {
    let reduced = !s.full;
    let on_cpu = s.options.device == windrow::Device::Cpu;
    let typed = LAYERS.iter().flat_map(|layer| {
        let dtypes = s.dtypes(&[DType::F32]).iter();
        dtypes.map(move |&dtype| about(layer, spec(layer, dtype, reduced, on_cpu)?))
    });
    subject::entries(s, typed)
}

fn about(layer: &Layer, spec: Conv3dSpec) -> windrow::Result<About<Conv3d>> {
    Ok(About {
        algorithm: None,
        name: layer.name.into(),
        dtype: spec.x.dtype,
        shape: format!("{} k{}", by_x(spec.x.shape()), spec.w.shape()[0]),
        work: Work::Flops(spec.flops()?),
        sampled: SAMPLED_CHANNELS,
        direct: Direct::Algorithm(Conv2dAlgorithm::Direct),
        spec,
    })
}

/// The spec of a layer; `reduced` to fewer pixels and, on the CPU, fewer channels.
fn spec(layer: &Layer, dtype: DType, reduced: bool, on_cpu: bool) -> windrow::Result<Conv3dSpec> {
    let Layer { x: [c, t, h, w], k, filter: [kt, r, s], stride, padding, .. } = *layer;
    let pixels = if reduced { PIXELS[usize::from(!on_cpu)] } else { 1 };
    let channels = if reduced && on_cpu { CHANNELS } else { 1 };
    let [c, k, h, w] = [c / channels, k / channels, h / pixels, w / pixels];
    let x = Layout::with_order(&[1, c, t, h, w], &[0, 2, 3, 4, 1])?;
    let filter = TensorDesc::contiguous(dtype, &[k, c, kt, r, s])?;
    let params = Conv3dParams::default().with_stride(stride).with_padding(padding);
    Conv3dSpec::new(TensorDesc::new(dtype, x), filter, &params)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_keep_their_form_when_they_are_reduced() {
        for layer in &LAYERS {
            let of = |reduced, on_cpu| spec(layer, DType::F32, reduced, on_cpu).unwrap();
            let (whole, on_gpu, on_cpu) = (of(false, true), of(true, false), of(true, true));
            assert_eq!(whole.x.shape()[1..], layer.x);
            assert_eq!(on_gpu.w, whole.w, "GPUs keep the channels");
            let flops = [whole, on_gpu, on_cpu].map(|spec| spec.flops().unwrap());
            assert!(flops[0] > flops[1] && flops[1] > flops[2], "{flops:?}");
        }
    }
}
