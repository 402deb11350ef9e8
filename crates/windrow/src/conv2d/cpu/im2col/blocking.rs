//! The division of a product with the im2col matrix into blocks.

use super::super::shared::epilogue::Lanes;
use super::super::shared::stencil::Stencil;
use crate::cpu::MANY_THREADS;
use crate::cpu::gemm::Blocking;

/// The largest block of channels and of pixels: panels of both operands and the tiles between them stay in a
/// second-level cache of 1 MiB.
pub(super) const BLOCK: [usize; 2] = [512, 128];

/// The limit for smaller blocks that are compared: this number of parts of the channels, and of the pixels, more than
/// necessary, and no more than twice the threads.
const MORE_PARTS: usize = 32;

/// Cycles that parts of a task take: handing it out, an element of either operand until it is there, where many threads read
/// and where few do, and an element that is copied.
const TASK: f64 = 3000.0;
const READ: [f64; 2] = [1.4, 0.5];
const COPY: f64 = 0.4;
/// The share of the multiplications that vectors could do in a cycle.
const RATE: f64 = 0.75;
/// Tasks by which the last thread ends later than if all began and went on together.
const LATE: f64 = 0.25;

/// The blocking with which the last thread is expected to end first, among those that `make` gives for at most so many
/// channels and pixels. Each block of channels copies the pixels once more.
pub(super) fn ends_first(
    stencil: &Stencil,
    lanes: Lanes,
    is_merged: bool,
    threads: usize,
    make: impl Fn([usize; 2]) -> Blocking,
) -> Blocking {
    let whole = make(BLOCK);
    if threads == 1 {
        return whole;
    }
    let read = if threads >= MANY_THREADS { READ[0] } else { READ[1] };
    // Pixels share what their taps read, except for the distance between pixels.
    let taps = stencil.rows.len() * stencil.cols.len();
    let frame_reads = stencil.c * taps.min(stencil.step[0] * stencil.step[1]);
    let reads = stencil.frame_count() * frame_reads;
    let copies = if is_merged { 0.0 } else { COPY * stencil.terms() as f64 };
    let terms = stencil.terms() as f64;
    let by_operand = |[rows, cols]: [usize; 2]| match lanes {
        Lanes::Pixels => [rows, cols],
        Lanes::Channels => [cols, rows],
    };
    let time = |b: &Blocking| {
        let [channels, pixels] = by_operand([b.mc.min(b.rows), b.nc]).map(|size| size as f64);
        // Registers hold `nr` elements in two vectors, for each of which there is a product in a cycle.
        let products = channels * pixels * terms / (RATE * b.nr as f64);
        let task = products + read * channels * terms + pixels * (read * reads as f64 + copies);
        let rounds = (b.tasks() * stencil.groups).div_ceil(threads) as f64;
        (rounds + LATE) * (TASK + task)
    };
    let tile = by_operand([whole.mr, whole.nr]);
    let sizes = [stencil.k, stencil.pixels()];
    let parts = |operand: usize| {
        let tiles = sizes[operand].div_ceil(tile[operand]).max(1);
        let fewest = tiles.div_ceil((BLOCK[operand] / tile[operand]).max(1));
        (fewest..=tiles.min(fewest + MORE_PARTS.min(2 * threads)))
            .map(move |parts| tiles.div_ceil(parts) * tile[operand])
    };
    let mut best = (time(&whole), whole);
    for pixels in parts(1) {
        for channels in parts(0) {
            let blocking = make([channels, pixels]);
            let expected = time(&blocking);
            if expected < best.0 {
                best = (expected, blocking);
            }
        }
    }
    best.1
}
