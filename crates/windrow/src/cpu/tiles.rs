//! The interface of AMX: matrix products of bf16 in eight tile registers.

/// A kernel that uses tiles.
pub(crate) trait TileKernel {
    /// Must be `#[inline(always)]`, as [`Kernel::run`](super::Kernel::run).
    fn run<T: Tiles>(self, tiles: &mut T);
}

/// The number of rows of a tile, and of f32 (or pairs of bf16) in a row.
pub(crate) const SIDE: usize = 16;
/// The number of bytes in a row.
pub(crate) const ROW_BYTES: usize = SIDE * size_of::<f32>();
/// The number of bytes in a tile.
pub(crate) const TILE_BYTES: usize = SIDE * ROW_BYTES;
/// The number of bf16 in a row.
pub(crate) const TERMS: usize = 2 * SIDE;

/// Eight tiles, 0 to 7, each of [`SIDE`] rows of [`ROW_BYTES`] bytes.
///
/// Products of bf16 are exact, and sums are rounded to nearest even. Subnormal operands and results are treated as
/// zero.
pub(crate) trait Tiles {
    /// Fills a tile with zeros.
    fn zero<const TILE: usize>(&mut self);
    /// Reads a tile's rows, which are `stride` bytes apart.
    /// # Safety: they are readable.
    unsafe fn load<const TILE: usize>(&mut self, from: *const u8, stride: usize);
    /// Writes a tile's rows, `stride` bytes apart.
    /// # Safety: they are writable.
    unsafe fn store<const TILE: usize>(&mut self, to: *mut u8, stride: usize);
    /// Adds to each f32 element (i, j) of `C` the sum over p, and over h in {0, 1}, of the bf16 products `A(i, 2 p + h)
    /// * B(p, 2 j + h)`.
    fn add_products<const C: usize, const A: usize, const B: usize>(&mut self);
    /// Prefetches the cache line at `p` into the first-level cache. `p` may be any address.
    fn prefetch(&self, p: *const u8);
}

/// Loads one or two left operands of a block into tiles 4 and 5.
///
/// # Safety
/// They are readable, with rows `stride` bytes apart.
#[inline(always)]
pub(crate) unsafe fn load_left<T: Tiles, const COUNT: usize>(
    tiles: &mut T,
    [first, second]: [*const u8; 2],
    stride: usize,
) {
    // SAFETY: promised by the caller.
    unsafe {
        tiles.load::<4>(first, stride);
        if COUNT == 2 {
            tiles.load::<5>(second, stride);
        }
    }
}

/// Loads one or two right operands of a block into tiles 6 and 7.
///
/// # Safety
/// They are readable, with rows `stride` bytes apart.
#[inline(always)]
pub(crate) unsafe fn load_right<T: Tiles, const COUNT: usize>(
    tiles: &mut T,
    [first, second]: [*const u8; 2],
    stride: usize,
) {
    // SAFETY: promised by the caller.
    unsafe {
        tiles.load::<6>(first, stride);
        if COUNT == 2 {
            tiles.load::<7>(second, stride);
        }
    }
}

/// Adds the products of the `LEFT` left operands (tiles 4 and 5) and the `RIGHT` right operands (6 and 7): those of
/// tile 4 to tiles 0 and 1, those of tile 5 to tiles 2 and 3.
#[inline(always)]
pub(crate) fn add_block<T: Tiles, const LEFT: usize, const RIGHT: usize>(tiles: &mut T) {
    tiles.add_products::<0, 4, 6>();
    if RIGHT == 2 {
        tiles.add_products::<1, 4, 7>();
    }
    if LEFT == 2 {
        tiles.add_products::<2, 5, 6>();
    }
    if LEFT == 2 && RIGHT == 2 {
        tiles.add_products::<3, 5, 7>();
    }
}

#[cfg(test)]
pub(crate) use model::TileModel;

/// A software model of AMX as Intel's manual describes it, for tests on machines that do not have it.
#[cfg(test)]
mod model {
    use super::{ROW_BYTES, SIDE, Tiles};
    use half::bf16;

    pub(crate) struct TileModel {
        tiles: [[[u8; ROW_BYTES]; SIDE]; 8],
    }

    impl TileModel {
        pub(crate) fn new() -> Self {
            // What is read before it is written would be seen.
            TileModel { tiles: [[[0xff; ROW_BYTES]; SIDE]; 8] }
        }

        fn number(&self, tile: usize, i: usize, j: usize) -> f32 {
            f32::from_le_bytes(self.tiles[tile][i].as_chunks().0[j])
        }

        fn half(&self, tile: usize, i: usize, j: usize) -> f32 {
            flushed(bf16::from_le_bytes(self.tiles[tile][i].as_chunks().0[j]).to_f32())
        }
    }

    /// Zero with the sign of `x`, if `x` is subnormal.
    fn flushed(x: f32) -> f32 {
        if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
    }

    impl Tiles for TileModel {
        fn zero<const TILE: usize>(&mut self) {
            self.tiles[TILE] = [[0; ROW_BYTES]; SIDE];
        }
        #[inline(never)]
        unsafe fn load<const TILE: usize>(&mut self, from: *const u8, stride: usize) {
            for (i, row) in self.tiles[TILE].iter_mut().enumerate() {
                // SAFETY: promised by the caller.
                *row = unsafe { from.add(i * stride).cast::<[u8; ROW_BYTES]>().read_unaligned() };
            }
        }
        unsafe fn store<const TILE: usize>(&mut self, to: *mut u8, stride: usize) {
            for (i, row) in self.tiles[TILE].iter().enumerate() {
                // SAFETY: promised by the caller.
                unsafe { to.add(i * stride).cast::<[u8; ROW_BYTES]>().write_unaligned(*row) };
            }
        }
        // Instructions are used in many places: they would take long to compile.
        /// TDPBF16PS: fused sums of the even products and of the odd ones, which are then added, and their sum to C;
        /// each rounded to nearest even, with subnormal numbers as zeros (DAZ and FTZ).
        #[inline(never)]
        fn add_products<const C: usize, const A: usize, const B: usize>(&mut self) {
            for i in 0..SIDE {
                for j in 0..SIDE {
                    let mut sums = [0f32; 2];
                    for p in 0..SIDE {
                        for (h, sum) in sums.iter_mut().enumerate() {
                            let (a, b) = (self.half(A, i, 2 * p + h), self.half(B, p, 2 * j + h));
                            *sum = flushed(a.mul_add(b, *sum));
                        }
                    }
                    let products = flushed(sums[0] + sums[1]);
                    let sum = flushed(flushed(self.number(C, i, j)) + products);
                    self.tiles[C][i].as_chunks_mut().0[j] = sum.to_le_bytes();
                }
            }
        }
        fn prefetch(&self, _: *const u8) {}
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Isa, dispatch_tiles};
    use super::*;
    use crate::verification::random;
    use half::bf16;

    type Halves = [[bf16; 2 * SIDE]; SIDE];
    type Numbers = [[f32; SIDE]; SIDE];

    struct Product<'a> {
        a: &'a Halves,
        b: &'a Halves,
        c: &'a mut Numbers,
    }

    impl TileKernel for Product<'_> {
        #[inline(always)]
        fn run<T: Tiles>(self, tiles: &mut T) {
            // SAFETY: arrays of whole tiles.
            unsafe {
                tiles.load::<4>(self.a.as_ptr().cast(), ROW_BYTES);
                tiles.load::<7>(self.b.as_ptr().cast(), ROW_BYTES);
                tiles.load::<2>(self.c.as_ptr().cast(), ROW_BYTES);
                tiles.add_products::<2, 4, 7>();
                tiles.store::<2>(self.c.as_mut_ptr().cast(), ROW_BYTES);
            }
        }
    }

    fn halves(seed: u64, scale: f64) -> Halves {
        let values = random(seed, 2 * SIDE * SIDE, -scale, scale);
        std::array::from_fn(|i| std::array::from_fn(|j| bf16::from_f64(values[i * 2 * SIDE + j])))
    }

    fn numbers(seed: u64, scale: f64) -> Numbers {
        let values = random(seed, SIDE * SIDE, -scale, scale);
        std::array::from_fn(|i| std::array::from_fn(|j| values[i * SIDE + j] as f32))
    }

    /// Products of ordinary numbers, and of numbers whose products or sums are subnormal or not finite.
    #[test]
    fn products_of_tiles() {
        for (seed, scales) in
            [[1.0, 1.0, 8.0], [1e-19, 1e-19, 1e-36], [1e-39, 1.0, 1e-38], [1e19, 1e19, 1e38]]
                .into_iter()
                .enumerate()
        {
            let (a, b) = (halves(seed as u64, scales[0]), halves(seed as u64 + 9, scales[1]));
            let start = numbers(seed as u64 + 20, scales[2]);
            let mut model = start;
            Product { a: &a, b: &b, c: &mut model }.run(&mut TileModel::new());
            for (i, j) in (0..SIDE).flat_map(|i| (0..SIDE).map(move |j| (i, j))) {
                let mut scale = start[i][j].abs() as f64;
                let mut sum = start[i][j] as f64;
                for p in 0..2 * SIDE {
                    let product = a[i][p].to_f64() * b[p / 2][2 * j + p % 2].to_f64();
                    (sum, scale) = (sum + product, scale + product.abs());
                }
                let least = 40.0 * f64::from(f32::MIN_POSITIVE);
                let close =
                    (f64::from(model[i][j]) - sum).abs() <= scale * 19.0 * 2f64.powi(-24) + least;
                assert!(
                    close || scale > f64::from(f32::MAX),
                    "{seed} {i} {j}: {} {sum}",
                    model[i][j]
                );
            }
            for isa in Isa::available().into_iter().filter(|isa| isa.has_tiles()) {
                let mut c = start;
                dispatch_tiles(isa, Product { a: &a, b: &b, c: &mut c });
                let bits = |n: &Numbers| {
                    n.map(|row| row.map(|x| if x.is_nan() { 1 } else { x.to_bits() }))
                };
                assert_eq!(bits(&c), bits(&model), "{isa:?} {seed}");
            }
        }
    }
}
