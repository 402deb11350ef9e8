//! Products of a filter and one pixel, which are a matrix and a vector: the sums of [`im2col`](super::im2col) without
//! panels.
//!
//! Such a layer reads each element of the filter once. So memory bounds it, and the filter is read where it lies: a packed
//! one would be as large.

use super::method::{Found, Method, Prepared, Run, Task};
use super::shared::epilogue::{Epilogue, Sums};
use super::shared::stencil::Stencil;
use super::shared::{Vectors, bias_len, tolerance};
use super::staged::Staged;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration};
use crate::cpu::{Isa, Kernel, MAX_LANES, SendPtr, Simd, array, dispatch, parallel_for};
use crate::{DType, TensorRef};
use std::ops::Range;

/// Channels that are summed at once, with two vectors of terms each: the rows of the filter are read side by side.
const CHANNELS: usize = 4;
/// Bytes of the filter from which another task is worth its start, and the tasks of each thread at most.
const TASK: usize = 32 << 10;
const TASKS_PER_THREAD: usize = 4;
/// Terms of each of the channels that are asked for before they are read. Rows are often too short for the machine to
/// notice that they follow each other.
const AHEAD: usize = 512;

/// The method: a matrix product with one pixel.
pub(super) struct OnePixelMethod;

impl Method for OnePixelMethod {
    fn algorithms(&self) -> &'static [Conv2dAlgorithm] {
        &[Conv2dAlgorithm::Im2colGemm]
    }

    fn prepare(&self, task: &Task<'_>, _: &Conv2dConfiguration) -> Found {
        let Stencil { groups, c, k, src, dst, filter, .. } = task.stencil;
        let lies_dense = |stride: isize, count: usize| stride == 1 || count == 1;
        let is_f32 = task.spec.x.dtype == DType::F32;
        // Several images are summed in another order.
        let is_ours = is_f32 && !task.batch_invariant && task.stencil.frames.is_none();
        let is_one = groups == 1 && task.stencil.pixels() == 1 && task.stencil.is_one_tap();
        let is_dense = lies_dense(src[1], c) && lies_dense(filter[1], c) && lies_dense(dst[1], k);
        Ok((is_ours && is_one && is_dense).then(|| {
            let (stencil, isa, threads) = (task.stencil.clone(), task.isa, task.threads);
            Box::new(OnePixel { stencil, isa, threads }) as _
        }))
    }
}

/// A [`Stencil`] with one tap and one pixel.
#[derive(Debug)]
struct OnePixel {
    stencil: Stencil,
    isa: Isa,
    threads: usize,
}

impl OnePixel {
    fn tasks(&self) -> usize {
        let Stencil { c, k, .. } = self.stencil;
        let bytes = c.saturating_mul(k).saturating_mul(size_of::<f32>());
        let most = (bytes / TASK).min(TASKS_PER_THREAD * self.threads).max(1);
        if self.threads == 1 { 1 } else { most }
    }

    /// The channels of a task: whole vectors.
    fn channels(&self) -> usize {
        self.stencil.k.div_ceil(self.tasks()).next_multiple_of(MAX_LANES)
    }

    /// Rows of the filter are `row` elements apart.
    fn sum(&self, filter: *const f32, row: isize, run: Run<'_, '_>) {
        let Staged { src, dst, epilogue, .. } = Staged::new(run);
        let (filter, x) = (SendPtr(filter.cast_mut()), SendPtr(src.cast::<f32>().cast_mut()));
        let y = SendPtr(dst.cast::<f32>().wrapping_offset(self.stencil.dst_offset));
        let (terms, all, part) = (self.stencil.c, self.stencil.k, self.channels());
        parallel_for(self.threads, all.div_ceil(part), |task| {
            let channels = task * part..((task + 1) * part).min(all);
            let (filter, x, y) = (filter.get().cast_const(), x.get().cast_const(), y.get());
            dispatch(self.isa, Channels { filter, row, x, terms, channels, epilogue, y });
        });
    }
}

impl Prepared for OnePixel {
    fn configuration(&self) -> Conv2dConfiguration {
        Conv2dConfiguration::new(Conv2dAlgorithm::Im2colGemm)
    }

    fn explain(&self) -> String {
        let channels = self.channels();
        format!("lanes over terms of one pixel, the filter in place, {channels} channels a task")
    }

    fn packed_len(&self) -> usize {
        self.stencil.k * self.stencil.c
    }

    /// As a product's panels of one channel.
    fn packed_width(&self) -> usize {
        1
    }

    fn workspace_bytes(&self) -> usize {
        bias_len(self.stencil.k) * size_of::<f32>()
    }

    fn raw_bytes(&self) -> usize {
        self.workspace_bytes()
    }

    fn reads_filter(&self) -> bool {
        true
    }

    fn tolerance(&self) -> f64 {
        let (lanes, _) = dispatch(self.isa, Vectors);
        // Those of a lane, of its two vectors, and of the lanes.
        tolerance(self.stencil.c / (2 * lanes) + 3 + lanes)
    }

    fn pack(&self, w: &TensorRef<'_>, packed: &mut [f32]) {
        let Stencil { c, k, filter, .. } = self.stencil;
        for (i, to) in packed[..c * k].chunks_exact_mut(c.max(1)).enumerate() {
            // SAFETY: the stencil was made for this filter's layout, whose rows are `c` neighbours.
            unsafe {
                let from = w.as_ptr().cast::<f32>().offset(i as isize * filter[0]);
                std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), c);
            }
        }
    }

    fn run(&self, packed: &[f32], run: Run<'_, '_>) {
        self.sum(packed.as_ptr(), self.stencil.c as isize, run);
    }

    fn run_raw(&self, w: &TensorRef<'_>, run: Run<'_, '_>) {
        self.sum(w.as_ptr().cast(), self.stencil.filter[0], run);
    }
}

/// The kernel of some channels of the pixel, the first of which is a whole number of vectors from channel 0. Only
/// [`OnePixel::sum`] makes it, of a filter, an image and a result that are in memory.
struct Channels {
    filter: *const f32,
    row: isize,
    x: *const f32,
    terms: usize,
    channels: Range<usize>,
    epilogue: Epilogue,
    y: *mut f32,
}

impl Kernel for Channels {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Channels { ref channels, ref epilogue, y, .. } = self;
        for first in channels.clone().step_by(S::LANES) {
            let len = S::LANES.min(channels.end - first);
            let mut sums = Sums::<MAX_LANES>::new();
            let sums = sums.as_mut_ptr();
            for i in (0..len).step_by(CHANNELS) {
                // SAFETY: channels of the filter; `sums` has room for as many as a vector has lanes, and y for `len`.
                unsafe {
                    // Of fewer channels the last one is summed again.
                    let row = |r: usize| {
                        let channel = first + (i + r).min(len - 1);
                        self.filter.wrapping_offset(channel as isize * self.row)
                    };
                    let four = self.four(s, row, channels.end - first - i > CHANNELS);
                    for (r, sum) in four.into_iter().enumerate() {
                        sums.add(i + r).write(sum);
                    }
                }
            }
            // SAFETY: as above. The other lanes are not stored.
            unsafe {
                let bias = epilogue.biases(s, first, len);
                let sum = s.add(s.load_first(sums, len), bias);
                s.store(sums, sum);
                epilogue.activate_all(s, sums, S::LANES);
                epilogue.store(s, s.load(sums), y.add(first), len);
            }
        }
    }
}

impl Channels {
    /// The sums of four channels, whose filters begin at `row`. `goes_on`: more follow.
    ///
    /// # Safety
    /// They and the image have as many terms.
    #[inline(always)]
    unsafe fn four<S: Simd>(
        &self,
        s: S,
        row: impl Fn(usize) -> *const f32,
        goes_on: bool,
    ) -> [f32; CHANNELS] {
        let (x, terms, ahead) = (self.x, self.terms, AHEAD.min(self.terms));
        let next = if goes_on { CHANNELS as isize * self.row } else { 0 };
        let rows: [*const f32; CHANNELS] = array(row);
        let mut acc = [[s.zero(); 2]; CHANNELS];
        let pairs = terms / (2 * S::LANES) * (2 * S::LANES);
        // SAFETY: promised by the caller.
        unsafe {
            for at in (0..pairs).step_by(2 * S::LANES) {
                let x = [s.load(x.add(at)), s.load(x.add(at + S::LANES))];
                let ahead = match at + ahead < terms {
                    true => (at + ahead) as isize,
                    false => next + (at + ahead - terms) as isize,
                };
                for (r, acc) in acc.iter_mut().enumerate() {
                    for (v, sum) in acc.iter_mut().enumerate() {
                        let lane = (v * S::LANES) as isize;
                        s.prefetch_near(rows[r].wrapping_offset(ahead + lane));
                        *sum = s.mul_add(s.load(rows[r].add(at + v * S::LANES)), x[v], *sum);
                    }
                }
            }
            for at in (pairs..terms).step_by(S::LANES) {
                let len = S::LANES.min(terms - at);
                let x = s.load_first(x.add(at), len);
                for (r, acc) in acc.iter_mut().enumerate() {
                    acc[0] = s.mul_add(s.load_first(rows[r].add(at), len), x, acc[0]);
                }
            }
        }
        array(|r| s.reduce_add(s.add(acc[r][0], acc[r][1])))
    }
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use super::*;
    use crate::cpu::compiled::assert_in_registers;

    #[test]
    #[cfg_attr(debug_assertions, ignore = "of a release build")]
    fn sums_stay_in_registers() {
        assert_in_registers::<Channels>([0, 0]);
    }
}
