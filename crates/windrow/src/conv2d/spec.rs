//! The spec of a convolution: descriptors, options, and the checks that need no data.

use super::{Conv2dParams, Problem, problem};
use crate::forms::{names, setters};
use crate::tensor::{check_dtype, check_tensor, check_unique};
use crate::{Accuracy, Activation, DType, Layout, Result, TensorDesc};

/// The spec of a two-dimensional convolution. As usual in deep learning, it is a cross-correlation:
///
/// `y[n,k,oh,ow] = act(bias[k] + residual[n,k,oh,ow] + sum_{c,r,s} w[k,c,r,s] * x[n, g*(C/groups)+c, i, j])`
///
/// The indices are: n of an image, k of an output channel, oh and ow of an output row and column, c of an input channel
/// of the group, r and s of a row and column of the filter. The input row is `i = oh*stride - padding + r*dilation`,
/// and the input column j follows likewise from ow and s. C is the number of input channels, and g is the group of
/// output channel k. Elements outside of `x` count as zero. In shapes such as [n, c, h, w] the same letters are sizes.
///
/// ```
/// use windrow::{Conv2dParams, Conv2dSpec, DType, TensorDesc};
/// let x = TensorDesc::contiguous(DType::F32, &[8, 64, 56, 56])?;
/// let w = TensorDesc::contiguous(DType::F32, &[128, 64, 3, 3])?;
/// let spec = Conv2dSpec::new(x, w, &Conv2dParams::default().with_padding([1, 1]))?;
/// assert_eq!(spec.y.shape(), [8, 128, 56, 56]);
/// # Ok::<(), windrow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Conv2dSpec {
    /// Input [n, c, h, w], f32, f16 or bf16; any strides (channels-last is a stride pattern).
    pub x: TensorDesc,
    /// Filter [k, c/groups, r, s] of x's type; any strides.
    pub w: TensorDesc,
    /// Output [n, k, oh, ow] of x's type; any strides with which no two elements share memory.
    pub y: TensorDesc,
    /// Bias `[k]`, f32 or x's type.
    pub bias: Option<TensorDesc>,
    /// True if a run gets a *residual*: a tensor of y's type, shape and strides, which is added before the activation.
    pub residual: bool,
    /// Step of the filter over rows (first) and columns (second); at least 1.
    pub stride: [usize; 2],
    /// Zeros that are added on each side: the first number above and below, the second on the left and on the right.
    pub padding: [usize; 2],
    /// Distance of neighbouring filter taps; at least 1.
    pub dilation: [usize; 2],
    /// Number of groups, which must divide c and k. Output channels depend only on the input channels of their group.
    pub groups: usize,
    /// Activation, applied after bias and residual are added to the sum of products.
    pub activation: Activation,
    /// Accuracy, which limits the algorithms that may be chosen.
    pub accuracy: Accuracy,
}

setters! {
    Conv2dSpec {
        with_output(y: TensorDesc);
        with_residual(residual: bool);
        with_activation(activation: Activation);
        with_accuracy(accuracy: Accuracy);
        ? with_bias(bias: TensorDesc);
    }
}

impl Conv2dSpec {
    /// The spec of a convolution of `x` [n, c, h, w] by `w` [k, c/groups, r, s], without bias and residual. `y` gets
    /// the shape that results from these arguments and a dense layout: channels-last if x is, otherwise NCHW.
    ///
    /// # Errors
    /// [`Error::Rank`](crate::Error::Rank); [`Error::DType`](crate::Error::DType);
    /// [`Error::Shape`](crate::Error::Shape) if channels do not match, or if the filter is empty or larger than the
    /// padded input; [`Error::Parameter`](crate::Error::Parameter) if stride, dilation or groups are 0, or if groups do
    /// not divide the channels; [`Error::SizeOverflow`](crate::Error::SizeOverflow).
    pub fn new(x: TensorDesc, w: TensorDesc, params: &Conv2dParams) -> Result<Self> {
        Self::sized(x, w, params, false)
    }

    /// The spec that [`Conv2dSpec::new`] makes. If `allows_empty` is true, a filter that is larger than the padded
    /// input is allowed; y then has no rows or no columns.
    fn sized(
        x: TensorDesc,
        w: TensorDesc,
        params: &Conv2dParams,
        allows_empty: bool,
    ) -> Result<Self> {
        let &Conv2dParams { stride, padding, dilation, groups, activation, accuracy } = params;
        let steps = [stride, padding, dilation];
        let geometry = Problem::new(&x, &w, steps, groups, allows_empty)?;
        let y = dense_beside(&x, &geometry.y_shape())?;
        let (bias, residual) = (None, false);
        Ok(Self {
            x,
            w,
            y,
            bias,
            residual,
            stride,
            padding,
            dilation,
            groups,
            activation,
            accuracy,
        })
    }

    /// The spec for a transposed convolution. Its input is `y` [n, k, oh, ow] and its result is `x` [n, c, h, w],
    /// because the transposed convolution is the data gradient of an ordinary one. To run it, make a plan of this spec
    /// and call [`Conv2dPlan::backward_data`](crate::Conv2dPlan::backward_data) with the filter `w` [k, c/groups, r, s]
    /// and `y`. That call writes `x`. `x` is dense, and channels-last if y is. Its height is
    /// `h = (oh - 1) * stride - 2 * padding + dilation * (r - 1) + 1 + output_padding`; its width follows likewise.
    ///
    /// In each direction, `output_padding` must be less than the larger of stride and dilation. If it is at least the
    /// stride, the spec's `y` has `output_padding / stride` (rounded down) more rows or columns than the argument `y`.
    /// The caller must append them, filled with zeros, below or on the right of the argument `y`.
    ///
    /// To get the gradients of the transposed convolution, pass the gradient of x in place of x:
    /// [`Conv2dPlan::run`](crate::Conv2dPlan::run) then computes the gradient of y, and
    /// [`Conv2dPlan::backward_weight`](crate::Conv2dPlan::backward_weight) that of w.
    ///
    /// # Errors
    /// As [`Conv2dSpec::new`]; [`Error::Shape`](crate::Error::Shape) also if y does not have k channels, or has images
    /// without rows or columns; [`Error::Parameter`](crate::Error::Parameter) also for a padding that would make a size
    /// of x negative, or an `output_padding` that is at least the stride and at least the dilation.
    ///
    /// ```
    /// use windrow::*;
    /// let y = Tensor::from_slice(&[1f32, 2.0], &[1, 1, 1, 2])?;
    /// let w = Tensor::from_slice(&[1f32, 1.0, 1.0, 10.0], &[1, 1, 2, 2])?;
    /// let params = Conv2dParams::default().with_stride([2, 2]);
    /// let spec = Conv2dSpec::transposed(*y.desc(), *w.desc(), &params, [0, 1])?;
    /// let plan = Conv2dPlan::new(&spec, &PlanOptions::default())?;
    /// let mut workspace = Workspace::new(Device::Cpu, plan.backward_workspace_bytes()?)?;
    /// let mut x = Tensor::uninitialised(spec.x)?;
    /// plan.backward_data(&w.as_ref(), &y.as_ref(), x.as_mut(), &mut workspace)?;
    /// assert_eq!(x.shape(), [1, 1, 2, 5]);
    /// assert_eq!(x.to_vec::<f32>()?, [1.0, 1.0, 2.0, 2.0, 0.0, 1.0, 10.0, 2.0, 20.0, 0.0]);
    /// # Ok::<(), windrow::Error>(())
    /// ```
    pub fn transposed(
        y: TensorDesc,
        w: TensorDesc,
        params: &Conv2dParams,
        output_padding: [usize; 2],
    ) -> Result<Self> {
        let [x_shape, y_shape] = problem::transposed_shapes(&y, &w, params, output_padding)?;
        let x = dense_beside(&y, &x_shape)?;
        let y = if y.shape() == y_shape { y } else { dense_beside(&y, &y_shape)? };
        Self::sized(x, w, params, y_shape[0] == 0).map(|spec| spec.with_output(y))
    }

    /// The options of the convolution: stride, padding, dilation, groups, activation and accuracy.
    pub fn params(&self) -> Conv2dParams {
        let &Self { stride, padding, dilation, groups, activation, accuracy, .. } = self;
        Conv2dParams { stride, padding, dilation, groups, activation, accuracy }
    }

    /// The number of multiplications and additions by the definition, `2 n k oh ow (c/groups) r s`, without the savings
    /// of Winograd's algorithms.
    ///
    /// # Errors
    /// As [`Conv2dSpec::new`], because the fields are public and may have been changed since.
    pub fn flops(&self) -> Result<f64> {
        Ok(self.problem()?.flops())
    }

    /// The sizes, after a check of everything that can be checked without tensor values.
    pub(crate) fn problem(&self) -> Result<Problem> {
        // A transposed convolution of no images may have a result smaller than the filter.
        let is_transposed_of_none =
            matches!(*self.y.shape(), [0, _, rows, columns] if rows == 0 || columns == 0);
        let steps = [self.stride, self.padding, self.dilation];
        let problem = Problem::new(&self.x, &self.w, steps, self.groups, is_transposed_of_none)?;
        check_outputs(self.x.dtype, (&self.y, &problem.y_shape()), self.bias.as_ref())?;
        Ok(problem)
    }
}

/// Checks that y has this type and shape, and that the bias belongs to it.
pub(super) fn check_outputs(
    dtype: DType,
    (y, shape): (&TensorDesc, &[usize]),
    bias: Option<&TensorDesc>,
) -> Result<()> {
    check_tensor("y", y, dtype, shape)?;
    check_unique("y", &y.layout)?;
    let Some(bias) = bias else { return Ok(()) };
    if bias.dtype != DType::F32 {
        check_dtype("bias", bias.dtype, dtype)?;
    }
    check_tensor("bias", bias, bias.dtype, &shape[1..2])
}

/// A dense descriptor of this shape and `like`'s type: channels-last if `like` is.
pub(super) fn dense_beside(like: &TensorDesc, shape: &[usize]) -> Result<TensorDesc> {
    let layout = match is_channels_last(&like.layout) {
        true if shape.len() == 5 => Layout::with_order(shape, &[0, 2, 3, 4, 1]),
        true => Layout::with_order(shape, &[0, 2, 3, 1]),
        false => Layout::contiguous(shape),
    };
    Ok(TensorDesc { dtype: like.dtype, layout: layout? })
}

/// True if neighbouring channels are closer in memory than neighbouring pixels of a row.
pub(crate) fn is_channels_last(layout: &Layout) -> bool {
    let (shape, strides) = (layout.shape(), layout.strides());
    shape[1] > 1 && strides[1].unsigned_abs() < strides[strides.len() - 1].unsigned_abs()
}

/// The output tile of a Winograd algorithm for 3x3 filters: `m x m` outputs, which are computed from a transformed
/// input tile of `alpha x alpha` values. [`Conv2dAlgorithm::WinogradFused`] transforms rows only, so its tiles are m
/// outputs of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Tile {
    /// F(2x2, 3x3): 4 x 4 transforms, 2.25 times fewer multiplications.
    F2,
    /// F(4x4, 3x3): 6 x 6 transforms, 4 times fewer multiplications.
    F4,
    /// F(6x6, 3x3): 8 x 8 transforms, 5.06 times fewer multiplications.
    F6,
}

impl Tile {
    /// The tile sizes.
    pub(crate) const ALL: [Tile; 3] = [Tile::F2, Tile::F4, Tile::F6];

    /// Side of the output tile, m.
    pub const fn m(self) -> usize {
        match self {
            Tile::F2 => 2,
            Tile::F4 => 4,
            Tile::F6 => 6,
        }
    }

    /// Side of the transformed input tile, alpha = m + 2.
    pub const fn alpha(self) -> usize {
        self.m() + 2
    }
}

/// The algorithm of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Conv2dAlgorithm {
    /// Direct sums over the filter's taps, for any spec. On the CPU it stands for the first of the `Direct..`
    /// algorithms below that supports the spec. The cost model chooses it for depthwise filters, among others.
    Direct,
    /// Direct sums with AMX tile registers of bf16; each f32 is split into three bf16 parts. For bf16, and for f32 on
    /// fewer than eight cores, if the accuracy is not [`Accuracy::Exact`]. CPUs with AMX.
    DirectAmx,
    /// Direct sums with instructions that multiply pairs of bf16. For bf16 and one group, if the accuracy is not
    /// [`Accuracy::Exact`]. CPUs with AVX-512 BF16 and without AMX.
    DirectBf16Pairs,
    /// Direct sums with SIMD vectors over output channels. The pixels that the taps of a filter row read are contiguous
    /// in memory. For one group and channels-last tensors. CPU.
    DirectRuns,
    /// Direct sums with SIMD vectors over output channels: of several small groups, or of one group that fills vectors.
    /// For channels-last tensors. CPU.
    DirectGrouped,
    /// Direct sums for depthwise filters, of tensors whose rows are contiguous. Pixels are transposed in registers, so
    /// that SIMD vectors hold channels. CPU.
    DirectTransposed,
    /// Direct sums for depthwise filters with SIMD vectors over the pixels of a channel. CPU.
    DirectPlane,
    /// Direct sums with SIMD vectors over pixels, for any spec. CPU.
    DirectPlanar,
    /// Matrix product of the filter and blocks of the im2col matrix, for any spec.
    Im2colGemm,
    /// Non-fused Winograd: filter transform, input transform, a matrix product for each position of the transformed
    /// tile, and output transform, one after the other. For 3x3 filters, stride 1, dilation 1 and one group.
    WinogradGemm(Tile),
    /// Winograd F(4, 3) along the rows of the image and direct sums along its columns, in one pass over memory, for few
    /// input channels. Only [`Tile::F4`], for the filters of [`WinogradGemm`](Self::WinogradGemm). CPU.
    WinogradFused(Tile),
    /// Matrix product of gathered inputs and the filter on tensor cores; f32 is computed as three products of f16. For
    /// any filter, stride, padding, dilation and groups (in f16 and bf16, groups of a multiple of 8 input channels).
    /// CUDA, compute capability 9.0.
    ImplicitGemm,
    /// Winograd F(3, 3) along rows and the direct sum along columns, in one kernel. For the filters of
    /// [`WinogradGemm`](Self::WinogradGemm). CUDA, compute capability 9.0.
    WinogradRow,
    /// The convolution of cuDNN, for any spec whose x and y are dense and both NCHW or both channels-last. CUDA, with
    /// cuDNN installed.
    Cudnn,
}

impl Conv2dAlgorithm {
    /// The output tile of [`WinogradGemm`](Self::WinogradGemm) and [`WinogradFused`](Self::WinogradFused); `None` for
    /// all other algorithms.
    pub const fn tile(self) -> Option<Tile> {
        use Conv2dAlgorithm::{WinogradFused, WinogradGemm};
        if let WinogradGemm(tile) | WinogradFused(tile) = self { Some(tile) } else { None }
    }

    /// True for Winograd's algorithms.
    pub(crate) fn is_winograd(self) -> bool {
        self.tile().is_some() || self == Conv2dAlgorithm::WinogradRow
    }
}

names! {
    Conv2dAlgorithm, "algorithm":
    Direct = "direct",
    DirectAmx = "direct_amx",
    DirectBf16Pairs = "direct_bf16_pairs",
    DirectRuns = "direct_runs",
    DirectGrouped = "direct_grouped",
    DirectTransposed = "direct_transposed",
    DirectPlane = "direct_plane",
    DirectPlanar = "direct_planar",
    Im2colGemm = "im2col_gemm",
    ImplicitGemm = "implicit_gemm",
    WinogradGemm(Tile::F2) = "winograd_gemm_f2",
    WinogradGemm(Tile::F4) = "winograd_gemm_f4",
    WinogradGemm(Tile::F6) = "winograd_gemm_f6",
    WinogradFused(Tile::F2) = "winograd_fused_f2",
    WinogradFused(Tile::F4) = "winograd_fused_f4",
    WinogradFused(Tile::F6) = "winograd_fused_f6",
    WinogradRow = "winograd_row",
    Cudnn = "cudnn",
}
