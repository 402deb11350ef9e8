//! Wrong values in index tensors on a GPU. The host cannot check such values without waiting for the GPU. So a kernel
//! skips an entry with such a value or holds the value in range, and reports the first wrong value in pinned host
//! memory. The host checks that memory whenever it waits, and before the next run with indices.

use super::Gpu;
use super::pinned::PinnedBuffer;
use crate::{Device, Error, Result};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

/// The report of a kernel: `WrongIndex` of `causal_conv1d/gpu/shared/parameters.cuh`.
#[repr(C)]
#[derive(Debug)]
struct Record {
    /// The number of the rule that was broken: 0 for none, 1 while a kernel writes the rest. An operator numbers its own
    /// rules from 2.
    rule: AtomicU32,
    position: AtomicI64,
    given: AtomicI64,
    limit: AtomicI64,
}

/// An operator's function that tells, for the number of a rule and the report's `limit`, which argument has the index and
/// which values it may have.
pub(crate) type Explain = fn(rule: u32, limit: i64) -> Option<(&'static str, String)>;

/// A device's record, and the function of the operator with indices. It is made when it is first needed, and lives as
/// long as the process, because graphs hold its address.
#[derive(Debug, Default)]
pub(super) struct WrongIndex(OnceLock<(&'static Record, Explain)>);

impl Record {
    /// Takes the report of a kernel, so that it is returned once.
    fn take(&self, device: Device, explain: Explain) -> Result<()> {
        let rule = self.rule.load(Ordering::Acquire);
        let limit = self.limit.load(Ordering::Relaxed);
        // Otherwise it is nothing, or something that is being written.
        let Some((arg, range)) = explain(rule, limit) else { return Ok(()) };
        let position = self.position.load(Ordering::Relaxed) as usize;
        let given = self.given.load(Ordering::Relaxed);
        // Of several threads one reports.
        let first = self.rule.compare_exchange(rule, 0, Ordering::AcqRel, Ordering::Relaxed);
        first.map_or(Ok(()), |_| {
            let expected = format!("{range} (in an earlier run on {device})");
            Err(Error::Index { arg, position, given, expected })
        })
    }
}

impl Gpu {
    /// The address where a kernel reports a wrong index. One operator has indices; `explain` is its function.
    ///
    /// # Errors
    /// [`Error::Index`] if one has been reported; [`Error::OutOfMemory`], [`Error::Backend`].
    pub(crate) fn wrong_index(&'static self, explain: Explain) -> Result<usize> {
        self.check_indices()?;
        let record = match self.wrong_index.0.get() {
            Some((record, _)) => *record,
            None => {
                let make = || PinnedBuffer::new(self, size_of::<Record>());
                let memory = self.despite_captures(make)?.leak();
                // SAFETY: zeros, which a record may be, aligned to a page and never freed; host and device touch it
                // by atomic accesses alone while it says that it is free.
                let record = unsafe { &*memory.cast::<Record>() };
                // Of several threads that come here first, one has made what all use.
                self.wrong_index.0.get_or_init(|| (record, explain)).0
            }
        };
        Ok(std::ptr::from_ref(record) as usize)
    }

    /// Returns [`Error::Index`] if a kernel has reported a wrong index since the last report.
    pub(crate) fn check_indices(&self) -> Result<()> {
        self.wrong_index
            .0
            .get()
            .map_or(Ok(()), |(record, explain)| record.take(self.device(), *explain))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rule: u32) -> Record {
        let [position, given, limit] = [3, 9, 8].map(AtomicI64::new);
        Record { rule: AtomicU32::new(rule), position, given, limit }
    }

    fn explain(rule: u32, limit: i64) -> Option<(&'static str, String)> {
        (rule == 2).then(|| ("slots", format!("below {limit}")))
    }

    #[test]
    fn what_a_kernel_wrote_is_said_once() {
        let record = record(2);
        let said = record.take(Device::Cuda(1), explain).unwrap_err().to_string();
        assert_eq!(said, "`slots`[3] is 9, expected below 8 (in an earlier run on cuda:1)");
        assert_eq!(record.take(Device::Cuda(1), explain), Ok(()));
    }

    #[test]
    fn what_is_being_written_is_left() {
        let record = record(1);
        assert_eq!(record.take(Device::Cuda(0), explain), Ok(()));
        assert_eq!(record.rule.into_inner(), 1);
    }
}
