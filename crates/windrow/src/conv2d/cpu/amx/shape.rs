//! The sizes of slabs and units.

use super::super::shared::epilogue::Lanes;
use super::super::shared::stencil::Stencil;
use super::sums::PRODUCTS;
use super::{Amx, BLOCK, Columns, ROW_BYTES, SIDE, TERMS, is_in_place};
use crate::cpu::gemm::even_part;
use crate::{Result, bf16};

/// Bytes of a copy that stay in the second-level cache together with the filter of a block of channels.
const COPY_BYTES: usize = 1 << 20;
/// Pixels of a unit, at most.
const PIXELS: usize = 4096;
/// Columns of a slab.
const COLS: usize = 512;

/// Cycles that parts of a unit take: handing it out, a product of two tiles, an element that is copied, a tile of the filter
/// that comes from the third-level cache, and a tile of sums on its way to the destination.
const UNIT: f64 = 4000.0;
const PRODUCT: f64 = 16.0;
const COPY: f64 = 0.75;
const FILTER: f64 = 128.0;
const FINISH: f64 = 48.0;

/// The shape that is expected to take the least time.
pub(super) fn choose(stencil: &Stencil, lanes: Lanes, parts: usize, threads: usize) -> Result<Amx> {
    let [height, width] = stencil.dst_size.map(|size| size.max(1));
    let in_place = lanes == Lanes::Channels && is_in_place(stencil, parts);
    let mut cols = even_part(width, COLS);
    let mut columns = Columns::new(stencil, parts, cols)?;
    let rows = columns.row_axis(stencil)?;
    let bytes = |row_count: usize, cols: usize, columns: &Columns| {
        let (row_parts, span) = rows.extent(row_count);
        let pixels = row_parts * columns.parts.len() * (row_count + span) * (cols + columns.span);
        let chunks = (stencil.c * columns.reads()).div_ceil(TERMS);
        if in_place { 0 } else { pixels.saturating_mul(parts * chunks * ROW_BYTES) }
    };
    while cols > BLOCK && bytes(1, cols, &columns) > COPY_BYTES {
        cols = even_part(width, cols / 2);
        columns = Columns::new(stencil, parts, cols)?;
    }
    let steps =
        (stencil.c * columns.reads()).div_ceil(TERMS) * rows.taps.len() * columns.steps.len();
    let product = PRODUCT * if parts == 1 { 1.0 } else { PRODUCTS as f64 };
    let filter = FILTER * parts as f64;
    let all = Amx::all_panels(stencil).max(1);
    let time = |[row_count, images, panels]: [usize; 3]| {
        let slabs = height.div_ceil(row_count) * width.div_ceil(cols) * stencil.n.div_ceil(images);
        let units = slabs * stencil.groups * all.div_ceil(panels);
        let channels = (2 * panels).min(stencil.k.div_ceil(SIDE)) as f64;
        let pixels = ((row_count - 1) * (cols + columns.span) + cols).div_ceil(SIDE) * images;
        let products = channels * steps as f64 * (product * pixels as f64).max(filter);
        let copied = bytes(row_count, cols, &columns) / (parts * size_of::<bf16>());
        let copy = COPY * images as f64 * copied as f64;
        let finish = FINISH * channels * pixels as f64;
        // The last units seldom end together.
        (units.div_ceil(threads.max(1)) as f64 + 0.3) * (UNIT + copy + products + finish)
    };
    let mut best = ([1, 1, all], f64::INFINITY);
    let most_rows = if in_place { 1 } else { height.min(PIXELS.div_ceil(cols)) };
    for row_count in 1..=most_rows {
        if row_count > 1 && bytes(row_count, cols, &columns) > COPY_BYTES {
            break;
        }
        let whole = row_count == height && cols == width;
        let fits = |images: usize| {
            images * row_count * cols <= PIXELS
                && bytes(row_count, cols, &columns).saturating_mul(images) <= COPY_BYTES
        };
        let images =
            (1..=stencil.n.min(64)).take_while(|&images| images == 1 || whole && fits(images));
        for images in images {
            for cuts in 1..=all.min(64) {
                let shape = [row_count, images, all.div_ceil(cuts)];
                let expected = time(shape);
                if expected < best.1 {
                    best = (shape, expected);
                }
            }
        }
    }
    let [row_count, images, panels] = best.0;
    Amx::with_shape(stencil, lanes, parts, [row_count, cols], [images, panels])
}
