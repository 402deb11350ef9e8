//! The operands of a run by sums of a stencil.

use super::method::Run;
use super::shared::epilogue::Epilogue;
use super::shared::stage_bias;
use crate::{DType, TensorRef};

/// The operands of a run, with the bias in f32 and scratch memory.
pub(super) struct Staged<'a> {
    pub(super) dtype: DType,
    pub(super) src: *const u8,
    /// The initial frames; null for none.
    pub(super) initial: *const u8,
    pub(super) dst: *mut u8,
    pub(super) epilogue: Epilogue,
    scratch: &'a mut [f32],
}

impl<'a> Staged<'a> {
    pub(super) fn new(run: Run<'a, '_>) -> Self {
        let Run { x, initial, bias, residual, activation, y, workspace } = run;
        let (staged, scratch) = stage_bias(bias, y.shape()[1], workspace);
        let bias = bias.map_or(std::ptr::null(), |_| staged.as_ptr());
        let epilogue = Epilogue { bias, residual, activation };
        let initial = initial.map_or(std::ptr::null(), TensorRef::as_ptr);
        let (dtype, src, dst) = (x.dtype(), x.as_ptr(), y.as_mut_ptr());
        Staged { dtype, src, initial, dst, epilogue, scratch }
    }

    /// Scratch memory of `len` elements.
    pub(super) fn scratch(&mut self, len: usize) -> *mut f32 {
        assert!(self.scratch.len() >= len, "workspace");
        self.scratch.as_mut_ptr()
    }
}
