//! Convolution as a matrix product with the im2col matrix, of which only the panels that a task
//! works on are ever in memory.
//!
//! Terms of the sums are ordered [filter row, filter column, channel]. Where pixels of the output lie
//! next to each other, the filter is the left operand and vectors run over pixels; where channels
//! do, pixels are rows and vectors run over output channels.

use super::method::{Found, Method, Prepared, Run, Task};
use super::shared::epilogue::{Bounds, Epilogue, Lanes};
use super::shared::pack::{PackPanels, PackRows, pack_filter};
use super::shared::stencil::Stencil;
use super::shared::store::{Store, StoreTile};
use super::shared::{bias_len, tolerance};
use super::staged::Staged;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration};
use crate::cpu::gemm::{
    BlockedProduct, Blocking, Left, Place, Right, Scratch, left_stride, tile_shape,
};
use crate::cpu::{Isa, MANY_THREADS, SimdElement, dispatch};
use crate::dtype::with_element;
use crate::lists::filled;
use crate::{DType, Result, TensorRef};
use std::ops::Range;

/// The largest block of channels and of pixels: panels of both operands and the tiles between them stay in a
/// second-level cache of 1 MiB.
const BLOCK: [usize; 2] = [512, 128];

/// Elements at whose multiples addresses fall into the same set of a first-level cache.
const PAGE: usize = 1024;

/// The limit for smaller blocks that are compared: this number of parts of the channels, and of the pixels, more than
/// necessary, and no more than twice the threads.
const MORE_PARTS: usize = 32;

/// Cycles that parts of a task take: handing it out, an element of either operand until it is there, where many threads read
/// and where few do, and an element that is copied.
const TASK: f64 = 3000.0;
const READ: [f64; 2] = [1.4, 0.5];
const COPY: f64 = 0.4;
/// The share of the multiplications that vectors could do in a cycle.
const RATE: f64 = 0.75;
/// Tasks by which the last thread ends later than if all began and went on together.
const LATE: f64 = 0.25;

/// The method: a matrix product of any convolution.
pub(super) struct Im2colMethod;

impl Method for Im2colMethod {
    fn algorithms(&self) -> &'static [Conv2dAlgorithm] {
        &[Conv2dAlgorithm::Im2colGemm]
    }

    fn prepare(&self, task: &Task<'_>, _: &Conv2dConfiguration) -> Found {
        let product = Im2colGemm::new(task.stencil.clone(), task.isa, task.threads);
        Ok(Some(Box::new(product)))
    }
}

/// A [`Stencil`] as a product, for one instruction set.
#[derive(Clone, Debug)]
struct Im2colGemm {
    stencil: Stencil,
    lanes: Lanes,
    blocking: Blocking,
    threads: usize,
    /// True if the filter has one tap, whose channels are neighbours in the source.
    is_merged: bool,
}

impl Im2colGemm {
    fn new(stencil: Stencil, isa: Isa, threads: usize) -> Self {
        let stencil = stencil.merged();
        let (k, pixels, terms) = (stencil.k, stencil.pixels(), stencil.terms());
        let (_, nr) = tile_shape(isa);
        // Few channels would leave most of a vector idle.
        let lanes =
            if stencil.dst[1] == 1 && k >= nr / 2 { Lanes::Channels } else { Lanes::Pixels };
        let make = |block: [usize; 2]| match lanes {
            Lanes::Pixels => {
                let scratch = Scratch { left: false, right: true };
                Blocking::new(isa, [k, pixels, terms], block, scratch)
            }
            Lanes::Channels => {
                let scratch = Scratch { left: true, right: false };
                Blocking::new(isa, [pixels, k, terms], [block[1], block[0]], scratch)
            }
        };
        let is_merged = stencil.is_one_tap() && stencil.src[1] == 1;
        let blocking = ends_first(&stencil, lanes, is_merged, threads, make);
        Im2colGemm { stencil, lanes, blocking, threads, is_merged }
    }

    fn packed_group_len(&self) -> usize {
        self.stencil.k.next_multiple_of(self.packed_width()) * self.stencil.terms()
    }

    /// Elements of scratch memory.
    fn scratch_len(&self) -> usize {
        self.threads.min(self.blocking.tasks() * self.stencil.groups) * self.blocking.scratch_len()
    }

    /// The im2col matrix [group, term, pixel] as the product is given it, for checks.
    ///
    /// # Safety
    /// Source elements of the stencil are in memory.
    unsafe fn matrix<T: SimdElement>(&self, src: *const T) -> Result<Vec<f32>> {
        let (stencil, b) = (&self.stencil, &self.blocking);
        let (pixels, terms) = (stencil.pixels(), stencil.terms());
        let (dst, packed) = (std::ptr::null_mut(), std::ptr::null());
        let product = Product { plan: self, packed, src, dst, epilogue: Epilogue::NONE };
        let mut scratch = filled(0.0, b.scratch_len())?;
        let mut matrix = filled(0.0, stencil.groups * terms * pixels)?;
        let (step, panel_width) = match self.lanes {
            Lanes::Pixels => (b.nc, b.nr),
            Lanes::Channels => (b.mc, b.mr),
        };
        for group in 0..stencil.groups {
            for pixel in (0..pixels).step_by(step) {
                for term in (0..terms).step_by(b.kc) {
                    let to = scratch.as_mut_ptr();
                    let block = pixel..(pixel + step).min(pixels);
                    let run = term..(term + b.kc).min(terms);
                    // SAFETY: source elements are readable and the blocking's scratch memory is large enough for a
                    // block; panels hold every pixel and term that was asked for.
                    unsafe {
                        let (ptr, panel, row, step) = match self.lanes {
                            Lanes::Pixels => {
                                let r = product.right(group, block.clone(), run.clone(), to);
                                (r.ptr, r.panel, 1, b.nr)
                            }
                            Lanes::Channels => {
                                let l = product.left(group, block.clone(), run.clone(), to);
                                (l.ptr, l.panel, l.row, l.step)
                            }
                        };
                        for (i, pixel) in block.enumerate() {
                            for (p, term) in run.clone().enumerate() {
                                let at = i / panel_width * panel + i % panel_width * row + p * step;
                                matrix[(group * terms + term) * pixels + pixel] = *ptr.add(at);
                            }
                        }
                    }
                }
            }
        }
        Ok(matrix)
    }
}

impl Prepared for Im2colGemm {
    fn configuration(&self) -> Conv2dConfiguration {
        Conv2dConfiguration::new(Conv2dAlgorithm::Im2colGemm)
    }

    fn explain(&self) -> String {
        let b = &self.blocking;
        format!(
            "lanes over {:?}, tiles of {} x {}, blocks of {} x {} x {}, {} tasks",
            self.lanes,
            b.mr,
            b.nr,
            b.mc,
            b.nc,
            b.kc,
            b.tasks() * self.stencil.groups
        )
    }

    fn packed_len(&self) -> usize {
        self.packed_group_len() * self.stencil.groups
    }

    fn packed_width(&self) -> usize {
        match self.lanes {
            Lanes::Pixels => self.blocking.mr,
            Lanes::Channels => self.blocking.nr,
        }
    }

    fn workspace_bytes(&self) -> usize {
        let channels = self.stencil.groups * self.stencil.k;
        (bias_len(channels) + self.scratch_len()) * size_of::<f32>()
    }

    fn tolerance(&self) -> f64 {
        tolerance(self.blocking.additions())
    }

    /// Packs the filter in panels [group, panel, term, channel of the panel], with zeros beyond k.
    fn pack(&self, w: &TensorRef<'_>, packed: &mut [f32]) {
        assert!(packed.len() >= self.packed_len(), "packed filter: too little memory");
        let (isa, threads, width) = (self.blocking.isa, self.threads, self.packed_width());
        let to = packed.as_mut_ptr();
        // SAFETY: the stencil was made for this filter's layout.
        with_element!(w.dtype(), T => unsafe {
            pack_filter(&self.stencil, isa, threads, width, w.as_ptr().cast::<T>(), to);
        });
    }

    fn run(&self, packed: &[f32], run: Run<'_, '_>) {
        let mut staged = Staged::new(run);
        let scratch = staged.scratch(self.scratch_len());
        let Staged { dtype, src, dst, epilogue, .. } = staged;
        let (plan, packed) = (self, packed.as_ptr());
        // SAFETY: the stencil was made for these layouts; y is borrowed mutably; `Product` packs what the blocking gives
        // it scratch memory for.
        with_element!(dtype, T => unsafe {
            let product =
                Product::<T> { plan, packed, src: src.cast(), dst: dst.cast(), epilogue };
            self.blocking.run(&product, self.stencil.groups, self.threads, scratch);
        });
    }

    fn im2col(&self, x: &TensorRef<'_>) -> Result<Option<Vec<f32>>> {
        // SAFETY: the stencil was made for this layout.
        let matrix = with_element!(x.dtype(), T => unsafe { self.matrix(x.as_ptr().cast::<T>()) });
        matrix.map(Some)
    }
}

/// The blocking with which the last thread is expected to end first, among those that `make` gives for at most so many
/// channels and pixels. Each block of channels copies the pixels once more.
fn ends_first(
    stencil: &Stencil,
    lanes: Lanes,
    is_merged: bool,
    threads: usize,
    make: impl Fn([usize; 2]) -> Blocking,
) -> Blocking {
    let whole = make(BLOCK);
    if threads == 1 {
        return whole;
    }
    let read = if threads >= MANY_THREADS { READ[0] } else { READ[1] };
    // Pixels share what their taps read, except for the distance between pixels.
    let taps = stencil.rows.len() * stencil.cols.len();
    let reads = stencil.c * taps.min(stencil.step[0] * stencil.step[1]);
    let copies = if is_merged { 0.0 } else { COPY * stencil.terms() as f64 };
    let terms = stencil.terms() as f64;
    let by_operand = |[rows, cols]: [usize; 2]| match lanes {
        Lanes::Pixels => [rows, cols],
        Lanes::Channels => [cols, rows],
    };
    let time = |b: &Blocking| {
        let [channels, pixels] = by_operand([b.mc.min(b.rows), b.nc]).map(|size| size as f64);
        // Registers hold `nr` elements in two vectors, for each of which there is a product in a cycle.
        let products = channels * pixels * terms / (RATE * b.nr as f64);
        let task = products + read * channels * terms + pixels * (read * reads as f64 + copies);
        let rounds = (b.tasks() * stencil.groups).div_ceil(threads) as f64;
        (rounds + LATE) * (TASK + task)
    };
    let tile = by_operand([whole.mr, whole.nr]);
    let sizes = [stencil.k, stencil.pixels()];
    let parts = |operand: usize| {
        let tiles = sizes[operand].div_ceil(tile[operand]).max(1);
        let fewest = tiles.div_ceil((BLOCK[operand] / tile[operand]).max(1));
        (fewest..=tiles.min(fewest + MORE_PARTS.min(2 * threads)))
            .map(move |parts| tiles.div_ceil(parts) * tile[operand])
    };
    let mut best = (time(&whole), whole);
    for pixels in parts(1) {
        for channels in parts(0) {
            let blocking = make([channels, pixels]);
            let expected = time(&blocking);
            if expected < best.0 {
                best = (expected, blocking);
            }
        }
    }
    best.1
}

struct Product<'a, T> {
    plan: &'a Im2colGemm,
    packed: *const f32,
    src: *const T,
    dst: *mut T,
    epilogue: Epilogue,
}

// SAFETY: filter and source are only read; each destination element is written by one task.
unsafe impl<T> Sync for Product<'_, T> {}

impl<T: SimdElement> Product<'_, T> {
    fn src(&self, group: usize) -> *const T {
        self.src.wrapping_offset(self.plan.stencil.src_group(group))
    }

    /// The first term of the first pixel and the distance of pixels, if they can be multiplied where they are.
    fn in_place(
        &self,
        src: *const T,
        pixels: &Range<usize>,
        terms: &Range<usize>,
    ) -> Option<(*const f32, usize)> {
        let Stencil { n, dst_size, src: strides, step, .. } = self.plan.stencil;
        let row = strides[3].checked_mul(step[1] as isize)?;
        let is_plain = T::DTYPE == DType::F32 && self.plan.is_merged && n * dst_size[0] == 1;
        let at = pixels.start as isize * row + terms.start as isize;
        // Pixels at such a distance displace each other from the first-level cache.
        let is_far = (row as usize).is_multiple_of(PAGE);
        (is_plain && row > 0 && !is_far).then(|| (src.wrapping_offset(at).cast(), row as usize))
    }

    /// Start of the panel of packed filter channels that begins at `k`, at its first term, and the
    /// distance of panels.
    fn filter(&self, group: usize, k: usize, term: usize) -> (*const f32, usize) {
        let (plan, terms) = (self.plan, self.plan.stencil.terms());
        let at = group * plan.packed_group_len() + k * terms + term * plan.packed_width();
        (self.packed.wrapping_add(at), terms * plan.packed_width())
    }
}

impl<T: SimdElement> BlockedProduct for Product<'_, T> {
    unsafe fn left(
        &self,
        group: usize,
        rows: Range<usize>,
        terms: Range<usize>,
        scratch: *mut f32,
    ) -> Left {
        let Blocking { isa, mr, .. } = self.plan.blocking;
        match self.plan.lanes {
            Lanes::Pixels => {
                let (ptr, panel) = self.filter(group, rows.start, terms.start);
                Left { ptr, panel, row: 1, step: mr }
            }
            Lanes::Channels => {
                let row = left_stride(terms.len());
                let stencil = &self.plan.stencil;
                let src = self.src(group);
                if let Some((ptr, row)) = self.in_place(src, &rows, &terms) {
                    // Of one panel the distance to the next may overflow, and is not used.
                    return Left { ptr, panel: mr.wrapping_mul(row), row, step: 1 };
                }
                dispatch(isa, PackRows { stencil, src, pixels: rows, terms, to: scratch, row });
                Left { ptr: scratch, panel: mr * row, row, step: 1 }
            }
        }
    }

    unsafe fn right(
        &self,
        group: usize,
        cols: Range<usize>,
        terms: Range<usize>,
        scratch: *mut f32,
    ) -> Right {
        let Blocking { isa, nr, .. } = self.plan.blocking;
        match self.plan.lanes {
            Lanes::Pixels => {
                let panel = nr * terms.len();
                let stencil = &self.plan.stencil;
                let src = self.src(group);
                let (width, row, to) = (nr, nr, scratch);
                dispatch(isa, PackPanels { stencil, src, pixels: cols, terms, to, width, row });
                Right { ptr: scratch, panel }
            }
            Lanes::Channels => {
                let (ptr, panel) = self.filter(group, cols.start, terms.start);
                Right { ptr, panel }
            }
        }
    }

    fn place(&self, group: usize, rows: Range<usize>, cols: Range<usize>) -> Option<Place> {
        let stencil = &self.plan.stencil;
        let epilogue = self.epilogue.for_group(group, stencil.k);
        let Bounds { low, high } = epilogue.bounds().filter(|_| T::DTYPE == DType::F32)?;
        let [_, k_stride, _, col] = stencil.dst;
        let none = std::ptr::null();
        let bias = |k: usize| match epilogue.bias.is_null() {
            true => none,
            false => epilogue.bias.wrapping_add(k),
        };
        let (k, pixels, biases, row) = match self.plan.lanes {
            Lanes::Pixels if col == 1 => (rows.start, cols, [bias(rows.start), none], k_stride),
            Lanes::Channels => (cols.start, rows, [none, bias(cols.start)], col),
            Lanes::Pixels => return None,
        };
        let at = stencil.dst_run(pixels)? + stencil.dst_group(group) + k as isize * k_stride;
        let [row_bias, col_bias] = biases;
        let at = self.dst.wrapping_offset(at).cast::<f32>();
        let residual = epilogue.residual.at(at.cast_const());
        Some(Place { at, row, row_bias, col_bias, residual, low, high })
    }

    unsafe fn store(&self, group: usize, rows: Range<usize>, cols: Range<usize>, tile: *const f32) {
        let Blocking { isa, nr, .. } = self.plan.blocking;
        let stencil = &self.plan.stencil;
        let (channels, pixels) = match self.plan.lanes {
            Lanes::Pixels => (rows, cols),
            Lanes::Channels => (cols, rows),
        };
        let store = Store {
            stencil,
            lanes: self.plan.lanes,
            dst: self.dst.wrapping_offset(stencil.dst_group(group)),
            epilogue: self.epilogue.for_group(group, stencil.k),
            channels,
            tile,
            row: nr,
        };
        dispatch(isa, StoreTile { store, pixels });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::{Conv2dParams, Conv2dSpec};
    use crate::{Layout, TensorDesc};

    fn blocking(c: usize, side: usize, k: usize, r: usize, threads: usize) -> Blocking {
        let layout = Layout::with_order(&[1, c, side, side], &[0, 2, 3, 1]).unwrap();
        let w = TensorDesc::contiguous(DType::F32, &[k, c, r, r]).unwrap();
        let params = Conv2dParams { padding: [r / 2; 2], ..Default::default() };
        let spec = Conv2dSpec::new(TensorDesc::new(DType::F32, layout), w, &params).unwrap();
        let stencil = Stencil::forward(&spec, &spec.problem().unwrap()).unwrap();
        Im2colGemm::new(stencil, Isa::best(), threads).blocking
    }

    /// Neither few pixels nor few channels leave threads without a block, and no block outgrows the caches.
    #[test]
    fn all_threads_have_blocks() {
        for (c, side, k, r) in [
            (1024, 14, 256, 1),
            (2048, 7, 512, 1),
            (256, 14, 256, 3),
            (64, 56, 64, 1),
            (8, 90, 600, 3),
        ] {
            for threads in [1, 2, 4, 16] {
                let b = blocking(c, side, k, r, threads);
                assert!(b.tasks() >= threads, "{threads} threads: {b:?}");
                assert!(b.mc <= BLOCK[1] && b.nc <= BLOCK[0], "{b:?}");
                assert_eq!(b.additions(), blocking(c, side, k, r, 1).additions());
            }
        }
        // Many threads share the filter as well as the pixels.
        let b = blocking(1536, 14, 384, 1, 16);
        assert!(b.mc < 196 && b.nc < 384, "{b:?}");
        // Sizes of which nothing can be cut.
        for threads in [1, 2, 1024] {
            assert_eq!(blocking(1, 1, 1, 1, threads).tasks(), 1);
        }
    }
}
