//! The spec of GELU: types, shapes, options, and the checks that need no data.

use crate::forms::{fields, names};
use crate::tensor::{check_dtype, check_tensor, check_unique};
use crate::{Activation, Approximate, DType, Error, Result, TensorDesc};

fields! {
    /// The spec of `y = gelu(x + bias) * gate`, element by element.
    ///
    /// | tensor | shape | type | strides |
    /// |---|---|---|---|
    /// | `x`, `gate` | one shape of any rank | f32, f16 or bf16 | any, also 0 and negative |
    /// | `y` | `x`'s | `x`'s | any without overlap |
    /// | `bias` | `[last dimension of x]` | f32 or `x`'s | any |
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    GeluSpec by fn bare {
        /// The input.
        x: TensorDesc,
        /// The output.
        y: TensorDesc => with_output,
        /// The form: exact or tanh.
        approximate: Approximate,
    }
    default {
        /// The arithmetic of f16 and bf16; f32 ignores it.
        half_math: HalfMath = HalfMath::Float => with_half_math,
    }
    optional {
        /// The bias, added to `x` along its last dimension.
        bias: TensorDesc => with_bias,
        /// The gate, which the activation is multiplied by.
        gate: TensorDesc => with_gate,
    }
}

/// The arithmetic of kernels on f16 and bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HalfMath {
    /// Computation in f32, rounded once at the end: within one unit in the last place of the correctly rounded result,
    /// tail included.
    #[default]
    Float,
    /// Computation in pairs of f16/bf16 themselves, without bias and gate, on CUDA only. The absolute error is a few
    /// units in the last place at 1: the tail of negative inputs is lost. It is no faster if memory is the limit.
    Native,
}

names! { HalfMath, "half_math": Float = "float", Native = "native" }

impl GeluSpec {
    /// A spec without bias and gate: GELU of `x` into an output of the same layout, or a row-major one if elements of
    /// `x` share memory.
    ///
    /// # Errors
    /// As [`Layout::contiguous`](crate::Layout::contiguous).
    pub fn new(x: TensorDesc, approximate: Approximate) -> Result<Self> {
        let y = if is_dense(&x) { x } else { TensorDesc::contiguous(x.dtype, x.shape())? };
        Ok(Self::bare(x, y, approximate))
    }

    /// The activation as the other operators know it.
    pub fn activation(&self) -> Activation {
        Activation::Gelu(self.approximate)
    }

    /// Every check that needs no data.
    pub(crate) fn check(&self) -> Result<()> {
        let dtype = self.x.dtype;
        if !dtype.is_compute() {
            return Err(Error::dtype("x", dtype, "f32, f16 or bf16"));
        }
        check_tensor("y", &self.y, dtype, self.x.shape())?;
        check_unique("y", &self.y.layout)?;
        if let Some(gate) = &self.gate {
            check_tensor("gate", gate, dtype, self.x.shape())?;
        }
        if let Some(bias) = &self.bias {
            let Some(&last) = self.x.shape().last() else {
                return Err(Error::Rank {
                    arg: "x",
                    given: 0,
                    expected: "at least 1 where a bias is added along the last",
                });
            };
            check_bias("bias", bias, dtype, last)?;
        }
        Ok(())
    }
}

/// `[last]`, in f32 or the type of `x`.
fn check_bias(arg: &'static str, bias: &TensorDesc, dtype: DType, last: usize) -> Result<()> {
    if bias.dtype != DType::F32 {
        check_dtype(arg, bias.dtype, dtype)
            .map_err(|_| Error::dtype(arg, bias.dtype, format!("f32 or {dtype}")))?;
    }
    check_tensor(arg, bias, bias.dtype, &[last])
}

/// True if the elements fill their memory without gaps from the lowest address on.
fn is_dense(x: &TensorDesc) -> bool {
    x.layout.is_unique()
        && x.layout
            .extent()
            .is_none_or(|(low, high)| low == 0 && high as usize + 1 == x.layout.len())
}

/// An algorithm of GELU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GeluAlgorithm {
    /// Vectors of the CPU's widest instruction set, in f32.
    Cpu,
    /// CUDA, f32, one element a thread.
    F32,
    /// CUDA, f32, four elements a thread in one access.
    F32x4,
    /// CUDA, f16, one element a thread.
    F16,
    /// CUDA, f16, a pair a thread.
    F16x2,
    /// CUDA, f16, eight elements a thread in four accesses.
    F16x8,
    /// CUDA, f16, eight elements a thread in one access.
    F16x8Pack,
    /// CUDA, bf16, one element a thread.
    Bf16,
    /// CUDA, bf16, a pair a thread.
    Bf16x2,
    /// CUDA, bf16, eight elements a thread in one access.
    Bf16x8,
}

names! {
    GeluAlgorithm, "algorithm":
    Cpu = "cpu",
    F32 = "f32",
    F32x4 = "f32x4",
    F16 = "f16",
    F16x2 = "f16x2",
    F16x8 = "f16x8",
    F16x8Pack = "f16x8_pack",
    Bf16 = "bf16",
    Bf16x2 = "bf16x2",
    Bf16x8 = "bf16x8",
}
