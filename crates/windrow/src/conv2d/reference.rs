//! The f64 oracle: plain loops over the definition.

use super::Problem;
use crate::Activation;
/// Values and, beside each, the sum of the absolute terms that formed it before the activation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Expected {
    pub values: Vec<f64>,
    pub scale: Vec<f64>,
}

impl Expected {
    pub(super) fn zeros(len: usize) -> Self {
        Expected { values: vec![0.0; len], scale: vec![0.0; len] }
    }

    pub(super) fn add(&mut self, i: usize, term: f64) {
        self.values[i] += term;
        self.scale[i] += term.abs();
    }
}

/// `y` [n, k, oh, ow] of `x` [n, c, h, w], `w` [k, c/groups, r, s] and `bias` `[k]`, all row-major.
pub(crate) fn forward(
    p: &Problem,
    x: &[f64],
    w: &[f64],
    bias: Option<&[f64]>,
    activation: Activation,
) -> Expected {
    let mut y = Expected::zeros(p.y_shape().iter().product());
    for_each_term(p, |ix, iw, iy| y.add(iy, x[ix] * w[iw]));
    if let Some(bias) = bias {
        let pixels = p.oh * p.ow;
        for i in 0..y.values.len() {
            y.add(i, bias[i / pixels % p.k]);
        }
    }
    for v in &mut y.values {
        *v = activation.apply_f64(*v);
    }
    y
}

/// What the error of Winograd's algorithm is relative to: an output tile of m x m pixels is mixed
/// from all pixels that the tile reads, so each of its elements gets the sum over channels of the
/// largest of those times all taps.
pub(crate) fn winograd_scale(p: &Problem, m: usize, x: &[f64], w: &[f64]) -> Vec<f64> {
    let mut scale = vec![0.0; p.y_shape().iter().product()];
    let taps: Vec<f64> = w.chunks(p.r * p.s).map(|t| t.iter().map(|t| t.abs()).sum()).collect();
    for (i, scale) in scale.iter_mut().enumerate() {
        let (ow, oh) = (i % p.ow, i / p.ow % p.oh);
        let (k, n) = (i / (p.ow * p.oh) % p.k, i / (p.ow * p.oh * p.k));
        let reads = |o: usize, taps: usize, size: usize, d: usize| {
            let first = o / m * m;
            let end = (first + m + taps - 1).saturating_sub(p.padding[d]).min(size);
            first.saturating_sub(p.padding[d])..end
        };
        for c in 0..p.c {
            // Below the normal numbers roundings do not shrink any more.
            let mut largest = f64::from(f32::MIN_POSITIVE);
            for ih in reads(oh, p.r, p.h, 0) {
                for iw in reads(ow, p.s, p.w, 1) {
                    let x = x[((n * p.c + c) * p.h + ih) * p.w + iw].abs();
                    largest = largest.max(if x.is_nan() { f64::INFINITY } else { x });
                }
            }
            *scale += largest * taps[k * p.c + c];
        }
    }
    scale
}

/// The same for the weight gradient in Winograd's domain: for each filter and channel the sum over
/// tiles of the largest input that a tile reads times the sum of its dy, repeated for all taps.
pub(crate) fn winograd_weight_scale(p: &Problem, m: usize, x: &[f64], dy: &[f64]) -> Vec<f64> {
    let largest = |n: usize, c: usize, i: usize, j: usize| {
        let reads = |first: usize, taps: usize, size: usize, d: usize| {
            let end = (first + m + taps - 1).saturating_sub(p.padding[d]).min(size);
            first.saturating_sub(p.padding[d])..end
        };
        let mut largest = 0.0f64;
        for ih in reads(i, p.r, p.h, 0) {
            for iw in reads(j, p.s, p.w, 1) {
                largest = largest.max(x[((n * p.c + c) * p.h + ih) * p.w + iw].abs());
            }
        }
        largest
    };
    let mut scale = vec![0.0; p.k * p.taps()];
    for (n, i, j) in (0..p.n).flat_map(|n| {
        let columns = move |i| (0..p.ow).step_by(m).map(move |j| (n, i, j));
        (0..p.oh).step_by(m).flat_map(columns)
    }) {
        let inputs: Vec<f64> = (0..p.c).map(|c| largest(n, c, i, j)).collect();
        for k in 0..p.k {
            let mut sum = 0.0;
            for oh in i..(i + m).min(p.oh) {
                for ow in j..(j + m).min(p.ow) {
                    sum += dy[((n * p.k + k) * p.oh + oh) * p.ow + ow].abs();
                }
            }
            for (c, input) in inputs.iter().enumerate() {
                let at = (k * p.c + c) * p.r * p.s;
                scale[at..at + p.r * p.s].iter_mut().for_each(|s| *s += sum * input);
            }
        }
    }
    scale
}

/// The im2col matrix [group, term, pixel] of `x`, with terms ordered [r, s, c/groups] and pixels
/// [n, oh, ow]; zeros in the padding.
pub(crate) fn im2col(p: &Problem, x: &[f64]) -> Vec<f64> {
    let mut matrix = Vec::new();
    for group in 0..p.groups {
        for (r, s, c) in (0..p.r)
            .flat_map(|r| (0..p.s).flat_map(move |s| (0..p.c_group()).map(move |c| (r, s, c))))
        {
            let channel = group * p.c_group() + c;
            for n in 0..p.n {
                for (oh, ow) in (0..p.oh).flat_map(|oh| (0..p.ow).map(move |ow| (oh, ow))) {
                    let at = position(oh, r, p.h, p, 0).zip(position(ow, s, p.w, p, 1));
                    matrix.push(
                        at.map_or(0.0, |(ih, iw)| x[((n * p.c + channel) * p.h + ih) * p.w + iw]),
                    );
                }
            }
        }
    }
    matrix
}

/// `dx` [n, c, h, w] of `w` and `dy` [n, k, oh, ow].
pub(crate) fn backward_data(p: &Problem, w: &[f64], dy: &[f64]) -> Expected {
    let mut dx = Expected::zeros(p.n * p.c * p.h * p.w);
    for_each_term(p, |ix, iw, iy| dx.add(ix, w[iw] * dy[iy]));
    dx
}

/// `dw` [k, c/groups, r, s] of `x` and `dy`.
pub(crate) fn backward_weight(p: &Problem, x: &[f64], dy: &[f64]) -> Expected {
    let mut dw = Expected::zeros(p.k * p.taps());
    for_each_term(p, |ix, iw, iy| dw.add(iw, x[ix] * dy[iy]));
    dw
}

/// `db` `[k]` of `dy`.
pub(crate) fn backward_bias(p: &Problem, dy: &[f64]) -> Expected {
    let mut db = Expected::zeros(p.k);
    for (i, &v) in dy.iter().enumerate() {
        db.add(i / (p.oh * p.ow) % p.k, v);
    }
    db
}

/// Calls `f` with the row-major indices in x, w and y of every product that the convolution sums.
fn for_each_term(p: &Problem, mut f: impl FnMut(usize, usize, usize)) {
    let (c_group, k_group) = (p.c_group(), p.k_group());
    for n in 0..p.n {
        for k in 0..p.k {
            for oh in 0..p.oh {
                for ow in 0..p.ow {
                    let iy = ((n * p.k + k) * p.oh + oh) * p.ow + ow;
                    for c in 0..c_group {
                        let channel = k / k_group * c_group + c;
                        for r in 0..p.r {
                            let Some(ih) = position(oh, r, p.h, p, 0) else { continue };
                            for s in 0..p.s {
                                let Some(iw) = position(ow, s, p.w, p, 1) else { continue };
                                let ix = ((n * p.c + channel) * p.h + ih) * p.w + iw;
                                f(ix, ((k * c_group + c) * p.r + r) * p.s + s, iy);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Where tap `tap` of output position `o` lies in the input; `None` in the padding.
fn position(o: usize, tap: usize, size: usize, p: &Problem, d: usize) -> Option<usize> {
    (o * p.stride[d] + tap * p.dilation[d]).checked_sub(p.padding[d]).filter(|&i| i < size)
}
