//! Vectors over channels in groups: each its own group, those of several groups of few channels, or those of one group.

use super::direct::{Operands, Packing, TapSums, TapUnit};
use super::method::Task;
use super::shared::Vectors;
use super::shared::channels::{Channels, HalfSums, Read, SingleSums, pack_with_half};
use super::shared::epilogue::Epilogue;
use super::shared::pack::PackFilter;
use super::shared::stencil::Stencil;
use crate::conv2d::Conv2dAlgorithm;
use crate::cpu::gemm::even_part;
use crate::cpu::{
    Isa, Kernel, MAX_LANES, SendPtr, Simd, SimdElement, array, dispatch, parallel_for,
};
use crate::{DType, Result};
use std::ops::Range;

/// The largest number of destination rows of a unit: rows that follow each other read the same rows of the source.
const ROWS: usize = 8;
/// Units of each thread at least, if there are so many rows.
const UNITS_PER_THREAD: usize = 4;
/// The fewest pixels of a row that are summed at a time with constant numbers of columns.
const PIXELS: usize = 7;

/// Channels lie next to each other. A unit is some rows of the destination in one image, of one group if that is large.
#[derive(Clone, Debug)]
pub(super) struct Grouped {
    groups: Groups,
    /// Channels of a whole vector.
    lanes: usize,
    /// The last vector of a large group is summed with the half one after it.
    with_half: bool,
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
    /// The same numbers in all lanes, of one group: whole vectors of its destination channels, then half a vector.
    Large,
}

impl Groups {
    /// `None` where channels do not lie next to each other, or groups do not fill vectors. With the channels of a whole
    /// vector.
    fn of(stencil: &Stencil, isa: Isa) -> Option<(Self, usize)> {
        let Stencil { c, k, groups, src, dst, .. } = *stencil;
        if src[1] != 1 || dst[1] != 1 || isa.is_small() {
            return None;
        }
        let ((lanes, _), half) = (dispatch(isa, Vectors), dispatch(isa, HalfLength));
        let groups = match (c, k) {
            (1, 1) => Groups::Single,
            _ if k > 0 && k.is_multiple_of(lanes) => Groups::Large,
            _ if c == k && lanes.is_multiple_of(k) && k * groups >= lanes => Groups::Small,
            _ if k > 0 && k.is_multiple_of(half) => Groups::Large,
            _ => return None,
        };
        Some((groups, lanes))
    }

    /// Groups that are units of their own.
    fn units(self, stencil: &Stencil) -> usize {
        if matches!(self, Groups::Large) { stencil.groups } else { 1 }
    }
}

/// True if a filter's columns are those of usual 3x3 filters, and rows have enough pixels for them.
fn is_window(stencil: &Stencil) -> bool {
    let Stencil { cols, step, dst_size, .. } = stencil;
    let follow = cols.windows(2).all(|taps| taps[0].offset + 1 == taps[1].offset);
    cols.len() == 3 && follow && step[1] <= 2 && dst_size[1] >= PIXELS
}

/// True if at most one column of a window with a step of 1 lies outside of the image on either side.
fn is_padded_by_one(stencil: &Stencil) -> bool {
    let first = stencil.cols[0].offset;
    let end = (stencil.dst_size[1] + stencil.cols.len() - 1) as isize + first;
    first >= -1 && end <= stencil.src_size[1] as isize + 1
}

/// True if the sums of large groups are faster than matrix products.
///
/// Measured on Zen 4 by one thread with its AVX2 and its AVX-512, for 3x3 filters of groups of 8 to 232 channels, 7 to 56
/// pixels wide: 1.3 to 3 times as fast for 24 channels. With AVX2 matrix products are as fast from 48 channels on, with a
/// stride from 32 on. The conversion of an f16 in all lanes takes longer than its load, and with a stride it is used for
/// fewer products.
pub(super) fn pays(task: &Task<'_>) -> bool {
    /// The distance of pixels that fall into one set of a first-level cache.
    const PAGE: usize = 4096;
    let Stencil { groups, k, step, src, .. } = task.stencil;
    let dtype = task.spec.x.dtype;
    // More columns than such a set has room for.
    let (is_f16, strides) = (dtype == DType::F16, step[1] > 1);
    let distance = src[3].unsigned_abs().wrapping_mul(dtype.size());
    let collides = strides && distance.is_multiple_of(PAGE);
    let (_, registers) = dispatch(task.isa, Vectors);
    let most = match registers {
        32.. if is_f16 && strides => 31,
        32.. => usize::MAX,
        _ if is_f16 || strides => 31,
        _ => 47,
    };
    cfg!(target_arch = "x86_64")
        && groups > 1
        && is_window(&task.stencil)
        && !collides
        && k <= most
        && matches!(Groups::of(&task.stencil, task.isa), Some((Groups::Large, _)))
}

impl TapSums for Grouped {
    const ALGORITHM: Conv2dAlgorithm = Conv2dAlgorithm::DirectGrouped;

    fn new(stencil: &Stencil, task: &Task<'_>) -> Result<Option<Self>> {
        let Some((groups, lanes)) = Groups::of(stencil, task.isa) else { return Ok(None) };
        let Stencil { n, dst_size, .. } = *stencil;
        let most = match task.threads {
            1 => ROWS,
            threads => {
                let rows = n * dst_size[0] * groups.units(stencil);
                (rows / (UNITS_PER_THREAD * threads)).clamp(1, ROWS)
            }
        };
        let with_half = matches!(groups, Groups::Large)
            && is_window(stencil)
            && stencil.step[1] == 1
            && is_padded_by_one(stencil)
            && stencil.c.is_multiple_of(2)
            && stencil.k > lanes
            && !stencil.k.is_multiple_of(lanes);
        Ok(Some(Grouped { groups, lanes, with_half, rows: even_part(dst_size[0], most) }))
    }

    fn packing(&self, stencil: &Stencil) -> Packing {
        match self.groups {
            Groups::Single | Groups::Small => Packing::Channels,
            Groups::Large => {
                let len = stencil.groups * stencil.k * stencil.terms();
                let width = if self.with_half { self.lanes * 3 / 2 } else { self.lanes };
                Packing::Own { len, width }
            }
        }
    }

    /// Packs [group, vector, filter row, c, filter column, channel of the vector], but the last vector of a group with the
    /// half one as [`pack_with_half`] does.
    unsafe fn pack<T: SimdElement>(
        &self,
        stencil: &Stencil,
        filter: *const T,
        packed: &mut [f32],
        (isa, threads): (Isa, usize),
    ) {
        let (k, terms) = (stencil.k, stencil.terms());
        let vectors = if self.with_half { k / self.lanes } else { k.div_ceil(self.lanes) };
        let (filter, packed) = (SendPtr(filter.cast_mut()), SendPtr(packed.as_mut_ptr()));
        parallel_for(threads, stencil.groups * vectors, |task| {
            let (group, first) = (task / vectors, task % vectors * self.lanes);
            let to = packed.get().wrapping_add((group * k + first) * terms);
            let (filter, width) = (filter.get(), self.lanes.min(k - first));
            if self.with_half && first + 2 * width > k {
                // SAFETY: passed on; these channels' own part.
                return unsafe { pack_with_half(stencil, filter, (group, first, width), to) };
            }
            let cols_last = true;
            dispatch(isa, PackFilter { stencil, filter, group, k: first, width, to, cols_last });
        });
    }

    /// Rows of an image, and of these all groups: they read the same lines of the cache.
    fn units(&self, stencil: &Stencil) -> usize {
        stencil.n * stencil.dst_size[0].div_ceil(self.rows) * self.groups.units(stencil)
    }

    fn scratch_len(&self, _: &Stencil) -> usize {
        0
    }

    fn explain(&self) -> String {
        let Grouped { groups, rows, .. } = self;
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

/// The reader for one group, of filters with so many terms.
#[derive(Clone, Copy)]
struct Large {
    terms: usize,
}

impl<S: Simd> Read<S> for Large {
    const SINGLE: bool = false;
    const BROADCASTS: bool = true;
    #[inline(always)]
    fn first(self, _: usize) -> usize {
        0
    }
    #[inline(always)]
    fn filter(self, k: usize, _: usize) -> (usize, usize) {
        (k * self.terms, S::LANES)
    }
    #[inline(always)]
    unsafe fn load<T: SimdElement>(self, s: S, at: *const T, c: usize) -> S::F32 {
        // SAFETY: passed on.
        unsafe { T::splat(s, at.add(c)) }
    }
}

/// The sums of some rows of whole vectors of a group's channels. Whoever makes it promises what [`Channels::sum`] asks for.
struct LargeSums<'a, T>(Channels<'a, T, T>, Range<usize>);

impl<T: SimdElement> Kernel for LargeSums<'_, T> {
    type Output = ();
    const IS_SPECIAL: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let LargeSums(channels, rows) = self;
        let terms = channels.stencil.terms();
        // SAFETY: promised by whoever has made it.
        unsafe { channels.sum(s, Large { terms }, rows) };
    }
}

/// Asks an instruction set for the length of half a vector.
struct HalfLength;

impl Kernel for HalfLength {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::Half::LANES
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
        let (groups, units) = (plan.groups.units(stencil), height.div_ceil(plan.rows));
        let (unit, group) = (unit / groups, unit % groups);
        let (n, i) = (unit / units, unit % units * plan.rows);
        let [n_stride, _, row, col] = stencil.dst;
        let at = stencil.dst_offset + n as isize * n_stride + i as isize * row;
        let all = Channels {
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
                Groups::Single => s.outlined(SingleSums(all, rows)),
                Groups::Small => {
                    let first_lane = |lane: usize| f32::from_bits((lane / k * k) as u32);
                    all.sum(s, Small { firsts: array(first_lane) }, rows);
                }
                Groups::Large => {
                    let whole = k / S::LANES * S::LANES;
                    let with_half = plan.with_half && S::Half::LANES < S::LANES;
                    let alone = if with_half { whole - S::LANES } else { whole };
                    let part = |first: usize, count: usize| {
                        let (src, first) = (all.src.wrapping_add(group * c), group * k + first);
                        let filter = all.filter.wrapping_add(first * stencil.terms());
                        let bias = all.epilogue.bias;
                        let bias = if bias.is_null() { bias } else { bias.wrapping_add(first) };
                        let epilogue = Epilogue { bias, ..all.epilogue };
                        let dst = all.dst.wrapping_add(first);
                        Channels { src, filter, count, epilogue, dst, ..all }
                    };
                    if alone > 0 {
                        s.outlined(LargeSums(part(0, alone), rows.clone()));
                    }
                    if with_half {
                        s.outlined(HalfSums(part(alone, k - alone), rows));
                    } else if whole < k {
                        s.half().outlined(LargeSums(part(whole, k - whole), rows));
                    }
                }
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
        assert_in_registers::<LargeSums<'static, f32>>([13, 0]);
        // AVX2 has no half vectors, so that these sums do not run with it.
        assert_in_registers::<HalfSums<'static, f32>>([usize::MAX, 0]);
    }
}
