//! Tensors: descriptions, borrowed strided views, and the owned tensor on the CPU.

mod check;
mod owned;

use crate::lists::room_for;
use crate::{DType, Device, Element, Error, Layout, Result};
use std::ffi::c_void;
use std::marker::PhantomData;

use check::check_bounds;
pub(crate) use check::{
    check_device, check_dtype, check_optional_view, check_tensor, check_unique, check_view,
};
pub use owned::Tensor;

/// The description of a tensor without its memory: element type, shape, strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct TensorDesc {
    /// Element type.
    pub dtype: DType,
    /// Shape and strides.
    pub layout: Layout,
}

impl TensorDesc {
    /// The description of a tensor of any layout.
    pub const fn new(dtype: DType, layout: Layout) -> Self {
        TensorDesc { dtype, layout }
    }

    /// The description of a row-major tensor.
    ///
    /// # Errors
    /// As [`Layout::contiguous`].
    pub fn contiguous(dtype: DType, shape: &[usize]) -> Result<Self> {
        Ok(TensorDesc { dtype, layout: Layout::contiguous(shape)? })
    }

    /// Size of each dimension.
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[isize] {
        self.layout.strides()
    }

    /// The size of all elements in bytes. Gaps between elements are not counted.
    pub fn bytes(&self) -> usize {
        self.layout.len() * self.dtype.size()
    }
}

/// A read-only view of a tensor in memory that it does not own.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a> {
    ptr: *const u8,
    desc: TensorDesc,
    device: Device,
    memory: PhantomData<&'a [u8]>,
}

/// A writable view of a tensor in memory that it does not own. Its elements do not share memory with each other.
#[derive(Debug)]
pub struct TensorMut<'a> {
    ptr: *mut u8,
    desc: TensorDesc,
    device: Device,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a TensorRef is a shared borrow of plain numbers.
unsafe impl Send for TensorRef<'_> {}
// SAFETY: a shared `&TensorRef` gives read access only.
unsafe impl Sync for TensorRef<'_> {}
// SAFETY: a TensorMut is an exclusive borrow of plain numbers.
unsafe impl Send for TensorMut<'_> {}
// SAFETY: `&TensorMut` gives read access only.
unsafe impl Sync for TensorMut<'_> {}

impl<'a> TensorRef<'a> {
    /// A row-major view of the first elements of a slice.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the slice is shorter than the shape, and as
    /// [`Layout::contiguous`].
    ///
    /// ```
    /// let data = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    /// let x = windrow::TensorRef::new(&data, &[2, 3])?;
    /// assert_eq!(x.shape(), [2, 3]);
    /// # Ok::<(), windrow::Error>(())
    /// ```
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        Self::strided(data, 0, Layout::contiguous(shape)?)
    }

    /// A strided view; `offset` is the index in `data` of the element at index zero.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the view reaches outside `data`.
    pub fn strided<T: Element>(data: &'a [T], offset: usize, layout: Layout) -> Result<Self> {
        check_bounds("tensor", data.len(), offset, &layout)?;
        let ptr = data.as_ptr().wrapping_add(offset).cast();
        let desc = TensorDesc { dtype: T::DTYPE, layout };
        Ok(TensorRef { ptr, desc, device: Device::Cpu, memory: PhantomData })
    }

    /// A view of memory by address.
    ///
    /// # Safety
    /// Every element that `desc` reaches from `ptr` must be readable on `device`, initialised, and
    /// unchanged by others for `'a`. `ptr` must be aligned to the element size on the CPU.
    ///
    /// A run on a GPU returns when its work is enqueued on its [stream](crate::Workspace::stream). It may read the
    /// memory after that, even after `'a` has ended. So the memory must stay allocated and unchanged until the run has
    /// finished on the stream. Work enqueued later on the same stream may change or free it. If other streams use the
    /// memory before or after the run, the caller must synchronize them with the run's stream, by events or by waiting.
    /// Only blocking streams and the legacy default stream are synchronized implicitly; streams made with
    /// `cudaStreamNonBlocking` are not.
    pub unsafe fn from_raw(ptr: *const c_void, desc: TensorDesc, device: Device) -> Self {
        TensorRef { ptr: ptr.cast(), desc, device, memory: PhantomData }
    }

    /// Address of the element at index zero.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// A view of the same memory with another layout. The layout must not reach other elements.
    ///
    /// # Safety
    /// `layout` must reach only elements that this view reaches.
    pub unsafe fn with_layout(&self, layout: Layout) -> TensorRef<'a> {
        TensorRef { desc: TensorDesc { layout, ..self.desc }, ..*self }
    }

    /// The part of the tensor whose index in `dim` lies in `range`, in the same memory.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the tensor has no such dimension or the range leaves it.
    ///
    /// ```
    /// let data = [0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0];
    /// let x = windrow::TensorRef::new(&data, &[2, 3])?;
    /// assert_eq!(x.narrow(1, 1..3)?.to_vec::<f32>()?, [1.0, 2.0, 4.0, 5.0]);
    /// # Ok::<(), windrow::Error>(())
    /// ```
    pub fn narrow(&self, dim: usize, range: std::ops::Range<usize>) -> Result<TensorRef<'a>> {
        let (desc, bytes) = narrowed(&self.desc, dim, range)?;
        Ok(TensorRef { ptr: self.ptr.wrapping_offset(bytes), desc, ..*self })
    }

    /// The elements of host memory in row-major order, as f64.
    pub(crate) fn host_to_f64_vec(&self) -> Result<Vec<f64>> {
        match self.desc.dtype {
            DType::F32 => self.gather::<f32>(),
            DType::F16 => self.gather::<half::f16>(),
            DType::BF16 => self.gather::<half::bf16>(),
            DType::F64 => self.gather::<f64>(),
            DType::I32 => self.gather::<i32>(),
            DType::I64 => self.gather::<i64>(),
            DType::U8 => self.gather::<u8>(),
        }
    }

    /// The elements of host memory in row-major order.
    ///
    /// # Errors
    /// [`Error::DType`] if `T` is another type than the tensor's.
    pub(crate) fn host_to_vec<T: Element>(&self) -> Result<Vec<T>> {
        check_dtype("tensor", self.desc.dtype, T::DTYPE)?;
        // A broadcast view can have more elements than fit in memory, so this allocation may fail.
        let mut out = room_for(self.desc.layout.len())?;
        for_each_offset(&self.desc.layout, |o| {
            // SAFETY: offsets of the layout are readable by this view's contract; T is its type.
            out.push(unsafe { self.ptr.cast::<T>().offset(o).read() });
        });
        Ok(out)
    }

    fn gather<T: Element>(&self) -> Result<Vec<f64>> {
        let mut out = room_for(self.desc.layout.len())?;
        for_each_offset(&self.desc.layout, |o| {
            // SAFETY: offsets of the layout are readable by this view's contract; callers match T
            // to the element type.
            out.push(unsafe { self.ptr.cast::<T>().offset(o).read() }.to_f64());
        });
        Ok(out)
    }
}

/// The description of the part that `narrow` selects, and its offset in bytes from the element at index zero. The
/// address of an empty part may lie outside the memory: it is never read.
fn narrowed(
    desc: &TensorDesc,
    dim: usize,
    range: std::ops::Range<usize>,
) -> Result<(TensorDesc, isize)> {
    let mut shape = [0; crate::MAX_RANK];
    let shape = &mut shape[..desc.layout.rank()];
    shape.copy_from_slice(desc.shape());
    if dim >= shape.len() || range.start > range.end || range.end > shape[dim] {
        return Err(Error::parameter(
            "range",
            format!("{range:?} of dimension {dim}"),
            format!("a part of {shape:?}"),
        ));
    }
    shape[dim] = range.len();
    let layout = Layout::strided(shape, desc.strides())?;
    let bytes = range.start as isize * desc.strides()[dim] * desc.dtype.size() as isize;
    Ok((TensorDesc { layout, ..*desc }, bytes))
}

impl<'a> TensorMut<'a> {
    /// A row-major view of the first elements of a slice.
    ///
    /// # Errors
    /// As [`TensorRef::new`].
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        Self::strided(data, 0, Layout::contiguous(shape)?)
    }

    /// A strided view; `offset` is the index in `data` of the element at index zero.
    ///
    /// # Errors
    /// As [`TensorRef::strided`], and [`Error::OverlappingOutput`] if elements share memory.
    pub fn strided<T: Element>(data: &'a mut [T], offset: usize, layout: Layout) -> Result<Self> {
        check_bounds("tensor", data.len(), offset, &layout)?;
        check_unique("tensor", &layout)?;
        let ptr = data.as_mut_ptr().wrapping_add(offset).cast();
        let desc = TensorDesc { dtype: T::DTYPE, layout };
        Ok(TensorMut { ptr, desc, device: Device::Cpu, memory: PhantomData })
    }

    /// A view of memory by address.
    ///
    /// # Errors
    /// [`Error::OverlappingOutput`] if elements share memory.
    ///
    /// # Safety
    /// Every element that `desc` reaches from `ptr` must be readable and writable on `device` and
    /// touched by nobody else for `'a`. `ptr` must be aligned to the element size on the CPU.
    ///
    /// A run on a GPU may write the memory after the call returns, even after `'a` has ended. Nothing else may touch
    /// the memory until the run has finished, as for [`TensorRef::from_raw`].
    pub unsafe fn from_raw(ptr: *mut c_void, desc: TensorDesc, device: Device) -> Result<Self> {
        check_unique("tensor", &desc.layout)?;
        Ok(TensorMut { ptr: ptr.cast(), desc, device, memory: PhantomData })
    }

    /// Address of the element at index zero.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr
    }

    /// Address of the element at index zero.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// A shorter borrow of the same view.
    pub fn reborrow(&mut self) -> TensorMut<'_> {
        TensorMut { ptr: self.ptr, desc: self.desc, device: self.device, memory: PhantomData }
    }

    /// The part of the tensor whose index in `dim` lies in `range`, in the same memory. It consumes the view: call it
    /// on a [`reborrow`](Self::reborrow) if the whole view is needed again.
    ///
    /// # Errors
    /// As [`TensorRef::narrow`].
    ///
    /// ```
    /// let x = windrow::Tensor::from_vec(vec![-1.0f32, 0.0, 1.0], &[3])?;
    /// let mut y = [0.0f32; 5];
    /// let part = windrow::TensorMut::new(&mut y, &[5])?.narrow(0, 1..4)?;
    /// assert_eq!(part.shape(), x.shape());
    /// # Ok::<(), windrow::Error>(())
    /// ```
    pub fn narrow(self, dim: usize, range: std::ops::Range<usize>) -> Result<TensorMut<'a>> {
        let (desc, bytes) = narrowed(&self.desc, dim, range)?;
        Ok(TensorMut { ptr: self.ptr.wrapping_offset(bytes), desc, ..self })
    }

    /// The view as an input.
    pub fn as_ref(&self) -> TensorRef<'_> {
        TensorRef { ptr: self.ptr, desc: self.desc, device: self.device, memory: PhantomData }
    }
}

macro_rules! accessors {
    ($t:ident) => {
        impl $t<'_> {
            /// Element type, shape and strides.
            pub fn desc(&self) -> &TensorDesc {
                &self.desc
            }
            /// Shape and strides.
            pub fn layout(&self) -> &Layout {
                &self.desc.layout
            }
            /// Size of each dimension.
            pub fn shape(&self) -> &[usize] {
                self.desc.layout.shape()
            }
            /// Strides in elements.
            pub fn strides(&self) -> &[isize] {
                self.desc.layout.strides()
            }
            /// Element type.
            pub fn dtype(&self) -> DType {
                self.desc.dtype
            }
            /// The device that holds the memory.
            pub fn device(&self) -> Device {
                self.device
            }
            /// The address range of the elements: the first byte, and one past the last byte. `None` if there are no
            /// elements.
            pub fn address_range(&self) -> Option<(usize, usize)> {
                let size = self.desc.dtype.size() as isize;
                self.desc.layout.extent().map(|(low, high)| {
                    let base = self.ptr as isize;
                    ((base + low * size) as usize, (base + (high + 1) * size) as usize)
                })
            }
        }
    };
}

accessors!(TensorRef);
accessors!(TensorMut);

/// Calls `f` with the offset of every element, in row-major order.
pub(crate) fn for_each_offset(layout: &Layout, mut f: impl FnMut(isize)) {
    let mut index = [0usize; crate::MAX_RANK];
    let shape = layout.shape();
    let mut offset = 0;
    for _ in 0..layout.len() {
        f(offset);
        for d in (0..shape.len()).rev() {
            index[d] += 1;
            offset += layout.strides()[d];
            if index[d] < shape[d] {
                break;
            }
            offset -= layout.strides()[d] * shape[d] as isize;
            index[d] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_are_checked() {
        let mut data = [0f32; 6];
        assert!(matches!(
            TensorRef::new(&data, &[7]),
            Err(Error::OutOfBounds { last: 6, len: 6, .. })
        ));
        let back = Layout::strided(&[3], &[-1]).unwrap();
        assert!(matches!(
            TensorRef::strided(&data, 1, back),
            Err(Error::OutOfBounds { first: -1, .. })
        ));
        assert!(TensorRef::strided(&data, 2, back).is_ok());
        let broadcast = Layout::strided(&[4, 2], &[0, 1]).unwrap();
        assert!(TensorRef::strided(&data, 0, broadcast).is_ok());
        assert!(matches!(
            TensorMut::strided(&mut data, 0, broadcast),
            Err(Error::OverlappingOutput { .. })
        ));
        assert!(TensorRef::new::<f32>(&[], &[0, 5]).unwrap().address_range().is_none());
    }

    #[test]
    fn elements_come_in_row_major_order() {
        let data = [0f32, 1.0, 2.0, 3.0, 4.0, 5.0];
        let t = TensorRef::strided(&data, 0, Layout::strided(&[3, 2], &[1, 3]).unwrap()).unwrap();
        assert_eq!(t.to_vec::<f32>().unwrap(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert_eq!(t.to_f64_vec().unwrap(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert!(matches!(t.to_vec::<f64>(), Err(Error::DType { .. })));
    }

    #[test]
    fn parts_share_memory() {
        let data = [0f32, 1.0, 2.0, 3.0, 4.0, 5.0];
        let t = TensorRef::strided(&data, 5, Layout::strided(&[2, 3], &[-3, -1]).unwrap()).unwrap();
        let part = t.narrow(1, 1..3).unwrap();
        assert_eq!(part.to_vec::<f32>().unwrap(), [4.0, 3.0, 1.0, 0.0]);
        assert!(part.narrow(0, 2..2).unwrap().to_vec::<f32>().unwrap().is_empty());
        for (dim, range) in [(2, 0..1), (1, 2..4), (0, std::ops::Range { start: 2, end: 1 })] {
            assert!(matches!(t.narrow(dim, range), Err(Error::Parameter { .. })));
        }
        let mut data = data;
        let mut whole = TensorMut::new(&mut data, &[2, 3]).unwrap();
        let part = whole.reborrow().narrow(0, 1..2).unwrap().narrow(1, 1..3).unwrap();
        assert_eq!(part.as_ref().to_vec::<f32>().unwrap(), [4.0, 5.0]);
        assert!(matches!(whole.narrow(1, 0..4), Err(Error::Parameter { .. })));
    }
}
