//! The functions of cuDNN that Windrow calls, and its descriptors.
//!
//! Everything in the graph interface is a descriptor with attributes: made, given its attributes,
//! finalized, and from then on only read. Numbers are those of `cudnn_graph.h`, which no version since 8
//! has changed.

use super::super::toolkit;
use crate::gpu::library::{Describe, Library, library};
use crate::gpu::made;
use crate::gpu::{Handle, Outcome};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{LazyLock, Mutex};

static LIBCUDNN: Library = Library {
    // A copy that is loaded, as torch's, is known by this name; the bare one may be another copy's.
    versions: &[".9", ""],
    since: "cuDNN 8",
    ..toolkit("libcudnn.so", "nvidia-cudnn-cu13")
};

library! {
    pub(super) struct Cudnn in LIBCUDNN;

    fn cudnnGetVersion() -> usize;
    fn cudnnGetErrorString(status: c_int) -> *const c_char;
    fn cudnnCreate(handle: *mut Handle);
    fn cudnnSetStream(handle: Handle, stream: Handle);
    fn cudnnBackendCreateDescriptor(kind: c_int, descriptor: *mut Handle);
    fn cudnnBackendDestroyDescriptor(descriptor: Handle);
    fn cudnnBackendSetAttribute(
        descriptor: Handle,
        name: c_int,
        of_type: c_int,
        count: i64,
        values: *const c_void,
    );
    fn cudnnBackendGetAttribute(
        descriptor: Handle,
        name: c_int,
        of_type: c_int,
        room: i64,
        count: *mut i64,
        values: *mut c_void,
    );
    fn cudnnBackendFinalize(descriptor: Handle);
    fn cudnnBackendExecute(handle: Handle, plan: Handle, pack: Handle);
}

impl Cudnn {
    /// The version, such as `9.19.0`.
    pub(super) fn version(&self) -> String {
        // SAFETY: the call reads a constant.
        let number = unsafe { self.cudnnGetVersion() };
        // Written with one digit more since version 9.
        let major = if number < 10_000 { 1_000 } else { 10_000 };
        format!("{}.{}.{}", number / major, number % major / 100, number % 100)
    }
}

impl Describe for Cudnn {
    fn describe(&self, status: c_int) -> String {
        // SAFETY: any number may be asked for; the words are a static string.
        let words = unsafe { self.cudnnGetErrorString(status) };
        if words.is_null() {
            return format!("error {status}");
        }
        // SAFETY: a static string that ends with a zero.
        unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
    }
}

/// cuDNN's state for a device.
#[derive(Clone, Copy)]
pub(super) struct State(Handle);

// SAFETY: any thread may use a handle, one at a time: who does has taken it out of the list.
unsafe impl Send for State {}

/// Calls `f` with a state of the device of this index, which is current, that nobody else has meanwhile. So many are
/// made as threads were in here at once, and live as long as the process. No lock is held: `f` may compile kernels.
pub(super) fn with_state<T>(
    library: &'static Cudnn,
    index: u32,
    f: impl FnOnce(State) -> Outcome<T>,
) -> Outcome<T> {
    static FREE: LazyLock<Mutex<HashMap<u32, Vec<State>>>> = LazyLock::new(Mutex::default);
    let free = || FREE.lock().unwrap_or_else(|e| e.into_inner());
    let taken = free().get_mut(&index).and_then(Vec::pop);
    let state = match taken {
        Some(state) => state,
        // SAFETY: the device is current; the call writes one pointer.
        None => State(made(|raw| unsafe { library.cudnnCreate(raw) })?),
    };
    let outcome = f(state);
    free().entry(index).or_default().push(state);
    outcome
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
    State(State),
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
            Value::State(v) => (0, 1, (&raw const v.0).cast()),
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
#[derive(Debug)]
pub(super) struct Descriptor {
    raw: Handle,
    library: &'static Cudnn,
}

// SAFETY: no call changes a descriptor once it is finalized.
unsafe impl Send for Descriptor {}
// SAFETY: threads that share it only read.
unsafe impl Sync for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by `empty` and not used after.
        let _ = unsafe { self.library.cudnnBackendDestroyDescriptor(self.raw) };
    }
}

impl Descriptor {
    /// A descriptor with these attributes, finalized.
    ///
    /// # Errors
    /// cuDNN's words, among them that it does not support what is described.
    pub(super) fn new(
        library: &'static Cudnn,
        kind: Kind,
        attributes: &[(c_int, Value<'_>)],
    ) -> Outcome<Self> {
        let descriptor = Self::empty(library, kind)?;
        for (name, value) in attributes {
            let (of_type, count, first) = value.parts();
            // SAFETY: `first` points to so many elements of the type.
            unsafe {
                let count = count as i64;
                library.cudnnBackendSetAttribute(descriptor.raw, *name, of_type, count, first)
            }
            .map_err(|mut failure| {
                failure.words = format!("{kind:?}, attribute {name}: {}", failure.words);
                failure
            })?;
        }
        // SAFETY: the descriptor is alive.
        unsafe { library.cudnnBackendFinalize(descriptor.raw)? };
        Ok(descriptor)
    }

    fn empty(library: &'static Cudnn, kind: Kind) -> Outcome<Self> {
        // SAFETY: the call writes one pointer.
        let raw = made(|raw| unsafe { library.cudnnBackendCreateDescriptor(kind as c_int, raw) })?;
        Ok(Descriptor { raw, library })
    }

    /// Reads up to `room` elements of a type to `to`; returns how many there are.
    ///
    /// # Safety
    /// `to` must have room for them.
    unsafe fn get(
        &self,
        name: c_int,
        of_type: c_int,
        room: usize,
        to: *mut c_void,
    ) -> Outcome<usize> {
        let mut count = 0;
        // SAFETY: the caller's promise; the descriptor is alive.
        unsafe {
            let (room, count) = (room as i64, &mut count);
            self.library.cudnnBackendGetAttribute(self.raw, name, of_type, room, count, to)?;
        }
        Ok(count.max(0) as usize)
    }

    pub(super) fn integer(&self, name: c_int) -> Outcome<i64> {
        let mut value = 0i64;
        // SAFETY: room for one.
        unsafe { self.get(name, Value::INTEGERS, 1, (&raw mut value).cast())? };
        Ok(value)
    }

    /// The descriptors that an attribute holds.
    pub(super) fn descriptors(&self, name: c_int, kind: Kind) -> Outcome<Vec<Self>> {
        // SAFETY: room for none: only the number is asked for.
        let count = unsafe { self.get(name, Value::DESCRIPTOR, 0, std::ptr::null_mut())? };
        let mut found =
            (0..count).map(|_| Self::empty(self.library, kind)).collect::<Outcome<Vec<_>>>()?;
        let mut raw: Vec<Handle> = found.iter().map(|d| d.raw).collect();
        // SAFETY: as many descriptors as there is room for; the call fills them.
        let got = unsafe { self.get(name, Value::DESCRIPTOR, count, raw.as_mut_ptr().cast())? };
        found.truncate(got);
        Ok(found)
    }

    /// The numerical notes (`cudnnBackendNumericalNote_t`) that an attribute holds.
    pub(super) fn notes(&self, name: c_int) -> Outcome<Vec<c_int>> {
        let mut notes = vec![0; 32];
        let room = notes.len();
        // SAFETY: so much room.
        let count =
            unsafe { self.get(name, Value::NUMERICAL_NOTE, room, notes.as_mut_ptr().cast())? };
        notes.truncate(count);
        Ok(notes)
    }

    /// Enqueues the work of an execution plan on a stream.
    ///
    /// # Safety
    /// The addresses of `pack` must be the tensors and the workspace of the plan on the stream's
    /// device, until the work is done.
    pub(super) unsafe fn execute(
        &self,
        State(state): State,
        pack: &Descriptor,
        stream: Handle,
    ) -> Outcome<()> {
        // SAFETY: the state is alive and used by nobody else meanwhile; the rest is the caller's promise.
        unsafe {
            self.library.cudnnSetStream(state, stream)?;
            self.library.cudnnBackendExecute(state, self.raw, pack.raw)
        }
    }
}
