//! V of a range of tiles at once, where the tasks that follow share it.

use super::frames::FrameInput;
use super::geometry::Geometry;
use super::input::{InputTransform, STAGING};
use super::strides4;
use crate::TensorRef;
use crate::cpu::{Isa, SendPtr, SimdElement, dispatch, parallel_for_workers};
use std::ops::Range;

/// Tiles, and vectors of channels, that one task transforms at most.
const TILES_AT_ONCE: usize = 16;
const VECTORS_AT_ONCE: usize = 8;

/// A part of what is transformed to [position, vector, tile, LANES].
pub(super) struct Part {
    pub tiles: Range<usize>,
    pub channels: Range<usize>,
    /// The start of the memory.
    pub offset: usize,
}

/// Calls for each part of some tiles and of so many channels, several at once, with the worker; `vector_stride` lies
/// between vectors of channels.
pub(super) fn in_parts(
    threads: usize,
    tiles: &Range<usize>,
    channels: usize,
    (lanes, vector_stride): (usize, usize),
    call: impl Fn(usize, Part) + Sync,
) {
    let vectors = channels.div_ceil(lanes);
    let rows = tiles.len().div_ceil(TILES_AT_ONCE);
    // Fewer vectors where threads would have nothing to do.
    let at_once = (rows * vectors).div_ceil(threads.max(1)).clamp(1, VECTORS_AT_ONCE);
    let columns = vectors.div_ceil(at_once);
    parallel_for_workers(threads, rows * columns, |worker, task| {
        let (row, column) = (task / columns * TILES_AT_ONCE, task % columns * at_once);
        let (tile, channel) = (tiles.start + row, column * lanes);
        let part = Part {
            tiles: tile..tiles.end.min(tile + TILES_AT_ONCE),
            channels: channel..channels.min(channel + at_once * lanes),
            offset: column * vector_stride + row * lanes,
        };
        call(worker, part);
    });
}

/// The destination of V for a range of tiles.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedInput<'a> {
    pub geometry: &'a Geometry,
    pub frames: Option<&'a FrameInput>,
    pub isa: Isa,
    pub lanes: usize,
    pub threads: usize,
    pub tiles: &'a Range<usize>,
    /// V [position, c / LANES, tile, LANES]
    pub v: SendPtr<f32>,
    /// Distances between positions and between channel vectors of V.
    pub v_strides: [usize; 2],
    /// [`STAGING`] elements for each thread.
    pub staging: SendPtr<f32>,
}

impl SharedInput<'_> {
    /// Transforms x, `A` = alpha.
    ///
    /// # Safety
    /// x is the problem's, of type X; V and the staging memory are as documented.
    pub(super) unsafe fn transform<X: SimdElement, const A: usize>(
        &self,
        x: &TensorRef<'_>,
        initial: Option<&TensorRef<'_>>,
    ) {
        let SharedInput { geometry, frames, isa, lanes, threads, tiles, v, v_strides, staging } =
            *self;
        let strides = strides4(x.strides());
        let x = SendPtr(x.as_ptr().cast_mut());
        let initial_stride = initial.map_or(0, |initial| initial.strides()[1]);
        let initial = initial.map(|initial| SendPtr(initial.as_ptr().cast_mut()));
        let channels = frames.map_or(geometry.problem.c, |frames| frames.c);
        for frame in 0..frames.map_or(1, |frames| frames.taps.len()) {
            let before = frame * channels.div_ceil(lanes) * v_strides[1];
            in_parts(threads, tiles, channels, (lanes, v_strides[1]), |worker, part| {
                // The channels of this task as all there are.
                let mut geometry = *geometry;
                geometry.problem.c = part.channels.len();
                let first = part.channels.start as isize * strides[1];
                let transform = InputTransform::<X, A> {
                    geometry: &geometry,
                    x: x.get().cast_const().cast::<X>().wrapping_offset(first),
                    strides,
                    tiles: part.tiles,
                    // SAFETY: a thread has its own staging memory; each task writes its own tiles and channels of V.
                    staging: unsafe { staging.get().add(worker * STAGING) },
                    // SAFETY: a part of V, which holds all tiles and channels.
                    v: unsafe { v.get().add(before + part.offset) },
                    v_strides,
                };
                match frames {
                    Some(frames) => {
                        let first = part.channels.start as isize * initial_stride;
                        let initial = initial.as_ref().map(|initial| {
                            initial.get().cast_const().cast::<X>().wrapping_offset(first)
                        });
                        frames.transform(isa, lanes, frame, initial, transform);
                    }
                    None => dispatch(isa, transform),
                }
            });
        }
    }
}
