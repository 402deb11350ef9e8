//! The one-dimensional transforms on vectors.
//!
//! The points come in pairs +p, -p. The rows of `B^T` that belong to a pair differ in the sign of
//! the odd powers only, and so do the columns of `A^T`; computing even and odd parts once halves
//! the operations.

// Indices are those of the formulas.
#![allow(clippy::needless_range_loop)]

use crate::conv2d::Tile;
use crate::conv2d::winograd::{MAX_ALPHA, TAPS};
use crate::cpu::Simd;

/// The largest number of pairs of points.
const MAX_PAIRS: usize = (MAX_ALPHA - 2) / 2;

/// The transform matrices with the shared work of even and odd powers taken out.
#[derive(Clone, Copy, Debug)]
struct Coefficients {
    /// `prod_q (x^2 - p_q^2)`: the coefficients of 1, x^2, x^4; the leading one is 1.
    all: [f32; MAX_PAIRS],
    /// The same product without pair `q`.
    others: [[f32; MAX_PAIRS]; MAX_PAIRS],
    /// `powers[q][i] = p_q^i`
    powers: [[f32; MAX_ALPHA - 2]; MAX_PAIRS],
    /// `G` at zero, whose row has one coefficient, and at `p_q`; that at `-p_q` has the other sign in the middle.
    filter_at_zero: f32,
    filter: [[f32; TAPS]; MAX_PAIRS],
}

impl Coefficients {
    /// The transforms of the tile with this `alpha`.
    const fn new(alpha: usize) -> Self {
        let t = match alpha {
            4 => Tile::F2.transforms(),
            6 => Tile::F4.transforms(),
            8 => Tile::F6.transforms(),
            _ => panic!("no tile has this alpha"),
        };
        let mut c = Coefficients {
            all: [0.0; MAX_PAIRS],
            others: [[0.0; MAX_PAIRS]; MAX_PAIRS],
            powers: [[0.0; MAX_ALPHA - 2]; MAX_PAIRS],
            filter_at_zero: t.g[0][0].to_f64() as f32,
            filter: [[0.0; TAPS]; MAX_PAIRS],
        };
        let pairs = (t.alpha - 2) / 2;
        let mut q = 0;
        while q < pairs {
            c.all[q] = t.bt[0][2 * q].to_f64() as f32;
            let mut j = 0;
            while j + 1 < pairs {
                c.others[q][j] = t.bt[1 + 2 * q][2 * j + 2].to_f64() as f32;
                j += 1;
            }
            let mut i = 0;
            while i < t.m {
                c.powers[q][i] = t.at[i][1 + 2 * q].to_f64() as f32;
                i += 1;
            }
            let mut tap = 0;
            while tap < TAPS {
                c.filter[q][tap] = t.g[1 + 2 * q][tap].to_f64() as f32;
                tap += 1;
            }
            q += 1;
        }
        c
    }
}

/// `k * x + sum`, for a `k` that the compiler knows.
#[inline(always)]
fn accumulate<S: Simd>(s: S, k: f32, x: S::F32, sum: S::F32) -> S::F32 {
    if k == 1.0 {
        s.add(sum, x)
    } else if k == -1.0 {
        s.sub(sum, x)
    } else {
        s.mul_add(s.splat(k), x, sum)
    }
}

/// `B^T x`
#[inline(always)]
pub(super) fn input<S: Simd, const A: usize>(s: S, x: [S::F32; A]) -> [S::F32; A] {
    let k = const { Coefficients::new(A) };
    let pairs = (A - 2) / 2;
    let mut out = x;
    let (mut first, mut last) = (x[A - 2], x[A - 1]);
    for j in 0..pairs {
        first = accumulate(s, k.all[j], x[2 * j], first);
        last = accumulate(s, k.all[j], x[2 * j + 1], last);
    }
    for q in 0..pairs {
        let (mut even, mut odd) = (x[A - 2], x[A - 3]);
        for j in 0..pairs - 1 {
            even = accumulate(s, k.others[q][j], x[2 * j + 2], even);
            odd = accumulate(s, k.others[q][j], x[2 * j + 1], odd);
        }
        let p = k.powers[q][1];
        out[1 + 2 * q] = accumulate(s, p, odd, even);
        out[2 + 2 * q] =
            if p == 1.0 { s.sub(even, odd) } else { s.neg_mul_add(s.splat(p), odd, even) };
    }
    out[0] = first;
    out[A - 1] = last;
    out
}

/// `A^T x`; the first `A - 2` elements are the result, the others unspecified.
#[inline(always)]
pub(super) fn output<S: Simd, const A: usize>(s: S, x: [S::F32; A]) -> [S::F32; A] {
    let k = const { Coefficients::new(A) };
    let pairs = (A - 2) / 2;
    let (mut sum, mut difference) = (x, x);
    for q in 0..pairs {
        sum[q] = s.add(x[1 + 2 * q], x[2 + 2 * q]);
        difference[q] = s.sub(x[1 + 2 * q], x[2 + 2 * q]);
    }
    let mut out = x;
    for i in 0..A - 2 {
        let terms = if i % 2 == 0 { &sum } else { &difference };
        let mut y = match i {
            0 => s.add(x[0], terms[0]),
            _ if i == A - 3 => accumulate(s, k.powers[0][i], terms[0], x[A - 1]),
            _ if k.powers[0][i] == 1.0 => terms[0],
            _ => s.mul(s.splat(k.powers[0][i]), terms[0]),
        };
        for q in 1..pairs {
            y = accumulate(s, k.powers[q][i], terms[q], y);
        }
        out[i] = y;
    }
    out
}

/// `A y` of the first `A - 2` elements: a tile's gradients at the positions of the transformed tile.
#[inline(always)]
pub(super) fn output_gradient<S: Simd, const A: usize>(s: S, y: [S::F32; A]) -> [S::F32; A] {
    let k = const { Coefficients::new(A) };
    let mut out = y;
    out[A - 1] = y[A - 3];
    for q in 0..(A - 2) / 2 {
        let p = k.powers[q][1];
        let mut even = y[0];
        let mut odd = if p == 1.0 { y[1] } else { s.mul(s.splat(p), y[1]) };
        for i in (2..A - 2).step_by(2) {
            even = accumulate(s, k.powers[q][i], y[i], even);
            odd = accumulate(s, k.powers[q][i + 1], y[i + 1], odd);
        }
        out[1 + 2 * q] = s.add(even, odd);
        out[2 + 2 * q] = s.sub(even, odd);
    }
    out
}

/// `G^T u`: the filter's gradient of those of its transform.
#[inline(always)]
pub(super) fn filter_gradient<S: Simd, const A: usize>(s: S, u: [S::F32; A]) -> [S::F32; TAPS] {
    let k = const { Coefficients::new(A) };
    let mut out = [s.mul(s.splat(k.filter_at_zero), u[0]), s.zero(), u[A - 1]];
    for q in 0..(A - 2) / 2 {
        let (sum, difference) =
            (s.add(u[1 + 2 * q], u[2 + 2 * q]), s.sub(u[1 + 2 * q], u[2 + 2 * q]));
        for tap in 0..TAPS {
            let x = if tap == 1 { difference } else { sum };
            out[tap] = accumulate(s, k.filter[q][tap], x, out[tap]);
        }
    }
    out
}
