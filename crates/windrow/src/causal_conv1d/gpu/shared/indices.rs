//! What an index of causal conv1d has to be, for kernels that report wrong ones ([`Gpu::wrong_index`]).
//!
//! [`Gpu::wrong_index`]: crate::gpu::Gpu::wrong_index

/// The rules that an index can break: `Rule` of `parameters.cuh`.
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

/// The argument that a rule is about, and the range of its values; `None` if there is no such rule.
pub(crate) fn broken_rule(rule: u32, limit: i64) -> Option<(&'static str, String)> {
    Some(match rule {
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
        INTERMEDIATE_INDICES => {
            ("intermediate_indices", format!("at least 0 and below {limit}, the number of slots"))
        }
        NEXT_TOKEN => ("next_token", later(limit)),
        NEXT_SIBLING => ("next_sibling", later(limit)),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn every_rule_names_its_argument() {
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
            let (arg, expected) = broken_rule(rule, 8).unwrap();
            let error = Error::Index { arg, position: 3, given: 9, expected };
            assert_eq!(error.to_string(), message);
        }
        assert_eq!(broken_rule(0, 8), None);
        assert_eq!(broken_rule(NEXT_SIBLING + 1, 8), None);
    }
}
