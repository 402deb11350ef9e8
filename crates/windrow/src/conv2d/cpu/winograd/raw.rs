//! Runs with the filter itself.
//!
//! Where few tiles share it, V is formed once for all of them; then each task packs a panel of the filter into the
//! second-level cache, some input channels at a time, multiplies, and transforms back before it takes another panel, so
//! that U never is in memory as a whole. Else as much of the filter is packed at once as fits, and the pipeline runs for its
//! channels.

use super::super::shared::epilogue::Epilogue;
use super::filter::FilterTransform;
use super::gemm::{BLOCK, Gemm, PANEL};
use super::geometry::Geometry;
use super::output::{self, OutputTransform};
use super::prefetch::{Ahead, Prefetch};
use super::shared::SharedInput;
use super::{Products, WinogradCpu, strides4};
use crate::conv2d::cpu::shared::{bias_len, floats_mut, stage_bias};
use crate::conv2d::cpu::{Prepared, Run};
use crate::conv2d::{Problem, Tile};
use crate::cpu::{MAX_LANES, SendPtr, SimdElement, dispatch, parallel_for_workers};
use crate::dtype::with_element;
use crate::{TensorMut, TensorRef};

/// Elements of a packed filter that a run packs at once when it is given the filter itself.
const RAW_LEN: usize = 8 << 20;

/// Tiles up to which V is shared: with more, V of all leaves the caches before the next panel reads it.
const SHARED_TILES: usize = 96;

/// True if tasks share V when the run is given an unpacked filter.
pub(super) fn shares_input(geometry: &Geometry) -> bool {
    geometry.tiles() <= SHARED_TILES
}

impl WinogradCpu {
    /// The bytes as in [`Prepared::raw_bytes`].
    pub(super) fn raw_workspace_bytes(&self) -> usize {
        if self.packs_by_panels() {
            let slots = self.threads.min(self.panels()) * self.panel_slot_len();
            let v = self.v_len_of(self.geometry.tiles());
            return (bias_len(self.geometry.problem.k) + v + slots) * size_of::<f32>();
        }
        self.raw_len() * size_of::<f32>() + self.workspace_bytes()
    }

    /// Elements of what is packed at once.
    fn raw_len(&self) -> usize {
        let len = self.positions() * self.raw_vectors() * self.lanes * self.geometry.problem.c;
        len.next_multiple_of(MAX_LANES)
    }

    /// Vectors of output channels whose filters are packed at once, in whole panels.
    fn raw_vectors(&self) -> usize {
        let panel = PANEL * self.positions() * self.lanes * self.geometry.problem.c;
        (RAW_LEN / panel.max(1)).max(1).saturating_mul(PANEL).min(self.vectors())
    }

    /// Does the same as [`Prepared::run_raw`]. The result has the bits of a run with a packed filter.
    pub(super) fn run_filter(&self, w: &TensorRef<'_>, run: Run<'_, '_>) {
        if self.packs_by_panels() {
            return with_element!(w.dtype(), T => match self.tile {
                Tile::F2 => self.run_shared::<T, 4>(w, run),
                Tile::F4 => self.run_shared::<T, 6>(w, run),
                Tile::F6 => self.run_shared::<T, 8>(w, run),
            });
        }
        let Run { x, initial, bias, residual, activation, y, workspace } = run;
        let (packed, workspace) = workspace.split_at_mut(self.raw_len() * size_of::<f32>());
        let packed = floats_mut(packed);
        let Problem { k, .. } = self.geometry.problem;
        let channels_at_once = self.raw_vectors().max(1) * self.lanes;
        for first in (0..k).step_by(channels_at_once) {
            let channels = first..k.min(first + channels_at_once);
            let exist = "the channels exist";
            let w = w.narrow(0, channels.clone()).expect(exist);
            let bias = bias.map(|bias| bias.narrow(0, channels.clone()).expect(exist));
            let desc = *y.as_ref().narrow(1, channels.clone()).expect(exist).desc();
            let bytes = first as isize * y.strides()[1] * y.dtype().size() as isize;
            let start = y.as_mut_ptr().wrapping_offset(bytes);
            // SAFETY: a part of y, which is borrowed mutably, on the same device.
            let part = unsafe { TensorMut::from_raw(start.cast(), desc, y.device()) };
            let y = &mut part.expect("elements of y have their own memory");
            let problem = Problem { k: channels.len(), ..self.geometry.problem };
            // The same blocks, so that it fits the same workspace.
            let geometry = Geometry::new(&problem, self.tile.m());
            let blocking = self.blocking.within(channels.len().div_ceil(self.lanes));
            let engine = WinogradCpu { geometry, blocking, ..self.clone() };
            engine.pack(&w, packed);
            let (bias, workspace) = (bias.as_ref(), &mut *workspace);
            engine.run(packed, Run { x, initial, bias, residual, activation, y, workspace });
        }
    }

    /// True if each task packs one panel at a time, and tasks share V. With fewer panels than threads some threads
    /// would be idle, so all of them pack first.
    fn packs_by_panels(&self) -> bool {
        // Tiles would split V for each panel. Frames are packed one after the other.
        self.products == Products::Vectors
            && self.frames.is_none()
            && shares_input(&self.geometry)
            && self.panels() >= self.threads
    }

    /// Panels of output channels, each a task where V is shared.
    fn panels(&self) -> usize {
        self.vectors().div_ceil(PANEL)
    }

    /// Strides of M of a panel and all tiles.
    fn panel_strides(&self) -> [usize; 2] {
        self.m_strides_of(self.geometry.tiles(), PANEL)
    }

    /// Elements of U of a panel, of the input channels that are multiplied at once.
    fn panel_len(&self) -> usize {
        self.positions() * PANEL * self.lanes * self.geometry.problem.c.min(BLOCK)
    }

    /// Elements of U and M of a panel and of the staging memory of the output.
    fn panel_slot_len(&self) -> usize {
        let m = self.positions() * self.panel_strides()[0];
        (self.panel_len() + m + output::STAGING).next_multiple_of(MAX_LANES)
    }

    fn run_shared<X: SimdElement, const A: usize>(&self, w: &TensorRef<'_>, run: Run<'_, '_>) {
        let Run { x, bias, residual, activation, y, workspace, .. } = run;
        assert!(workspace.len() >= self.raw_bytes(), "workspace");
        let p = &self.geometry.problem;
        let (bias, memory) = stage_bias(bias, p.k, workspace);
        let epilogue = Epilogue { bias: bias.as_ptr(), residual, activation };
        let tiles = 0..self.geometry.tiles();
        let (v_strides, m_strides) = (self.v_strides_of(tiles.len()), self.panel_strides());
        let v = SendPtr(memory.as_mut_ptr());
        // SAFETY: `v_len_of` is the sum of V and the staging memory, before the slots.
        let [staging, slots] = unsafe {
            [self.positions() * v_strides[0], self.v_len_of(tiles.len())]
                .map(|offset| SendPtr(v.get().add(offset)))
        };
        let input = SharedInput {
            geometry: &self.geometry,
            frames: None,
            isa: self.isa,
            lanes: self.lanes,
            threads: self.threads,
            tiles: &tiles,
            v,
            v_strides,
            staging,
        };
        // SAFETY: x agrees with the problem; the memory is as large as asked for.
        unsafe { input.transform::<X, A>(x, None) };
        let (w_strides, y_strides) = (strides4(w.strides()), strides4(y.strides()));
        let (w, y) = (SendPtr(w.as_ptr().cast_mut()), SendPtr(y.as_mut_ptr()));
        parallel_for_workers(self.threads, self.panels(), |worker, panel| {
            let vectors = PANEL.min(self.vectors() - panel * PANEL);
            // SAFETY: each worker has a slot of its own, of which `panel_slot_len` is the size.
            let [u, m, staging] = unsafe {
                let u = slots.get().add(worker * self.panel_slot_len());
                let m = u.add(self.panel_len());
                [u, m, m.add(self.positions() * m_strides[0])]
            };
            let channels = self.channels(panel);
            for first in (0..p.c.max(1)).step_by(BLOCK) {
                let c = BLOCK.min(p.c - first);
                let u_position = vectors * self.lanes * c;
                let w = w.get().cast_const().cast::<X>();
                let filter = self.filter_transform::<X, A>(w, w_strides, panel, (u, u_position));
                let w = w.wrapping_offset(first as isize * w_strides[1]);
                dispatch(self.isa, FilterTransform { c, w, ..filter });
                let nothing = || Prefetch::nothing(&self.geometry);
                let products = Gemm {
                    c,
                    positions: self.positions(),
                    tiles: tiles.len(),
                    vectors,
                    u,
                    u_position,
                    // SAFETY: these channels of V, whole vectors.
                    v: unsafe { v.get().add(first / self.lanes * v_strides[1]) },
                    v_strides,
                    m,
                    m_strides,
                    accumulate: first > 0,
                    v_is_far: true,
                    ahead: Ahead { read: &mut nothing(), write: nothing() },
                };
                dispatch(self.isa, products);
            }
            let transform = OutputTransform::<X, A> {
                geometry: &self.geometry,
                m,
                m_strides,
                m_width: self.m_width(),
                tiles: tiles.clone(),
                channels,
                epilogue,
                staging,
                y: y.get().cast(),
                strides: y_strides,
            };
            dispatch(self.isa, transform);
        });
    }
}
