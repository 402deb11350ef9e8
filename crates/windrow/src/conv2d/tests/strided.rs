//! Memory of tensors of any strides.

use super::*;

/// Memory of one element type, larger than the tensor in it, which may have any strides.
pub(in crate::conv2d) struct Strided {
    desc: TensorDesc,
    offset: usize,
    data: Data,
}

enum Data {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

/// The layout of a tensor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::conv2d) enum Arrangement {
    Nchw,
    ChannelsLast,
    /// Gaps between elements, rows, and so on.
    Gaps,
    /// Channels-last with gaps between pixels, images in reverse order.
    Reversed,
}

pub(super) const ARRANGEMENTS: [Arrangement; 4] =
    [Arrangement::Nchw, Arrangement::ChannelsLast, Arrangement::Gaps, Arrangement::Reversed];

pub(super) fn layout(shape: &[usize; 4], form: Arrangement) -> Layout {
    let dense = |order: &[usize]| Layout::with_order(shape, order).unwrap();
    match form {
        Arrangement::Nchw => dense(&[0, 1, 2, 3]),
        Arrangement::ChannelsLast => dense(&[0, 2, 3, 1]),
        Arrangement::Gaps => {
            let padded = [shape[0], shape[1] + 1, shape[2] + 2, shape[3] * 2 + 1];
            let s = Layout::contiguous(&padded).unwrap();
            let s = s.strides();
            Layout::strided(shape, &[s[0], s[1], s[2], 2]).unwrap()
        }
        Arrangement::Reversed => {
            let padded = [shape[0], shape[1] + 3, shape[2], shape[3]];
            let s = Layout::with_order(&padded, &[0, 2, 3, 1]).unwrap();
            let s = s.strides();
            Layout::strided(shape, &[-s[0], s[1], s[2], s[3]]).unwrap()
        }
    }
}

impl Strided {
    pub(super) fn new(dtype: DType, layout: Layout, seed: u64) -> Self {
        let (low, high) = layout.extent().unwrap_or((0, -1));
        let len = (high - low + 1) as usize;
        // Values in the gaps that would be seen.
        let values = random(seed, len, -1.0, 1.0);
        let data = match dtype {
            DType::F32 => Data::F32(values.iter().map(|&v| v as f32).collect()),
            DType::F16 => Data::F16(values.iter().map(|&v| f16::from_f64(v)).collect()),
            DType::BF16 => Data::BF16(values.iter().map(|&v| bf16::from_f64(v)).collect()),
            other => panic!("{other}"),
        };
        Strided { desc: TensorDesc { dtype, layout }, offset: -low as usize, data }
    }

    pub(super) fn view(&self) -> TensorRef<'_> {
        let (offset, layout) = (self.offset, self.desc.layout);
        match &self.data {
            Data::F32(d) => TensorRef::strided(d, offset, layout),
            Data::F16(d) => TensorRef::strided(d, offset, layout),
            Data::BF16(d) => TensorRef::strided(d, offset, layout),
        }
        .unwrap()
    }

    pub(super) fn view_mut(&mut self) -> TensorMut<'_> {
        let (offset, layout) = (self.offset, self.desc.layout);
        match &mut self.data {
            Data::F32(d) => TensorMut::strided(d, offset, layout),
            Data::F16(d) => TensorMut::strided(d, offset, layout),
            Data::BF16(d) => TensorMut::strided(d, offset, layout),
        }
        .unwrap()
    }

    /// The bits of every element in memory, gaps included.
    pub(super) fn bits(&self) -> Vec<u32> {
        match &self.data {
            Data::F32(d) => d.iter().map(|v| v.to_bits()).collect(),
            Data::F16(d) => d.iter().map(|v| v.to_bits().into()).collect(),
            Data::BF16(d) => d.iter().map(|v| v.to_bits().into()).collect(),
        }
    }

    /// The bits of the elements of the tensor only, set to zero elsewhere, and the other way round.
    pub(super) fn split(&self) -> (Vec<u32>, Vec<u32>) {
        let (mut inside, mut outside) = (vec![0; self.bits().len()], self.bits());
        crate::tensor::for_each_offset(&self.desc.layout, |o| {
            let i = (o + self.offset as isize) as usize;
            inside[i] = std::mem::take(&mut outside[i]);
        });
        (inside, outside)
    }
}
