//! A 1x1 convolution and the depthwise one of its result, computed by slices of channels.
//!
//! A channel of a depthwise convolution's result depends on the same channel of its image only. So a task computes some
//! channels of both: those of the image between them are in memory of the thread, and threads need not wait for each other
//! between the two. Results have the same bits as without slices, because a channel does not depend on the others.

use super::bands::{self, Link, LinkArgs, MOST_LATE, is_one_tap};
use super::method::{Prepared, Run, Task};
use super::methods::prepare;
use super::shared::epilogue::Residual;
use super::shared::stencil::Stencil;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration};
use crate::cpu::{SendPtr, parallel_for_workers};
use crate::{DType, Device, Layout, Result, TensorDesc, TensorMut, TensorRef};

/// Tasks of each thread, at least.
const TASKS_PER_THREAD: usize = 2;
/// The fewest channels of a slice: with less, what each task does beside products takes too long.
const FEWEST: usize = 32;

/// True if two convolutions, the second one of the result of the first one, may be computed by slices.
fn may_be(first: &Link<'_>, second: &Link<'_>) -> bool {
    use Conv2dAlgorithm::{DirectGrouped, Im2colGemm};
    let b = second.problem;
    let algorithms = [first, second].map(|link| link.prepared.configuration().algorithm);
    let is_single = first.problem.groups == 1 && is_one_tap(first);
    let is_depthwise = b.groups == b.c && b.groups == b.k;
    algorithms == [Im2colGemm, DirectGrouped]
        && is_single
        && is_depthwise
        && !first.spec.residual
        && !second.spec.residual
        && bands::may_be(first, second)
}

/// True if two convolutions, the second one of the result of the first one, are faster by slices. `cache` is the number of
/// bytes for the image of a slice.
pub(crate) fn slices_pay(first: &Link<'_>, second: &Link<'_>, cache: usize) -> bool {
    width(first, second, cache).is_some()
}

/// The channels of a slice; `None` if slices do not pay. `cache` is the number of bytes for the image of a slice.
fn width(first: &Link<'_>, second: &Link<'_>, cache: usize) -> Option<usize> {
    if !may_be(first, second) {
        return None;
    }
    let (p, threads) = (first.problem, first.threads.max(second.threads));
    let panel = first.prepared.packed_width();
    let late = |width: usize| {
        let most = p.k.div_ceil(width).div_ceil(threads) * width;
        most as f64 / (p.k as f64 / threads as f64) - 1.0
    };
    let fewest = FEWEST.next_multiple_of(panel.max(1));
    let most = (p.k / (threads * TASKS_PER_THREAD)).max(fewest);
    (fewest..=most)
        .rev()
        .filter(|width| width.is_multiple_of(panel) && *width < p.k)
        .filter(|width| p.h * p.w * width * size_of::<f32>() <= cache)
        .find(|&width| late(width) <= MOST_LATE)
}

/// Two convolutions in the form that computes them by slices.
#[derive(Debug)]
pub(crate) struct Slices {
    /// The channels of all slices but the last one, which may have fewer, and those of all.
    width: usize,
    channels: usize,
    whole: Slice,
    rest: Option<Slice>,
    /// Terms of the first filter, and taps of the second one.
    terms: usize,
    taps: usize,
    /// Elements of a thread's memory: the image of a slice, the second filter, and the scratch memory of methods.
    image_len: usize,
    filter_len: usize,
    scratch_len: usize,
    threads: usize,
}

/// Both convolutions of some channels.
#[derive(Debug)]
struct Slice {
    /// The first image, that between them, and the result.
    values: [TensorDesc; 3],
    biases: [Option<TensorDesc>; 2],
    prepared: [Box<dyn Prepared>; 2],
}

impl Slices {
    /// `None` if slices do not pay. `cache` is the number of bytes for the image of a slice.
    pub(crate) fn new(first: &Link<'_>, second: &Link<'_>, cache: usize) -> Result<Option<Self>> {
        let Some(width) = width(first, second, cache) else { return Ok(None) };
        let (channels, p) = (first.problem.k, first.problem);
        let Some(whole) = Slice::new(first, second, width)? else { return Ok(None) };
        let rest = match channels % width {
            0 => None,
            rest => match Slice::new(first, second, rest)? {
                None => return Ok(None),
                slice => slice,
            },
        };
        let scratch = whole.prepared.iter().map(|prepared| prepared.workspace_bytes()).max();
        let taps = second.problem.taps();
        Ok(Some(Slices {
            width,
            channels,
            whole,
            rest,
            terms: p.c,
            taps,
            image_len: (p.h * p.w * width).next_multiple_of(16),
            filter_len: (taps * width).next_multiple_of(16),
            scratch_len: scratch.unwrap_or(0).div_ceil(size_of::<f32>()).next_multiple_of(16),
            threads: first.threads.max(second.threads),
        }))
    }

    fn tasks(&self) -> usize {
        self.channels.div_ceil(self.width)
    }

    fn memory_len(&self) -> usize {
        self.image_len + self.filter_len + self.scratch_len
    }

    /// Bytes of scratch memory.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.memory_len() * self.threads.min(self.tasks()) * size_of::<f32>()
    }

    /// Computes both.
    ///
    /// # Safety
    /// `x` and `y` are the image and the result as the specs say. The filters were packed by plans of the links.
    pub(crate) unsafe fn run(
        &self,
        links: [&LinkArgs<'_>; 2],
        x: *const f32,
        y: *mut f32,
        workspace: &mut [u8],
    ) {
        assert!(workspace.len() >= self.workspace_bytes(), "workspace");
        let (x, y) = (SendPtr(x.cast_mut()), SendPtr(y));
        let memory = SendPtr(workspace.as_mut_ptr().cast::<f32>());
        parallel_for_workers(self.threads, self.tasks(), |worker, task| {
            let first = task * self.width;
            let slice = match &self.rest {
                Some(rest) if first + self.width > self.channels => rest,
                _ => &self.whole,
            };
            // SAFETY: each worker has its own memory; slices have different channels of y.
            unsafe {
                let memory = memory.get().add(worker * self.memory_len());
                self.compute(slice, first, links, [x.get(), y.get()], memory);
            }
        });
    }

    /// # Safety
    /// As for [`Slices::run`], of the channels from `first` on, with the memory of a thread.
    unsafe fn compute(
        &self,
        slice: &Slice,
        first: usize,
        links: [&LinkArgs<'_>; 2],
        [x, y]: [*mut f32; 2],
        memory: *mut f32,
    ) {
        let width = self.width.min(self.channels - first);
        let [a, b] = &slice.prepared;
        // SAFETY: the parts of the memory, a slice of the result, and channels of filters and biases.
        unsafe {
            let (image, filter) = (memory, memory.add(self.image_len));
            let scratch = filter.add(self.filter_len);
            let view = |from: *const f32, desc| TensorRef::from_raw(from.cast(), desc, Device::Cpu);
            let run = |number: usize, from: *const f32, to: *mut f32, packed: &[f32]| {
                let [from_desc, to_desc] = [slice.values[number], slice.values[number + 1]];
                let bias = links[number].bias.as_ref().zip(slice.biases[number]);
                let bias = bias.map(|(bias, desc)| {
                    let at = first as isize * desc.strides()[0];
                    view(bias.as_ptr().cast::<f32>().offset(at), desc)
                });
                let mut y = TensorMut::from_raw(to.cast(), to_desc, Device::Cpu).expect("no gaps");
                let run = Run {
                    x: &view(from, from_desc),
                    initial: None,
                    bias: bias.as_ref(),
                    residual: Residual::new(None, &y),
                    activation: links[number].activation,
                    y: &mut y,
                    workspace: std::slice::from_raw_parts_mut(
                        scratch.cast(),
                        self.scratch_len * size_of::<f32>(),
                    ),
                };
                slice.prepared[number].run(packed, run);
            };
            run(0, x, image, &links[0].packed[first * self.terms..][..a.packed_len()]);
            for tap in 0..self.taps {
                let from = &links[1].packed[tap * self.channels + first..][..width];
                filter.add(tap * width).copy_from_nonoverlapping(from.as_ptr(), width);
            }
            let filter = std::slice::from_raw_parts(filter, b.packed_len());
            run(1, image, y.add(first), filter);
        }
    }
}

impl Slice {
    /// `None` if the methods do not compute so many channels, or read another form of the filter.
    fn new(first: &Link<'_>, second: &Link<'_>, width: usize) -> Result<Option<Self>> {
        let (p, q) = (first.problem, second.problem);
        let between = Layout::with_order(&[1, width, p.oh, p.ow], &[0, 2, 3, 1])?;
        let strides: [isize; 4] = std::array::from_fn(|d| between.strides()[d]);
        let result = Layout::strided(&[1, width, q.oh, q.ow], second.spec.y.strides())?;
        let mut a = Stencil::forward(first.spec, p)?;
        (a.k, a.dst) = (width, strides);
        let mut b = Stencil::forward(second.spec, q)?;
        (b.groups, b.src) = (width, strides);
        let made = |link: &Link<'_>, stencil: Stencil| {
            let algorithm = link.prepared.configuration().algorithm;
            let task = Task {
                spec: link.spec,
                problem: link.problem,
                stencil,
                isa: link.isa,
                threads: 1,
                batch_invariant: false,
            };
            let prepared = prepare(&task, &Conv2dConfiguration::new(algorithm))?;
            Ok(prepared.filter(|prepared| prepared.configuration().algorithm == algorithm))
        };
        let (Some(a), Some(b)) = (made(first, a)?, made(second, b)?) else { return Ok(None) };
        // The panels of a slice are some of those of the whole filter.
        let packed = p.c * width.next_multiple_of(first.prepared.packed_width());
        let fits = a.packed_width() == first.prepared.packed_width() && a.packed_len() == packed;
        if !fits || b.packed_len() != q.taps() * width {
            return Ok(None);
        }
        let bias = |link: &Link<'_>| {
            let bias = link.spec.bias.as_ref();
            let desc = bias.map(|bias| Layout::strided(&[width], bias.strides()));
            Ok(desc.transpose()?.map(|layout| TensorDesc::new(DType::F32, layout)))
        };
        let of = |layout| TensorDesc::new(DType::F32, layout);
        Ok(Some(Slice {
            values: [first.spec.x, of(between), of(result)],
            biases: [bias(first)?, bias(second)?],
            prepared: [a, b],
        }))
    }
}
