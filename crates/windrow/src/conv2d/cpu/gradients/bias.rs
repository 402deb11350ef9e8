//! The bias's gradient: sums of the output's gradient over pixels.

use super::super::gradient::with_gradient;
use super::super::method::Task;
use super::super::shared::stencil::Stencil;
use crate::cpu::{Isa, Kernel, MAX_LANES, SendPtr, Simd, SimdElement, dispatch, parallel_for};
use crate::{DType, TensorMut, TensorRef};

/// The gradient of a bias.
#[derive(Debug)]
pub(crate) struct BiasGradient {
    /// Its destination is dy.
    stencil: Stencil,
    isa: Isa,
    threads: usize,
}

impl BiasGradient {
    pub(super) fn new(task: Task<'_>) -> Self {
        BiasGradient { stencil: task.stencil, isa: task.isa, threads: task.threads }
    }

    /// The allowed error of an element, relative to its scale: a row is summed in f32, the rest in f64.
    pub(crate) fn tolerance(&self) -> f64 {
        (self.stencil.dst_size[1] + 2) as f64 * DType::F32.unit_roundoff()
    }

    /// The gradient into `db` of views that agree with the spec.
    pub(crate) fn run(&self, dy: &TensorRef<'_>, db: &mut TensorMut<'_>) {
        let (to, stride) = (db.as_mut_ptr(), db.strides()[0]);
        // SAFETY: the stencil was made for this layout; db is borrowed mutably.
        with_gradient!(dy.dtype(), db.dtype(), (T, B) => unsafe {
            self.sum(dy.as_ptr().cast::<T>(), to.cast::<B>(), stride);
        });
    }

    /// Writes `db` [channel] with stride `stride`. Rows of pixels are summed in f32, rows in f64, in an
    /// order that does not depend on threads.
    ///
    /// # Safety
    /// The elements of dy and db are in memory, and nothing else accesses those of db.
    unsafe fn sum<T: SimdElement, B: SimdElement>(&self, dy: *const T, db: *mut B, stride: isize) {
        let BiasGradient { stencil, isa, threads } = self;
        let (dy, db) = (SendPtr(dy.cast_mut()), SendPtr(db));
        let channels = stencil.groups * stencil.k;
        parallel_for(*threads, channels.div_ceil(MAX_LANES), |task| {
            let channels = task * MAX_LANES..((task + 1) * MAX_LANES).min(channels);
            let (first, count) = (channels.start, channels.len());
            let sums = dispatch(*isa, Sums { stencil, dy: dy.get(), first, count });
            for (k, sum) in channels.zip(sums) {
                // SAFETY: each channel is written by one task.
                unsafe { db.get().offset(k as isize * stride).write(B::from_f64(sum)) };
            }
        });
    }
}

/// The sums of up to MAX_LANES channels.
struct Sums<'a, T> {
    stencil: &'a Stencil,
    dy: *const T,
    first: usize,
    count: usize,
}

impl<T: SimdElement> Kernel for Sums<'_, T> {
    type Output = [f64; MAX_LANES];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [f64; MAX_LANES] {
        let [n_stride, k_stride, row_stride, col_stride] = self.stencil.dst;
        let mut sums = [0.0; MAX_LANES];
        for segment in self.stencil.segments(0..self.stencil.pixels()) {
            let row = self.dy.wrapping_offset(
                segment.n as isize * n_stride
                    + self.first as isize * k_stride
                    + segment.i as isize * row_stride,
            );
            // SAFETY: channels and pixels of dy.
            unsafe {
                if k_stride == 1 {
                    for lane in (0..self.count).step_by(S::LANES) {
                        let count = S::LANES.min(self.count - lane);
                        let mut sum = s.zero();
                        for j in 0..segment.len {
                            let p = row.offset(lane as isize + j as isize * col_stride);
                            sum = s.add(sum, T::load_first(s, p, count));
                        }
                        let mut lanes = [0f32; MAX_LANES];
                        s.store(lanes.as_mut_ptr(), sum);
                        for (i, sum) in sums[lane..][..count].iter_mut().enumerate() {
                            *sum += f64::from(lanes[i]);
                        }
                    }
                } else {
                    for (k, sum) in sums.iter_mut().enumerate().take(self.count) {
                        let row = row.offset(k as isize * k_stride);
                        *sum += f64::from(sum_row(s, row, col_stride, segment.len));
                    }
                }
            }
        }
        sums
    }
}

/// # Safety
/// `len` elements `stride` apart are readable.
#[inline(always)]
unsafe fn sum_row<S: Simd, T: SimdElement>(s: S, row: *const T, stride: isize, len: usize) -> f32 {
    // SAFETY: promised by the caller.
    unsafe {
        if stride != 1 {
            return (0..len as isize).map(|j| row.offset(j * stride).read().to_f32()).sum();
        }
        let mut sum = s.zero();
        for j in (0..len).step_by(S::LANES) {
            let count = S::LANES.min(len - j);
            sum = s.add(sum, T::load_first(s, row.add(j), count));
        }
        s.reduce_add(sum)
    }
}
