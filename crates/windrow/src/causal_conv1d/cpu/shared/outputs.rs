//! The tensors that take the output channels.

use super::Operand;
use crate::TensorMut;
use crate::causal_conv1d::problem::OUTPUTS;
use crate::causal_conv1d::split::Split;
use crate::cpu::SimdElement;
use std::ops::Range;

/// One to three outputs. Each is addressed by the convolution's channels, of which it has some.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outputs<T> {
    /// The first one in place of those that do not exist.
    operands: [Operand<T>; OUTPUTS],
    pub split: Split,
}

impl<T: SimdElement> Outputs<T> {
    /// The outputs in the order of their channels.
    pub(crate) fn new(y: &mut TensorMut<'_>, further: [&mut Option<TensorMut<'_>>; 2]) -> Self {
        let [y2, y3] = &further;
        let all = [Some(y.desc()), y2.as_ref().map(|y| y.desc()), y3.as_ref().map(|y| y.desc())];
        let split = Split::of(all.into_iter().flatten());
        let mut operands = [Operand::output(y); OUTPUTS];
        let channels = split.channels().into_iter().skip(1);
        for ((to, output), channels) in operands[1..].iter_mut().zip(further).zip(channels) {
            if let Some(output) = output {
                *to = Operand::output(output).with_first_channel(channels.start);
            }
        }
        Outputs { operands, split }
    }

    /// The output with this number.
    #[inline(always)]
    pub(crate) fn get(&self, i: usize) -> &Operand<T> {
        &self.operands[i]
    }

    /// Each output with its channels.
    #[inline(always)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Operand<T>, Range<usize>)> {
        self.operands.iter().zip(self.split.channels())
    }
}
