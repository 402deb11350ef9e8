//! Runs with the filter itself.
//!
//! Where few tiles share it, V is formed once for all of them; then each task packs a panel of the filter into the
//! second-level cache, multiplies, and transforms back before it takes another, so that U never is in memory as a whole.
//! Else as much of the filter is packed at once as fits, and the pipeline runs for its channels.

use super::gemm::{Gemm, PANEL};
use super::geometry::Geometry;
use super::output::{self, OutputTransform};
use super::prefetch::{Ahead, Prefetch};
use super::shared::SharedInput;
use super::{WinogradCpu, block_strides, input, strides4};
use crate::conv2d::cpu::{Run, stage_bias, with_element};
use crate::conv2d::{Problem, Tile};
use crate::cpu::{MAX_LANES, SendPtr, SimdElement, dispatch, parallel_for_workers};
use crate::{TensorMut, TensorRef};

/// Elements of a packed filter that a run packs at once when it is given the filter itself.
const RAW_LEN: usize = 8 << 20;

/// Tiles up to which V is shared: with more, V of all leaves the caches before the next panel reads it.
const SHARED_TILES: usize = 96;

/// Whether tasks share V when the filter itself is given.
pub(super) fn shares_input(geometry: &Geometry) -> bool {
    geometry.tiles() <= SHARED_TILES
}

impl WinogradCpu {
    /// Elements of memory beside the workspace that [`WinogradCpu::run_raw`] needs.
    pub(crate) fn raw_len(&self) -> usize {
        if shares_input(&self.geometry) {
            return self.shared_len() + self.threads.min(self.panels()) * self.shared_slot_len();
        }
        self.positions() * self.raw_vectors() * self.lanes * self.geometry.problem.c
    }

    /// Vectors of output channels whose filters are packed at once, in whole panels.
    fn raw_vectors(&self) -> usize {
        let panel = PANEL * self.positions() * self.lanes * self.geometry.problem.c;
        (RAW_LEN / panel.max(1)).max(1).saturating_mul(PANEL).min(self.vectors())
    }

    /// [`WinogradCpu::run`] with the filter itself, and `memory` of [`WinogradCpu::raw_len`] elements. The result is the
    /// same, bit by bit.
    pub(crate) fn run_raw(&self, w: &TensorRef<'_>, memory: &mut [f32], run: Run<'_, '_>) {
        if shares_input(&self.geometry) {
            return with_element!(w.dtype(), T => match self.tile {
                Tile::F2 => self.run_shared::<T, 4>(w, memory, run),
                Tile::F4 => self.run_shared::<T, 6>(w, memory, run),
                Tile::F6 => self.run_shared::<T, 8>(w, memory, run),
            });
        }
        let Run { x, bias, activation, y, workspace } = run;
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
            engine.pack(&w, memory);
            let (bias, workspace) = (bias.as_ref(), &mut *workspace);
            engine.run(memory, Run { x, bias, activation, y, workspace });
        }
    }

    /// Panels of output channels, each a task where V is shared.
    fn panels(&self) -> usize {
        self.vectors().div_ceil(PANEL)
    }

    /// Strides of V [position, vector, tile, LANES] of all tiles, and of M of a panel.
    fn shared_strides(&self) -> [[usize; 2]; 2] {
        let vectors = self.geometry.problem.c.div_ceil(self.lanes);
        [vectors, PANEL].map(|vectors| block_strides(self.geometry.tiles(), vectors, self.lanes))
    }

    /// Elements of V, and the staging memory of its transform.
    fn shared_len(&self) -> usize {
        let [v_strides, _] = self.shared_strides();
        self.positions() * v_strides[0] + self.threads * input::STAGING
    }

    /// Elements of U and M of a panel and of the staging memory of the output.
    fn shared_slot_len(&self) -> usize {
        let [_, m_strides] = self.shared_strides();
        let u = PANEL * self.lanes * self.geometry.problem.c;
        (self.positions() * (u + m_strides[0]) + output::STAGING).next_multiple_of(MAX_LANES)
    }

    fn run_shared<X: SimdElement, const A: usize>(
        &self,
        w: &TensorRef<'_>,
        memory: &mut [f32],
        run: Run<'_, '_>,
    ) {
        let Run { x, bias, activation, y, workspace } = run;
        assert!(memory.len() >= self.raw_len(), "memory for the filter");
        let p = &self.geometry.problem;
        let (bias, _) = stage_bias(bias, p.k, workspace);
        let bias = SendPtr(bias.as_ptr().cast_mut());
        let (tiles, [v_strides, m_strides]) = (0..self.geometry.tiles(), self.shared_strides());
        let v = SendPtr(memory.as_mut_ptr());
        // SAFETY: `shared_len` is the sum of V and the staging memory, before the slots.
        let [staging, slots] = unsafe {
            [v.get().add(self.positions() * v_strides[0]), v.get().add(self.shared_len())]
                .map(SendPtr)
        };
        let input = SharedInput {
            geometry: &self.geometry,
            isa: self.isa,
            lanes: self.lanes,
            threads: self.threads,
            tiles: &tiles,
            v,
            v_strides,
            staging,
        };
        // SAFETY: x agrees with the problem; the memory is as large as asked for.
        unsafe { input.transform::<X, A>(x) };
        let (w_strides, y_strides) = (strides4(w.strides()), strides4(y.strides()));
        let (w, y) = (SendPtr(w.as_ptr().cast_mut()), SendPtr(y.as_mut_ptr()));
        parallel_for_workers(self.threads, self.panels(), |worker, panel| {
            let vectors = PANEL.min(self.vectors() - panel * PANEL);
            let u_position = vectors * self.lanes * p.c;
            // SAFETY: each worker has a slot of its own, of which `shared_slot_len` is the size.
            let [u, m, staging] = unsafe {
                let u = slots.get().add(worker * self.shared_slot_len());
                let m = u.add(self.positions() * PANEL * self.lanes * p.c);
                [u, m, m.add(self.positions() * m_strides[0])]
            };
            let w = w.get().cast_const().cast::<X>();
            let filter = self.filter_transform::<X, A>(w, w_strides, panel, (u, u_position));
            let channels = filter.channels.clone();
            dispatch(self.isa, filter);
            let nothing = || Prefetch::nothing(&self.geometry);
            let products = Gemm {
                c: p.c,
                positions: self.positions(),
                tiles: tiles.len(),
                vectors,
                u,
                u_position,
                v: v.get(),
                v_strides,
                m,
                m_strides,
                ahead: Ahead { read: &mut nothing(), write: nothing() },
            };
            dispatch(self.isa, products);
            let transform = OutputTransform::<X, A> {
                geometry: &self.geometry,
                m,
                m_strides,
                tiles: tiles.clone(),
                channels,
                bias: bias.get(),
                activation,
                staging,
                y: y.get().cast(),
                strides: y_strides,
            };
            dispatch(self.isa, transform);
        });
    }
}
