//! Device memory.

use super::{Gpu, Stream};
use crate::buffer::Buffer;
use crate::{Device, Error, Layout, Result, Tensor, TensorDesc, TensorMut, TensorRef};
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use std::ffi::c_void;
use std::sync::Arc;

/// Device memory, allocated and freed in the order of a stream, from the driver's pool.
#[derive(Debug)]
pub(crate) struct DeviceBuffer {
    ptr: CUdeviceptr,
    len: usize,
    stream: Arc<Stream>,
}

impl DeviceBuffer {
    /// `len` bytes, aligned to 256, contents arbitrary. Work on `stream` may use them at once; work
    /// on other streams must be ordered after the allocation.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Backend`].
    pub(crate) fn new(stream: &Arc<Stream>, len: usize) -> Result<Self> {
        let gpu = stream.gpu();
        let mut ptr = 0;
        if len > 0 {
            let _current = gpu.enter()?;
            // SAFETY: the device is current and the stream alive.
            let result = unsafe {
                if gpu.memory_pools {
                    sys::cuMemAllocAsync(&mut ptr, len, stream.handle())
                } else {
                    sys::cuMemAlloc_v2(&mut ptr, len)
                }
            };
            if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                return Err(Error::OutOfMemory { device: gpu.device(), bytes: len });
            }
            gpu.check(result, "cuMemAllocAsync")?;
        }
        Ok(DeviceBuffer { ptr, len, stream: stream.clone() })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// True if `stream` is the one whose order it was allocated in.
    pub(crate) fn is_allocated_on(&self, stream: &Arc<Stream>) -> bool {
        Arc::ptr_eq(&self.stream, stream)
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.ptr as *const u8
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr as *mut u8
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let gpu = self.stream.gpu();
        if self.ptr == 0 {
            return;
        }
        // Held to the end: without a current device the driver refuses to free.
        let Ok(_current) = gpu.enter() else { return };
        // SAFETY: allocated in `new` in the same way.
        unsafe {
            if gpu.memory_pools {
                sys::cuMemFreeAsync(self.ptr, self.stream.handle());
            } else {
                sys::cuMemFree_v2(self.ptr);
            }
        }
    }
}

/// Copies host memory to the device, and waits.
fn upload(gpu: &Gpu, dst: *mut u8, src: *const u8, bytes: usize) -> Result<()> {
    let _current = gpu.enter()?;
    // SAFETY: callers pass ranges of `bytes` bytes that they own or borrow.
    gpu.check(
        unsafe { sys::cuMemcpyHtoD_v2(dst as CUdeviceptr, src.cast::<c_void>(), bytes) },
        "copying to the device",
    )
}

/// The elements of a view of memory on CUDA device `index`, row-major on the CPU.
pub(crate) fn download(x: &TensorRef<'_>, index: u32) -> Result<Tensor> {
    let mut out =
        Tensor::uninitialised(TensorDesc { layout: Layout::contiguous(x.shape())?, ..*x.desc() })?;
    let Some((low, high)) = x.address_range() else { return Ok(out) };
    let mut bytes = Buffer::new(high - low)?;
    let gpu = Gpu::get(index)?;
    let _current = gpu.enter()?;
    // SAFETY: the view may be read on the device, and both ranges have this length.
    match unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), low as CUdeviceptr, high - low) }
    {
        CUresult::CUDA_SUCCESS => {}
        error => return Err(gpu.launch_error(error)),
    }
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

/// The widest access of a thread.
const VECTOR_BYTES: usize = 16;

/// A tensor that owns device memory: to bring data to a device and back.
///
/// Uploads keep the strides of the host's view and its address modulo 16, so that a kernel sees
/// the same alignment of vectors; beyond that they begin where device memory does, at a multiple of
/// 256, whatever the host's allocator does.
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
    /// A tensor whose bytes are all 0xff: NaN in every float type.
    ///
    /// # Errors
    /// [`Error::NoDevice`], [`Error::OutOfMemory`], [`Error::Backend`].
    pub fn new(desc: TensorDesc, index: u32) -> Result<Self> {
        Self::with_misalignment(desc, index, 0)
    }

    /// As [`new`](Self::new), with the lowest element `misalignment` bytes past a multiple of 256.
    fn with_misalignment(desc: TensorDesc, index: u32, misalignment: usize) -> Result<Self> {
        let (low, high) = desc.layout.extent().unwrap_or((0, -1));
        let size = desc.dtype.size();
        let bytes = (high - low + 1) as usize * size;
        // SAFETY: null is the legacy default stream, which always exists.
        let stream = Arc::new(unsafe { Stream::from_raw(index, std::ptr::null_mut())? });
        let mut buffer = DeviceBuffer::new(&stream, misalignment + bytes)?;
        if buffer.len() > 0 {
            let gpu = stream.gpu();
            let _current = gpu.enter()?;
            let ptr = buffer.as_mut_ptr() as CUdeviceptr;
            // SAFETY: the range was allocated above.
            gpu.check(unsafe { sys::cuMemsetD8_v2(ptr, 0xff, buffer.len()) }, "cuMemsetD8")?;
            // Other streams may use it from here on.
            stream.synchronize()?;
        }
        Ok(DeviceTensor { buffer, origin: misalignment + low.unsigned_abs() * size, desc })
    }

    /// A copy of a host tensor on CUDA device `index`.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`Error::WrongDevice`] if `x` is not on the CPU.
    pub fn from_host(x: &TensorRef<'_>, index: u32) -> Result<Self> {
        crate::tensor::check_device("x", x.device(), Device::Cpu)?;
        let lowest = x.address_range().map_or(0, |(low, _)| low);
        let misalignment = lowest % VECTOR_BYTES;
        let mut t = Self::with_misalignment(*x.desc(), index, misalignment)?;
        if let Some((low, high)) = x.address_range() {
            let gpu = t.buffer.stream.gpu();
            let dst = t.buffer.as_mut_ptr().wrapping_add(misalignment);
            // Gaps between the elements are the caller's memory as well, but may be in use by
            // others: elements are gathered one by one unless there are none.
            if high - low == x.desc().bytes() {
                let start = x.as_ptr().wrapping_sub(x.as_ptr() as usize - low);
                upload(gpu, dst, start, high - low)?;
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
                upload(gpu, dst, bytes.as_ptr(), bytes.len())?;
            }
        }
        Ok(t)
    }

    /// The elements in row-major order, on the CPU. Waits for all work on the device's blocking
    /// streams; work on others must be waited for before.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], and [`Error::Backend`] if a kernel failed before.
    pub fn to_host(&self) -> Result<Tensor> {
        download(&self.as_ref(), self.buffer.stream.gpu().info.index)
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
        (self.buffer.ptr as usize + self.origin) as *mut c_void
    }

    /// View for reading.
    pub fn as_ref(&self) -> TensorRef<'_> {
        // SAFETY: the buffer covers the layout and is borrowed by the view.
        unsafe { TensorRef::from_raw(self.address(), self.desc, self.device()) }
    }

    /// View for writing.
    ///
    /// # Errors
    /// [`Error::OverlappingOutput`] if elements share memory.
    pub fn as_mut(&mut self) -> Result<TensorMut<'_>> {
        // SAFETY: the buffer covers the layout and is borrowed mutably by the view.
        unsafe { TensorMut::from_raw(self.address(), self.desc, self.device()) }
    }
}
