//! Pieces of tensors and tiles, and copies between them.

use super::LANES;
use crate::causal_conv1d::cpu::shared::Operand;
use crate::causal_conv1d::cpu::shared::operand::{join, split};
use crate::cpu::{Kernel, Simd, SimdElement, array};

/// [`Block::copy_to`], whose caller guarantees that the pointers are valid.
struct CopyTo<T> {
    from: Block<T>,
    to: Block<T>,
    tokens: usize,
    channels: usize,
}

impl<T: SimdElement> Kernel for CopyTo<T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        // SAFETY: promised by the caller.
        unsafe { self.from.copy(self.to, self.tokens, self.channels) }
    }
}

/// [tokens, channels] elements: the first, and the distances of tokens and channels.
#[derive(Clone, Copy)]
pub(super) struct Block<T> {
    pub at: *mut T,
    pub token: isize,
    pub channel: isize,
}

impl<T: SimdElement> Block<T> {
    /// The block that starts at an element of an operand.
    #[inline(always)]
    pub(super) fn of(operand: &Operand<T>, row: usize, channel: usize, token: usize) -> Self {
        let [_, channels, tokens] = operand.strides;
        Block { at: operand.at(row, channel, token), token: tokens, channel: channels }
    }

    /// Rows of a tile from row `i` on.
    #[inline(always)]
    pub(super) fn rows(tile: *mut T, i: usize) -> Self {
        Block { at: tile.wrapping_add(i * LANES), token: LANES as isize, channel: 1 }
    }

    /// Copies its elements to those of `to`.
    ///
    /// # Safety
    /// Both have this number of tokens and channels, and share no memory.
    #[inline(always)]
    pub(super) unsafe fn copy_to<S: Simd>(
        self,
        s: S,
        to: Block<T>,
        tokens: usize,
        channels: usize,
    ) {
        s.outlined(CopyTo { from: self, to, tokens, channels });
    }

    /// [`Block::copy_to`], inline.
    #[inline(always)]
    unsafe fn copy(self, to: Block<T>, tokens: usize, channels: usize) {
        let row = |block: Block<T>, t: usize| block.at.wrapping_offset(t as isize * block.token);
        let dense = |block: Block<T>| block.token == 1 && block.channel == tokens as isize;
        // SAFETY: promised by the caller.
        unsafe {
            match (self.channel, to.channel, tokens) {
                (1, 1, _) => {
                    for t in 0..tokens {
                        std::ptr::copy_nonoverlapping(row(self, t), row(to, t), channels);
                    }
                }
                (_, 1, 2) if dense(self) => {
                    split::<T, 2>(self.at, array(|t| row(to, t)), channels);
                }
                (_, 1, 3) if dense(self) => {
                    split::<T, 3>(self.at, array(|t| row(to, t)), channels);
                }
                (1, _, 2) if dense(to) => {
                    join::<T, 2>(array(|t| row(self, t).cast_const()), to.at, channels);
                }
                (1, _, 3) if dense(to) => {
                    join::<T, 3>(array(|t| row(self, t).cast_const()), to.at, channels);
                }
                _ => {
                    for c in 0..channels as isize {
                        let from = self.at.wrapping_offset(c * self.channel);
                        let to_channel = to.at.wrapping_offset(c * to.channel);
                        for t in 0..tokens as isize {
                            to_channel.offset(t * to.token).write(*from.offset(t * self.token));
                        }
                    }
                }
            }
        }
    }

    /// Sets its elements to zero.
    ///
    /// # Safety
    /// It has this number of tokens and channels.
    #[inline(always)]
    pub(super) unsafe fn clear(self, tokens: usize, channels: usize) {
        for t in 0..tokens as isize {
            for c in 0..channels as isize {
                // SAFETY: promised by the caller.
                unsafe { self.at.offset(t * self.token + c * self.channel).write(T::default()) };
            }
        }
    }
}
