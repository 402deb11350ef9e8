//! candle's CUDA tensors: its memory and its stream.

use crate::storage::error;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop,
};
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice};
use candle_core::{CudaDevice, CudaStorage, Result};
use half::{bf16, f16};
use std::ffi::c_void;
use windrow::{DType, Device, TensorDesc, TensorMut, TensorRef, Workspace};

/// The index of the device, as the driver counts.
pub(crate) fn ordinal(device: &CudaDevice) -> u32 {
    device.cuda_stream().context().ordinal() as u32
}

/// Scratch memory on the stream of candle's own work.
pub(crate) fn workspace(op: &'static str, device: &CudaDevice, bytes: usize) -> Result<Workspace> {
    let stream = device.cuda_stream();
    // SAFETY: the device owns its stream, and the caller's tensors own the device.
    unsafe { Workspace::on_stream(ordinal(device), stream.cu_stream().cast::<c_void>(), bytes) }
        .map_err(error(op))
}

/// Stream-ordered memory of candle's for `len` elements.
pub(crate) fn allocate(
    op: &'static str,
    device: &CudaDevice,
    dtype: DType,
    len: usize,
) -> Result<CudaStorage> {
    fn of<T: CudaDType + candle_core::cuda_backend::cudarc::driver::DeviceRepr>(
        device: &CudaDevice,
        len: usize,
    ) -> Result<CudaStorage> {
        // The driver has no empty allocation.
        // SAFETY: operators write every element before anybody reads it.
        let slice = unsafe { device.alloc::<T>(len.max(1)) }?;
        Ok(CudaStorage::wrap_cuda_slice(slice, device.clone()))
    }
    match dtype {
        DType::F32 => of::<f32>(device, len),
        DType::F16 => of::<f16>(device, len),
        DType::BF16 => of::<bf16>(device, len),
        given => Err(error(op)(windrow::Error::DType {
            arg: "output",
            given,
            expected: "f32, f16 or bf16".into(),
        })),
    }
}

/// An input with element `start` of the storage at index zero. The stream waits for what others
/// write into it.
pub(crate) fn view<'a>(
    op: &'static str,
    storage: &'a CudaStorage,
    desc: TensorDesc,
    start: usize,
) -> Result<(TensorRef<'a>, SyncOnDrop<'a>)> {
    fn of<T>(data: &CudaSlice<T>) -> (u64, usize, SyncOnDrop<'_>) {
        let (address, sync) = data.device_ptr(data.stream());
        (address, data.len(), sync)
    }
    let (address, len, sync) = match &storage.slice {
        CudaStorageSlice::F32(data) => of(data),
        CudaStorageSlice::F16(data) => of(data),
        CudaStorageSlice::BF16(data) => of(data),
        CudaStorageSlice::F64(data) => of(data),
        CudaStorageSlice::I32(data) => of(data),
        CudaStorageSlice::U32(data) => of(data),
        CudaStorageSlice::I64(data) => of(data),
        _ => unreachable!("refused with the type"),
    };
    check_bounds(op, &desc, start, len)?;
    let address = (address as usize + start * desc.dtype.size()) as *const c_void;
    let device = Device::Cuda(ordinal(&storage.device));
    // SAFETY: within the allocation, which is borrowed; candle's work is ordered on its stream.
    Ok((unsafe { TensorRef::from_raw(address, desc, device) }, sync))
}

/// An output with element `start` of the storage at index zero. `stream` is candle's: it waits for what
/// others do with the memory.
pub(crate) fn view_mut<'a>(
    op: &'static str,
    storage: &'a mut CudaStorage,
    stream: &'a CudaStream,
    desc: TensorDesc,
    start: usize,
) -> Result<(TensorMut<'a>, SyncOnDrop<'a>)> {
    fn of<'a, T>(
        data: &'a mut CudaSlice<T>,
        stream: &'a CudaStream,
    ) -> (u64, usize, SyncOnDrop<'a>) {
        let len = data.len();
        let (address, sync) = data.device_ptr_mut(stream);
        (address, len, sync)
    }
    let device = Device::Cuda(ordinal(&storage.device));
    let (address, len, sync) = match &mut storage.slice {
        CudaStorageSlice::F32(data) => of(data, stream),
        CudaStorageSlice::F16(data) => of(data, stream),
        CudaStorageSlice::BF16(data) => of(data, stream),
        _ => unreachable!("outputs are of a type to compute with"),
    };
    check_bounds(op, &desc, start, len)?;
    let address = (address as usize + start * desc.dtype.size()) as *mut c_void;
    // SAFETY: within the allocation, which is borrowed exclusively.
    let tensor = unsafe { TensorMut::from_raw(address, desc, device) }.map_err(error(op))?;
    Ok((tensor, sync))
}

fn check_bounds(op: &'static str, desc: &TensorDesc, start: usize, len: usize) -> Result<()> {
    match desc.layout.extent() {
        Some((low, high)) if start as isize + low < 0 || start + high as usize >= len => {
            Err(error(op)(windrow::Error::OutOfBounds {
                arg: "tensor",
                first: start as i128 + low as i128,
                last: start as i128 + high as i128,
                len,
            }))
        }
        _ => Ok(()),
    }
}
