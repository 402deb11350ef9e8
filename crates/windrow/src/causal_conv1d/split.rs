//! The division of the output channels among several tensors.

use super::Problem;
use super::problem::OUTPUTS;
use crate::{Result, TensorDesc};
use std::ops::Range;

/// Outputs without gaps, the first and the further ones, of these numbers of channels. They are channels-last if `x` is.
pub(super) fn split(
    problem: &Problem,
    x: &TensorDesc,
    channels: &[usize],
) -> Result<(TensorDesc, [Option<TensorDesc>; OUTPUTS - 1])> {
    problem.check_split(channels)?;
    let output = |i: usize| channels.get(i).map(|&n| problem.output_like(x, n)).transpose();
    let first = problem.output_like(x, channels[0])?;
    Ok((first, [output(1)?, output(2)?]))
}

/// The channels of the outputs of a checked spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Split {
    /// One past the last channel of each output. Outputs that do not exist have no channels.
    ends: [usize; OUTPUTS],
}

impl Split {
    /// The split of outputs [b, channels, l].
    pub(crate) fn of<'a>(mut outputs: impl Iterator<Item = &'a TensorDesc>) -> Self {
        let (mut ends, mut end) = ([0; OUTPUTS], 0);
        for to in &mut ends {
            end += outputs.next().map_or(0, |output| output.shape()[1]);
            *to = end;
        }
        Split { ends }
    }

    /// The channels of each output; empty for outputs that do not exist.
    pub(crate) fn channels(&self) -> [Range<usize>; OUTPUTS] {
        let [first, second, third] = self.ends;
        [0..first, first..second, second..third]
    }

    /// The number of blocks of at most `most` channels, if no block has channels of two outputs.
    pub(crate) fn blocks(&self, most: usize) -> usize {
        self.channels().iter().map(|channels| channels.len().div_ceil(most)).sum()
    }

    /// The output of block `i`, and its channels.
    pub(crate) fn block(&self, most: usize, mut i: usize) -> (usize, Range<usize>) {
        for (output, channels) in self.channels().into_iter().enumerate() {
            let blocks = channels.len().div_ceil(most);
            if i < blocks {
                let first = channels.start + i * most;
                return (output, first..(first + most).min(channels.end));
            }
            i -= blocks;
        }
        unreachable!("there are not so many blocks")
    }
}
