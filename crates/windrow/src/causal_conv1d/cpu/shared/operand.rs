//! Addresses of strided operands, and weights laid out for kernels.

use super::GROUP;
use crate::causal_conv1d::Problem;
use crate::cpu::{Kernel, SendPtr, Simd, SimdElement, array};
use crate::dtype::with_element;
use crate::{TensorMut, TensorRef};
use std::ops::Range;

/// A [rows, channels, tokens] tensor of `T`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand<T> {
    ptr: SendPtr<T>,
    /// Distances of rows, channels and tokens, in elements.
    pub strides: [isize; 3],
}

impl<T: SimdElement> Operand<T> {
    /// A tensor to read.
    pub(crate) fn input(view: &TensorRef<'_>) -> Self {
        debug_assert_eq!(view.dtype(), T::DTYPE);
        Operand { ptr: SendPtr(view.as_ptr().cast_mut().cast()), strides: strides(view.strides()) }
    }

    /// A tensor to write.
    pub(crate) fn output(view: &mut TensorMut<'_>) -> Self {
        debug_assert_eq!(view.dtype(), T::DTYPE);
        let strides = strides(view.strides());
        Operand { ptr: SendPtr(view.as_mut_ptr().cast()), strides }
    }

    /// The same memory, whose first channel has this number.
    pub(crate) fn with_first_channel(mut self, first: usize) -> Self {
        let before = (first as isize).wrapping_mul(self.strides[1]);
        self.ptr = SendPtr(self.ptr.get().wrapping_offset(before.wrapping_neg()));
        self
    }

    /// Address of an element; within the tensor if the indices are.
    #[inline(always)]
    pub(crate) fn at(&self, row: usize, channel: usize, token: usize) -> *mut T {
        let [r, c, t] = self.strides;
        self.ptr.get().wrapping_offset(row as isize * r + channel as isize * c + token as isize * t)
    }
}

fn strides(given: &[isize]) -> [isize; 3] {
    [given[0], given[1], given[2]]
}

/// Weight [d, width] and bias [d] of a depthwise convolution as the caller has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parameters<'a> {
    pub weight: TensorRef<'a>,
    pub bias: Option<TensorRef<'a>>,
}

/// Weight and bias of a block of channels in f32: tap `k` of channel `c` at `weight[k * stride + c]`.
/// Zero in the channels that fill the last group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Staged {
    pub weight: *const f32,
    pub bias: *const f32,
    pub stride: usize,
}

impl Staged {
    /// The same from channel `c` of the block on.
    #[inline(always)]
    pub(crate) fn from(&self, c: usize) -> Self {
        Staged { weight: self.weight.wrapping_add(c), bias: self.bias.wrapping_add(c), ..*self }
    }
}

impl Parameters<'_> {
    /// Elements that [`Parameters::stage`] needs for `channels` channels.
    pub(crate) fn staged_len(width: usize, channels: usize) -> Option<usize> {
        // One copy transposed, the bias, and one copy as given.
        width.checked_mul(2)?.checked_add(1)?.checked_mul(channels.next_multiple_of(GROUP))
    }

    /// Lays out weight and bias of `channels`.
    ///
    /// # Safety
    /// `to` holds [`Parameters::staged_len`] elements; the channels are in the tensors.
    #[inline(always)]
    pub(crate) unsafe fn stage<S: Simd>(
        &self,
        s: S,
        problem: &Problem,
        channels: Range<usize>,
        to: *mut f32,
    ) -> Staged {
        s.outlined(Stage { parameters: self, width: problem.width, channels, to })
    }
}

/// The kernel that lays out weight and bias of some channels. Only [`Parameters::stage`] makes it, whose caller
/// guarantees that the pointer is valid.
struct Stage<'a> {
    parameters: &'a Parameters<'a>,
    width: usize,
    channels: Range<usize>,
    to: *mut f32,
}

impl Kernel for Stage<'_> {
    type Output = Staged;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Staged {
        let Stage { parameters: Parameters { weight, bias: given }, width, channels, to } = self;
        let stride = channels.len().next_multiple_of(GROUP);
        // SAFETY: the three parts follow each other in `to`.
        unsafe {
            let bias = to.add(width * stride);
            let flat = bias.add(stride);
            let strides = [weight.strides()[0], weight.strides()[1]];
            let first = channels.start as isize * strides[0];
            gather(s, weight, first, [channels.len(), width], strides, flat);
            transpose(flat, channels.len(), width, to, stride);
            match given {
                Some(b) => {
                    let step = b.strides()[0];
                    let first = channels.start as isize * step;
                    gather(s, b, first, [1, channels.len()], [0, step], bias);
                    bias.add(channels.len()).write_bytes(0, stride - channels.len());
                }
                None => bias.write_bytes(0, stride),
            }
            Staged { weight: to, bias, stride }
        }
    }
}

/// `to[k * stride + c] = from[c * width + k]`, zero beyond the last channel.
#[inline(always)]
unsafe fn transpose(from: *const f32, channels: usize, width: usize, to: *mut f32, stride: usize) {
    /// The widths that are compiled with the width known.
    #[inline(always)]
    unsafe fn fixed<const W: usize>(
        from: *const f32,
        channels: usize,
        to: *mut f32,
        stride: usize,
    ) {
        // SAFETY: promised by the caller.
        unsafe { split(from, array::<_, W>(|k| to.add(k * stride)), channels) }
    }
    // SAFETY: promised by the caller.
    unsafe {
        match width {
            2 => fixed::<2>(from, channels, to, stride),
            3 => fixed::<3>(from, channels, to, stride),
            4 => fixed::<4>(from, channels, to, stride),
            _ => {
                for c in 0..channels {
                    for k in 0..width {
                        to.add(k * stride + c).write(*from.add(c * width + k));
                    }
                }
            }
        }
        for k in 0..width {
            to.add(k * stride + channels).write_bytes(0, stride - channels);
        }
    }
}

/// `to[i][c] = from[c * N + i]` for `n` values of c: a loop that the compiler turns into shuffles.
///
/// # Safety
/// `n * N` elements are readable at `from` and `n` writable at each of `to`, none of them shared.
#[inline(always)]
pub(crate) unsafe fn split<T: SimdElement, const N: usize>(
    from: *const T,
    to: [*mut T; N],
    n: usize,
) {
    // SAFETY: promised by the caller.
    unsafe {
        for c in 0..n {
            for (i, to) in to.iter().enumerate() {
                to.add(c).write(*from.add(c * N + i));
            }
        }
    }
}

/// The reverse of [`split`].
///
/// # Safety
/// `n` elements are readable at each of `from` and `n * N` writable at `to`, which are not shared.
#[inline(always)]
pub(crate) unsafe fn join<T: SimdElement, const N: usize>(
    from: [*const T; N],
    to: *mut T,
    n: usize,
) {
    // SAFETY: promised by the caller.
    unsafe {
        for c in 0..n {
            for (i, from) in from.iter().enumerate() {
                to.add(c * N + i).write(*from.add(c));
            }
        }
    }
}

/// Row-major f32 copy of `rows` x `cols` elements of `view` from offset `first` on.
///
/// # Safety
/// The elements are in the view, and `to` holds as many.
#[inline(always)]
pub(crate) unsafe fn gather<S: Simd>(
    s: S,
    view: &TensorRef<'_>,
    first: isize,
    shape: [usize; 2],
    strides: [isize; 2],
    to: *mut f32,
) {
    // SAFETY: passed on; the type is the view's.
    unsafe {
        with_element!(view.dtype(), T => {
            gather_as::<S, T>(s, view.as_ptr().cast(), first, shape, strides, to);
        });
    }
}

/// # Safety
/// As [`gather`], for elements of type T from `base` on.
#[inline(always)]
pub(crate) unsafe fn gather_as<S: Simd, T: SimdElement>(
    s: S,
    base: *const T,
    first: isize,
    [rows, cols]: [usize; 2],
    [row, col]: [isize; 2],
    to: *mut f32,
) {
    let len = rows * cols;
    if len == 0 {
        // Strides of a tensor without elements can be anything, and so `first`.
        return;
    }
    // SAFETY: promised by the caller; without gaps the elements are one piece.
    unsafe {
        let base = base.offset(first);
        if (col == 1 || cols <= 1) && (row == cols as isize || rows <= 1) {
            let whole = len / S::LANES * S::LANES;
            for i in (0..whole).step_by(S::LANES) {
                s.store(to.add(i), T::load(s, base.add(i)));
            }
            if whole < len {
                let n = len - whole;
                s.store_first(to.add(whole), T::load_first(s, base.add(whole), n), n);
            }
            return;
        }
        for i in 0..rows {
            for j in 0..cols {
                let from = base.offset(i as isize * row + j as isize * col);
                to.add(i * cols + j).write(from.read().to_f32());
            }
        }
    }
}
