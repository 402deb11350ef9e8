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
    rule: AtomicU32,
    position: AtomicI64,
    given: AtomicI64,
    limit: AtomicI64,
}

/// The rules that an index can break, as in `Rule` of `causal_conv1d/gpu/shared/parameters.cuh`. Causal conv1d is the
/// only operator with indices.
const CU_SEQLENS: u32 = 2;
const CACHE_SEQLENS: u32 = 3;
const STATE_INDICES: u32 = 4;
const QUERY_START_LOC: u32 = 5;
const NUM_ACCEPTED_TOKENS: u32 = 6;
const INITIAL_BLOCK: u32 = 7;
const LAST_BLOCK: u32 = 8;
const FIRST_BLOCK: u32 = 9;
const TOKENS_BEFORE: u32 = 10;
const INTERMEDIATE_INDICES: u32 = 11;
const NEXT_TOKEN: u32 = 12;
const NEXT_SIBLING: u32 = 13;

fn later(limit: i64) -> String {
    format!("-1 or a later token of the sequence, below {limit}")
}

fn column(limit: i64) -> String {
    format!("a column of the table, below {limit}")
}

/// A device's record. It is made when it is first needed, and lives as long as the process, because graphs hold its
/// address.
#[derive(Debug, Default)]
pub(super) struct WrongIndex(OnceLock<&'static Record>);

impl Record {
    /// Takes the report of a kernel, so that it is returned once.
    fn take(&self, device: Device) -> Result<()> {
        let rule = self.rule.load(Ordering::Acquire);
        let limit = self.limit.load(Ordering::Relaxed);
        let (arg, range) = match rule {
            CU_SEQLENS => {
                ("cu_seqlens", format!("entries that rise from 0 to {limit}, the number of tokens"))
            }
            CACHE_SEQLENS => ("cache_seqlens", "at least 0".into()),
            STATE_INDICES => {
                ("conv_state_indices", format!("below {limit}, the number of states, or negative"))
            }
            QUERY_START_LOC => {
                let range = format!(
                    "entries that rise from 0 to at most {limit}, the number of tokens, each by no \
                     more than states of drafts, windows and trees have room for"
                );
                ("query_start_loc", range)
            }
            NUM_ACCEPTED_TOKENS => ("num_accepted_tokens", format!("between 1 and {limit}")),
            INITIAL_BLOCK => ("initial_block", column(limit)),
            LAST_BLOCK => ("last_block", column(limit)),
            FIRST_BLOCK => ("first_block", column(limit)),
            TOKENS_BEFORE => ("tokens_before", "at least 0".into()),
            INTERMEDIATE_INDICES => (
                "intermediate_indices",
                format!("at least 0 and below {limit}, the number of slots"),
            ),
            NEXT_TOKEN => ("next_token", later(limit)),
            NEXT_SIBLING => ("next_sibling", later(limit)),
            // Nothing, or something that is being written.
            _ => return Ok(()),
        };
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
    /// The address where a kernel reports a wrong index.
    ///
    /// # Errors
    /// [`Error::Index`] if one has been reported; [`Error::OutOfMemory`], [`Error::Backend`].
    pub(crate) fn wrong_index(&'static self) -> Result<usize> {
        self.check_indices()?;
        let record = match self.wrong_index.0.get() {
            Some(record) => *record,
            None => {
                let make = || PinnedBuffer::new(self, size_of::<Record>());
                let memory = self.despite_captures(make)?.leak();
                // SAFETY: zeros, which a record may be, aligned to a page and never freed; host and device touch it
                // by atomic accesses alone while it says that it is free.
                let record = unsafe { &*memory.cast::<Record>() };
                // Of several threads that come here first, one has made what all use.
                self.wrong_index.0.get_or_init(|| record)
            }
        };
        Ok(std::ptr::from_ref(record) as usize)
    }

    /// Returns [`Error::Index`] if a kernel has reported a wrong index since the last report.
    pub(crate) fn check_indices(&self) -> Result<()> {
        self.wrong_index.0.get().map_or(Ok(()), |record| record.take(self.device()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rule: u32, position: i64, given: i64, limit: i64) -> Record {
        let [position, given, limit] = [position, given, limit].map(AtomicI64::new);
        Record { rule: AtomicU32::new(rule), position, given, limit }
    }

    #[test]
    fn what_a_kernel_wrote_is_said_once() {
        for (rule, message) in [
            (
                CU_SEQLENS,
                "`cu_seqlens`[3] is 9, expected entries that rise from 0 to 8, the number of tokens",
            ),
            (CACHE_SEQLENS, "`cache_seqlens`[3] is 9, expected at least 0"),
            (
                STATE_INDICES,
                "`conv_state_indices`[3] is 9, expected below 8, the number of states, or negative",
            ),
            (
                QUERY_START_LOC,
                "`query_start_loc`[3] is 9, expected entries that rise from 0 to at most 8, the number of \
                 tokens, each by no more than states of drafts, windows and trees have room for",
            ),
            (NUM_ACCEPTED_TOKENS, "`num_accepted_tokens`[3] is 9, expected between 1 and 8"),
            (INITIAL_BLOCK, "`initial_block`[3] is 9, expected a column of the table, below 8"),
            (LAST_BLOCK, "`last_block`[3] is 9, expected a column of the table, below 8"),
            (FIRST_BLOCK, "`first_block`[3] is 9, expected a column of the table, below 8"),
            (TOKENS_BEFORE, "`tokens_before`[3] is 9, expected at least 0"),
            (
                INTERMEDIATE_INDICES,
                "`intermediate_indices`[3] is 9, expected at least 0 and below 8, the number of slots",
            ),
            (
                NEXT_TOKEN,
                "`next_token`[3] is 9, expected -1 or a later token of the sequence, below 8",
            ),
            (
                NEXT_SIBLING,
                "`next_sibling`[3] is 9, expected -1 or a later token of the sequence, below 8",
            ),
        ] {
            let record = record(rule, 3, 9, 8);
            let said = record.take(Device::Cuda(1)).unwrap_err().to_string();
            assert_eq!(said, format!("{message} (in an earlier run on cuda:1)"));
            assert_eq!(record.take(Device::Cuda(1)), Ok(()));
        }
    }

    #[test]
    fn what_is_being_written_is_left() {
        let record = record(1, 3, 9, 8);
        assert_eq!(record.take(Device::Cuda(0)), Ok(()));
        assert_eq!(record.rule.into_inner(), 1);
    }
}
