//! An activation in a pass of its own: where a residual is added, sums leave for the destination with bounds alone.

use super::epilogue::{Epilogue, scatter};
use crate::conv2d::Conv2dSpec;
use crate::cpu::math::activate;
use crate::cpu::{Isa, Kernel, MAX_LANES, SendPtr, Simd, SimdElement, dispatch, parallel_for};
use crate::dtype::with_element;
use crate::{Activation, TensorMut};
use std::ops::Range;

/// Elements of a task, about.
const TASK: usize = 1 << 14;

/// True if the activation of results with a residual is a separate pass, by [`apply`].
pub(crate) fn follows(spec: &Conv2dSpec) -> bool {
    let epilogue = Epilogue { activation: spec.activation, ..Epilogue::NONE };
    spec.residual && epilogue.bounds().is_none()
}

/// Applies it to every element of a tensor of rank 4.
pub(crate) fn apply(y: &mut TensorMut<'_>, activation: Activation, isa: Isa, threads: usize) {
    let mut dims: [(usize, isize); 4] = std::array::from_fn(|d| (y.shape()[d], y.strides()[d]));
    // Neighbours last.
    dims.sort_by_key(|&(_, stride)| std::cmp::Reverse(stride.unsigned_abs()));
    let lines: usize = dims[..3].iter().map(|&(size, _)| size).product();
    let at_once = TASK.div_ceil(dims[3].0.max(1));
    with_element!(y.dtype(), T => {
        let start = SendPtr(y.as_mut_ptr().cast::<T>());
        parallel_for(threads, lines.div_ceil(at_once), |task| {
            let lines = task * at_once..((task + 1) * at_once).min(lines);
            dispatch(isa, Lines { start: start.get(), dims, lines, activation });
        });
    });
}

/// Some lines of neighbours.
struct Lines<T> {
    start: *mut T,
    /// Sizes and strides.
    dims: [(usize, isize); 4],
    lines: Range<usize>,
    activation: Activation,
}

impl<T: SimdElement> Kernel for Lines<T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Lines { start, dims: [first, second, third, (len, stride)], lines, activation } = self;
        for line in lines {
            let (rest, i) = (line / third.0, line % third.0);
            let at = i as isize * third.1
                + (rest % second.0) as isize * second.1
                + (rest / second.0) as isize * first.1;
            for j in (0..len).step_by(S::LANES) {
                let count = S::LANES.min(len - j);
                // SAFETY: elements of the tensor, each of which one line has.
                unsafe {
                    let at = start.offset(at + j as isize * stride);
                    let mut lanes = [0f32; MAX_LANES];
                    for (i, lane) in lanes.iter_mut().enumerate().take(count) {
                        *lane = at.offset(i as isize * stride).read().to_f32();
                    }
                    let y = activate(s, activation, s.load(lanes.as_ptr()));
                    scatter(s, y, at, stride, count);
                }
            }
        }
    }
}
