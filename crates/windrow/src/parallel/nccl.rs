//! NCCL, loaded at run time: the few calls that are needed.
//!
//! A communicator that never blocks can be aborted at any time, but gives each call to a thread of
//! its own, which costs tens of microseconds. One that blocks must not be aborted while a thread is
//! in a call. So each rank has a pair that share their resources: the parent never blocks; it
//! connects, and aborting it ends the calls and kernels of both. Its child blocks and does the work.

use super::link::Engine;
use super::rendezvous::Id;
use crate::cuda::{Event, Gpu, Library, NCCL, Stream};
use crate::{DType, Device, Error, Result};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

type Comm = *mut c_void;
type Status = c_int;

const SUCCESS: Status = 0;
const IN_PROGRESS: Status = 7;
const BYTES: c_int = 1;
const SUM: c_int = 0;

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([c_char; 128]);

/// `ncclConfig_t` of 2.18, which every later version takes; `MIN` leaves a choice to NCCL.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    fn new(blocking: bool) -> Self {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: blocking.into(),
            cga_cluster_size: c_int::MIN,
            min_ctas: c_int::MIN,
            max_ctas: c_int::MIN,
            net_name: std::ptr::null(),
            split_share: 1,
        }
    }
}

macro_rules! api {
    ($($name:ident: $symbol:literal fn($($arg:ty),*) -> $ret:ty;)*) => {
        /// The functions of the library, which stays loaded for the life of the process.
        struct Api { $($name: unsafe extern "C" fn($($arg),*) -> $ret,)* }

        impl Api {
            fn load() -> Result<Self, String> {
                // SAFETY: NCCL; loading it runs only its own initialisation.
                let library = unsafe { libloading::Library::new(NCCL) }.map_err(|e| e.to_string())?;
                // It must outlive the functions.
                let library: &'static libloading::Library = Box::leak(Box::new(library));
                // SAFETY: the types are those of `nccl.h`, unchanged since 2.18.
                Ok(unsafe { Api { $($name: *library.get($symbol).map_err(|e| e.to_string())?,)* } })
            }
        }
    };
}

api! {
    get_version: b"ncclGetVersion\0" fn(*mut c_int) -> Status;
    get_unique_id: b"ncclGetUniqueId\0" fn(*mut UniqueId) -> Status;
    init: b"ncclCommInitRankConfig\0" fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Status;
    async_error: b"ncclCommGetAsyncError\0" fn(Comm, *mut Status) -> Status;
    split: b"ncclCommSplit\0" fn(Comm, c_int, c_int, *mut Comm, *mut Config) -> Status;
    destroy: b"ncclCommDestroy\0" fn(Comm) -> Status;
    abort: b"ncclCommAbort\0" fn(Comm) -> Status;
    group_start: b"ncclGroupStart\0" fn() -> Status;
    group_end: b"ncclGroupEnd\0" fn() -> Status;
    all_gather: b"ncclAllGather\0" fn(*const c_void, *mut c_void, usize, c_int, Comm, *mut c_void) -> Status;
    broadcast: b"ncclBroadcast\0" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Status;
    all_reduce: b"ncclAllReduce\0" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Status;
    send: b"ncclSend\0" fn(*const c_void, usize, c_int, c_int, Comm, *mut c_void) -> Status;
    recv: b"ncclRecv\0" fn(*mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Status;
    error_string: b"ncclGetErrorString\0" fn(Status) -> *const c_char;
    last_error: b"ncclGetLastError\0" fn(Comm) -> *const c_char;
}

impl Api {
    fn get() -> Result<&'static Api> {
        static API: OnceLock<Result<Api, String>> = OnceLock::new();
        Library::Nccl.require()?;
        API.get_or_init(Api::load).as_ref().map_err(|detail| Error::Backend {
            what: "loading libnccl".into(),
            device: Device::Cuda(0),
            detail: format!("{detail}; NCCL 2.18 or later is needed"),
        })
    }

    /// Words for a status that is neither success nor "in progress".
    fn check(&self, status: Status) -> Result<(), String> {
        if status == SUCCESS || status == IN_PROGRESS {
            return Ok(());
        }
        let text = |words: *const c_char| {
            // SAFETY: null or a string of the library's own.
            (!words.is_null()).then(|| unsafe { CStr::from_ptr(words) }.to_string_lossy())
        };
        // SAFETY: both calls take any status and write nothing; the last error needs no communicator.
        let (name, last) = unsafe {
            (text((self.error_string)(status)), text((self.last_error)(std::ptr::null_mut())))
        };
        let name = name.unwrap_or_else(|| format!("error {status}").into());
        Err(match last.map(|l| l.trim().to_owned()) {
            Some(last) if !last.is_empty() => format!("NCCL: {name} ({last})"),
            _ => format!("NCCL: {name}"),
        })
    }
}

/// The version of the library, as `2.28.9`.
///
/// # Errors
/// [`Error::Backend`] without NCCL: the message says how to get it.
pub fn nccl_version() -> Result<String> {
    let api = Api::get()?;
    let mut code = 0;
    // SAFETY: the call writes one integer.
    let status = unsafe { (api.get_version)(&mut code) };
    api.check(status).map_err(|detail| Error::Backend {
        what: "ncclGetVersion".into(),
        device: Device::Cuda(0),
        detail,
    })?;
    Ok(format!("{}.{}.{}", code / 10_000, code % 10_000 / 100, code % 100))
}

/// What the ranks of a new group have to know in common.
pub(super) fn unique_id() -> Result<Id> {
    let api = Api::get()?;
    let mut id = UniqueId([0; 128]);
    // SAFETY: the call writes the structure.
    let status = unsafe { (api.get_unique_id)(&mut id) };
    let error =
        |detail| Error::Backend { what: "ncclGetUniqueId".into(), device: Device::Cuda(0), detail };
    api.check(status).map_err(error)?;
    Ok(id.0.map(|c| c as u8))
}

/// How blocks come to all ranks, which decide alike.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// For equal blocks.
    AllGather,
    /// Of each block, in one group.
    Broadcasts,
    /// Each of two ranks sends its block, and receives the other's.
    Pair,
}

/// Two ranks share larger outputs by broadcasts. On two H200s sending takes 44 us for 13 MB,
/// broadcasts 54, AllGather 45; for 198 MB they take 356, 326 and 404 us.
const PAIR_BYTES: usize = 64 << 20;

impl Way {
    fn of(blocks: &[Range<usize>]) -> Self {
        match blocks {
            [_, last] if last.end < PAIR_BYTES => Way::Pair,
            [_, _] => Way::Broadcasts,
            _ if blocks.iter().all(|b| b.len() == blocks[0].len()) => Way::AllGather,
            _ => Way::Broadcasts,
        }
    }
}

/// The communicator that connects and aborts.
struct Parent {
    api: &'static Api,
    gpu: &'static Gpu,
    /// Null once it was freed.
    comm: Mutex<Comm>,
}

// SAFETY: a communicator may be used from any thread, one at a time: the lock sees to that.
unsafe impl Send for Parent {}
// SAFETY: what is shared is reached through the lock.
unsafe impl Sync for Parent {}

impl Parent {
    fn comm(&self) -> MutexGuard<'_, Comm> {
        self.comm.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Runs a call of NCCL with the device current.
    fn call(&self, comm: Comm, f: impl FnOnce(&Api, Comm) -> Status) -> Result<(), String> {
        if comm.is_null() {
            return Err("the communicator was released".into());
        }
        let _current = self.gpu.enter().map_err(|e| e.to_string())?;
        self.api.check(f(self.api, comm))
    }

    /// False while the latest call is in progress.
    fn is_ready(&self, comm: Comm) -> Result<bool, String> {
        let mut status = SUCCESS;
        // SAFETY: the call writes one status.
        self.call(comm, |api, comm| unsafe { (api.async_error)(comm, &mut status) })?;
        self.api.check(status)?;
        Ok(status != IN_PROGRESS)
    }

    /// Ends the calls and the work of a communicator and its family, and frees it. Nobody can be
    /// told of an error.
    fn abort(&self, comm: &mut Comm) {
        let comm = std::mem::replace(comm, std::ptr::null_mut());
        // SAFETY: may be called at any time; the communicator is not used after.
        let _ = self.call(comm, |api, comm| unsafe { (api.abort)(comm) });
    }

    fn destroy(&self, comm: &mut Comm) -> Result<(), String> {
        let comm = std::mem::replace(comm, std::ptr::null_mut());
        // SAFETY: the communicator is not used after.
        self.call(comm, |api, comm| unsafe { (api.destroy)(comm) })
    }
}

/// A rank's communicators.
pub(super) struct Communicator {
    parent: Arc<Parent>,
    /// Written by a thread of NCCL while the parent is splitting; null once it was freed.
    child: Box<AtomicPtr<c_void>>,
    stage: Stage,
    rank: usize,
}

/// How far a rank has come.
#[derive(PartialEq)]
enum Stage {
    Connecting,
    Splitting,
    Connected,
    Left,
}

impl Communicator {
    /// Begins to connect; done when ready.
    pub(super) fn new(gpu: &'static Gpu, id: &Id, rank: usize, world: usize) -> Result<Self> {
        let api = Api::get()?;
        let _current = gpu.enter()?;
        let mut comm = std::ptr::null_mut();
        let id = UniqueId(id.map(|b| b as c_char));
        // SAFETY: the device is current; the configuration is read during the call.
        let status = unsafe {
            (api.init)(&mut comm, world as c_int, id, rank as c_int, &mut Config::new(false))
        };
        api.check(status).map_err(|detail| Error::Parallel {
            rank,
            world,
            what: "connecting".into(),
            detail,
        })?;
        Ok(Communicator {
            parent: Arc::new(Parent { api, gpu, comm: Mutex::new(comm) }),
            child: Box::default(),
            stage: Stage::Connecting,
            rank,
        })
    }

    /// Runs a call of the child with the device current.
    fn call(&self, f: impl FnOnce(&Api, Comm) -> Status) -> Result<(), String> {
        self.parent.call(self.child.load(Ordering::Acquire), f)
    }

    /// Brings every rank's block to all ranks, in place: `blocks` are bytes from `base`, in the
    /// order of the ranks and without gaps.
    ///
    /// # Safety
    /// `base` must be memory of the blocks' size on the device, used by nobody else until the
    /// stream has come past the call.
    pub(super) unsafe fn gather(
        &mut self,
        base: *mut u8,
        blocks: &[Range<usize>],
        stream: &Stream,
    ) -> Result<(), String> {
        let at = |block: &Range<usize>| base.wrapping_add(block.start).cast::<c_void>();
        let (stream, way) = (stream.as_raw(), Way::of(blocks));
        if way == Way::AllGather {
            let (own, whole, len) = (at(&blocks[self.rank]), at(&blocks[0]), blocks[0].len());
            // SAFETY: the caller's promise; own block and whole are placed as NCCL's in-place form
            // asks.
            return self.call(|api, comm| unsafe {
                (api.all_gather)(own, whole, len, BYTES, comm, stream)
            });
        }
        // SAFETY: the caller's promise; a group that was begun is ended.
        self.call(|api, comm| unsafe {
            (api.group_start)();
            let failed =
                blocks.iter().enumerate().filter(|(_, b)| !b.is_empty()).find_map(|(i, b)| {
                    let (ptr, len, rank) = (at(b), b.len(), i as c_int);
                    let status = match way {
                        Way::Pair if i == self.rank => {
                            (api.send)(ptr, len, BYTES, 1 - rank, comm, stream)
                        }
                        Way::Pair => (api.recv)(ptr, len, BYTES, rank, comm, stream),
                        _ => (api.broadcast)(ptr, ptr, len, BYTES, rank, comm, stream),
                    };
                    (status != SUCCESS && status != IN_PROGRESS).then_some(status)
                });
            let end = (api.group_end)();
            failed.unwrap_or(end)
        })
    }

    /// Brings `root`'s bytes to all ranks.
    ///
    /// # Safety
    /// As [`Communicator::gather`], for `bytes` bytes.
    pub(super) unsafe fn broadcast(
        &mut self,
        ptr: *mut u8,
        bytes: usize,
        root: usize,
        stream: &Stream,
    ) -> Result<(), String> {
        let (ptr, stream) = (ptr.cast::<c_void>(), stream.as_raw());
        // SAFETY: the caller's promise.
        self.call(|api, comm| unsafe {
            (api.broadcast)(ptr, ptr, bytes, BYTES, root as c_int, comm, stream)
        })
    }

    /// Sums `len` elements over the ranks, to all of them.
    ///
    /// # Safety
    /// As [`Communicator::gather`], for `len` elements.
    pub(super) unsafe fn all_reduce(
        &mut self,
        ptr: *mut u8,
        len: usize,
        dtype: DType,
        stream: &Stream,
    ) -> Result<(), String> {
        let dtype = match dtype {
            DType::I32 => 2,
            DType::I64 => 4,
            DType::F16 => 6,
            DType::F32 => 7,
            DType::F64 => 8,
            DType::BF16 => 9,
        };
        let (ptr, stream) = (ptr.cast::<c_void>(), stream.as_raw());
        // SAFETY: the caller's promise.
        self.call(|api, comm| unsafe { (api.all_reduce)(ptr, ptr, len, dtype, SUM, comm, stream) })
    }
}

impl Engine for Communicator {
    type Work = Event;

    fn is_ready(&mut self) -> Result<bool, String> {
        match self.stage {
            Stage::Left => Ok(true),
            Stage::Connected => self.parent.is_ready(self.child.load(Ordering::Acquire)),
            Stage::Connecting | Stage::Splitting => {
                let comm = self.parent.comm();
                if !self.parent.is_ready(*comm)? {
                    return Ok(false);
                }
                if self.stage == Stage::Splitting {
                    self.stage = Stage::Connected;
                    return Ok(true);
                }
                let (child, rank) = (self.child.as_ptr(), self.rank as c_int);
                // SAFETY: the configuration is read during the call; the place of the child stays
                // until the parent is ready, or was aborted.
                self.parent.call(*comm, |api, comm| unsafe {
                    (api.split)(comm, 0, rank, child, &mut Config::new(true))
                })?;
                self.stage = Stage::Splitting;
                Ok(false)
            }
        }
    }

    fn is_done(work: &Event) -> Result<bool, String> {
        work.is_reached().map_err(|e| e.to_string())
    }

    fn breaker(&self) -> Box<dyn Fn() + Send + Sync> {
        let parent = self.parent.clone();
        Box::new(move || parent.abort(&mut parent.comm()))
    }

    fn leave(&mut self) -> Result<(), String> {
        self.stage = Stage::Left;
        // Without the parent's lock: the breaker ends this like any call.
        self.parent.destroy(self.child.get_mut())?;
        self.parent.destroy(&mut self.parent.comm())
    }

    fn abort(&mut self) {
        self.parent.abort(&mut self.parent.comm());
        // NCCL cannot free a child whose making failed.
        if self.stage == Stage::Connected {
            self.parent.abort(self.child.get_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_depends_on_the_number_of_ranks_and_the_blocks() {
        let large = 2 * PAIR_BYTES;
        assert_eq!(Way::of(&[0..10, 10..20]), Way::Pair);
        assert_eq!(Way::of(&[0..10, 10..10]), Way::Pair);
        assert_eq!(Way::of(&[0..large, large..large + 5]), Way::Broadcasts);
        assert_eq!(Way::of(&[0..10, 10..20, 20..30]), Way::AllGather);
        assert_eq!(Way::of(&[0..0, 0..0, 0..0]), Way::AllGather);
        assert_eq!(Way::of(&[0..10, 10..20, 20..29]), Way::Broadcasts);
    }
}
