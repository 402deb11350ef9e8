//! The sizes of a causal convolution, checked once.

use crate::tensor::{check_dtype, check_tensor, check_unique};
use crate::{DType, Error, Layout, Result, TensorDesc};

/// The largest number of tensors among which the output channels can be divided.
pub(crate) const OUTPUTS: usize = 3;

/// The sizes of a causal convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Batch.
    pub b: usize,
    /// Input channels.
    pub d: usize,
    /// Output channels; equal to `d` unless the convolution is dense.
    pub d_out: usize,
    /// Tokens.
    pub l: usize,
    /// Filter taps, at least 1.
    pub width: usize,
    /// The distance of neighbouring taps in tokens, at least 1.
    pub dilation: usize,
    /// True if every output channel sums over all input channels.
    pub dense: bool,
}

impl Problem {
    /// True if there is nothing to compute; other sizes can then be larger than any memory.
    pub(crate) fn is_empty(&self) -> bool {
        [self.b, self.d_out, self.l].contains(&0)
    }

    /// False if gradients have nothing to sum up; other sizes can then be larger than any memory.
    pub(crate) fn has_terms(&self) -> bool {
        self.b > 0 && self.l > 0 && self.d.max(self.d_out) > 0
    }

    pub(crate) fn new(x: &TensorDesc, weight: &TensorDesc) -> Result<Self> {
        let &[b, d, l] = x.shape() else {
            return Err(rank("x", x, "3: [b, d, l]"));
        };
        if !x.dtype.is_compute() {
            return Err(Error::dtype("x", x.dtype, "f32, f16 or bf16"));
        }
        let (d_out, d_weight, width, dense) = match *weight.shape() {
            [d, width] => (d, d, width, false),
            [d_out, d_in, width] => (d_out, d_in, width, true),
            _ => return Err(rank("weight", weight, "2: [d, width], or 3: [d_out, d, width]")),
        };
        if d_weight != d {
            let expected = format!("[{d}, width] or [d_out, {d}, width] for x {:?}", x.shape());
            return Err(Error::shape("weight", weight.shape(), expected));
        }
        if width == 0 {
            return Err(Error::shape("weight", weight.shape(), "a width of at least 1"));
        }
        check_parameter("weight", weight, x.dtype)?;
        Ok(Problem { b, d, d_out, l, width, dilation: 1, dense })
    }

    /// The sizes with a weight [d, width].
    pub(super) fn depthwise(x: &TensorDesc, weight: &TensorDesc) -> Result<Self> {
        let problem = Problem::new(x, weight)?;
        if problem.dense { Err(rank("weight", weight, "2: [d, width]")) } else { Ok(problem) }
    }

    /// The sizes with taps that are `dilation` tokens apart.
    pub(super) fn with_dilation(self, dilation: usize) -> Result<Self> {
        if dilation == 0 {
            return Err(Error::parameter("dilation", 0, "at least 1"));
        }
        // Kernels compute with small multiples of the history and of positions.
        let reach = self.history().checked_mul(dilation);
        if dilation > 1 && reach.is_none_or(|reach| reach > isize::MAX as usize / 64) {
            return Err(Error::SizeOverflow {
                what: "history",
                detail: format!("width {} with dilation {dilation}", self.width),
            });
        }
        // A single tap is as far from itself whatever the dilation is.
        Ok(Problem { dilation: if self.history() == 0 { 1 } else { dilation }, ..self })
    }

    /// The number of tokens before a sequence on which its first outputs depend.
    pub(crate) fn history(&self) -> usize {
        (self.width - 1) * self.dilation
    }

    /// [b, d_out, l]
    pub(crate) fn y_shape(&self) -> [usize; 3] {
        [self.b, self.d_out, self.l]
    }

    /// A bias `[d_out]`.
    pub(crate) fn check_bias(&self, bias: &TensorDesc, x: DType) -> Result<()> {
        check_tensor("bias", bias, bias.dtype, &[self.d_out])?;
        check_parameter("bias", bias, x)
    }

    /// The output for x, without gaps: channels-last if x is.
    pub(super) fn output(&self, x: &TensorDesc) -> Result<TensorDesc> {
        self.output_like(x, self.d_out)
    }

    /// An output of so many channels without gaps, of the type and in the order of a tensor [b, channels, l].
    pub(super) fn output_like(&self, like: &TensorDesc, channels: usize) -> Result<TensorDesc> {
        let strides = like.strides();
        let channel_last = like.shape()[1] > 1 && strides[1].abs() < strides[2].abs();
        let order = if channel_last { [0, 2, 1] } else { [0, 1, 2] };
        let layout = Layout::with_order(&[self.b, channels, self.l], &order)?;
        Ok(TensorDesc { dtype: like.dtype, layout })
    }

    /// Outputs [b, channels, l] whose channels are d_out together: one, or two or three of a split.
    pub(crate) fn check_outputs(
        &self,
        y: &TensorDesc,
        [y2, y3]: [&Option<TensorDesc>; 2],
        x: DType,
    ) -> Result<()> {
        let Some(y2) = y2 else {
            return match y3 {
                None => self.check_output(y, x),
                Some(_) => Err(Error::parameter("y3", "given", "none without `y2`")),
            };
        };
        let outputs = [Some(("y", y)), Some(("y2", y2)), y3.as_ref().map(|y3| ("y3", y3))];
        let mut channels = Vec::new();
        for (name, output) in outputs.into_iter().flatten() {
            let &[_, n, _] = output.shape() else {
                return Err(rank(name, output, "3: [b, channels, l]"));
            };
            channels.push(n);
        }
        self.check_split(&channels)?;
        for ((name, output), n) in outputs.into_iter().flatten().zip(channels) {
            check_tensor(name, output, x, &[self.b, n, self.l])?;
            check_unique(name, &output.layout)?;
        }
        Ok(())
    }

    /// The numbers of channels of one to three outputs.
    pub(super) fn check_split(&self, channels: &[usize]) -> Result<()> {
        let sum = channels.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
        if (1..=OUTPUTS).contains(&channels.len())
            && !channels.contains(&0)
            && sum == Some(self.d_out)
        {
            return Ok(());
        }
        let expected =
            format!("one to three numbers of at least one channel whose sum is {}", self.d_out);
        Err(Error::parameter("split", format!("{channels:?}"), expected))
    }

    /// An output [b, d_out, l].
    pub(crate) fn check_output(&self, y: &TensorDesc, x: DType) -> Result<()> {
        check_tensor("y", y, x, &self.y_shape())?;
        check_unique("y", &y.layout)
    }
}

/// Weights and biases are f32 or of x's type.
fn check_parameter(arg: &'static str, given: &TensorDesc, x: DType) -> Result<()> {
    if given.dtype == DType::F32 { Ok(()) } else { check_dtype(arg, given.dtype, x) }
}

pub(crate) fn rank(arg: &'static str, given: &TensorDesc, expected: &'static str) -> Error {
    Error::Rank { arg, given: given.layout.rank(), expected }
}

/// Indices are i32 or i64. Each tensor may have another of these types.
pub(crate) fn check_index(arg: &'static str, given: &TensorDesc) -> Result<()> {
    match given.dtype {
        DType::I32 | DType::I64 => Ok(()),
        other => Err(Error::dtype(arg, other, "i32 or i64")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::CausalConv1dSpec;
    use crate::{DType, TensorDesc};

    /// Else the tokens of each of its phases would be counted, which are as many as the dilation.
    #[test]
    fn one_tap_has_no_dilation() {
        let desc = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
        let problem = |width, dilation| {
            let spec = CausalConv1dSpec::new(desc(&[1, 2, 6]), desc(&[2, width])).unwrap();
            spec.with_dilation(dilation).problem()
        };
        assert_eq!(problem(1, 1 << 59).unwrap(), problem(1, 1).unwrap());
        assert_eq!(problem(2, 5).unwrap().history(), 5);
        assert!(problem(2, 1 << 59).is_err() && problem(1, 0).is_err());
    }
}
