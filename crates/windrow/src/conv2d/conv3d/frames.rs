//! The frames before a video: as the oracle reads them, and the state after a chunk.

use super::{Conv3dArgs, Conv3dSpec};
use crate::conv2d::problem::Frames;
use crate::conv2d::{Problem, TimePadding};
use crate::cpu::{SendPtr, parallel_for};
use crate::dtype::with_element;
use crate::lists::room_for;
use crate::{Element, Result, TensorDesc, TensorMut, TensorRef};

/// The video with the frames before it, [n, c, frames, h, w], and the sizes of the convolution of all of them. Without a
/// causal convolution it is the video itself.
pub(super) fn with_frames_before(
    spec: &Conv3dSpec,
    p: &Problem,
    args: &Conv3dArgs<'_>,
) -> Result<(Vec<f64>, Problem)> {
    let x = args.x.to_f64_vec()?;
    let Frames { t, padding, .. } = p.frames;
    if spec.params.time_padding == TimePadding::Zeros || padding == 0 {
        return Ok((x, *p));
    }
    let initial = args.initial_frames.as_ref().map(TensorRef::to_f64_vec).transpose()?;
    let pixels = p.h * p.w;
    let mut all = room_for(p.n * p.c * (padding + t) * pixels)?;
    for channel in 0..p.n * p.c {
        let of = |video: &'_ Vec<f64>, frames: usize, first: usize, count: usize| {
            let at = (channel * frames + first) * pixels;
            video[at..at + count * pixels].to_vec()
        };
        match (&initial, spec.params.time_padding) {
            (Some(initial), _) => all.extend(of(initial, padding, 0, padding)),
            (None, TimePadding::CausalRepeat) => {
                (0..padding).for_each(|_| all.extend(of(&x, t, 0, 1)));
            }
            (None, _) => all.resize(all.len() + padding * pixels, 0.0),
        }
        all.extend(of(&x, t, 0, t));
    }
    let frames = Frames { t: padding + t, padding: 0, ..p.frames };
    Ok((all, Problem { frames, ..*p }))
}

/// The last frames of a video with those before it, as [`with_frames_before`] gives it.
pub(super) fn last(all: &[f64], p: &Problem, count: usize) -> Vec<f64> {
    let (frames, pixels) = (p.frames.t, p.h * p.w);
    let channels = 0..p.n * p.c;
    let of = |channel| &all[(channel * frames + frames - count) * pixels..][..count * pixels];
    channels.flat_map(|channel| of(channel).iter().copied()).collect()
}

/// A tensor with elements of a type.
struct Place<T> {
    start: SendPtr<T>,
    strides: [isize; 5],
}

impl<T> Place<T> {
    fn new(start: *const u8, desc: &TensorDesc) -> Self {
        let strides = std::array::from_fn(|d| desc.strides()[d]);
        Place { start: SendPtr(start.cast_mut().cast()), strides }
    }

    fn at(&self, index: [usize; 5]) -> *mut T {
        let offsets = index.iter().zip(self.strides).map(|(&i, stride)| i as isize * stride);
        let SendPtr(start) = self.start;
        start.wrapping_offset(offsets.sum())
    }
}

/// Writes the last frames of x with those before it to `to`. The caller has checked the tensors; `to` may be the memory of
/// the initial frames, of equal layout.
pub(super) fn write_last(
    spec: &Conv3dSpec,
    p: &Problem,
    args: &Conv3dArgs<'_>,
    to: &mut TensorMut<'_>,
    threads: usize,
) {
    let Frames { t, padding, .. } = p.frames;
    if to.layout().is_empty() {
        return;
    }
    let repeats = spec.params.time_padding == TimePadding::CausalRepeat;
    with_element!(to.dtype(), T => {
        let x = Place::<T>::new(args.x.as_ptr(), args.x.desc());
        let initial = args.initial_frames.as_ref();
        let initial = initial.map(|view| Place::<T>::new(view.as_ptr(), view.desc()));
        let to = Place::<T>::new(to.as_ptr(), to.desc());
        parallel_for(threads, p.n * p.c, |channel| {
            let (n, c) = (channel / p.c, channel % p.c);
            // Frame by frame, so that a frame is read before it is written.
            for (frame, row) in (0..padding).flat_map(|f| (0..p.h).map(move |row| (f, row))) {
                for column in 0..p.w {
                    let at = |frame| [n, c, frame, row, column];
                    let from = match ((t + frame).checked_sub(padding), &initial) {
                        (Some(frame), _) => Some(x.at(at(frame))),
                        (None, Some(initial)) => Some(initial.at(at(frame + t))),
                        (None, None) => repeats.then(|| x.at(at(0))),
                    };
                    // SAFETY: elements of tensors that the caller has checked; each channel is one task.
                    unsafe {
                        let value = from.map_or(T::from_f64(0.0), |from| from.read());
                        to.at(at(frame)).write(value);
                    }
                }
            }
        });
    });
}
