//! The choice of AMX: which convolutions its tiles can sum, and for which they are faster.

use super::super::method::Task;
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dSpec, Problem};
use crate::cpu::{Isa, has_many_cores};
use crate::dtype::not_computed;
use crate::{Accuracy, DType, Filter};

/// The smallest number of input and of output channels of a group for which tiles take less time than vectors.
const TILE_CHANNELS: usize = 16;

/// True if tiles are faster than vectors: not for f32 in six products where many cores, which share their units of tiles and
/// the caches, are at work.
pub(in crate::conv2d::cpu) fn are_fast(dtype: DType) -> bool {
    dtype != DType::F32 || !has_many_cores()
}

/// True if direct sums are formed by tiles of bf16, which count small numbers as zero.
pub(in crate::conv2d) fn flushes(spec: &Conv2dSpec, p: &Problem, isa: Isa) -> bool {
    if !isa.has_tiles() || spec.accuracy == Accuracy::Exact || !are_fast(spec.x.dtype) {
        return false;
    }
    let fills = p.c_group().min(p.k_group()) >= TILE_CHANNELS;
    match spec.x.dtype {
        DType::BF16 if p.groups == 1 => p.k > 2,
        DType::BF16 | DType::F32 => fills,
        DType::F16 | not_computed!() => false,
    }
}

/// True if tiles sum the task. If bits must not depend on the batch, they must not depend on the number of cores either,
/// so f32 is summed by vectors.
pub(in crate::conv2d::cpu) fn computes(task: &Task<'_>) -> bool {
    let splits = task.spec.x.dtype == DType::F32;
    !(splits && task.batch_invariant) && flushes(task.spec, task.problem, task.isa)
}

/// True if tiles take less time than a product of blocks.
pub(in crate::conv2d::cpu) fn pays(task: &Task<'_>, filter: Filter) -> bool {
    let splits = task.spec.x.dtype == DType::F32;
    computes(task) && (!splits || splitting_pays(task.spec, &task.sizes(), filter))
}

/// The smallest number of products of an f32 element for which splitting it takes less time than tiles save.
const SPLIT_USES: usize = 128;
/// The smallest number of terms of a sum for which writing it to y takes less time than tiles save.
const SPLIT_TERMS: usize = 96;
/// The smallest number of output pixels for which splitting a filter on each call takes less time than tiles save.
const SPLIT_FILTER: usize = 784;
/// The smallest number of output pixels for which reading a large split filter, which is half as long again, takes no
/// longer than the products.
const SPLIT_PIXELS: usize = 128;
/// Elements of a filter that stays in a core's caches when it is split.
const SMALL_FILTER: usize = 256 << 10;

fn splitting_pays(spec: &Conv2dSpec, p: &Problem, filter: Filter) -> bool {
    let (taps, pixels) = (p.r * p.s, p.n * p.oh * p.ow);
    let uses = p.k_group() * (taps / (p.stride[0] * p.stride[1])).max(1);
    let reads = pixels >= SPLIT_PIXELS || p.k * p.taps() <= SMALL_FILTER;
    // Columns that do not lie next to each other are read one by one.
    let gathers = !is_channels_last(&spec.y.layout) && p.stride[1] > 1;
    let splits = filter == Filter::Kept || pixels >= SPLIT_FILTER;
    uses >= SPLIT_USES && p.taps() >= SPLIT_TERMS && reads && splits && !gathers
}
