//! Sums over the filter's taps, without an im2col matrix: what the methods of `direct` share.

use super::method::{Found, Method, Prepared, Run, Task, sums_cost};
use super::shared::epilogue::Epilogue;
use super::shared::pack::pack_filter;
use super::shared::stencil::Stencil;
use super::shared::{bias_len, tolerance};
use super::staged::Staged;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration};
use crate::cpu::{Isa, MAX_LANES, SendPtr, SimdElement, parallel_for_workers};
use crate::dtype::with_element;
use crate::{DType, Filter, Result, TensorRef};
use std::fmt::Debug;
use std::marker::PhantomData;

/// A way to sum over the taps of a stencil, unit by unit. Sizes are in f32 elements.
pub(super) trait TapSums: Debug + Send + Sync + Sized + 'static {
    /// The method's own name; it computes `direct` as well.
    const ALGORITHM: Conv2dAlgorithm;
    /// True if the method sums over frames of a video too.
    const READS_FRAMES: bool = false;

    /// The method for a stencil, divided into units; `None` if it does not support this stencil.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    fn new(stencil: &Stencil, task: &Task<'_>) -> Result<Option<Self>>;

    /// The stencil that stands for one in [`TapSums::new`] and after.
    fn reshaped(stencil: &Stencil) -> Stencil {
        stencil.clone()
    }

    /// Products of this type in the time of one by vectors of f32.
    fn rate(_: DType) -> f64 {
        1.0
    }

    /// A description of how the work is divided into blocks.
    fn explain(&self) -> String;

    /// The largest number of additions, one after the other, that form an element.
    fn additions(&self, stencil: &Stencil) -> usize {
        stencil.terms()
    }

    /// The form of the packed filter.
    fn packing(&self, stencil: &Stencil) -> Packing;

    /// Packs the filter in a form of the method's own.
    ///
    /// # Safety
    /// The stencil's filter elements are readable from `filter`.
    unsafe fn pack<T: SimdElement>(
        &self,
        _: &Stencil,
        _filter: *const T,
        _packed: &mut [f32],
        _: (Isa, usize),
    ) {
        unreachable!("filters of {} have another form", Self::ALGORITHM)
    }

    /// Units of work.
    fn units(&self, stencil: &Stencil) -> usize;

    /// Elements of scratch memory of one worker.
    fn scratch_len(&self, stencil: &Stencil) -> usize;

    /// Computes one unit.
    ///
    /// # Safety
    /// Source and destination elements of the stencil are in memory, and nothing else accesses those that the unit
    /// writes. The operands' filter was packed by an equal plan. `scratch` holds [`TapSums::scratch_len`] elements.
    unsafe fn run<T: SimdElement>(&self, unit: TapUnit<'_, T>, scratch: *mut f32);
}

/// The form of a packed filter; zeros beyond a group's channels.
#[derive(Clone, Copy, Debug)]
pub(super) enum Packing {
    /// [group, panel, filter frame, c, filter row, filter column, channel of the panel], for panels of this number of
    /// channels.
    Panels(usize),
    /// The same in the order of products, [group, panel, filter row, filter column, c, channel of the panel].
    Products(usize),
    /// [filter row, c, filter column, group, channel of the group]
    Channels,
    /// A form of the method's own with `len` elements; no other form has this `width`.
    Own { len: usize, width: usize },
}

impl Packing {
    fn len(self, stencil: &Stencil) -> usize {
        let Stencil { groups, k, .. } = stencil;
        match self {
            Packing::Panels(width) | Packing::Products(width) => {
                groups * k.next_multiple_of(width) * stencil.terms()
            }
            Packing::Channels => groups * k * stencil.terms(),
            Packing::Own { len, .. } => len,
        }
    }

    /// The width as in [`Prepared::packed_width`].
    fn width(self, &Stencil { groups, k, .. }: &Stencil) -> usize {
        match self {
            Packing::Panels(width) | Packing::Products(width) | Packing::Own { width, .. } => width,
            Packing::Channels if k == 1 => groups,
            // More than in other forms.
            Packing::Channels => 2 * MAX_LANES + groups * k,
        }
    }
}

/// A unit of a run, and what the run reads and writes.
pub(super) struct TapUnit<'a, T> {
    pub isa: Isa,
    pub stencil: &'a Stencil,
    pub unit: usize,
    pub operands: &'a Operands<'a, T>,
}

/// The tensors that a run reads and writes.
pub(super) struct Operands<'a, T> {
    pub packed: &'a [f32],
    pub src: *const T,
    /// The initial frames; null for none.
    pub initial: *const T,
    pub dst: *mut T,
    pub epilogue: Epilogue,
}

impl<T> Operands<'_, T> {
    /// The same where T is U.
    pub(super) fn of<U>(&self) -> Operands<'_, U> {
        let Operands { packed, src, initial, dst, epilogue } = *self;
        let (src, initial) = (src.cast(), initial.cast());
        Operands { packed, src, initial, dst: dst.cast(), epilogue }
    }
}

// SAFETY: filter, source and bias are only read; each destination element is written by one unit.
unsafe impl<T> Sync for Operands<'_, T> {}

/// The method of a way to sum over taps.
pub(super) struct ByTaps<F>(PhantomData<fn() -> F>);

impl<F> ByTaps<F> {
    pub(super) const METHOD: Self = ByTaps(PhantomData);
}

impl<F: TapSums> Method for ByTaps<F> {
    fn algorithms(&self) -> &'static [Conv2dAlgorithm] {
        const { &[Conv2dAlgorithm::Direct, F::ALGORITHM] }
    }

    fn cost(&self, task: &Task<'_>, _: Conv2dAlgorithm, filter: Filter) -> f64 {
        sums_cost(&task.sizes(), filter, F::rate(task.spec.x.dtype))
    }

    fn prepare(&self, task: &Task<'_>, _: &Conv2dConfiguration) -> Found {
        if task.stencil.frames.is_some() && !F::READS_FRAMES {
            return Ok(None);
        }
        let (isa, threads, stencil) = (task.isa, task.threads, F::reshaped(&task.stencil));
        let sums = F::new(&stencil, task)?;
        Ok(sums.map(|sums| Box::new(TapPlan { sums, stencil, isa, threads }) as _))
    }
}

/// A stencil bound to a way to sum over its taps.
#[derive(Debug)]
struct TapPlan<F> {
    sums: F,
    stencil: Stencil,
    isa: Isa,
    threads: usize,
}

/// Tasks for each thread, so that a late one does not keep the others waiting.
const TASKS_PER_THREAD: usize = 8;

impl<F: TapSums> TapPlan<F> {
    fn packing(&self) -> Packing {
        self.sums.packing(&self.stencil)
    }

    fn scratch_len(&self) -> usize {
        self.threads.min(self.sums.units(&self.stencil)) * self.sums.scratch_len(&self.stencil)
    }

    /// # Safety
    /// The stencil's filter elements are readable from `filter`.
    unsafe fn pack_from<T: SimdElement>(&self, filter: *const T, packed: &mut [f32]) {
        let TapPlan { sums, stencil, isa, threads } = self;
        assert!(packed.len() >= self.packed_len(), "packed filter: too little memory");
        // SAFETY: passed on.
        unsafe {
            match sums.packing(stencil) {
                Packing::Panels(width) => pack_panels(stencil, width, filter, packed),
                Packing::Products(width) => {
                    pack_filter(stencil, *isa, *threads, width, filter, packed.as_mut_ptr());
                }
                Packing::Channels => pack_channels(stencil, filter, packed),
                Packing::Own { .. } => sums.pack(stencil, filter, packed, (*isa, *threads)),
            }
        }
    }

    /// # Safety
    /// As for [`TapSums::run`], of all units, with scratch memory for all workers.
    unsafe fn run_units<T: SimdElement>(&self, operands: &Operands<'_, T>, scratch: *mut f32) {
        let &TapPlan { ref sums, ref stencil, isa, threads } = self;
        let (units, scratch_len) = (sums.units(stencil), sums.scratch_len(stencil));
        let scratch = SendPtr(scratch);
        let chunk = units.div_ceil(threads * TASKS_PER_THREAD).max(1);
        parallel_for_workers(threads, units.div_ceil(chunk), |worker, task| {
            for unit in task * chunk..((task + 1) * chunk).min(units) {
                // SAFETY: units write separate elements; each worker has its own scratch memory.
                unsafe {
                    let scratch = scratch.get().add(worker * scratch_len);
                    sums.run(TapUnit { isa, stencil, unit, operands }, scratch);
                }
            }
        });
    }
}

impl<F: TapSums> Prepared for TapPlan<F> {
    fn configuration(&self) -> Conv2dConfiguration {
        Conv2dConfiguration::new(F::ALGORITHM)
    }

    fn explain(&self) -> String {
        self.sums.explain()
    }

    fn packed_len(&self) -> usize {
        self.packing().len(&self.stencil)
    }

    fn packed_width(&self) -> usize {
        self.packing().width(&self.stencil)
    }

    fn workspace_bytes(&self) -> usize {
        let channels = self.stencil.groups * self.stencil.k;
        (bias_len(channels) + self.scratch_len()) * size_of::<f32>()
    }

    fn tolerance(&self) -> f64 {
        tolerance(self.sums.additions(&self.stencil))
    }

    fn pack(&self, w: &TensorRef<'_>, packed: &mut [f32]) {
        // SAFETY: the stencil was made for this filter's layout.
        with_element!(w.dtype(), T => unsafe { self.pack_from(w.as_ptr().cast::<T>(), packed) });
    }

    fn run(&self, packed: &[f32], run: Run<'_, '_>) {
        let mut staged = Staged::new(run);
        let scratch = staged.scratch(self.scratch_len());
        let Staged { dtype, src, initial, dst, epilogue, .. } = staged;
        // SAFETY: the stencil was made for these layouts; y is borrowed mutably.
        with_element!(dtype, T => unsafe {
            let (src, initial) = (src.cast(), initial.cast());
            let operands = Operands::<T> { packed, src, initial, dst: dst.cast(), epilogue };
            self.run_units(&operands, scratch);
        });
    }
}

/// Packs [`Packing::Panels`].
///
/// # Safety
/// The stencil's filter elements are readable from `filter`.
unsafe fn pack_panels<T: SimdElement>(
    stencil: &Stencil,
    width: usize,
    filter: *const T,
    packed: &mut [f32],
) {
    let mut packed = packed.iter_mut();
    for group in 0..stencil.groups {
        for first in (0..stencil.k).step_by(width) {
            let channels =
                stencil.filter_frames().flat_map(|f| (0..stencil.c).map(move |c| (f, c)));
            for (frame, c) in channels {
                let filter = filter.wrapping_offset(frame);
                for &row in stencil.rows.iter() {
                    for &col in stencil.cols.iter() {
                        for (k, to) in (first..first + width).zip(&mut packed) {
                            // SAFETY: passed on.
                            *to = unsafe { stencil.element(filter, group, k, c, [row, col]) };
                        }
                    }
                }
            }
        }
    }
}

/// Packs [`Packing::Channels`].
///
/// # Safety
/// As for [`pack_panels`].
unsafe fn pack_channels<T: SimdElement>(stencil: &Stencil, filter: *const T, packed: &mut [f32]) {
    let mut packed = packed.iter_mut();
    for &row in stencil.rows.iter() {
        for c in 0..stencil.c {
            for &col in stencil.cols.iter() {
                for group in 0..stencil.groups {
                    for (k, to) in (0..stencil.k).zip(&mut packed) {
                        // SAFETY: passed on.
                        *to = unsafe { stencil.element(filter, group, k, c, [row, col]) };
                    }
                }
            }
        }
    }
}
