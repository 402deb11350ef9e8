//! The functions of cuDNN that are needed, loaded at run time, and its descriptors.
//!
//! Everything in the graph interface is a descriptor with attributes: made, given its attributes,
//! finalized, and from then on only read. Numbers are those of `cudnn_graph.h`, which no version since 8
//! has changed.

use super::super::library::Library;
use super::super::{Gpu, Stream};
use crate::{Device, Error, Result};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{LazyLock, Mutex, OnceLock};

type Status = c_int;
/// A handle or descriptor.
type Raw = *mut c_void;

const SUCCESS: Status = 0;

macro_rules! api {
    ($($name:ident: $symbol:literal fn($($arg:ty),*) -> $ret:ty;)*) => {
        /// The functions of the library, which stays loaded for the life of the process.
        pub(super) struct Api { $($name: unsafe extern "C" fn($($arg),*) -> $ret,)* }

        impl Api {
            fn load() -> Result<Self, String> {
                let library = Library::Cudnn.open().ok_or("not found")?;
                // It must outlive the functions.
                let library: &'static libloading::Library = Box::leak(Box::new(library));
                // SAFETY: the types are those of the headers since version 8; earlier ones lack
                // the functions of the graph interface, which is an error here.
                Ok(unsafe { Api { $($name: *library.get($symbol).map_err(|e| e.to_string())?,)* } })
            }
        }
    };
}

api! {
    version: b"cudnnGetVersion\0" fn() -> usize;
    create: b"cudnnCreate\0" fn(*mut Raw) -> Status;
    set_stream: b"cudnnSetStream\0" fn(Raw, *mut c_void) -> Status;
    error_string: b"cudnnGetErrorString\0" fn(Status) -> *const c_char;
    create_descriptor: b"cudnnBackendCreateDescriptor\0" fn(c_int, *mut Raw) -> Status;
    destroy_descriptor: b"cudnnBackendDestroyDescriptor\0" fn(Raw) -> Status;
    set_attribute: b"cudnnBackendSetAttribute\0" fn(Raw, c_int, c_int, i64, *const c_void) -> Status;
    get_attribute: b"cudnnBackendGetAttribute\0" fn(Raw, c_int, c_int, i64, *mut i64, *mut c_void) -> Status;
    finalize: b"cudnnBackendFinalize\0" fn(Raw) -> Status;
    execute: b"cudnnBackendExecute\0" fn(Raw, Raw, Raw) -> Status;
}

impl Api {
    /// # Errors
    /// [`Error::Backend`], which says what to install.
    pub(super) fn get() -> Result<&'static Api> {
        static API: OnceLock<Result<Api, String>> = OnceLock::new();
        // cuDNN opens it by bare name.
        Library::CublasLt.require()?;
        Library::Cudnn.require()?;
        API.get_or_init(Api::load).as_ref().map_err(|detail| Error::Backend {
            what: "loading libcudnn".into(),
            device: Device::Cuda(0),
            detail: detail.clone(),
        })
    }

    /// As in `9.19.0`.
    pub(super) fn version(&self) -> String {
        // SAFETY: the call reads a constant.
        let number = unsafe { (self.version)() };
        // Written with one digit more since version 9.
        let major = if number < 10_000 { 1_000 } else { 10_000 };
        format!("{}.{}.{}", number / major, number % major / 100, number % 100)
    }

    fn check(&self, gpu: &Gpu, status: Status, what: impl Into<String>) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: any number may be asked for; the words are a static string.
        let words = unsafe { (self.error_string)(status) };
        let detail = if words.is_null() {
            format!("error {status}")
        } else {
            // SAFETY: a static string that ends with a zero.
            unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
        };
        Err(Error::Backend { what: what.into(), device: gpu.device(), detail })
    }
}

/// cuDNN's state for a device.
#[derive(Clone, Copy)]
pub(super) struct Handle(Raw);

// SAFETY: any thread may use a handle, one at a time: it is behind a mutex.
unsafe impl Send for Handle {}

/// Calls `f` with the device current and its handle, which is made once, lives as long as the
/// process, and is used by one thread at a time.
pub(super) fn with_handle<T>(gpu: &'static Gpu, f: impl FnOnce(Handle) -> Result<T>) -> Result<T> {
    static HANDLES: LazyLock<Mutex<HashMap<u32, Handle>>> = LazyLock::new(Mutex::default);
    let api = Api::get()?;
    let _current = gpu.enter()?;
    let mut handles = HANDLES.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(&handle) = handles.get(&gpu.info.index) {
        return f(handle);
    }
    let mut raw = std::ptr::null_mut();
    // SAFETY: the device is current; the call writes one pointer.
    api.check(gpu, unsafe { (api.create)(&mut raw) }, "cudnnCreate")?;
    handles.insert(gpu.info.index, Handle(raw));
    f(Handle(raw))
}

/// `cudnnBackendDescriptorType_t`
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Convolution = 1,
    Engine = 2,
    EngineConfig = 3,
    Heuristic = 4,
    ExecutionPlan = 5,
    Forward = 10,
    BackwardFilter = 11,
    BackwardData = 12,
    Graph = 15,
    VariantPack = 16,
    Tensor = 17,
}

/// The value of an attribute, with its `cudnnBackendAttributeType_t`.
pub(super) enum Value<'a> {
    Handle(Handle),
    DataType(c_int),
    Integers(&'a [i64]),
    Float(f32),
    Addresses(&'a [*mut c_void]),
    ConvolutionMode(c_int),
    HeuristicMode(c_int),
    Descriptor(&'a Descriptor),
}

impl Value<'_> {
    const INTEGERS: c_int = 3;
    const NUMERICAL_NOTE: c_int = 11;
    const DESCRIPTOR: c_int = 15;

    /// Type, number of elements, address of the first.
    fn parts(&self) -> (c_int, usize, *const c_void) {
        match self {
            Value::Handle(v) => (0, 1, (&raw const v.0).cast()),
            Value::DataType(v) => (1, 1, (&raw const *v).cast()),
            Value::Integers(v) => (Self::INTEGERS, v.len(), v.as_ptr().cast()),
            Value::Float(v) => (4, 1, (&raw const *v).cast()),
            Value::Addresses(v) => (6, v.len(), v.as_ptr().cast()),
            Value::ConvolutionMode(v) => (7, 1, (&raw const *v).cast()),
            Value::HeuristicMode(v) => (8, 1, (&raw const *v).cast()),
            Value::Descriptor(v) => (Self::DESCRIPTOR, 1, (&raw const v.raw).cast()),
        }
    }
}

/// A descriptor, destroyed when dropped. What it refers to must outlive it.
pub(super) struct Descriptor {
    raw: Raw,
    api: &'static Api,
}

// SAFETY: no call changes a descriptor once it is finalized.
unsafe impl Send for Descriptor {}
// SAFETY: threads that share it only read.
unsafe impl Sync for Descriptor {}

impl std::fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Descriptor({:?})", self.raw)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by `empty` and not used after.
        unsafe { (self.api.destroy_descriptor)(self.raw) };
    }
}

impl Descriptor {
    /// A descriptor with these attributes, finalized.
    ///
    /// # Errors
    /// [`Error::Backend`] with cuDNN's words, among them that it does not support what is described.
    pub(super) fn new(gpu: &Gpu, kind: Kind, attributes: &[(c_int, Value<'_>)]) -> Result<Self> {
        let descriptor = Self::empty(gpu, kind)?;
        let api = descriptor.api;
        for (name, value) in attributes {
            let (of_type, count, first) = value.parts();
            // SAFETY: `first` points to so many elements of the type.
            let set =
                unsafe { (api.set_attribute)(descriptor.raw, *name, of_type, count as i64, first) };
            api.check(gpu, set, format!("cuDNN's {kind:?} descriptor, attribute {name}"))?;
        }
        // SAFETY: the descriptor is alive.
        let finalized = unsafe { (api.finalize)(descriptor.raw) };
        api.check(gpu, finalized, format!("cuDNN's {kind:?} descriptor"))?;
        Ok(descriptor)
    }

    fn empty(gpu: &Gpu, kind: Kind) -> Result<Self> {
        let api = Api::get()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the call writes one pointer.
        let made = unsafe { (api.create_descriptor)(kind as c_int, &mut raw) };
        api.check(gpu, made, "cudnnBackendCreateDescriptor")?;
        Ok(Descriptor { raw, api })
    }

    /// Reads up to `room` elements of a type to `to`; returns how many there are.
    ///
    /// # Safety
    /// `to` must have room for them.
    unsafe fn get(
        &self,
        gpu: &Gpu,
        name: c_int,
        of_type: c_int,
        room: usize,
        to: *mut c_void,
    ) -> Result<usize> {
        let mut count = 0;
        // SAFETY: the caller's promise; the descriptor is alive.
        let status = unsafe {
            (self.api.get_attribute)(self.raw, name, of_type, room as i64, &mut count, to)
        };
        self.api.check(gpu, status, format!("cuDNN's attribute {name}"))?;
        Ok(count.max(0) as usize)
    }

    /// # Errors
    /// [`Error::Backend`].
    pub(super) fn integer(&self, gpu: &Gpu, name: c_int) -> Result<i64> {
        let mut value = 0i64;
        // SAFETY: room for one.
        unsafe { self.get(gpu, name, Value::INTEGERS, 1, (&raw mut value).cast())? };
        Ok(value)
    }

    /// The descriptors that an attribute holds.
    ///
    /// # Errors
    /// [`Error::Backend`].
    pub(super) fn descriptors(&self, gpu: &Gpu, name: c_int, kind: Kind) -> Result<Vec<Self>> {
        // SAFETY: room for none: only the number is asked for.
        let count = unsafe { self.get(gpu, name, Value::DESCRIPTOR, 0, std::ptr::null_mut())? };
        let mut found = (0..count).map(|_| Self::empty(gpu, kind)).collect::<Result<Vec<_>>>()?;
        let mut raw: Vec<Raw> = found.iter().map(|d| d.raw).collect();
        // SAFETY: as many descriptors as there is room for; the call fills them.
        let got =
            unsafe { self.get(gpu, name, Value::DESCRIPTOR, count, raw.as_mut_ptr().cast())? };
        found.truncate(got);
        Ok(found)
    }

    /// The numerical notes (`cudnnBackendNumericalNote_t`) that an attribute holds.
    ///
    /// # Errors
    /// [`Error::Backend`].
    pub(super) fn notes(&self, gpu: &Gpu, name: c_int) -> Result<Vec<c_int>> {
        let mut notes = vec![0; 32];
        let room = notes.len();
        // SAFETY: so much room.
        let count =
            unsafe { self.get(gpu, name, Value::NUMERICAL_NOTE, room, notes.as_mut_ptr().cast())? };
        notes.truncate(count);
        Ok(notes)
    }

    /// Gives the work of an execution plan to a stream.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// The addresses of `pack` must be the tensors and the workspace of the plan on the stream's
    /// device, until the work is done.
    pub(super) unsafe fn execute(
        &self,
        gpu: &Gpu,
        handle: Handle,
        pack: &Descriptor,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the handle is alive and used by nobody else meanwhile.
        let set = unsafe { (self.api.set_stream)(handle.0, stream.as_raw()) };
        self.api.check(gpu, set, "cudnnSetStream")?;
        // SAFETY: the caller's promise.
        let status = unsafe { (self.api.execute)(handle.0, self.raw, pack.raw) };
        self.api.check(gpu, status, "cudnnBackendExecute")
    }
}
