//! The code that methods on the CPU, decoding and serving share: operands, tiles of tokens, the sums over taps, and the
//! way of sums to y.

pub(crate) mod epilogue;
pub(crate) mod kernel;
mod norm;
pub(crate) mod operand;
mod outputs;
pub(crate) mod store;
mod tile;

pub(crate) use norm::Heads;
pub(crate) use operand::{Operand, Parameters};
pub(crate) use outputs::Outputs;
pub(crate) use tile::{Tile, Tokens, each, spread};

use crate::dtype::with_element;
use crate::{Element, TensorMut};

/// Channels are staged and their weights laid out in groups of this many: the widest vector.
pub(crate) const GROUP: usize = crate::cpu::MAX_LANES;

/// The tensors that a run reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inputs<'a, T> {
    pub tokens: Tokens<'a, T>,
    pub parameters: Parameters<'a>,
}

/// Gradients to read and to write, [rows, d, tokens].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gradients<T> {
    pub dy: Operand<T>,
    pub dfinal_states: Option<Operand<T>>,
    pub dx: Option<Operand<T>>,
    pub dinitial_states: Option<Operand<T>>,
}

/// Rounds `value` to the tensor's type and writes it.
pub(super) fn write(to: &mut TensorMut<'_>, index: &[usize], value: f64) {
    let offset = to.layout().offset(index);
    let dtype = to.dtype();
    let at = to.as_mut_ptr();
    // SAFETY: callers' indices are in the tensor.
    unsafe {
        with_element!(dtype, T => at.cast::<T>().offset(offset).write(Element::from_f64(value)));
    }
}
