//! What the fuzz targets share: arbitrary tensors, options and the verdict on a result.
//!
//! Plans run with `Verify::On`, so each result is compared with the f64 oracle. A target fails on a
//! panic and on a wrong result; any other error is a right answer to bad input.

pub use arbitrary::{Arbitrary, Result, Unstructured};
use std::num::NonZeroUsize;
use windrow::verify::random_tensor;
use windrow::{
    Activation, Approximate, DType, Device, Error, Layout, PlanOptions, Tensor, TensorDesc, Verify,
    Workspace,
};

/// Most elements of a tensor: the oracle is slow.
const MAX_ELEMENTS: usize = 4096;

/// One of the values.
pub fn one_of<T: Copy>(u: &mut Unstructured<'_>, values: &[T]) -> Result<T> {
    u.choose(values).copied()
}

pub fn compute_type(u: &mut Unstructured<'_>) -> Result<DType> {
    one_of(u, &[DType::F32, DType::F16, DType::BF16])
}

/// f32 or the type given, as for biases.
pub fn f32_or(u: &mut Unstructured<'_>, dtype: DType) -> Result<DType> {
    one_of(u, &[DType::F32, dtype])
}

pub fn activation(u: &mut Unstructured<'_>) -> Result<Activation> {
    let gelu = [Approximate::None, Approximate::Tanh].map(Activation::Gelu);
    one_of(u, &[Activation::Identity, Activation::Relu, Activation::Silu, gelu[0], gelu[1]])
}

/// A size, now and then one that overflows.
pub fn size(u: &mut Unstructured<'_>, max: usize) -> Result<usize> {
    Ok(if u.ratio(1, 64)? { usize::arbitrary(u)? } else { u.int_in_range(0..=max)? })
}

/// A descriptor of the shape with its dimensions in any order in memory, with gaps and negative strides;
/// `None` if it would be too large.
pub fn desc(u: &mut Unstructured<'_>, dtype: DType, shape: &[usize]) -> Result<Option<TensorDesc>> {
    let mut order: Vec<usize> = (0..shape.len()).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, u.int_in_range(0..=i)?);
    }
    let mut strides = vec![0isize; shape.len()];
    let mut stride = 1usize;
    for &dim in order.iter().rev() {
        stride = stride.saturating_add(u.int_in_range(0..=2)?);
        let sign = if u.ratio(1, 8)? { -1 } else { 1 };
        strides[dim] = sign * isize::try_from(stride).unwrap_or(isize::MAX);
        stride = stride.saturating_mul(shape[dim].max(1));
    }
    let elements = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
    if elements.is_none_or(|elements| elements > MAX_ELEMENTS) || stride > 16 * MAX_ELEMENTS {
        // Sizes alone: the spec has to refuse them or the caller skips the run.
        return Ok(TensorDesc::contiguous(dtype, shape).ok());
    }
    Ok(Layout::strided(shape, &strides).ok().map(|layout| TensorDesc { dtype, layout }))
}

/// A tensor of random values; `None` where it would be too large.
pub fn tensor(seed: u64, desc: TensorDesc) -> Option<Tensor> {
    let small = desc.layout.len() <= MAX_ELEMENTS && desc.bytes() <= 64 * MAX_ELEMENTS;
    small.then(|| random_tensor(seed, desc, -2.0, 2.0).ok()).flatten()
}

/// A tensor for a gradient, or none: not every one is asked for.
pub fn gradient(u: &mut Unstructured<'_>, dtype: DType, shape: &[usize]) -> Result<Option<Tensor>> {
    let asked: bool = u.arbitrary()?;
    Ok(if asked { desc(u, dtype, shape)?.and_then(|desc| tensor(9, desc)) } else { None })
}

/// i32 values in a range, as a tensor.
pub fn integers(
    u: &mut Unstructured<'_>,
    shape: &[usize],
    low: i32,
    high: i32,
) -> Result<Option<Tensor>> {
    let Some(len) = shape.iter().try_fold(1usize, |p, &s| p.checked_mul(s)) else {
        return Ok(None);
    };
    if len > MAX_ELEMENTS {
        return Ok(None);
    }
    let values: Vec<i32> = (0..len).map(|_| u.int_in_range(low..=high)).collect::<Result<_>>()?;
    Ok(Tensor::from_slice(&values, shape).ok())
}

/// Plans that compare every run with the oracle, on 1 or 2 threads.
pub fn options(u: &mut Unstructured<'_>) -> Result<PlanOptions> {
    let threads = NonZeroUsize::new(u.int_in_range(1..=2)?);
    Ok(PlanOptions { threads, verify: Verify::On, ..PlanOptions::default() })
}

/// Scratch memory for a plan; `None` where it would be too large.
pub fn workspace(bytes: usize) -> Option<Workspace> {
    (bytes <= 1024 * MAX_ELEMENTS).then(|| Workspace::new(Device::Cpu, bytes).ok()).flatten()
}

/// Panics if the result was wrong.
pub fn judge(result: windrow::Result<()>) {
    if let Err(error @ Error::Verification { .. }) = result {
        panic!("{error}");
    }
}
