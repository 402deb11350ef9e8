//! Loads and stores of the element types as vectors of f32.

use super::{MAX_LANES, Simd};
use crate::Element;
use half::{bf16, f16};

/// Elements that kernels load as f32 vectors and store rounded.
pub(crate) trait SimdElement: Element {
    /// Loads a vector.
    ///
    /// # Safety
    /// `LANES` elements are readable at `p`.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F32;
    /// A vector of one element in all lanes.
    ///
    /// # Safety
    /// It is readable at `p`.
    unsafe fn splat<S: Simd>(s: S, p: *const Self) -> S::F32;
    /// Stores a vector, rounded to nearest even.
    ///
    /// # Safety
    /// `LANES` elements are writable at `p`.
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::F32);
    /// Loads two vectors, in an order that [`SimdElement::store2`] undoes.
    /// # Safety: `2 LANES` elements are readable at `p`.
    unsafe fn load2<S: Simd>(s: S, p: *const Self) -> [S::F32; 2];
    /// Stores two vectors, with non-temporal stores if `STREAM` (see [`Simd::stream`]).
    /// # Safety: `2 LANES` elements are writable at `p`, aligned to their size if `STREAM`.
    unsafe fn store2<S: Simd, const STREAM: bool>(s: S, p: *mut Self, v: [S::F32; 2]);
    /// Stores like [`SimdElement::store2`], for numbers that are not NaN. In f16 and bf16, ties may be rounded away
    /// from zero instead of to even.
    /// # Safety: as for [`SimdElement::store2`].
    #[inline(always)]
    unsafe fn store2_numbers<S: Simd, const STREAM: bool>(s: S, p: *mut Self, v: [S::F32; 2]) {
        // SAFETY: passed on.
        unsafe { Self::store2::<S, STREAM>(s, p, v) }
    }
    /// Converts two vectors from the order of memory to that of [`SimdElement::load2`].
    #[inline(always)]
    fn order2<S: Simd>(_: S, v: [S::F32; 2]) -> [S::F32; 2] {
        v
    }
    /// Stores a vector with a non-temporal store. Call [`Simd::stream_fence`] after a series of them.
    /// # Safety
    /// `LANES` elements are writable at `p`, aligned to their size together.
    unsafe fn stream<S: Simd>(s: S, p: *mut Self, v: S::F32);
    /// Loads the first `n <= LANES` elements; the others are zero.
    /// # Safety: `n` elements are readable at `p`.
    unsafe fn load_first<S: Simd>(s: S, p: *const Self, n: usize) -> S::F32;
    /// Stores the first `n <= LANES` elements.
    /// # Safety: `n` elements are writable at `p`.
    unsafe fn store_first<S: Simd>(s: S, p: *mut Self, v: S::F32, n: usize);
    fn to_f32(self) -> f32;
    fn from_f32(x: f32) -> Self;
}

impl SimdElement for f32 {
    #[inline(always)]
    unsafe fn splat<S: Simd>(s: S, p: *const Self) -> S::F32 {
        // SAFETY: passed on.
        s.splat(unsafe { p.read() })
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F32 {
        // SAFETY: passed on.
        unsafe { s.load(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::F32) {
        // SAFETY: passed on.
        unsafe { s.store(p, v) }
    }
    #[inline(always)]
    unsafe fn load2<S: Simd>(s: S, p: *const Self) -> [S::F32; 2] {
        // SAFETY: passed on.
        unsafe { [s.load(p), s.load(p.add(S::LANES))] }
    }
    #[inline(always)]
    unsafe fn store2<S: Simd, const STREAM: bool>(s: S, p: *mut Self, v: [S::F32; 2]) {
        for (i, v) in v.into_iter().enumerate() {
            // SAFETY: passed on.
            unsafe {
                let p = p.add(i * S::LANES);
                if STREAM { s.stream(p, v) } else { s.store(p, v) }
            }
        }
    }
    #[inline(always)]
    unsafe fn stream<S: Simd>(s: S, p: *mut Self, v: S::F32) {
        // SAFETY: passed on.
        unsafe { s.stream(p, v) }
    }
    #[inline(always)]
    unsafe fn load_first<S: Simd>(s: S, p: *const Self, n: usize) -> S::F32 {
        // SAFETY: passed on.
        unsafe { s.load_first(p, n) }
    }
    #[inline(always)]
    unsafe fn store_first<S: Simd>(s: S, p: *mut Self, v: S::F32, n: usize) {
        // SAFETY: passed on.
        unsafe { s.store_first(p, v, n) }
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
}

macro_rules! half_element {
    ($t:ident, $load:ident, $splat:ident, $store:ident, $stream:ident, $load2:ident, $store2:ident, {$($more:item)*}) => {
        impl SimdElement for $t {
            $($more)*
            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F32 {
                // SAFETY: passed on.
                unsafe { s.$load(p) }
            }
            #[inline(always)]
            unsafe fn splat<S: Simd>(s: S, p: *const Self) -> S::F32 {
                // SAFETY: passed on.
                unsafe { s.$splat(p) }
            }
            #[inline(always)]
            unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::F32) {
                // SAFETY: passed on.
                unsafe { s.$store(p, v) }
            }
            #[inline(always)]
            unsafe fn load2<S: Simd>(s: S, p: *const Self) -> [S::F32; 2] {
                // SAFETY: passed on.
                unsafe { s.$load2(p) }
            }
            #[inline(always)]
            unsafe fn store2<S: Simd, const STREAM: bool>(s: S, p: *mut Self, v: [S::F32; 2]) {
                // SAFETY: passed on.
                unsafe { s.$store2::<STREAM>(p, v) }
            }
            #[inline(always)]
            unsafe fn stream<S: Simd>(s: S, p: *mut Self, v: S::F32) {
                // SAFETY: passed on.
                unsafe { s.$stream(p, v) }
            }
            #[inline(always)]
            unsafe fn load_first<S: Simd>(s: S, p: *const Self, n: usize) -> S::F32 {
                let mut lanes = [$t::ZERO; MAX_LANES];
                // SAFETY: n <= LANES <= MAX_LANES elements are readable at p.
                unsafe {
                    std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n);
                    s.$load(lanes.as_ptr())
                }
            }
            #[inline(always)]
            unsafe fn store_first<S: Simd>(s: S, p: *mut Self, v: S::F32, n: usize) {
                let mut lanes = [$t::ZERO; MAX_LANES];
                // SAFETY: n <= LANES <= MAX_LANES elements are writable at p.
                unsafe {
                    s.$store(lanes.as_mut_ptr(), v);
                    std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n);
                }
            }
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $t::to_f32(self)
            }
            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                $t::from_f32(x)
            }
        }
    };
}

half_element!(f16, load_f16, splat_f16, store_f16, stream_f16, load2_f16, store2_f16, {});
half_element!(bf16, load_bf16, splat_bf16, store_bf16, stream_bf16, load2_bf16, store2_bf16, {
    #[inline(always)]
    unsafe fn store2_numbers<S: Simd, const STREAM: bool>(s: S, p: *mut Self, v: [S::F32; 2]) {
        // SAFETY: passed on.
        unsafe { s.store2_numbers_bf16::<STREAM>(p, v) }
    }
    #[inline(always)]
    fn order2<S: Simd>(s: S, v: [S::F32; 2]) -> [S::F32; 2] {
        s.order2_bf16(v)
    }
});
