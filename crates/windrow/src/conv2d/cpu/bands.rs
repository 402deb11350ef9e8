//! Convolutions of one image, each of the result of the one before it, by bands of rows: what one of them writes is still
//! in the second-level cache when the next one reads it.
//!
//! The rows of the last result are cut into segments, one for each thread, and segments into bands. For each band, each
//! convolution computes the rows that the next one needs and that are not there yet. They are in memory of the thread;
//! those that the next band needs too are moved to its beginning. So only at the border of two segments rows are computed
//! twice. Results have the same bits as without bands, because a row does not depend on the others.

mod schedule;

use self::schedule::{Part, Schedule};
use super::method::{Prepared, Run, Task};
use super::methods::prepare;
use super::shared::epilogue::Residual;
use super::shared::stencil::Stencil;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::cpu::{Isa, SendPtr, parallel_for_workers};
use crate::lists::push;
use crate::{Activation, DType, Device, Layout, Result, TensorDesc, TensorMut, TensorRef};

/// The largest share of the time that the last thread may need more than if all ended together.
pub(super) const MOST_LATE: f64 = 0.1;

/// A convolution that is computed by bands.
pub(crate) struct Link<'a> {
    pub(crate) spec: &'a Conv2dSpec,
    pub(crate) problem: &'a Problem,
    pub(crate) prepared: &'a dyn Prepared,
    pub(crate) isa: Isa,
    pub(crate) threads: usize,
}

/// True if a convolution can be one of those that are computed by bands: it is in channels-last f32, and by a method whose
/// sums for a row do not depend on the other rows.
pub(super) fn is_in_bands(link: &Link<'_>) -> bool {
    use Conv2dAlgorithm::{DirectGrouped, DirectRuns, Im2colGemm};
    let Link { spec, problem, .. } = link;
    let algorithm = link.prepared.configuration().algorithm;
    [DirectGrouped, DirectRuns, Im2colGemm].contains(&algorithm)
        && problem.n == 1
        && problem.r * problem.s > 0
        && !super::follows(spec)
        && [&spec.x, &spec.y].into_iter().all(is_channels_last)
}

/// True for one image in f32 whose channels follow each other. There may be gaps between pixels and between rows.
fn is_channels_last(desc: &TensorDesc) -> bool {
    let &[_, c, h, w] = desc.shape() else { return false };
    let &[_, channel, row, pixel] = desc.strides() else { return false };
    let is_apart = |count: usize, stride: isize, len: usize| count < 2 || stride >= len as isize;
    let is_channel = c < 2 || channel == 1;
    let are_apart = is_apart(w, pixel, c) && is_apart(h, row, w * c);
    desc.dtype == DType::F32 && c * h * w > 0 && is_channel && are_apart
}

/// The same without gaps.
fn is_dense(desc: &TensorDesc) -> bool {
    let &[_, c, _, w] = desc.shape() else { return false };
    let dense = [1, (w * c) as isize, c as isize];
    let is_there = |d: usize| desc.shape()[d] < 2 || desc.strides()[d] == dense[d - 1];
    is_channels_last(desc) && (1..4).all(is_there)
}

/// True for two convolutions that may be computed together, the second one of the result of the first one.
pub(super) fn may_be(first: &Link<'_>, second: &Link<'_>) -> bool {
    let (between, read) = (&first.spec.y, &second.spec.x);
    is_in_bands(first)
        && is_in_bands(second)
        && between.shape() == read.shape()
        && [between, read].into_iter().all(is_dense)
        && first.isa == second.isa
}

/// True if two convolutions, the second one of the result of the first one, are faster by bands: a thread's part of this
/// result would fill so many bytes of cache, or the first one does little but read and write memory. With less there is
/// little to gain, and bands cost some time.
pub(crate) fn pays(first: &Link<'_>, second: &Link<'_>, cache: usize) -> bool {
    let bytes = first.spec.y.layout.len() * size_of::<f32>();
    let threads = first.threads.max(second.threads);
    let scales = is_one_tap(first) && first.problem.groups == first.problem.k;
    let both_end = ends_together(second.problem.oh, threads);
    may_be(first, second) && (bytes / threads > cache || scales && is_one_tap(second) && both_end)
}

/// True for a filter of one tap, for each pixel.
pub(super) fn is_one_tap(link: &Link<'_>) -> bool {
    let p = link.problem;
    p.r * p.s == 1 && p.stride == [1, 1] && p.padding == [0, 0]
}

/// True if the thread with the most of so many rows has hardly more than the others.
fn ends_together(rows: usize, threads: usize) -> bool {
    (rows.div_ceil(threads) * threads) as f64 <= (1.0 + MOST_LATE) * rows as f64
}

/// Convolutions in the form that computes them by bands.
#[derive(Debug)]
pub(crate) struct Bands {
    schedule: Schedule,
    bands: Vec<Band>,
    /// The band that computes each part of the schedule.
    of_parts: Vec<usize>,
    /// Where each value's rows begin in the memory of a thread, in elements, and then the scratch memory of methods.
    starts: Vec<usize>,
    /// Bytes of a thread's memory.
    bytes: usize,
    threads: usize,
}

/// A convolution of some rows.
#[derive(Debug)]
struct Band {
    link: usize,
    stencil: Stencil,
    x: TensorDesc,
    y: TensorDesc,
    prepared: Box<dyn Prepared>,
}

/// The tensors of a link, without the image and the result.
pub(crate) struct LinkArgs<'a> {
    pub(crate) packed: &'a [f32],
    pub(crate) bias: Option<TensorRef<'a>>,
    pub(crate) residual: Option<TensorRef<'a>>,
    pub(crate) activation: Activation,
}

impl Bands {
    /// `None` if the rows between convolutions do not fit into so many bytes of cache.
    pub(crate) fn new(links: &[Link<'_>], cache: usize) -> Result<Option<Self>> {
        let stencils = links.iter().map(|link| Stencil::forward(link.spec, link.problem));
        let stencils = stencils.collect::<Result<Vec<_>>>()?;
        let threads = links.iter().map(|link| link.threads).max().unwrap_or(1);
        let Some(schedule) = Schedule::new(&stencils, threads, cache) else {
            return Ok(None);
        };
        let (mut bands, mut of_parts) = (Vec::<Band>::new(), Vec::new());
        for part in &schedule.all {
            let stencil = stencils[part.link].of_rows(part.rows.clone());
            let known = bands.iter().position(|b| b.link == part.link && b.stencil == stencil);
            let band = match known {
                Some(band) => band,
                None => {
                    let Some(band) = Band::new(&links[part.link], part.link, stencil)? else {
                        return Ok(None);
                    };
                    push(&mut bands, band)?;
                    bands.len() - 1
                }
            };
            push(&mut of_parts, band)?;
        }
        let mut starts = vec![0];
        for &len in &schedule.lens {
            starts.push(starts[starts.len() - 1] + len.next_multiple_of(16));
        }
        let scratch = bands.iter().map(|band| band.prepared.workspace_bytes()).max().unwrap_or(0);
        let bytes = starts[starts.len() - 1] * size_of::<f32>() + scratch.next_multiple_of(64);
        Ok(Some(Bands { schedule, bands, of_parts, starts, bytes, threads }))
    }

    /// Bytes of scratch memory.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.bytes * self.threads.min(self.schedule.segments.len())
    }

    /// Computes all of them.
    ///
    /// # Safety
    /// `x` and `y` are the first image and the last result as the specs say. Residuals lie as the result of their link.
    /// The filters were packed by plans of the links.
    pub(crate) unsafe fn run(
        &self,
        links: &[LinkArgs<'_>],
        x: *const f32,
        y: *mut f32,
        workspace: &mut [u8],
    ) {
        assert!(workspace.len() >= self.workspace_bytes(), "workspace");
        let (x, y, memory) = (SendPtr(x.cast_mut()), SendPtr(y), SendPtr(workspace.as_mut_ptr()));
        parallel_for_workers(self.threads, self.schedule.segments.len(), |worker, segment| {
            let parts = self.schedule.segments[segment].clone();
            for at in parts {
                let (part, band) = (&self.schedule.all[at], &self.bands[self.of_parts[at]]);
                // SAFETY: each worker has its own memory; segments have different rows of y.
                unsafe {
                    let memory = memory.get().add(worker * self.bytes);
                    self.compute(part, band, &links[part.link], [x.get(), y.get()], memory);
                }
            }
        });
    }

    /// # Safety
    /// As for [`Bands::run`], with the memory of a thread, of which the parts before it have written their rows.
    unsafe fn compute(
        &self,
        part: &Part,
        band: &Band,
        link: &LinkArgs<'_>,
        [x, y]: [*mut f32; 2],
        memory: *mut u8,
    ) {
        let values = self.starts.len() - 1;
        // SAFETY: the schedule's rows are in the memory of their value, the image or the result.
        unsafe {
            let value = |i: usize| memory.cast::<f32>().add(self.starts[i]);
            if let Some((from, len)) = part.kept {
                let to = value(part.link);
                std::ptr::copy(to.add(from), to, len);
            }
            let from = if part.link == 0 { x } else { value(part.link - 1) }.add(part.src);
            let to = if part.link == values { y } else { value(part.link) }.add(part.dst);
            let scratch = memory.add(self.starts[values] * size_of::<f32>());
            let scratch_len = self.bytes - self.starts[values] * size_of::<f32>();
            let view = |from: *const f32, desc| TensorRef::from_raw(from.cast(), desc, Device::Cpu);
            let residual = link.residual.map(|residual| {
                let first = part.rows.start * band.stencil.dst[2] as usize;
                view(residual.as_ptr().cast::<f32>().add(first), band.y)
            });
            let mut to = TensorMut::from_raw(to.cast(), band.y, Device::Cpu).expect("no gaps");
            let residual = Residual::new(residual.as_ref(), &to);
            let run = Run {
                x: &view(from, band.x),
                initial: None,
                bias: link.bias.as_ref(),
                residual,
                activation: link.activation,
                y: &mut to,
                workspace: std::slice::from_raw_parts_mut(scratch, scratch_len),
            };
            band.prepared.run(link.packed, run);
        }
    }
}

impl Band {
    /// `None` if the method does not compute these rows, or reads another form of the filter.
    fn new(link: &Link<'_>, number: usize, stencil: Stencil) -> Result<Option<Self>> {
        let image = |channels: usize, [rows, cols]: [usize; 2], strides: &[isize]| {
            let layout = Layout::strided(&[1, channels, rows, cols], strides)?;
            Ok(TensorDesc::new(DType::F32, layout))
        };
        let x = image(link.problem.c, stencil.src_size, &stencil.src)?;
        let y = image(link.problem.k, stencil.dst_size, &stencil.dst)?;
        let algorithm = link.prepared.configuration().algorithm;
        let task = Task {
            spec: link.spec,
            problem: link.problem,
            stencil: stencil.clone(),
            isa: link.isa,
            threads: 1,
            batch_invariant: false,
        };
        let prepared = prepare(&task, &Conv2dConfiguration::new(algorithm))?;
        let form = |prepared: &dyn Prepared| {
            (prepared.configuration().algorithm, prepared.packed_len(), prepared.packed_width())
        };
        let prepared = prepared.filter(|prepared| form(&**prepared) == form(link.prepared));
        Ok(prepared.map(|prepared| Band { link: number, stencil, x, y, prepared }))
    }
}
