//! The owned tensor.

use super::{TensorDesc, TensorMut, TensorRef, check_dtype};
use crate::buffer::Buffer;
use crate::{DType, Device, Element, Error, Result};
use std::marker::PhantomData;

/// A tensor that owns its memory, on the CPU. [`conv2d`](crate::conv2d()) and the other one-call functions return it.
///
/// Large tensors reuse memory of dropped tensors and workspaces, from a cache. So a loop that allocates its outputs
/// does not cause page faults in every iteration.
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

    /// A tensor with the values of a vector, row-major. The values are copied into memory aligned to 64 bytes, which is
    /// enough for the SIMD loads of every instruction set.
    ///
    /// # Errors
    /// As [`Tensor::from_slice`].
    ///
    /// ```
    /// let t = windrow::Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    /// assert_eq!(t.reshape(&[4])?.as_slice::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
    /// # Ok::<(), windrow::Error>(())
    /// ```
    pub fn from_vec<T: Element>(data: Vec<T>, shape: &[usize]) -> Result<Self> {
        Self::from_slice(&data, shape)
    }

    /// A tensor from the bytes of its elements, row-major and in native byte order, for example from a file or another
    /// library.
    ///
    /// # Errors
    /// As [`Tensor::zeros`], and [`Error::Shape`] if there are not exactly as many bytes.
    pub fn from_bytes(dtype: DType, shape: &[usize], bytes: &[u8]) -> Result<Self> {
        let mut t = Self::uninitialised(TensorDesc::contiguous(dtype, shape)?)?;
        if bytes.len() != t.desc.bytes() {
            return Err(Error::shape("shape", shape, format!("{} bytes of {dtype}", bytes.len())));
        }
        t.as_bytes_mut().copy_from_slice(bytes);
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

    /// A tensor with unspecified values, for an output that is about to be written. The memory is initialised (zeros or
    /// an earlier tensor's bytes), so reading it is no undefined behaviour.
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

    /// The bytes of the elements, in memory order and native byte order.
    pub fn as_bytes(&self) -> &[u8] {
        self.buffer.as_slice()
    }

    /// The elements' bytes, for filling a tensor from a file. Every bit pattern is a valid element, so any bytes may be
    /// written.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut_slice()
    }

    /// The elements of a row-major tensor, in place.
    ///
    /// # Errors
    /// [`Error::DType`] if `T` is another type than the tensor's, [`Error::Strides`] if the elements
    /// lie in another order; [`Tensor::to_vec`] copies those.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.check_slice::<T>()?;
        let data = self.buffer.as_ptr().cast();
        // SAFETY: the buffer holds exactly these elements of T, initialised, aligned for any element,
        // and borrowed as long as the slice.
        Ok(unsafe { std::slice::from_raw_parts(data, self.desc.layout.len()) })
    }

    /// The elements of a row-major tensor, for writing in place.
    ///
    /// # Errors
    /// As [`Tensor::as_slice`].
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        self.check_slice::<T>()?;
        let data = self.buffer.as_mut_ptr().cast();
        // SAFETY: the buffer holds exactly these elements of T, initialised, aligned for any element,
        // and borrowed mutably as long as the slice; every bit pattern is an element.
        Ok(unsafe { std::slice::from_raw_parts_mut(data, self.desc.layout.len()) })
    }

    fn check_slice<T: Element>(&self) -> Result<()> {
        check_dtype("tensor", self.desc.dtype, T::DTYPE)?;
        self.check_row_major()
    }

    fn check_row_major(&self) -> Result<()> {
        if self.desc.layout.is_contiguous() {
            return Ok(());
        }
        Err(Error::Strides {
            arg: "tensor",
            given: self.desc.strides().to_vec(),
            expected: "those of a row-major tensor".into(),
        })
    }

    /// The same elements in another shape, without moving them.
    ///
    /// # Errors
    /// [`Error::Strides`] unless the tensor is row-major, [`Error::Shape`] if the shape has another
    /// number of elements, and as [`Layout::contiguous`](crate::Layout::contiguous).
    pub fn reshape(self, shape: &[usize]) -> Result<Self> {
        self.check_row_major()?;
        let desc = TensorDesc::contiguous(self.desc.dtype, shape)?;
        if desc.layout.len() != self.desc.layout.len() {
            return Err(Error::shape(
                "shape",
                shape,
                format!("{} elements", self.desc.layout.len()),
            ));
        }
        Ok(Tensor { desc, ..self })
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

    /// A view for reading.
    pub fn as_ref(&self) -> TensorRef<'_> {
        // SAFETY: the buffer is initialised, covers the dense layout, and is borrowed by the view.
        unsafe { TensorRef::from_raw(self.buffer.as_ptr().cast(), self.desc, Device::Cpu) }
    }

    /// A view for writing.
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

    /// The elements in row-major order.
    ///
    /// # Errors
    /// [`Error::DType`] if `T` is another type than the tensor's.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.as_ref().to_vec()
    }
}

/// A one-dimensional tensor from a vector.
impl<T: Element> TryFrom<Vec<T>> for Tensor {
    type Error = Error;

    /// # Errors
    /// [`Error::OutOfMemory`].
    fn try_from(data: Vec<T>) -> Result<Self> {
        Self::from_slice(&data, &[data.len()])
    }
}

/// A one-dimensional tensor from a slice.
impl<T: Element> TryFrom<&[T]> for Tensor {
    type Error = Error;

    /// # Errors
    /// [`Error::OutOfMemory`].
    fn try_from(data: &[T]) -> Result<Self> {
        Self::from_slice(data, &[data.len()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;

    #[test]
    fn tensors_come_from_and_go_to_plain_memory() {
        let t = Tensor::from_vec(vec![1i64, 2, 3, 4, 5, 6], &[2, 3]).unwrap();
        let bytes = t.as_bytes().to_vec();
        let copy = Tensor::from_bytes(DType::I64, &[3, 2], &bytes).unwrap();
        assert_eq!(copy.as_slice::<i64>().unwrap(), [1, 2, 3, 4, 5, 6]);
        assert!(matches!(copy.as_slice::<i32>(), Err(Error::DType { .. })));
        for (shape, bytes) in [([3, 3], &bytes[..]), ([3, 2], &bytes[1..])] {
            let short = Tensor::from_bytes(DType::I64, &shape, bytes);
            assert!(matches!(short, Err(Error::Shape { .. })));
        }
        let mut line = t.reshape(&[6]).unwrap();
        line.as_mut_slice::<i64>().unwrap()[5] = 7;
        assert_eq!(line.shape(), [6]);
        assert_eq!(line.as_slice::<i64>().unwrap(), [1, 2, 3, 4, 5, 7]);
        assert!(matches!(line.reshape(&[5]), Err(Error::Shape { .. })));
        let turned = copy.permute(&[1, 0]);
        assert!(matches!(turned.as_slice::<i64>(), Err(Error::Strides { .. })));
        assert!(matches!(turned.reshape(&[6]), Err(Error::Strides { .. })));
        let from = Tensor::try_from(vec![1.0f32, 2.0]).unwrap();
        assert_eq!(Tensor::try_from(from.as_slice::<f32>().unwrap()).unwrap().shape(), [2]);
        assert!(
            Tensor::from_vec(Vec::<f32>::new(), &[0, 2])
                .unwrap()
                .as_slice::<f32>()
                .unwrap()
                .is_empty()
        );
    }

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
