//! The places that each sequence reads and writes. They are looked up once, because another thread of the program may
//! change indices during a run.

use super::args::CausalConv1dServingArgs;
use super::spec::{CausalConv1dServingSpec, Sizes};
use crate::causal_conv1d::sequences::Indices;
use crate::{Error, Result};
use std::ops::Range;

/// The tokens of a sequence, and its states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Row of x, and the first token in it.
    pub row: usize,
    pub start: usize,
    pub tokens: usize,
    /// `None` for padding.
    pub states: Option<States>,
}

/// The states of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct States {
    pub read: usize,
    /// First column of the window; `None` for zeros.
    pub window: Option<usize>,
    /// `None` for null.
    pub write: Option<usize>,
    pub ends: Ends,
    /// Slot of the windows on the way, where there are any.
    pub slot: usize,
}

/// The ends of blocks that are kept on the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ends {
    /// Tokens of this call before the first end, at least 1; others follow after `step` tokens each.
    pub first: usize,
    pub step: usize,
    pub count: usize,
    /// Column of the first.
    pub column: usize,
}

/// The indices of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lookup<'a> {
    pub sizes: Sizes,
    starts: Option<Indices<'a>>,
    table: Option<Indices<'a>>,
    is_table: bool,
    null: Option<i64>,
    flags: Option<Indices<'a>>,
    accepted: Option<Indices<'a>>,
    initial_block: Option<Indices<'a>>,
    last_block: Option<Indices<'a>>,
    first_block: Option<Indices<'a>>,
    tokens_before: Option<Indices<'a>>,
    block_size: usize,
    slots: Option<Indices<'a>>,
    links: Option<[Indices<'a>; 2]>,
}

fn error<T>(arg: &'static str, position: usize, given: i64, expected: String) -> Result<T> {
    Err(Error::Index { arg, position, given, expected })
}

impl Entry {
    /// Its tokens in all rows of x one behind the other, of which each has `l`.
    pub(crate) fn tokens_of_x(&self, l: usize) -> Range<usize> {
        let first = self.row * l + self.start;
        first..first + self.tokens
    }
}

/// The parents of the tokens of sequence `i`, of which there is one at least; that of token 0 is 0.
fn tree([next, sibling]: &[Indices<'_>; 2], i: usize, parents: &mut [u16]) -> Result<()> {
    parents.fill(0);
    let columns = next.columns();
    for t in 0..parents.len() {
        let parent = parents[t];
        for (arg, links, parent) in
            [("next_token", next, t as u16), ("next_sibling", sibling, parent)]
        {
            let given = links.at([i, t]);
            match usize::try_from(given) {
                Ok(later) if later > t && later < parents.len() => parents[later] = parent,
                Err(_) if given == -1 => {}
                _ => {
                    let tokens = parents.len();
                    let expected = format!("-1 or a later token, above {t} and below {tokens}");
                    return error(arg, i * columns + t, given, expected);
                }
            }
        }
    }
    Ok(())
}

impl<'a> Lookup<'a> {
    /// The entries for arguments that were compared with the spec.
    pub(crate) fn new(
        spec: &CausalConv1dServingSpec,
        sizes: Sizes,
        args: &CausalConv1dServingArgs<'a>,
    ) -> Self {
        Lookup {
            sizes,
            starts: args.query_start_loc.map(Indices::new),
            table: args.conv_state_indices.map(Indices::new),
            is_table: args.conv_state_indices.is_some_and(|table| table.shape().len() == 2),
            null: spec.null_index,
            flags: args.has_initial_state.map(Indices::new),
            accepted: args.num_accepted_tokens.map(Indices::new),
            initial_block: args.initial_block.map(Indices::new),
            last_block: args.last_block.map(Indices::new),
            first_block: args.first_block.map(Indices::new),
            tokens_before: args.tokens_before.map(Indices::new),
            block_size: spec.block_size,
            slots: args.intermediate_indices.map(Indices::new),
            links: args.next_token.zip(args.next_sibling).map(|(a, b)| [a, b].map(Indices::new)),
        }
    }

    /// Fills in `entries`, one for each sequence, and says how many tokens of x belong to one. `seen` has a bit for each
    /// state of the pool and each slot, `parents` an element for each token of x where there are trees: it takes the
    /// parents of the tokens of each sequence that is no padding.
    ///
    /// # Errors
    /// [`Error::Index`] for each rule of [`CausalConv1dServingSpec`] that a value breaks.
    pub(crate) fn resolve(
        &self,
        entries: &mut [Entry],
        seen: &mut [u8],
        parents: &mut [u16],
    ) -> Result<usize> {
        let mut end = 0;
        for (i, entry) in entries.iter_mut().enumerate() {
            let (row, start, next) = self.tokens(i, end)?;
            let tokens = next - start;
            let states = if tokens > 0 { self.states(i, tokens)? } else { None };
            (*entry, end) = (Entry { row, start, tokens, states }, next);
        }
        self.check_shared(entries, seen)?;
        self.check_slots(entries, seen)?;
        if let Some(links) = &self.links {
            for (i, entry) in entries.iter().enumerate().filter(|(_, e)| e.states.is_some()) {
                tree(links, i, &mut parents[entry.tokens_of_x(self.sizes.problem.l)])?;
            }
        }
        Ok(end)
    }

    /// True if tokens are trees.
    pub(crate) fn has_trees(&self) -> bool {
        self.links.is_some()
    }

    /// True if states hold drafts.
    pub(crate) fn has_drafts(&self) -> bool {
        self.accepted.is_some()
    }

    /// Row, first token and one past the last of sequence `i`, the one before which ends at `end`.
    fn tokens(&self, i: usize, end: usize) -> Result<(usize, usize, usize)> {
        let Some(starts) = &self.starts else { return Ok((i, 0, self.sizes.problem.l)) };
        let name = "query_start_loc";
        if i == 0 && starts.at([0]) != 0 {
            return error(name, 0, starts.at([0]), "0 as the first entry".into());
        }
        let (given, l) = (starts.at([i + 1]), self.sizes.problem.l);
        match usize::try_from(given) {
            Ok(next) if (end..=l).contains(&next) => Ok((0, end, next)),
            _ => {
                let expected = format!(
                    "at least the entry before it, {end}, and at most {l}, the number of tokens"
                );
                error(name, i + 1, given, expected)
            }
        }
    }

    /// The states of sequence `i`, which has `tokens` tokens; `None` if what it reads is null.
    fn states(&self, i: usize, tokens: usize) -> Result<Option<States>> {
        let sizes = &self.sizes;
        let Some(read) = self.state(i, self.column("initial_block", self.initial_block, i)?)?
        else {
            return Ok(None);
        };
        let last = self.column("last_block", self.last_block, i)?;
        let write = self.state(i, last)?;
        let mut column = 0;
        if let Some(accepted) = &self.accepted {
            let (given, most) = (accepted.at([i]), sizes.most_accepted());
            match usize::try_from(given) {
                Ok(accepted) if (1..=most).contains(&accepted) => column = accepted - 1,
                _ => {
                    let expected = format!("between 1 and {most}, which the states have room for");
                    return error("num_accepted_tokens", i, given, expected);
                }
            }
        }
        if tokens > sizes.most {
            let expected = format!("at most {} more than the entry before it", sizes.most);
            let given = self.starts.map_or(0, |starts| starts.at([i + 1]));
            return error("query_start_loc", i + 1, given, expected);
        }
        let counts = self.flags.is_none_or(|flags| flags.at([i]) != 0);
        let ends = self.ends(i, tokens, last)?;
        let slot = self.slot(i)?;
        Ok(Some(States { read, window: counts.then_some(column), write, ends, slot }))
    }

    /// The slot of the intermediate windows of sequence `i`; any number if there are none.
    fn slot(&self, i: usize) -> Result<usize> {
        let (Some(slots), n) = (&self.slots, self.sizes.slots) else { return Ok(i) };
        let given = slots.at([i]);
        match usize::try_from(given) {
            Ok(slot) if slot < n => Ok(slot),
            _ => {
                let expected = format!("at least 0 and below {n}, the number of slots");
                error("intermediate_indices", i, given, expected)
            }
        }
    }

    /// The state in a column of sequence `i`; `None` for null.
    fn state(&self, i: usize, column: usize) -> Result<Option<usize>> {
        let (Some(table), pool) = (&self.table, self.sizes.pool) else { return Ok(Some(i)) };
        let given = if self.is_table { table.at([i, column]) } else { table.at([i]) };
        if given < 0 || Some(given) == self.null {
            return Ok(None);
        }
        match usize::try_from(given) {
            Ok(state) if state < pool => Ok(Some(state)),
            _ => {
                let expected = format!("below {pool}, the number of states, or null");
                error("conv_state_indices", i * self.sizes.blocks + column, given, expected)
            }
        }
    }

    /// The state of an end of a block that was resolved; `None` for null.
    pub(crate) fn state_at_end(&self, i: usize, column: usize) -> Option<usize> {
        self.state(i, column.min(self.sizes.blocks - 1)).ok().flatten()
    }

    fn column(&self, arg: &'static str, of: Option<Indices<'_>>, i: usize) -> Result<usize> {
        let Some(given) = of.map(|columns| columns.at([i])) else { return Ok(0) };
        let blocks = self.sizes.blocks;
        match usize::try_from(given) {
            Ok(column) if column < blocks => Ok(column),
            _ => {
                let expected = format!("a column of the table, below {blocks}");
                error(arg, i, given, expected)
            }
        }
    }

    fn ends(&self, i: usize, tokens: usize, last: usize) -> Result<Ends> {
        let (Some(before), Some(_)) = (&self.tokens_before, &self.first_block) else {
            return Ok(Ends::default());
        };
        let first = self.column("first_block", self.first_block, i)?;
        if first > last {
            let expected = format!("at most `last_block`, {last}");
            return error("first_block", i, first as i64, expected);
        }
        let given = before.at([i]);
        let Ok(before) = u64::try_from(given) else {
            return error("tokens_before", i, given, "at least 0".into());
        };
        let step = self.block_size as u64;
        // The last end before the last token has been seen, counted from this call's first token.
        let end = (before + tokens as u64 - 1) / step * step;
        let Some(end) = end.checked_sub(before).filter(|&end| end > 0) else {
            return Ok(Ends::default());
        };
        let count = end.div_ceil(step).min((last - first) as u64);
        if count == 0 {
            return Ok(Ends::default());
        }
        let [first, step, count] = [end - (count - 1) * step, step, count].map(|n| n as usize);
        Ok(Ends { first, step, count, column: last - count })
    }

    /// States that sequence `i` writes.
    fn written<'b>(&'b self, i: usize, states: &'b States) -> impl Iterator<Item = usize> + 'b {
        let Ends { count, column, .. } = states.ends;
        let ends = (0..count).filter_map(move |k| self.state_at_end(i, column + k));
        ends.chain(states.write)
    }

    /// No two sequences have one slot.
    fn check_slots(&self, entries: &[Entry], seen: &mut [u8]) -> Result<()> {
        if self.slots.is_none() {
            return Ok(());
        }
        seen.fill(0);
        for (i, entry) in entries.iter().enumerate() {
            let Some(States { slot, .. }) = entry.states else { continue };
            let bit = 1 << (slot % 8);
            if seen[slot / 8] & bit != 0 {
                let expected = "a slot that no other sequence has".into();
                return error("intermediate_indices", i, slot as i64, expected);
            }
            seen[slot / 8] |= bit;
        }
        Ok(())
    }

    /// A state that one sequence writes, no other may write or read.
    fn check_shared(&self, entries: &[Entry], seen: &mut [u8]) -> Result<()> {
        if self.table.is_none() {
            return Ok(());
        }
        seen.fill(0);
        let shared = |i: usize, state: usize| {
            let expected = "a state that no other sequence writes".into();
            error("conv_state_indices", i * self.sizes.blocks, state as i64, expected)
        };
        for (i, entry) in entries.iter().enumerate() {
            let Some(states) = &entry.states else { continue };
            for (k, state) in self.written(i, states).enumerate() {
                let bit = 1 << (state % 8);
                let own = || self.written(i, states).take(k).any(|earlier| earlier == state);
                if seen[state / 8] & bit != 0 && !own() {
                    return shared(i, state);
                }
                seen[state / 8] |= bit;
            }
        }
        for (i, entry) in entries.iter().enumerate() {
            let Some(states) = &entry.states else { continue };
            let (read, is_read) = (states.read, states.window.is_some());
            let own = || self.written(i, states).any(|state| state == read);
            if is_read && seen[read / 8] & 1 << (read % 8) != 0 && !own() {
                return shared(i, read);
            }
        }
        Ok(())
    }
}
