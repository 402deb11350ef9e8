//! The division of outputs by the norm of their heads, where a task has just written them.
//!
//! Every head has [`GROUP`] partial sums: channel `c` of the head belongs to sum `c % GROUP`. Squares are added to them
//! in the order of channels, and the sums in pairs. So the bits do not depend on layouts, vectors or tasks.

use super::{GROUP, Operand};
use crate::causal_conv1d::HeadNorm;
use crate::cpu::{Kernel, MAX_LANES, Simd, SimdElement};
use std::ops::Range;

/// Some tokens of whole heads of an output. The code that makes it guarantees that they exist, and that nothing else
/// accesses them.
pub(crate) struct Heads<'a, T> {
    pub norm: HeadNorm,
    pub y: &'a Operand<T>,
    pub row: usize,
    pub channels: Range<usize>,
    pub tokens: Range<usize>,
}

impl<T: SimdElement> Kernel for Heads<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Heads { norm, y, row, channels, tokens } = self;
        let [_, channel, token] = y.strides;
        // SAFETY: the elements exist.
        unsafe {
            if token == 1 && channel != 1 {
                for c in channels.step_by(norm.width()) {
                    for t in tokens.clone().step_by(S::LANES) {
                        let n = S::LANES.min(tokens.end - t);
                        along_tokens::<S, T>(s, norm, (y.at(row, c, t), channel), n);
                    }
                }
                return;
            }
            for t in tokens {
                for c in channels.clone().step_by(norm.width()) {
                    let at = y.at(row, c, t);
                    match channel {
                        1 => along_channels::<S, T>(s, norm, at),
                        _ => apart::<T>(norm, (at, channel)),
                    }
                }
            }
        }
    }
}

/// The factor of a head whose squares have these partial sums.
#[inline(always)]
fn factor(norm: HeadNorm, mut sums: [f32; GROUP]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
    }
    1.0 / (sums[0] + norm.epsilon()).sqrt()
}

/// Divides the head of one token, whose channels are neighbours.
///
/// # Safety
/// The head is writable at `at`.
#[inline(always)]
unsafe fn along_channels<S: Simd, T: SimdElement>(s: S, norm: HeadNorm, at: *mut T) {
    let whole = norm.width() / GROUP * GROUP;
    let rest = norm.width() - whole;
    let parts = GROUP / S::LANES;
    let mut sums = [s.zero(); GROUP];
    let mut lanes = [0f32; GROUP];
    // SAFETY: elements of the head; `parts` vectors fill the lanes.
    unsafe {
        for c in (0..whole).step_by(GROUP) {
            for (j, sum) in sums[..parts].iter_mut().enumerate() {
                let v = T::load(s, at.add(c + j * S::LANES));
                *sum = s.add(*sum, s.mul(v, v));
            }
        }
        for (j, sum) in sums[..parts].iter_mut().enumerate() {
            let n = rest.saturating_sub(j * S::LANES).min(S::LANES);
            if n > 0 {
                let v = T::load_first(s, at.add(whole + j * S::LANES), n);
                *sum = s.add(*sum, s.mul(v, v));
            }
            s.store(lanes.as_mut_ptr().add(j * S::LANES), *sum);
        }
        let factor = s.splat(factor(norm, lanes));
        let vectors = norm.width() / S::LANES * S::LANES;
        for c in (0..vectors).step_by(S::LANES) {
            T::store(s, at.add(c), s.mul(T::load(s, at.add(c)), factor));
        }
        let n = norm.width() - vectors;
        if n > 0 {
            let v = T::load_first(s, at.add(vectors), n);
            T::store_first(s, at.add(vectors), s.mul(v, factor), n);
        }
    }
}

/// Divides the head of `n <= LANES` tokens, which are neighbours.
///
/// # Safety
/// The tokens are writable at `at`, channels lie `channel` apart.
#[inline(always)]
unsafe fn along_tokens<S: Simd, T: SimdElement>(
    s: S,
    norm: HeadNorm,
    (at, channel): (*mut T, isize),
    n: usize,
) {
    let mut sums = [s.zero(); GROUP];
    // SAFETY: elements of the head.
    unsafe {
        for c in (0..norm.width()).step_by(GROUP) {
            for (j, sum) in sums.iter_mut().enumerate().take(norm.width() - c) {
                let v = T::load_first(s, at.offset((c + j) as isize * channel), n);
                *sum = s.add(*sum, s.mul(v, v));
            }
        }
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                sums[i] = s.add(sums[i], sums[i + half]);
            }
        }
        let mut factors = [0f32; MAX_LANES];
        s.store(factors.as_mut_ptr(), sums[0]);
        for factor in &mut factors {
            *factor = 1.0 / (*factor + norm.epsilon()).sqrt();
        }
        let factor = s.load(factors.as_ptr());
        for c in 0..norm.width() {
            let at = at.offset(c as isize * channel);
            T::store_first(s, at, s.mul(T::load_first(s, at, n), factor), n);
        }
    }
}

/// Divides the head of one token, whose channels lie `channel` apart.
///
/// # Safety
/// They are writable from `at` on.
#[inline(always)]
unsafe fn apart<T: SimdElement>(norm: HeadNorm, (at, channel): (*mut T, isize)) {
    let mut sums = [0f32; GROUP];
    // SAFETY: elements of the head.
    unsafe {
        for c in 0..norm.width() {
            let v = (*at.offset(c as isize * channel)).to_f32();
            sums[c % GROUP] += v * v;
        }
        let factor = factor(norm, sums);
        for c in 0..norm.width() {
            let at = at.offset(c as isize * channel);
            at.write(T::from_f32((*at).to_f32() * factor));
        }
    }
}
