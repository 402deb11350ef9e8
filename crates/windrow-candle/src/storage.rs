//! candle's tensors as Windrow's views, and memory for results: no copies.

use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Storage, StorageRef, Tensor};
use half::{bf16, f16};
use windrow::{TensorDesc, TensorMut, TensorRef, Workspace};

#[cfg(feature = "cuda")]
use crate::cuda;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::{CudaStream, SyncOnDrop};
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// A Windrow error as candle's, with the name of the operator.
pub(crate) fn error(op: &'static str) -> impl Fn(windrow::Error) -> candle_core::Error {
    move |error| match error {
        windrow::Error::NoDevice { .. }
        | windrow::Error::OutOfMemory { .. }
        | windrow::Error::Backend { .. } => candle_core::Error::Cuda(Box::new(error)).bt(),
        error => candle_core::Error::wrap(format!("{op}: {error}")),
    }
}

/// Element type, shape and strides of a tensor.
pub(crate) fn desc(op: &'static str, tensor: &Tensor) -> Result<TensorDesc> {
    layout_desc(op, tensor.dtype(), tensor.layout())
}

fn layout_desc(op: &'static str, dtype: DType, layout: &Layout) -> Result<TensorDesc> {
    let dtype = match dtype {
        DType::F32 => windrow::DType::F32,
        DType::F16 => windrow::DType::F16,
        DType::BF16 => windrow::DType::BF16,
        DType::F64 => windrow::DType::F64,
        // candle's usual type of indices: the same numbers below 2^31.
        DType::I32 | DType::U32 => windrow::DType::I32,
        DType::I64 => windrow::DType::I64,
        other => return Err(candle_core::Error::UnsupportedDTypeForOp(other, op).bt()),
    };
    let mut strides = [0; windrow::MAX_RANK];
    let strides = match strides.get_mut(..layout.stride().len()) {
        Some(strides) => {
            strides.iter_mut().zip(layout.stride()).for_each(|(s, &given)| *s = given as isize);
            &*strides
        }
        None => &[], // too many dimensions: an error below, by their number
    };
    let layout = windrow::Layout::strided(layout.dims(), strides).map_err(error(op))?;
    Ok(TensorDesc::new(dtype, layout))
}

/// The memory of a tensor, wherever it is.
#[derive(Clone, Copy)]
pub(crate) enum Memory<'a> {
    Cpu(&'a CpuStorage),
    #[cfg(feature = "cuda")]
    Cuda(&'a candle_core::CudaStorage),
}

/// An input of an operator. On CUDA it lives until the operator's work is enqueued on the stream, so that other streams
/// wait for that work.
pub(crate) struct View<'a> {
    pub tensor: TensorRef<'a>,
    #[cfg(feature = "cuda")]
    _sync: Option<SyncOnDrop<'a>>,
}

/// An output of an operator; lives as [`View`].
pub(crate) struct ViewMut<'a> {
    tensor: TensorMut<'a>,
    #[cfg(feature = "cuda")]
    _sync: Option<SyncOnDrop<'a>>,
}

impl ViewMut<'_> {
    pub fn tensor(&mut self) -> TensorMut<'_> {
        self.tensor.reborrow()
    }
}

impl<'a> Memory<'a> {
    pub fn of(op: &'static str, storage: &'a Storage) -> Result<Self> {
        match storage {
            Storage::Cpu(storage) => Ok(Memory::Cpu(storage)),
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage) => Ok(Memory::Cuda(storage)),
            other => Err(elsewhere(op, &other.device())),
        }
    }

    pub fn view(self, op: &'static str, layout: &Layout) -> Result<View<'a>> {
        let start = layout.start_offset();
        match self {
            Memory::Cpu(storage) => {
                let layout = layout_desc(op, storage.dtype(), layout)?.layout;
                let tensor = match storage {
                    CpuStorage::F32(data) => TensorRef::strided(data, start, layout),
                    CpuStorage::F16(data) => TensorRef::strided(data, start, layout),
                    CpuStorage::BF16(data) => TensorRef::strided(data, start, layout),
                    CpuStorage::F64(data) => TensorRef::strided(data, start, layout),
                    CpuStorage::I32(data) => TensorRef::strided(data, start, layout),
                    CpuStorage::I64(data) => TensorRef::strided(data, start, layout),
                    CpuStorage::U32(data) => {
                        // SAFETY: both are 32-bit integers without invalid values.
                        let data = unsafe {
                            std::slice::from_raw_parts(data.as_ptr().cast::<i32>(), data.len())
                        };
                        TensorRef::strided(data, start, layout)
                    }
                    _ => unreachable!("refused by `layout_desc`"),
                };
                Ok(View {
                    tensor: tensor.map_err(error(op))?,
                    #[cfg(feature = "cuda")]
                    _sync: None,
                })
            }
            #[cfg(feature = "cuda")]
            Memory::Cuda(storage) => {
                let desc = layout_desc(op, storage.dtype(), layout)?;
                let (tensor, sync) = cuda::view(op, storage, desc, start)?;
                Ok(View { tensor, _sync: Some(sync) })
            }
        }
    }
}

/// The CPU storage of a tensor that an operator writes into.
pub(crate) fn view_mut<'a>(
    op: &'static str,
    storage: &'a mut CpuStorage,
    layout: &Layout,
) -> Result<ViewMut<'a>> {
    let (start, dtype) = (layout.start_offset(), storage.dtype());
    let view = layout_desc(op, dtype, layout)?.layout;
    let tensor = match storage {
        CpuStorage::F32(data) => TensorMut::strided(data, start, view),
        CpuStorage::F16(data) => TensorMut::strided(data, start, view),
        CpuStorage::BF16(data) => TensorMut::strided(data, start, view),
        _ => return Err(candle_core::Error::UnsupportedDTypeForOp(dtype, op).bt()),
    };
    Ok(ViewMut {
        tensor: tensor.map_err(error(op))?,
        #[cfg(feature = "cuda")]
        _sync: None,
    })
}

/// The CUDA storage of a tensor that an operator writes into; `stream` is that of its device.
#[cfg(feature = "cuda")]
pub(crate) fn cuda_view_mut<'a>(
    op: &'static str,
    storage: &'a mut candle_core::CudaStorage,
    stream: &'a CudaStream,
    layout: &Layout,
) -> Result<ViewMut<'a>> {
    let desc = layout_desc(op, storage.dtype(), layout)?;
    let (tensor, sync) = cuda::view_mut(op, storage, stream, desc, layout.start_offset())?;
    Ok(ViewMut { tensor, _sync: Some(sync) })
}

/// A tensor that is read by an operator without being one of candle's arguments.
pub(crate) struct Held<'a> {
    storage: StorageRef<'a>,
    layout: &'a Layout,
}

impl<'a> Held<'a> {
    pub fn new(tensor: &'a Tensor) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        Held { storage, layout }
    }

    pub fn view(&self, op: &'static str) -> Result<View<'_>> {
        Memory::of(op, &self.storage)?.view(op, self.layout)
    }

    /// The address at which the storage begins, the same for all tensors that share it; `None` if it is empty.
    pub fn storage_address(&self, op: &'static str) -> Result<Option<usize>> {
        let (address, start) = (self.view(op)?.tensor, self.layout.start_offset());
        let bytes = start * address.dtype().size();
        Ok((!address.layout().is_empty()).then(|| address.as_ptr() as usize - bytes))
    }
}

/// Returns an error for a tensor that is not on x's device.
pub(crate) fn same_device(op: &'static str, name: &str, tensor: &Tensor, x: &Tensor) -> Result<()> {
    if tensor.device().same_device(x.device()) {
        return Ok(());
    }
    let (given, expected) = (tensor.device().location(), x.device().location());
    candle_core::bail!("{op}: `{name}` is on {given:?}, expected {expected:?}, where x is")
}

/// Memory of its own for a result, which the operator writes completely.
pub(crate) struct Output {
    memory: Raw,
    desc: TensorDesc,
}

enum Raw {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    #[cfg(feature = "cuda")]
    Cuda(candle_core::CudaStorage, Arc<CudaStream>),
}

impl Output {
    /// Memory for a dense tensor.
    pub fn new(op: &'static str, device: &Device, desc: TensorDesc) -> Result<Self> {
        let len = desc.layout.len();
        let memory = match (device, desc.dtype) {
            (Device::Cpu, windrow::DType::F32) => Raw::F32(Vec::with_capacity(len)),
            (Device::Cpu, windrow::DType::F16) => Raw::F16(Vec::with_capacity(len)),
            (Device::Cpu, windrow::DType::BF16) => Raw::BF16(Vec::with_capacity(len)),
            #[cfg(feature = "cuda")]
            (Device::Cuda(device), dtype) => {
                Raw::Cuda(cuda::allocate(op, device, dtype, len)?, device.cuda_stream())
            }
            (Device::Cpu, other) => {
                return Err(error(op)(windrow::Error::DType {
                    arg: "output",
                    given: other,
                    expected: "f32, f16 or bf16".into(),
                }));
            }
            (other, _) => return Err(elsewhere(op, other)),
        };
        Ok(Output { memory, desc })
    }

    pub fn view(&mut self, op: &'static str) -> Result<ViewMut<'_>> {
        let ptr = match &mut self.memory {
            Raw::F32(data) => data.as_mut_ptr().cast(),
            Raw::F16(data) => data.as_mut_ptr().cast(),
            Raw::BF16(data) => data.as_mut_ptr().cast(),
            #[cfg(feature = "cuda")]
            Raw::Cuda(storage, stream) => {
                let (tensor, sync) = cuda::view_mut(op, storage, stream, self.desc, 0)?;
                return Ok(ViewMut { tensor, _sync: Some(sync) });
            }
        };
        // SAFETY: memory for as many elements as the dense layout has, of its type and ours alone.
        // Plans write elements of an output before they read them.
        let tensor = unsafe { TensorMut::from_raw(ptr, self.desc, windrow::Device::Cpu) };
        Ok(ViewMut {
            tensor: tensor.map_err(error(op))?,
            #[cfg(feature = "cuda")]
            _sync: None,
        })
    }

    /// The memory as candle's.
    ///
    /// # Safety
    /// Every element must have been written.
    pub unsafe fn into_storage(self) -> Storage {
        let len = self.desc.layout.len();
        // SAFETY: the capacity was asked for, the elements are written by the caller's promise.
        unsafe {
            match self.memory {
                Raw::F32(mut data) => {
                    data.set_len(len);
                    Storage::Cpu(CpuStorage::F32(data))
                }
                Raw::F16(mut data) => {
                    data.set_len(len);
                    Storage::Cpu(CpuStorage::F16(data))
                }
                Raw::BF16(mut data) => {
                    data.set_len(len);
                    Storage::Cpu(CpuStorage::BF16(data))
                }
                #[cfg(feature = "cuda")]
                Raw::Cuda(storage, _) => Storage::Cuda(storage),
            }
        }
    }

    /// The memory as a tensor of its own, outside of any graph.
    ///
    /// # Safety
    /// Every element must have been written.
    pub unsafe fn into_tensor(self) -> Result<Tensor> {
        let (order, shape) = (Order::of(&self.desc), self.desc.shape().to_vec());
        // SAFETY: the caller's promise.
        let storage = unsafe { self.into_storage() };
        order.logical(&Tensor::from_storage(
            storage,
            order.shape(&shape),
            BackpropOp::none(),
            false,
        ))
    }
}

/// The order of the dimensions of a dense tensor [n, c, ...] in memory. Candle's custom operators return row-major
/// storage, so that a channels-last result is that of the permuted shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    RowMajor,
    ChannelsLast,
}

impl Order {
    pub fn of(desc: &TensorDesc) -> Self {
        if desc.layout.is_contiguous() { Order::RowMajor } else { Order::ChannelsLast }
    }

    /// A dense tensor in this order.
    pub fn desc(
        self,
        op: &'static str,
        dtype: windrow::DType,
        shape: &[usize],
    ) -> Result<TensorDesc> {
        let rank = shape.len();
        let order: Vec<usize> = match self {
            Order::RowMajor => (0..rank).collect(),
            Order::ChannelsLast => [0].into_iter().chain(2..rank).chain([1]).collect(),
        };
        let layout = windrow::Layout::with_order(shape, &order).map_err(error(op))?;
        Ok(TensorDesc::new(dtype, layout))
    }

    /// The sizes of the dimensions in the order of memory.
    pub fn shape(self, logical: &[usize]) -> Shape {
        let mut shape = logical.to_vec();
        if self == Order::ChannelsLast {
            shape[1..].rotate_left(1);
        }
        Shape::from(shape)
    }

    /// A tensor whose dimensions are as in memory, with channels second: a view.
    pub fn logical(self, tensor: &Tensor) -> Result<Tensor> {
        match self {
            Order::RowMajor => Ok(tensor.clone()),
            Order::ChannelsLast => {
                let rank = tensor.rank();
                let order: Vec<usize> = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
                tensor.permute(order)
            }
        }
    }
}

/// The plan options for tensors on this device.
pub(crate) fn options(op: &'static str, device: &Device) -> Result<windrow::PlanOptions> {
    let device = match device {
        Device::Cpu => windrow::Device::Cpu,
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => windrow::Device::Cuda(cuda::ordinal(device)),
        other => return Err(elsewhere(op, other)),
    };
    Ok(windrow::PlanOptions::default().with_device(device))
}

/// Scratch memory, and on CUDA the stream of candle's own work on the device.
pub(crate) fn workspace(op: &'static str, device: &Device, bytes: usize) -> Result<Workspace> {
    match device {
        Device::Cpu => Workspace::new(windrow::Device::Cpu, bytes).map_err(error(op)),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::workspace(op, device, bytes),
        other => Err(elsewhere(op, other)),
    }
}

fn elsewhere(op: &'static str, device: &Device) -> candle_core::Error {
    candle_core::Error::msg(format!(
        "{op}: no implementation for tensors on {:?}",
        device.location()
    ))
}
