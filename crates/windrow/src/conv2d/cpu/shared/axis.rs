//! The way in which taps along rows or columns read a copy of the source.

use super::stencil::Tap;
use crate::Result;
use crate::lists::{collected, push};

/// The way in which taps along one axis read the copy.
#[derive(Clone, Debug)]
pub(in crate::conv2d::cpu) struct Axis {
    /// Position in the source, relative to `step * block start`, of the first element of each part.
    pub parts: Vec<isize>,
    /// Part, and shift in it, that each tap reads.
    pub taps: Vec<(usize, usize)>,
    /// The largest shift.
    pub span: usize,
}

impl Axis {
    /// The axis with one part for each residue modulo the step.
    pub(in crate::conv2d::cpu) fn new(taps: &[Tap], step: usize) -> Result<Self> {
        let step = step as isize;
        let split = |tap: &Tap| (tap.offset.rem_euclid(step), tap.offset.div_euclid(step));
        let mut parts: Vec<(isize, isize)> = Vec::new();
        for (residue, at) in taps.iter().map(split) {
            match parts.iter_mut().find(|(r, _)| *r == residue) {
                Some((_, low)) => *low = at.min(*low),
                None => push(&mut parts, (residue, at))?,
            }
        }
        let shifts = collected(taps.iter().map(split).map(|(residue, at)| {
            let part = parts.iter().position(|(r, _)| *r == residue).unwrap_or(0);
            (part, (at - parts[part].1) as usize)
        }))?;
        let span = shifts.iter().map(|s| s.1).max().unwrap_or(0);
        let parts = collected(parts.into_iter().map(|(residue, low)| low * step + residue))?;
        Ok(Axis { parts, taps: shifts, span })
    }

    /// True if taps are so far apart that they share few rows of a block.
    fn is_sparse(&self, block: usize) -> bool {
        self.span > block * self.taps.len()
    }

    /// The number of parts in blocks of `block` rows, and the largest shift.
    pub(in crate::conv2d::cpu) fn extent(&self, block: usize) -> (usize, usize) {
        match self.is_sparse(block) {
            true => (self.taps.len(), 0),
            false => (self.parts.len(), self.span),
        }
    }

    /// The axis for blocks of `block` rows: one part for each tap if taps share few rows.
    pub(in crate::conv2d::cpu) fn of_blocks(self, taps: &[Tap], block: usize) -> Result<Self> {
        if !self.is_sparse(block) {
            return Ok(self);
        }
        let parts = collected(taps.iter().map(|tap| tap.offset))?;
        Ok(Axis { parts, taps: collected((0..taps.len()).map(|i| (i, 0)))?, span: 0 })
    }
}
