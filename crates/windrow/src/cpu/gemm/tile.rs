//! The register tile of a product: its sums, and their way to memory.

use super::{Left, VECTORS, max_rows};
use crate::Activation;
use crate::cpu::{Simd, array};

/// The memory for a finished tile, whose columns are contiguous, and what is applied to the tile before it is stored:
/// biases, residual, clamp; or biases and an activation that is no clamp.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub at: *mut f32,
    /// Elements from one row to the next.
    pub row: isize,
    /// A bias for each row; null if there is none.
    pub row_bias: *const f32,
    /// A bias for each column; null if there is none.
    pub col_bias: *const f32,
    /// The residual, which is added after the biases and has the destination's layout; null if there is none.
    pub residual: *const f32,
    /// The bounds to which results are clamped.
    pub low: f32,
    pub high: f32,
    /// The activation in the place of residual and clamp, if it is no clamp.
    pub curve: Option<Activation>,
}

impl Place {
    /// The destination of the tile that starts at row `i` and column `j`.
    #[inline(always)]
    pub(super) fn tile(self, i: usize, j: usize) -> Self {
        let bias = |bias: *const f32, at: usize| match bias.is_null() {
            true => bias,
            false => bias.wrapping_add(at),
        };
        let at = i as isize * self.row + j as isize;
        let residual = match self.residual.is_null() {
            true => self.residual,
            false => self.residual.wrapping_offset(at),
        };
        Place {
            at: self.at.wrapping_offset(at),
            residual,
            row_bias: bias(self.row_bias, i),
            col_bias: bias(self.col_bias, j),
            ..self
        }
    }
}

/// `c[rows][nr] (+)= a[rows][terms] * b[terms][nr]`
pub(super) struct Tile {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) terms: usize,
    pub(super) a: Left,
    pub(super) b: *const f32,
    pub(super) c: *mut f32,
    pub(super) accumulate: bool,
    /// The destination of the sums instead of `c`.
    pub(super) place: Option<Place>,
    /// The address from which to prefetch, and the number of elements to prefetch for each term.
    pub(super) ahead: (*const f32, usize),
}

impl Tile {
    /// Calls [`tile`] with the tile's number of rows as a constant.
    ///
    /// # Safety
    /// As for [`tile`], with at most the rows of an instruction set's tile.
    #[inline(always)]
    pub(super) unsafe fn run<S: Simd>(&self, s: S) {
        macro_rules! rows {
            ($($r:literal)*) => {
                match self.rows {
                    // SAFETY: passed on.
                    $($r if const { $r <= max_rows::<S>() } => unsafe {
                        // Half of a narrow tile would be idle.
                        if self.cols <= S::LANES {
                            tile::<S, $r, 1>(s, self)
                        } else {
                            tile::<S, $r, VECTORS>(s, self)
                        }
                    },)*
                    rows => unreachable!("a tile of {rows} rows"),
                }
            };
        }
        rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    }
}

/// Computes a register tile of `R` rows and `V` vectors, and stores it.
///
/// # Safety
/// Panels `a` and `b` of `t.terms` terms are readable, `c` holds R rows of VECTORS vectors, and the place
/// R rows of `t.cols` elements.
#[inline(always)]
unsafe fn tile<S: Simd, const R: usize, const V: usize>(s: S, t: &Tile) {
    // SAFETY: as promised by the caller; both loops read exactly R rows and `terms` terms.
    unsafe {
        if let Some(place) = t.place {
            for i in 0..R {
                let at = i as isize * place.row;
                s.prefetch_write(place.at.wrapping_offset(at));
                if !place.residual.is_null() {
                    s.prefetch_near(place.residual.wrapping_offset(at));
                }
            }
        }
        let mut acc = [[s.zero(); V]; R];
        let (mut ahead, distance) = t.ahead;
        if t.a.row == 1 && t.a.step == R {
            // Packed: offsets within a step are constants.
            for p in 0..t.terms {
                s.prefetch_near(ahead);
                ahead = ahead.wrapping_add(distance);
                step(s, &mut acc, t.b.add(p * VECTORS * S::LANES), |i| *t.a.ptr.add(p * R + i));
            }
        } else {
            let (row, column) = (t.a.row, t.a.step);
            for p in 0..t.terms {
                s.prefetch_near(ahead);
                ahead = ahead.wrapping_add(distance);
                let a = t.a.ptr.add(p * column);
                step(s, &mut acc, t.b.add(p * VECTORS * S::LANES), |i| *a.add(i * row));
            }
        }
        if t.accumulate {
            for (i, row) in acc.iter_mut().enumerate() {
                for (v, sum) in row.iter_mut().enumerate() {
                    *sum = s.add(s.load(t.c.add((i * VECTORS + v) * S::LANES)), *sum);
                }
            }
        }
        if let Some(place) = t.place
            && t.cols == V * S::LANES
            && place.row_bias.is_null()
        {
            return put_whole(s, place, acc);
        }
        for (i, row) in acc.into_iter().enumerate() {
            for (v, sum) in row.into_iter().enumerate() {
                match t.place {
                    None => s.store(t.c.add((i * VECTORS + v) * S::LANES), sum),
                    Some(place) => put(s, place, i, v * S::LANES, t.cols, sum),
                }
            }
        }
    }
}

/// Stores the sums of a tile of whole vectors without row biases at their place. It tests once for bias and residual:
/// tests for each vector would take longer than short sums.
///
/// # Safety
/// The elements of the place are writable, the residual and the biases readable.
#[inline(always)]
unsafe fn put_whole<S: Simd, const R: usize, const V: usize>(
    s: S,
    place: Place,
    acc: [[S::F32; V]; R],
) {
    let (low, high) = (s.splat(place.low), s.splat(place.high));
    let (has_bias, adds) = (!place.col_bias.is_null(), !place.residual.is_null());
    // SAFETY: promised by the caller.
    unsafe {
        let mut bias = [s.zero(); V];
        if has_bias {
            bias = array(|v| s.load(place.col_bias.add(v * S::LANES)));
        }
        for (i, row) in acc.into_iter().enumerate() {
            let at = i as isize * place.row;
            let (to, from) = (place.at.wrapping_offset(at), place.residual.wrapping_offset(at));
            for (v, sum) in row.into_iter().enumerate() {
                let mut y = if has_bias { s.add(sum, bias[v]) } else { sum };
                if adds {
                    y = s.add(y, s.load(from.add(v * S::LANES)));
                }
                s.store(to.add(v * S::LANES), s.min(high, s.max(low, y)));
            }
        }
    }
}

/// Stores a vector of sums, at row `i` from column `j` on, at their place, which has `cols` columns.
///
/// # Safety
/// These elements are writable, and the biases readable.
#[inline(always)]
unsafe fn put<S: Simd>(s: S, place: Place, i: usize, j: usize, cols: usize, sum: S::F32) {
    let len = cols.saturating_sub(j).min(S::LANES);
    // SAFETY: promised by the caller.
    unsafe {
        let mut y = sum;
        if !place.row_bias.is_null() {
            y = s.add(y, s.splat(*place.row_bias.add(i)));
        }
        if !place.col_bias.is_null() {
            let bias = place.col_bias.wrapping_add(j);
            y = s.add(y, if len == S::LANES { s.load(bias) } else { s.load_first(bias, len) });
        }
        let at = (i as isize * place.row).wrapping_add_unsigned(j);
        if !place.residual.is_null() {
            let from = place.residual.wrapping_offset(at);
            y = s.add(y, if len == S::LANES { s.load(from) } else { s.load_first(from, len) });
        }
        let y = s.min(s.splat(place.high), s.max(s.splat(place.low), y));
        let at = place.at.wrapping_offset(at);
        if len == S::LANES { s.store(at, y) } else { s.store_first(at, y, len) }
    }
}

/// Adds one term to every sum of the tile.
///
/// # Safety
/// V vectors are readable at `b`, and `a(i)` may be called for `i < R`.
#[inline(always)]
unsafe fn step<S: Simd, const R: usize, const V: usize>(
    s: S,
    acc: &mut [[S::F32; V]; R],
    b: *const f32,
    a: impl Fn(usize) -> f32,
) {
    // SAFETY: V vectors are readable at b.
    let b: [S::F32; V] = array(|v| unsafe { s.load(b.add(v * S::LANES)) });
    for (i, row) in acc.iter_mut().enumerate() {
        let a = s.splat(a(i));
        for (v, sum) in row.iter_mut().enumerate() {
            *sum = s.mul_add(a, b[v], *sum);
        }
    }
}
