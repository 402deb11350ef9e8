//! AVX-512 with products of bf16.

use super::Avx512;
use crate::cpu::{Bf16Products, Row, Simd};
use half::bf16;
use std::arch::x86_64::*;

/// AVX-512 and its BF16 extension, which AMD CPUs have had since Zen 4 and Intel's since Cooper Lake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Avx512Bf16(Avx512);

impl Avx512Bf16 {
    pub(crate) fn detect() -> Option<Self> {
        Avx512::detect().filter(|_| is_x86_feature_detected!("avx512bf16")).map(Avx512Bf16)
    }

    /// True if products of bf16 take less time than those of f32. AMD's cores issue equally many instructions of both
    /// kinds per cycle, and a bf16 instruction has twice the products. Intel's issue one bf16 instruction every two
    /// cycles but two f32 ones per cycle, so half as many products.
    pub(crate) fn is_fast() -> bool {
        #[allow(unused_unsafe)] // safe in later versions of Rust than the oldest that builds this
        // SAFETY: every machine that detects features by it has the instruction.
        let vendor = unsafe { __cpuid(0) };
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
    }
}

/// The indices that interleave two vectors into two; those of the second vector start at 32.
const INTERLEAVED: [[u16; 32]; 2] = {
    let mut order = [[0; 32]; 2];
    let mut i = 0;
    while i < 64 {
        order[i / 32][i % 32] = (i / 2 + i % 2 * 32) as u16;
        i += 1;
    }
    order
};

/// The indices that interleave the halves of a vector.
const TURNS: [u16; 32] = {
    let mut order = [0; 32];
    let mut i = 0;
    while i < 32 {
        order[i] = (i / 2 + i % 2 * 16) as u16;
        i += 1;
    }
    order
};

/// The elements of a row from `at` on.
///
/// # Safety
/// Elements inside the row are readable. Called by [`Avx512Bf16`] only.
#[inline(always)]
unsafe fn load_row(row: Row, at: usize) -> __m512i {
    let below = |bound: usize| (1u64 << bound.saturating_sub(at).min(32)) - 1;
    let inside = (below(row.end) & !below(row.start)) as __mmask32;
    // SAFETY: promised by the caller.
    unsafe { _mm512_maskz_loadu_epi16(inside, row.ptr.wrapping_add(at).cast()) }
}

impl Bf16Products for Avx512Bf16 {
    type Simd = Avx512;

    #[inline(always)]
    fn simd(self) -> Avx512 {
        self.0
    }
    #[inline(always)]
    unsafe fn interleave(self, first: Row, second: Row, len: usize, to: *mut f32) {
        for at in (0..len).step_by(2 * Avx512::LANES) {
            isa!({
                let (first, second) = (load_row(first, at), load_row(second, at));
                for (half, order) in INTERLEAVED.iter().enumerate() {
                    let order = _mm512_loadu_si512(order.as_ptr().cast());
                    let pairs = _mm512_permutex2var_epi16(first, order, second);
                    _mm512_storeu_si512(to.add(at + half * Avx512::LANES).cast(), pairs);
                }
            });
        }
    }
    #[inline(always)]
    fn mul_add_pairs(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the machine has the instruction; the vectors are as long, and any bits are bf16.
        unsafe {
            let pairs = |v| std::mem::transmute::<__m512, __m512bh>(v);
            _mm512_dpbf16_ps(c, pairs(a), pairs(b))
        }
    }
    #[inline(always)]
    unsafe fn store2(self, p: *mut bf16, [first, second]: [__m512; 2]) {
        // SAFETY: the machine has the instructions; the rest is the caller's promise.
        unsafe {
            let both = _mm512_cvtne2ps_pbh(second, first);
            _mm512_storeu_si512(p.cast(), std::mem::transmute::<__m512bh, __m512i>(both));
        }
    }
    #[inline(always)]
    unsafe fn split2<const PAIRS: bool>(self, to: [*mut bf16; 3], [mut a, mut b]: [__m512; 2]) {
        isa!({
            for (part, to) in to.into_iter().enumerate() {
                let both = _mm512_cvtne2ps_pbh(b, a);
                let mut both = std::mem::transmute::<__m512bh, __m512i>(both);
                if PAIRS {
                    let order = _mm512_loadu_si512(TURNS.as_ptr().cast());
                    both = _mm512_permutexvar_epi16(order, both);
                }
                _mm512_storeu_si512(to.cast(), both);
                if part == 2 {
                    break;
                }
                let (low, high) = if PAIRS {
                    let high = _mm512_and_si512(both, _mm512_set1_epi32(-1 << 16));
                    (_mm512_slli_epi32::<16>(both), high)
                } else {
                    let low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(both));
                    let high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64::<1>(both));
                    (_mm512_slli_epi32::<16>(low), _mm512_slli_epi32::<16>(high))
                };
                a = _mm512_sub_ps(a, _mm512_castsi512_ps(low));
                b = _mm512_sub_ps(b, _mm512_castsi512_ps(high));
            }
        });
    }
}
