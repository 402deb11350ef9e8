//! The expected time of a division of the matrix product.

use super::cut::{Cut, Factors, Gather, gather, of_strips, stores_pixels, stores_vectors};
use super::product::pairs_lie_in_rows;
use crate::conv2d::gpu::chips::{ImplicitGemm, Product};
use crate::conv2d::gpu::task::Task;
use crate::conv2d::{Conv2dSpec, Problem};

/// A multiprocessor that computes more steps than these: its blocks of 128 pixels and 128 channels get out of step with
/// others, and the second-level cache brings the filter to each. On an H200 a step of f16 takes 0.33 to 0.36 us up to 1120
/// steps of seven layers, and 0.40 to 0.48 in five of at least 1460.
const MANY_STEPS: f64 = 1200.0;
const OUT_OF_STEP: f64 = 1.3;

impl Cut {
    /// The expected microseconds: a launch, and rounds of tiles with this number of steps.
    pub(super) fn micros(&self, task: &Task<'_>) -> f64 {
        let Task { chip, spec, problem: p, .. } = *task;
        let rates = &chip.rates.implicit_gemm;
        let tiles = (p.n * self.image_pixels(task)).div_ceil(self.pixels) * self.k_blocks(p);
        let together = self.resident() == 2 && tiles > chip.multiprocessors as usize;
        let wide = usize::from(self.block != 64);
        let (step, tile) = match gather(spec, p, *self, true) {
            // Two of a multiprocessor.
            _ if together => self.product(rates).together,
            _ if self.strips => self.product(rates).strips[of_strips(self.block)],
            _ if self.maps => self.product(rates).blocks[self.block.ilog2() as usize - 6],
            _ if self.is_single() => match (self.block, self.parts) {
                (64, 1) => rates.half[0],
                (64, _) => rates.half[1],
                (128, _) => rates.half[2],
                _ => rates.half[3],
            },
            // Neighbouring pixels lie in lines of their own.
            Gather::Any if spec.x.strides()[3] > 8 => rates.apart,
            Gather::Any => rates.elements[wide],
            Gather::Channels => rates.channels[wide],
            Gather::Pixels | Gather::Map => rates.pixels[wide],
        };
        let exchange = match (self.is_single(), self.parts) {
            (_, 1) => 0.0,
            (false, _) => rates.exchange,
            (true, _) => {
                let (first, doubling) = self.product(rates).exchange[wide];
                first + doubling * f64::from(self.parts.ilog2())
            }
        };
        let slots = clusters(chip.multiprocessors, self.parts) * if together { 2 } else { 1 };
        let rounds = tiles as f64 / slots as f64;
        // Blocks that are done early go on, so that the last of many rounds need not be whole. Tiles of strips are larger.
        let few = if self.strips { 8.0 } else { 4.0 };
        let rounds = if rounds < few { rounds.ceil() } else { rounds };
        let steps = self.steps(p).div_ceil(self.parts) as f64;
        let is_late = self.maps && !self.strips && self.block == 128 && rounds * steps > MANY_STEPS;
        let step = if is_late { OUT_OF_STEP * step } else { step };
        let sums = rounds * (step * steps + tile + exchange);
        rates.launch
            + sums.max(self.bytes_micros(rates, spec, p))
            + self.single_micros(rates, spec, p, rounds)
    }

    fn product(self, rates: &ImplicitGemm) -> &Product {
        if self.factors == Factors::Tf32 { &rates.tf32_product } else { &rates.half_product }
    }

    /// The time in which the memory brings and takes what one product reads and writes.
    fn bytes_micros(&self, rates: &ImplicitGemm, spec: &Conv2dSpec, p: &Problem) -> f64 {
        if !self.maps {
            return 0.0;
        }
        let outputs = p.k * p.oh * p.ow * if spec.residual { 2 } else { 1 };
        // A filter of one tap skips the pixels between its steps.
        let inputs = if p.r * p.s == 1 { p.c * p.oh * p.ow } else { p.c * p.h * p.w };
        let megabytes = 1e-6 * (p.n * (inputs + outputs) * spec.x.dtype.size()) as f64;
        megabytes / self.product(rates).megabytes
    }

    /// The additional time of one product if x is copied, and if outputs are stored one by one.
    fn single_micros(
        &self,
        rates: &ImplicitGemm,
        spec: &Conv2dSpec,
        p: &Problem,
        rounds: f64,
    ) -> f64 {
        if !self.is_single() {
            return 0.0;
        }
        let copied = gather(spec, p, *self, true) != Gather::Channels;
        let (launch, byte) = rates.copy;
        let sizes = [p.n, p.c, p.h, p.w, spec.x.dtype.size()].map(|size| size as f64);
        let copy = launch + byte * sizes.iter().product::<f64>();
        let pixels = stores_pixels(&spec.y) && pairs_lie_in_rows(*self, p);
        let vectors = stores_vectors(&spec.y, p) || pixels;
        let stores = rounds * rates.stores * (self.pixels * self.block) as f64 / 16384.0;
        let taken = |yes, micros| if yes { micros } else { 0.0 };
        taken(copied, copy) + taken(!vectors, stores)
    }
}

/// The number of clusters of `parts` blocks that most GPUs hold at a time. Some of their multiprocessors are in no whole
/// cluster.
fn clusters(multiprocessors: u32, parts: usize) -> usize {
    let whole = multiprocessors as usize / parts;
    let lost = match parts {
        1 | 2 => 0,
        _ => 2,
    };
    whole.saturating_sub(lost).max(1)
}
