//! Trees of drafts: every token is computed by itself, from its ancestors.

use super::{Block, LANES, Operands, Part, TILE, Task};
use crate::causal_conv1d::cpu::shared::GROUP;
use crate::causal_conv1d::cpu::shared::operand::Staged;
use crate::causal_conv1d::cpu::shared::store::Sum;
use crate::cpu::{Simd, SimdElement};

impl<T: SimdElement> Task<'_, T> {
    /// The tile has the window, below it the token and what lies before it, and below these `y` where it needs a tile.
    ///
    /// # Safety
    /// As `Task::walk`; y is not x.
    #[inline(always)]
    pub(super) unsafe fn walk_tree<S: Simd>(
        &self,
        s: S,
        staged: &Staged,
        tile: *mut T,
        part: Part<'_>,
    ) {
        let Task { plan, operands, .. } = self;
        let Part { entry, states, channel, lanes, .. } = part;
        let Operands { x, conv_states, windows, parents, .. } = operands;
        let problem = &plan.sizes.problem;
        let history = problem.history();
        let sum = Sum {
            width: problem.width,
            dilation: 1,
            activation: plan.activation,
            stream: self.streams(),
        };
        let parents = &parents[entry.tokens_of_x(problem.l)];
        let window = |i: usize| Block::rows(tile, i);
        let line = tile.wrapping_add(history * LANES);
        let of_x = |t: usize| Block::of(x, entry.row, channel, entry.start + t);
        // SAFETY: tokens, states, slots and parents exist; the tile has its rows of LANES.
        unsafe {
            if lanes < GROUP {
                line.write_bytes(0, (history + TILE) * LANES);
            }
            match states.window {
                Some(column) => {
                    let from = Block::of(conv_states, states.read, channel, column);
                    from.copy_to(s, window(0), history, lanes);
                }
                None => window(0).clear(history, lanes),
            }
            for t in 0..entry.tokens {
                of_x(t).copy_to(s, Block::rows(line, history), 1, lanes);
                let (mut token, mut left) = (t, history);
                while left > 0 && token > 0 {
                    (token, left) = (usize::from(parents[token]), left - 1);
                    of_x(token).copy_to(s, Block::rows(line, left), 1, lanes);
                }
                // What lies before the root, the newest of the window last.
                window(history - left).copy_to(s, Block::rows(line, 0), left, lanes);
                self.compute(s, sum, staged, line, (part, t, 1));
                if let Some(windows) = windows {
                    let to = windows.at(states.slot, t, channel);
                    Block::rows(line, 1).copy_to(s, to, history, lanes);
                }
            }
            // The state after it: what it takes of the window and the tokens in their order, from the first one kept.
            if let Some(write) = states.write {
                let n = entry.tokens;
                let kept = if operands.lookup.has_drafts() { 1 } else { n };
                let old = history.saturating_sub(kept);
                let to = |column: usize| Block::of(conv_states, write, channel, column);
                window(history - old).copy_to(s, to(0), old, lanes);
                let first = kept.saturating_sub(history);
                of_x(first).copy_to(s, to(old), n - first, lanes);
            }
        }
    }
}
