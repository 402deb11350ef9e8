//! AVX-512.

use super::{Avx2, bits_of_pair};
use crate::cpu::isa::call_avx512;
use crate::cpu::{Kernel, Simd};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// AVX-512 F, BW, DQ, VL, CD with FMA and F16C, which every server core with AVX-512 has had since 2017.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Avx512(Avx2);

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512cd");
        Avx2::detect().filter(|_| has).map(Avx512)
    }
}

/// Each lane rounded to bf16, in the lane's upper half, for lanes that are not NaN. Rounds to nearest even by adding
/// half a unit in the last place, minus one if the upper half is even.
#[inline(always)]
unsafe fn round_number_to_bf16(v: __m512) -> __m512i {
    // SAFETY: called by Avx512 only.
    unsafe {
        let bits = _mm512_castps_si512(v);
        let odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x1_0000));
        let rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
        _mm512_mask_add_epi32(rounded, odd, bits, _mm512_set1_epi32(0x8000))
    }
}

/// Rounds like [`round_number_to_bf16`]. A NaN keeps its upper bits and is made quiet.
#[inline(always)]
unsafe fn round_to_bf16(v: __m512) -> __m512i {
    // SAFETY: called by Avx512 only.
    unsafe {
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        let quiet = _mm512_set1_epi32(0x40_0000);
        _mm512_mask_or_epi32(round_number_to_bf16(v), nan, _mm512_castps_si512(v), quiet)
    }
}

/// The upper halves of the lanes of two vectors, alternating.
#[inline(always)]
unsafe fn upper_halves([even, odd]: [__m512i; 2]) -> __m512i {
    // SAFETY: called by Avx512 only.
    unsafe { _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(even), odd) }
}

/// Stores a vector, with a non-temporal store if `STREAM`.
///
/// # Safety
/// 64 bytes are writable at `p`, which is aligned to 64 bytes if `STREAM`. Called by Avx512 only.
#[inline(always)]
unsafe fn store_512<const STREAM: bool>(p: *mut __m512i, v: __m512i) {
    // SAFETY: passed on.
    unsafe { if STREAM { _mm512_stream_si512(p, v) } else { _mm512_storeu_si512(p, v) } }
}

impl Avx512 {
    #[inline(always)]
    fn to_f16(self, v: __m512) -> __m256i {
        isa!(_mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v))
    }

    #[inline(always)]
    fn to_bf16(self, v: __m512) -> __m256i {
        isa!(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(round_to_bf16(v))))
    }
}

impl Simd for Avx512 {
    const LANES: usize = 16;
    const REGISTERS: usize = 32;
    type F32 = __m512;
    type F64 = [__m512d; 2];
    type I32 = __m512i;
    type Mask = __mmask16;
    type Table = [__m512; 2];
    const FAST_LOOKUP: bool = true;
    type Square = [__m512; 16];
    type Half = Avx2;

    #[inline(always)]
    fn half(self) -> Avx2 {
        self.0
    }
    #[inline(always)]
    fn outlined<K: Kernel>(self, kernel: K) -> K::Output {
        call_avx512(self, kernel)
    }

    instructions! {
        safe {
            fn splat(self, x: f32) -> __m512 { _mm512_set1_ps(x) }
            fn splat_pair(self, pair: [f32; 2]) -> __m512 { _mm512_castsi512_ps(_mm512_set1_epi64(bits_of_pair(pair))) }
            fn stream_fence(self) { _mm_sfence() }
            fn add(self, a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
            fn sub(self, a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
            fn mul(self, a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
            fn div(self, a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
            fn recip14(self, a: __m512) -> __m512 { _mm512_rcp14_ps(a) }
            fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
            fn neg_mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fnmadd_ps(a, b, c) }
            fn min(self, a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
            fn max(self, a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
            fn abs(self, a: __m512) -> __m512 { _mm512_abs_ps(a) }
            fn neg(self, a: __m512) -> __m512 { _mm512_xor_ps(a, _mm512_set1_ps(-0.0)) }
            fn lt(self, a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) }
            fn not_le(self, a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_NLE_UQ>(a, b) }
            fn is_nan(self, a: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a) }
            fn select(self, mask: __mmask16, a: __m512, b: __m512) -> __m512 { _mm512_mask_blend_ps(mask, b, a) }
            fn to_bits(self, a: __m512) -> __m512i { _mm512_castps_si512(a) }
            fn from_bits(self, a: __m512i) -> __m512 { _mm512_castsi512_ps(a) }
            fn add_i32(self, a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
            fn widen(self, a: __m512) -> [__m512d; 2] {
                [_mm512_cvtps_pd(_mm512_castps512_ps256(a)), _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(a))]
            }
            fn narrow(self, a: [__m512d; 2]) -> __m512 {
                _mm512_insertf32x8::<1>(_mm512_castps256_ps512(_mm512_cvtpd_ps(a[0])), _mm512_cvtpd_ps(a[1]))
            }
            fn mul_f64(self, a: [__m512d; 2], b: f64) -> [__m512d; 2] {
                [_mm512_mul_pd(a[0], _mm512_set1_pd(b)), _mm512_mul_pd(a[1], _mm512_set1_pd(b))]
            }
            fn mul_add_f64(self, a: [__m512d; 2], b: f64, c: [__m512d; 2]) -> [__m512d; 2] {
                [_mm512_fmadd_pd(a[0], _mm512_set1_pd(b), c[0]), _mm512_fmadd_pd(a[1], _mm512_set1_pd(b), c[1])]
            }
            fn reduce_add(self, a: __m512) -> f32 { _mm512_reduce_add_ps(a) }
        }
        unsafe {
            fn load(self, p: *const f32) -> __m512 { _mm512_loadu_ps(p) }
            fn store(self, p: *mut f32, v: __m512) { _mm512_storeu_ps(p, v) }
            fn stream(self, p: *mut f32, v: __m512) { _mm512_stream_ps(p, v) }
            fn load_f16(self, p: *const f16) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
            fn store_f16(self, p: *mut f16, v: __m512) { _mm256_storeu_si256(p.cast(), self.to_f16(v)) }
            fn stream_f16(self, p: *mut f16, v: __m512) { _mm256_stream_si256(p.cast(), self.to_f16(v)) }
            fn store_bf16(self, p: *mut bf16, v: __m512) { _mm256_storeu_si256(p.cast(), self.to_bf16(v)) }
            fn stream_bf16(self, p: *mut bf16, v: __m512) { _mm256_stream_si256(p.cast(), self.to_bf16(v)) }
        }
    }

    #[inline(always)]
    unsafe fn load_first(self, p: *const f32, n: usize) -> __m512 {
        isa!(_mm512_maskz_loadu_ps(((1u32 << n) - 1) as u16, p))
    }
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, v: __m512, n: usize) {
        isa!(_mm512_mask_storeu_ps(p, ((1u32 << n) - 1) as u16, v))
    }
    #[inline(always)]
    fn prefetch<T>(self, p: *const T) {
        isa!(_mm_prefetch::<_MM_HINT_T1>(p.cast()))
    }
    #[inline(always)]
    fn prefetch_near<T>(self, p: *const T) {
        isa!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
    }
    #[inline(always)]
    fn prefetch_write<T>(self, p: *const T) {
        isa!(_mm_prefetch::<_MM_HINT_ET0>(p.cast()))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> __m512 {
        isa!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    unsafe fn splat_f16(self, p: *const f16) -> __m512 {
        isa!(_mm512_cvtph_ps(_mm256_set1_epi16(p.cast::<i16>().read())))
    }
    #[inline(always)]
    unsafe fn splat_bf16(self, p: *const bf16) -> __m512 {
        isa!({
            let both = _mm512_set1_epi16(p.cast::<i16>().read());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(both))
        })
    }
    #[inline(always)]
    unsafe fn store2_f16<const STREAM: bool>(self, p: *mut f16, v: [__m512; 2]) {
        isa!({
            const ROUND: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            let low = _mm512_castsi256_si512(_mm512_cvtps_ph::<ROUND>(v[0]));
            let both = _mm512_inserti64x4::<1>(low, _mm512_cvtps_ph::<ROUND>(v[1]));
            store_512::<STREAM>(p.cast(), both)
        })
    }
    // One vector takes the elements of even index, which are the lower halves of 32-bit words, the
    // other those of odd index.
    #[inline(always)]
    unsafe fn load2_bf16(self, p: *const bf16) -> [__m512; 2] {
        isa!({
            let words = _mm512_loadu_si512(p.cast());
            let upper = _mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)), _mm512_castsi512_ps(upper)]
        })
    }
    #[inline(always)]
    unsafe fn store2_bf16<const STREAM: bool>(self, p: *mut bf16, v: [__m512; 2]) {
        isa!({
            let rounded = if _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v[0], v[1]) != 0 {
                crate::cpu::seldom();
                [round_to_bf16(v[0]), round_to_bf16(v[1])]
            } else {
                [round_number_to_bf16(v[0]), round_number_to_bf16(v[1])]
            };
            store_512::<STREAM>(p.cast(), upper_halves(rounded))
        })
    }
    #[inline(always)]
    unsafe fn store2_numbers_bf16<const STREAM: bool>(self, p: *mut bf16, v: [__m512; 2]) {
        isa!({
            let half = _mm512_set1_epi32(0x8000);
            let even = _mm512_add_epi32(_mm512_castps_si512(v[0]), half);
            let odd = _mm512_add_epi32(_mm512_castps_si512(v[1]), half);
            store_512::<STREAM>(p.cast(), upper_halves([even, odd]))
        })
    }
    #[inline(always)]
    fn order2_bf16(self, [a, b]: [__m512; 2]) -> [__m512; 2] {
        isa!({
            let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            [self.even(a, b), _mm512_permutex2var_ps(a, odd, b)]
        })
    }

    #[inline(always)]
    fn or_mask(self, a: __mmask16, b: __mmask16) -> __mmask16 {
        a | b
    }
    #[inline(always)]
    fn any(self, mask: __mmask16) -> bool {
        mask != 0
    }

    #[inline(always)]
    fn table(self, numbers: &'static [f32; 32]) -> [__m512; 2] {
        isa!([_mm512_loadu_ps(numbers.as_ptr()), _mm512_loadu_ps(numbers[16..].as_ptr())])
    }
    #[inline(always)]
    fn lookup(self, [low, high]: [__m512; 2], index: __m512i) -> __m512 {
        isa!(_mm512_permutex2var_ps(low, index, high))
    }

    #[inline(always)]
    fn shl_i32<const K: u32>(self, a: __m512i) -> __m512i {
        isa!(_mm512_slli_epi32::<K>(a))
    }

    #[inline(always)]
    fn even(self, a: __m512, b: __m512) -> __m512 {
        isa!({
            let lanes =
                _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            _mm512_permutex2var_ps(a, lanes, b)
        })
    }

    #[inline(always)]
    fn permute(self, a: __m512, index: __m512i) -> __m512 {
        isa!(_mm512_permutexvar_ps(index, a))
    }

    #[inline(always)]
    fn zeros(self) -> [__m512; 16] {
        [self.zero(); 16]
    }
    #[inline(always)]
    fn transpose(self, mut a: [__m512; 16]) -> [__m512; 16] {
        // 4x4 blocks inside of the four 128-bit parts, then the parts themselves.
        for i in [0, 4, 8, 12] {
            isa!({
                let ab = [_mm512_unpacklo_ps(a[i], a[i + 1]), _mm512_unpackhi_ps(a[i], a[i + 1])];
                let cd = [
                    _mm512_unpacklo_ps(a[i + 2], a[i + 3]),
                    _mm512_unpackhi_ps(a[i + 2], a[i + 3]),
                ];
                for j in [0, 1] {
                    let (low, high) = (_mm512_castps_pd(ab[j]), _mm512_castps_pd(cd[j]));
                    a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
                    a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
                }
            });
        }
        for i in 0..4 {
            isa!({
                let even = [
                    _mm512_shuffle_f32x4::<0x88>(a[i], a[i + 4]),
                    _mm512_shuffle_f32x4::<0x88>(a[i + 8], a[i + 12]),
                ];
                let odd = [
                    _mm512_shuffle_f32x4::<0xdd>(a[i], a[i + 4]),
                    _mm512_shuffle_f32x4::<0xdd>(a[i + 8], a[i + 12]),
                ];
                a[i] = _mm512_shuffle_f32x4::<0x88>(even[0], even[1]);
                a[i + 4] = _mm512_shuffle_f32x4::<0x88>(odd[0], odd[1]);
                a[i + 8] = _mm512_shuffle_f32x4::<0xdd>(even[0], even[1]);
                a[i + 12] = _mm512_shuffle_f32x4::<0xdd>(odd[0], odd[1]);
            });
        }
        a
    }
}
