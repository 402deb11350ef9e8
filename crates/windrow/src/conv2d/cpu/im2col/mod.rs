//! Convolution as a matrix product with the im2col matrix, of which only the panels that a task
//! works on are ever in memory.
//!
//! Terms of the sums are ordered [filter frame, filter row, filter column, channel]. Where pixels of the output lie
//! next to each other, the filter is the left operand and vectors run over pixels; where channels
//! do, pixels are rows and vectors run over output channels.
//!
//! Frames of a video are read as images are, one frame of the filter after the other. The images whose filter frames all
//! read x, and those that read zeros through some, are products of their own.

mod blocking;
mod parts;

use super::method::{Found, Method, Prepared, Run, Task};
use super::shared::epilogue::{Bounds, Epilogue, Lanes};
use super::shared::frames::FrameSource;
use super::shared::pack::{PackPanels, PackRows, pack_filter, parts};
use super::shared::stencil::Stencil;
use super::shared::store::{Store, StoreTile};
use super::shared::{bias_len, tolerance};
use super::staged::Staged;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration};
use crate::cpu::gemm::{
    BlockedProduct, Blocking, Left, Place, Right, Scratch, left_stride, tile_shape,
};
use crate::cpu::{Isa, SimdElement, dispatch};
use crate::dtype::with_element;
use crate::lists::{collected, filled, push};
use crate::{DType, Result, TensorRef};
use blocking::ends_first;
use parts::Parts;
use std::ops::Range;

/// Elements at whose multiples addresses fall into the same set of a first-level cache.
const PAGE: usize = 1024;

/// The method: a matrix product of any convolution.
pub(super) struct Im2colMethod;

impl Method for Im2colMethod {
    fn algorithms(&self) -> &'static [Conv2dAlgorithm] {
        &[Conv2dAlgorithm::Im2colGemm]
    }

    fn prepare(&self, task: &Task<'_>, _: &Conv2dConfiguration) -> Found {
        let (stencil, isa, threads) = (&task.stencil, task.isa, task.threads);
        let Some(frames) = &stencil.frames else {
            return Ok(Some(Box::new(Im2colGemm::new(stencil.clone(), 0, isa, threads)?)));
        };
        let mut parts = Vec::new();
        for images in frames.ranges(stencil.n)? {
            let dst_offset = images.start as isize * stencil.dst[0];
            let stencil = Stencil { n: images.len(), dst_offset, ..stencil.clone() };
            push(&mut parts, Im2colGemm::new(stencil, images.start, isa, threads)?)?;
        }
        Ok(Some(Box::new(Parts { parts })))
    }
}

/// What images read through a frame of the filter.
#[derive(Clone, Debug)]
struct Source {
    stencil: Stencil,
    /// The place of the first image, in the initial frames or in x.
    offset: isize,
    is_initial: bool,
}

/// A [`Stencil`] as a product, for one instruction set.
#[derive(Clone, Debug)]
struct Im2colGemm {
    stencil: Stencil,
    /// What the images read through each frame of the filter; `None` for zeros.
    sources: Vec<Option<Source>>,
    lanes: Lanes,
    blocking: Blocking,
    threads: usize,
    /// True if the filter has one tap, whose channels are neighbours in the source.
    is_merged: bool,
}

impl Im2colGemm {
    /// The product of images that all read in the way of the one with the number `image`.
    fn new(stencil: Stencil, image: usize, isa: Isa, threads: usize) -> Result<Self> {
        let sources = stencil.sources(image).map(|source| {
            source.map(|FrameSource { is_initial, offset, strides }| {
                let stencil = Stencil { src: strides, ..stencil.clone() }.merged();
                Source { stencil, offset, is_initial }
            })
        });
        let sources = collected(sources)?;
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
        Ok(Im2colGemm { stencil, sources, lanes, blocking, threads, is_merged })
    }

    fn packed_group_len(&self) -> usize {
        self.stencil.k.next_multiple_of(self.packed_width()) * self.stencil.terms()
    }

    /// Elements of scratch memory.
    fn scratch_len(&self) -> usize {
        self.threads.min(self.blocking.tasks() * self.stencil.groups) * self.blocking.scratch_len()
    }

    fn run_staged(&self, packed: &[f32], staged: &mut Staged<'_>) {
        let scratch = staged.scratch(self.scratch_len());
        let Staged { dtype, src, initial, dst, epilogue, .. } = *staged;
        let (plan, packed) = (self, packed.as_ptr());
        // SAFETY: the stencil was made for these layouts; y is borrowed mutably; `Product` packs what the blocking gives
        // it scratch memory for.
        with_element!(dtype, T => unsafe {
            let (src, initial) = (src.cast(), initial.cast());
            let product = Product::<T> { plan, packed, src, initial, dst: dst.cast(), epilogue };
            self.blocking.run(&product, self.stencil.groups, self.threads, scratch);
        });
    }

    /// The parts of a range of terms that have one frame of the filter each: where the part starts in the range, its
    /// terms in the frame, and the frame's source.
    fn by_frames(
        &self,
        terms: Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>, Option<&Source>)> {
        let of_frame = self.stencil.frame_terms();
        parts(of_frame, 1, terms)
            .map(|(at, terms, frame, _)| (at, terms, self.sources[frame].as_ref()))
    }

    /// The im2col matrix [group, term, pixel] as the product is given it, for checks.
    ///
    /// # Safety
    /// Source elements of the stencil are in memory.
    unsafe fn matrix<T: SimdElement>(&self, src: *const T) -> Result<Vec<f32>> {
        let (stencil, b) = (&self.stencil, &self.blocking);
        let (pixels, terms) = (stencil.pixels(), stencil.terms());
        let (dst, packed) = (std::ptr::null_mut(), std::ptr::null());
        let initial = std::ptr::null();
        let product = Product { plan: self, packed, src, initial, dst, epilogue: Epilogue::NONE };
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
        self.run_staged(packed, &mut Staged::new(run));
    }

    fn im2col(&self, x: &TensorRef<'_>) -> Result<Option<Vec<f32>>> {
        // SAFETY: the stencil was made for this layout.
        let matrix = with_element!(x.dtype(), T => unsafe { self.matrix(x.as_ptr().cast::<T>()) });
        matrix.map(Some)
    }
}

struct Product<'a, T> {
    plan: &'a Im2colGemm,
    packed: *const f32,
    src: *const T,
    initial: *const T,
    dst: *mut T,
    epilogue: Epilogue,
}

// SAFETY: filter and source are only read; each destination element is written by one task.
unsafe impl<T> Sync for Product<'_, T> {}

impl<T: SimdElement> Product<'_, T> {
    fn src(&self, group: usize, source: &Source) -> *const T {
        let start = if source.is_initial { self.initial } else { self.src };
        start.wrapping_offset(source.offset).wrapping_offset(source.stencil.src_group(group))
    }

    /// The first term of the first pixel and the distance of pixels, if they can be multiplied where they are.
    fn in_place(
        &self,
        group: usize,
        pixels: &Range<usize>,
        terms: &Range<usize>,
    ) -> Option<(*const f32, usize)> {
        let [Some(source)] = &self.plan.sources[..] else { return None };
        let Stencil { n, dst_size, src: strides, step, .. } = source.stencil;
        let row = strides[3].checked_mul(step[1] as isize)?;
        let is_plain = T::DTYPE == DType::F32 && self.plan.is_merged && n * dst_size[0] == 1;
        let is_plain = is_plain && strides[1] == 1;
        let at = pixels.start as isize * row + terms.start as isize;
        // Pixels at such a distance displace each other from the first-level cache.
        let is_far = (row as usize).is_multiple_of(PAGE);
        let src = self.src(group, source).wrapping_offset(at);
        (is_plain && row > 0 && !is_far).then(|| (src.cast(), row as usize))
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
                if let Some((ptr, row)) = self.in_place(group, &rows, &terms) {
                    // Of one panel the distance to the next may overflow, and is not used.
                    return Left { ptr, panel: mr.wrapping_mul(row), row, step: 1 };
                }
                for (at, terms, source) in self.plan.by_frames(terms) {
                    let (to, room, pixels) = (scratch.wrapping_add(at), row - at, rows.clone());
                    let Some(source) = source else {
                        for pixel in 0..pixels.len() {
                            // SAFETY: these terms of a pixel that was asked for.
                            unsafe { std::ptr::write_bytes(to.add(pixel * row), 0, terms.len()) };
                        }
                        continue;
                    };
                    let (src, stencil) = (self.src(group, source), &source.stencil);
                    dispatch(isa, PackRows { stencil, src, pixels, terms, to, row, room });
                }
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
                for (at, terms, source) in self.plan.by_frames(terms) {
                    let (to, pixels) = (scratch.wrapping_add(at * nr), cols.clone());
                    let Some(source) = source else {
                        for q in 0..pixels.len().div_ceil(nr) {
                            // SAFETY: these terms of a panel that was asked for.
                            unsafe {
                                std::ptr::write_bytes(to.add(q * panel), 0, terms.len() * nr)
                            };
                        }
                        continue;
                    };
                    let (src, stencil) = (self.src(group, source), &source.stencil);
                    let (width, row) = (nr, nr);
                    dispatch(
                        isa,
                        PackPanels { stencil, src, pixels, terms, to, width, row, panel },
                    );
                }
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
        if T::DTYPE != DType::F32 {
            return None;
        }
        let Bounds { low, high } = epilogue.bounds().unwrap_or(Bounds::NONE);
        let curve = epilogue.bounds().is_none().then_some(epilogue.activation);
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
        Some(Place { at, row, row_bias, col_bias, residual, low, high, curve })
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
    use super::blocking::BLOCK;
    use super::*;
    use crate::conv2d::{Conv2dParams, Conv2dSpec};
    use crate::{Layout, TensorDesc};

    fn blocking(c: usize, side: usize, k: usize, r: usize, threads: usize) -> Blocking {
        let layout = Layout::with_order(&[1, c, side, side], &[0, 2, 3, 1]).unwrap();
        let w = TensorDesc::contiguous(DType::F32, &[k, c, r, r]).unwrap();
        let params = Conv2dParams { padding: [r / 2; 2], ..Default::default() };
        let spec = Conv2dSpec::new(TensorDesc::new(DType::F32, layout), w, &params).unwrap();
        let stencil = Stencil::forward(&spec, &spec.problem().unwrap()).unwrap();
        Im2colGemm::new(stencil, 0, Isa::best(), threads).unwrap().blocking
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
