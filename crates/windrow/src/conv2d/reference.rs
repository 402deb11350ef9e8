//! The f64 oracle: plain loops over the definition.

use super::Problem;
use super::problem::Frames;
use crate::lists::{collected, filled, room_for};
use crate::verification::Expected;
use crate::{Activation, Result};

/// `y` [n, k, ot, oh, ow] of `x` [n, c, t, h, w], `w` [k, c/groups, kt, r, s], `bias` `[k]` and a residual like y, all
/// row-major. Of images the numbers of frames t, kt and ot are 1.
pub(crate) fn forward(
    p: &Problem,
    x: &[f64],
    w: &[f64],
    [bias, residual]: [Option<&[f64]>; 2],
    activation: Activation,
) -> Result<Expected> {
    let mut y = Expected::zeros(p.video_shape().iter().product())?;
    for_each_term(p, |ix, iw, iy| y.add(iy, x[ix] * w[iw]));
    if let Some(bias) = bias {
        let pixels = p.frames.ot * p.oh * p.ow;
        for i in 0..y.values.len() {
            y.add(i, bias[i / pixels % p.k]);
        }
    }
    for (i, &added) in residual.into_iter().flatten().enumerate() {
        y.add(i, added);
    }
    for v in &mut y.values {
        *v = activation.apply_f64(*v);
    }
    Ok(y)
}

/// The scale of the error of Winograd's algorithm. The algorithm mixes all pixels that an output tile of m x m pixels
/// reads. So the scale of each of its elements is the sum over channels of the largest of these pixels times the sum of
/// all taps. It is infinite if the tile reads a NaN or an infinity.
pub(crate) fn winograd_scale(p: &Problem, m: usize, x: &[f64], w: &[f64]) -> Result<Vec<f64>> {
    let mut scale = filled(0.0, p.video_shape().iter().product())?;
    let sum = |taps: &[f64]| taps.iter().map(|t| t.abs()).sum();
    let taps: Vec<f64> = collected(w.chunks(p.r * p.s).map(sum))?;
    for_each_tile(p, m, x, |[n, ot], [i, j], largest| {
        for (k, taps) in taps.chunks((p.c * p.frames.kt).max(1)).enumerate() {
            let sum: f64 = taps.iter().zip(largest).map(|(taps, largest)| taps * largest).sum();
            for oh in i..(i + m).min(p.oh) {
                let row = (((n * p.k + k) * p.frames.ot + ot) * p.oh + oh) * p.ow;
                scale[row + j..row + (j + m).min(p.ow)].fill(sum);
            }
        }
    })?;
    Ok(scale)
}

/// The same for the weight gradient in Winograd's domain: for each filter and channel the sum over
/// tiles of the largest input that a tile reads times the sum of its dy, repeated for all taps.
pub(crate) fn winograd_weight_scale(
    p: &Problem,
    m: usize,
    x: &[f64],
    dy: &[f64],
) -> Result<Vec<f64>> {
    let mut scale = filled(0.0, p.k * p.taps())?;
    for_each_tile(p, m, x, |[n, _], [i, j], largest| {
        for k in 0..p.k {
            let mut sum = 0.0;
            for oh in i..(i + m).min(p.oh) {
                for ow in j..(j + m).min(p.ow) {
                    sum += dy[((n * p.k + k) * p.oh + oh) * p.ow + ow].abs();
                }
            }
            for (c, input) in largest.iter().enumerate() {
                let at = (k * p.c + c) * p.r * p.s;
                scale[at..at + p.r * p.s].iter_mut().for_each(|s| *s += sum * input);
            }
        }
    })?;
    Ok(scale)
}

/// Calls `f` with the image and frame and with the first pixel of every output tile of m x m pixels, and with the
/// largest absolute value that the tile reads of each channel through each frame of the filter [c, kt], infinite if one
/// is NaN.
fn for_each_tile(
    p: &Problem,
    m: usize,
    x: &[f64],
    mut f: impl FnMut([usize; 2], [usize; 2], &[f64]),
) -> Result<()> {
    let reads = |first: usize, taps: usize, size: usize, d: usize| {
        let end = (first + m + taps - 1).saturating_sub(p.padding[d]).min(size);
        first.saturating_sub(p.padding[d])..end
    };
    let Frames { t, kt, ot, .. } = p.frames;
    let mut largest = filled(0.0, p.c * kt)?;
    for (n, frame) in (0..p.n).flat_map(|n| (0..ot).map(move |frame| (n, frame))) {
        for i in (0..p.oh).step_by(m) {
            for j in (0..p.ow).step_by(m) {
                for (at, largest) in largest.iter_mut().enumerate() {
                    // Below the normal numbers roundings do not shrink any more.
                    *largest = f64::from(f32::MIN_POSITIVE);
                    let Some(it) = frame_of(p, frame, at % kt) else { continue };
                    for ih in reads(i, p.r, p.h, 0) {
                        for iw in reads(j, p.s, p.w, 1) {
                            let row = ((n * p.c + at / kt) * t + it) * p.h + ih;
                            let x = x[row * p.w + iw].abs();
                            *largest = largest.max(if x.is_nan() { f64::INFINITY } else { x });
                        }
                    }
                }
                f([n, frame], [i, j], &largest);
            }
        }
    }
    Ok(())
}

/// The im2col matrix [group, term, pixel] of `x`, with terms ordered [r, s, c/groups] and pixels
/// [n, oh, ow]; zeros in the padding.
pub(crate) fn im2col(p: &Problem, x: &[f64]) -> Result<Vec<f64>> {
    let mut matrix = room_for(p.groups * p.taps() * p.n * p.oh * p.ow)?;
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
    Ok(matrix)
}

/// `dx` [n, c, h, w] of `w` and `dy` [n, k, oh, ow].
pub(crate) fn backward_data(p: &Problem, w: &[f64], dy: &[f64]) -> Result<Expected> {
    let mut dx = Expected::zeros(p.n * p.c * p.h * p.w)?;
    for_each_term(p, |ix, iw, iy| dx.add(ix, w[iw] * dy[iy]));
    Ok(dx)
}

/// `dw` [k, c/groups, r, s] of `x` and `dy`.
pub(crate) fn backward_weight(p: &Problem, x: &[f64], dy: &[f64]) -> Result<Expected> {
    let mut dw = Expected::zeros(p.k * p.taps())?;
    for_each_term(p, |ix, iw, iy| dw.add(iw, x[ix] * dy[iy]));
    Ok(dw)
}

/// `db` `[k]` of `dy`.
pub(crate) fn backward_bias(p: &Problem, dy: &[f64]) -> Result<Expected> {
    let mut db = Expected::zeros(p.k)?;
    for (i, &v) in dy.iter().enumerate() {
        db.add(i / (p.oh * p.ow) % p.k, v);
    }
    Ok(db)
}

/// Calls `f` with the row-major indices in x, w and y of every product that the convolution sums.
fn for_each_term(p: &Problem, mut f: impl FnMut(usize, usize, usize)) {
    let (c_group, k_group) = (p.c_group(), p.k_group());
    let Frames { t, kt, ot, .. } = p.frames;
    for n in 0..p.n {
        for k in 0..p.k {
            for (c, [tap, r, s]) in taps(p) {
                let channel = k / k_group * c_group + c;
                let iw = (((k * c_group + c) * kt + tap) * p.r + r) * p.s + s;
                // Output columns whose tap lies in the image.
                let columns = columns(p, s);
                for (frame, oh) in (0..ot).flat_map(|i| (0..p.oh).map(move |oh| (i, oh))) {
                    let Some(it) = frame_of(p, frame, tap) else { continue };
                    let Some(ih) = position(oh, r, p.h, p, 0) else { continue };
                    let y_row = (((n * p.k + k) * ot + frame) * p.oh + oh) * p.ow;
                    let x_row = (((n * p.c + channel) * t + it) * p.h + ih) * p.w;
                    for ow in columns.clone() {
                        let column = ow * p.stride[1] + s * p.dilation[1] - p.padding[1];
                        f(x_row + column, iw, y_row + ow);
                    }
                }
            }
        }
    }
}

/// Channels of a group; frames, rows and columns of the filter.
fn taps(p: &Problem) -> impl Iterator<Item = (usize, [usize; 3])> {
    let (kt, r, s) = (p.frames.kt, p.r, p.s);
    (0..p.c_group()).flat_map(move |c| {
        (0..kt * r * s).map(move |tap| (c, [tap / (r * s), tap / s % r, tap % s]))
    })
}

/// The output columns of which tap column `s` lies in the image.
fn columns(p: &Problem, s: usize) -> std::ops::Range<usize> {
    let tap = s * p.dilation[1];
    let first = p.padding[1].saturating_sub(tap).div_ceil(p.stride[1]);
    let end = (p.w + p.padding[1]).saturating_sub(tap).div_ceil(p.stride[1]);
    first.min(p.ow)..end.min(p.ow).max(first.min(p.ow))
}

/// The frame of the input that frame `tap` of the filter reads for a frame of the output; `None` where none exists.
fn frame_of(p: &Problem, frame: usize, tap: usize) -> Option<usize> {
    let Frames { t, stride, padding, dilation, .. } = p.frames;
    (frame * stride + tap * dilation).checked_sub(padding).filter(|&i| i < t)
}

/// The position in the input of tap `tap` of output position `o`; `None` in the padding.
fn position(o: usize, tap: usize, size: usize, p: &Problem, d: usize) -> Option<usize> {
    (o * p.stride[d] + tap * p.dilation[d]).checked_sub(p.padding[d]).filter(|&i| i < size)
}
