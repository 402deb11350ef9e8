//! Packed filters on GPUs that are kept from run to run.
//!
//! A packed filter (here *pack*) belongs to one stream or to one graph, which compares it with the filter and reads it.
//! So different streams and different graphs share nothing. Only the packed filter of a frozen filter is shared by all
//! streams.

use crate::Result;
use crate::conv2d::gpu::{PackTo, Prepared};
use crate::gpu::{Event, Gpu, SharedBuffer, Stream};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The largest number of packs that streams keep. The least recently used ones are dropped.
const MOST: usize = 8;

/// The packs of a filter on GPUs, for plans with the packings `K`.
#[derive(Debug)]
pub(crate) struct Packs<K> {
    kept: Mutex<Vec<CachedPack<K>>>,
    /// A number that goes up when the filter is frozen or released again. It is odd while the filter is frozen.
    changes: AtomicU64,
}

impl<K> Default for Packs<K> {
    fn default() -> Self {
        Packs { kept: Mutex::default(), changes: AtomicU64::default() }
    }
}

#[derive(Debug)]
struct CachedPack<K> {
    packing: K,
    place: Place,
    pack: Owner,
}

/// Device memory that holds a packed filter, and the number that tells it from other memory.
#[derive(Debug)]
struct Pack {
    memory: SharedBuffer,
    ticket: u64,
}

#[derive(Debug)]
enum Owner {
    Cache(Arc<Pack>),
    /// The graph of a capture.
    Graph(Weak<Pack>),
}

/// The owner of a packed filter, by which it is found.
#[derive(Clone, Debug)]
enum Place {
    /// The stream of this number.
    Stream(u64),
    /// The stream of this handle in the capture of this number.
    Capture(usize, u64),
    /// Any stream that comes after the pack was made.
    Frozen(Arc<Frozen>),
}

#[derive(Debug)]
struct Frozen {
    /// The value of [`Packs::changes`] when it was packed. At any other value the pack is not used.
    change: u64,
    made: Event,
    is_made: AtomicBool,
    /// The last capture whose graph was given a share of the pack.
    retained_by: AtomicU64,
}

/// A pack that a run may read. No other run has it at the same time, unless it is frozen.
pub(crate) struct Lease<'a, K: Copy + PartialEq> {
    packs: &'a Packs<K>,
    packing: K,
    place: Place,
    stream: &'a Stream,
    pack: Arc<Pack>,
    /// True if the run is being captured.
    captured: bool,
}

impl Pack {
    fn new(memory: SharedBuffer) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let ticket = RandomState::new().hash_one(COUNT.fetch_add(1, Ordering::Relaxed));
        Pack { memory, ticket }
    }
}

impl<K: Copy + PartialEq> Packs<K> {
    /// Sets whether the caller promises that the filter does not change. With the promise, each packed form is compared
    /// with the filter once more; in a graph only if no run outside of captures came first.
    pub(crate) fn set_frozen(&self, frozen: bool) {
        let change = |n: u64| Some(if frozen { n + 1 + n % 2 } else { n + n % 2 });
        let _ = self.changes.fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
    }

    /// The pack of the filter at `w` for a run on `stream`, up to date in the stream's order without waiting.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], [`crate::Error::Backend`].
    ///
    /// # Safety
    /// `w` must be the filter of the convolution's spec on the stream's GPU, and `packing` must say how it is packed.
    pub(crate) unsafe fn lease<'a>(
        &'a self,
        prepared: &dyn Prepared,
        packing: K,
        stream: &'a Stream,
        w: *const u8,
    ) -> Result<Lease<'a, K>> {
        let capture = stream.capture_under_way()?;
        let captured = capture.is_some();
        let change = self.changes.load(Ordering::Acquire);
        let frozen = change % 2 == 1;
        if frozen
            && let Some((pack, frozen)) = self.frozen(packing, stream.gpu(), change)
            && frozen.is_ready_for(stream, captured)?
        {
            if let Some(capture) = &capture
                && frozen.retained_by.swap(capture.id, Ordering::Relaxed) != capture.id
            {
                capture.retain(pack.clone())?;
            }
            let place = Place::Frozen(frozen);
            return Ok(Lease { packs: self, packing, place, stream, pack, captured });
        }
        let place = match &capture {
            None => Place::Stream(stream.id()?),
            // The driver does not tell the number of a stream that is captured. No two streams have the same handle at
            // the same time.
            Some(capture) => Place::Capture(stream.as_raw().addr(), capture.id),
        };
        let pack = match self.take(packing, &place) {
            Some(pack) => pack,
            None => {
                let bytes = (prepared.packed_bytes() + prepared.seen_bytes()).max(1);
                match &capture {
                    None => Arc::new(Pack::new(SharedBuffer::new(stream, bytes)?)),
                    Some(capture) => {
                        let memory = SharedBuffer::apart(stream.gpu(), bytes)?;
                        let pack = Arc::new(Pack::new(memory));
                        capture.retain(pack.clone())?;
                        pack
                    }
                }
            }
        };
        let mut lease = Lease { packs: self, packing, place, stream, pack, captured };
        let (memory, ticket) = (lease.pack.memory.as_mut_ptr(), Some(lease.pack.ticket));
        // SAFETY: the caller's promise; the memory is as large as asked for, and nobody else has it.
        unsafe { prepared.pack(stream, w, PackTo { memory, ticket })? };
        if frozen && !captured {
            let made = Event::mark(stream)?;
            let (is_made, retained_by) = (AtomicBool::new(false), AtomicU64::new(0));
            lease.place = Place::Frozen(Arc::new(Frozen { change, made, is_made, retained_by }));
        }
        Ok(lease)
    }

    /// Bytes of all packs.
    pub(crate) fn bytes(&self) -> usize {
        let kept = self.lock();
        kept.iter().filter_map(CachedPack::pack).map(|pack| pack.memory.len()).sum()
    }

    /// Drops all packed forms; graphs keep those that they read.
    pub(crate) fn clear(&self) {
        let kept = std::mem::take(&mut *self.lock());
        // After the lock.
        drop(kept);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<CachedPack<K>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn frozen(&self, packing: K, gpu: &Gpu, change: u64) -> Option<(Arc<Pack>, Arc<Frozen>)> {
        self.lock().iter().find_map(|kept| match &kept.place {
            Place::Frozen(frozen) if kept.packing == packing && frozen.change == change => {
                let pack = kept.pack().filter(|pack| std::ptr::eq(pack.memory.gpu(), gpu))?;
                Some((pack, frozen.clone()))
            }
            _ => None,
        })
    }

    /// Takes a pack out of the cache, so that no other run has it.
    fn take(&self, packing: K, place: &Place) -> Option<Arc<Pack>> {
        let mut kept = self.lock();
        let found = kept.iter().position(|kept| kept.packing == packing && kept.place.is(place))?;
        kept.remove(found).pack()
    }

    /// Puts a pack in as the last one used, and drops those that are no longer useful.
    fn put(&self, new: CachedPack<K>) {
        let change = self.changes.load(Ordering::Acquire);
        let mut kept = self.lock();
        // A frozen pack replaces those of streams; of two that were made at the same time the first stays.
        let mut froze = false;
        if let Place::Frozen(frozen) = &new.place {
            let is_same =
                |k: &CachedPack<K>| matches!(&k.place, Place::Frozen(f) if f.change == change);
            if frozen.change != change || kept.iter().any(|k| k.is_like(&new) && is_same(k)) {
                return;
            }
            froze = true;
        }
        let mut streams = kept.iter().filter(|k| matches!(k.place, Place::Stream(_))).count();
        let (stay, gone): (Vec<_>, Vec<_>) =
            std::mem::take(&mut *kept).into_iter().partition(|old| match &old.place {
                Place::Capture(..) => old.pack().is_some(),
                Place::Frozen(frozen) => frozen.change == change,
                Place::Stream(_) => {
                    let stays = streams < MOST && !(froze && old.is_like(&new));
                    streams -= usize::from(!stays);
                    stays
                }
            });
        *kept = stay;
        kept.push(new);
        drop(kept);
        // After the lock.
        drop(gone);
    }

    /// Overwrites the beginning of each pack, to test that runs read it.
    #[cfg(test)]
    pub(crate) fn spoil(&self, stream: &Stream) {
        for pack in self.lock().iter().filter_map(CachedPack::pack) {
            // SAFETY: every pack has so many bytes; the test waits for whoever uses them.
            unsafe { stream.zero(pack.memory.as_mut_ptr(), 256).unwrap() };
        }
    }
}

impl<K> CachedPack<K> {
    fn pack(&self) -> Option<Arc<Pack>> {
        match &self.pack {
            Owner::Cache(pack) => Some(pack.clone()),
            Owner::Graph(pack) => pack.upgrade(),
        }
    }

    fn gpu(&self) -> Option<&'static Gpu> {
        self.pack().map(|pack| pack.memory.gpu())
    }
}

impl<K: PartialEq> CachedPack<K> {
    /// True if both have the same packing and GPU.
    fn is_like(&self, other: &Self) -> bool {
        let device = |kept: &Self| kept.gpu().map(Gpu::device);
        self.packing == other.packing && device(self) == device(other)
    }
}

impl Frozen {
    /// Makes later work of `stream` wait for the packing. False if that is not possible: a captured stream cannot wait
    /// for work outside of its capture.
    fn is_ready_for(&self, stream: &Stream, captured: bool) -> Result<bool> {
        if self.is_made.load(Ordering::Acquire) {
            return Ok(true);
        }
        if stream.gpu().despite_captures(|| self.made.is_reached())? {
            self.is_made.store(true, Ordering::Release);
            return Ok(true);
        }
        if !captured {
            stream.wait(&self.made)?;
        }
        Ok(!captured)
    }
}

impl Place {
    fn is(&self, other: &Place) -> bool {
        match (self, other) {
            (Place::Stream(a), Place::Stream(b)) => a == b,
            (Place::Capture(a, of_a), Place::Capture(b, of_b)) => (a, of_a) == (b, of_b),
            (Place::Stream(_) | Place::Capture(..) | Place::Frozen(_), _) => false,
        }
    }
}

impl<K: Copy + PartialEq> Lease<'_, K> {
    /// The address for [`Prepared::run`].
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.pack.memory.as_mut_ptr()
    }
}

impl<K: Copy + PartialEq> Drop for Lease<'_, K> {
    fn drop(&mut self) {
        // A stream that cannot say what it has done was reported by the run, or will be by the next.
        if !self.captured && self.pack.memory.mark_use(self.stream).is_err() {
            return;
        }
        let pack = match self.place {
            Place::Capture(..) => Owner::Graph(Arc::downgrade(&self.pack)),
            _ => Owner::Cache(self.pack.clone()),
        };
        self.packs.put(CachedPack { packing: self.packing, place: self.place.clone(), pack });
    }
}

#[cfg(test)]
mod tests;
