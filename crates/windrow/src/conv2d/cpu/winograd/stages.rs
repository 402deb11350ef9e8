//! U, V and M as a run forms them, in the oracle's order, for verification.

use super::WinogradCpu;
use super::gemm::PANEL;
use crate::buffer::Buffer;
use crate::conv2d::cpu::{Prepared, Residual, Run, floats, floats_mut};
use crate::conv2d::winograd_reference::Stages;
use crate::lists::{filled, room_for};
use crate::{Activation, Result, Tensor, TensorDesc, TensorRef};
use std::ops::Range;
use std::sync::Mutex;

/// The matrices of a block as the pipeline holds them between its stages.
pub(super) struct Block {
    pub tiles: Range<usize>,
    /// V [position, c / LANES, tile, LANES]
    pub v: *const f32,
    /// Output channels of M, from a multiple of LANES on.
    pub channels: Range<usize>,
    /// M [position, k / width, tile, width]
    pub m: *const f32,
}

impl WinogradCpu {
    /// Runs on `w` [k, c, 3, 3] and `x` [n, c, h, w] and keeps what the stages formed.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub(crate) fn stages(&self, w: &TensorRef<'_>, x: &TensorRef<'_>) -> Result<Stages<Vec<f32>>> {
        let p = &self.geometry.problem;
        let mut packed = Buffer::new(self.packed_len() * size_of::<f32>())?;
        self.pack(w, floats_mut(packed.as_mut_slice()));
        let packed = floats(packed.as_slice());
        let mut workspace = Buffer::new(self.workspace_bytes())?;
        let mut y = Tensor::uninitialised(TensorDesc::contiguous(x.dtype(), &p.y_shape())?)?;
        let (positions, tiles) = (self.positions(), self.geometry.tiles());
        let v = Mutex::new(filled(f32::NAN, positions * tiles * p.c)?);
        let m = Mutex::new(filled(f32::NAN, positions * tiles * p.k)?);
        let keep = |block: &Block| {
            let places = || (0..positions).flat_map(|i| block.tiles.clone().map(move |t| (i, t)));
            let (mut v, mut m) = (v.lock().expect("no panic"), m.lock().expect("no panic"));
            for (position, tile) in places() {
                let local = tile - block.tiles.start;
                let row = position * tiles + tile;
                for c in 0..p.c {
                    let at = element(position, self.v_strides(), self.lanes, [local, c]);
                    // SAFETY: V holds the block.
                    v[row * p.c + c] = unsafe { *block.v.add(at) };
                }
                for k in block.channels.clone() {
                    let place = [local, k - block.channels.start];
                    let at = element(position, self.m_strides(), self.m_width(), place);
                    // SAFETY: M holds these channels of the block.
                    m[row * p.k + k] = unsafe { *block.m.add(at) };
                }
            }
        };
        let (activation, workspace) = (Activation::Identity, workspace.as_mut_slice());
        let (bias, residual) = (None, Residual::NONE);
        let run =
            Run { x, initial: None, bias, residual, activation, y: &mut y.as_mut(), workspace };
        self.run_inspected(packed, run, &keep);
        let (v, m) = (v.into_inner().expect("no panic"), m.into_inner().expect("no panic"));
        Ok(Stages { u: self.unpack(packed)?, v, m })
    }

    /// U [position, k, c] of a packed filter.
    fn unpack(&self, packed: &[f32]) -> Result<Vec<f32>> {
        let p = &self.geometry.problem;
        let mut u = room_for(self.positions() * p.k * p.c)?;
        for position in 0..self.positions() {
            for k in 0..p.k {
                let vector = k / self.lanes;
                let panel = vector / PANEL * PANEL;
                let width = PANEL.min(self.vectors() - panel);
                u.extend((0..p.c).map(|c| {
                    let row = panel * p.c + c * width + vector - panel;
                    packed[position * self.u_position() + row * self.lanes + k % self.lanes]
                }));
            }
        }
        Ok(u)
    }
}

/// The place of element `channel` of a block's tile in V or M, whose rows have `width` channels.
fn element(
    position: usize,
    strides: [usize; 2],
    width: usize,
    [tile, channel]: [usize; 2],
) -> usize {
    position * strides[0] + channel / width * strides[1] + tile * width + channel % width
}
