//! Matrices of Winograd's transforms as constants of kernels.

use crate::conv2d::winograd::Rational;

pub(crate) fn float(x: Rational) -> String {
    format!("{:?}f", x.to_f64() as f32)
}

pub(crate) fn row(values: &[Rational], columns: usize) -> String {
    let values: Vec<_> = values[..columns].iter().map(|&x| float(x)).collect();
    format!("{{{}}}", values.join(","))
}

/// The first rows and columns of a transform, as an array of C.
pub(crate) fn matrix<const N: usize>(
    rows: &[[Rational; N]],
    count: usize,
    columns: usize,
) -> String {
    let rows: Vec<_> = rows[..count].iter().map(|r| row(r, columns)).collect();
    format!("{{{}}}", rows.join(","))
}
