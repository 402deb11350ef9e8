//! Bias, residual, activation and rounding of finished sums on their way to the destination.

use crate::cpu::math::{Rows, activate_all, activate_rows};
use crate::cpu::{MAX_LANES, Simd, SimdElement};
use crate::{Activation, TensorMut, TensorRef};
use std::mem::MaybeUninit;

/// The neighbours in the destination, which fill a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lanes {
    Pixels,
    Channels,
}

/// A tensor of the destination's type and strides that is added to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Residual {
    /// The residual for the element at address `to` of the destination; null for none.
    from: *const u8,
    to: usize,
}

impl Residual {
    pub(crate) const NONE: Residual = Residual { from: std::ptr::null(), to: 0 };

    pub(crate) fn new(residual: Option<&TensorRef<'_>>, y: &TensorMut<'_>) -> Self {
        let of = |view: &TensorRef<'_>| Residual { from: view.as_ptr(), to: y.as_ptr().addr() };
        residual.map_or(Self::NONE, of)
    }

    #[inline(always)]
    pub(crate) fn is_none(self) -> bool {
        self.from.is_null()
    }

    /// The residual for an element of the destination; null for none.
    #[inline(always)]
    pub(crate) fn at<T>(self, dst: *const T) -> *const T {
        match self.is_none() {
            true => std::ptr::null(),
            false => self.from.wrapping_add(dst.addr().wrapping_sub(self.to)).cast(),
        }
    }

    /// The sums of `len` elements from `dst` on with what belongs to them.
    ///
    /// # Safety
    /// These are elements of the destination.
    #[inline(always)]
    pub(crate) unsafe fn add<S: Simd, T: SimdElement>(
        self,
        s: S,
        sum: S::F32,
        dst: *const T,
        len: usize,
    ) -> S::F32 {
        if self.is_none() {
            return sum;
        }
        let from = self.at(dst);
        // SAFETY: the residual has them as well.
        unsafe {
            let whole = len == S::LANES;
            s.add(sum, if whole { T::load(s, from) } else { T::load_first(s, from, len) })
        }
    }

    /// The same of elements `stride` apart.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    pub(crate) unsafe fn add_apart<S: Simd, T: SimdElement>(
        self,
        s: S,
        sum: S::F32,
        dst: *const T,
        stride: isize,
        len: usize,
    ) -> S::F32 {
        // SAFETY: passed on.
        unsafe {
            if self.is_none() || stride == 1 {
                return self.add(s, sum, dst, len);
            }
            let mut lanes = [0f32; MAX_LANES];
            for (i, lane) in lanes.iter_mut().enumerate().take(len) {
                *lane = self.at(dst.wrapping_offset(i as isize * stride)).read().to_f32();
            }
            s.add(sum, s.load(lanes.as_ptr()))
        }
    }
}

/// The activation of most networks: sums held between two numbers. NaN stays NaN.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub low: f32,
    pub high: f32,
}

impl Bounds {
    pub(crate) const NONE: Bounds = Bounds { low: f32::NEG_INFINITY, high: f32::INFINITY };

    #[inline(always)]
    pub(crate) fn of<S: Simd>(self, s: S, sum: S::F32) -> S::F32 {
        s.min(s.splat(self.high), s.max(s.splat(self.low), sum))
    }
}

/// Room for sums on their way through memory, where no vector lies in two cache lines: such a vector is read back from
/// the cache only after it has been written there.
#[repr(align(64))]
pub(crate) struct Sums<const LEN: usize>([MaybeUninit<f32>; LEN]);

impl<const LEN: usize> Sums<LEN> {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Sums([MaybeUninit::uninit(); LEN])
    }

    #[inline(always)]
    pub(crate) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }
}

/// The operations after a sum: bias of each channel, residual, then activation. With a residual only a clamp can be the
/// activation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epilogue {
    /// Bias of channel 0, in f32; null for none.
    pub bias: *const f32,
    pub residual: Residual,
    pub activation: Activation,
}

// SAFETY: what it names is only read.
unsafe impl Sync for Epilogue {}

impl Epilogue {
    /// Nothing.
    pub(crate) const NONE: Epilogue = Epilogue {
        bias: std::ptr::null(),
        residual: Residual::NONE,
        activation: Activation::Identity,
    };

    /// The activation as bounds, which the usual ones are.
    #[inline(always)]
    pub(crate) fn bounds(&self) -> Option<Bounds> {
        self.activation.bounds().map(|[low, high]| Bounds { low, high })
    }

    /// The bias of `len` channels from one on.
    ///
    /// # Safety
    /// They exist.
    #[inline(always)]
    pub(crate) unsafe fn biases<S: Simd>(&self, s: S, channel: usize, len: usize) -> S::F32 {
        // SAFETY: promised by the caller.
        unsafe {
            match self.bias.is_null() {
                true => s.zero(),
                false if len == S::LANES => s.load(self.bias.add(channel)),
                false => s.load_first(self.bias.add(channel), len),
            }
        }
    }

    /// Applies an activation that has no bounds to `len` sums with bias: [`Epilogue::store`] leaves it out.
    ///
    /// # Safety
    /// The sums are readable and writable.
    #[inline(always)]
    pub(crate) unsafe fn activate_all<S: Simd>(&self, s: S, sums: *mut f32, len: usize) {
        if self.bounds().is_none() {
            // SAFETY: passed on.
            unsafe { activate_all(s, self.activation, sums, len) };
        }
    }

    /// Brings sums with bias, in `rows` rows of `cols` elements each, `width` elements apart, to rows from `dst` on that
    /// are `stride` apart, through an activation that has no bounds. There is no residual.
    ///
    /// # Safety
    /// Whole vectors of sums are readable. The destination's elements are not accessed by anything else.
    #[inline(always)]
    pub(crate) unsafe fn activate_rows<S: Simd, T: SimdElement>(
        &self,
        s: S,
        (from, width): (*const f32, usize),
        (to, stride): (*mut T, isize),
        [rows, cols]: [usize; 2],
    ) {
        let activation = self.activation;
        // SAFETY: passed on.
        unsafe { activate_rows(s, Rows { activation, from, width, to, stride, rows, cols }) }
    }

    /// Brings sums with bias, which [`Epilogue::activate_all`] has seen, to `len` elements from `dst` on.
    ///
    /// # Safety
    /// These are elements of the destination that nothing else accesses.
    #[inline(always)]
    pub(crate) unsafe fn store<S: Simd, T: SimdElement>(
        &self,
        s: S,
        sum: S::F32,
        dst: *mut T,
        len: usize,
    ) {
        // SAFETY: passed on.
        unsafe {
            let sum = self.residual.add(s, sum, dst, len);
            let y = self.bounds().unwrap_or(Bounds::NONE).of(s, sum);
            if len == S::LANES { T::store(s, dst, y) } else { T::store_first(s, dst, y, len) }
        }
    }

    /// The part that is applied before results are stored: all of it, or only the bias if the rest is left to
    /// [`Epilogue::late`].
    #[inline(always)]
    pub(crate) fn early(&self) -> Self {
        match self.residual.is_none() {
            true => *self,
            false => Epilogue { bias: self.bias, ..Epilogue::NONE },
        }
    }

    /// Applies what [`Epilogue::early`] left to `len` elements from `dst` on, `stride` apart.
    ///
    /// # Safety
    /// These are elements of the destination.
    #[inline(always)]
    pub(crate) unsafe fn late<S: Simd, T: SimdElement>(
        &self,
        s: S,
        sum: S::F32,
        dst: *const T,
        stride: isize,
        len: usize,
    ) -> S::F32 {
        if self.residual.is_none() {
            return sum;
        }
        // SAFETY: passed on.
        let sum = unsafe { self.residual.add_apart(s, sum, dst, stride, len) };
        self.bounds().unwrap_or(Bounds::NONE).of(s, sum)
    }

    /// The same for the channels of a group of `k` channels.
    pub(crate) fn for_group(self, group: usize, k: usize) -> Self {
        self.for_channels(group * k)
    }

    /// The same for the channels from one on.
    pub(crate) fn for_channels(self, channel: usize) -> Self {
        let bias = if self.bias.is_null() { self.bias } else { self.bias.wrapping_add(channel) };
        Epilogue { bias, ..self }
    }
}

/// Stores `len` lanes, `stride` apart.
///
/// # Safety
/// They are writable.
#[inline(always)]
pub(crate) unsafe fn scatter<S: Simd, T: SimdElement>(
    s: S,
    y: S::F32,
    dst: *mut T,
    stride: isize,
    len: usize,
) {
    let mut lanes = [0f32; MAX_LANES];
    // SAFETY: promised by the caller.
    unsafe {
        s.store(lanes.as_mut_ptr(), y);
        for (i, &y) in lanes[..len].iter().enumerate() {
            dst.offset(i as isize * stride).write(T::from_f32(y));
        }
    }
}
