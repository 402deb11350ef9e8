//! Convolution as sums over the filter's taps, without an im2col matrix.

mod depthwise;
mod pairs;
mod planar;
mod plane;
mod runs;
mod tiled;
mod turned;

use super::epilogue::Epilogue;
use super::pack::pack_filter;
use super::stencil::Stencil;
use crate::cpu::{Isa, SendPtr, SimdElement, parallel_for_workers};
use crate::dtype::not_computed;
use crate::{DType, Result, bf16};
use depthwise::Depthwise;
use pairs::Pairs;
use planar::Planar;
use plane::Plane;
use runs::Runs;
use tiled::Tiled;
use turned::Turned;

/// A [`Stencil`] by direct summation, for one instruction set.
#[derive(Clone, Debug)]
pub(crate) struct Direct {
    stencil: Stencil,
    form: Form,
    isa: Isa,
    threads: usize,
}

#[derive(Clone, Debug)]
enum Form {
    /// Vectors over pixels.
    Planar(Planar),
    /// The same of one channel, which is a group of its own.
    Plane(Plane),
    /// As `Planar`, by products of bf16.
    Pairs(Pairs),
    /// Tiles of bf16, for it and for f32.
    Tiled(Tiled),
    /// Vectors over channels.
    Depthwise(Depthwise),
    /// The same of channels that are groups of their own, whose pixels lie next to each other.
    Turned(Turned),
    /// Vectors over channels, for few of the source.
    Runs(Runs),
}

/// Tasks for each thread, so that a late one does not keep the others waiting.
const TASKS_PER_THREAD: usize = 8;

impl Direct {
    pub(crate) fn new(stencil: Stencil, isa: Isa, threads: usize) -> Result<Self> {
        let form = if isa.is_small() {
            Form::Planar(Planar::new(&stencil, isa, threads)?)
        } else if let Some(runs) = Runs::new(&stencil, isa, threads) {
            Form::Runs(runs)
        } else if let Some(depthwise) = Depthwise::new(&stencil, isa) {
            Form::Depthwise(depthwise)
        } else if let Some(turned) = Turned::new(&stencil, isa) {
            Form::Turned(turned)
        } else if let Some(plane) = Plane::new(&stencil)? {
            Form::Plane(plane)
        } else {
            Form::Planar(Planar::new(&stencil, isa, threads)?)
        };
        Ok(Direct { stencil, form, isa, threads })
    }

    /// For bf16, by an `isa` that has products of it.
    pub(crate) fn by_bf16_products(stencil: Stencil, isa: Isa, threads: usize) -> Result<Self> {
        let form = Form::Pairs(Pairs::new(&stencil, threads)?);
        Ok(Direct { stencil, form, isa, threads })
    }

    /// For bf16 or f32, by an `isa` that has tiles.
    pub(crate) fn by_tiles(
        stencil: Stencil,
        dtype: DType,
        isa: Isa,
        threads: usize,
    ) -> Result<Self> {
        let stencil = stencil.merged();
        let form = Form::Tiled(Tiled::new(&stencil, dtype, threads)?);
        Ok(Direct { stencil, form, isa, threads })
    }

    /// Blocking in words.
    pub(crate) fn explain(&self) -> String {
        match &self.form {
            Form::Planar(form) => form.explain(),
            Form::Pairs(form) => form.explain(),
            Form::Tiled(form) => form.explain(),
            Form::Plane(form) => form.explain(),
            Form::Depthwise(form) => form.explain(),
            Form::Turned(form) => form.explain(),
            Form::Runs(form) => form.explain(),
        }
    }

    /// Most additions in a row that form an element.
    pub(crate) fn additions(&self) -> usize {
        match &self.form {
            Form::Tiled(form) => form.additions(),
            Form::Planar(_)
            | Form::Plane(_)
            | Form::Pairs(_)
            | Form::Depthwise(_)
            | Form::Turned(_)
            | Form::Runs(_) => self.stencil.terms(),
        }
    }

    /// Elements of scratch memory.
    pub(crate) fn scratch_len(&self) -> usize {
        match &self.form {
            Form::Planar(form) => self.threads.min(form.units(&self.stencil)) * form.scratch_len(),
            Form::Pairs(form) => {
                self.threads.min(form.planar.units(&self.stencil)) * form.scratch_len()
            }
            Form::Plane(form) => {
                self.threads.min(form.units(&self.stencil)) * form.scratch_len(&self.stencil)
            }
            Form::Tiled(form) => {
                self.threads.min(form.units(&self.stencil)) * form.scratch_len(&self.stencil)
            }
            Form::Depthwise(_) => 0,
            Form::Turned(form) => self.threads.min(form.units(&self.stencil)) * form.scratch_len(),
            Form::Runs(form) => {
                self.threads.min(form.units(&self.stencil)) * form.scratch_len(&self.stencil)
            }
        }
    }

    /// Elements of the packed filter.
    pub(crate) fn packed_len(&self) -> usize {
        let Stencil { groups, k, .. } = self.stencil;
        let terms = match &self.form {
            Form::Tiled(form) => return groups * form.packed_group_len(&self.stencil),
            Form::Pairs(form) => form.terms(),
            Form::Planar(_)
            | Form::Plane(_)
            | Form::Depthwise(_)
            | Form::Turned(_)
            | Form::Runs(_) => self.stencil.terms(),
        };
        groups * k.next_multiple_of(self.panel()) * terms
    }

    /// Channels that lie next to each other in the packed filter.
    pub(crate) fn packed_width(&self) -> usize {
        match &self.form {
            Form::Planar(form) => form.rows,
            Form::Pairs(form) => form.packed_width(),
            Form::Tiled(form) => form.packed_width(),
            // Equal to a form with vectors over pixels and one channel at once.
            Form::Plane(_) => 1,
            Form::Depthwise(form) => form.packed_width(&self.stencil),
            Form::Turned(_) => self.stencil.groups,
            Form::Runs(form) => form.packed_width(),
        }
    }

    /// Channels of a group in a panel of the packed filter.
    fn panel(&self) -> usize {
        match &self.form {
            Form::Planar(form) => form.rows,
            Form::Pairs(form) => form.planar.rows,
            Form::Runs(form) => form.packed_width(),
            Form::Plane(_) | Form::Tiled(_) | Form::Depthwise(_) | Form::Turned(_) => 1,
        }
    }

    /// Packs the filter: [group, panel, c, filter row, filter column, channel of the panel] with
    /// zeros beyond k, or [filter row, c, filter column, group, channel of the group], or as [`pack_filter`].
    ///
    /// # Safety
    /// The stencil's filter elements are readable from `filter`.
    pub(crate) unsafe fn pack<T: SimdElement>(&self, filter: *const T, packed: &mut [f32]) {
        let stencil = &self.stencil;
        if let Form::Tiled(form) = &self.form {
            let (isa, threads) = (self.isa, self.threads);
            // SAFETY: passed on.
            return unsafe {
                match T::DTYPE {
                    DType::F32 => form.pack::<f32>(isa, stencil, threads, filter.cast(), packed),
                    DType::BF16 => form.pack::<bf16>(isa, stencil, threads, filter.cast(), packed),
                    DType::F16 | not_computed!() => unreachable!("no tiles of {}", T::DTYPE),
                }
            };
        }
        if let Form::Runs(form) = &self.form {
            assert!(packed.len() >= self.packed_len(), "packed filter: too little memory");
            let (isa, threads, to) = (self.isa, self.threads, packed.as_mut_ptr());
            // SAFETY: passed on.
            return unsafe { pack_filter(stencil, isa, threads, form.packed_width(), filter, to) };
        }
        let read = |group, k, c, row, col| {
            if k >= stencil.k {
                return 0.0;
            }
            // SAFETY: the offset of one of the filter's elements.
            unsafe { filter.offset(stencil.filter_offset(group, k, c, row, col)).read().to_f32() }
        };
        let mut packed = packed.iter_mut();
        let mut put = |value| *packed.next().expect("packed filter: too little memory") = value;
        match &self.form {
            Form::Depthwise(_) | Form::Turned(_) => {
                for &row in stencil.rows.iter() {
                    for c in 0..stencil.c {
                        for &col in stencil.cols.iter() {
                            for group in 0..stencil.groups {
                                (0..stencil.k).for_each(|k| put(read(group, k, c, row, col)));
                            }
                        }
                    }
                }
            }
            Form::Pairs(form) => {
                for group in 0..stencil.groups {
                    for first in (0..stencil.k).step_by(form.planar.rows) {
                        let read = |k, [c, row, col]: [usize; 3]| {
                            read(group, k, c, stencil.rows[row], stencil.cols[col])
                        };
                        form.pack(first, read, &mut put);
                    }
                }
            }
            Form::Tiled(_) | Form::Runs(_) => unreachable!("packed above"),
            Form::Planar(_) | Form::Plane(_) => {
                let rows = self.panel();
                for group in 0..stencil.groups {
                    for first in (0..stencil.k).step_by(rows) {
                        for c in 0..stencil.c {
                            for &row in stencil.rows.iter() {
                                for &col in stencil.cols.iter() {
                                    (first..first + rows)
                                        .for_each(|k| put(read(group, k, c, row, col)));
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    /// # Safety
    /// Source and destination elements of the stencil are in memory, the destination's touched by
    /// nobody else; `packed` was written by [`Direct::pack`] of an equal plan; `scratch` holds
    /// [`Direct::scratch_len`] elements.
    pub(crate) unsafe fn run<T: SimdElement>(
        &self,
        packed: &[f32],
        src: *const T,
        dst: *mut T,
        epilogue: Epilogue,
        scratch: *mut f32,
    ) {
        let (stencil, isa) = (&self.stencil, self.isa);
        let units = match &self.form {
            Form::Planar(form) => form.units(stencil),
            Form::Pairs(form) => form.planar.units(stencil),
            Form::Tiled(form) => form.units(stencil),
            Form::Plane(form) => form.units(stencil),
            Form::Depthwise(form) => form.units(stencil),
            Form::Turned(form) => form.units(stencil),
            Form::Runs(form) => form.units(stencil),
        };
        let operands = Operands { packed, src, dst, epilogue };
        let operands = &operands;
        let scratch = SendPtr(scratch);
        let chunk = units.div_ceil(self.threads * TASKS_PER_THREAD).max(1);
        parallel_for_workers(self.threads, units.div_ceil(chunk), |worker, task| {
            for unit in task * chunk..((task + 1) * chunk).min(units) {
                // SAFETY: units write separate elements; each worker has its own scratch memory.
                unsafe {
                    match &self.form {
                        Form::Planar(form) => {
                            let scratch = scratch.get().add(worker * form.scratch_len());
                            form.run(isa, stencil, unit, operands, scratch);
                        }
                        Form::Pairs(form) => {
                            let scratch = scratch.get().add(worker * form.scratch_len());
                            form.run(isa, stencil, unit, &operands.of(), scratch);
                        }
                        Form::Tiled(form) => {
                            let scratch = scratch.get().add(worker * form.scratch_len(stencil));
                            match T::DTYPE {
                                DType::F32 => {
                                    form.run::<f32>(isa, stencil, unit, &operands.of(), scratch);
                                }
                                DType::BF16 => {
                                    form.run::<bf16>(isa, stencil, unit, &operands.of(), scratch);
                                }
                                DType::F16 | not_computed!() => {
                                    unreachable!("no tiles of {}", T::DTYPE)
                                }
                            }
                        }
                        Form::Plane(form) => {
                            let scratch = scratch.get().add(worker * form.scratch_len(stencil));
                            form.run(isa, stencil, unit, operands, scratch);
                        }
                        Form::Depthwise(form) => form.run(isa, stencil, unit, operands),
                        Form::Turned(form) => {
                            let scratch = scratch.get().add(worker * form.scratch_len());
                            form.run(isa, stencil, unit, operands, scratch);
                        }
                        Form::Runs(form) => {
                            let scratch = scratch.get().add(worker * form.scratch_len(stencil));
                            form.run(isa, stencil, unit, operands, scratch);
                        }
                    }
                }
            }
        });
    }
}

/// What a run reads and writes.
struct Operands<'a, T> {
    packed: &'a [f32],
    src: *const T,
    dst: *mut T,
    epilogue: Epilogue,
}

impl<T> Operands<'_, T> {
    /// The same where T is U.
    fn of<U>(&self) -> Operands<'_, U> {
        let Operands { packed, src, dst, epilogue } = *self;
        Operands { packed, src: src.cast(), dst: dst.cast(), epilogue }
    }
}

// SAFETY: filter, source and bias are only read; each destination element is written by one unit.
unsafe impl<T> Sync for Operands<'_, T> {}
