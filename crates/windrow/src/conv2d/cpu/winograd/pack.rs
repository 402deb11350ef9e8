//! Packing of filters: U, in panels of output channels.

use super::filter::FilterTransform;
use super::{WinogradCpu, gemm, strides4};
use crate::TensorRef;
use crate::conv2d::cpu::Prepared;
use crate::conv2d::{Problem, Tile};
use crate::cpu::{MAX_LANES, SendPtr, SimdElement, dispatch, last_level_cache, parallel_for};
use std::ops::Range;

/// Input channels of a panel of the filter that a task packs where panels would leave threads idle.
const CHANNELS_AT_ONCE: usize = 32;

impl WinogradCpu {
    pub(super) fn pack_from<W: SimdElement>(&self, w: &TensorRef<'_>, packed: &mut [f32]) {
        match self.tile {
            Tile::F2 => self.pack_panels::<W, 4>(w, packed),
            Tile::F4 => self.pack_panels::<W, 6>(w, packed),
            Tile::F6 => self.pack_panels::<W, 8>(w, packed),
        }
    }

    fn pack_panels<W: SimdElement, const A: usize>(&self, w: &TensorRef<'_>, packed: &mut [f32]) {
        assert!(packed.len() >= self.packed_len(), "packed filter");
        let u = SendPtr(packed.as_mut_ptr());
        let far = 2 * size_of::<f32>() * self.packed_len() > last_level_cache()
            && u.get().addr().is_multiple_of(MAX_LANES * size_of::<f32>());
        let strides = strides4(w.strides());
        let w = SendPtr(w.as_ptr().cast_mut());
        let all = self.geometry.problem.c;
        let [frames, c, frame_c] = match &self.frames {
            Some(frames) => [frames.taps.len(), frames.c, frames.vectors(self.lanes) * self.lanes],
            None => [1, all, all],
        };
        if frames * c < all {
            // What fills the vectors of each frame.
            packed[..self.packed_len()].fill(0.0);
        }
        let frame_at = |frame| self.frames.as_ref().map_or(0, |frames| frames.taps.filter(frame));
        let panels = self.vectors().div_ceil(gemm::PANEL);
        // Parts of the input channels where panels are fewer than threads.
        let at_once = if panels < self.threads { CHANNELS_AT_ONCE } else { c.max(1) };
        let parts = c.div_ceil(at_once).max(1);
        parallel_for(self.threads, panels * frames * parts, |task| {
            let (first, task) = (task % parts * at_once, task / parts);
            let (frame, panel) = (task % frames, task / frames);
            // SAFETY: inside of U, whose panels before it are whole.
            let u = unsafe { u.get().add(panel * gemm::PANEL * self.lanes * all) };
            let at = first as isize * strides[1] + frame_at(frame);
            let w = w.get().cast_const().cast::<W>().wrapping_offset(at);
            let transform =
                self.filter_transform::<W, A>(w, strides, panel, (u, self.u_position()));
            let u = u.wrapping_add((frame * frame_c + first) * transform.width);
            let c = at_once.min(c - first);
            dispatch(self.isa, FilterTransform { c, u, far, ..transform });
        });
    }

    /// Transforms a panel of output channels of `w` and writes it to `u`.
    pub(super) fn filter_transform<W: SimdElement, const A: usize>(
        &self,
        w: *const W,
        strides: [isize; 4],
        panel: usize,
        (u, u_position): (*mut f32, usize),
    ) -> FilterTransform<W, A> {
        let Problem { c, .. } = self.geometry.problem;
        let channels = self.channels(panel);
        let width = channels.len().next_multiple_of(self.lanes);
        FilterTransform { c, w, strides, channels, width, u, u_position, far: false }
    }

    /// Output channels of a panel.
    pub(super) fn channels(&self, panel: usize) -> Range<usize> {
        let at = |panel: usize| self.geometry.problem.k.min(panel * gemm::PANEL * self.lanes);
        at(panel)..at(panel + 1)
    }
}
