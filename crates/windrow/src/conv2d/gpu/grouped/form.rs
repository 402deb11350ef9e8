//! The division of outputs among threads and blocks, for groups of few channels.

use super::MAX_TAPS;
use crate::TensorDesc;
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dSpec, Problem};

/// The largest number of threads of a block, and of blocks per multiprocessor if blocks take tiles in turn.
const THREADS: usize = 256;
const BLOCKS: usize = 4;
/// The largest number of planes of a block, and of bytes of shared memory for their inputs.
const MAX_PLANES: usize = 32;
const SHARED_BYTES: usize = 44_000;
/// The limits for groups of a few channels: output channels of a thread, threads of a block, and neighbouring blocks of
/// channels.
const BLOCK_K: usize = 8;
const FEW_THREADS: usize = 128;
const MAX_SLOTS: usize = 8;

/// The division of outputs among threads and blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Form {
    /// A thread computes tiles of neighbouring channels; `lanes` threads are a row of a block.
    Channels { tile: [usize; 2], vector: usize, lanes: usize, blocks: usize },
    /// The threads of a block compute tiles of `planes` planes.
    Planes { tile: [usize; 2], block: [usize; 2], planes: usize, copied: [usize; 2] },
    /// A thread computes the outputs of `rows` rows of a column, for `block` channels of a group. It sums `chunk` input
    /// channels together, of which it loads `vector` as one.
    Few {
        rows: usize,
        block: usize,
        slots: usize,
        chunk: usize,
        vector: usize,
        out: bool,
        blocks: usize,
    },
}

/// The sizes of a launch.
pub(super) struct Shape {
    pub(super) units: usize,
    pub(super) channels: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) blocks: usize,
}

impl Form {
    /// The tiles follow times of the depthwise layers of MobileNetV2, EfficientNet-B0 and ConvNeXt on an H200.
    pub(super) fn choose(
        multiprocessors: usize,
        spec: &Conv2dSpec,
        p: &Problem,
        aligned: bool,
    ) -> Self {
        let busy = |outputs: usize| {
            (p.n * p.k * p.oh * p.ow).div_ceil(outputs) >= THREADS * multiprocessors
        };
        if p.c_group() > 1 {
            return Form::few(multiprocessors, spec, p, aligned);
        }
        let (taps, half, one) = (p.r * p.s, spec.x.dtype.is_half(), p.stride == [1, 1]);
        if !is_channels_last(&spec.x.layout) || !is_channels_last(&spec.y.layout) {
            let many = one && p.oh >= 28 && busy(28);
            let most = if many && taps <= 25 { 16_000 } else { SHARED_BYTES };
            return Form::planes(p, if many { 7 } else { 2 }, most);
        }
        let pairs = aligned
            && p.k_group() == 1
            && [&spec.x, &spec.y].iter().all(|t| {
                let s = t.strides();
                s[1] == 1
                    && t.shape()[1].is_multiple_of(2)
                    && [s[0], s[2], s[3]].iter().all(|s| s % 2 == 0)
            });
        let vector = if pairs && (half || taps <= 9) { 2 } else { 1 };
        let tile = match (one, taps) {
            (true, ..=9) => [7, 4],
            (true, 10..=25) if half => [2, 4],
            (true, 10..=25) => [7, 4],
            (true, _) if half => [7, 4],
            (true, _) if p.oh * p.ow >= 2000 => [4, 4],
            (true, _) => [2, 4],
            (false, ..=9) if !half => [2, 4],
            (false, _) if !half => [2, 7],
            (false, _) => [1, 4],
        };
        let tile = match () {
            () if busy(tile[0] * tile[1] * vector) => tile,
            () if taps > 25 => [2, 4],
            () => [1, 4],
        };
        let vectors = p.k.div_ceil(vector);
        let padded = |lanes: usize| vectors.div_ceil(lanes) * lanes;
        let lanes = (vectors.min(8)..=64).min_by_key(|&lanes| (padded(lanes), 64 - lanes));
        let lanes = lanes.unwrap_or(vectors);
        let mut form = Form::Channels { tile, vector, lanes, blocks: 0 };
        let shape = form.shape(p);
        let tiles = shape.units.div_ceil((THREADS / lanes).max(1));
        let most = (BLOCKS * multiprocessors / shape.channels).max(1);
        if let Form::Channels { blocks, .. } = &mut form {
            *blocks = tiles.min(most);
        }
        form
    }

    fn planes(p: &Problem, height: usize, most_bytes: usize) -> Self {
        let tile = [height, 4];
        let columns = p.ow.div_ceil(tile[1]).clamp(1, 32);
        let copied = |rows: usize| {
            let read = |d: usize, outputs: usize, taps: usize| {
                (outputs - 1) * p.stride[d] + (taps - 1) * p.dilation[d]
            };
            [read(0, rows * tile[0], p.r) + 1, (read(1, columns * tile[1], p.s) + 4) / 4 * 4]
        };
        let bytes = |rows: usize, planes: usize| {
            let [h, w] = copied(rows);
            planes * (h * w * size_of::<f32>() + 4 * MAX_TAPS + 8)
        };
        let mut rows = p.oh.div_ceil(tile[0]).clamp(1, (THREADS / columns).max(1));
        let mut planes = (128 / (rows * columns)).clamp(1, MAX_PLANES);
        while planes > 1 && bytes(rows, planes) > most_bytes {
            planes -= 1;
        }
        while rows > 1 && bytes(rows, planes) > most_bytes {
            rows -= 1;
        }
        Form::Planes { tile, block: [rows, columns], planes, copied: copied(rows) }
    }

    fn few(multiprocessors: usize, spec: &Conv2dSpec, p: &Problem, aligned: bool) -> Self {
        let last = is_channels_last(&spec.x.layout) && is_channels_last(&spec.y.layout);
        let quads = |t: &TensorDesc, channels: usize| {
            let s = t.strides();
            s[1] == 1 && s[2] % 4 == 0 && s[3] % 4 == 0 && channels.is_multiple_of(4)
        };
        let vectors = |t: &TensorDesc| aligned && t.strides()[0] % 4 == 0;
        let block = p.k_group().next_multiple_of(4).min(BLOCK_K);
        let all = p.groups * p.k_group().div_ceil(block);
        let bytes = |slots: usize| slots * block * p.taps() * size_of::<f32>();
        let mut slots = if last { all.next_power_of_two().min(MAX_SLOTS) } else { 1 };
        while slots > 1 && bytes(slots) > SHARED_BYTES {
            slots /= 2;
        }
        let threads = |rows: usize| p.n * p.oh.div_ceil(rows) * p.ow * all;
        let most = if p.stride[0] == 1 { 7 } else { 4 };
        let rows = if threads(most) >= 2 * FEW_THREADS * multiprocessors { most } else { 2 };
        let chunk = if quads(&spec.x, p.c_group()) { 4 } else { 1 };
        let vector = if vectors(&spec.x) { chunk } else { 1 };
        let out = vectors(&spec.y) && quads(&spec.y, p.k_group());
        let units = p.n * p.oh.div_ceil(rows) * p.ow;
        let most = (2 * BLOCKS * multiprocessors / all.div_ceil(slots)).max(1);
        let blocks = units.div_ceil(FEW_THREADS / slots).min(most);
        Form::Few { rows, block, slots, chunk, vector, out, blocks }
    }

    pub(super) fn threads(self) -> usize {
        match self {
            Form::Few { .. } => FEW_THREADS,
            Form::Channels { lanes, .. } => (THREADS / lanes).max(1) * lanes,
            Form::Planes { block, planes, .. } => {
                (planes * block[0] * block[1]).next_multiple_of(32)
            }
        }
    }

    pub(super) fn shape(self, p: &Problem) -> Shape {
        match self {
            Form::Channels { tile, vector, lanes, blocks } => {
                let (rows, columns) = (p.oh.div_ceil(tile[0]), p.ow.div_ceil(tile[1]));
                let channels = p.k.div_ceil(vector * lanes);
                let units = p.n * rows * columns;
                Shape { units, channels, rows, columns, blocks: blocks * channels }
            }
            Form::Planes { tile, block, planes, .. } => {
                let rows = p.oh.div_ceil(block[0] * tile[0]);
                let columns = p.ow.div_ceil(block[1] * tile[1]);
                let units = p.n * p.k;
                let blocks = units.div_ceil(planes) * rows * columns;
                Shape { units, channels: p.k, rows, columns, blocks }
            }
            Form::Few { rows, block, slots, blocks, .. } => {
                let channels = (p.groups * p.k_group().div_ceil(block)).div_ceil(slots);
                let (rows, columns) = (p.oh.div_ceil(rows), p.ow);
                Shape {
                    units: p.n * rows * columns,
                    channels,
                    rows,
                    columns,
                    blocks: blocks * channels,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::Conv2dParams;
    use crate::{DType, Layout};

    #[test]
    fn blocks_of_channels_beside_each_other_fit_shared_memory() {
        let form = |order: [usize; 4], [channels, outputs]: [usize; 2], n, stride| {
            let layout = Layout::with_order(&[n, 32 * channels, 28, 28], &order).unwrap();
            let w = TensorDesc::contiguous(DType::F32, &[32 * outputs, channels, 3, 3]).unwrap();
            let params = Conv2dParams { stride: [stride; 2], groups: 32, ..Default::default() };
            let x = TensorDesc { dtype: DType::F32, layout };
            let spec = Conv2dSpec::new(x, w, &params).unwrap();
            match Form::choose(132, &spec, &spec.problem().unwrap(), true) {
                Form::Few { rows, block, slots, vector, out, .. } => {
                    (rows, block, slots, vector, out)
                }
                other => panic!("{other:?}"),
            }
        };
        let (planes, last) = ([0, 1, 2, 3], [0, 2, 3, 1]);
        assert_eq!(form(planes, [4, 4], 64, 1), (7, 4, 1, 1, false));
        assert_eq!(form(planes, [16, 16], 64, 2), (4, 8, 1, 1, false));
        assert_eq!(form(last, [4, 4], 64, 1), (7, 4, 8, 4, true));
        assert_eq!(form(last, [16, 16], 64, 1), (7, 8, 8, 4, true));
        assert_eq!(form(last, [32, 32], 64, 1), (7, 8, 4, 4, true));
        assert_eq!(form(last, [4, 4], 1, 1), (2, 4, 8, 4, true), "few threads");
        assert_eq!(form(last, [3, 6], 64, 1), (7, 8, 8, 1, false), "no whole vectors");
    }
}
