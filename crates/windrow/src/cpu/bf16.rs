//! The interface of instructions that multiply pairs of bf16 and add to f32, such as those of AVX512_BF16.

use super::Simd;
use half::bf16;

/// A kernel that uses products of bf16.
pub(crate) trait Bf16Kernel {
    /// Must be `#[inline(always)]`, as [`Kernel::run`](super::Kernel::run).
    fn run<P: Bf16Products>(self, products: P);
}

/// Elements `start..end` of the memory at `ptr`. Elements outside that range read as zero. Reads are slow if `ptr` is
/// not in the program's memory, even if the range is empty.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub ptr: *const bf16,
    pub start: usize,
    pub end: usize,
}

/// An instruction set that multiplies bf16 and adds in f32, two products at a time.
///
/// Products are exact, and sums are rounded to nearest even. Subnormal operands and results are treated as zero.
pub(crate) trait Bf16Products: Copy {
    /// The SIMD type for all other operations.
    type Simd: Simd;
    fn simd(self) -> Self::Simd;
    /// Interleaves elements `0..len` of two rows. Writes whole vectors, so up to `2 LANES - 1` pairs more.
    /// # Safety: elements inside the rows are readable, and these pairs writable at `to`.
    unsafe fn interleave(self, first: Row, second: Row, len: usize, to: *mut f32);
    /// `c` plus both products of the pairs of bf16 in each lane of `a` and `b`.
    fn mul_add_pairs(
        self,
        a: <Self::Simd as Simd>::F32,
        b: <Self::Simd as Simd>::F32,
        c: <Self::Simd as Simd>::F32,
    ) -> <Self::Simd as Simd>::F32;
    /// Stores two vectors, rounded to nearest even. NaN stays NaN.
    /// # Safety: twice `LANES` bf16 are writable at `p` (any alignment).
    unsafe fn store2(self, p: *mut bf16, v: [<Self::Simd as Simd>::F32; 2]);
    /// Splits each number into three bf16 whose sum is the number: each is the rounded remainder of those before it. If
    /// a number is not finite, the first is that number and the others have no meaning. The results of the two vectors
    /// are stored one after the other, or interleaved if `PAIRS`.
    /// # Safety: twice `LANES` bf16 are writable at each of `to` (any alignment).
    unsafe fn split2<const PAIRS: bool>(
        self,
        to: [*mut bf16; 3],
        v: [<Self::Simd as Simd>::F32; 2],
    );
}

#[cfg(test)]
pub(crate) use model::Bf16Model;

/// A scalar model of these instructions, for tests on machines that do not have them.
#[cfg(test)]
mod model {
    use super::super::lanes::Lanes;
    use super::{Bf16Products, Row, Simd};
    use half::bf16;

    #[derive(Clone, Copy)]
    pub(crate) struct Bf16Model;

    /// Zero with the sign of `x`, if `x` is subnormal.
    fn flushed(x: f32) -> f32 {
        if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
    }

    type Vector = <Lanes as Simd>::F32;

    impl Bf16Products for Bf16Model {
        type Simd = Lanes;
        fn simd(self) -> Lanes {
            Lanes
        }
        unsafe fn interleave(self, first: Row, second: Row, len: usize, to: *mut f32) {
            for at in 0..len.next_multiple_of(2 * Lanes::LANES) {
                let [low, high] = [first, second].map(|row| {
                    let inside = (row.start..row.end).contains(&at);
                    // SAFETY: promised by the caller.
                    if inside { unsafe { (*row.ptr.add(at)).to_bits() } } else { 0 }
                });
                let pair = f32::from_bits(u32::from(low) | u32::from(high) << 16);
                // SAFETY: promised by the caller.
                unsafe { to.add(at).write(pair) };
            }
        }
        fn mul_add_pairs(self, a: Vector, b: Vector, c: Vector) -> Vector {
            let product = |i: usize, half: u32, sum: f32| {
                let [a, b] = [a, b].map(|v| {
                    flushed(f32::from_bits(v[i].to_bits() << (16 - 16 * half) & 0xffff_0000))
                });
                flushed(a.mul_add(b, sum))
            };
            std::array::from_fn(|i| product(i, 1, product(i, 0, flushed(c[i]))))
        }
        unsafe fn store2(self, p: *mut bf16, v: [Vector; 2]) {
            for (i, x) in v.as_flattened().iter().enumerate() {
                // SAFETY: promised by the caller.
                unsafe { p.add(i).write(bf16::from_f32(flushed(*x))) };
            }
        }
        unsafe fn split2<const PAIRS: bool>(self, to: [*mut bf16; 3], v: [Vector; 2]) {
            for (half, v) in v.into_iter().enumerate() {
                for (i, mut x) in v.into_iter().enumerate() {
                    let at = if PAIRS { 2 * i + half } else { half * Lanes::LANES + i };
                    for to in to {
                        let part = bf16::from_f32(flushed(x));
                        // SAFETY: promised by the caller.
                        unsafe { to.add(at).write(part) };
                        x -= part.to_f32();
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Isa, MAX_LANES, dispatch_bf16};
    use super::*;

    struct Sums<'a> {
        x: [&'a [bf16]; 2],
        w: [bf16; 2],
        y: &'a mut [bf16],
    }

    impl Bf16Kernel for Sums<'_> {
        #[inline(always)]
        fn run<P: Bf16Products>(self, p: P) {
            let Sums { x: [first, second], w: [w1, w2], y } = self;
            let s = p.simd();
            let lanes = P::Simd::LANES;
            let mut pairs = [0f32; 4 * MAX_LANES];
            let w = f32::from_bits(u32::from(w1.to_bits()) | u32::from(w2.to_bits()) << 16);
            // The first of the second row counts as zero.
            let first = Row { ptr: first.as_ptr(), start: 0, end: first.len() };
            let second = Row { ptr: second.as_ptr(), start: 1, end: second.len() };
            assert!(y.len().is_multiple_of(2 * lanes) && 4 * MAX_LANES >= y.len());
            // SAFETY: slices of pairs of vectors; rows are no longer than they.
            unsafe {
                p.interleave(first, second, y.len(), pairs.as_mut_ptr());
                let sum = |at: usize| {
                    p.mul_add_pairs(s.load(pairs.as_ptr().add(at)), s.splat(w), s.splat(0.5))
                };
                for at in (0..y.len()).step_by(2 * lanes) {
                    p.store2(y.as_mut_ptr().add(at), [sum(at), sum(at + lanes)]);
                }
            }
        }
    }

    #[test]
    fn sums_of_pairs_agree_with_scalar_arithmetic() {
        let has = |isa: &Isa| isa.has_bf16_products() || isa.has_tiles();
        for isa in Isa::tested().into_iter().filter(has) {
            let row = |start: f32, len| -> Vec<bf16> {
                (0..len).map(|i| bf16::from_f32(start + i as f32 * 0.37)).collect()
            };
            // Elements beyond the second row are zero.
            let (mut first, second) = (row(-3.0, 32), row(2.0, 27));
            (first[5], first[6], first[7]) = (bf16::NAN, bf16::INFINITY, bf16::MAX);
            let w = [1.25, -0.75].map(bf16::from_f32);
            let mut y = [bf16::ZERO; 32];
            dispatch_bf16(isa, Sums { x: [&first, &second], w, y: &mut y });
            for (i, y) in y.into_iter().enumerate() {
                let second = if (1..27).contains(&i) { second[i].to_f64() } else { 0.0 };
                let sum = 0.5 + first[i].to_f64() * w[0].to_f64() + second * w[1].to_f64();
                let sum = bf16::from_f32(sum as f32);
                assert!(y == sum || y.is_nan() && sum.is_nan(), "{i}: {y} {sum}");
            }
        }
    }
}
