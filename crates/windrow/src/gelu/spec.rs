//! The spec of GELU: types, shapes, options, and the checks that need no data.

use crate::forms::{fields, names};
use crate::tensor::{check_dtype, check_tensor, check_unique};
use crate::{Activation, Approximate, DType, Error, Result, TensorDesc};

fields! {
    /// The spec of `y = gelu(x + bias) * gate`, element by element.
    ///
    /// | tensor | shape | type | strides |
    /// |---|---|---|---|
    /// | `x`, `gate` | the same shape, of at most 8 dimensions | f32, f16 or bf16 | any, also 0 and negative |
    /// | `y` | `x`'s | `x`'s | any without overlap |
    /// | `bias` | `[last dimension of x]` | f32 or `x`'s | any |
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    GeluSpec by fn bare {
        /// The input.
        x: TensorDesc,
        /// The output.
        y: TensorDesc => with_output,
        /// The formula: exact ([`Approximate::None`]) or the tanh approximation ([`Approximate::Tanh`]).
        approximate: Approximate,
    }
    default {
        /// The arithmetic for f16 and bf16. It has no effect for f32.
        half_math: HalfMath = HalfMath::Float => with_half_math,
    }
    optional {
        /// The bias, added to `x` along its last dimension.
        bias: TensorDesc => with_bias,
        /// The gate, by which the result `gelu(x + bias)` is multiplied, element by element.
        gate: TensorDesc => with_gate,
    }
}

/// The arithmetic of kernels on f16 and bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HalfMath {
    /// Computation in f32, rounded once, at the end. Each result is within one unit in the last place of the correctly
    /// rounded result, also for large negative inputs, where GELU is almost zero.
    #[default]
    Float,
    /// Computation in f16 or bf16 with instructions for pairs, on GPUs only, and only without bias and gate. The error
    /// is proportional to `x`: a few units in the last place of `x`. So results for large negative inputs, which are
    /// close to zero, lose all relative accuracy. It is not faster than `Float` if memory bandwidth is the limit.
    Native,
}

names! { HalfMath, "half_math": Float = "float", Native = "native" }

impl GeluSpec {
    /// The spec of GELU of `x` without bias and gate. The output has the same layout as `x` if the elements of `x` fill
    /// their memory without gaps and no stride is negative, otherwise a row-major layout.
    ///
    /// # Errors
    /// As [`Layout::contiguous`](crate::Layout::contiguous).
    pub fn new(x: TensorDesc, approximate: Approximate) -> Result<Self> {
        let y = if is_dense(&x) { x } else { TensorDesc::contiguous(x.dtype, x.shape())? };
        Ok(Self::bare(x, y, approximate))
    }

    /// The same function as an [`Activation`], the type that the other operators use.
    pub fn activation(&self) -> Activation {
        Activation::Gelu(self.approximate)
    }

    /// Checks everything that can be checked without tensor values.
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

/// Checks that a bias has the shape `[last]`, and f32 or the type of `x`.
fn check_bias(arg: &'static str, bias: &TensorDesc, dtype: DType, last: usize) -> Result<()> {
    if bias.dtype != DType::F32 {
        check_dtype(arg, bias.dtype, dtype)
            .map_err(|_| Error::dtype(arg, bias.dtype, format!("f32 or {dtype}")))?;
    }
    check_tensor(arg, bias, bias.dtype, &[last])
}

/// True if the elements fill their memory without gaps and no stride is negative.
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
    /// CPU, SIMD vectors of the widest instruction set, in f32.
    Cpu,
    /// GPU, f32, one element per thread.
    F32,
    /// GPU, f32, four elements per thread in one memory access.
    F32x4,
    /// GPU, f16, one element per thread.
    F16,
    /// GPU, f16, two elements per thread in one memory access.
    F16x2,
    /// GPU, f16, eight elements per thread in four memory accesses.
    F16x8,
    /// GPU, f16, eight elements per thread in one memory access.
    F16x8Pack,
    /// GPU, bf16, one element per thread.
    Bf16,
    /// GPU, bf16, two elements per thread in one memory access.
    Bf16x2,
    /// GPU, bf16, eight elements per thread in one memory access.
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
