//! A plain copy: the ceiling that memory-bound kernels are measured against.

use super::{KernelSpec, Launch, Source, Stream};
use crate::{Error, Result, TensorMut, TensorRef};

static SOURCE: Source =
    Source { name: "copy.cu", text: include_str!("kernels/copy.cu"), includes: &[] };

#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    y: *mut u8,
    x: *const u8,
    vectors: usize,
}

fn kernel_spec() -> KernelSpec {
    KernelSpec::new(&SOURCE, "copy_16").define("PARAMS_SIZE", size_of::<Params>())
}

/// Copies `x` to `y`, 16 bytes a thread, when `stream` comes to it.
///
/// # Errors
/// [`Error::Shape`] or [`Error::DType`] if the two differ, [`Error::WrongDevice`],
/// [`Error::Unsupported`] unless both are contiguous, aligned to 16 bytes and a multiple of them
/// long; [`Error::Backend`].
pub fn copy(x: &TensorRef<'_>, y: &mut TensorMut<'_>, stream: &Stream) -> Result<()> {
    crate::tensor::check_tensor("y", y.desc(), x.dtype(), x.shape())?;
    crate::tensor::check_device("x", x.device(), stream.device())?;
    crate::tensor::check_device("y", y.device(), stream.device())?;
    let bytes = x.desc().bytes();
    let whole = |address: *const u8| (address as usize).is_multiple_of(16);
    let plain = x.layout().is_contiguous() && y.layout().is_contiguous();
    if !(plain && whole(x.as_ptr()) && whole(y.as_ptr()) && bytes.is_multiple_of(16)) {
        return Err(Error::unsupported(
            "a copy of these tensors",
            "it moves whole 16-byte vectors",
        ));
    }
    let params = Params { y: y.as_mut_ptr(), x: x.as_ptr(), vectors: bytes / 16 };
    let launch = Launch { grid: [params.vectors.div_ceil(256) as u32, 1, 1], block: [256, 1, 1] };
    // SAFETY: `Params` is the kernel's structure, and both views cover `vectors` vectors.
    unsafe { stream.gpu().kernel(&kernel_spec())?.launch(stream, launch, &params) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn compiles_without_spills() {
        crate::cuda::compile_tests::check_compiles(&[super::kernel_spec()]);
    }
}
