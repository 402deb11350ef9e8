//! The portable instruction set. Vectors are arrays, which the compiler vectorises: with NEON and fused multiply-add on
//! aarch64, with SSE2 on x86-64.

use super::isa::with_lanes;
use super::{Kernel, Simd, array};
use half::{bf16, f16};

const N: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lanes;

#[inline(always)]
fn map<T: Copy, U>(a: [T; N], f: impl Fn(T) -> U) -> [U; N] {
    array(|i| f(a[i]))
}

#[inline(always)]
fn zip<T: Copy>(a: [T; N], b: [T; N], f: impl Fn(T, T) -> T) -> [T; N] {
    array(|i| f(a[i], b[i]))
}

#[inline(always)]
fn fused(a: f32, b: f32, c: f32) -> f32 {
    // Without the instruction, `f32::mul_add` is a slow library call.
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

// Conversions of f16 and bf16 are long if the target has no instructions for them, so they are function calls.

/// Loads `N` f16 or bf16 as f32.
///
/// # Safety
/// N elements are readable.
#[cfg_attr(target_arch = "x86_64", inline(never))]
#[cfg_attr(not(target_arch = "x86_64"), inline(always))]
unsafe fn load_half<T: Copy + Into<f32>>(p: *const T) -> [f32; N] {
    // SAFETY: passed on.
    let h = unsafe { p.cast::<[T; N]>().read_unaligned() };
    array(|i| h[i].into())
}

/// Stores `N` f32 as f16 or bf16.
///
/// # Safety
/// N elements are writable.
#[cfg_attr(target_arch = "x86_64", inline(never))]
#[cfg_attr(not(target_arch = "x86_64"), inline(always))]
unsafe fn store_half<T>(p: *mut T, v: [f32; N], rounded: impl Fn(f32) -> T) {
    // SAFETY: passed on.
    unsafe { p.cast::<[T; N]>().write_unaligned(map(v, rounded)) }
}

impl Simd for Lanes {
    const LANES: usize = N;
    // Half of the registers hold one array on a 4-wide machine with 32 of them.
    const REGISTERS: usize = if cfg!(target_arch = "aarch64") { 16 } else { 8 };
    // On x86-64 it runs on machines before AVX2 only.
    const IS_SMALL: bool = cfg!(target_arch = "x86_64");
    type F32 = [f32; N];
    type F64 = [f64; N];
    type I32 = [i32; N];
    type Mask = [bool; N];
    type Table = &'static [f32; 32];
    const FAST_LOOKUP: bool = false;
    type Square = [[f32; N]; N];
    type Half = Self;

    #[inline(always)]
    fn half(self) -> Self {
        self
    }
    #[inline(always)]
    fn outlined<K: Kernel>(self, kernel: K) -> K::Output {
        with_lanes(self, kernel)
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F32 {
        [x; N]
    }
    #[inline(always)]
    fn splat_pair(self, pair: [f32; 2]) -> Self::F32 {
        array(|i| pair[i % 2])
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::F32 {
        // SAFETY: N elements are readable.
        unsafe { p.cast::<[f32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::F32) {
        // SAFETY: N elements are writable.
        unsafe { p.cast::<[f32; N]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_first(self, p: *const f32, n: usize) -> Self::F32 {
        let mut v = [0.0; N];
        // SAFETY: n <= N elements are readable.
        unsafe { std::ptr::copy_nonoverlapping(p, v.as_mut_ptr(), n) };
        v
    }
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, v: Self::F32, n: usize) {
        // SAFETY: n <= N elements are writable.
        unsafe { std::ptr::copy_nonoverlapping(v.as_ptr(), p, n) }
    }
    #[inline(always)]
    unsafe fn stream(self, p: *mut f32, v: Self::F32) {
        // SAFETY: passed on.
        unsafe { self.store(p, v) }
    }
    #[inline(always)]
    fn stream_fence(self) {}
    #[inline(always)]
    fn prefetch<T>(self, _: *const T) {}
    #[inline(always)]
    fn prefetch_near<T>(self, _: *const T) {}
    #[inline(always)]
    fn prefetch_write<T>(self, _: *const T) {}

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> Self::F32 {
        // SAFETY: N elements are readable.
        unsafe { load_half(p) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16, v: Self::F32) {
        // SAFETY: N elements are writable.
        unsafe { store_half(p, v, f16::from_f32) }
    }
    #[inline(always)]
    unsafe fn stream_f16(self, p: *mut f16, v: Self::F32) {
        // SAFETY: passed on.
        unsafe { self.store_f16(p, v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> Self::F32 {
        // SAFETY: N elements are readable.
        unsafe { load_half(p) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16, v: Self::F32) {
        // SAFETY: N elements are writable.
        unsafe { store_half(p, v, bf16::from_f32) }
    }
    #[inline(always)]
    unsafe fn stream_bf16(self, p: *mut bf16, v: Self::F32) {
        // SAFETY: passed on.
        unsafe { self.store_bf16(p, v) }
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn recip14(self, a: Self::F32) -> Self::F32 {
        map(a, |a| 1.0 / a)
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        array(|i| fused(a[i], b[i], c[i]))
    }
    #[inline(always)]
    fn mul_add_exact(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
            self.mul_add(a, b, c)
        } else {
            // The product of two f32 is exact in f64.
            array(|i| (f64::from(a[i]) * f64::from(b[i]) + f64::from(c[i])) as f32)
        }
    }
    #[inline(always)]
    fn neg_mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        array(|i| fused(-a[i], b[i], c[i]))
    }
    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn abs(self, a: Self::F32) -> Self::F32 {
        map(a, f32::abs)
    }
    #[inline(always)]
    fn neg(self, a: Self::F32) -> Self::F32 {
        map(a, |a| -a)
    }

    #[inline(always)]
    fn lt(self, a: Self::F32, b: Self::F32) -> Self::Mask {
        array(|i| a[i] < b[i])
    }
    #[inline(always)]
    fn not_le(self, a: Self::F32, b: Self::F32) -> Self::Mask {
        array(|i| a[i] > b[i] || a[i].is_nan() || b[i].is_nan())
    }
    #[inline(always)]
    fn is_nan(self, a: Self::F32) -> Self::Mask {
        map(a, f32::is_nan)
    }
    #[inline(always)]
    fn select(self, mask: Self::Mask, a: Self::F32, b: Self::F32) -> Self::F32 {
        array(|i| if mask[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn or_mask(self, a: Self::Mask, b: Self::Mask) -> Self::Mask {
        array(|i| a[i] | b[i])
    }
    #[inline(always)]
    fn any(self, mask: Self::Mask) -> bool {
        mask.contains(&true)
    }

    #[inline(always)]
    fn table(self, numbers: &'static [f32; 32]) -> Self::Table {
        numbers
    }
    #[inline(always)]
    fn lookup(self, table: Self::Table, index: Self::I32) -> Self::F32 {
        map(index, |i| table[(i & 31) as usize])
    }

    #[inline(always)]
    fn to_bits(self, a: Self::F32) -> Self::I32 {
        map(a, |a| a.to_bits() as i32)
    }
    #[inline(always)]
    fn from_bits(self, a: Self::I32) -> Self::F32 {
        map(a, |a| f32::from_bits(a as u32))
    }
    #[inline(always)]
    fn add_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        zip(a, b, i32::wrapping_add)
    }
    #[inline(always)]
    fn shl_i32<const K: u32>(self, a: Self::I32) -> Self::I32 {
        map(a, |a| a << K)
    }

    #[inline(always)]
    fn widen(self, a: Self::F32) -> Self::F64 {
        map(a, f64::from)
    }
    #[inline(always)]
    fn narrow(self, a: Self::F64) -> Self::F32 {
        map(a, |a| a as f32)
    }
    #[inline(always)]
    fn mul_f64(self, a: Self::F64, b: f64) -> Self::F64 {
        map(a, |a| a * b)
    }
    #[inline(always)]
    fn mul_add_f64(self, a: Self::F64, b: f64, c: Self::F64) -> Self::F64 {
        // Two roundings of f64 are no more than one for what becomes an f32.
        array(|i| a[i] * b + c[i])
    }

    #[inline(always)]
    fn even(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        array(|i| if 2 * i < N { a[2 * i] } else { b[2 * i - N] })
    }
    #[inline(always)]
    fn permute(self, a: Self::F32, index: Self::I32) -> Self::F32 {
        map(index, |i| a[i as usize % N])
    }
    #[inline(always)]
    fn reduce_add(self, a: Self::F32) -> f32 {
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }

    #[inline(always)]
    fn zeros(self) -> Self::Square {
        [[0.0; N]; N]
    }
    #[inline(always)]
    fn transpose(self, rows: Self::Square) -> Self::Square {
        array(|i| array(|j| rows[j][i]))
    }
}
