//! AVX2 with FMA and F16C.

use super::bits_of_pair;
use crate::cpu::isa::call_avx2;
use crate::cpu::{Kernel, Simd};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// AVX2 with FMA and F16C, which most x86-64 cores have had since about 2013.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2");
        has.then_some(Avx2(()))
    }
}

/// The first `n` of 8 lanes as a mask for masked loads and stores.
#[inline(always)]
unsafe fn first_of_8(n: usize) -> __m256i {
    // SAFETY: called by Avx2 only; the table has 16 entries and n <= 8.
    unsafe {
        const TABLE: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
        _mm256_loadu_si256(TABLE.as_ptr().add(8 - n).cast())
    }
}

impl Avx2 {
    #[inline(always)]
    fn to_f16(self, v: __m256) -> __m128i {
        isa!(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v))
    }

    #[inline(always)]
    fn to_bf16(self, v: __m256) -> __m128i {
        isa!({
            // As `round_to_bf16`.
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let round = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_add_epi32(bits, round);
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let out = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let packed = _mm256_packus_epi32(out, out);
            let packed = _mm256_permute4x64_epi64::<0b1000>(packed);
            _mm256_castsi256_si128(packed)
        })
    }
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    const REGISTERS: usize = 16;
    type F32 = __m256;
    type F64 = [__m256d; 2];
    type I32 = __m256i;
    type Mask = __m256;
    type Table = &'static [f32; 32];
    // Gathers cost several cycles for each lane on many cores.
    const FAST_LOOKUP: bool = false;
    type Square = [__m256; 8];
    type Half = Self;

    #[inline(always)]
    fn half(self) -> Self {
        self
    }
    #[inline(always)]
    fn outlined<K: Kernel>(self, kernel: K) -> K::Output {
        call_avx2(self, kernel)
    }

    instructions! {
        safe {
            fn splat(self, x: f32) -> __m256 { _mm256_set1_ps(x) }
            fn splat_pair(self, pair: [f32; 2]) -> __m256 { _mm256_castsi256_ps(_mm256_set1_epi64x(bits_of_pair(pair))) }
            fn stream_fence(self) { _mm_sfence() }
            fn add(self, a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
            fn sub(self, a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
            fn mul(self, a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
            fn div(self, a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
            fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
            fn neg_mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fnmadd_ps(a, b, c) }
            fn min(self, a: __m256, b: __m256) -> __m256 { _mm256_min_ps(a, b) }
            fn max(self, a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
            fn abs(self, a: __m256) -> __m256 { _mm256_andnot_ps(_mm256_set1_ps(-0.0), a) }
            fn neg(self, a: __m256) -> __m256 { _mm256_xor_ps(a, _mm256_set1_ps(-0.0)) }
            fn lt(self, a: __m256, b: __m256) -> __m256 { _mm256_cmp_ps::<_CMP_LT_OQ>(a, b) }
            fn not_le(self, a: __m256, b: __m256) -> __m256 { _mm256_cmp_ps::<_CMP_NLE_UQ>(a, b) }
            fn is_nan(self, a: __m256) -> __m256 { _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a) }
            fn select(self, mask: __m256, a: __m256, b: __m256) -> __m256 { _mm256_blendv_ps(b, a, mask) }
            fn or_mask(self, a: __m256, b: __m256) -> __m256 { _mm256_or_ps(a, b) }
            fn any(self, mask: __m256) -> bool { _mm256_movemask_ps(mask) != 0 }
            fn widen(self, a: __m256) -> [__m256d; 2] {
                [_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(a))]
            }
            fn narrow(self, a: [__m256d; 2]) -> __m256 {
                _mm256_set_m128(_mm256_cvtpd_ps(a[1]), _mm256_cvtpd_ps(a[0]))
            }
            fn mul_f64(self, a: [__m256d; 2], b: f64) -> [__m256d; 2] {
                [_mm256_mul_pd(a[0], _mm256_set1_pd(b)), _mm256_mul_pd(a[1], _mm256_set1_pd(b))]
            }
            fn mul_add_f64(self, a: [__m256d; 2], b: f64, c: [__m256d; 2]) -> [__m256d; 2] {
                [_mm256_fmadd_pd(a[0], _mm256_set1_pd(b), c[0]), _mm256_fmadd_pd(a[1], _mm256_set1_pd(b), c[1])]
            }
            fn to_bits(self, a: __m256) -> __m256i { _mm256_castps_si256(a) }
            fn from_bits(self, a: __m256i) -> __m256 { _mm256_castsi256_ps(a) }
            fn add_i32(self, a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi32(a, b) }
        }
        unsafe {
            fn load(self, p: *const f32) -> __m256 { _mm256_loadu_ps(p) }
            fn store(self, p: *mut f32, v: __m256) { _mm256_storeu_ps(p, v) }
            fn load_first(self, p: *const f32, n: usize) -> __m256 { _mm256_maskload_ps(p, first_of_8(n)) }
            fn store_first(self, p: *mut f32, v: __m256, n: usize) { _mm256_maskstore_ps(p, first_of_8(n), v) }
            fn stream(self, p: *mut f32, v: __m256) { _mm256_stream_ps(p, v) }
            fn load_f16(self, p: *const f16) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
            fn store_f16(self, p: *mut f16, v: __m256) { _mm_storeu_si128(p.cast(), self.to_f16(v)) }
            fn stream_f16(self, p: *mut f16, v: __m256) { _mm_stream_si128(p.cast(), self.to_f16(v)) }
            fn store_bf16(self, p: *mut bf16, v: __m256) { _mm_storeu_si128(p.cast(), self.to_bf16(v)) }
            fn stream_bf16(self, p: *mut bf16, v: __m256) { _mm_stream_si128(p.cast(), self.to_bf16(v)) }
        }
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
    unsafe fn load_bf16(self, p: *const bf16) -> __m256 {
        isa!({
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        })
    }

    #[inline(always)]
    unsafe fn splat_f16(self, p: *const f16) -> __m256 {
        isa!(_mm256_cvtph_ps(_mm_set1_epi16(p.cast::<i16>().read())))
    }
    #[inline(always)]
    unsafe fn splat_bf16(self, p: *const bf16) -> __m256 {
        isa!({
            let both = _mm256_set1_epi16(p.cast::<i16>().read());
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(both))
        })
    }

    #[inline(always)]
    fn recip14(self, a: __m256) -> __m256 {
        // The estimate has 11 bits; a step of Newton's method doubles them.
        let estimate = isa!(_mm256_rcp_ps(a));
        let error = self.neg_mul_add(a, estimate, self.splat(1.0));
        self.mul_add(estimate, error, estimate)
    }

    #[inline(always)]
    fn table(self, numbers: &'static [f32; 32]) -> &'static [f32; 32] {
        numbers
    }
    #[inline(always)]
    fn lookup(self, table: &'static [f32; 32], index: __m256i) -> __m256 {
        isa!(_mm256_i32gather_ps::<4>(
            table.as_ptr(),
            _mm256_and_si256(index, _mm256_set1_epi32(31))
        ))
    }

    #[inline(always)]
    fn shl_i32<const K: u32>(self, a: __m256i) -> __m256i {
        isa!(_mm256_sll_epi32(a, _mm_cvtsi32_si128(K as i32)))
    }

    #[inline(always)]
    fn even(self, a: __m256, b: __m256) -> __m256 {
        isa!({
            let pairs = _mm256_castps_pd(_mm256_shuffle_ps::<0b10_00_10_00>(a, b));
            _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(pairs))
        })
    }
    #[inline(always)]
    fn permute(self, a: __m256, index: __m256i) -> __m256 {
        isa!(_mm256_permutevar8x32_ps(a, index))
    }
    #[inline(always)]
    fn reduce_add(self, a: __m256) -> f32 {
        isa!({
            let sum = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
            _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)))
        })
    }

    #[inline(always)]
    fn zeros(self) -> [__m256; 8] {
        [self.zero(); 8]
    }
    #[inline(always)]
    fn transpose(self, mut a: [__m256; 8]) -> [__m256; 8] {
        for i in [0, 4] {
            isa!({
                let ab = [_mm256_unpacklo_ps(a[i], a[i + 1]), _mm256_unpackhi_ps(a[i], a[i + 1])];
                let cd = [
                    _mm256_unpacklo_ps(a[i + 2], a[i + 3]),
                    _mm256_unpackhi_ps(a[i + 2], a[i + 3]),
                ];
                for j in [0, 1] {
                    let (low, high) = (_mm256_castps_pd(ab[j]), _mm256_castps_pd(cd[j]));
                    a[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high));
                    a[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, high));
                }
            });
        }
        for i in 0..4 {
            isa!({
                let (low, high) = (a[i], a[i + 4]);
                a[i] = _mm256_permute2f128_ps::<0x20>(low, high);
                a[i + 4] = _mm256_permute2f128_ps::<0x31>(low, high);
            });
        }
        a
    }
}
