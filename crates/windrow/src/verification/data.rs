//! Test data: random values, tensors with guard bytes, and random layouts.

use super::choices::{self, Choices};
#[cfg(all(test, target_os = "linux"))]
use crate::buffer::guarded::Side;
use crate::dtype::not_computed;
use crate::tensor::for_each_offset;
use crate::{
    Activation, DType, Device, Element, Layout, NegativeSlope, Placed, PlanOptions, Result, Tensor,
    TensorDesc, TensorMut, TensorRef, Tuning, Workspace, bf16, f16,
};
use std::num::NonZeroUsize;

/// `len` random numbers, uniformly distributed over `low..high`; the same seed gives the same numbers on every machine.
pub fn random(seed: u64, len: usize, low: f64, high: f64) -> Vec<f64> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            let unit = (choices::next(&mut state) >> 11) as f64 / (1u64 << 53) as f64;
            low + unit * (high - low)
        })
        .collect()
}

/// A tensor of [`random`] numbers rounded to its type, in row-major order of the elements.
///
/// # Errors
/// As [`Tensor::uninitialised`]: the layout must be dense.
pub fn random_tensor(seed: u64, desc: TensorDesc, low: f64, high: f64) -> Result<Tensor> {
    tensor_of(desc, &random(seed, desc.layout.len(), low, high))
}

/// A tensor of `values`, in row-major order, rounded to its type.
pub(crate) fn tensor_of(desc: TensorDesc, values: &[f64]) -> Result<Tensor> {
    let mut tensor = Tensor::uninitialised(desc)?;
    fill(tensor.as_mut().as_mut_ptr(), &desc, values);
    Ok(tensor)
}

/// Writes `values` to a tensor in row-major order. `base` is the address of the element at index zero; the caller must
/// own the memory exclusively.
fn fill(base: *mut u8, desc: &TensorDesc, values: &[f64]) {
    fn cast<T: Element>(base: *mut u8, layout: &Layout, values: &[f64]) {
        let mut values = values.iter();
        for_each_offset(layout, |offset| {
            if let Some(&value) = values.next() {
                // SAFETY: callers pass memory of this layout, whose elements are of type T.
                unsafe { base.cast::<T>().offset(offset).write(T::from_f64(value)) };
            }
        });
    }
    match desc.dtype {
        DType::F32 => cast::<f32>(base, &desc.layout, values),
        DType::F16 => cast::<f16>(base, &desc.layout, values),
        DType::BF16 => cast::<bf16>(base, &desc.layout, values),
        DType::F64 => cast::<f64>(base, &desc.layout, values),
        DType::I32 => cast::<i32>(base, &desc.layout, values),
        DType::I64 => cast::<i64>(base, &desc.layout, values),
        DType::U8 => cast::<u8>(base, &desc.layout, values),
    }
}

/// A test tensor of any layout on a device, in memory of its own and surrounded by guard bytes. All other bytes of the
/// memory (before, between and after the elements) are 0xff. Elements of such bytes are NaN in every float type.
pub(crate) struct Held {
    memory: Placed,
    desc: TensorDesc,
    /// The number of guard elements before the lowest element.
    before: usize,
    /// The offset in bytes of the element at index zero.
    offset: usize,
}

/// The number of guard elements after a tensor.
const MARGIN: usize = 3;

/// The numbers of guard elements before and after a tensor of `bytes` bytes; `before` is the number that was asked for.
fn margins(before: usize, bytes: usize, dtype: DType) -> (usize, usize) {
    // With guard pages around the buffer, the tensor starts directly after the first or ends directly before the
    // second, up to alignment.
    #[cfg(all(test, target_os = "linux"))]
    match crate::buffer::guarded::side() {
        Some(Side::Start) => return (0, MARGIN),
        Some(Side::End) => return ((bytes.next_multiple_of(64) - bytes) / dtype.size(), 0),
        None => {}
    }
    let _ = (bytes, dtype);
    (before, MARGIN)
}

impl Held {
    /// A tensor on the CPU with `values`, without guard elements before it.
    #[cfg(test)]
    pub(crate) fn new(desc: TensorDesc, values: &[f64]) -> Result<Self> {
        Self::at(desc, values, 0, Device::Cpu)
    }

    /// A tensor of `desc` on `device` with `values` in row-major order. Its lowest element lies `before` elements after
    /// an address that is a multiple of 64. If `values` is empty, the elements are filled with the guard bytes too, so
    /// they are NaN.
    pub(crate) fn at(
        desc: TensorDesc,
        values: &[f64],
        before: usize,
        device: Device,
    ) -> Result<Self> {
        let (low, high) = desc.layout.extent().unwrap_or((0, -1));
        let elements = (high - low + 1) as usize;
        let (before, behind) = margins(before, elements * desc.dtype.size(), desc.dtype);
        let len = before + elements + behind;
        let whole = TensorDesc::contiguous(desc.dtype, &[len])?;
        let mut memory = Tensor::uninitialised(whole)?;
        memory.as_bytes_mut().fill(0xff);
        let offset = (before + low.unsigned_abs()) * desc.dtype.size();
        fill(memory.as_bytes_mut()[offset..].as_mut_ptr(), &desc, values);
        Ok(Held { memory: Placed::new(memory, device)?, desc, before, offset })
    }

    /// View for reading.
    pub(crate) fn as_ref(&self) -> TensorRef<'_> {
        let memory = self.memory.as_ref();
        let ptr = memory.as_ptr().wrapping_add(self.offset);
        // SAFETY: the memory was made for the layout at this offset and is borrowed.
        unsafe { TensorRef::from_raw(ptr.cast(), self.desc, memory.device()) }
    }

    /// View for writing.
    pub(crate) fn as_mut(&mut self) -> Result<TensorMut<'_>> {
        let mut memory = self.memory.as_mut()?;
        let ptr = memory.as_mut_ptr().wrapping_add(self.offset);
        // SAFETY: the memory was made for the layout at this offset and is borrowed mutably.
        unsafe { TensorMut::from_raw(ptr.cast(), self.desc, memory.device()) }
    }

    /// Sets all elements to NaN, so that an element that the next run does not write is found.
    pub(crate) fn fill_nan(&mut self) -> Result<()> {
        *self = Self::at(self.desc, &[], self.before, self.as_ref().device())?;
        Ok(())
    }

    /// The elements in row-major order.
    pub(crate) fn values(&self) -> Result<Vec<f64>> {
        self.as_ref().to_f64_vec()
    }

    /// True if all bytes between and around the elements are unchanged.
    pub(crate) fn is_intact_around(&self) -> Result<bool> {
        let mut around = self.memory.bytes()?;
        let size = self.desc.dtype.size();
        for_each_offset(&self.desc.layout, |o| {
            let at = self.offset.wrapping_add_signed(o * size as isize);
            around[at..at + size].fill(0xff);
        });
        Ok(around.iter().all(|&byte| byte == 0xff))
    }
}

/// The kind of input values of a random case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Numbers {
    /// Numbers between -2 and 2.
    Ordinary,
    /// Numbers with NaN, infinities and zeros among them.
    Special,
    /// Values up to the smallest normal number of their type, so mostly subnormal ones.
    Tiny,
    /// Large numbers: up to 2^61, for f16 up to 2^7.
    Large,
    /// Numbers up to an eighth of the largest number of their type.
    Largest,
    /// Zeros.
    Zero,
}

impl Numbers {
    pub(crate) fn random(choices: &mut Choices<'_>) -> Self {
        let rare = [
            Numbers::Special,
            Numbers::Special,
            Numbers::Tiny,
            Numbers::Large,
            Numbers::Largest,
            Numbers::Zero,
        ];
        if choices.one_in(5) { choices.of(&rare) } else { Numbers::Ordinary }
    }

    /// The kind of input values for an operator that applies `activation` to its sums. `Largest` becomes `Large`: a sum
    /// may overflow to infinity within the tolerance, but an activation such as ReLU6 turns that infinity into a
    /// finite, wrong number.
    pub(crate) fn before(self, activation: Activation) -> Self {
        match self {
            Numbers::Largest if activation != Activation::Identity => Numbers::Large,
            numbers => numbers,
        }
    }

    /// The kind of values of incoming gradients: on the CPU the same, on a GPU always `Ordinary`.
    pub(crate) fn gradients(self, device: Device) -> Self {
        if device == Device::Cpu { self } else { Numbers::Ordinary }
    }

    /// Numbers for a tensor of parameters or of gradients. If `exact`, they are multiples of 1/8, so that the sums of
    /// products of a case are exact in f32.
    pub(crate) fn parameters(seed: u64, desc: &TensorDesc, exact: bool) -> Vec<f64> {
        let mut values = random(seed, desc.layout.len(), -2.0, 2.0);
        if exact {
            values.iter_mut().for_each(|value| *value = (*value * 8.0).round() / 8.0);
        }
        values
    }

    /// Numbers of this kind for a tensor of data.
    pub(crate) fn data(self, seed: u64, desc: &TensorDesc, exact: bool) -> Vec<f64> {
        let mut values = Self::parameters(seed, desc, exact);
        let factor = match (self, desc.dtype) {
            (Numbers::Tiny, DType::F16) => 2f64.powi(-15),
            (Numbers::Tiny, DType::F32 | DType::BF16 | not_computed!()) => 2f64.powi(-127),
            (Numbers::Large, DType::F16) => 2f64.powi(6),
            (Numbers::Large, DType::F32 | DType::BF16 | not_computed!()) => 2f64.powi(60),
            (Numbers::Largest, DType::F16) => 2f64.powi(12),
            (Numbers::Largest, DType::F32 | DType::BF16 | not_computed!()) => 2f64.powi(124),
            (Numbers::Zero, _) => 0.0,
            (Numbers::Ordinary | Numbers::Special, _) => 1.0,
        };
        values.iter_mut().for_each(|value| *value *= factor);
        if self == Numbers::Special {
            const SPECIAL: [f64; 5] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0];
            // Replace about one value in a hundred, and at least one.
            let mut state = seed;
            for _ in 0..(values.len() / 100 + 1).min(values.len()) {
                let at = choices::next(&mut state) as usize % values.len();
                values[at] = SPECIAL[choices::next(&mut state) as usize % SPECIAL.len()];
            }
        }
        values
    }
}

/// A random activation. Leaky ReLU has one of several slopes.
pub(crate) fn activation(choices: &mut Choices<'_>) -> Activation {
    match choices.of(Activation::ALL) {
        given @ Activation::LeakyRelu(_) => {
            let slope = NegativeSlope::new(choices.of(&[0.01, 0.2, 0.0, 1.0, 1.5, -0.5]));
            slope.map_or(given, Activation::LeakyRelu)
        }
        given => given,
    }
}

/// The plan options of a random case. They use the cost model, so that results do not depend on what was tuned on the
/// machine.
pub(crate) fn options(choices: &mut Choices<'_>, device: Device) -> PlanOptions {
    PlanOptions {
        device,
        threads: NonZeroUsize::new(choices.of(&[1, 2, 3])),
        tuning: Tuning::Model,
        ..PlanOptions::default()
    }
}

/// A workspace for a random case. On the CPU it is filled with NaN, because results must not depend on what an earlier
/// run left in it.
pub(crate) fn scratch(device: Device, bytes: usize) -> Result<Workspace> {
    let mut workspace = Workspace::new(device, bytes)?;
    if device == Device::Cpu {
        workspace.take(bytes)?.fill(0xff);
    }
    Ok(workspace)
}

/// The memory layout of the tensors of a random case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    /// True if tensors are dense and aligned, as the fast paths of vectorised kernels need them.
    tidy: bool,
    /// The dimension order that all tensors of the case share, as an index; `None` if each tensor draws its own.
    order: Option<usize>,
}

impl Style {
    pub(crate) fn random(choices: &mut Choices<'_>) -> Self {
        let tidy = choices.one_in(2);
        let order = choices.below(3);
        Style { tidy, order: (order < 2).then_some(order) }
    }

    /// The offset of a tensor's start from an address that is a multiple of 64, in elements.
    pub(crate) fn lead(self, choices: &mut Choices<'_>) -> usize {
        if !self.tidy && choices.one_in(3) { choices.within(1..=17) } else { 0 }
    }

    /// A random layout of the shape. If the style is tidy, the layout is dense and has one of the dimension orders
    /// `orders`. Otherwise it may have any dimension order, gaps, negative strides, and arbitrary strides in dimensions
    /// of size 1. An input may also be broadcast, or its elements may overlap.
    pub(crate) fn layout(
        self,
        choices: &mut Choices<'_>,
        shape: &[usize],
        orders: &[&[usize]],
        input: bool,
    ) -> Result<Layout> {
        let order = self.order.map_or_else(|| choices.below(orders.len()), |i| i % orders.len());
        let mut order = orders[order].to_vec();
        if self.tidy {
            return Layout::with_order(shape, &order);
        }
        if choices.one_in(6) {
            for i in (1..order.len()).rev() {
                order.swap(i, choices.below(i + 1));
            }
        }
        let gaps = choices.one_in(3);
        let backwards = choices.one_in(6);
        let mut strides = vec![0isize; shape.len()];
        let mut step = if gaps && choices.one_in(4) { choices.within(2..=4) } else { 1 };
        for (i, &d) in order.iter().rev().enumerate() {
            let sign = if backwards && choices.one_in(2) { -1 } else { 1 };
            strides[d] = sign * step as isize;
            if shape[d] == 1 && choices.one_in(4) {
                strides[d] = choices.of(&[0, 1, 7, -3, 1 << 40]);
            }
            step *= shape[d].max(1);
            if gaps && i + 1 < shape.len() {
                // One of the gaps rounds the stride up to a multiple of 8, so that rows stay aligned for SIMD loads.
                step = match choices.below(4) {
                    0 => step,
                    1 => step.next_multiple_of(8) + 8,
                    _ => step + choices.within(1..=5),
                };
            }
        }
        if input && !shape.is_empty() && choices.one_in(12) {
            let d = choices.below(shape.len());
            strides[d] = if choices.one_in(4) { 1 } else { 0 };
        }
        Layout::strided(shape, &strides)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;

    #[test]
    fn random_numbers_are_reproducible_and_in_range() {
        let a = random(1, 1000, -2.0, 3.0);
        assert_eq!(a, random(1, 1000, -2.0, 3.0));
        assert_ne!(a, random(2, 1000, -2.0, 3.0));
        assert!(a.iter().all(|x| (-2.0..3.0).contains(x)));
        let mean = a.iter().sum::<f64>() / 1000.0;
        assert!((mean - 0.5).abs() < 0.15, "{mean}");
        let layout = Layout::with_order(&[10, 100], &[1, 0]).unwrap();
        let desc = TensorDesc { dtype: DType::F64, layout };
        let t = random_tensor(1, desc, -2.0, 3.0).unwrap();
        assert_eq!(t.as_ref().to_f64_vec().unwrap(), a);
    }
}
