//! Loops over operands of the same shape, and their encoding as 64-bit kernel parameters.

use crate::gpu::{Field, KernelSpec, Launch, Params};
use crate::{MAX_RANK, TensorDesc};

/// A dimension that operands share, with the stride of each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Dim<const N: usize> {
    pub(super) size: usize,
    pub(super) strides: [isize; N],
}

/// Loops over operands of the same shape, the innermost first. Dimensions are merged as far as the strides allow.
#[derive(Clone, Debug)]
pub(super) struct Loops<const N: usize> {
    pub(super) inner: Dim<N>,
    pub(super) outer: Vec<Dim<N>>,
    /// True if neighbouring elements of the inner loop are neighbours in memory, in all operands for which this was
    /// requested.
    pub(super) unit: bool,
}

/// The strides of a tensor; zeros for `None`.
pub(super) fn strides(desc: Option<&TensorDesc>) -> [isize; MAX_RANK] {
    let mut out = [0; MAX_RANK];
    if let Some(desc) = desc {
        out[..desc.strides().len()].copy_from_slice(desc.strides());
    }
    out
}

/// Strides of a bias along the last of `rank` dimensions.
pub(super) fn bias_strides(bias: Option<&TensorDesc>, rank: usize) -> [isize; MAX_RANK] {
    let mut out = [0; MAX_RANK];
    if let Some(bias) = bias {
        out[rank - 1] = bias.strides()[0];
    }
    out
}

impl<const N: usize> Loops<N> {
    /// The loops for these operands, ordered by the strides of the first one. `self.unit` requires stride 1 of operand
    /// `i` only if `unit[i]` is true.
    pub(super) fn new(shape: &[usize], strides: [[isize; MAX_RANK]; N], unit: [bool; N]) -> Self {
        let mut dims: Vec<Dim<N>> = (0..shape.len())
            .filter(|&d| shape[d] != 1)
            .map(|d| Dim { size: shape[d], strides: strides.map(|s| s[d]) })
            .collect();
        dims.sort_by_key(|d| d.strides[0].unsigned_abs());
        let mut merged: Vec<Dim<N>> = Vec::new();
        for dim in dims {
            match merged.last_mut() {
                Some(last)
                    if (0..N).all(|i| dim.strides[i] == last.strides[i] * last.size as isize) =>
                {
                    last.size *= dim.size;
                }
                _ => merged.push(dim),
            }
        }
        let inner =
            if merged.is_empty() { Dim { size: 1, strides: [1; N] } } else { merged.remove(0) };
        let unit = (0..N).all(|i| !unit[i] || inner.strides[i] == 1);
        Loops { inner, outer: merged, unit }
    }

    pub(super) fn rows(&self) -> usize {
        self.outer.iter().map(|d| d.size).product()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.inner.size == 0 || self.rows() == 0
    }

    pub(super) fn rank(&self) -> usize {
        self.outer.len()
    }

    /// Adds the words of the structure `Shape` of `gelu.cuh`.
    pub(super) fn push_shape(&self, words: &mut Words) {
        words.begin("shape");
        words.push(self.rows());
        words.push(self.inner.size);
        words.push(usize::from(self.unit));
        for d in 0..self.rank().max(1) {
            words.push(self.outer.get(d).map_or(1, |d| d.size));
        }
    }

    /// Adds the words of an `Operand` of `gelu.cuh`, and returns the position of its pointer.
    pub(super) fn push_operand(
        &self,
        words: &mut Words,
        name: &'static str,
        i: usize,
        ptr: *const u8,
    ) -> usize {
        let at = words.len;
        words.begin(name);
        words.push(ptr as usize);
        words.push(self.inner.strides[i] as usize);
        for d in 0..self.rank().max(1) {
            words.push(self.outer.get(d).map_or(0, |d| d.strides[i]) as usize);
        }
        at
    }

    /// The launch with one thread for every `vector` elements of a row. The first access of a row may be shorter than
    /// `access`, for alignment. If there is only one row, each thread has `unroll` times as many elements. `block` is
    /// the number of threads of a block, a power of two.
    pub(super) fn launch(
        &self,
        vector: usize,
        access: usize,
        unroll: usize,
        block: usize,
    ) -> Launch {
        let unroll = if self.rank() == 0 { unroll } else { 1 };
        let items = self.items(vector, access).div_ceil(unroll);
        let x = if self.rank() == 0 { block } else { items.next_power_of_two().min(block) };
        let y = block / x;
        let rows = self.rows().div_ceil(y).min(65535);
        Launch { grid: [items.div_ceil(x) as u32, rows as u32, 1], block: [x as u32, y as u32, 1] }
    }

    fn items(&self, vector: usize, access: usize) -> usize {
        (self.inner.size + if self.unit { access - 1 } else { 0 }).div_ceil(vector)
    }
}

/// The parameters of a kernel as 64-bit words. Their number depends on the rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    pub(super) words: [usize; 96],
    len: usize,
    /// Fields of the kernel's structure, and the words that they begin at.
    fields: [(&'static str, usize); 8],
    field_count: usize,
}

// SAFETY: the words come first; which fields they are is compared by `Words::agreement`.
unsafe impl Params for Words {
    const FIELDS: &'static [Field] = &[];
}

impl Words {
    pub(super) fn new() -> Self {
        Words { words: [0; 96], len: 0, fields: [("", 0); 8], field_count: 0 }
    }

    /// Starts a field with this name; values that are pushed from now on belong to it.
    pub(super) fn begin(&mut self, field: &'static str) {
        self.fields[self.field_count] = (field, self.len);
        self.field_count += 1;
    }

    pub(super) fn push(&mut self, word: usize) {
        self.words[self.len] = word;
        self.len += 1;
    }

    /// Adds the fields to the kernel that has these parameters.
    pub(super) fn describe(&self, kernel: KernelSpec) -> KernelSpec {
        let word = size_of::<usize>();
        let ends = self.fields[1..self.field_count].iter().map(|(_, at)| *at).chain([self.len]);
        let fields = self.fields[..self.field_count].iter().zip(ends);
        let fields = fields.map(|((name, at), end)| (*name, at * word, (end - at) * word));
        kernel.params_of::<Words>(fields, self.len * word)
    }
}
