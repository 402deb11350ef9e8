//! The matrix product A^T B of two f32 operands that are split into f16 parts (`weight_product.cu`), on compute
//! capability 9.0. It computes weight gradients in f32; rows are pixels or Winograd's tiles.

use crate::conv2d::gpu::chips::Chip;
use crate::conv2d::gpu::{Divisor, kernel, source};
use crate::gpu::{Feature, Gpu, Kernel, KernelSpec, Launch, Source, Stream, params};
use crate::{DType, Result};

static PRODUCT: Source = source!("weight_product.cu");

/// The channels that lie together, and their bytes in f16.
pub(crate) const OCTET: usize = 8;
pub(crate) const OCTET_BYTES: usize = 16;
/// Operands are padded with rows of zeros to a multiple of this.
pub(crate) const STEP_ROWS: usize = 64;
/// The amount by which the tensor cores shrink a sum of one step, as in `implicit_gemm`. The low parts of one side
/// carry the correction.
pub(crate) const SHRINKAGE: f32 = 8.9e-8;
const BLOCK_M: usize = 128;
const BLOCKS: [usize; 2] = [64, 128];
/// The largest memory in bytes for parts of a gradient.
const MAX_PARTS_BYTES: usize = 64 << 20;

/// The operands of a product: octets of the channels of dy, and octets of the channels of x for all taps. Each of
/// `positions` positions is a separate product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) octets: [usize; 2],
    pub(crate) positions: usize,
    pub(crate) rows: usize,
}

/// The division of a product into blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cut {
    /// True if blocks have 128 channels of x and `block` of dy; otherwise it is the other way round.
    x_first: bool,
    block: usize,
    parts: usize,
}

#[derive(Debug)]
pub(crate) struct WeightProduct {
    kernel: &'static Kernel,
    multiprocessors: usize,
    shape: Shape,
    cut: Cut,
}

/// An operand, `Side` of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side {
    pub(crate) halves: *const u8,
    pub(crate) max: *const u8,
    /// The distances in bytes: from the high parts to the low ones, from a position to the next, and from an octet to
    /// the next.
    pub(crate) low: i64,
    pub(crate) position: i64,
    pub(crate) octet: i64,
    /// Strides of the gradient in elements.
    pub(crate) out_tap: i64,
    pub(crate) out_channel: i64,
    /// The octets of all taps; set by the run.
    pub(crate) octets: i32,
    /// The channels of one tap.
    pub(crate) channels: i32,
    pub(crate) tap_octets: Divisor,
    /// The exponent to which the largest magnitude was scaled.
    pub(crate) exponent: i32,
}

/// The starts of the rows of a tap of x.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taps {
    pub(crate) s: Divisor,
    pub(crate) stride: [Divisor; 2],
    /// Taps at this distance read the same plane.
    pub(crate) period: [Divisor; 2],
    pub(crate) dilation: [i32; 2],
    pub(crate) planes_w: i32,
    /// Columns of a row.
    pub(crate) pitch: i32,
    /// Bytes from a plane to the next.
    pub(crate) plane: i64,
}

impl Taps {
    /// The taps of a plain matrix product.
    pub(crate) fn one() -> Self {
        let one = Divisor::new(1);
        Taps {
            s: one,
            stride: [one; 2],
            period: [one; 2],
            dilation: [0; 2],
            planes_w: 1,
            pitch: 0,
            plane: 0,
        }
    }
}

params! {
    struct Params {
        m: Side,
        n: Side,
        out: *mut u8,
        out_part: i64,
        out_position: i64,
        items: i32,
        steps: i32,
        parts: i32,
        pairs: i32,
        m_tiles: Divisor,
        n_tiles: Divisor,
        positions: Divisor,
        taps: Taps,
    }
}

impl Side {
    /// An operand with `channels` channels of a tap; the caller sets the fields that are 0 here.
    pub(crate) fn new(halves: *const u8, max: *const u8, channels: usize, exponent: i32) -> Self {
        Side {
            halves,
            max,
            low: 0,
            position: 0,
            octet: 0,
            out_tap: 0,
            out_channel: 0,
            octets: 0,
            channels: channels as i32,
            tap_octets: Divisor::new(channels.div_ceil(OCTET)),
            exponent,
        }
    }
}

impl Cut {
    /// The division that is expected to be the fastest, and its time in microseconds.
    fn choose(shape: &Shape, multiprocessors: usize) -> (Self, f64) {
        let mut best: Option<(Self, f64)> = None;
        let out_bytes =
            (shape.positions * shape.octets[0] * shape.octets[1] * OCTET * OCTET * 4).max(1);
        let steps = shape.rows.div_ceil(STEP_ROWS);
        for block in BLOCKS {
            for x_first in [false, true] {
                for parts in 1..=steps.min((MAX_PARTS_BYTES / out_bytes).max(1)).min(128) {
                    let cut = Cut { x_first, block, parts };
                    let [m, n] = cut.grid(shape);
                    let rounds = (m * n * shape.positions * parts).div_ceil(multiprocessors);
                    let [m_octets, n_octets] = cut.sides(shape.octets);
                    let octets = m_octets as f64 / m as f64 + n_octets as f64 / n as f64;
                    // Measured on an H200: octets of a step that are loaded, the beginning and end of an item, and
                    // parts that are stored and added.
                    let item = 0.031 * octets * steps.div_ceil(parts) as f64 + 4.0;
                    let micros = rounds as f64 * item + 1e-6 * (parts * out_bytes) as f64;
                    if best.is_none_or(|(_, least)| micros < least) {
                        best = Some((cut, micros));
                    }
                }
            }
        }
        best.unwrap_or((Cut { x_first: false, block: 64, parts: 1 }, 0.0))
    }

    /// Tiles of sides m and n.
    fn grid(&self, shape: &Shape) -> [usize; 2] {
        let [m, n] = self.sides(shape.octets);
        [m.div_ceil(BLOCK_M / OCTET), n.div_ceil(self.block / OCTET)]
    }

    /// The values of dy and of x, as sides m and n.
    fn sides<T>(&self, [dy, x]: [T; 2]) -> [T; 2] {
        if self.x_first { [x, dy] } else { [dy, x] }
    }

    fn tiles(&self, shape: &Shape) -> usize {
        self.grid(shape).iter().product::<usize>() * shape.positions
    }
}

impl WeightProduct {
    /// Expected time.
    pub(crate) fn micros(chip: Chip, shape: &Shape) -> f64 {
        Cut::choose(shape, chip.multiprocessors as usize).1
    }

    pub(crate) fn new(gpu: &'static Gpu, shape: Shape) -> Result<Self> {
        let multiprocessors = gpu.info.multiprocessors as usize;
        let (cut, _) = Cut::choose(&shape, multiprocessors);
        Ok(WeightProduct {
            kernel: gpu.kernel(&product_kernel(cut.block))?,
            multiprocessors,
            shape,
            cut,
        })
    }

    /// Parts of the sums, each as large as the gradient, that a run writes.
    pub(crate) fn parts(&self) -> usize {
        self.cut.parts
    }

    /// The roundings of a sum: six products of 64 rows, each truncated, which is twice a rounding, and the steps of a
    /// part.
    pub(crate) fn roundings(&self) -> usize {
        let steps = self.shape.rows.div_ceil(STEP_ROWS);
        2 * 3 * STEP_ROWS / 16 + steps.div_ceil(self.cut.parts) + 2
    }

    /// Writes the parts of the sums of dy and x to `out`, each `part` elements, in matrices of `position` elements.
    ///
    /// # Safety
    /// What the sides and `out` point to must be as they say, on the stream's GPU.
    pub(crate) unsafe fn run(
        &self,
        stream: &Stream,
        [mut dy, mut x]: [Side; 2],
        taps: Taps,
        out: *mut u8,
        [part, position]: [usize; 2],
    ) -> Result<()> {
        [dy.octets, x.octets] = self.shape.octets.map(|octets| octets as i32);
        let [m_tiles, n_tiles] = self.cut.grid(&self.shape);
        let items = self.cut.tiles(&self.shape) * self.cut.parts;
        let [m, n] = self.cut.sides([dy, x]);
        let even = [m.out_tap, m.out_channel, n.out_tap, part as i64, position as i64];
        let pairs =
            n.out_channel == 1 && n.channels % 2 == 0 && even.iter().all(|stride| stride % 2 == 0);
        let params = Params {
            m,
            n,
            out,
            out_part: part as i64,
            out_position: position as i64,
            items: items as i32,
            steps: self.shape.rows.div_ceil(STEP_ROWS) as i32,
            parts: self.cut.parts as i32,
            pairs: i32::from(pairs),
            m_tiles: Divisor::new(m_tiles),
            n_tiles: Divisor::new(n_tiles),
            positions: Divisor::new(self.shape.positions),
            taps,
        };
        let launch = Launch::line(items.min(self.multiprocessors), 384);
        // SAFETY: the structure is the kernel's, the rest is the caller's promise.
        unsafe { self.kernel.launch(stream, launch, &params) }
    }
}

fn product_kernel(block: usize) -> KernelSpec {
    let stage = 2 * STEP_ROWS * (BLOCK_M + block) * DType::F16.size();
    let stages = if block == 64 { 4 } else { 3 };
    kernel(&PRODUCT, "weight_product", DType::F32)
        .needs(Feature::WarpgroupProducts)
        .define("BLOCK_N", block)
        .define("STAGES", stages)
        .params::<Params>()
        .shared_bytes((stages * (stage + 16)) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_compile_without_spills() {
        crate::gpu::compile_tests::check_compiles(&BLOCKS.map(product_kernel));
    }

    #[test]
    fn small_gradients_have_parts() {
        let shape = Shape { octets: [8, 8], positions: 1, rows: 64 * 4096 };
        let (cut, _) = Cut::choose(&shape, 132);
        assert!(cut.block == 64 && cut.parts > 100, "{cut:?}");
        let shape = Shape { octets: [64, 64], positions: 36, rows: 512 };
        assert!(Cut::choose(&shape, 132).0.parts == 1);
    }
}
