//! Causal depthwise convolutions of width 4 with bias and SiLU, as Mamba's.

use super::subject::{self, About, Direct};
use super::{Entry, Selection, Work, by_x};
use windrow::{
    Activation, CausalConv1d, CausalConv1dAlgorithm, CausalConv1dSpec, DType, Layout, TensorDesc,
};

const WIDTH: usize = 4;
/// Channels that are compared with the oracle at each end.
const SAMPLED_CHANNELS: usize = 8;

/// [b, d, l], whether channels lie next to each other, and the algorithm if it is not the cost model's choice.
type Shape = ([usize; 3], bool, Option<CausalConv1dAlgorithm>);

const CASES: [Shape; 4] = [
    ([1, 64, 2048], false, None),
    ([1, 64, 2048], false, Some(CausalConv1dAlgorithm::Im2colGemm)),
    ([1, 2048, 2048], false, None),
    ([2, 4096, 512], true, None),
];
const FULL_CASES: [Shape; 3] =
    [([8, 4096, 2048], false, None), ([8, 4096, 2048], true, None), ([2, 8192, 8192], false, None)];

pub(super) fn entries(s: &Selection<'_>) -> windrow::Result<Vec<Entry>> {
    let cases = CASES.into_iter().chain(if s.full { &FULL_CASES[..] } else { &[] }.iter().copied());
    let typed = cases.flat_map(|(shape, channel_last, algorithm)| {
        let dtypes = s.dtypes(&[DType::F32, DType::BF16]).iter();
        dtypes.map(move |&dtype| about(spec(shape, channel_last, dtype)?, algorithm))
    });
    subject::entries(s, typed)
}

fn about(
    spec: CausalConv1dSpec,
    algorithm: Option<CausalConv1dAlgorithm>,
) -> windrow::Result<About<CausalConv1d>> {
    Ok(About {
        algorithm,
        name: layout(&spec).into(),
        dtype: spec.x.dtype,
        shape: format!("{} w{WIDTH}", by_x(spec.x.shape())),
        work: Work::Bytes((spec.x.bytes() + spec.y.bytes()) as f64),
        sampled: SAMPLED_CHANNELS,
        direct: Direct::Algorithm(CausalConv1dAlgorithm::Direct),
        spec,
    })
}

fn spec(shape: [usize; 3], channel_last: bool, dtype: DType) -> windrow::Result<CausalConv1dSpec> {
    let order = if channel_last { [0, 2, 1] } else { [0, 1, 2] };
    let x = TensorDesc::new(dtype, Layout::with_order(&shape, &order)?);
    let weight = TensorDesc::contiguous(dtype, &[shape[1], WIDTH])?;
    let bias = TensorDesc::contiguous(dtype, &[shape[1]])?;
    Ok(CausalConv1dSpec::new(x, weight)?.with_bias(bias).with_activation(Activation::Silu))
}

/// The specs of the cases, each once.
pub(crate) fn specs(dtype: DType, full: bool) -> windrow::Result<Vec<CausalConv1dSpec>> {
    let cases = CASES.into_iter().chain(if full { &FULL_CASES[..] } else { &[] }.iter().copied());
    cases
        .filter(|(_, _, algorithm)| algorithm.is_none())
        .map(|(shape, channel_last, _)| spec(shape, channel_last, dtype))
        .collect()
}

/// The layout of x: `channels-first` or `channels-last`.
pub(crate) fn layout(spec: &CausalConv1dSpec) -> &'static str {
    if spec.x.strides()[1] == 1 { "channels-last" } else { "channels-first" }
}
