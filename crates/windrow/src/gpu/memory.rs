//! Device memory.

use super::{Gpu, Stream};
use crate::buffer::Buffer;
use crate::{Device, Element, Error, Layout, Result, Tensor, TensorDesc, TensorMut, TensorRef};
use std::ffi::c_void;
use std::sync::Arc;

/// Allocates `bytes` bytes, at least one, aligned to 256, with arbitrary contents. They are for later work on `stream`,
/// and on streams that wait for `stream`. [`free`] frees them.
///
/// # Errors
/// [`Error::OutOfMemory`], [`Error::Backend`].
pub(super) fn allocate(stream: &Stream, bytes: usize) -> Result<*mut u8> {
    let gpu = stream.gpu();
    // SAFETY: the stream is alive.
    let memory = gpu.call(|runtime| unsafe { runtime.allocate(bytes, stream.as_raw()) })?;
    memory.ok_or(Error::OutOfMemory { device: gpu.device(), bytes })
}

/// Frees memory in the order of `stream`. Its last use must come earlier in that order.
///
/// # Safety
/// `memory` must come from [`allocate`] on the stream's device and must not be used afterwards.
pub(super) unsafe fn free(stream: &Stream, memory: *mut u8) -> Result<()> {
    // SAFETY: the caller's promise; the stream is alive.
    stream.gpu().call(|runtime| unsafe { runtime.free(memory, stream.as_raw()) })
}

/// Device memory that is used in the order of one stream. It is either allocated from the driver's pool and freed in
/// that order, or lent by the caller.
#[derive(Debug)]
pub(crate) struct DeviceBuffer {
    /// Null if there are no bytes.
    ptr: *mut u8,
    len: usize,
    stream: Arc<Stream>,
    /// True if the memory was lent, so that it is not freed here.
    is_lent: bool,
}

// SAFETY: it owns plain bytes, which only the device reads and writes.
unsafe impl Send for DeviceBuffer {}
// SAFETY: what may be shared gives its address only.
unsafe impl Sync for DeviceBuffer {}

impl DeviceBuffer {
    /// `len` bytes, aligned to 256, with arbitrary contents. Work on `stream` may use them at once; work on other
    /// streams must be ordered after the allocation.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Backend`].
    pub(crate) fn new(stream: &Arc<Stream>, len: usize) -> Result<Self> {
        let ptr = if len > 0 { allocate(stream, len)? } else { std::ptr::null_mut() };
        Ok(DeviceBuffer { ptr, len, stream: stream.clone(), is_lent: false })
    }

    /// `len` bytes at `ptr`, aligned to 256, that the caller frees.
    ///
    /// # Safety
    /// They must be memory of the stream's device. Nothing else may use them until this value is dropped and the stream
    /// has finished the work that was enqueued before that.
    pub(crate) unsafe fn lent(stream: &Arc<Stream>, ptr: *mut u8, len: usize) -> Self {
        DeviceBuffer { ptr, len, stream: stream.clone(), is_lent: true }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// True if `stream` is the one in whose order it was allocated.
    pub(crate) fn is_allocated_on(&self, stream: &Arc<Stream>) -> bool {
        Arc::ptr_eq(&self.stream, stream)
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if !self.ptr.is_null() && !self.is_lent {
            // An error here was or will be reported by a call that can return it; the memory is lost then.
            // SAFETY: allocated in `new` on this stream.
            let _ = unsafe { free(&self.stream, self.ptr) };
        }
    }
}

/// Reads a tensor on any device. It is here and not in `tensor/`, so that `tensor/` does not depend on GPUs.
impl TensorRef<'_> {
    /// All elements in row-major order, as f64; for oracles and tests. GPU memory is copied. The work that writes it
    /// must have finished (see [`Workspace::synchronize`](crate::Workspace::synchronize)).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; for GPU memory also [`Error::NoDevice`], [`Error::Backend`].
    pub fn to_f64_vec(&self) -> Result<Vec<f64>> {
        match self.device() {
            Device::Cpu => self.host_to_f64_vec(),
            _ => download(self)?.as_ref().host_to_f64_vec(),
        }
    }

    /// All elements in row-major order. GPU memory is copied, as in [`to_f64_vec`](Self::to_f64_vec).
    ///
    /// # Errors
    /// [`Error::DType`] if `T` is another type than the tensor's, and as
    /// [`to_f64_vec`](Self::to_f64_vec).
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        match self.device() {
            Device::Cpu => self.host_to_vec(),
            _ => download(self)?.as_ref().host_to_vec(),
        }
    }
}

/// The elements of a view of a GPU's memory, row-major on the CPU.
pub(crate) fn download(x: &TensorRef<'_>) -> Result<Tensor> {
    let mut out =
        Tensor::uninitialised(TensorDesc { layout: Layout::contiguous(x.shape())?, ..*x.desc() })?;
    let Some((low, high)) = x.address_range() else { return Ok(out) };
    let mut bytes = Buffer::new(high - low)?;
    let to = bytes.as_mut_ptr();
    Gpu::get(x.device())?.wait(|runtime| {
        // SAFETY: the view may be read on the device, and both ranges have this length.
        unsafe { runtime.download(to, low as *const u8, high - low, None) }
    })?;
    let size = x.dtype().size();
    let origin = x.as_ptr() as usize - low;
    let mut to = out.as_mut().as_mut_ptr();
    crate::tensor::for_each_offset(x.layout(), |o| {
        let from = origin.wrapping_add_signed(o * size as isize);
        // SAFETY: the buffer covers the view's range, and `out` has as many elements as the view.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr().add(from), to, size);
            to = to.add(size);
        }
    });
    Ok(out)
}

/// The size in bytes of the widest memory access of a thread.
const VECTOR_BYTES: usize = 16;

/// A tensor that owns GPU memory, to copy data to a GPU and back.
///
/// An upload keeps the strides of the host tensor and its address modulo 16, so that kernels see the same alignment.
/// Otherwise it starts at a multiple of 256, whatever the host's allocator does.
///
/// ```no_run
/// use windrow::{TensorRef, cuda::DeviceTensor};
/// let x = DeviceTensor::from_host(&TensorRef::new(&[1.0f32, 2.0], &[2])?, 0)?;
/// assert_eq!(x.to_host()?.to_vec::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), windrow::Error>(())
/// ```
#[derive(Debug)]
pub struct DeviceTensor {
    buffer: DeviceBuffer,
    /// Offset of the element at index zero, in bytes.
    origin: usize,
    desc: TensorDesc,
}

impl DeviceTensor {
    /// A tensor on a GPU whose bytes are all 0xff, which is NaN in every float type. An integer as `device` is the
    /// index of a CUDA device.
    ///
    /// # Errors
    /// [`Error::NoDevice`], [`Error::OutOfMemory`], [`Error::Backend`].
    pub fn new(desc: TensorDesc, device: impl Into<Device>) -> Result<Self> {
        Self::with_misalignment(desc, device.into(), 0)
    }

    /// A tensor like that of [`new`](Self::new), with the lowest element `misalignment` bytes past a multiple of 256.
    fn with_misalignment(desc: TensorDesc, device: Device, misalignment: usize) -> Result<Self> {
        let (low, high) = desc.layout.extent().unwrap_or((0, -1));
        let size = desc.dtype.size();
        let bytes = (high - low + 1) as usize * size;
        // SAFETY: null is the legacy default stream, which always exists.
        let stream = Arc::new(unsafe { Stream::from_raw(device, std::ptr::null_mut())? });
        let mut buffer = DeviceBuffer::new(&stream, misalignment + bytes)?;
        if buffer.len() > 0 {
            let (ptr, len) = (buffer.as_mut_ptr(), buffer.len());
            stream.gpu().call(|runtime| {
                // SAFETY: the range was allocated above.
                unsafe { runtime.fill(ptr, 0xff, len, stream.as_raw()) }
            })?;
            // Other streams may use it from here on.
            stream.synchronize()?;
        }
        Ok(DeviceTensor { buffer, origin: misalignment + low.unsigned_abs() * size, desc })
    }

    /// A copy of a host tensor on a GPU. An integer as `device` is the index of a CUDA device.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`Error::WrongDevice`] if `x` is not on the CPU.
    pub fn from_host(x: &TensorRef<'_>, device: impl Into<Device>) -> Result<Self> {
        crate::tensor::check_device("x", x.device(), Device::Cpu)?;
        let lowest = x.address_range().map_or(0, |(low, _)| low);
        let misalignment = lowest % VECTOR_BYTES;
        let mut t = Self::with_misalignment(*x.desc(), device.into(), misalignment)?;
        if let Some((low, high)) = x.address_range() {
            let gpu = t.buffer.stream.gpu();
            let dst = t.buffer.as_mut_ptr().wrapping_add(misalignment);
            let upload = |from: *const u8, bytes: usize| {
                gpu.call(|runtime| {
                    // SAFETY: both ranges are owned or borrowed, and of that length.
                    unsafe { runtime.upload(dst, from, bytes, None) }
                })
            };
            // Gaps between the elements are the caller's memory as well, but may be in use by
            // others: elements are gathered one by one unless there are none.
            if high - low == x.desc().bytes() {
                let start = x.as_ptr().wrapping_sub(x.as_ptr() as usize - low);
                upload(start, high - low)?;
            } else {
                let mut bytes = vec![0u8; high - low];
                let size = x.dtype().size();
                let origin = x.as_ptr() as usize - low;
                crate::tensor::for_each_offset(x.layout(), |o| {
                    let at = origin.wrapping_add_signed(o * size as isize);
                    // SAFETY: `x` may be read at every offset of its layout, and `at` lies in the
                    // range between its lowest and highest address.
                    unsafe {
                        let from = x.as_ptr().offset(o * size as isize);
                        std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr().add(at), size);
                    }
                });
                upload(bytes.as_ptr(), bytes.len())?;
            }
        }
        Ok(t)
    }

    /// The elements in row-major order, on the CPU. Waits for all work on the device's blocking streams (those that are
    /// ordered with the legacy default stream). Work on other streams must have finished before the call.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], and [`Error::Backend`] if a kernel failed before.
    pub fn to_host(&self) -> Result<Tensor> {
        download(&self.as_ref())
    }

    /// Element type, shape and strides.
    pub fn desc(&self) -> &TensorDesc {
        &self.desc
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.buffer.stream.device()
    }

    fn address(&self) -> *mut c_void {
        self.buffer.ptr.wrapping_add(self.origin).cast()
    }

    /// A view for reading.
    pub fn as_ref(&self) -> TensorRef<'_> {
        // SAFETY: the buffer covers the layout and is borrowed by the view.
        unsafe { TensorRef::from_raw(self.address(), self.desc, self.device()) }
    }

    /// A view for writing.
    ///
    /// # Errors
    /// [`Error::OverlappingOutput`] if elements share memory.
    pub fn as_mut(&mut self) -> Result<TensorMut<'_>> {
        // SAFETY: the buffer covers the layout and is borrowed mutably by the view.
        unsafe { TensorMut::from_raw(self.address(), self.desc, self.device()) }
    }
}
