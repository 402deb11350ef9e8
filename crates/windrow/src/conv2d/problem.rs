//! The sizes of a convolution, checked once.

use super::Conv2dParams;
use crate::tensor::check_dtype;
use crate::{Error, Result, TensorDesc};

/// The frames of a convolution over videos. An image is a video of one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Frames {
    /// Frames of the input.
    pub t: usize,
    /// Frames of the filter.
    pub kt: usize,
    /// Frames of the output.
    pub ot: usize,
    pub stride: usize,
    /// Frames that are missing before the first one of the input.
    pub padding: usize,
    pub dilation: usize,
}

impl Frames {
    /// The frames of a convolution over images.
    pub(crate) const IMAGE: Self =
        Frames { t: 1, kt: 1, ot: 1, stride: 1, padding: 0, dilation: 1 };
}

/// The sizes of a convolution: n images of c channels, h rows and w columns; k filters of r rows and s columns; oh rows
/// and ow columns of the output. Those of a convolution over n videos have frames as well. All products of sizes that
/// kernels compute (elements of a tensor, positions in the padded input) fit in `isize`.
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
    pub frames: Frames,
    pub oh: usize,
    pub ow: usize,
    pub stride: [usize; 2],
    pub padding: [usize; 2],
    pub dilation: [usize; 2],
    pub groups: usize,
}

impl Problem {
    /// The sizes for which everything is chosen that changes bits, but for what GPUs choose for several batches. If the
    /// bits of an image must not depend on the number of images, that is a fixed number. For one image the cost model
    /// would choose tiles that waste time in larger batches, and for many images tiles of which one image fills few.
    pub(crate) fn for_choice(&self, batch_invariant: bool) -> Self {
        Problem { n: if batch_invariant { 8 } else { self.n }, ..*self }
    }

    /// The sizes of a convolution over images (`D` is 2) or videos (3) with these strides, paddings and dilations. If
    /// `allows_empty` is true, a filter that is larger than the padded input is accepted, and the output size in that
    /// direction is 0. Otherwise it is an error.
    pub(crate) fn new<const D: usize>(
        x: &TensorDesc,
        w: &TensorDesc,
        [stride, padding, dilation]: [[usize; D]; 3],
        groups: usize,
        allows_empty: bool,
    ) -> Result<Self> {
        let Some((&[n, c], input)) = sizes::<D>(x) else { return Err(rank::<D>("x", x)) };
        let Some((&[k, c_group], taps)) = sizes::<D>(w) else { return Err(rank::<D>("w", w)) };
        if !x.dtype.is_compute() {
            return Err(Error::dtype("x", x.dtype, "f32, f16 or bf16"));
        }
        check_dtype("w", w.dtype, x.dtype)?;
        check_steps(&stride, &dilation)?;
        if groups == 0 || c % groups != 0 || k % groups != 0 {
            let expected = format!("a divisor of {c} input and {k} output channels");
            return Err(Error::parameter("groups", groups, expected));
        }
        if c_group != c / groups {
            let taps = if D == 3 { "kt, r, s" } else { "r, s" };
            let expected =
                format!("[k, {}, {taps}]: x has {c} channels in {groups} groups", c / groups);
            return Err(Error::shape("w", w.shape(), expected));
        }
        if taps.contains(&0) {
            let expected = format!("a filter of at least {}", ["1"; D].join(" x "));
            return Err(Error::shape("w", w.shape(), expected));
        }
        let mut outputs = [0; D];
        for d in 0..D {
            outputs[d] = output_size(input[d], taps[d], stride[d], padding[d], dilation[d])?;
            if outputs[d] == 0 && !allows_empty {
                return Err(too_large(w, input[d], taps[d], padding[d], dilation[d]));
            }
        }
        // The last two directions.
        let last = |sizes: [usize; D]| [sizes[D - 2], sizes[D - 1]];
        let frames = match D {
            3 => Frames {
                t: input[0],
                kt: taps[0],
                ot: outputs[0],
                stride: stride[0],
                padding: padding[0],
                dilation: dilation[0],
            },
            _ => Frames::IMAGE,
        };
        let ([h, width], [r, s], [oh, ow]) = (last(*input), last(*taps), last(outputs));
        let (stride, padding, dilation) = (last(stride), last(padding), last(dilation));
        Ok(Problem {
            n,
            c,
            h,
            w: width,
            k,
            r,
            s,
            frames,
            oh,
            ow,
            stride,
            padding,
            dilation,
            groups,
        })
    }

    /// [n, k, oh, ow]
    pub(crate) fn y_shape(&self) -> [usize; 4] {
        [self.n, self.k, self.oh, self.ow]
    }

    /// [n, k, ot, oh, ow]
    pub(crate) fn video_shape(&self) -> [usize; 5] {
        [self.n, self.k, self.frames.ot, self.oh, self.ow]
    }

    /// A convolution over the images of one video, of which the frames that the filter reads are channels: those of a
    /// frame in whole vectors of `lanes`.
    pub(crate) fn with_frames_as_channels(&self, lanes: usize) -> Self {
        match self.frames.kt {
            1 => *self,
            kt => {
                Problem { c: kt * self.c.next_multiple_of(lanes), frames: Frames::IMAGE, ..*self }
            }
        }
    }

    /// True if the images of one video read frames of it that are not those of their own number.
    pub(crate) fn is_video(&self) -> bool {
        self.frames != Frames::IMAGE
    }

    /// Input channels of one group.
    pub(crate) fn c_group(&self) -> usize {
        self.c / self.groups
    }

    /// Output channels of one group.
    pub(crate) fn k_group(&self) -> usize {
        self.k / self.groups
    }

    /// The number of products that are summed for one output element: `c/groups * kt * r * s`.
    pub(crate) fn taps(&self) -> usize {
        self.c_group() * self.frames.kt * self.r * self.s
    }

    /// The number of multiplications and additions by the definition.
    pub(crate) fn flops(&self) -> f64 {
        2.0 * self.taps() as f64 * self.video_shape().iter().map(|&d| d as f64).product::<f64>()
    }

    /// True if there are several groups with so few input and output channels each that direct sums are faster than a
    /// matrix product: making the im2col matrix takes longer than the sums.
    pub(crate) fn prefers_direct(&self) -> bool {
        self.groups > 1 && self.c_group() * self.k_group() <= 256
    }

    /// True if Winograd's algorithms can compute this convolution: 3x3 filter, stride 1, dilation 1, one group.
    pub(crate) fn is_winograd(&self) -> bool {
        self.r == 3
            && self.s == 3
            && self.stride == [1, 1]
            && self.dilation == [1, 1]
            && self.groups == 1
    }
}

/// The two shapes of a transposed convolution with input `y` [n, k, oh, ow]. The first is that of the result, [n, c, h,
/// w]. The second is that of y after rows and columns of zeros are appended, which an `output_padding` of at least the
/// stride requires.
pub(crate) fn transposed_shapes(
    y: &TensorDesc,
    w: &TensorDesc,
    params: &Conv2dParams,
    output_padding: [usize; 2],
) -> Result<[[usize; 4]; 2]> {
    let &[n, channels, oh, ow] = y.shape() else { return Err(rank::<2>("y", y)) };
    let &[k, c_group, r, s] = w.shape() else { return Err(rank::<2>("w", w)) };
    let &Conv2dParams { stride, dilation, groups, .. } = params;
    if !y.dtype.is_compute() {
        return Err(Error::dtype("y", y.dtype, "f32, f16 or bf16"));
    }
    check_dtype("w", w.dtype, y.dtype)?;
    check_steps(&stride, &dilation)?;
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
    // The appended rows are fewer than the dilation. So if the size of x did not overflow, this does not either. A `y`
    // without rows (or columns) gets none.
    let behind = |outputs: usize, d: usize| {
        if outputs == 0 { 0 } else { outputs + output_padding[d] / stride[d] }
    };
    Ok([x, [n, k, behind(oh, 0), behind(ow, 1)]])
}

/// The input size in direction `d` for which a convolution gives `outputs` outputs.
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

fn check_steps(stride: &[usize], dilation: &[usize]) -> Result<()> {
    for (name, value) in [("stride", stride), ("dilation", dilation)] {
        if value.contains(&0) {
            return Err(Error::parameter(name, format!("{value:?}"), "at least 1"));
        }
    }
    Ok(())
}

/// The first two sizes of a tensor and the `D` that follow; `None` for a tensor of another rank.
fn sizes<const D: usize>(desc: &TensorDesc) -> Option<(&[usize; 2], &[usize; D])> {
    let (first, rest) = desc.shape().split_first_chunk()?;
    Some((first, rest.try_into().ok()?))
}

fn rank<const D: usize>(arg: &'static str, desc: &TensorDesc) -> Error {
    let expected = if D == 3 { "5" } else { "4" };
    Error::Rank { arg, given: desc.layout.rank(), expected }
}

/// The output size in one direction; 0 if the filter is larger than the padded input.
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

/// The error for a filter that is larger than the padded input.
fn too_large(w: &TensorDesc, input: usize, taps: usize, padding: usize, dilation: usize) -> Error {
    let expected = format!(
        "a filter that covers at most {} positions (input {input} and padding {padding} on both \
         sides); with dilation {dilation} its {taps} taps cover {}",
        input + 2 * padding,
        (taps - 1) * dilation + 1
    );
    Error::shape("w", w.shape(), expected)
}
