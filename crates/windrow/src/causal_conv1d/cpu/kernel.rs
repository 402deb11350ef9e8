//! The two inner loops, compiled for each instruction set, element type and width.

use super::epilogue::epilogue;
use super::operand::Staged;
use crate::Activation;
use crate::cpu::{Simd, SimdElement};

/// Tokens that [`along_channels`] computes at once where there are several, so that each is loaded
/// once for all taps.
pub(crate) const TOKENS: usize = 4;

/// What is summed and what is applied to the sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sum {
    pub width: usize,
    pub activation: Activation,
    /// Write around the cache.
    pub stream: bool,
}

/// Stores `v`, around the cache if `stream` and the address allow it.
///
/// # Safety
/// `LANES` elements are writable at `y`.
#[inline(always)]
unsafe fn store<S: Simd, T: SimdElement>(s: S, stream: bool, y: *mut T, v: S::F32) {
    // SAFETY: promised by the caller; a vector that is streamed is aligned.
    unsafe {
        if stream && y.addr().is_multiple_of(S::LANES * size_of::<T>()) {
            T::stream(s, y, v);
        } else {
            T::store(s, y, v);
        }
    }
}

/// `n >= LANES` tokens of the first channel of `staged`, neighbours in memory. `x` is at the history
/// of the first token. `W` is the width, or 0 for any.
///
/// # Safety
/// `n + width - 1` elements are readable at `x` and `n` writable at `y`.
#[inline(always)]
pub(crate) unsafe fn along_tokens<S: Simd, T: SimdElement, const W: usize>(
    s: S,
    sum: Sum,
    x: *const T,
    y: *mut T,
    n: usize,
    staged: &Staged,
) {
    let width = if W > 0 { W } else { sum.width };
    // SAFETY: promised by the caller; `i` stays at most n - LANES.
    unsafe {
        let bias = s.splat(*staged.bias);
        let mut taps = [s.zero(); W];
        for (k, tap) in taps.iter_mut().enumerate() {
            *tap = s.splat(*staged.weight.add(k * staged.stride));
        }
        let mut i = 0;
        loop {
            let mut y_i = bias;
            for k in 0..width {
                let tap = match taps.get(k) {
                    Some(tap) => *tap,
                    None => s.splat(*staged.weight.add(k * staged.stride)),
                };
                y_i = s.mul_add(tap, T::load(s, x.add(i + k)), y_i);
            }
            store(s, sum.stream, y.add(i), epilogue::<S, T>(s, sum.activation, y_i));
            if i + S::LANES >= n {
                break;
            }
            // Vectors after the first are aligned, the first and the last overlap their neighbours
            // and write the same values again.
            let misaligned = y.add(i).addr() / size_of::<T>() % S::LANES;
            i = (i + S::LANES - misaligned).min(n - S::LANES);
        }
    }
}

/// `n` tokens of `channels >= LANES` channels, neighbours in memory; `x` is at the history of the first
/// token. `N` tokens are computed at once. `W` is the width, or 0 for any.
///
/// # Safety
/// `max(n, N) + width - 1` tokens are readable at `x` and `max(n, N)` writable at `y`, `staged` holds
/// the channels.
#[inline(always)]
pub(crate) unsafe fn along_channels<S: Simd, T: SimdElement, const W: usize, const N: usize>(
    s: S,
    sum: Sum,
    (x, x_token): (*const T, isize),
    (y, y_token): (*mut T, isize),
    (n, channels): (usize, usize),
    staged: &Staged,
) {
    let width = if W > 0 { W } else { sum.width };
    // SAFETY: promised by the caller; `t` stays at most max(n, N) - N and `c` at most
    // channels - LANES.
    unsafe {
        let mut t = 0;
        loop {
            let x = x.offset(t as isize * x_token);
            let y = y.offset(t as isize * y_token);
            let mut c = 0;
            loop {
                let mut sums = [s.load(staged.bias.add(c)); N];
                for k in 0..width {
                    let tap = s.load(staged.weight.add(k * staged.stride + c));
                    for (i, sum) in sums.iter_mut().enumerate() {
                        let x = x.offset((i + k) as isize * x_token).add(c);
                        *sum = s.mul_add(tap, T::load(s, x), *sum);
                    }
                }
                for (i, y_i) in sums.into_iter().enumerate() {
                    let y = y.offset(i as isize * y_token).add(c);
                    store(s, sum.stream, y, epilogue::<S, T>(s, sum.activation, y_i));
                }
                if c + S::LANES >= channels {
                    break;
                }
                // Overlapping as along tokens.
                c = (c + S::LANES).min(channels - S::LANES);
            }
            if t + N >= n {
                break;
            }
            t = (t + N).min(n - N);
        }
    }
}
