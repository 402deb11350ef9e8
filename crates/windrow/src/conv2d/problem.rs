//! The sizes of a convolution, checked once.

use super::Conv2dParams;
use crate::tensor::check_dtype;
use crate::{Error, Result, TensorDesc};

/// Sizes of a convolution in the field's names. All products of sizes that kernels form (elements
/// of a tensor, positions in the padded input) fit in `isize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    pub n: usize,
    /// Input channels of all groups.
    pub c: usize,
    pub h: usize,
    pub w: usize,
    /// Output channels of all groups.
    pub k: usize,
    pub r: usize,
    pub s: usize,
    pub oh: usize,
    pub ow: usize,
    pub stride: [usize; 2],
    pub padding: [usize; 2],
    pub dilation: [usize; 2],
    pub groups: usize,
}

impl Problem {
    /// The sizes of a convolution with these strides, paddings and dilations. A filter that is larger than the padded
    /// input has no position there, if that is allowed.
    pub(crate) fn new(
        x: &TensorDesc,
        w: &TensorDesc,
        [stride, padding, dilation]: [[usize; 2]; 3],
        groups: usize,
        may_be_none: bool,
    ) -> Result<Self> {
        let &[n, c, h, width] = x.shape() else { return Err(rank("x", x)) };
        let &[k, c_group, r, s] = w.shape() else { return Err(rank("w", w)) };
        if !x.dtype.is_compute() {
            return Err(Error::dtype("x", x.dtype, "f32, f16 or bf16"));
        }
        check_dtype("w", w.dtype, x.dtype)?;
        check_steps(stride, dilation)?;
        if groups == 0 || c % groups != 0 || k % groups != 0 {
            let expected = format!("a divisor of {c} input and {k} output channels");
            return Err(Error::parameter("groups", groups, expected));
        }
        if c_group != c / groups {
            let expected =
                format!("[k, {}, r, s]: x has {c} channels in {groups} groups", c / groups);
            return Err(Error::shape("w", w.shape(), expected));
        }
        if r == 0 || s == 0 {
            return Err(Error::shape("w", w.shape(), "a filter of at least 1 x 1"));
        }
        let size = |input: usize, taps: usize, d: usize| match output_size(
            input,
            taps,
            stride[d],
            padding[d],
            dilation[d],
        )? {
            0 if !may_be_none => Err(too_large(w, input, taps, padding[d], dilation[d])),
            places => Ok(places),
        };
        let (oh, ow) = (size(h, r, 0)?, size(width, s, 1)?);
        Ok(Problem { n, c, h, w: width, k, r, s, oh, ow, stride, padding, dilation, groups })
    }

    /// [n, k, oh, ow]
    pub(crate) fn y_shape(&self) -> [usize; 4] {
        [self.n, self.k, self.oh, self.ow]
    }

    /// Input channels of one group.
    pub(crate) fn c_group(&self) -> usize {
        self.c / self.groups
    }

    /// Output channels of one group.
    pub(crate) fn k_group(&self) -> usize {
        self.k / self.groups
    }

    /// Terms of the sum for one output element: `c/groups * r * s`.
    pub(crate) fn taps(&self) -> usize {
        self.c_group() * self.r * self.s
    }

    /// Multiplications and additions of the direct algorithm.
    pub(crate) fn flops(&self) -> f64 {
        2.0 * self.taps() as f64 * self.y_shape().iter().map(|&d| d as f64).product::<f64>()
    }

    /// True if sums over the taps are faster than a matrix product: with few channels on both
    /// sides the im2col matrix costs more than the sums.
    pub(crate) fn prefers_direct(&self) -> bool {
        self.groups > 1 && self.c_group() * self.k_group() <= 256
    }

    /// True if a Winograd algorithm for 3x3 filters can compute it.
    pub(crate) fn is_winograd(&self) -> bool {
        self.r == 3
            && self.s == 3
            && self.stride == [1, 1]
            && self.dilation == [1, 1]
            && self.groups == 1
    }
}

/// Shapes of a transposed convolution of `y` [n, k, oh, ow]: [n, c, h, w] of its result, and y's with the rows and
/// columns of zeros behind it that an `output_padding` of the stride or more stands for.
pub(crate) fn transposed_shapes(
    y: &TensorDesc,
    w: &TensorDesc,
    params: &Conv2dParams,
    output_padding: [usize; 2],
) -> Result<[[usize; 4]; 2]> {
    let &[n, channels, oh, ow] = y.shape() else { return Err(rank("y", y)) };
    let &[k, c_group, r, s] = w.shape() else { return Err(rank("w", w)) };
    let &Conv2dParams { stride, dilation, groups, .. } = params;
    if !y.dtype.is_compute() {
        return Err(Error::dtype("y", y.dtype, "f32, f16 or bf16"));
    }
    check_dtype("w", w.dtype, y.dtype)?;
    check_steps(stride, dilation)?;
    if channels != k {
        return Err(Error::shape("y", y.shape(), format!("[n, {k}, oh, ow]: w has {k} filters")));
    }
    if n > 0 && (oh == 0 || ow == 0) {
        return Err(Error::shape("y", y.shape(), "at least one row and one column"));
    }
    if (0..2).any(|d| output_padding[d] >= stride[d].max(dilation[d])) {
        let expected = format!("less than the stride {stride:?} or the dilation {dilation:?}");
        return Err(Error::parameter("output_padding", format!("{output_padding:?}"), expected));
    }
    let c = c_group.checked_mul(groups).ok_or_else(|| Error::SizeOverflow {
        what: "channels",
        detail: format!("{c_group} in each of {groups} groups"),
    })?;
    let size = |outputs, taps, d| input_size(params, output_padding, outputs, taps, d);
    let x = [n, c, size(oh, r, 0)?, size(ow, s, 1)?];
    // Fewer than a dilation: no overflow where the size of x has none. What there is none of has no zeros behind it.
    let behind = |outputs: usize, d: usize| {
        if outputs == 0 { 0 } else { outputs + output_padding[d] / stride[d] }
    };
    Ok([x, [n, k, behind(oh, 0), behind(ow, 1)]])
}

/// Positions along direction `d` of what a convolution turns into `outputs`.
fn input_size(
    params: &Conv2dParams,
    output_padding: [usize; 2],
    outputs: usize,
    taps: usize,
    d: usize,
) -> Result<usize> {
    let &Conv2dParams { stride, padding, dilation, .. } = params;
    let sizes = || {
        let reach = taps.saturating_sub(1).checked_mul(dilation[d])?;
        let steps = outputs.checked_mul(stride[d])?;
        let covered = steps.checked_add(reach)?.checked_add(1 + output_padding[d])?;
        Some((covered, padding[d].checked_mul(2)?.checked_add(stride[d])?))
    };
    let (covered, left_out) = sizes().ok_or_else(|| Error::SizeOverflow {
        what: "transposed output",
        detail: format!(
            "{outputs} positions, stride {}, padding {}, {taps} taps with dilation {}",
            stride[d], padding[d], dilation[d]
        ),
    })?;
    covered.checked_sub(left_out).ok_or_else(|| {
        let covered = covered as isize - stride[d] as isize;
        let expected = format!("at most {} where {covered} positions are covered", covered / 2);
        Error::parameter("padding", format!("{padding:?}"), expected)
    })
}

fn check_steps(stride: [usize; 2], dilation: [usize; 2]) -> Result<()> {
    for (name, value) in [("stride", stride), ("dilation", dilation)] {
        if value.contains(&0) {
            return Err(Error::parameter(name, format!("{value:?}"), "at least 1"));
        }
    }
    Ok(())
}

fn rank(arg: &'static str, desc: &TensorDesc) -> Error {
    Error::Rank { arg, given: desc.layout.rank(), expected: "4" }
}

/// Places of the filter, 0 if it is larger than the padded input.
fn output_size(
    input: usize,
    taps: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
) -> Result<usize> {
    // Signed positions in the padded input and sums of two of them must fit.
    const LIMIT: usize = isize::MAX as usize / 4;
    let overflow = || Error::SizeOverflow {
        what: "padded input",
        detail: format!("input {input}, padding {padding}, {taps} taps with dilation {dilation}"),
    };
    let padded = padding.checked_mul(2).and_then(|p| p.checked_add(input)).ok_or_else(overflow)?;
    let reach = (taps - 1).checked_mul(dilation).ok_or_else(overflow)?;
    if padded > LIMIT || reach > LIMIT || stride > LIMIT {
        return Err(overflow());
    }
    Ok(padded.checked_sub(reach + 1).map_or(0, |last| last / stride + 1))
}

/// The error for sizes that [`output_size`] has accepted but that are too large together.
fn too_large(w: &TensorDesc, input: usize, taps: usize, padding: usize, dilation: usize) -> Error {
    let expected = format!(
        "a filter that covers at most {} positions (input {input} and padding {padding} on both \
         sides); with dilation {dilation} its {taps} taps cover {}",
        input + 2 * padding,
        (taps - 1) * dilation + 1
    );
    Error::shape("w", w.shape(), expected)
}
