//! Constants and parameters of conv2d's kernels: epilogues, strides, biases, divisors.

use crate::conv2d::Conv2dSpec;
use crate::conv2d::gpu::PackTo;
use crate::dtype::by_type;
use crate::gpu::{KernelSpec, Launch, Source};
use crate::{DType, TensorDesc};

/// A kernel of conv2d for elements of a type.
pub(crate) fn kernel(source: &'static Source, name: &str, dtype: DType) -> KernelSpec {
    let macro_name =
        by_type!(dtype, F32 => "ELEMENT_F32", F16 => "ELEMENT_F16", BF16 => "ELEMENT_BF16");
    KernelSpec::new(source, format!("conv2d_{name}_{dtype}")).define(macro_name, 1)
}

/// The kernel with its epilogue: `EPILOGUE`, the activation's name in `activation.cuh`, and whether a residual is added
/// before it.
pub(crate) fn with_epilogue(kernel: KernelSpec, spec: &Conv2dSpec) -> KernelSpec {
    kernel
        .define_activation("EPILOGUE", spec.activation)
        .define("RESIDUAL", i32::from(spec.residual))
}

/// Threads of a block where each computes an element.
pub(crate) const THREADS: usize = 256;

/// A launch of one thread for each of this number of elements.
pub(crate) fn one_thread_each(elements: usize) -> Launch {
    Launch::line(elements.div_ceil(THREADS), THREADS)
}

/// Strides of a tensor of rank 4, in elements. The stride of a dimension of size 1 is set to 0: kernels compute
/// addresses outside the image before they find that nothing is there, in 32 bits if the image allows.
pub(crate) fn strides(desc: &TensorDesc) -> [i64; 4] {
    std::array::from_fn(|d| if desc.shape()[d] > 1 { desc.strides()[d] as i64 } else { 0 })
}

/// The checksums by which a packing kernel finds out what has changed since a filter was last packed; `Seen` of
/// `conv2d.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    digests: *mut u8,
    ticket: u64,
}

impl Seen {
    /// The bytes for each block of a packing kernel.
    pub(crate) const DIGEST: usize = 16;

    /// The checksums after a packed filter of `packed_bytes` bytes if it is cached; otherwise none.
    pub(crate) fn behind(to: PackTo, packed_bytes: usize) -> Self {
        match to.ticket {
            Some(ticket) => Seen { digests: to.memory.wrapping_add(packed_bytes), ticket },
            None => Seen { digests: std::ptr::null_mut(), ticket: 0 },
        }
    }

    /// The same for a kernel that reads the filter in its memory order: a filter in another order counts as another
    /// filter.
    pub(crate) fn in_order_of(self, w: &TensorDesc) -> Self {
        w.strides().iter().fold(self, |seen, &stride| seen.with_stride(stride))
    }

    /// The same with another stride of the filter's.
    pub(crate) fn with_stride(self, stride: isize) -> Self {
        let mixed = (self.ticket ^ stride as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Seen { ticket: mixed.rotate_left(29), ..self }
    }
}

/// `Divisor` of `conv2d.cuh`: division of numbers below 2^31.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Divisor {
    value: u32,
    factor: u32,
    shift: u32,
}

impl Divisor {
    /// The divisor; 1 instead of 0, by which nothing is divided (the taps of a filter that has none).
    pub(crate) fn new(value: usize) -> Self {
        let value = value.max(1);
        let bits = value.next_power_of_two().trailing_zeros();
        let factor =
            if value == 1 { 0 } else { (1u64 << (31 + bits)).div_ceil(value as u64) as u32 };
        Divisor { value: value as u32, factor, shift: bits.saturating_sub(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;

    #[test]
    fn a_single_row_has_no_stride() {
        let layout = Layout::strided(&[3, 4, 1, 7], &[28, 7, 1 << 40, 1]).unwrap();
        let desc = TensorDesc { dtype: DType::F16, layout };
        assert_eq!(strides(&desc), [28, 7, 0, 1]);
    }

    #[test]
    fn filters_in_other_orders_are_others() {
        let seen = Seen { digests: std::ptr::null_mut(), ticket: 7 };
        let of = |order: &[usize]| {
            let layout = Layout::with_order(&[8, 4, 3, 3], order).unwrap();
            seen.in_order_of(&TensorDesc { dtype: DType::F32, layout }).ticket
        };
        assert_eq!(of(&[0, 1, 2, 3]), of(&[0, 1, 2, 3]));
        assert_ne!(of(&[0, 1, 2, 3]), of(&[0, 2, 3, 1]));
        assert_ne!(of(&[0, 1, 2, 3]), of(&[0, 1, 3, 2]));
    }

    #[test]
    fn a_divisor_is_not_zero() {
        assert_eq!(Divisor::new(0).value, 1);
    }

    #[test]
    fn divisors_divide() {
        let divide = |d: &Divisor, n: u32| match d.value {
            1 => n,
            _ => ((u64::from(n) * u64::from(d.factor)) >> 32) as u32 >> d.shift,
        };
        for value in [1, 2, 3, 5, 6, 7, 9, 64, 641, 12_345, 1 << 20, (1 << 30) - 1] {
            let d = Divisor::new(value);
            for n in [0, 1, 2, 100, 12_344, 1 << 30, i32::MAX as u32] {
                for n in [
                    n,
                    n / value as u32 * value as u32,
                    (n / value as u32 * value as u32).saturating_sub(1),
                ] {
                    assert_eq!(divide(&d, n), n / value as u32, "{n} / {value}");
                }
            }
        }
    }
}
