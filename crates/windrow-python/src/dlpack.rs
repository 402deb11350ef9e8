//! The C structures of [DLPack](https://dmlc.github.io/dlpack/latest/) 1.x, as far as they are used here.

use pyo3::ffi::PyObject;
use std::ffi::{CStr, c_char, c_void};
use windrow::{DType, Device, Error, Layout, MAX_RANK, TensorDesc};

/// The version that exported tensors declare: read-only flag, strides always given.
pub(crate) const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 2 };
pub(crate) const UNVERSIONED_NAME: &CStr = c"dltensor";
pub(crate) const VERSIONED_NAME: &CStr = c"dltensor_versioned";
pub(crate) const EXCHANGE_NAME: &CStr = c"dlpack_exchange_api";
pub(crate) const FLAG_READ_ONLY: u64 = 1;

pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
pub(crate) const ROCM: i32 = 10;
const ROCM_HOST: i32 = 11;
const CUDA_MANAGED: i32 = 13;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DLPackVersion {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct DLDevice {
    pub(crate) device_type: i32,
    pub(crate) device_id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct DLDataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

#[repr(C)]
pub(crate) struct DLTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: DLDevice,
    pub(crate) ndim: i32,
    pub(crate) dtype: DLDataType,
    pub(crate) shape: *mut i64,
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

#[repr(C)]
pub(crate) struct DLManagedTensor {
    pub(crate) dl_tensor: DLTensor,
    pub(crate) manager_ctx: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

#[repr(C)]
pub(crate) struct DLManagedTensorVersioned {
    pub(crate) version: DLPackVersion,
    pub(crate) manager_ctx: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    pub(crate) flags: u64,
    pub(crate) dl_tensor: DLTensor,
}

/// `DLPackExchangeAPI`: C functions that a tensor type offers so that views can be had without a
/// capsule. PyTorch does from 2.10 on.
#[repr(C)]
pub(crate) struct ExchangeApi {
    pub(crate) version: DLPackVersion,
    previous: usize,
    allocate: usize,
    managed_from_object: usize,
    /// Takes the managed tensor over.
    pub(crate) to_object:
        unsafe extern "C" fn(*mut DLManagedTensorVersioned, *mut *mut PyObject) -> i32,
    /// Fills a tensor that borrows from the object.
    pub(crate) borrow: Option<Borrow>,
    pub(crate) current_stream: unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> i32,
}

/// [`ExchangeApi::borrow`]
pub(crate) type Borrow = unsafe extern "C" fn(*mut PyObject, *mut DLTensor) -> i32;

/// Element types: Windrow's, DLPack's code and bits, PyTorch's name.
const TYPES: [(DType, u8, u8, &str); 7] = [
    (DType::F32, 2, 32, "float32"),
    (DType::F16, 2, 16, "float16"),
    (DType::BF16, 4, 16, "bfloat16"),
    (DType::I32, 0, 32, "int32"),
    (DType::I64, 0, 64, "int64"),
    (DType::F64, 2, 64, "float64"),
    (DType::U8, 1, 8, "uint8"),
];

/// PyTorch's name of an element type.
pub(crate) fn torch_name(dtype: DType) -> &'static str {
    TYPES.iter().find(|(d, ..)| *d == dtype).map_or("float32", |(.., name)| name)
}

impl DLDataType {
    pub(crate) const UINT16: DLDataType = DLDataType { code: 1, bits: 16, lanes: 1 };

    /// The DLPack form of one of Windrow's element types.
    pub(crate) fn new(dtype: DType) -> Self {
        let known = TYPES.iter().find(|(d, ..)| *d == dtype);
        let (_, code, bits, _) = *known.expect("the table has every type of Windrow");
        DLDataType { code, bits, lanes: 1 }
    }

    pub(crate) fn dtype(self) -> Option<DType> {
        TYPES
            .iter()
            .find(|(_, code, bits, _)| (*code, *bits, 1) == (self.code, self.bits, self.lanes))
            .map(|(d, ..)| *d)
    }

    /// The inverse of [`name`](Self::name).
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        if name == "bool" {
            return Some(DLDataType { code: 6, bits: 8, lanes: 1 });
        }
        let (kind, bits) = name.split_at(name.find(|c: char| c.is_ascii_digit())?);
        let code = match kind {
            "int" => 0,
            "uint" => 1,
            "float" => 2,
            "bfloat" => 4,
            "complex" => 5,
            _ => return None,
        };
        Some(DLDataType { code, bits: bits.parse().ok()?, lanes: 1 })
    }

    /// The name as in NumPy: `float32`, `uint8`, ...
    pub(crate) fn name(self) -> String {
        let kind = match self.code {
            0 => "int",
            1 => "uint",
            2 => "float",
            4 => "bfloat",
            5 => "complex",
            6 => return "bool".into(),
            _ => return format!("DLPack type ({}, {} bits)", self.code, self.bits),
        };
        let lanes = if self.lanes == 1 { String::new() } else { format!("x{}", self.lanes) };
        format!("{kind}{}{lanes}", self.bits)
    }
}

impl DLDevice {
    pub(crate) fn new(device: Device) -> Self {
        match device {
            Device::Cpu => DLDevice { device_type: CPU, device_id: 0 },
            Device::Cuda(i) => DLDevice { device_type: CUDA, device_id: i as i32 },
            Device::Hip(i) => DLDevice { device_type: ROCM, device_id: i as i32 },
            other => unreachable!("no array is taken from {other}"),
        }
    }

    /// The device that can work on this memory; `None` if Windrow has no backend for it.
    pub(crate) fn device(self) -> Option<Device> {
        match self.device_type {
            CPU | CUDA_HOST | ROCM_HOST => Some(Device::Cpu),
            CUDA | CUDA_MANAGED => Some(Device::Cuda(self.device_id as _)),
            ROCM => Some(Device::Hip(self.device_id as _)),
            _ => None,
        }
    }
}

impl DLTensor {
    /// Shape and strides in Windrow's terms.
    ///
    /// # Safety
    /// `shape` and, unless null, `strides` must point at `ndim` numbers.
    pub(crate) unsafe fn layout(&self, arg: &'static str) -> windrow::Result<Layout> {
        let rank = self.ndim as usize;
        if rank > MAX_RANK {
            return Err(Error::Rank { arg, given: rank, expected: "at most 8" });
        }
        let mut shape = [0usize; MAX_RANK];
        let mut strides = [0isize; MAX_RANK];
        for (d, size) in shape[..rank].iter_mut().enumerate() {
            // SAFETY: d < ndim.
            *size = unsafe { *self.shape.add(d) } as usize;
        }
        if self.strides.is_null() {
            return Layout::contiguous(&shape[..rank]);
        }
        for (d, stride) in strides[..rank].iter_mut().enumerate() {
            // SAFETY: d < ndim, and strides are given.
            *stride = unsafe { *self.strides.add(d) } as isize;
        }
        Layout::strided(&shape[..rank], &strides[..rank])
    }
}

/// A managed tensor of either version that keeps `owner` alive until the consumer lets it go.
pub(crate) struct Export<O> {
    pub(crate) owner: O,
    pub(crate) data: *mut c_void,
    pub(crate) desc: TensorDesc,
    pub(crate) device: Device,
    pub(crate) dtype: DLDataType,
}

/// A managed tensor with all that it points at. `manager_ctx` is its own address.
struct Context<M, O> {
    managed: M,
    shape: [i64; MAX_RANK],
    strides: [i64; MAX_RANK],
    _owner: O,
}

impl<O: Send> Export<O> {
    /// The address of a managed tensor which `manage` makes from the tensor and the context.
    fn manage<M>(self, manage: impl FnOnce(DLTensor, *mut c_void) -> M) -> *mut M {
        let rank = self.desc.layout.rank();
        let mut context = Box::<Context<M, O>>::new_uninit();
        let at = context.as_mut_ptr();
        let (mut shape, mut strides) = ([0; MAX_RANK], [0; MAX_RANK]);
        for d in 0..rank {
            shape[d] = self.desc.shape()[d] as i64;
            strides[d] = self.desc.strides()[d] as i64;
        }
        // SAFETY: `at` is memory for a context; it is initialised before it counts as one, and only
        // addresses of its fields are taken before.
        unsafe {
            let tensor = DLTensor {
                data: self.data,
                device: DLDevice::new(self.device),
                ndim: rank as i32,
                dtype: self.dtype,
                shape: (&raw mut (*at).shape).cast(),
                strides: (&raw mut (*at).strides).cast(),
                byte_offset: 0,
            };
            let managed = manage(tensor, at.cast());
            at.write(Context { managed, shape, strides, _owner: self.owner });
            &raw mut (*Box::into_raw(context.assume_init())).managed
        }
    }

    /// The consumer must call the deleter, from any thread.
    pub(crate) fn versioned(self) -> *mut DLManagedTensorVersioned {
        self.manage(|dl_tensor, manager_ctx| DLManagedTensorVersioned {
            version: VERSION,
            manager_ctx,
            deleter: Some(delete_versioned::<O>),
            flags: 0,
            dl_tensor,
        })
    }

    /// The export as by [`Export::versioned`], before DLPack 1.0.
    pub(crate) fn unversioned(self) -> *mut DLManagedTensor {
        self.manage(|dl_tensor, manager_ctx| DLManagedTensor {
            dl_tensor,
            manager_ctx,
            deleter: Some(delete_unversioned::<O>),
        })
    }
}

unsafe extern "C" fn delete_versioned<O>(managed: *mut DLManagedTensorVersioned) {
    // SAFETY: made in `Export::manage`; a consumer calls the deleter once.
    unsafe {
        let context = (*managed).manager_ctx.cast::<Context<DLManagedTensorVersioned, O>>();
        drop(Box::from_raw(context));
    }
}

unsafe extern "C" fn delete_unversioned<O>(managed: *mut DLManagedTensor) {
    // SAFETY: made in `Export::manage`; a consumer calls the deleter once.
    unsafe {
        let context = (*managed).manager_ctx.cast::<Context<DLManagedTensor, O>>();
        drop(Box::from_raw(context));
    }
}

/// Destructor of both kinds of capsule: frees a tensor that no consumer took over. Consumers
/// rename the capsule.
pub(crate) unsafe extern "C" fn drop_capsule(capsule: *mut PyObject) {
    use pyo3::ffi::{PyCapsule_GetPointer, PyCapsule_IsValid};
    let pointer = |name: &CStr| {
        let name: *const c_char = name.as_ptr();
        // SAFETY: called by Python with the capsule; the pointer is asked for by its valid name.
        unsafe {
            (PyCapsule_IsValid(capsule, name) != 0).then(|| PyCapsule_GetPointer(capsule, name))
        }
    };
    // SAFETY: the name says which structure the capsule holds, and that nobody took it over.
    unsafe {
        if let Some(managed) = pointer(VERSIONED_NAME) {
            let managed = managed.cast::<DLManagedTensorVersioned>();
            (*managed).deleter.inspect(|delete| delete(managed));
        } else if let Some(managed) = pointer(UNVERSIONED_NAME) {
            let managed = managed.cast::<DLManagedTensor>();
            (*managed).deleter.inspect(|delete| delete(managed));
        }
    }
}
