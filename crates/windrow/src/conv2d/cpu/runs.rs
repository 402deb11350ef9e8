//! Few channels, which lie next to each other: what the taps of a filter row read for a pixel is one run of the source.
//! The rows that a block of destination pixels reads are copied, with their padding, as they lie; pixels are rows of the
//! register tile, at the distance that they have in the copy, and vectors run over output channels.

use super::direct::{Operands, Packing, TapSums, TapUnit};
use super::method::Task;
use super::shared::epilogue::{Bounds, Epilogue, Sums};
use super::shared::rows::{copy_ahead, zero_ahead};
use super::shared::stencil::{Stencil, Tap};
use super::{amx, bf16_pairs};
use crate::Result;
use crate::conv2d::Conv2dAlgorithm;
use crate::cpu::gemm::{even_part, tile_shape};
use crate::cpu::{Isa, Kernel, MAX_LANES, Simd, SimdElement, array, dispatch};

/// Vectors of channels that are summed at once, and most pixels.
const VECTORS: usize = 2;
const MOST_PIXELS: usize = 14;
/// Elements that the copied rows of a block may take, for a quarter of a second-level cache.
const COPY_LEN: usize = 16 << 10;
/// Elements of a row of the copy at most, and of what a block of one row reads.
const ROW_LEN: usize = 16 << 10;
const MOST_LEN: usize = 1 << 20;
/// Blocks for each thread.
const BLOCKS_PER_THREAD: usize = 8;

#[derive(Clone, Debug)]
pub(super) struct Runs {
    /// Channels of a panel of the packed filter: two vectors.
    width: usize,
    /// Destination rows and columns of a block.
    block: [usize; 2],
    /// The first source row that a block reads, relative to its first row's own, and how many a block of one row reads.
    top: isize,
    span: usize,
    /// Elements of a filter row's run, from one pixel's run to the next, and of a row of the copy.
    run: usize,
    next: usize,
    pitch: usize,
}

/// True if a filter row reads one run of the source and output channels lie next to each other.
fn reads_runs(stencil: &Stencil, isa: Isa) -> bool {
    let Stencil { groups, c, src, dst, cols, .. } = stencil;
    let follow = |taps: &[Tap]| taps[0].offset + 1 == taps[1].offset;
    let is_run = src[1] == 1 && src[3] == *c as isize && cols.windows(2).all(follow);
    !isa.is_small() && *groups == 1 && is_run && dst[1] == 1
}

/// True if runs are worth it among direct sums: output channels fill vectors and taps share what is read.
pub(super) fn pays(task: &Task<'_>) -> bool {
    let (p, isa) = (task.problem, task.isa);
    let fills = p.k >= MAX_LANES && p.ow * p.oh > 1 && p.r * p.s > 1;
    fills && reads_runs(&task.stencil, isa) && !amx::computes(task) && !bf16_pairs::computes(task)
}

impl Runs {
    /// `None` where output channels fill no vector, or rows are too long.
    fn cut(stencil: &Stencil, isa: Isa, threads: usize) -> Option<Self> {
        let Stencil { n, c, k, dst_size, step, .. } = *stencil;
        let (rows, cols) = (&stencil.rows, &stencil.cols);
        let width = tile_shape(isa).1;
        let fills = k >= width / VECTORS && !dst_size.contains(&0) && !cols.is_empty();
        if !fills || !reads_runs(stencil, isa) {
            return None;
        }
        let top = rows.iter().map(|tap| tap.offset).min()?;
        let bottom = rows.iter().map(|tap| tap.offset).max()?;
        let span = bottom.abs_diff(top) + 1;
        let run = c.checked_mul(cols.len())?;
        let next = step[1].checked_mul(c)?;
        let reads = |columns: usize| (columns - 1).checked_mul(next)?.checked_add(run);
        let mut columns = dst_size[1];
        let is_long = |columns: usize| reads(columns).is_none_or(|len| len > ROW_LEN);
        let leaves_threads = |columns: usize| {
            let units = n * dst_size[0] * dst_size[1].div_ceil(columns);
            units < 2 * threads && columns >= 2 * MOST_PIXELS
        };
        while columns > 1 && (is_long(columns) || leaves_threads(columns)) {
            columns = columns.div_ceil(2);
        }
        let pitch = reads(columns).filter(|&len| len <= ROW_LEN)?.next_multiple_of(MAX_LANES);
        let copied =
            |block: usize| (block - 1).checked_mul(step[0])?.checked_add(span)?.checked_mul(pitch);
        copied(1).filter(|&len| len <= MOST_LEN)?;
        let fits = |&block: &usize| block == 1 || copied(block).is_some_and(|len| len <= COPY_LEN);
        // Rows that taps share are copied once for a block; threads that wait for the last block lose more.
        let most = (n * dst_size[0]).div_ceil(BLOCKS_PER_THREAD * threads).clamp(1, dst_size[0]);
        let block = (1..=most).take_while(fits).last().unwrap_or(1);
        let block = [even_part(dst_size[0], block), columns];
        Some(Runs { width, block, top, span, run, next, pitch })
    }

    fn blocks(&self, stencil: &Stencil) -> [usize; 2] {
        std::array::from_fn(|d| stencil.dst_size[d].div_ceil(self.block[d]))
    }
}

impl TapSums for Runs {
    const ALGORITHM: Conv2dAlgorithm = Conv2dAlgorithm::DirectRuns;

    fn new(stencil: &Stencil, task: &Task<'_>) -> Result<Option<Self>> {
        Ok(Self::cut(stencil, task.isa, task.threads))
    }

    fn explain(&self) -> String {
        let [rows, columns] = self.block;
        let run = self.run;
        format!("lanes over channels, runs of {run} terms, blocks of {rows} x {columns} pixels")
    }

    fn packing(&self, _: &Stencil) -> Packing {
        Packing::Products(self.width)
    }

    /// Blocks of all images.
    fn units(&self, stencil: &Stencil) -> usize {
        let [rows, columns] = self.blocks(stencil);
        stencil.n * rows * columns
    }

    /// The copy, which is written in whole vectors.
    fn scratch_len(&self, stencil: &Stencil) -> usize {
        ((self.block[0] - 1) * stencil.step[0] + self.span) * self.pitch + MAX_LANES
    }

    unsafe fn run<T: SimdElement>(&self, unit: TapUnit<'_, T>, scratch: *mut f32) {
        let TapUnit { isa, stencil, unit, operands } = unit;
        let [row_blocks, col_blocks] = self.blocks(stencil);
        let (block, n) = (unit % (row_blocks * col_blocks), unit / (row_blocks * col_blocks));
        let at = [block / col_blocks * self.block[0], block % col_blocks * self.block[1]];
        let size = std::array::from_fn(|d| self.block[d].min(stencil.dst_size[d] - at[d]));
        dispatch(isa, Block { runs: self, stencil, operands, n, at, size, scratch });
    }
}

struct Block<'a, T> {
    runs: &'a Runs,
    stencil: &'a Stencil,
    operands: &'a Operands<'a, T>,
    /// The image, the block's first pixel, and its rows and columns.
    n: usize,
    at: [usize; 2],
    size: [usize; 2],
    scratch: *mut f32,
}

impl<T: SimdElement> Kernel for Block<'_, T> {
    type Output = ();
    const IS_SPECIAL: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: a block of the stencil, whose pixels nobody else writes.
        unsafe {
            self.copy(s);
            match S::REGISTERS {
                32 => self.pixels::<S, MOST_PIXELS>(s),
                _ => self.pixels::<S, 6>(s),
            }
        }
    }
}

impl<T: SimdElement> Block<'_, T> {
    /// The source rows of the block, padded.
    #[inline(always)]
    unsafe fn copy<S: Simd>(&self, s: S) {
        let Block { runs, stencil, operands, n, at, size, scratch } = *self;
        let Stencil { c, step, src, src_size, .. } = *stencil;
        let image = operands.src.wrapping_offset(n as isize * src[0]);
        let first = (at[1] * step[1]) as isize + stencil.cols[0].offset;
        let pixels = (size[1] - 1) * step[1] + stencil.cols.len();
        let below = |bound: isize| (bound - first).clamp(0, pixels as isize) as usize;
        let (start, end) = (below(0), below(src_size[1] as isize));
        for row in 0..(size[0] - 1) * step[0] + runs.span {
            let i = (at[0] * step[0] + row) as isize + runs.top;
            let exists = i >= 0 && i < src_size[0] as isize && start < end;
            let (start, end) = if exists { (start, end) } else { (pixels, pixels) };
            let to = scratch.wrapping_add(row * runs.pitch);
            // SAFETY: rows are written in order, and there is a vector behind the last; what is read is in the source.
            unsafe {
                zero_ahead(s, to, start * c);
                if exists {
                    let offset = i * src[2] + (first + start as isize) * src[3];
                    let from = image.wrapping_offset(offset);
                    copy_ahead(s, from, 1, to.add(start * c), (end - start) * c);
                }
                zero_ahead(s, to.add(end * c), (pixels - end) * c);
            }
        }
    }

    /// Computes all pixels, P at a time if a row has at least P; the last ones may be computed twice. The pixel
    /// distances of networks' first layers are compiled as constants.
    #[inline(always)]
    unsafe fn pixels<S: Simd, const P: usize>(&self, s: S) {
        // SAFETY: passed on.
        unsafe {
            match (self.size[1], self.runs.next) {
                (..4, _) => self.panels::<S, 1, 0>(s),
                (columns, _) if columns < P => self.panels::<S, 4, 0>(s),
                (_, 3) => self.panels::<S, P, 3>(s),
                (_, 6) => self.panels::<S, P, 6>(s),
                _ => self.panels::<S, P, 0>(s),
            }
        }
    }

    /// Computes every panel of output channels.
    #[inline(always)]
    unsafe fn panels<S: Simd, const P: usize, const NEXT: usize>(&self, s: S) {
        let Block { runs, stencil, operands, n, at, .. } = *self;
        let [n_stride, _, row, col] = stencil.dst;
        let dst = operands.dst.wrapping_offset(
            stencil.dst_offset
                + n as isize * n_stride
                + at[0] as isize * row
                + at[1] as isize * col,
        );
        let panel_len = runs.width * stencil.terms();
        for (panel, k) in (0..stencil.k).step_by(runs.width).enumerate() {
            let channels = runs.width.min(stencil.k - k);
            let filter = operands.packed.as_ptr().wrapping_add(panel * panel_len);
            let epilogue = operands.epilogue.for_channels(k);
            let to = dst.wrapping_add(k);
            let panel = Panel { filter, channels, epilogue, to, row, col };
            // SAFETY: channels and pixels of the block.
            unsafe { self.sums::<S, P, NEXT>(s, &panel) };
        }
    }

    /// Computes all sums of a panel.
    #[inline(always)]
    unsafe fn sums<S: Simd, const P: usize, const NEXT: usize>(&self, s: S, panel: &Panel<T>) {
        let Block { runs, stencil, size, scratch, .. } = *self;
        for i in 0..size[0] {
            let row = panel.to.wrapping_offset(i as isize * panel.row);
            for j in (0..size[1]).step_by(P) {
                let j = j.min(size[1] - P);
                let from = i * stencil.step[0] * runs.pitch + j * runs.next;
                let to = row.wrapping_offset(j as isize * panel.col);
                // SAFETY: pixels and channels of the block, whose runs are in the copy.
                unsafe { panel.sum::<S, P, NEXT>(s, self, scratch.wrapping_add(from), to) };
            }
        }
    }
}

/// The channels of a panel, and where their sums go.
struct Panel<T> {
    /// [filter row, filter column, source channel, channel of the panel]
    filter: *const f32,
    channels: usize,
    /// Its bias is that of the panel's first channel.
    epilogue: Epilogue,
    /// The block's first pixel, and the distances of rows and pixels.
    to: *mut T,
    row: isize,
    col: isize,
}

impl<T: SimdElement> Panel<T> {
    /// P pixels.
    ///
    /// # Safety
    /// Their runs are readable from `from` on, and their channels writable from `to` on.
    #[inline(always)]
    unsafe fn sum<S: Simd, const P: usize, const NEXT: usize>(
        &self,
        s: S,
        block: &Block<'_, T>,
        from: *const f32,
        to: *mut T,
    ) {
        let Block { stencil, runs, .. } = *block;
        let next = if NEXT > 0 { NEXT } else { runs.next };
        let mut acc = [[s.zero(); VECTORS]; P];
        let mut filter = self.filter;
        // SAFETY: promised by the caller; the panel has two vectors for each term.
        unsafe {
            for &row in stencil.rows.iter() {
                let mut x = from.add((row.offset - runs.top) as usize * runs.pitch);
                for _ in 0..runs.run {
                    let w: [S::F32; VECTORS] = array(|v| s.load(filter.add(v * S::LANES)));
                    for (p, sums) in acc.iter_mut().enumerate() {
                        let x = s.splat(*x.add(p * next));
                        for (v, sum) in sums.iter_mut().enumerate() {
                            *sum = s.mul_add(x, w[v], *sum);
                        }
                    }
                    x = x.add(1);
                    filter = filter.add(VECTORS * S::LANES);
                }
            }
            match self.epilogue.bounds() {
                Some(bounds) if self.channels == VECTORS * S::LANES => {
                    self.put(s, acc, to, bounds);
                }
                _ => {
                    let mut sums = Sums::<{ MOST_PIXELS * VECTORS * MAX_LANES }>::new();
                    let sums = sums.as_mut_ptr();
                    for (p, row) in acc.into_iter().enumerate() {
                        for (v, sum) in row.into_iter().enumerate() {
                            s.store(sums.add((p * VECTORS + v) * S::LANES), sum);
                        }
                    }
                    self.finish(s, sums, P, to);
                }
            }
        }
    }

    /// Brings sums of whole vectors from the registers to their place.
    #[inline(always)]
    unsafe fn put<S: Simd, const P: usize>(
        &self,
        s: S,
        acc: [[S::F32; VECTORS]; P],
        to: *mut T,
        bounds: Bounds,
    ) {
        let residual = self.epilogue.residual;
        // SAFETY: passed on.
        unsafe {
            let add: [S::F32; VECTORS] = array(|v| self.epilogue.biases(s, v * S::LANES, S::LANES));
            for (p, row) in acc.into_iter().enumerate() {
                let to = to.wrapping_offset((p as isize).wrapping_mul(self.col));
                for (v, sum) in row.into_iter().enumerate() {
                    let to = to.add(v * S::LANES);
                    let y = residual.add(s, s.add(sum, add[v]), to, S::LANES);
                    T::store(s, to, bounds.of(s, y));
                }
            }
        }
    }

    /// The same of sums in memory, for any channels and activation.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, s: S, sums: *mut f32, pixels: usize, to: *mut T) {
        let row = VECTORS * S::LANES;
        // SAFETY: passed on.
        unsafe {
            for at in (0..self.channels).step_by(S::LANES) {
                let bias = self.epilogue.biases(s, at, S::LANES.min(self.channels - at));
                for p in 0..pixels {
                    let sum = sums.add(p * row + at);
                    s.store(sum, s.add(s.load(sum), bias));
                }
            }
            if self.epilogue.bounds().is_none() {
                let size = [pixels, self.channels];
                return self.epilogue.activate_rows(s, (sums, row), (to, self.col), size);
            }
            for at in (0..self.channels).step_by(S::LANES) {
                let len = S::LANES.min(self.channels - at);
                for p in 0..pixels {
                    let to = to.wrapping_offset((p as isize).wrapping_mul(self.col)).add(at);
                    self.epilogue.store(s, s.load(sums.add(p * row + at)), to, len);
                }
            }
        }
    }
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use super::*;
    use crate::cpu::compiled::assert_in_registers;

    #[test]
    #[cfg_attr(debug_assertions, ignore = "of a release build")]
    fn sums_stay_in_registers() {
        assert_in_registers::<Block<'static, f32>>([0, 0]);
    }
}
