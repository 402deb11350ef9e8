//! The stages of the weight gradient in Winograd's domain, except the input transform: the transform of the output's
//! gradient, `D = A dY A^T`, its products with V summed over tiles, and the filter's gradient, `G^T M G`.

use super::super::shared::rows::copy_transposed;
use super::geometry::{Geometry, Segment};
use super::input::{COLUMNS, ROW, copy_pixels, gather, transpose_rows};
use super::transform;
use crate::conv2d::winograd::TAPS;
use crate::cpu::{Kernel, MAX_LANES, Simd, SimdElement};
use std::ops::Range;

/// Tiles that are summed in registers before they are added to M, as the channels of the forward direction.
pub(super) const BLOCK: usize = 128;

/// Vectors of input channels of a micro-kernel call.
const PANEL: usize = 2;

/// Vectors from one pair of channels of M to the next: from pair to pair an odd number of cache lines.
pub(super) const fn pitch(alpha: usize) -> usize {
    (alpha * alpha) | 1
}

/// The transform of the output's gradient for a block of tiles, `A` = alpha. Pixels beyond the image are zeros.
pub(super) struct GradientTransform<'a, Y, const A: usize> {
    pub geometry: &'a Geometry,
    /// The output's gradient, from the first image on.
    pub dy: *const Y,
    /// Strides of dy [n, k, oh, ow]
    pub strides: [isize; 4],
    /// Output channels, from a multiple of LANES on.
    pub channels: Range<usize>,
    /// The block.
    pub tiles: Range<usize>,
    /// [`super::input::STAGING`] elements.
    pub staging: *mut f32,
    /// D [position, k / LANES, tile, LANES] from the first tile and channel on.
    pub d: *mut f32,
    /// Distances between positions and between channel vectors of D.
    pub d_strides: [usize; 2],
}

impl<Y: SimdElement, const A: usize> Kernel for GradientTransform<'_, Y, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut tile = self.tiles.start;
        while tile < self.tiles.end {
            let segment = self.geometry.segment(tile, self.tiles.end, COLUMNS);
            for (vector, channel) in self.channels.clone().step_by(S::LANES).enumerate() {
                let offset = vector * self.d_strides[1] + (tile - self.tiles.start) * S::LANES;
                // SAFETY: the segment is inside of the problem, whose elements dy reaches; staging holds a strip; D
                // holds the block's tiles.
                unsafe {
                    self.stage(s, &segment, channel);
                    self.transform_columns(s, segment.count * (A - 2));
                    self.transform_rows(s, segment.count, self.d.add(offset));
                }
            }
            tile += segment.count;
        }
    }
}

impl<Y: SimdElement, const A: usize> GradientTransform<'_, Y, A> {
    /// Copies the pixels of the segment's strip, of the channels from `channel` on.
    ///
    /// # Safety
    /// dy must reach the problem's elements, `staging` hold a strip.
    #[inline(always)]
    unsafe fn stage<S: Simd>(&self, s: S, segment: &Segment, channel: usize) {
        let p = &self.geometry.problem;
        let (top, left) = (segment.row * (A - 2), segment.column * (A - 2));
        let columns = segment.count * (A - 2);
        let inside = columns.min(p.ow - left);
        let channels = S::LANES.min(self.channels.end - channel);
        let [stride_n, stride_k, stride_h, stride_w] = self.strides;
        for row in 0..A - 2 {
            // SAFETY: rows and columns of the strip; those inside of the image are in dy.
            unsafe {
                let out = self.staging.add(row * ROW * S::LANES);
                if top + row >= p.oh {
                    std::ptr::write_bytes(out, 0, columns * S::LANES);
                    continue;
                }
                let dy = self.dy.offset(
                    segment.n as isize * stride_n
                        + channel as isize * stride_k
                        + (top + row) as isize * stride_h
                        + left as isize * stride_w,
                );
                if stride_k == 1 {
                    copy_pixels(s, dy, stride_w, channels, inside, out);
                } else if stride_w == 1 && !S::IS_SMALL {
                    transpose_rows(s, dy, stride_k, channels, inside, out);
                } else {
                    gather(dy, [stride_k, stride_w], channels, inside, out, S::LANES);
                }
                std::ptr::write_bytes(out.add(inside * S::LANES), 0, (columns - inside) * S::LANES);
            }
        }
    }

    /// `A` over the rows of each staged column, in place.
    ///
    /// # Safety
    /// `staging` must hold `columns` columns.
    #[inline(always)]
    unsafe fn transform_columns<S: Simd>(&self, s: S, columns: usize) {
        for column in 0..columns {
            // SAFETY: A rows of ROW columns, of which `columns` are in use.
            unsafe {
                let at = self.staging.add(column * S::LANES);
                let mut y = [s.zero(); A];
                for (i, y) in y[..A - 2].iter_mut().enumerate() {
                    *y = s.load(at.add(i * ROW * S::LANES));
                }
                for (i, x) in transform::output_gradient(s, y).iter().enumerate() {
                    s.store(at.add(i * ROW * S::LANES), *x);
                }
            }
        }
    }

    /// `A` over the columns of each tile, into D.
    ///
    /// # Safety
    /// `staging` must hold `tiles` tiles, and `d` must reach `tiles` tiles from where it points.
    #[inline(always)]
    unsafe fn transform_rows<S: Simd>(&self, s: S, tiles: usize, d: *mut f32) {
        for row in 0..A {
            for tile in 0..tiles {
                // SAFETY: the tile's A - 2 columns are staged; D has A * A positions.
                unsafe {
                    let at = self.staging.add((row * ROW + tile * (A - 2)) * S::LANES);
                    let mut y = [s.zero(); A];
                    for (j, y) in y[..A - 2].iter_mut().enumerate() {
                        *y = s.load(at.add(j * S::LANES));
                    }
                    let d = d.add(row * A * self.d_strides[0] + tile * S::LANES);
                    for (j, x) in transform::output_gradient(s, y).iter().enumerate() {
                        s.store(d.add(j * self.d_strides[0]), *x);
                    }
                }
            }
        }
    }
}

/// `M = sum over tiles of D V`, or added to M, for a block of output and of input channels. Vectors run over input
/// channels.
pub(super) struct Products<const A: usize> {
    pub positions: Range<usize>,
    pub tiles: usize,
    /// Vectors of output and of input channels.
    pub vectors: [usize; 2],
    /// D [position, k / LANES, tile, LANES] of the block.
    pub d: *const f32,
    /// Distances between positions and between channel vectors of D.
    pub d_strides: [usize; 2],
    /// V [position, c / LANES, tile, LANES] of the block.
    pub v: *const f32,
    /// Distances between positions and between channel vectors of V.
    pub v_strides: [usize; 2],
    /// M [k, c / LANES, [`pitch`], LANES]
    pub m: *mut f32,
    pub accumulate: bool,
}

impl<const A: usize> Kernel for Products<A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let at_once = S::REGISTERS / 4;
        for position in self.positions.clone() {
            for first in (0..self.tiles).step_by(BLOCK) {
                let tiles = first..self.tiles.min(first + BLOCK);
                for c in (0..self.vectors[1]).step_by(PANEL) {
                    for k in (0..self.vectors[0] * S::LANES).step_by(at_once) {
                        // SAFETY: a position, tiles and channels of the block.
                        unsafe {
                            match (at_once, self.vectors[1] - c) {
                                (8, 1) => self.sums::<S, 8, 1>(s, position, tiles.clone(), [k, c]),
                                (8, _) => {
                                    self.sums::<S, 8, PANEL>(s, position, tiles.clone(), [k, c])
                                }
                                (4, 1) => self.sums::<S, 4, 1>(s, position, tiles.clone(), [k, c]),
                                (4, _) => {
                                    self.sums::<S, 4, PANEL>(s, position, tiles.clone(), [k, c])
                                }
                                (2, 1) => self.sums::<S, 2, 1>(s, position, tiles.clone(), [k, c]),
                                (2, _) => {
                                    self.sums::<S, 2, PANEL>(s, position, tiles.clone(), [k, c])
                                }
                                _ => unreachable!("{} registers", S::REGISTERS),
                            }
                        }
                    }
                }
            }
        }
    }
}

impl<const A: usize> Products<A> {
    /// Multiplies K output channels from `k` on with N vectors of input channels from vector `c` on.
    ///
    /// # Safety
    /// They must be inside of the block, and so must the tiles; K divides LANES and `k`.
    #[inline(always)]
    unsafe fn sums<S: Simd, const K: usize, const N: usize>(
        &self,
        s: S,
        position: usize,
        tiles: Range<usize>,
        [k, c]: [usize; 2],
    ) {
        // SAFETY: by the caller's promise.
        unsafe {
            let d = self.d.add(
                position * self.d_strides[0] + k / S::LANES * self.d_strides[1] + k % S::LANES,
            );
            let v = self.v.add(position * self.v_strides[0] + c * self.v_strides[1]);
            let mut sums = [[s.zero(); N]; K];
            for t in tiles.clone() {
                let mut row = [s.zero(); N];
                for (n, row) in row.iter_mut().enumerate() {
                    *row = s.load(v.add(n * self.v_strides[1] + t * S::LANES));
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let x = s.splat(*d.add(t * S::LANES + i));
                    for (n, sum) in sums.iter_mut().enumerate() {
                        *sum = s.mul_add(row[n], x, *sum);
                    }
                }
            }
            let accumulate = self.accumulate || tiles.start > 0;
            for (i, sums) in sums.iter().enumerate() {
                for (n, sum) in sums.iter().enumerate() {
                    let pair = (k + i) * self.vectors[1] + c + n;
                    let m = self.m.add((pair * pitch(A) + position) * S::LANES);
                    s.store(m, if accumulate { s.add(s.load(m), *sum) } else { *sum });
                }
            }
        }
    }
}

/// `dW = G^T M G` for a block of output and of input channels.
pub(super) struct FilterGradient<W, const A: usize> {
    /// M [k, c / LANES, [`pitch`], LANES]
    pub m: *const f32,
    /// Vectors of input channels of M.
    pub vectors: usize,
    /// Output and input channels that exist.
    pub channels: [Range<usize>; 2],
    pub dw: *mut W,
    /// Strides of dw [k, c, 3, 3]
    pub strides: [isize; 4],
}

impl<W: SimdElement, const A: usize> Kernel for FilterGradient<W, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let [output, input] = self.channels.clone();
        for (i, k) in output.enumerate() {
            for (j, c) in input.clone().step_by(S::LANES).enumerate() {
                let count = S::LANES.min(input.end - c);
                let at = (i * self.vectors + j) * pitch(A) * S::LANES;
                let [stride_k, stride_c, ..] = self.strides;
                // SAFETY: a pair of channels of M, `count` channels of dw.
                unsafe {
                    let taps = transformed::<S, A>(s, self.m.add(at));
                    let dw = self.dw.offset(k as isize * stride_k + c as isize * stride_c);
                    self.store(s, &taps, dw, count);
                }
            }
        }
    }
}

/// `G^T M G` of a vector of channels.
///
/// # Safety
/// Its A * A positions are readable.
#[inline(always)]
unsafe fn transformed<S: Simd, const A: usize>(s: S, m: *const f32) -> [[S::F32; TAPS]; TAPS] {
    let mut rows = [[s.zero(); A]; TAPS];
    for j in 0..A {
        let mut column = [s.zero(); A];
        for (i, x) in column.iter_mut().enumerate() {
            // SAFETY: passed on.
            *x = unsafe { s.load(m.add((i * A + j) * S::LANES)) };
        }
        let taps = transform::filter_gradient(s, column);
        for (i, row) in rows.iter_mut().enumerate() {
            row[j] = taps[i];
        }
    }
    let mut taps = [[s.zero(); TAPS]; TAPS];
    for (i, taps) in taps.iter_mut().enumerate() {
        *taps = transform::filter_gradient(s, rows[i]);
    }
    taps
}

impl<W: SimdElement, const A: usize> FilterGradient<W, A> {
    /// Writes the taps of `count` input channels to `dw`, the first of them.
    ///
    /// # Safety
    /// It reaches their elements.
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, s: S, taps: &[[S::F32; TAPS]; TAPS], dw: *mut W, count: usize) {
        const ALL: usize = TAPS * TAPS;
        let [_, stride_c, stride_r, stride_s] = self.strides;
        let place =
            |r: usize, t: usize| dw.wrapping_offset(r as isize * stride_r + t as isize * stride_s);
        // SAFETY: passed on; the arrays hold all taps of a vector of channels.
        unsafe {
            if stride_c == 1 {
                for (r, row) in taps.iter().enumerate() {
                    for (t, v) in row.iter().enumerate() {
                        match count == S::LANES {
                            true => W::store(s, place(r, t), *v),
                            false => W::store_first(s, place(r, t), *v, count),
                        }
                    }
                }
                return;
            }
            let mut staged = [0f32; ALL * MAX_LANES];
            for (i, v) in taps.iter().flatten().enumerate() {
                s.store(staged.as_mut_ptr().add(i * S::LANES), *v);
            }
            let mut line = [0f32; ALL * MAX_LANES];
            copy_transposed(
                s,
                (staged.as_ptr(), S::LANES as isize),
                count,
                ALL,
                line.as_mut_ptr(),
                ALL,
            );
            if [stride_c, stride_r, stride_s] == [ALL as isize, TAPS as isize, 1] {
                for i in (0..count * ALL).step_by(S::LANES) {
                    let (v, left) = (s.load(line.as_ptr().add(i)), count * ALL - i);
                    match left >= S::LANES {
                        true => W::store(s, dw.add(i), v),
                        false => W::store_first(s, dw.add(i), v, left),
                    }
                }
                return;
            }
            for (c, taps) in line.chunks_exact(ALL).enumerate().take(count) {
                for (i, &x) in taps.iter().enumerate() {
                    let at = place(i / TAPS, i % TAPS).offset(c as isize * stride_c);
                    at.write(W::from_f32(x));
                }
            }
        }
    }
}
