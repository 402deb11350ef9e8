//! A cache of the packed forms of a filter that may change.

use super::PackedWeights;
use super::checksum::checksum;
use super::packed::Packing;
use crate::conv2d::gpu;
use crate::{Result, TensorDesc, TensorRef};
use std::sync::{Arc, Mutex, MutexGuard};

/// The largest number of packed forms that a cache keeps on the CPU. Each combination of algorithm, tile and element
/// type in use needs one.
const MAX_FORMS: usize = 8;

/// A cache of the packed forms of a filter, for [`Weights::Cached`](super::Weights::Cached). A *packed form* is the
/// filter in the form that the kernels of a plan read. The cache keeps it from run to run.
///
/// A packed form belongs to the content of the filter, not to its address, so the filter may move in memory. Unless the
/// filter is frozen ([`FilterCache::set_frozen`]), each run checks whether the content has changed:
///
/// - On the CPU, the run computes a checksum of the filter (128 bits, XXH3) on the plan's threads, and packs the filter
///   if the checksum differs from that of the packed form.
/// - On a GPU, the packing kernel makes the comparison, and the host does not wait. Each thread block computes a
///   128-bit checksum of its part of the filter, and packs the part only if it has changed. If packing is only a copy,
///   the filter is copied on each run without a comparison. If a kernel can read the filter in place, it is not packed.
///
/// On a GPU each stream has its own packed form, except that all streams share that of a frozen filter. A packed form
/// that is made while a graph is captured belongs to the graph and lives as long as the graph. Each replay compares it
/// with the filter. If the filter was frozen and packed by a run before the capture, replays do not compare it.
///
/// Use one cache for each filter: if several filters take turns in a cache, each is packed again every time. Any number
/// of plans and threads may use a cache at the same time. No lock is held while a filter is read or packed.
///
/// ```
/// use windrow::*;
/// let x = Tensor::from_slice(&[1f32; 16], &[1, 1, 4, 4])?;
/// let mut w = Tensor::from_slice(&[1f32; 9], &[1, 1, 3, 3])?;
/// let spec = Conv2dSpec::new(*x.desc(), *w.desc(), &Conv2dParams::default())?;
/// let plan = Conv2dPlan::new(&spec, &PlanOptions::default())?;
///
/// let cache = FilterCache::default(); // lives as long as the filter
/// let mut workspace = Workspace::empty();
/// let mut y = Tensor::uninitialised(spec.y)?;
/// for value in [1f32, 2.0] {
///     w.as_bytes_mut().copy_from_slice(&value.to_ne_bytes().repeat(9));
///     let weights = Weights::Cached(w.as_ref(), &cache);
///     let bytes = plan.workspace_bytes_for(&x.as_ref(), &weights);
///     if workspace.len() < bytes {
///         workspace = Workspace::new(Device::Cpu, bytes)?;
///     }
///     let args = Conv2dArgs::new(x.as_ref(), weights);
///     plan.run(&args, y.as_mut(), &mut workspace)?;
///     assert_eq!(y.to_vec::<f32>()?, [9.0 * value; 4]);
/// }
/// # Ok::<(), windrow::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct FilterCache {
    state: Mutex<State>,
    /// The packed forms on GPUs.
    packs: gpu::Packs<Packing>,
}

#[derive(Debug, Default)]
struct State {
    frozen: bool,
    /// The packed forms, the least recently used first.
    forms: Vec<CachedForm>,
}

#[derive(Debug)]
struct CachedForm {
    /// The layout and type of the filter from which the checksum was computed.
    source: TensorDesc,
    sum: u128,
    /// True if the filter is frozen and has been compared with this form since then: it needs no further comparison.
    trusted: bool,
    packed: Arc<PackedWeights>,
}

impl FilterCache {
    /// An empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets whether the filter is frozen. With `true` the caller promises that the filter does not change until
    /// `set_frozen(false)`. Each packed form is then compared with the filter only once more, and later runs do not
    /// read the filter.
    pub fn set_frozen(&self, frozen: bool) {
        self.packs.set_frozen(frozen);
        let mut state = self.lock();
        state.frozen = frozen;
        state.forms.iter_mut().for_each(|kept| kept.trusted = false);
    }

    /// True if the filter is frozen: the last value given to [`FilterCache::set_frozen`], at first `false`.
    pub fn is_frozen(&self) -> bool {
        self.lock().frozen
    }

    /// The total size in bytes of the packed forms in the cache.
    pub fn bytes(&self) -> usize {
        let on_cpu: usize = self.lock().forms.iter().map(|kept| kept.packed.bytes()).sum();
        on_cpu + self.packs.bytes()
    }

    /// Drops all packed forms. Runs in progress keep theirs until they are done.
    pub fn clear(&self) {
        let forms = std::mem::take(&mut self.lock().forms);
        // Dropped after the lock is released.
        drop(forms);
        self.packs.clear();
    }

    /// The packed forms for plans on GPUs.
    pub(super) fn packs(&self) -> &gpu::Packs<Packing> {
        &self.packs
    }

    /// The filter packed for a plan on the CPU. `pack` packs it if the cache does not have it.
    pub(in crate::conv2d) fn get(
        &self,
        packing: Packing,
        threads: usize,
        w: &TensorRef<'_>,
        pack: impl FnOnce() -> Result<PackedWeights>,
    ) -> Result<Arc<PackedWeights>> {
        let source = *w.desc();
        if let Some(packed) = self.lock().trusted(&packing, &source) {
            return Ok(packed);
        }
        let sum = checksum(w, threads);
        if let Some(packed) = self.lock().find(&packing, &source, sum) {
            return Ok(packed);
        }
        // Freed before packing, so that its memory can be reused.
        let stale = self.lock().take_stale(&source, sum);
        drop(stale);
        let packed = Arc::new(pack()?);
        let mut state = self.lock();
        // Another thread may have been faster.
        if let Some(packed) = state.find(&packing, &source, sum) {
            return Ok(packed);
        }
        let dropped = (state.forms.len() == MAX_FORMS).then(|| state.forms.remove(0));
        let trusted = state.frozen;
        state.forms.push(CachedForm { source, sum, trusted, packed: packed.clone() });
        drop(state);
        drop(dropped);
        Ok(packed)
    }

    /// Corrupts a packed form on a GPU, to test that runs read it (see [`gpu::Packs::spoil`]).
    #[cfg(test)]
    pub(in crate::conv2d) fn spoil(&self, stream: &crate::gpu::Stream) {
        self.packs.spoil(stream);
    }

    /// The locked forms. While the lock is held nothing can panic, unless memory runs out. So poisoning is ignored.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl State {
    /// A packed form that needs no comparison with the filter.
    fn trusted(&mut self, packing: &Packing, source: &TensorDesc) -> Option<Arc<PackedWeights>> {
        let is = |kept: &CachedForm| {
            kept.trusted && kept.packed.packing == *packing && kept.source == *source
        };
        let found = self.forms.iter().position(is)?;
        self.latest(found)
    }

    /// A packed form of this content.
    fn find(
        &mut self,
        packing: &Packing,
        source: &TensorDesc,
        sum: u128,
    ) -> Option<Arc<PackedWeights>> {
        let is = |kept: &CachedForm| {
            kept.sum == sum && kept.packed.packing == *packing && kept.source == *source
        };
        let found = self.forms.iter().position(is)?;
        self.forms[found].trusted = self.frozen;
        self.latest(found)
    }

    fn latest(&mut self, index: usize) -> Option<Arc<PackedWeights>> {
        self.forms[index..].rotate_left(1);
        self.forms.last().map(|kept| kept.packed.clone())
    }

    /// The packed forms of other contents.
    fn take_stale(&mut self, source: &TensorDesc, sum: u128) -> Vec<CachedForm> {
        self.forms.extract_if(.., |kept| kept.source == *source && kept.sum != sum).collect()
    }
}
