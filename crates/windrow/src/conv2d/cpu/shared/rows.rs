//! Copies into packed f32 memory.

use crate::cpu::{Simd, SimdElement};

/// Rows of elements in memory: element (i, j) at `ptr + i * row + j * col`.
#[derive(Clone, Copy, Debug)]
pub(in crate::conv2d::cpu) struct Rows<T> {
    pub ptr: *const T,
    pub row: isize,
    pub col: isize,
}

impl<T: SimdElement> Rows<T> {
    /// Copies `rows` rows of `len` elements to rows `to_row` apart.
    ///
    /// # Safety
    /// The elements are readable, the rows at `to` writable.
    #[inline(always)]
    pub(in crate::conv2d::cpu) unsafe fn copy<S: Simd>(
        self,
        s: S,
        rows: usize,
        len: usize,
        to: *mut f32,
        to_row: usize,
    ) {
        // SAFETY: promised by the caller.
        unsafe {
            for i in 0..rows {
                let (from, to) = (self.ptr.offset(i as isize * self.row), to.add(i * to_row));
                copy_line::<S, T, false>(s, from, self.col, to, len);
            }
        }
    }
}

/// Copies elements `col` apart; the last ones as a whole vector if `AHEAD`.
///
/// # Safety
/// `len` elements are readable at `from`, and `len` elements, in whole vectors if `AHEAD`, are writable at `to`.
#[inline(always)]
unsafe fn copy_line<S: Simd, T: SimdElement, const AHEAD: bool>(
    s: S,
    from: *const T,
    col: isize,
    to: *mut f32,
    len: usize,
) {
    let mut j = 0;
    // SAFETY: promised by the caller; a vector is loaded only where all of its lanes are asked for, and the element
    // after the last is never read.
    unsafe {
        let store_last = |j: usize, values| match AHEAD {
            true => s.store(to.add(j), values),
            false => s.store_first(to.add(j), values, len - j),
        };
        if col == 1 {
            while j + S::LANES <= len {
                s.store(to.add(j), T::load(s, from.add(j)));
                j += S::LANES;
            }
            if j < len {
                store_last(j, T::load_first(s, from.add(j), len - j));
            }
        } else if col == 2 && !S::IS_SMALL {
            while j + S::LANES < len {
                let from = from.add(2 * j);
                let pair = s.even(T::load(s, from), T::load(s, from.add(S::LANES)));
                s.store(to.add(j), pair);
                j += S::LANES;
            }
            if j < len {
                let (from, left) = (from.add(2 * j), 2 * (len - j) - 1);
                let first = T::load_first(s, from, left.min(S::LANES));
                let second = match left.saturating_sub(S::LANES) {
                    0 => s.zero(),
                    left => T::load_first(s, from.add(S::LANES), left),
                };
                store_last(j, s.even(first, second));
            }
        } else {
            for j in 0..len {
                to.add(j).write(from.offset(j as isize * col).read().to_f32());
            }
        }
    }
}

/// Copies `rows` rows of `len` elements, `col` apart, where rows lie next to each other: element (i, j) is at
/// `from + i + j * col`, and goes to `to + i * to_row + j`.
///
/// # Safety
/// The elements are readable, the rows at `to` writable; these do not overlap.
#[inline(always)]
pub(in crate::conv2d::cpu) unsafe fn copy_transposed<S: Simd, T: SimdElement>(
    s: S,
    (from, col): (*const T, isize),
    rows: usize,
    len: usize,
    to: *mut f32,
    to_row: usize,
) {
    if S::IS_SMALL {
        // SAFETY: passed on.
        return unsafe { Rows { ptr: from, row: 1, col }.copy(s, rows, len, to, to_row) };
    }
    for i in (0..rows).step_by(S::LANES) {
        let height = S::LANES.min(rows - i);
        for j in (0..len).step_by(S::LANES) {
            let width = S::LANES.min(len - j);
            // SAFETY: promised by the caller; only elements that were asked for are read. What is written beyond a
            // row is the beginning of one that is written later.
            unsafe {
                let from = from.offset(i as isize + j as isize * col);
                let to = to.add(i * to_row + j);
                if height == S::LANES && width == S::LANES {
                    // Loops of as many turns as a square has vectors, and a square of its own: it stays in registers.
                    let mut square = s.zeros();
                    for (a, column) in square.as_mut().iter_mut().enumerate() {
                        *column = T::load(s, from.offset(a as isize * col));
                    }
                    for (b, &row) in s.transpose(square).as_ref().iter().enumerate() {
                        s.store(to.add(b * to_row), row);
                    }
                    continue;
                }
                let mut square = s.zeros();
                for (a, column) in square.as_mut().iter_mut().enumerate().take(width) {
                    let from = from.offset(a as isize * col);
                    *column = match height == S::LANES {
                        true => T::load(s, from),
                        false => T::load_first(s, from, height),
                    };
                }
                let square = s.transpose(square);
                for (b, &row) in square.as_ref().iter().enumerate().take(height) {
                    let to = to.add(b * to_row);
                    let is_ahead = j == 0 && (rows - i - b - 1) * to_row + len >= S::LANES;
                    if width == S::LANES || is_ahead && len < S::LANES {
                        s.store(to, row);
                    } else {
                        s.store_first(to, row, width);
                    }
                }
            }
        }
    }
}

/// Copies elements `col` apart in whole vectors: up to a vector more is written, where what follows is yet
/// to be written.
///
/// # Safety
/// `len` elements are readable, and `len` elements, in whole vectors, are writable at `to`.
#[inline(always)]
pub(in crate::conv2d::cpu) unsafe fn copy_ahead<S: Simd, T: SimdElement>(
    s: S,
    from: *const T,
    col: isize,
    to: *mut f32,
    len: usize,
) {
    // SAFETY: promised by the caller.
    unsafe { copy_line::<S, T, true>(s, from, col, to, len) }
}

/// Writes `len` zeros.
///
/// # Safety
/// `len` elements are writable at `to`.
#[inline(always)]
pub(in crate::conv2d::cpu) unsafe fn zero<S: Simd>(s: S, to: *mut f32, len: usize) {
    let mut j = 0;
    // SAFETY: promised by the caller.
    unsafe {
        while j + S::LANES <= len {
            s.store(to.add(j), s.zero());
            j += S::LANES;
        }
        if j < len {
            s.store_first(to.add(j), s.zero(), len - j);
        }
    }
}

/// Writes at least `len` zeros in whole vectors: up to a vector more, where what follows is yet to
/// be written.
///
/// # Safety
/// `len` elements and a vector are writable at `to`.
#[inline(always)]
pub(in crate::conv2d::cpu) unsafe fn zero_ahead<S: Simd>(s: S, to: *mut f32, len: usize) {
    for j in (0..len).step_by(S::LANES) {
        // SAFETY: promised by the caller.
        unsafe { s.store(to.add(j), s.zero()) };
    }
}
