//! A tensor that owns memory on a device.

use super::Workspace;
use crate::gpu::{self, DeviceTensor};
use crate::{Device, Result, Tensor, TensorDesc, TensorMut, TensorRef, cpu};

/// A tensor that owns memory on a given device: the CPU or a GPU.
///
/// ```
/// use windrow::{Device, Placed, Tensor};
/// let x = Placed::new(Tensor::from_slice(&[1f32, 2.0], &[2])?, Device::Cpu)?;
/// assert_eq!(x.as_ref().to_vec::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), windrow::Error>(())
/// ```
#[derive(Debug)]
pub struct Placed(Memory);

#[derive(Debug)]
enum Memory {
    Host(Tensor),
    Device(DeviceTensor),
}

impl Placed {
    /// A tensor on a device: the given one on the CPU, a copy of it on a GPU.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::NoDevice`](crate::Error::NoDevice),
    /// [`Error::Backend`](crate::Error::Backend).
    pub fn new(tensor: Tensor, device: Device) -> Result<Self> {
        Ok(Placed(match device {
            Device::Cpu => Memory::Host(tensor),
            gpu => Memory::Device(DeviceTensor::from_host(&tensor.as_ref(), gpu)?),
        }))
    }

    /// Memory for a result. On a GPU it is filled with NaN, so that an element which no kernel writes is found.
    ///
    /// # Errors
    /// As [`Placed::new`], and on the CPU as [`Tensor::uninitialised`].
    pub fn output(desc: TensorDesc, device: Device) -> Result<Self> {
        Ok(Placed(match device {
            Device::Cpu => Memory::Host(Tensor::uninitialised(desc)?),
            gpu => Memory::Device(DeviceTensor::new(desc, gpu)?),
        }))
    }

    /// Element type, shape and strides.
    pub fn desc(&self) -> &TensorDesc {
        match &self.0 {
            Memory::Host(tensor) => tensor.desc(),
            Memory::Device(tensor) => tensor.desc(),
        }
    }

    /// A view for reading.
    pub fn as_ref(&self) -> TensorRef<'_> {
        match &self.0 {
            Memory::Host(tensor) => tensor.as_ref(),
            Memory::Device(tensor) => tensor.as_ref(),
        }
    }

    /// A view for writing.
    ///
    /// # Errors
    /// [`Error::OverlappingOutput`](crate::Error::OverlappingOutput) if elements share memory.
    pub fn as_mut(&mut self) -> Result<TensorMut<'_>> {
        match &mut self.0 {
            Memory::Host(tensor) => Ok(tensor.as_mut()),
            Memory::Device(tensor) => tensor.as_mut(),
        }
    }

    /// Copies the bytes of a tensor with the same layout: on the CPU by this many threads, on a GPU on the stream of
    /// the workspace.
    ///
    /// # Errors
    /// On a GPU: [`Error::Shape`](crate::Error::Shape) or [`Error::DType`](crate::Error::DType) if they differ,
    /// [`Error::WrongDevice`](crate::Error::WrongDevice), [`Error::Unsupported`](crate::Error::Unsupported) if the
    /// tensors have gaps, or if an address or the size is not a multiple of 16 bytes, and
    /// [`Error::Backend`](crate::Error::Backend).
    pub fn copy_from(
        &mut self,
        from: &Placed,
        threads: usize,
        workspace: &Workspace,
    ) -> Result<()> {
        match (&mut self.0, &from.0) {
            (Memory::Host(to), Memory::Host(from)) => {
                cpu::copy(threads, from.as_bytes(), to.as_bytes_mut());
                Ok(())
            }
            _ => match workspace.stream() {
                Some(stream) => gpu::copy(&from.as_ref(), &mut self.as_mut()?, stream),
                None => Ok(()),
            },
        }
    }

    /// All bytes of the tensor's memory, including gaps between elements.
    pub(crate) fn bytes(&self) -> Result<Vec<u8>> {
        Ok(match &self.0 {
            Memory::Host(tensor) => tensor.as_bytes().to_vec(),
            Memory::Device(tensor) => tensor.to_host()?.as_bytes().to_vec(),
        })
    }

    /// The tensor in main memory. On a GPU, the call waits for the device's work and copies the tensor.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::Backend`](crate::Error::Backend).
    pub fn into_host(self) -> Result<Tensor> {
        match self.0 {
            Memory::Host(tensor) => Ok(tensor),
            Memory::Device(tensor) => tensor.to_host(),
        }
    }
}
