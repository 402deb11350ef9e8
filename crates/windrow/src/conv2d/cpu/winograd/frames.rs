//! V of a video: the channels of one frame of the filter after those of the other.

use super::super::shared::frames::{FrameSource, FrameTaps};
use super::geometry::Geometry;
use super::input::InputTransform;
use crate::TensorRef;
use crate::cpu::{Isa, SimdElement, dispatch};
use std::ops::Range;
use std::sync::Arc;

/// The frames that images read, and the channels of each.
#[derive(Clone, Debug)]
pub(super) struct FrameInput {
    pub taps: Arc<FrameTaps>,
    pub c: usize,
}

impl FrameInput {
    /// Vectors of channels of a frame.
    pub(super) fn vectors(&self, lanes: usize) -> usize {
        self.c.div_ceil(lanes)
    }

    /// Transforms what a frame of the filter reads to where `transform` says, or writes zeros for images that read no
    /// frame. The channels are those of the transform's geometry; `initial` has the first of them in the initial frames.
    pub(super) fn transform<X: SimdElement, const A: usize>(
        &self,
        isa: Isa,
        lanes: usize,
        tap: usize,
        initial: Option<*const X>,
        transform: InputTransform<'_, X, A>,
    ) {
        let InputTransform { geometry, strides, ref tiles, v, v_strides, .. } = transform;
        let image = geometry.grid[0] * geometry.grid[1];
        let [_, src @ ..] = strides;
        for (images, source) in self.taps.sources(tap, geometry.problem.n, src) {
            let start = (images.start * image).max(tiles.start);
            let part = start..(images.end * image).min(tiles.end);
            if part.is_empty() {
                continue;
            }
            let v = v.wrapping_add((part.start - tiles.start) * lanes);
            let Some(FrameSource { is_initial, offset, strides }) = source else {
                let vectors = geometry.problem.c.div_ceil(lanes);
                zero::<A>(v, v_strides, [vectors, part.len() * lanes]);
                continue;
            };
            let x = if is_initial { initial.unwrap_or(std::ptr::null()) } else { transform.x };
            // Images are counted from 0.
            let first = (images.start as isize).wrapping_mul(strides[0]);
            let x = x.wrapping_offset(offset).wrapping_offset(first.wrapping_neg());
            dispatch(isa, InputTransform { x, strides, tiles: part, v, ..transform });
        }
    }
}

/// Zeros for some tiles of V: so many vectors of channels, each of so many elements.
fn zero<const A: usize>(v: *mut f32, strides: [usize; 2], [vectors, len]: [usize; 2]) {
    for position in 0..A * A {
        for vector in 0..vectors {
            // SAFETY: whoever makes an `InputTransform` has room for the vectors of its tiles.
            unsafe {
                std::ptr::write_bytes(v.add(position * strides[0] + vector * strides[1]), 0, len)
            };
        }
    }
}

/// V of a block of tiles, of a video for every frame of the filter, with the initial frames that it may read.
pub(super) fn transform<X: SimdElement, const A: usize>(
    isa: Isa,
    lanes: usize,
    frames: Option<(&FrameInput, Option<&TensorRef<'_>>)>,
    transform: InputTransform<'_, X, A>,
) {
    let Some((frames, initial)) = frames else { return dispatch(isa, transform) };
    let initial = initial.map(|initial| initial.as_ptr().cast());
    let mut geometry = *transform.geometry;
    geometry.problem.c = frames.c;
    let InputTransform { x, strides, tiles, staging, v, v_strides, .. } = transform;
    for tap in 0..frames.taps.len() {
        let v = v.wrapping_add(tap * frames.vectors(lanes) * v_strides[1]);
        let (geometry, tiles): (&Geometry, Range<usize>) = (&geometry, tiles.clone());
        let transform = InputTransform { geometry, x, strides, tiles, staging, v, v_strides };
        frames.transform::<X, A>(isa, lanes, tap, initial, transform);
    }
}
