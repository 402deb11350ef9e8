//! Tensors in the memory of the device that a plan runs on.

use windrow::cuda::{self, DeviceTensor};
use windrow::{Device, Result, Tensor, TensorDesc, TensorMut, TensorRef, Workspace, cpu};

pub(crate) enum Placed {
    Host(Tensor),
    Cuda(DeviceTensor),
}

impl Placed {
    /// The tensor, or a copy of it on a CUDA device.
    pub(crate) fn new(tensor: Tensor, device: Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Placed::Host(tensor)),
            Device::Cuda(index) => {
                Ok(Placed::Cuda(DeviceTensor::from_host(&tensor.as_ref(), index)?))
            }
        }
    }

    /// Memory for a result.
    pub(crate) fn output(desc: TensorDesc, device: Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Placed::Host(Tensor::uninitialised(desc)?)),
            Device::Cuda(index) => Ok(Placed::Cuda(DeviceTensor::new(desc, index)?)),
        }
    }

    /// Element type, shape and strides.
    pub(crate) fn desc(&self) -> &TensorDesc {
        match self {
            Placed::Host(tensor) => tensor.desc(),
            Placed::Cuda(tensor) => tensor.desc(),
        }
    }

    pub(crate) fn as_ref(&self) -> TensorRef<'_> {
        match self {
            Placed::Host(tensor) => tensor.as_ref(),
            Placed::Cuda(tensor) => tensor.as_ref(),
        }
    }

    pub(crate) fn as_mut(&mut self) -> Result<TensorMut<'_>> {
        match self {
            Placed::Host(tensor) => Ok(tensor.as_mut()),
            Placed::Cuda(tensor) => tensor.as_mut(),
        }
    }

    /// Copies the bytes of a tensor that lies alike, on all CPU `threads` or on the stream of
    /// `workspace`.
    pub(crate) fn copy_from(
        &mut self,
        from: &Placed,
        threads: usize,
        workspace: &Workspace,
    ) -> Result<()> {
        match (self, from) {
            (Placed::Host(to), Placed::Host(from)) => {
                cpu::copy(threads, from.as_bytes(), to.as_bytes_mut());
                Ok(())
            }
            (to, from) => match workspace.stream() {
                Some(stream) => cuda::copy(&from.as_ref(), &mut to.as_mut()?, stream),
                None => Ok(()),
            },
        }
    }

    /// The elements, once all work on the device is done.
    pub(crate) fn into_host(self) -> Result<Tensor> {
        match self {
            Placed::Host(tensor) => Ok(tensor),
            Placed::Cuda(tensor) => tensor.to_host(),
        }
    }
}
