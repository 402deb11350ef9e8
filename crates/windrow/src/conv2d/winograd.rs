//! Winograd's transform matrices, generated exactly: the Cook-Toom construction in rational numbers.
//!
//! `F(m, 3)` computes `m` outputs of a correlation with 3 taps from `alpha = m + 2` inputs by
//! `alpha` multiplications: `y = A^T [(G g) * (B^T d)]`. In two dimensions each matrix is applied
//! to columns and rows. The matrices follow from `alpha - 1` distinct points, at which polynomials
//! are evaluated, and the point at infinity. The points decide the rounding error; see
//! `docs/notes/conv2d-cpu.md` for how these were found.
//!
//! Sources: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015; Barabasz et
//! al., "Error Analysis and Improving the Accuracy of Winograd Convolution", 2018.

use super::Tile;

/// The largest `alpha`.
pub(crate) const MAX_ALPHA: usize = 8;
/// Filter taps in each direction.
pub(crate) const TAPS: usize = 3;

/// A fraction in lowest terms with a positive denominator. Overflow of its 128-bit parts panics:
/// at compile time, since all matrices are constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rational {
    num: i128,
    den: i128,
}

impl Rational {
    const ZERO: Self = Rational { num: 0, den: 1 };
    const ONE: Self = Rational { num: 1, den: 1 };

    pub(crate) const fn new(num: i128, den: i128) -> Self {
        assert!(den != 0);
        let (mut a, mut b) = (num.abs(), den.abs());
        while b != 0 {
            (a, b) = (b, a % b);
        }
        let sign = if den < 0 { -1 } else { 1 };
        Rational { num: sign * num / a, den: den.abs() / a }
    }

    const fn neg(self) -> Self {
        Rational { num: -self.num, den: self.den }
    }

    const fn add(self, other: Self) -> Self {
        Self::new(self.num * other.den + other.num * self.den, self.den * other.den)
    }

    const fn mul(self, other: Self) -> Self {
        Self::new(self.num * other.num, self.den * other.den)
    }

    const fn recip(self) -> Self {
        Self::new(self.den, self.num)
    }

    /// The nearest f64 (both parts are far below 2^53).
    pub(crate) const fn to_f64(self) -> f64 {
        self.num as f64 / self.den as f64
    }
}

/// The matrices of `F(m, 3)`; entries beyond `m`, `alpha` and [`TAPS`] are zero.
///
/// Rows of `B^T` and `G` and columns of `A^T` belong to the points 0, +p, -p for each `p` of
/// [`Transforms::roots`], and infinity, in this order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transforms {
    /// Side of the output tile.
    pub m: usize,
    /// Side of the transformed tile.
    pub alpha: usize,
    /// `A^T` [m, alpha]
    pub at: [[Rational; MAX_ALPHA]; MAX_ALPHA],
    /// `G` [alpha, 3]
    pub g: [[Rational; TAPS]; MAX_ALPHA],
    /// `B^T` [alpha, alpha]
    pub bt: [[Rational; MAX_ALPHA]; MAX_ALPHA],
}

impl Transforms {
    /// The transforms from the positive points, all distinct. The other points are their negatives, 0 and infinity. In
    /// pairs, a transform shares the work of even and odd powers.
    const fn from_roots(roots: &[Rational]) -> Self {
        let mut points = [Rational::ZERO; MAX_ALPHA];
        let mut i = 0;
        while i < roots.len() {
            points[1 + 2 * i] = roots[i];
            points[2 + 2 * i] = roots[i].neg();
            i += 1;
        }
        Self::from_points(points.split_at(2 * roots.len() + 1).0)
    }

    /// The transforms from the finite points, all distinct, in the order of the rows; infinity comes last.
    pub(crate) const fn from_points(finite_points: &[Rational]) -> Self {
        let finite = finite_points.len();
        let (m, alpha) = (finite - 1, finite + 1);
        let mut points = [Rational::ZERO; MAX_ALPHA];
        points.split_at_mut(finite).0.copy_from_slice(finite_points);
        let zeros = [Rational::ZERO; MAX_ALPHA];
        let mut t = Transforms {
            m,
            alpha,
            at: [zeros; MAX_ALPHA],
            g: [[Rational::ZERO; TAPS]; MAX_ALPHA],
            bt: [zeros; MAX_ALPHA],
        };
        let mut j = 0;
        while j < finite {
            // Row j of B^T: the coefficients of prod_{l != j} (x - p_l). Its value at p_j scales G.
            let (row, value) = product_without(&points, finite, j);
            t.bt[j] = row;
            let mut power = Rational::ONE;
            let mut i = 0;
            while i < m || i < TAPS {
                if i < m {
                    t.at[i][j] = power;
                }
                if i < TAPS {
                    t.g[j][i] = power.mul(value.recip());
                }
                power = power.mul(points[j]);
                i += 1;
            }
            j += 1;
        }
        t.bt[finite] = product_without(&points, finite, finite).0;
        t.at[m - 1][finite] = Rational::ONE;
        t.g[finite][TAPS - 1] = Rational::ONE;
        t
    }
}

/// Coefficients of `prod_{l < finite, l != skip} (x - points[l])`, lowest power first, and
/// `prod (points[skip] - points[l])`.
const fn product_without(
    points: &[Rational; MAX_ALPHA],
    finite: usize,
    skip: usize,
) -> ([Rational; MAX_ALPHA], Rational) {
    let mut poly = [Rational::ZERO; MAX_ALPHA];
    poly[0] = Rational::ONE;
    let mut value = Rational::ONE;
    let mut l = 0;
    while l < finite {
        if l != skip {
            let minus_p = points[l].neg();
            let mut d = MAX_ALPHA - 1;
            while d > 0 {
                poly[d] = poly[d - 1].add(poly[d].mul(minus_p));
                d -= 1;
            }
            poly[0] = poly[0].mul(minus_p);
            value = value.mul(points[skip].add(minus_p));
        }
        l += 1;
    }
    (poly, value)
}

impl Tile {
    /// The transform matrices of this tile.
    pub(crate) const fn transforms(self) -> Transforms {
        const ONE: Rational = Rational::ONE;
        match self {
            Tile::F2 => Transforms::from_roots(&[ONE]),
            Tile::F4 => Transforms::from_roots(&[Rational::new(2, 3), Rational::new(3, 2)]),
            Tile::F6 => Transforms::from_roots(&[ONE, Rational::new(1, 2), Rational::new(2, 1)]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dot(row: &[Rational], column: &[Rational]) -> Rational {
        row.iter().zip(column).fold(Rational::ZERO, |sum, (a, b)| sum.add(a.mul(*b)))
    }

    /// Both sides are bilinear in filter and data, so equality on unit vectors is equality.
    #[test]
    fn transforms_compute_the_correlation_exactly() {
        for tile in Tile::ALL {
            let t = tile.transforms();
            assert_eq!((t.m, t.alpha), (tile.m(), tile.alpha()));
            for tap in 0..TAPS {
                for position in 0..t.alpha {
                    let product: Vec<_> =
                        (0..t.alpha).map(|j| t.g[j][tap].mul(t.bt[j][position])).collect();
                    for i in 0..t.m {
                        let expected =
                            if i + tap == position { Rational::ONE } else { Rational::ZERO };
                        assert_eq!(dot(&t.at[i], &product), expected, "{tile:?} {tap} {position}");
                    }
                }
            }
        }
    }

    #[test]
    fn fractions_are_in_lowest_terms() {
        assert_eq!(Rational::new(6, -4), Rational { num: -3, den: 2 });
        assert_eq!(Rational::new(0, -4), Rational::ZERO);
        assert_eq!(Rational::new(1, 3).add(Rational::new(1, 6)), Rational::new(1, 2));
        assert_eq!(Rational::new(-2, 3).recip().to_f64(), -1.5);
    }
}
