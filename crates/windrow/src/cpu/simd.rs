//! Vectors of f32: the operations that kernels are written in.

use super::Kernel;
use half::{bf16, f16};
use std::mem::MaybeUninit;

/// The array of the results of `f` for each index: `std::array::from_fn`, but always inlined. Kernels do not use
/// `from_fn`, `map` of arrays or `zip`. If the compiler does not inline those, they are compiled without the kernel's
/// instruction set and pass vectors through memory.
#[inline(always)]
pub(crate) fn array<T, const N: usize>(mut f: impl FnMut(usize) -> T) -> [T; N] {
    let mut all = [const { MaybeUninit::uninit() }; N];
    for (i, one) in all.iter_mut().enumerate() {
        one.write(f(i));
    }
    // SAFETY: all are written, and `MaybeUninit` has the layout of what it holds.
    unsafe { (&raw const all).cast::<[T; N]>().read() }
}

/// An instruction set. A value of the type proves that the machine has the instructions.
///
/// Arithmetic is IEEE single precision, round to nearest even. `mul_add` is fused if the hardware fuses (all but the
/// portable set on x86). Comparisons with NaN are false.
pub(crate) trait Simd: Copy + Send + Sync + std::fmt::Debug + 'static {
    /// The number of elements in a vector.
    const LANES: usize;
    /// The number of vector registers that block sizes may assume.
    const REGISTERS: usize;
    /// A vector of `LANES` f32.
    type F32: Copy;
    /// `LANES` f64.
    type F64: Copy;
    /// A vector of `LANES` i32.
    type I32: Copy;
    /// A truth value for each lane.
    type Mask: Copy;
    /// A table of 32 numbers, kept in registers if the instruction set can index them.
    type Table: Copy;
    /// True if a lookup is as cheap as arithmetic.
    const FAST_LOOKUP: bool;
    /// True if kernels are compiled for size: without special cases for speed.
    const IS_SMALL: bool = false;
    /// A square matrix of `LANES` vectors.
    type Square: Copy + AsRef<[Self::F32]> + AsMut<[Self::F32]>;
    /// The set with vectors of half the length; this set itself if there is none.
    type Half: Simd;
    fn half(self) -> Self::Half;

    /// Runs a kernel by a function call, so that its code is compiled once for the set and not inlined wherever it is
    /// used.
    fn outlined<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, x: f32) -> Self::F32;
    /// `pair[0]` in lanes 0, 2, 4 ..., `pair[1]` in the others.
    fn splat_pair(self, pair: [f32; 2]) -> Self::F32;
    #[inline(always)]
    fn zero(self) -> Self::F32 {
        self.splat(0.0)
    }

    /// Loads a vector.
    /// # Safety: `LANES` f32 are readable at `p` (any alignment).
    unsafe fn load(self, p: *const f32) -> Self::F32;
    /// Stores a vector.
    /// # Safety: `LANES` f32 are writable at `p` (any alignment).
    unsafe fn store(self, p: *mut f32, v: Self::F32);
    /// Loads the first `n <= LANES` elements; the others are zero.
    /// # Safety: `n` f32 are readable at `p`.
    unsafe fn load_first(self, p: *const f32, n: usize) -> Self::F32;
    /// Stores the first `n <= LANES` elements.
    /// # Safety: `n` f32 are writable at `p`.
    unsafe fn store_first(self, p: *mut f32, v: Self::F32, n: usize);
    /// Stores a vector with a non-temporal store. Call [`Simd::stream_fence`] after a series of them.
    /// # Safety: `LANES` f32 are writable at `p`, aligned to the vector's size.
    unsafe fn stream(self, p: *mut f32, v: Self::F32);
    fn stream_fence(self);
    /// Prefetches the cache line at `p` into the second-level cache for reading. `p` may be any address.
    fn prefetch<T>(self, p: *const T);
    /// Prefetches into the first-level cache, like [`Simd::prefetch`].
    fn prefetch_near<T>(self, p: *const T);
    /// Prefetches the cache line at `p` for writing. `p` may be any address.
    fn prefetch_write<T>(self, p: *const T);

    /// Loads `LANES` f16 as f32.
    /// # Safety: they are readable at `p`.
    unsafe fn load_f16(self, p: *const f16) -> Self::F32;
    /// A vector of one f16 in all lanes.
    /// # Safety: it is readable at `p`.
    #[inline(always)]
    unsafe fn splat_f16(self, p: *const f16) -> Self::F32 {
        // SAFETY: passed on.
        self.splat(unsafe { p.read() }.to_f32())
    }
    /// A vector of one bf16 in all lanes.
    /// # Safety: it is readable at `p`.
    #[inline(always)]
    unsafe fn splat_bf16(self, p: *const bf16) -> Self::F32 {
        // SAFETY: passed on.
        let bits = u32::from(unsafe { p.read() }.to_bits());
        self.splat(f32::from_bits(bits << 16))
    }
    /// Stores a vector as f16, rounded to nearest even.
    /// # Safety: `LANES` f16 are writable at `p`.
    unsafe fn store_f16(self, p: *mut f16, v: Self::F32);
    /// Stores like [`Simd::store_f16`], with a non-temporal store as [`Simd::stream`].
    unsafe fn stream_f16(self, p: *mut f16, v: Self::F32);
    /// Loads `LANES` bf16 as f32.
    /// # Safety: they are readable at `p`.
    unsafe fn load_bf16(self, p: *const bf16) -> Self::F32;
    /// Stores a vector as bf16, rounded to nearest even. NaN stays NaN.
    /// # Safety: `LANES` bf16 are writable at `p`.
    unsafe fn store_bf16(self, p: *mut bf16, v: Self::F32);
    /// Stores like [`Simd::store_bf16`], with a non-temporal store as [`Simd::stream`].
    unsafe fn stream_bf16(self, p: *mut bf16, v: Self::F32);

    /// Loads `2 LANES` f16 as two vectors, in an order that [`Simd::store2_f16`] undoes.
    /// # Safety: they are readable at `p`.
    #[inline(always)]
    unsafe fn load2_f16(self, p: *const f16) -> [Self::F32; 2] {
        // SAFETY: passed on.
        unsafe { [self.load_f16(p), self.load_f16(p.add(Self::LANES))] }
    }
    /// Stores two vectors. If `STREAM`, it uses non-temporal stores, if the instruction set has them (see
    /// [`Simd::stream`]).
    /// # Safety: `2 LANES` f16 are writable at `p`, aligned to their size if `STREAM`.
    #[inline(always)]
    unsafe fn store2_f16<const STREAM: bool>(self, p: *mut f16, v: [Self::F32; 2]) {
        // SAFETY: passed on.
        unsafe {
            self.store_f16(p, v[0]);
            self.store_f16(p.add(Self::LANES), v[1]);
        }
    }
    /// Loads like [`Simd::load2_f16`].
    #[inline(always)]
    unsafe fn load2_bf16(self, p: *const bf16) -> [Self::F32; 2] {
        // SAFETY: passed on.
        unsafe { [self.load_bf16(p), self.load_bf16(p.add(Self::LANES))] }
    }
    /// Stores like [`Simd::store2_f16`].
    #[inline(always)]
    unsafe fn store2_bf16<const STREAM: bool>(self, p: *mut bf16, v: [Self::F32; 2]) {
        // SAFETY: passed on.
        unsafe {
            self.store_bf16(p, v[0]);
            self.store_bf16(p.add(Self::LANES), v[1]);
        }
    }
    /// Stores like [`Simd::store2_bf16`], for numbers that are not NaN. Ties may be rounded away from zero instead of
    /// to even.
    /// # Safety: as for [`Simd::store2_bf16`].
    #[inline(always)]
    unsafe fn store2_numbers_bf16<const STREAM: bool>(self, p: *mut bf16, v: [Self::F32; 2]) {
        // SAFETY: passed on.
        unsafe { self.store2_bf16::<STREAM>(p, v) }
    }
    /// Converts two vectors from the order of memory to that of [`Simd::load2_bf16`].
    #[inline(always)]
    fn order2_bf16(self, v: [Self::F32; 2]) -> [Self::F32; 2] {
        v
    }

    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `1 / a` with a relative error of at most 2^-14, for normal `a` up to 2^126.
    fn recip14(self, a: Self::F32) -> Self::F32;
    /// `a * b + c`
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `a * b + c`, whose product is not rounded on any instruction set: for the error terms of products. The sum may
    /// be rounded twice.
    #[inline(always)]
    fn mul_add_exact(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        self.mul_add(a, b, c)
    }
    /// `c - a * b`
    fn neg_mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// The smaller; `b` if either is NaN.
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The larger; `b` if either is NaN.
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn abs(self, a: Self::F32) -> Self::F32;
    fn neg(self, a: Self::F32) -> Self::F32;

    fn widen(self, a: Self::F32) -> Self::F64;
    /// Rounds to nearest even.
    fn narrow(self, a: Self::F64) -> Self::F32;
    fn mul_f64(self, a: Self::F64, b: f64) -> Self::F64;
    /// `a * b + c`
    fn mul_add_f64(self, a: Self::F64, b: f64, c: Self::F64) -> Self::F64;

    fn lt(self, a: Self::F32, b: Self::F32) -> Self::Mask;
    /// `!(a <= b)`, so true if either is NaN.
    fn not_le(self, a: Self::F32, b: Self::F32) -> Self::Mask;
    fn is_nan(self, a: Self::F32) -> Self::Mask;
    /// `a` where the mask is set, `b` elsewhere.
    fn select(self, mask: Self::Mask, a: Self::F32, b: Self::F32) -> Self::F32;

    fn or_mask(self, a: Self::Mask, b: Self::Mask) -> Self::Mask;
    fn any(self, mask: Self::Mask) -> bool;

    fn table(self, numbers: &'static [f32; 32]) -> Self::Table;
    /// The table's number at each lane's index (its low five bits).
    fn lookup(self, table: Self::Table, index: Self::I32) -> Self::F32;

    fn to_bits(self, a: Self::F32) -> Self::I32;
    #[allow(clippy::wrong_self_convention)] // `self` is the instruction set, not the value
    fn from_bits(self, a: Self::I32) -> Self::F32;
    fn add_i32(self, a: Self::I32, b: Self::I32) -> Self::I32;
    fn shl_i32<const N: u32>(self, a: Self::I32) -> Self::I32;

    /// Sum of the lanes, in a fixed order.
    fn reduce_add(self, a: Self::F32) -> f32;

    /// Lanes 0, 2, 4 ... of `a`, then those of `b`.
    fn even(self, a: Self::F32, b: Self::F32) -> Self::F32;

    /// The lane of `a` that each lane's index names; indices are below `LANES`.
    fn permute(self, a: Self::F32, index: Self::I32) -> Self::F32;

    /// A square of zeros.
    fn zeros(self) -> Self::Square;
    /// Lane `i` of vector `j` becomes lane `j` of vector `i`.
    fn transpose(self, rows: Self::Square) -> Self::Square;
}

/// The widest vector of any instruction set.
pub(crate) const MAX_LANES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Isa, Kernel, SimdElement, dispatch};

    const INPUTS: [f32; 24] = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        2.5,
        3.5,
        -2.5,
        0.1,
        65504.0,
        65520.0,
        1e-8,
        6e-8,
        1e30,
        -1e30,
        1e-40,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        3.39e38,
        1.0 + 1.0 / 256.0,
        1.0117188,
        2049.0,
        2051.0,
        -7e-5,
    ];

    static SQUARES: [f32; 32] = {
        let mut squares = [0.0; 32];
        let mut i = 0;
        while i < 32 {
            squares[i] = (i * i) as f32;
            i += 1;
        }
        squares
    };

    struct Ops;
    impl Kernel for Ops {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for pair in INPUTS.iter().flat_map(|&a| INPUTS.iter().map(move |&b| (a, b))) {
                check(s, pair.0, pair.1);
            }
            partial(s);
            doubles(s);
            stream::<S, f32>(s);
            stream::<S, f16>(s);
            stream::<S, bf16>(s);
            transpose(s);
            even(s);
            splat_pair(s);
            permute(s);
            pairs(s);
        }
    }

    /// Doubles each lane, and rounds once.
    fn doubles<S: Simd>(s: S) {
        let x: Vec<f32> = (0..MAX_LANES).map(|i| (i as f32 - 7.3) / 3.0).collect();
        let mut out = [0f32; MAX_LANES];
        let (a, b) = (1.0 / 3.0, -2.0 / 7.0);
        // SAFETY: MAX_LANES elements are readable and writable.
        unsafe {
            let x = s.widen(s.load(x.as_ptr()));
            s.store(out.as_mut_ptr(), s.narrow(s.mul_add_f64(x, a, s.mul_f64(x, b))));
        }
        for (&x, &out) in x.iter().zip(&out).take(S::LANES) {
            let x = f64::from(x);
            assert_eq!(out, (x * a + x * b) as f32);
        }
    }

    fn pairs<S: Simd>(s: S) {
        // No halves, which may be rounded either way.
        let x: Vec<f32> = (0..2 * MAX_LANES).map(|i| (i as f32 - 7.3) / 3.0).collect();
        let mut stored = [[bf16::ZERO; 2 * MAX_LANES]; 2];
        // SAFETY: all slices hold 2 MAX_LANES elements.
        unsafe {
            let v = [s.load(x.as_ptr()), s.load(x.as_ptr().add(S::LANES))];
            let v = bf16::order2(s, v);
            bf16::store2::<S, false>(s, stored[0].as_mut_ptr(), v);
            bf16::store2_numbers::<S, false>(s, stored[1].as_mut_ptr(), v);
        }
        for (i, &x) in x.iter().enumerate().take(2 * S::LANES) {
            assert_eq!([stored[0][i], stored[1][i]], [bf16::from_f32(x); 2]);
        }
        for nan in 0..2 * S::LANES {
            let mut x = [1.0; 2 * MAX_LANES];
            x[nan] = f32::NAN;
            // SAFETY: x and both rows of `stored` hold 2 MAX_LANES elements.
            unsafe {
                let v = [s.load(x.as_ptr()), s.load(x.as_ptr().add(S::LANES))];
                bf16::store2::<S, false>(s, stored[0].as_mut_ptr(), bf16::order2(s, v));
            }
            for (i, x) in x.iter().enumerate().take(2 * S::LANES) {
                assert_eq!(stored[0][i].is_nan(), x.is_nan());
            }
        }
    }

    fn even<S: Simd>(s: S) {
        let x: Vec<f32> = (0..2 * MAX_LANES).map(|i| i as f32).collect();
        let mut out = [0f32; MAX_LANES];
        // SAFETY: two vectors are readable, one is writable.
        unsafe {
            let (a, b) = (s.load(x.as_ptr()), s.load(x.as_ptr().add(S::LANES)));
            s.store(out.as_mut_ptr(), s.even(a, b));
        }
        for (i, &lane) in out.iter().enumerate().take(S::LANES) {
            assert_eq!(lane, x[2 * i]);
        }
    }

    fn splat_pair<S: Simd>(s: S) {
        let mut out = [0f32; MAX_LANES];
        // SAFETY: MAX_LANES elements are writable.
        unsafe { s.store(out.as_mut_ptr(), s.splat_pair([1.5, -0.0])) };
        for (i, lane) in out.iter().enumerate().take(S::LANES) {
            same("splat_pair", *lane, if i % 2 == 0 { 1.5 } else { -0.0 });
        }
    }

    fn permute<S: Simd>(s: S) {
        let x: Vec<f32> = (0..MAX_LANES).map(|i| i as f32 + 0.5).collect();
        let index: Vec<f32> =
            (0..MAX_LANES).map(|i| f32::from_bits((i * 5 % S::LANES) as u32)).collect();
        let mut out = [0f32; MAX_LANES];
        // SAFETY: all slices hold MAX_LANES elements.
        unsafe {
            let index = s.to_bits(s.load(index.as_ptr()));
            s.store(out.as_mut_ptr(), s.permute(s.load(x.as_ptr()), index));
        }
        for (i, &lane) in out.iter().enumerate().take(S::LANES) {
            assert_eq!(lane, x[i * 5 % S::LANES]);
        }
    }

    fn lane0<S: Simd>(s: S, v: S::F32) -> f32 {
        let mut out = [0f32; MAX_LANES];
        // SAFETY: MAX_LANES elements are writable.
        unsafe { s.store(out.as_mut_ptr(), v) };
        assert!(out[..S::LANES].iter().all(|x| x.to_bits() == out[0].to_bits()));
        out[0]
    }

    fn same(what: &str, got: f32, want: f32) {
        assert!(
            got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
            "{what}: {got:e} instead of {want:e}"
        );
    }

    fn check<S: Simd>(s: S, a: f32, b: f32) {
        let (va, vb) = (s.splat(a), s.splat(b));
        same("add", lane0(s, s.add(va, vb)), a + b);
        same("sub", lane0(s, s.sub(va, vb)), a - b);
        same("mul", lane0(s, s.mul(va, vb)), a * b);
        same("div", lane0(s, s.div(va, vb)), a / b);
        let (recip, exact) = (lane0(s, s.recip14(vb)), 1.0 / f64::from(b));
        if b.is_normal() && b.abs() < 8e37 {
            assert!(
                (f64::from(recip) / exact - 1.0).abs() <= 2f64.powi(-14),
                "recip14 {b:e}: {recip:e}"
            );
        }
        same("min", lane0(s, s.min(va, vb)), if a < b { a } else { b });
        same("max", lane0(s, s.max(va, vb)), if a > b { a } else { b });
        same("abs", lane0(s, s.abs(va)), a.abs());
        same("neg", lane0(s, s.neg(va)), -a);
        same("select", lane0(s, s.select(s.lt(va, vb), va, vb)), if a < b { a } else { b });
        let one = s.splat(1.0);
        same("nan", lane0(s, s.select(s.is_nan(va), one, vb)), if a.is_nan() { 1.0 } else { b });
        same("bits", lane0(s, s.from_bits(s.to_bits(va))), a);
        assert_eq!(s.any(s.lt(va, vb)), a < b);
        assert_eq!(s.any(s.not_le(va, vb)), a > b || a.is_nan() || b.is_nan());
        let index = s.add_i32(s.to_bits(va), s.to_bits(s.splat(f32::from_bits(5))));
        let want = SQUARES[(a.to_bits() as usize + 5) & 31];
        same("lookup", lane0(s, s.lookup(s.table(&SQUARES), index)), want);
        let mut h = [f16::ZERO; MAX_LANES];
        let mut g = [bf16::ZERO; MAX_LANES];
        // SAFETY: MAX_LANES elements are readable and writable.
        unsafe {
            s.store_f16(h.as_mut_ptr(), va);
            s.store_bf16(g.as_mut_ptr(), va);
            same("f16", lane0(s, s.load_f16(h.as_ptr())), f16::from_f32(a).to_f32());
            same("bf16", lane0(s, s.load_bf16(g.as_ptr())), bf16::from_f32(a).to_f32());
            same("splat f16", lane0(s, s.splat_f16(h.as_ptr())), f16::from_f32(a).to_f32());
            same("splat bf16", lane0(s, s.splat_bf16(g.as_ptr())), bf16::from_f32(a).to_f32());
        }
    }

    fn partial<S: Simd>(s: S) {
        let x: Vec<f32> = (1..=MAX_LANES).map(|i| i as f32).collect();
        for n in 0..=S::LANES {
            let mut out = [0f32; MAX_LANES];
            let mut guarded = [-1f32; MAX_LANES];
            // SAFETY: all slices hold MAX_LANES >= n elements.
            unsafe {
                let v = s.load_first(x.as_ptr(), n);
                s.store(out.as_mut_ptr(), v);
                s.store_first(guarded.as_mut_ptr(), v, n);
                assert_eq!(s.reduce_add(v), x[..n].iter().sum::<f32>());
            }
            assert_eq!(out[..n], x[..n]);
            assert!(out[n..].iter().all(|&v| v == 0.0));
            assert_eq!(guarded[..n], x[..n]);
            assert!(guarded[n..].iter().all(|&v| v == -1.0));
        }
    }

    fn transpose<S: Simd>(s: S) {
        let x: Vec<f32> = (0..S::LANES * S::LANES).map(|i| i as f32).collect();
        let mut square = s.zeros();
        for (row, x) in square.as_mut().iter_mut().zip(x.chunks(S::LANES)) {
            // SAFETY: a chunk holds LANES elements.
            *row = unsafe { s.load(x.as_ptr()) };
        }
        for (j, column) in s.transpose(square).as_ref().iter().enumerate() {
            let mut out = [0f32; MAX_LANES];
            // SAFETY: MAX_LANES elements are writable.
            unsafe { s.store(out.as_mut_ptr(), *column) };
            for i in 0..S::LANES {
                assert_eq!(out[i], x[i * S::LANES + j]);
            }
        }
    }

    #[repr(align(64))]
    #[derive(Clone, Copy, PartialEq, Debug)]
    struct Aligned<T>([T; MAX_LANES]);

    fn stream<S: Simd, T: SimdElement>(s: S) {
        let x: Vec<f32> = (1..=MAX_LANES).map(|i| i as f32 / 3.0).collect();
        let (mut stored, mut streamed) =
            (Aligned([T::default(); MAX_LANES]), Aligned([T::default(); MAX_LANES]));
        // SAFETY: MAX_LANES elements are readable, writable and aligned to 64 bytes.
        unsafe {
            let v = s.load(x.as_ptr());
            T::store(s, stored.0.as_mut_ptr(), v);
            T::stream(s, streamed.0.as_mut_ptr(), v);
        }
        s.stream_fence();
        assert_eq!(streamed, stored);
    }

    #[test]
    fn every_instruction_set_agrees_with_scalar_arithmetic() {
        for isa in Isa::available() {
            dispatch(isa, Ops);
        }
    }
}
