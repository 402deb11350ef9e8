//! The order in which rows of convolutions are computed by bands.

use super::super::shared::stencil::Stencil;
use std::ops::Range;

/// The largest share of a segment's rows that is computed twice, because the segment before it has computed them too.
const MOST_TWICE: f64 = 0.125;

/// Parts of convolutions in the order in which a thread computes them.
#[derive(Debug)]
pub(super) struct Schedule {
    pub(super) all: Vec<Part>,
    /// The parts of each segment.
    pub(super) segments: Vec<Range<usize>>,
    /// Elements of the memory for each value between two convolutions.
    pub(super) lens: Vec<usize>,
}

/// Rows that one convolution computes. Places are in elements, from the first one of the image, the result, or the value's
/// memory.
#[derive(Debug)]
pub(super) struct Part {
    /// The number of the convolution.
    pub(super) link: usize,
    /// The rows of its whole result.
    pub(super) rows: Range<usize>,
    /// Where the first row that it reads lies, and the first one that it writes.
    pub(super) src: usize,
    pub(super) dst: usize,
    /// The place and number of elements that are moved before, to the beginning of the memory for the result.
    pub(super) kept: Option<(usize, usize)>,
}

impl Schedule {
    /// Bands of as many rows as can be while all values fit into so many bytes. `None` if not even one does, or if threads
    /// would compute too many rows twice.
    pub(super) fn new(stencils: &[Stencil], threads: usize, bytes: usize) -> Option<Self> {
        let height = stencils.last()?.dst_size[0];
        let segment = height.div_ceil(threads.max(1));
        if threads > 1 {
            // Rows of the first result that a segment reads, and those of them that the next one reads too.
            let reads = |rows: Range<usize>| {
                stencils[1..].iter().rev().fold(rows, |rows, stencil| stencil.reads(rows))
            };
            let (own, next) = (reads(0..segment), reads(segment..(2 * segment).min(height)));
            let twice = own.end.saturating_sub(next.start);
            if twice as f64 > MOST_TWICE * own.len() as f64 {
                return None;
            }
        }
        let elements = |schedule: &Self| schedule.lens.iter().sum::<usize>();
        let fits = |schedule: &Self| elements(schedule) * size_of::<f32>() <= bytes;
        let of = |rows: usize| Self::of_bands(stencils, segment, rows);
        let most = (1..=segment).take_while(|&rows| fits(&of(rows))).last()?;
        // The last band is not much smaller than the others.
        Some(of(segment.div_ceil(segment.div_ceil(most))))
    }

    /// The schedule of bands of so many rows.
    fn of_bands(stencils: &[Stencil], segment: usize, band: usize) -> Self {
        let last = stencils.len() - 1;
        let height = stencils[last].dst_size[0];
        let row =
            |link: usize| stencils[link].dst_size[1] * stencils[link].groups * stencils[link].k;
        let (mut all, mut segments, mut lens) = (Vec::new(), Vec::new(), vec![0; last]);
        for first in (0..height).step_by(segment) {
            let start = all.len();
            // The first row of each result that is in memory, and the first one that is not computed yet.
            let mut base = vec![first; last + 1];
            for link in (0..last).rev() {
                base[link] = stencils[link + 1].reads(base[link + 1]..base[link + 1] + 1).start;
            }
            let mut done = base.clone();
            let until = (first + segment).min(height);
            for begin in (first..until).step_by(band) {
                let mut ends = vec![(begin + band).min(until); last + 1];
                for link in (0..last).rev() {
                    ends[link] = stencils[link + 1].reads(0..ends[link + 1]).end;
                }
                for link in 0..=last {
                    let rows = done[link]..ends[link];
                    if rows.is_empty() {
                        continue;
                    }
                    let mut kept = None;
                    if link < last {
                        let needed = stencils[link + 1].reads(done[link + 1]..done[link + 1] + 1);
                        let needed = needed.start.clamp(base[link], rows.start);
                        if needed > base[link] {
                            let from = (needed - base[link]) * row(link);
                            kept = Some((from, (rows.start - needed) * row(link)));
                            base[link] = needed;
                        }
                        lens[link] = lens[link].max((rows.end - base[link]) * row(link));
                    }
                    let read = stencils[link].reads(rows.clone()).start;
                    let src = match link {
                        0 => read * stencils[0].src[2] as usize,
                        _ => (read - base[link - 1]) * row(link - 1),
                    };
                    let dst = match link < last {
                        true => (rows.start - base[link]) * row(link),
                        false => rows.start * stencils[last].dst[2] as usize,
                    };
                    done[link] = rows.end;
                    all.push(Part { link, rows, src, dst, kept });
                }
            }
            segments.push(start..all.len());
        }
        Schedule { all, segments, lens }
    }
}
