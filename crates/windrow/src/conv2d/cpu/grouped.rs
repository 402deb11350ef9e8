//! Vectors over the channels of many groups: each its own group, or groups of few channels.

use super::direct::{Operands, Packing, TapSums, TapUnit};
use super::method::Task;
use super::shared::Vectors;
use super::shared::channels::{Channels, Read, SingleSums};
use super::shared::stencil::Stencil;
use crate::Result;
use crate::conv2d::Conv2dAlgorithm;
use crate::cpu::gemm::even_part;
use crate::cpu::{Kernel, MAX_LANES, Simd, SimdElement, array, dispatch};

/// The largest number of destination rows of a unit: rows that follow each other read the same rows of the source.
const ROWS: usize = 8;
/// Units of each thread at least, if there are so many rows.
const UNITS_PER_THREAD: usize = 4;

/// Channels lie next to each other. A unit is some rows of the destination in one image.
#[derive(Clone, Debug)]
pub(super) struct Grouped {
    groups: Groups,
    /// Rows of a unit.
    rows: usize,
}

/// The source channels that a vector of destination channels reads.
#[derive(Clone, Copy, Debug)]
enum Groups {
    /// The same channels of the source.
    Single,
    /// The source channels of several small groups.
    Small,
    /// The same numbers in all lanes, of one group.
    Large,
}

impl TapSums for Grouped {
    const ALGORITHM: Conv2dAlgorithm = Conv2dAlgorithm::DirectGrouped;

    /// `None` where channels do not lie next to each other, or groups do not fill vectors.
    fn new(stencil: &Stencil, task: &Task<'_>) -> Result<Option<Self>> {
        let Stencil { n, c, k, groups, src, dst, dst_size, .. } = *stencil;
        let (lanes, _) = dispatch(task.isa, Vectors);
        let groups = match (c, k) {
            _ if src[1] != 1 || dst[1] != 1 || task.isa.is_small() => return Ok(None),
            (1, 1) => Groups::Single,
            _ if c == k && lanes.is_multiple_of(k) && k * groups >= lanes => Groups::Small,
            _ if k > 0 && k.is_multiple_of(lanes) => Groups::Large,
            _ => return Ok(None),
        };
        let most = match task.threads {
            1 => ROWS,
            threads => (n * dst_size[0] / (UNITS_PER_THREAD * threads)).clamp(1, ROWS),
        };
        Ok(Some(Grouped { groups, rows: even_part(dst_size[0], most) }))
    }

    fn packing(&self, _: &Stencil) -> Packing {
        Packing::Channels
    }

    fn units(&self, stencil: &Stencil) -> usize {
        stencil.n * stencil.dst_size[0].div_ceil(self.rows)
    }

    fn scratch_len(&self, _: &Stencil) -> usize {
        0
    }

    fn explain(&self) -> String {
        let Grouped { groups, rows } = self;
        format!("lanes over channels of {groups:?} groups, {rows} rows at once").to_lowercase()
    }

    unsafe fn run<T: SimdElement>(&self, unit: TapUnit<'_, T>, _: *mut f32) {
        let TapUnit { isa, stencil, unit, operands } = unit;
        dispatch(isa, Rows { plan: self, stencil, unit, operands });
    }
}

/// Whole groups with equal numbers of source and destination channels.
#[derive(Clone, Copy)]
struct Small {
    /// The first lane of each lane's group, as bits.
    firsts: [f32; MAX_LANES],
}

impl<S: Simd> Read<S> for Small {
    const SINGLE: bool = false;
    #[inline(always)]
    fn first(self, k: usize) -> usize {
        k
    }
    #[inline(always)]
    unsafe fn load<T: SimdElement>(self, s: S, at: *const T, c: usize) -> S::F32 {
        // SAFETY: passed on; `firsts` has a number for each lane.
        unsafe {
            let firsts = s.to_bits(s.load(self.firsts.as_ptr()));
            let lanes = s.add_i32(firsts, s.to_bits(s.splat(f32::from_bits(c as u32))));
            s.permute(T::load(s, at), lanes)
        }
    }
}

/// The reader for groups with `c` source and `k` destination channels.
#[derive(Clone, Copy)]
struct Large {
    c: usize,
    k: usize,
}

impl<S: Simd> Read<S> for Large {
    const SINGLE: bool = false;
    #[inline(always)]
    fn first(self, k: usize) -> usize {
        k / self.k * self.c
    }
    #[inline(always)]
    unsafe fn load<T: SimdElement>(self, s: S, at: *const T, c: usize) -> S::F32 {
        // SAFETY: passed on.
        s.splat(unsafe { at.add(c).read() }.to_f32())
    }
}

struct Rows<'a, T> {
    plan: &'a Grouped,
    stencil: &'a Stencil,
    unit: usize,
    operands: &'a Operands<'a, T>,
}

impl<T: SimdElement> Kernel for Rows<'_, T> {
    type Output = ();
    const IS_SPECIAL: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Rows { plan, stencil, unit, operands } = self;
        let height = stencil.dst_size[0];
        let units = height.div_ceil(plan.rows);
        let (n, i) = (unit / units, unit % units * plan.rows);
        let [n_stride, _, row, col] = stencil.dst;
        let at = stencil.dst_offset + n as isize * n_stride + i as isize * row;
        let first = Channels {
            stencil,
            src: operands.src.wrapping_offset(n as isize * stencil.src[0]),
            src_strides: [stencil.src[2], stencil.src[3]],
            filter: operands.packed.as_ptr(),
            count: stencil.groups * stencil.k,
            epilogue: operands.epilogue,
            dst: operands.dst.wrapping_offset(at),
            dst_strides: [row, col],
        };
        let (c, k) = (stencil.c, stencil.k);
        let rows = i..(i + plan.rows).min(height);
        // SAFETY: the stencil's own channels and pixels.
        unsafe {
            match plan.groups {
                Groups::Single => s.outlined(SingleSums(first, rows)),
                Groups::Small => {
                    let first_lane = |lane: usize| f32::from_bits((lane / k * k) as u32);
                    first.sum(s, Small { firsts: array(first_lane) }, rows);
                }
                Groups::Large => first.sum(s, Large { c, k }, rows),
            }
        }
    }
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use super::*;
    use crate::cpu::compiled::assert_in_registers;

    #[test]
    #[cfg_attr(debug_assertions, ignore = "of a release build")]
    fn sums_stay_in_registers() {
        // AVX2: as many registers are too few for the sums of some filters.
        assert_in_registers::<Rows<'static, f32>>([13, 0]);
    }
}
