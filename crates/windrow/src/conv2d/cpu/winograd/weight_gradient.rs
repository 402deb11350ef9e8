//! The weight gradient in Winograd's domain: `dW = G^T [sum over tiles of (A dY A^T) * (B^T X B)] G`.
//!
//! A chunk of tiles of the batch is transformed at once, both x and dy. With many channels each task then multiplies a
//! block of output and of input channels for all positions of the transformed tile, and transforms it back while it is
//! in the cache. With few channels, each task computes some of the positions, for which it reads its own parts of V and
//! D. The order of the sums over tiles depends only on the problem, not on threads.

use super::super::gradient::{WeightGradient, with_gradient};
use super::super::method::Task;
use super::geometry::Geometry;
use super::input;
use super::shared::{SharedInput, in_parts};
use super::weight_stages::{BLOCK, FilterGradient, GradientTransform, Products, pitch};
use super::{Vectors, block_strides, strides4, tolerance};
use crate::conv2d::{Problem, Tile};
use crate::cpu::{
    Isa, MAX_LANES, SendPtr, SimdElement, dispatch, parallel_for, parallel_for_workers,
};
use crate::{Accuracy, DType, Result, TensorMut, TensorRef};
use std::ops::Range;

/// Twice the error of F(2, 3), and a fourth of its products less; F(6, 3) would have four times the error.
const TILE: Tile = Tile::F4;
const ALPHA: usize = TILE.alpha();
const POSITIONS: usize = ALPHA * ALPHA;

/// The bytes of V and D of a chunk, or twice the size of M if that is more, because M is read and written once for each
/// chunk.
const CHUNK_BYTES: usize = 2 << 20;
/// The number of tasks for each thread, if there are enough, so that no thread waits long for the last one.
const TASKS_A_THREAD: usize = 3;
/// Channels of a block in each direction: its part of M stays in the second-level cache.
const BLOCK_CHANNELS: usize = 64;

/// The weight gradient of a 3x3 convolution of stride and dilation 1 with one group.
#[derive(Clone, Debug)]
pub(in crate::conv2d::cpu) struct WinogradWeight {
    geometry: Geometry,
    threads: usize,
    isa: Isa,
    lanes: usize,
    /// The largest number of tiles of a chunk.
    chunk: usize,
    /// Vectors of output and of input channels of a block.
    block: [usize; 2],
    /// True if tasks are some positions of a block instead of whole blocks.
    by_positions: bool,
}

/// Time of the weight gradient in multiplications.
fn weight_cost(p: &Problem) -> f64 {
    // Operations for each element of V and D, and for each pair of channels.
    const TRANSFORM: f64 = 8.0;
    const FILTER: f64 = 250.0;
    let tiles = Geometry::new(p, TILE.m()).tiles() as f64;
    // In whole vectors, of which one may be mostly idle.
    let [c, k] = [p.c, p.k].map(|channels| channels.next_multiple_of(MAX_LANES) as f64);
    POSITIONS as f64 * tiles * (c * k + TRANSFORM * (c + k)) + FILTER * c * k
}

impl WinogradWeight {
    /// The Winograd weight gradient, if it is faster than the product for this convolution.
    pub(in crate::conv2d::cpu) fn prepare(
        task: &Task<'_>,
    ) -> Result<Option<Box<dyn WeightGradient>>> {
        // A term of the direct sum takes longer than one of the products: it is packed beside few others.
        const TERM: f64 = 1.25;
        let p = &task.sizes();
        let terms = (p.n * p.oh * p.ow * p.k * p.taps()) as f64;
        let allowed = p.is_winograd() && task.spec.accuracy != Accuracy::Exact;
        let exists = task.problem.n > 0 && terms > 0.0;
        let pays = allowed && exists && weight_cost(p) < TERM * terms;
        Ok(pays.then(|| Box::new(WinogradWeight::new(task.problem, task.isa, task.threads)) as _))
    }

    /// The gradient for a problem with [`Problem::is_winograd`] and at least one element.
    fn new(problem: &Problem, isa: Isa, threads: usize) -> Self {
        debug_assert!(problem.is_winograd());
        let geometry = Geometry::new(problem, TILE.m());
        let (lanes, _) = dispatch(isa, Vectors);
        let mut plan = WinogradWeight {
            geometry,
            threads,
            isa,
            lanes,
            chunk: 1,
            block: [1; 2],
            by_positions: false,
        };
        let [k, c] = plan.vectors();
        let tile_bytes = POSITIONS * (k + c) * lanes * size_of::<f32>();
        let m_bytes = k * lanes * c * pitch(ALPHA) * lanes * size_of::<f32>();
        let tiles = geometry.tiles().max(1);
        let most = (CHUNK_BYTES.max(2 * m_bytes) / tile_bytes.max(1)).clamp(1, tiles);
        plan.chunk = tiles.div_ceil(tiles.div_ceil(most));
        plan.block = [k, c].map(|vectors| vectors.clamp(1, (BLOCK_CHANNELS / lanes).max(1)));
        plan.by_positions = plan.blocks() < 2 * threads;
        plan
    }
}

impl WeightGradient for WinogradWeight {
    fn tile(&self) -> Option<Tile> {
        Some(TILE)
    }

    /// Relative to `reference::winograd_weight_scale`: as the forward direction's, which sums as many terms in
    /// registers, and a rounding for each addition beyond them.
    fn tolerance(&self) -> f64 {
        let blocks = self.geometry.tiles().div_ceil(BLOCK) + self.chunks();
        tolerance(TILE) + blocks as f64 * DType::F32.unit_roundoff()
    }

    fn scratch_len(&self) -> usize {
        let [d, v] = self.strides().map(|strides| POSITIONS * strides[0]);
        d + v + self.workers() * input::STAGING + self.slots() * self.slot_len()
    }

    fn run(
        &self,
        x: &TensorRef<'_>,
        dy: &TensorRef<'_>,
        dw: &mut TensorMut<'_>,
        scratch: &mut [f32],
    ) {
        assert!(scratch.len() >= self.scratch_len(), "workspace");
        let strides = strides4(dw.strides());
        let (dtype, to, scratch) = (dw.dtype(), dw.as_mut_ptr(), scratch.as_mut_ptr());
        // SAFETY: the plan was made for these layouts; dw is borrowed mutably.
        with_gradient!(x.dtype(), dtype, (T, W) => unsafe {
            self.sum::<T, W>(x, dy, to.cast(), strides, scratch);
        });
    }
}

impl WinogradWeight {
    /// # Safety
    /// x and dy are the problem's, of type T. The elements of dw, whose strides of k, c, row and column are given, are
    /// in memory, and nothing else accesses them. `scratch` holds [`WeightGradient::scratch_len`] elements.
    unsafe fn sum<T: SimdElement, W: SimdElement>(
        &self,
        x: &TensorRef<'_>,
        dy: &TensorRef<'_>,
        dw: *mut W,
        strides: [isize; 4],
        scratch: *mut f32,
    ) {
        let [d_len, v_len] = self.strides().map(|strides| POSITIONS * strides[0]);
        // SAFETY: `scratch_len` is the sum of these.
        let [d, v, staging, slots] = unsafe {
            let (v, staging) = (scratch.add(d_len), scratch.add(d_len + v_len));
            [scratch, v, staging, staging.add(self.workers() * input::STAGING)].map(SendPtr)
        };
        let dw = SendPtr(dw);
        for chunk in 0..self.chunks() {
            let tiles = chunk * self.chunk..self.geometry.tiles().min((chunk + 1) * self.chunk);
            let input = SharedInput {
                geometry: &self.geometry,
                frames: None,
                isa: self.isa,
                lanes: self.lanes,
                threads: self.threads,
                tiles: &tiles,
                v,
                v_strides: self.strides()[1],
                staging,
            };
            // SAFETY: passed on.
            unsafe {
                input.transform::<T, ALPHA>(x, None);
                self.transform_dy::<T>(dy, &tiles, staging, d);
            }
            let (accumulate, is_last) = (chunk > 0, chunk + 1 == self.chunks());
            let operands = || (d.get().cast_const(), v.get().cast_const());
            if !self.by_positions {
                parallel_for_workers(self.threads, self.blocks(), |worker, block| {
                    let slot = if self.chunks() == 1 { worker } else { block };
                    // SAFETY: a block has a slot for as long as it is needed, and its own channels of dw.
                    unsafe {
                        let m = slots.get().add(slot * self.slot_len());
                        self.multiply(block, 0..POSITIONS, tiles.len(), operands(), m, accumulate);
                        if is_last {
                            self.transform_back(block, 0..self.block[0], m, dw.get(), strides);
                        }
                    }
                });
                continue;
            }
            let at_once = self.positions_at_once();
            let parts = POSITIONS / at_once;
            parallel_for(self.threads, self.blocks() * parts, |task| {
                let (block, part) = (task / parts, task % parts);
                let positions = part * at_once..(part + 1) * at_once;
                // SAFETY: each block has a slot, in which a task has its own positions.
                unsafe {
                    let m = slots.get().add(block * self.slot_len());
                    self.multiply(block, positions, tiles.len(), operands(), m, accumulate);
                }
            });
            if is_last {
                let vectors = self.block[0];
                parallel_for(self.threads, self.blocks() * vectors, |task| {
                    let (block, vector) = (task / vectors, task % vectors);
                    // SAFETY: the slots hold all sums; a task has its own channels of dw.
                    unsafe {
                        let m = slots.get().add(block * self.slot_len());
                        self.transform_back(block, vector..vector + 1, m, dw.get(), strides);
                    }
                });
            }
        }
    }

    /// D of a chunk.
    ///
    /// # Safety
    /// dy has the problem's elements, `staging` [`input::STAGING`] for each thread; D holds the chunk.
    unsafe fn transform_dy<T: SimdElement>(
        &self,
        dy: &TensorRef<'_>,
        tiles: &Range<usize>,
        staging: SendPtr<f32>,
        d: SendPtr<f32>,
    ) {
        let strides = strides4(dy.strides());
        let dy = SendPtr(dy.as_ptr().cast_mut());
        let [d_strides, _] = self.strides();
        let (channels, lanes) = (self.geometry.problem.k, self.lanes);
        in_parts(self.threads, tiles, channels, (lanes, d_strides[1]), |worker, part| {
            let transform = GradientTransform::<T, ALPHA> {
                geometry: &self.geometry,
                dy: dy.get().cast_const().cast(),
                strides,
                channels: part.channels,
                tiles: part.tiles,
                // SAFETY: a thread has its own staging memory; each task writes its own tiles and channels of D.
                staging: unsafe { staging.get().add(worker * input::STAGING) },
                // SAFETY: a part of D, which holds the chunk.
                d: unsafe { d.get().add(part.offset) },
                d_strides,
            };
            dispatch(self.isa, transform);
        });
    }

    /// # Safety
    /// D and V hold `tiles` tiles, m holds a block, whose sums so far are kept if `accumulate`.
    unsafe fn multiply(
        &self,
        block: usize,
        positions: Range<usize>,
        tiles: usize,
        (d, v): (*const f32, *const f32),
        m: *mut f32,
        accumulate: bool,
    ) {
        let [k, c] = self.block_of(block);
        let [d_strides, v_strides] = self.strides();
        let products = Products::<ALPHA> {
            positions,
            tiles,
            vectors: [k.len(), c.len()],
            // SAFETY: vectors of channels of D.
            d: unsafe { d.add(k.start * d_strides[1]) },
            d_strides,
            // SAFETY: vectors of channels of V.
            v: unsafe { v.add(c.start * v_strides[1]) },
            v_strides,
            m,
            accumulate,
        };
        dispatch(self.isa, products);
    }

    /// Some vectors of output channels of a block, as far as it has them.
    ///
    /// # Safety
    /// m holds the block's sums; dw is as for [`WinogradWeight::run`].
    unsafe fn transform_back<W: SimdElement>(
        &self,
        block: usize,
        some: Range<usize>,
        m: *const f32,
        dw: *mut W,
        strides: [isize; 4],
    ) {
        let [k, c] = self.block_of(block);
        let Problem { k: outputs, c: inputs, .. } = self.geometry.problem;
        let at = |vector: usize, exist: usize| exist.min(vector * self.lanes);
        let [first, end] =
            [some.start, some.end].map(|vector| at(k.end.min(k.start + vector), outputs));
        let gradient = FilterGradient::<W, ALPHA> {
            // SAFETY: inside of the block's sums.
            m: unsafe { m.add(some.start * self.lanes * c.len() * pitch(ALPHA) * self.lanes) },
            vectors: c.len(),
            channels: [first..end, c.start * self.lanes..at(c.end, inputs)],
            dw,
            strides,
        };
        dispatch(self.isa, gradient);
    }

    /// Vectors of output and of input channels.
    fn vectors(&self) -> [usize; 2] {
        [self.geometry.problem.k, self.geometry.problem.c]
            .map(|channels| channels.div_ceil(self.lanes))
    }

    /// Strides of D and V [position, vector, tile, LANES].
    fn strides(&self) -> [[usize; 2]; 2] {
        self.vectors().map(|vectors| block_strides(self.chunk, vectors, self.lanes))
    }

    fn chunks(&self) -> usize {
        self.geometry.tiles().div_ceil(self.chunk)
    }

    /// The positions of a block in one task, if tasks are not whole blocks: a row, or less if a row would leave threads
    /// idle.
    fn positions_at_once(&self) -> usize {
        let is_enough = |positions: &usize| {
            self.blocks() * POSITIONS / positions >= TASKS_A_THREAD * self.threads
        };
        [ALPHA, ALPHA / 2, ALPHA / 3].into_iter().find(is_enough).unwrap_or(1)
    }

    /// Blocks of channels.
    fn blocks(&self) -> usize {
        let [k, c] = self.vectors();
        k.div_ceil(self.block[0]) * c.div_ceil(self.block[1])
    }

    /// Vectors of output and of input channels of a block.
    fn block_of(&self, block: usize) -> [Range<usize>; 2] {
        let vectors = self.vectors();
        let columns = vectors[1].div_ceil(self.block[1]);
        let at = [block / columns, block % columns];
        std::array::from_fn(|i| {
            let first = at[i] * self.block[i];
            first..vectors[i].min(first + self.block[i])
        })
    }

    /// Threads that have something to do.
    fn workers(&self) -> usize {
        self.threads.max(1)
    }

    /// Blocks that exist at once.
    fn slots(&self) -> usize {
        let each = self.by_positions || self.chunks() > 1;
        if each { self.blocks() } else { self.workers().min(self.blocks()) }
    }

    fn slot_len(&self) -> usize {
        let [k, c] = self.block;
        (k * self.lanes * c * pitch(ALPHA) * self.lanes).next_multiple_of(MAX_LANES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::reference;
    use crate::verification::random;
    use crate::{Tensor, TensorDesc};

    struct Inputs {
        problem: Problem,
        x: Tensor,
        dy: Tensor,
    }

    impl Inputs {
        fn new(x: [usize; 4], k: usize) -> Self {
            let w = TensorDesc::contiguous(DType::F32, &[k, x[1], 3, 3]).unwrap();
            let x = TensorDesc::contiguous(DType::F32, &x).unwrap();
            let problem = Problem::new(&x, &w, [[1; 2]; 3], 1, false).unwrap();
            // As after a ReLU.
            let pixels: Vec<f32> =
                random(1, x.layout.len(), -1.0, 1.0).iter().map(|&x| x.max(0.0) as f32).collect();
            let shape = problem.y_shape();
            let dy: Vec<f32> =
                random(2, shape.iter().product(), -1.0, 1.0).iter().map(|&x| x as f32).collect();
            let x = Tensor::from_slice(&pixels, x.shape()).unwrap();
            Inputs { problem, x, dy: Tensor::from_slice(&dy, &shape).unwrap() }
        }

        /// The gradient by a plan whose memory was used before.
        fn run(&self, plan: &WinogradWeight) -> Tensor {
            let Problem { c, k, .. } = self.problem;
            let mut dw = Tensor::from_slice(&vec![f32::NAN; k * c * 9], &[k, c, 3, 3]).unwrap();
            let mut scratch = vec![f32::NAN; plan.scratch_len()];
            plan.run(&self.x.as_ref(), &self.dy.as_ref(), &mut dw.as_mut(), &mut scratch);
            dw
        }

        fn values(&self) -> [Vec<f64>; 2] {
            [&self.x, &self.dy].map(|t| t.as_ref().to_f64_vec().unwrap())
        }
    }

    /// One chunk and several give the same within the tolerance; any number of threads gives the same bits.
    #[test]
    fn chunks_and_threads() {
        for (x, k) in [([3, 37, 9, 11], 21), ([1, 5, 3, 2], 70), ([2, 130, 6, 30], 3)] {
            let inputs = Inputs::new(x, k);
            let [x, dy] = inputs.values();
            for (isa, chunk) in
                Isa::available().into_iter().flat_map(|isa| [(isa, None), (isa, Some(3))])
            {
                let plans = [1, 2, 5, 16].map(|threads| {
                    let mut plan = WinogradWeight::new(&inputs.problem, isa, threads);
                    plan.chunk = chunk.unwrap_or(plan.chunk).min(plan.chunk);
                    plan
                });
                let results = plans.each_ref().map(|plan| inputs.run(plan));
                let bits = |t: &Tensor| t.to_vec::<f32>().unwrap();
                assert!(results.iter().all(|result| bits(result) == bits(&results[0])));
                let scale = reference::winograd_weight_scale(&inputs.problem, TILE.m(), &x, &dy);
                let want = reference::backward_weight(&inputs.problem, &x, &dy).unwrap();
                let want = want.widened(Some(scale.unwrap()));
                let check = want.check("dw", &results[0].as_ref(), plans[0].tolerance()).unwrap();
                assert!(
                    check.comparison.passed(),
                    "{} {chunk:?}: {}",
                    isa.name(),
                    check.comparison
                );
            }
        }
    }

    /// The largest error relative to its scale, and the relative RMS error, of sums over 1,568 tiles.
    #[test]
    fn errors_of_many_tiles() {
        let inputs = Inputs::new([8, 16, 56, 56], 32);
        let [x, dy] = inputs.values();
        let scale = reference::winograd_weight_scale(&inputs.problem, TILE.m(), &x, &dy).unwrap();
        let want = reference::backward_weight(&inputs.problem, &x, &dy).unwrap().values;
        for isa in Isa::available() {
            let got = inputs.run(&WinogradWeight::new(&inputs.problem, isa, 2));
            let got = got.as_ref().to_f64_vec().unwrap();
            let square = |x: f64| x * x;
            let worst =
                (0..want.len()).map(|i| (got[i] - want[i]).abs() / scale[i]).fold(0.0, f64::max);
            let error: f64 = got.iter().zip(&want).map(|(a, b)| square(a - b)).sum();
            let rms = (error / want.iter().map(|x| square(*x)).sum::<f64>()).sqrt();
            println!("{}: {worst:.2e} of the scale, rms {rms:.2e}", isa.name());
            assert!(worst <= 1e-6 && rms <= 4e-6, "{}: {worst:e} {rms:e}", isa.name());
        }
    }
}
