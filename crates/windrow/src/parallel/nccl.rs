//! NCCL, loaded at run time: the few functions that Windrow calls.
//!
//! A communicator that never blocks can be aborted at any time, but gives each call to a thread of
//! its own, which costs tens of microseconds. One that blocks must not be aborted while a thread is
//! in a call. So each rank has a pair that share their resources: the parent never blocks; it
//! connects, and aborting it ends the calls and kernels of both. Its child blocks and does the work.

use super::link::Transport;
use super::rendezvous::Id;
use crate::cuda;
use crate::gpu::library::{Library, library};
use crate::gpu::{Event, Gpu, Stream};
use crate::{DType, Device, Error, Result};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

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

static LIBNCCL: Library = Library {
    // The name that every build of NCCL 2 has, and gives itself.
    versions: &[""],
    since: "NCCL 2.18",
    ..cuda::toolkit("libnccl.so.2", "nvidia-nccl-cu13")
};

library! {
    /// The functions of the library, with types as in `nccl.h`, unchanged since 2.18.
    struct Nccl in LIBNCCL;

    fn ncclGetVersion(version: *mut c_int) -> Status;
    fn ncclGetUniqueId(id: *mut UniqueId) -> Status;
    fn ncclCommInitRankConfig(comm: *mut Comm, world: c_int, id: UniqueId, rank: c_int, config: *mut Config) -> Status;
    fn ncclCommGetAsyncError(comm: Comm, status: *mut Status) -> Status;
    fn ncclCommSplit(comm: Comm, color: c_int, key: c_int, child: *mut Comm, config: *mut Config) -> Status;
    fn ncclCommDestroy(comm: Comm) -> Status;
    fn ncclCommAbort(comm: Comm) -> Status;
    fn ncclGroupStart() -> Status;
    fn ncclGroupEnd() -> Status;
    fn ncclAllGather(from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, comm: Comm, stream: *mut c_void) -> Status;
    fn ncclBroadcast(from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: *mut c_void) -> Status;
    fn ncclAllReduce(from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, operation: c_int, comm: Comm, stream: *mut c_void) -> Status;
    fn ncclSend(from: *const c_void, count: usize, dtype: c_int, peer: c_int, comm: Comm, stream: *mut c_void) -> Status;
    fn ncclRecv(to: *mut c_void, count: usize, dtype: c_int, peer: c_int, comm: Comm, stream: *mut c_void) -> Status;
    fn ncclGetErrorString(status: Status) -> *const c_char;
    fn ncclGetLastError(comm: Comm) -> *const c_char;
}

impl Nccl {
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
            (
                text(self.ncclGetErrorString(status)),
                text(self.ncclGetLastError(std::ptr::null_mut())),
            )
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
    let api = Nccl::get()?;
    let mut code = 0;
    // SAFETY: the call writes one integer.
    let status = unsafe { api.ncclGetVersion(&mut code) };
    api.check(status).map_err(|detail| Error::Backend {
        what: "ncclGetVersion".into(),
        device: Device::Cuda(0),
        detail,
    })?;
    Ok(format!("{}.{}.{}", code / 10_000, code % 10_000 / 100, code % 100))
}

/// The identifier that the ranks of a new group must share.
pub(super) fn unique_id() -> Result<Id> {
    let api = Nccl::get()?;
    let mut id = UniqueId([0; 128]);
    // SAFETY: the call writes the structure.
    let status = unsafe { api.ncclGetUniqueId(&mut id) };
    let error =
        |detail| Error::Backend { what: "ncclGetUniqueId".into(), device: Device::Cuda(0), detail };
    api.check(status).map_err(error)?;
    Ok(id.0.map(|c| c as u8))
}

/// The way in which blocks reach all ranks. All ranks choose the same.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// One all-gather, for equal blocks.
    AllGather,
    /// A broadcast of each block, in one group.
    Broadcasts,
    /// An exchange between two ranks: each sends its block and receives the other's.
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
    api: &'static Nccl,
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
    fn call(&self, comm: Comm, f: impl FnOnce(&Nccl, Comm) -> Status) -> Result<(), String> {
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
        self.call(comm, |api, comm| unsafe { api.ncclCommGetAsyncError(comm, &mut status) })?;
        self.api.check(status)?;
        Ok(status != IN_PROGRESS)
    }

    /// Ends the calls and the work of a communicator and its family, and frees it. Nobody can be
    /// told of an error.
    fn abort(&self, comm: &mut Comm) {
        let comm = std::mem::replace(comm, std::ptr::null_mut());
        // SAFETY: may be called at any time; the communicator is not used after.
        let _ = self.call(comm, |api, comm| unsafe { api.ncclCommAbort(comm) });
    }

    fn destroy(&self, comm: &mut Comm) -> Result<(), String> {
        let comm = std::mem::replace(comm, std::ptr::null_mut());
        // SAFETY: the communicator is not used after.
        self.call(comm, |api, comm| unsafe { api.ncclCommDestroy(comm) })
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

/// The progress of a rank.
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
        let api = Nccl::get()?;
        let _current = gpu.enter()?;
        let mut comm = std::ptr::null_mut();
        let id = UniqueId(id.map(|b| b as c_char));
        // SAFETY: the device is current; the configuration is read during the call.
        let status = unsafe {
            api.ncclCommInitRankConfig(
                &mut comm,
                world as c_int,
                id,
                rank as c_int,
                &mut Config::new(false),
            )
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
    fn call(&self, f: impl FnOnce(&Nccl, Comm) -> Status) -> Result<(), String> {
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
                api.ncclAllGather(own, whole, len, BYTES, comm, stream)
            });
        }
        // SAFETY: the caller's promise; a group that was begun is ended.
        self.call(|api, comm| unsafe {
            api.ncclGroupStart();
            let failed =
                blocks.iter().enumerate().filter(|(_, b)| !b.is_empty()).find_map(|(i, b)| {
                    let (ptr, len, rank) = (at(b), b.len(), i as c_int);
                    let status = match way {
                        Way::Pair if i == self.rank => {
                            api.ncclSend(ptr, len, BYTES, 1 - rank, comm, stream)
                        }
                        Way::Pair => api.ncclRecv(ptr, len, BYTES, rank, comm, stream),
                        _ => api.ncclBroadcast(ptr, ptr, len, BYTES, rank, comm, stream),
                    };
                    (status != SUCCESS && status != IN_PROGRESS).then_some(status)
                });
            let end = api.ncclGroupEnd();
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
            api.ncclBroadcast(ptr, ptr, bytes, BYTES, root as c_int, comm, stream)
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
            DType::U8 => 1,
            DType::I32 => 2,
            DType::I64 => 4,
            DType::F16 => 6,
            DType::F32 => 7,
            DType::F64 => 8,
            DType::BF16 => 9,
        };
        let (ptr, stream) = (ptr.cast::<c_void>(), stream.as_raw());
        // SAFETY: the caller's promise.
        self.call(|api, comm| unsafe { api.ncclAllReduce(ptr, ptr, len, dtype, SUM, comm, stream) })
    }
}

impl Transport for Communicator {
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
                    api.ncclCommSplit(comm, 0, rank, child, &mut Config::new(true))
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
