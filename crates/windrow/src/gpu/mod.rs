//! The code that GPU backends share: devices, streams, memory, graphs, kernels.
//!
//! A backend is an implementation of [`Runtime`], most of it a table of its driver's functions. Kernels are written in
//! CUDA C++. Their files lie beside the host code of each method, and are embedded in the binary. A [`KernelSpec`]
//! names a source, an entry point and constants. [`Gpu::kernel`] returns the loaded kernel. If the kernel is not loaded
//! yet, the function loads its image from the cache on disk, or has the backend compile it. A plan loads its kernels
//! when it is made, and those of its gradients when it first computes one. This may happen during a stream capture. A
//! run does not synchronize and can be captured into a graph, unless it is compared with the oracle
//! ([`Verify::On`](crate::Verify::On)). [`Plan`](crate::Plan) says when a run allocates memory.

#[cfg(feature = "hip")]
mod block_product;
mod cache;
mod capture;
mod column_sum;
#[cfg(feature = "gpu")]
mod compiler;
mod convolution;
mod copy;
mod device;
#[cfg(feature = "gpu")]
mod driver;
mod gemm;
mod kernel;
#[cfg(feature = "gpu")]
pub(crate) mod library;
mod memory;
mod params;
mod pinned;
mod runtime;
mod shared;
mod source;
mod stream;
mod tensor_map;
mod wrong_index;

#[cfg(test)]
pub(crate) mod compile_tests;

pub use capture::Graph;
pub use copy::copy;
pub use device::DeviceInfo;
pub use memory::DeviceTensor;
pub use stream::{Event, Stream};

#[cfg(feature = "hip")]
pub(crate) use block_product::BlockProduct;
pub(crate) use column_sum::column_sum;
#[cfg(feature = "gpu")]
pub(crate) use compiler::{Compiled, Compiler, Reading};
pub(crate) use convolution::{Choice, Convolution, ConvolutionSpec, Operation, VendorConvolution};
#[cfg(test)]
pub(crate) use device::first_devices;
pub(crate) use device::{Backend, Gpu, Started, devices, notice_forks};
#[cfg(feature = "gpu")]
pub(crate) use driver::{Calls, Driven, MemoryAccess, keep_freed_memory, made};
pub(crate) use gemm::{Gemm, GemmCompute, GemmOperands, GemmSpec, Matrix, Product};
pub(crate) use kernel::{Kernel, Kernels};
pub(crate) use memory::{DeviceBuffer, download};
pub(crate) use params::{Field, Params, params};
pub(crate) use pinned::PinnedBuffer;
#[cfg(feature = "gpu")]
pub(crate) use runtime::Recording;
pub(crate) use runtime::{
    ConvolutionLimits, Failure, Feature, Function, Handle, Launch, Outcome, Runtime, StreamKind,
};
pub(crate) use shared::SharedBuffer;
pub(crate) use source::{KernelSpec, Source, type_name};
pub(crate) use tensor_map::{TensorBoxes, TensorMap, TensorPixels};
