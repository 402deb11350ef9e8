//! A plain copy, whose speed is the upper bound for memory-bound kernels.

use super::{KernelSpec, Launch, Source, Stream, params};
use crate::{Error, Result, TensorMut, TensorRef};

static SOURCE: Source =
    Source { name: "copy.cu", text: include_str!("kernels/copy.cu"), includes: &[] };

params! {
    struct Params {
        y: *mut u8,
        x: *const u8,
        vectors: usize,
    }
}

fn kernel_spec() -> KernelSpec {
    KernelSpec::new(&SOURCE, "copy_16").params::<Params>()
}

/// Copies `x` to `y` in stream order, 16 bytes per thread.
///
/// # Errors
/// [`Error::Shape`] or [`Error::DType`] if the two differ, [`Error::WrongDevice`], [`Error::Unsupported`] unless both
/// have the same strides, without gaps, are aligned to 16 bytes and are a multiple of 16 bytes long;
/// [`Error::Backend`].
pub fn copy(x: &TensorRef<'_>, y: &mut TensorMut<'_>, stream: &Stream) -> Result<()> {
    crate::tensor::check_tensor("y", y.desc(), x.dtype(), x.shape())?;
    crate::tensor::check_device("x", x.device(), stream.device())?;
    crate::tensor::check_device("y", y.device(), stream.device())?;
    let (Some((from, end)), Some((to, _))) = (x.address_range(), y.as_ref().address_range()) else {
        return Ok(());
    };
    let bytes = x.desc().bytes();
    let dense = x.layout() == y.layout() && end - from == bytes;
    if !(dense && [from, to, bytes].iter().all(|n| n.is_multiple_of(16))) {
        return Err(Error::unsupported(
            "a copy of these tensors",
            "it moves whole 16-byte vectors between tensors that lie alike without gaps",
        ));
    }
    let params = Params { y: to as *mut u8, x: from as *const u8, vectors: bytes / 16 };
    let launch = Launch { grid: [params.vectors.div_ceil(256) as u32, 1, 1], block: [256, 1, 1] };
    // SAFETY: `Params` is the kernel's structure, and both views cover `vectors` vectors.
    unsafe { stream.gpu().kernel(&kernel_spec())?.launch(stream, launch, &params) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn compiles_without_spills() {
        crate::gpu::compile_tests::check_compiles(&[super::kernel_spec()]);
    }
}
