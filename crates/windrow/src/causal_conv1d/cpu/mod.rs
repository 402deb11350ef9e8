//! Causal convolution on the CPU.

pub(crate) mod backward;
pub(crate) mod dense_backward;
pub(crate) mod epilogue;
mod forward;
pub(crate) mod im2col;
pub(super) mod kernel;
pub(super) mod operand;
mod tile;
pub(crate) mod update;

pub(crate) use forward::{Forward, Inputs};
pub(crate) use operand::{Operand, Parameters};
use tile::Tile;
pub(crate) use tile::Tokens;

/// Channels are staged and their weights laid out in groups of this many: the widest vector.
pub(crate) const GROUP: usize = crate::cpu::MAX_LANES;
