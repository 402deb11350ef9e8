//! Activations of numbers in memory, by function calls.

use super::{activated, derivative, silu};
use crate::Activation;
use crate::cpu::{Kernel, Simd, SimdElement};

/// Activates numbers in memory by a function call. Inlining every activation at each store would make up most of a
/// kernel's code.
///
/// # Safety
/// `len` f32 are readable and writable at `at`.
#[inline(always)]
pub(crate) unsafe fn activate_all<S: Simd>(s: S, activation: Activation, at: *mut f32, len: usize) {
    s.outlined(All { activation, grad: false, at, len });
}

/// The activation of numbers in memory, as a kernel. Only [`activate_all`], whose caller guarantees that the pointer is
/// valid, and [`by_call`](super::by_call) make it.
pub(super) struct All {
    pub(super) activation: Activation,
    /// True for the derivative.
    pub(super) grad: bool,
    pub(super) at: *mut f32,
    pub(super) len: usize,
}

impl Kernel for All {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for i in (0..self.len).step_by(S::LANES) {
            let n = S::LANES.min(self.len - i);
            // SAFETY: promised by the caller of `activate_all`.
            unsafe {
                let at = self.at.add(i);
                let x = if n == S::LANES { s.load(at) } else { s.load_first(at, n) };
                let y = match S::IS_SMALL && self.grad {
                    true => derivative(s, self.activation, x),
                    false => activated(s, self.activation, x),
                };
                if n == S::LANES { s.store(at, y) } else { s.store_first(at, y, n) }
            }
        }
    }
}

/// Numbers in rows of whole vectors, and the rows to which their activations go.
pub(crate) struct Rows<T> {
    pub activation: Activation,
    pub from: *const f32,
    /// Elements from one row of numbers to the next.
    pub width: usize,
    pub to: *mut T,
    /// Elements from one row of the destination to the next.
    pub stride: isize,
    pub rows: usize,
    /// Elements of a row that are written.
    pub cols: usize,
}

/// Writes the activations of numbers in memory to their place by a function call.
///
/// # Safety
/// Whole vectors are readable at the rows of numbers, and `cols` elements are writable at those of the destination.
#[inline(always)]
pub(crate) unsafe fn activate_rows<S: Simd, T: SimdElement>(s: S, rows: Rows<T>) {
    s.outlined(rows);
}

impl<T: SimdElement> Kernel for Rows<T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        macro_rules! by {
            ($x:ident => $y:expr) => {
                for row in 0..self.rows {
                    let from = self.from.wrapping_add(row * self.width);
                    let to = self.to.wrapping_offset(row as isize * self.stride);
                    for at in (0..self.cols).step_by(S::LANES) {
                        let len = S::LANES.min(self.cols - at);
                        // SAFETY: promised by the caller of `activate_rows`.
                        unsafe {
                            let $x = s.load(from.add(at));
                            let y = $y;
                            match len == S::LANES {
                                true => T::store(s, to.add(at), y),
                                false => T::store_first(s, to.add(at), y, len),
                            }
                        }
                    }
                }
            };
        }
        match self.activation {
            // Nothing is asked for each vector.
            Activation::Silu => by!(x => silu(s, x)),
            Activation::Hardswish => by!(x => activated(s, Activation::Hardswish, x)),
            Activation::LeakyRelu(slope) => {
                by!(x => activated(s, Activation::LeakyRelu(slope), x));
            }
            activation => by!(x => activated(s, activation, x)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Isa, MAX_LANES, dispatch};

    struct Written<'a> {
        activation: Activation,
        from: &'a [f32],
        width: usize,
        to: &'a mut [f32],
        stride: usize,
        size: [usize; 2],
    }

    impl Kernel for Written<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let Written { activation, from, width, to, stride, size: [rows, cols] } = self;
            assert!(from.len() >= rows * width && width >= cols.next_multiple_of(S::LANES));
            assert!(to.len() >= rows * stride && stride >= cols);
            let (from, to, stride) = (from.as_ptr(), to.as_mut_ptr(), stride as isize);
            // SAFETY: the rows are in the slices.
            unsafe {
                activate_rows(s, Rows { activation, from, width, to, stride, rows, cols });
            }
        }
    }

    /// Rows are written where they belong, and nothing beside them; numbers far below zero do not change how their
    /// neighbours come out.
    #[test]
    fn rows_are_activated_on_their_way() {
        const WIDTH: usize = 4 * MAX_LANES;
        let values = [0.0, -0.5, 3.0, -86.9, -87.1, -91.0, -110.0, 88.0, f32::INFINITY];
        for isa in Isa::available() {
            for &activation in Activation::ALL {
                for (rows, cols) in [(0, 5), (1, 1), (3, MAX_LANES), (2, 2 * MAX_LANES + 3)] {
                    let from: Vec<_> = (0..rows * WIDTH).map(|i| values[i * 7 % 9]).collect();
                    let stride = cols + 2;
                    let mut y = vec![-7.0; rows * stride];
                    let (to, size) = (&mut y[..], [rows, cols]);
                    dispatch(
                        isa,
                        Written { activation, from: &from, width: WIDTH, to, stride, size },
                    );
                    for (i, &got) in y.iter().enumerate() {
                        let (row, col) = (i / stride, i % stride);
                        let want = match col < cols {
                            true => activation.apply_f64(f64::from(from[row * WIDTH + col])),
                            false => -7.0,
                        };
                        let close = 4.0 * f64::from(f32::EPSILON) * want.abs();
                        let subnormal = 4.0 * f64::from(f32::from_bits(1));
                        let ok = f64::from(got) == want
                            || (f64::from(got) - want).abs() <= close + subnormal;
                        assert!(ok, "{} {}: {got:e}, not {want:e}", isa.name(), activation.name());
                    }
                }
            }
        }
    }
}
