//! The owned tensor that one-call helpers return.

use super::{TensorDesc, TensorMut, TensorRef};
use crate::buffer::Buffer;
use crate::{DType, Device, Element, Error, Result};
use std::marker::PhantomData;

/// A tensor that owns its memory on the CPU. What one-call helpers return.
///
/// Large tensors take their memory from a cache that freed tensors and workspaces feed, so that a
/// loop which allocates its outputs does not pay page faults on every turn.
#[derive(Debug)]
pub struct Tensor {
    buffer: Buffer,
    desc: TensorDesc,
}

impl Tensor {
    /// A tensor of zeros.
    ///
    /// # Errors
    /// As [`Layout::contiguous`](crate::Layout::contiguous), and [`Error::OutOfMemory`].
    pub fn zeros(dtype: DType, shape: &[usize]) -> Result<Self> {
        let mut t = Self::uninitialised(TensorDesc::contiguous(dtype, shape)?)?;
        t.buffer.as_mut_slice().fill(0);
        Ok(t)
    }

    /// A tensor with the values of a slice, row-major.
    ///
    /// # Errors
    /// As [`Tensor::zeros`], and [`Error::Shape`] if the slice has another length.
    pub fn from_slice<T: Element>(data: &[T], shape: &[usize]) -> Result<Self> {
        let mut t = Self::uninitialised(TensorDesc::contiguous(T::DTYPE, shape)?)?;
        if data.len() != t.desc.layout.len() {
            return Err(Error::shape("shape", shape, format!("{} elements", data.len())));
        }
        // SAFETY: the buffer holds exactly this many elements of T and is aligned for any element.
        unsafe {
            std::ptr::copy_nonoverlapping(data.as_ptr(), t.buffer.as_mut_ptr().cast(), data.len());
        }
        Ok(t)
    }

    /// A tensor whose elements hold whatever the memory held: for outputs about to be written.
    /// The memory is initialised (zeros or an earlier tensor's bytes), so reading it is no
    /// undefined behaviour.
    ///
    /// # Errors
    /// [`Error::OverlappingOutput`] unless the layout is dense with non-negative strides,
    /// [`Error::OutOfMemory`].
    pub fn uninitialised(desc: TensorDesc) -> Result<Self> {
        let len = desc.layout.len();
        let dense = desc.layout.is_unique()
            && desc.layout.extent().is_none_or(|(low, high)| low == 0 && high as usize + 1 == len);
        if !dense {
            return Err(Error::OverlappingOutput {
                arg: "tensor",
                shape: desc.shape().to_vec(),
                strides: desc.strides().to_vec(),
            });
        }
        Ok(Tensor { buffer: Buffer::new(desc.bytes())?, desc })
    }

    /// The elements' bytes in the order of memory and of this machine.
    pub fn as_bytes(&self) -> &[u8] {
        self.buffer.as_slice()
    }

    /// The elements' bytes, for filling a tensor from a file. Every bit pattern is an element.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut_slice()
    }

    /// The same elements with the dimensions in another order, without moving them: dimension `i` of
    /// the result is dimension `order[i]` of this.
    ///
    /// # Panics
    /// If `order` is no permutation of the dimensions.
    #[must_use]
    pub fn permute(self, order: &[usize]) -> Self {
        let desc = TensorDesc { layout: self.desc.layout.permute(order), ..self.desc };
        Tensor { desc, ..self }
    }

    /// View for reading.
    pub fn as_ref(&self) -> TensorRef<'_> {
        // SAFETY: the buffer is initialised, covers the dense layout, and is borrowed by the view.
        unsafe { TensorRef::from_raw(self.buffer.as_ptr().cast(), self.desc, Device::Cpu) }
    }

    /// View for writing.
    pub fn as_mut(&mut self) -> TensorMut<'_> {
        TensorMut {
            ptr: self.buffer.as_mut_ptr(),
            desc: self.desc,
            device: Device::Cpu,
            memory: PhantomData,
        }
    }

    /// Element type, shape and strides.
    pub fn desc(&self) -> &TensorDesc {
        &self.desc
    }

    /// Size of each dimension.
    pub fn shape(&self) -> &[usize] {
        self.desc.shape()
    }

    /// All elements in row-major order.
    ///
    /// # Errors
    /// [`Error::DType`] if `T` is another type than the tensor's.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.as_ref().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;

    #[test]
    fn bytes_are_those_of_the_elements() {
        let mut t = Tensor::from_slice(&[1i32, 2], &[2]).unwrap();
        assert_eq!(t.as_bytes()[..4], 1i32.to_ne_bytes());
        t.as_bytes_mut()[4..].copy_from_slice(&7i32.to_ne_bytes());
        assert_eq!(t.to_vec::<i32>().unwrap(), [1, 7]);
        assert!(Tensor::zeros(DType::F32, &[0]).unwrap().as_bytes().is_empty());
    }

    #[test]
    fn owned_tensors_must_be_dense() {
        let t = Tensor::from_slice(&[1i32, 2, 3, 4], &[2, 2]).unwrap();
        assert_eq!(t.to_vec::<i32>().unwrap(), [1, 2, 3, 4]);
        assert_eq!(t.permute(&[1, 0]).to_vec::<i32>().unwrap(), [1, 3, 2, 4]);
        assert!(matches!(Tensor::from_slice(&[1i32], &[2]), Err(Error::Shape { .. })));
        let gaps = Layout::strided(&[2, 2], &[4, 1]).unwrap();
        assert!(Tensor::uninitialised(TensorDesc { dtype: DType::F32, layout: gaps }).is_err());
        assert!(matches!(
            Tensor::zeros(DType::F32, &[1 << 50]),
            Err(Error::OutOfMemory { device: Device::Cpu, .. })
        ));
    }
}
