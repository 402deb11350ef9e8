//! The product `M = U V` of each position: `m[k, tile] = sum_c u[k, c] v[c, tile]`.
//!
//! Vectors run over output channels. The micro-kernel keeps a block of [`PANEL`] vectors of output
//! channels times up to [`max_group`] tiles in registers over all input channels, so each vector
//! of U serves a group of tiles and each broadcast element of V serves a panel.

use super::prefetch::Ahead;
use crate::cpu::{Kernel, Simd};
use std::ops::Range;

/// Vectors of output channels in a panel of U.
pub(super) const PANEL: usize = 2;

/// Input channels of a panel's part of U, which stays in the first-level cache while groups of tiles are multiplied with it.
pub(super) const BLOCK: usize = 128;

/// Input channels that are summed in registers before they are added to M, whole vectors. Two levels of sums keep the
/// rounding error of many channels down: it is most of the error of Winograd's algorithm.
const CHUNK: usize = 32;

/// Input channels of a round of the micro-kernel's inner loop. The compiler unrolls only loops of constant length.
const UNROLLED: usize = 4;

/// The largest number of tiles of one micro-kernel call: `PANEL` sums for each take three quarters of the registers.
/// With two tiles more, the compiler moved sums to memory and back: half the speed.
pub(super) const fn max_group(registers: usize) -> usize {
    registers * 3 / 4 / PANEL
}

/// Products of a block of tiles with a range of panels, for all positions.
pub(super) struct Gemm<'a, 'b> {
    /// Input channels.
    pub c: usize,
    /// Positions of the transformed tile.
    pub positions: usize,
    /// Tiles in the block.
    pub tiles: usize,
    /// Vectors of output channels.
    pub vectors: usize,
    /// U [position, panel, c, PANEL * LANES] from the first panel wanted; the last panel can hold
    /// one vector instead.
    pub u: *const f32,
    /// Distance between positions of U.
    pub u_position: usize,
    /// V [position, c / LANES, tile, LANES]
    pub v: *const f32,
    /// Distances between positions and between channel vectors of V.
    pub v_strides: [usize; 2],
    /// M [position, k / LANES, tile, LANES]
    pub m: *mut f32,
    /// Distances between positions and between channel vectors of M.
    pub m_strides: [usize; 2],
    /// True if M holds sums over earlier channels, to which these are added.
    pub accumulate: bool,
    /// True if other threads formed V, so that it is not in the second-level cache.
    pub v_is_far: bool,
    /// What is prefetched meanwhile.
    pub ahead: Ahead<'a, 'b>,
}

/// Micro-kernel calls for the products of a block.
pub(super) fn calls(
    positions: usize,
    c: usize,
    vectors: usize,
    tiles: usize,
    registers: usize,
) -> usize {
    positions
        * vectors.div_ceil(PANEL)
        * c.div_ceil(BLOCK).max(1)
        * tiles.div_ceil(max_group(registers))
}

impl Kernel for Gemm<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let group = max_group(S::REGISTERS);
        let groups = self.tiles.div_ceil(group);
        for position in 0..self.positions {
            for vector in (0..self.vectors).step_by(PANEL) {
                for channel in (0..self.c.max(1)).step_by(BLOCK) {
                    // Groups as even as possible: 13 tiles are 7 and 6, not 12 and 1.
                    for g in 0..groups {
                        let tile = g * self.tiles / groups;
                        let count = (g + 1) * self.tiles / groups - tile;
                        // SAFETY: inside of U, V and M by their documented shapes.
                        unsafe {
                            self.product(s, position, vector, channel, tile..tile + count, g)
                        };
                        self.ahead.some(s);
                    }
                }
            }
        }
    }
}

impl Gemm<'_, '_> {
    /// The start of V for some channels (whole vectors) and tiles.
    #[inline(always)]
    fn v_at<S: Simd>(&self, position: usize, channel: usize, tile: usize) -> *const f32 {
        let vector = position * self.v_strides[0] + channel / S::LANES * self.v_strides[1];
        self.v.wrapping_add(vector + tile * S::LANES)
    }

    /// V of the products that follow those of all tiles.
    #[inline(always)]
    fn v_behind<S: Simd>(&self, position: usize, vector: usize, channel: usize) -> *const f32 {
        match () {
            () if channel + BLOCK < self.c => self.v_at::<S>(position, channel + BLOCK, 0),
            () if vector + PANEL < self.vectors => self.v_at::<S>(position, 0, 0),
            () => self.v_at::<S>(position + 1, 0, 0),
        }
    }

    /// Adds the products of a block of channels (the first: stores them) for a panel and a group.
    ///
    /// # Safety
    /// All indices must be inside of U, V and M.
    #[inline(always)]
    unsafe fn product<S: Simd>(
        &self,
        s: S,
        position: usize,
        vector: usize,
        channel: usize,
        tiles: Range<usize>,
        group: usize,
    ) {
        let panel = PANEL.min(self.vectors - vector);
        let c = BLOCK.min(self.c - channel);
        let of_position = (vector * self.c + panel * channel) * S::LANES;
        let is_last = channel + c >= self.c && vector + panel >= self.vectors;
        let next_u = if is_last { self.u_position - of_position } else { c * panel * S::LANES };
        let next_v = match tiles.end < self.tiles {
            true => self.v_at::<S>(position, channel, tiles.end),
            false => self.v_behind::<S>(position, vector, channel),
        };
        // SAFETY: by the caller's promise.
        let operands = unsafe {
            Operands {
                c,
                u: self.u.add(position * self.u_position + of_position),
                v: self.v_at::<S>(position, channel, tiles.start),
                v_vector: self.v_strides[1],
                m: self.m.add(
                    position * self.m_strides[0]
                        + vector * self.m_strides[1]
                        + tiles.start * S::LANES,
                ),
                m_vector: self.m_strides[1],
                accumulate: self.accumulate || channel > 0,
                next_u: next_u + group % panel * c * S::LANES,
                next_v,
                v_is_far: self.v_is_far,
            }
        };
        // SAFETY: the operands lie inside of U, V and M, by the caller's promise.
        unsafe {
            if panel == PANEL {
                operands.run_group::<S, PANEL>(s, tiles.len());
            } else {
                operands.run_group::<S, 1>(s, tiles.len());
            }
        }
    }
}

/// The operands of one micro-kernel call.
struct Operands {
    c: usize,
    u: *const f32,
    v: *const f32,
    v_vector: usize,
    m: *mut f32,
    m_vector: usize,
    accumulate: bool,
    /// The distance in U of what is prefetched meanwhile: a vector of each row of the next block of channels, so that
    /// two groups of tiles prefetch all of it.
    next_u: usize,
    /// The next group of tiles of V, prefetched meanwhile if V is far.
    next_v: *const f32,
    v_is_far: bool,
}

impl Operands {
    /// # Safety
    /// The operands must reach `c` channels, `N` vectors of outputs and `tiles` tiles, of which there
    /// are at most `max_group`.
    #[inline(always)]
    unsafe fn run_group<S: Simd, const N: usize>(self, s: S, tiles: usize) {
        macro_rules! sizes {
            ($($t:literal)*) => {
                match tiles {
                    // SAFETY: passed on.
                    $($t if const { $t <= max_group(S::REGISTERS) } => unsafe {
                        match self.v_is_far {
                            true => self.micro::<S, N, $t, true>(s),
                            false => self.micro::<S, N, $t, false>(s),
                        }
                    },)*
                    _ => unreachable!("a group of {tiles} tiles"),
                }
            };
        }
        sizes!(1 2 3 4 5 6 7 8 9 10 11 12)
    }

    /// `FAR` is `v_is_far`: a branch among the products made the compiler move sums to memory and back.
    ///
    /// # Safety
    /// As [`Operands::run_group`] with `T` tiles.
    #[inline(always)]
    unsafe fn micro<S: Simd, const N: usize, const T: usize, const FAR: bool>(self, s: S) {
        const { assert!(S::LANES.is_multiple_of(UNROLLED) && CHUNK.is_multiple_of(S::LANES)) };
        let next_u = self.u.wrapping_add(self.next_u);
        let mut at = Channel { u: self.u, v: self.v, next_u, next_v: self.next_v };
        let (mut left, mut accumulate) = (self.c, self.accumulate);
        // SAFETY: `c` rows of U and `c` channels of V in vectors of LANES are readable, and the
        // sums' places in M are writable, by the caller's promise.
        unsafe {
            loop {
                let mut sums = [[s.zero(); N]; T];
                let behind = left.saturating_sub(CHUNK);
                let mut lane = 0;
                // One loop over rounds of all vectors. The compiler also unrolled a loop over the lanes of a vector,
                // and then moved sums to memory.
                while left - behind >= UNROLLED {
                    for i in 0..UNROLLED {
                        at.multiply::<S, N, T, FAR>(s, lane + i, &mut sums);
                    }
                    lane += UNROLLED;
                    left -= UNROLLED;
                    if lane == S::LANES {
                        lane = 0;
                        at.v = at.v.wrapping_add(self.v_vector);
                        at.next_v = at.next_v.wrapping_add(self.v_vector);
                    }
                }
                for i in 0..left - behind {
                    at.multiply::<S, N, T, FAR>(s, lane + i, &mut sums);
                }
                left = behind;
                for (t, sum) in sums.iter().enumerate() {
                    for (i, sum) in sum.iter().enumerate() {
                        let m = self.m.add(i * self.m_vector + t * S::LANES);
                        s.store(m, if accumulate { s.add(s.load(m), *sum) } else { *sum });
                    }
                }
                if left == 0 {
                    break;
                }
                accumulate = true;
            }
        }
    }
}

/// The place of the next channel in U, and of its vector of channels in V.
struct Channel {
    u: *const f32,
    v: *const f32,
    /// What is prefetched meanwhile.
    next_u: *const f32,
    next_v: *const f32,
}

impl Channel {
    /// Adds the products of a channel, the `lane`-th of its vector.
    ///
    /// # Safety
    /// `N` vectors of U and `T` tiles of V must be readable.
    #[inline(always)]
    unsafe fn multiply<S: Simd, const N: usize, const T: usize, const FAR: bool>(
        &mut self,
        s: S,
        lane: usize,
        sums: &mut [[S::F32; N]; T],
    ) {
        // SAFETY: by the caller's promise.
        unsafe {
            let mut row = [s.zero(); N];
            for (i, r) in row.iter_mut().enumerate() {
                *r = s.load(self.u.add(i * S::LANES));
            }
            for (t, sum) in sums.iter_mut().enumerate() {
                let x = s.splat(*self.v.add(t * S::LANES + lane));
                for (n, sum) in sum.iter_mut().enumerate() {
                    *sum = s.mul_add(row[n], x, *sum);
                }
            }
            s.prefetch(self.next_u);
            self.next_u = self.next_u.wrapping_add(S::LANES);
            if FAR {
                s.prefetch_near(self.next_v.wrapping_add(lane * S::LANES));
            }
            self.u = self.u.add(N * S::LANES);
        }
    }
}
