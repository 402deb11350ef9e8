//! A numbering of pixels as matrix rows in which each tap of a filter is a constant offset.

use crate::conv2d::Problem;
use crate::conv2d::gpu::shared::weight_product::STEP_ROWS;

/// Rows and octets are counted in 32 bits.
const MAX_ROWS: usize = 1 << 30;

/// The largest number of channels with which the taps of a row of the filter are channels too.
const FOLDED_CHANNELS: usize = 4;

/// The order of pixels as matrix rows: row after row of an image, image after image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lines {
    /// True if the taps of a filter's row are channels.
    pub(super) folded: bool,
    /// Columns and rows of an image.
    pub(super) pitch: usize,
    pub(super) height: usize,
    /// Planes that taps read, in each direction.
    pub(super) planes: [usize; 2],
    /// Taps at this distance read the same plane.
    pub(super) period: [usize; 2],
    /// Rows of dy and of a plane of x.
    pub(super) dy: usize,
    pub(super) x: usize,
}

impl Lines {
    /// The order of pixels for a convolution; `None` if there are too many rows.
    pub(super) fn new(p: &Problem) -> Option<Self> {
        let folded = p.c <= FOLDED_CHANNELS && p.s > 1;
        let (taps, size, out) = ([p.r, p.s], [p.h, p.w], [p.oh, p.ow]);
        let mut extent = [0; 2];
        let (mut planes, mut period, mut reach) = ([0; 2], [0; 2], [0; 2]);
        for d in 0..2 {
            if d == 1 && folded {
                (period[d], planes[d], extent[d]) = (1, 1, out[d]);
                continue;
            }
            let (stride, padding) = (p.stride[d], p.padding[d]);
            period[d] = stride / gcd(stride, p.dilation[d]);
            planes[d] = period[d].min(taps[d]);
            reach[d] = (taps[d] - 1).checked_mul(p.dilation[d])? / stride;
            // The zeros after the last line of an image may be the first zeros of the next.
            let filled = size[d].checked_add(padding)?.div_ceil(stride);
            let read = out[d].checked_add(reach[d])?;
            extent[d] = out[d].max(filled.min(read)).max(read.saturating_sub(padding / stride));
        }
        let [height, pitch] = extent;
        let whole = |rows: usize| rows.checked_next_multiple_of(STEP_ROWS);
        let dy = whole(p.n.checked_mul(height)?.checked_mul(pitch)?)?;
        let x = whole(dy.checked_add(reach[0].checked_mul(pitch)?)?.checked_add(reach[1])?)?;
        (x < MAX_ROWS).then_some(Lines { folded, pitch, height, planes, period, dy, x })
    }

    /// Taps, and channels of each.
    pub(super) fn terms(&self, p: &Problem) -> [usize; 2] {
        if self.folded { [p.r, p.s * p.c] } else { [p.r * p.s, p.c] }
    }

    pub(super) fn all_planes(&self) -> usize {
        self.planes[0] * self.planes[1]
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every tap of every output finds its pixel, or zeros, at a constant distance.
    #[test]
    fn taps_are_at_constant_distances() {
        for (h, taps, stride, padding, dilation) in [
            (9usize, 3, 1, 1, 1),
            (7, 3, 2, 1, 1),
            (8, 1, 2, 0, 1),
            (11, 7, 2, 3, 1),
            (10, 3, 2, 2, 2),
            (12, 4, 3, 1, 2),
            (5, 3, 1, 4, 1),
            (9, 2, 4, 0, 1),
            (13, 5, 4, 2, 6),
        ] {
            let span = (taps - 1) * dilation + 1;
            let Some(oh) = (h + 2 * padding).checked_sub(span).map(|rest| rest / stride + 1) else {
                continue;
            };
            let p = Problem {
                n: 2,
                c: 8,
                h,
                w: h,
                r: taps,
                s: taps,
                oh,
                ow: oh,
                stride: [stride; 2],
                padding: [padding; 2],
                dilation: [dilation; 2],
                ..crate::conv2d::gpu::test_specs()[0].problem().unwrap()
            };
            let lines = Lines::new(&p).unwrap();
            // The image, row and column of a row of a plane, in one dimension of both.
            let at = |row: usize, plane: [usize; 2]| {
                let (column, line) = (row % lines.pitch, row / lines.pitch);
                let offset = |d: usize| plane[d] * dilation % stride;
                let y = (line % lines.height * stride + offset(0)).checked_sub(padding);
                let x = (column * stride + offset(1)).checked_sub(padding);
                let inside = |v: Option<usize>| v.filter(|&v| v < h);
                let image = line / lines.height;
                inside(y).zip(inside(x)).filter(|_| image < p.n).map(|(y, x)| (image, y, x))
            };
            for (n, i, j) in
                (0..p.n).flat_map(|n| (0..oh).flat_map(move |i| (0..oh).map(move |j| (n, i, j))))
            {
                for (r, s) in (0..taps).flat_map(|r| (0..taps).map(move |s| (r, s))) {
                    let row = (n * lines.height + i) * lines.pitch + j;
                    let shift = r * dilation / stride * lines.pitch + s * dilation / stride;
                    let plane = [r % lines.period[0], s % lines.period[1]];
                    assert!(plane[0] < lines.planes[0] && plane[1] < lines.planes[1]);
                    assert!(row < lines.dy && row + shift < lines.x);
                    let pixel = |v: usize, tap: usize| {
                        (v * stride + tap * dilation).checked_sub(padding).filter(|&v| v < h)
                    };
                    let want = pixel(i, r).zip(pixel(j, s)).map(|(y, x)| (n, y, x));
                    assert_eq!(at(row + shift, plane), want, "{p:?} {lines:?}");
                }
            }
        }
    }
}
