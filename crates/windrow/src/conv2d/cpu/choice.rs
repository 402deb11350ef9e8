//! The choice of the algorithm on the CPU.

use super::method::{Method, Task};
use super::winograd::{FUSED_TILE, Products, StagedMethod, best_tile, one_pass_pays};
use super::{IM2COL, amx, bf16_pairs, grouped, runs};
use crate::conv2d::Conv2dAlgorithm;
use crate::conv2d::spec::is_channels_last;
use crate::cpu::MAX_LANES;
use crate::{Accuracy, DType, Filter};

/// The largest number of input channels for which direct sums are faster than non-fused Winograd.
const DIRECT_CHANNELS: usize = 4;
/// The largest number of input channels for which direct sums with products of bf16 are faster than Winograd's
/// algorithm.
const BF16_CHANNELS: usize = 10;
/// The smallest number of output pixels for which they are: they round this number at once.
const BF16_PIXELS: usize = 32;
/// The largest number of input channels for which sums over runs are faster than Winograd's algorithm.
const RUN_CHANNELS: usize = 6;
/// The largest number of elements of a filter for which they are faster than a product of blocks: each row of the
/// output reads the whole filter.
const RUN_FILTER: usize = 128 << 10;

/// The algorithm that should be fastest among those that the accuracy allows.
pub(crate) fn choose(task: &Task<'_>, filter: Filter) -> Conv2dAlgorithm {
    let (spec, p) = (task.spec, &task.sizes());
    if task.stencil.frames.is_some() {
        return of_frames(task, filter);
    }
    // No other algorithm has as many products of bf16 in a cycle: 16 times those of vectors of f32, of which F(6, 3)
    // saves four fifths.
    if p.prefers_direct() || spec.x.dtype == DType::BF16 && amx::computes(task) {
        return Conv2dAlgorithm::Direct;
    }
    let row_major = !is_channels_last(&spec.y.layout);
    if row_major && p.oh * p.ow >= BF16_PIXELS && bf16_pairs::computes(task) {
        // Twice as fast as other sums, to which Winograd's algorithm is the alternative.
        if p.c <= BF16_CHANNELS || !p.is_winograd() {
            return Conv2dAlgorithm::Direct;
        }
    }
    let by_runs = runs::pays(task);
    if by_runs && p.c <= RUN_CHANNELS {
        return Conv2dAlgorithm::Direct;
    }
    if p.is_winograd() && spec.accuracy != Accuracy::Exact {
        if row_major && one_pass_pays(p, DIRECT_CHANNELS) {
            return Conv2dAlgorithm::WinogradFused(FUSED_TILE);
        }
        if !row_major || p.c > DIRECT_CHANNELS {
            let products = |tile| Products::of(task, p, tile);
            let winograd = Conv2dAlgorithm::WinogradGemm(best_tile(p, filter, products));
            // Where few pixels share the filter, transforming it takes longer than the products that this saves.
            let staged = StagedMethod.cost(task, winograd, filter);
            let sums = IM2COL.cost(task, Conv2dAlgorithm::Im2colGemm, filter);
            if filter == Filter::Kept || staged <= sums {
                return winograd;
            }
        }
    }
    if amx::pays(task, filter) || by_runs && p.k * p.taps() <= RUN_FILTER {
        return Conv2dAlgorithm::Direct;
    }
    if grouped::pays(task) {
        return Conv2dAlgorithm::DirectGrouped;
    }
    // With few input channels the im2col matrix is many times the input.
    if p.c_group() <= 8 && p.r * p.s > 1 && row_major {
        return Conv2dAlgorithm::Direct;
    }
    Conv2dAlgorithm::Im2colGemm
}

/// The same for a convolution that reads several frames.
fn of_frames(task: &Task<'_>, filter: Filter) -> Conv2dAlgorithm {
    let (spec, p) = (task.spec, &task.sizes());
    // A channel of a few frames is copied once for all taps of its rows, and the im2col matrix for each of them.
    let row_major = !is_channels_last(&spec.y.layout);
    if p.prefers_direct() || p.c_group() <= DIRECT_CHANNELS && p.r * p.s > 1 && row_major {
        return Conv2dAlgorithm::DirectPlanar;
    }
    if p.is_winograd() && spec.accuracy != Accuracy::Exact {
        let p = &p.with_frames_as_channels(MAX_LANES);
        let products = |tile| Products::of(task, p, tile);
        let winograd = Conv2dAlgorithm::WinogradGemm(best_tile(p, filter, products));
        let sums = IM2COL.cost(task, Conv2dAlgorithm::Im2colGemm, filter);
        if StagedMethod.cost(task, winograd, filter) <= sums {
            return winograd;
        }
    }
    Conv2dAlgorithm::Im2colGemm
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::Conv2dParams;
    use crate::conv2d::{Conv2dSpec, Tile};
    use crate::cpu::{Isa, has_many_cores};
    use crate::{Layout, TensorDesc};

    fn choose(spec: &Conv2dSpec, isa: Isa, filter: Filter) -> Conv2dAlgorithm {
        super::choose(&Task::new(spec, &spec.problem().unwrap(), isa, 1).unwrap(), filter)
    }

    fn chosen(
        dtype: DType,
        x: [usize; 4],
        isa: Isa,
        stride: usize,
        accuracy: Accuracy,
    ) -> Conv2dAlgorithm {
        let filter = TensorDesc::contiguous(dtype, &[64, x[1], 3, 3]).unwrap();
        let x = TensorDesc::contiguous(dtype, &x).unwrap();
        let params = Conv2dParams { stride: [stride; 2], accuracy, ..Default::default() };
        let spec = Conv2dSpec::new(x, filter, &params).unwrap();
        choose(&spec, isa, Filter::Kept)
    }

    #[test]
    fn products_of_bf16_are_taken_where_the_machine_has_them() {
        for isa in Isa::available().into_iter().filter(|isa| !isa.has_tiles()) {
            let chosen = |dtype, c, side, stride, accuracy| {
                chosen(dtype, [2, c, side, side], isa, stride, accuracy)
            };
            let direct = |dtype, c, side, stride, accuracy| {
                chosen(dtype, c, side, stride, accuracy) == Conv2dAlgorithm::Direct
            };
            let has = isa.has_bf16_products();
            assert_eq!(direct(DType::BF16, 3, 112, 1, Accuracy::Fp32), has);
            assert_eq!(direct(DType::BF16, 10, 20, 1, Accuracy::Half), has);
            assert_eq!(direct(DType::BF16, 64, 28, 2, Accuracy::Fp32), has);
            assert!(!direct(DType::BF16, 64, 28, 2, Accuracy::Exact));
            assert!(!direct(DType::F16, 64, 28, 2, Accuracy::Fp32));
            assert!(!direct(DType::BF16, 64, 28, 1, Accuracy::Fp32));
            assert!(!direct(DType::BF16, 8, 7, 1, Accuracy::Fp32));
        }
    }

    #[test]
    fn tiles_are_taken_but_for_exact_sums_and_small_groups() {
        for isa in Isa::tested().into_iter().filter(|isa| isa.has_tiles()) {
            for (dtype, accuracy, groups, k, tiles) in [
                (DType::BF16, Accuracy::Fp32, 1, 64, true),
                (DType::BF16, Accuracy::Half, 2, 64, true),
                (DType::BF16, Accuracy::Exact, 1, 64, false),
                (DType::BF16, Accuracy::Half, 4, 64, false),
                (DType::BF16, Accuracy::Half, 1, 2, false),
                (DType::F16, Accuracy::Half, 1, 64, false),
                (DType::F32, Accuracy::Fp32, 1, 64, true),
                (DType::F32, Accuracy::Half, 2, 64, true),
                (DType::F32, Accuracy::Exact, 1, 64, false),
                (DType::F32, Accuracy::Fp32, 1, 8, false),
                (DType::F32, Accuracy::Fp32, 4, 64, false),
            ] {
                let filter = TensorDesc::contiguous(dtype, &[k, 32 / groups, 3, 3]).unwrap();
                let x = TensorDesc::contiguous(dtype, &[2, 32, 28, 28]).unwrap();
                let params = Conv2dParams { groups, accuracy, ..Default::default() };
                let spec = Conv2dSpec::new(x, filter, &params).unwrap();
                let p = spec.problem().unwrap();
                let tiles = tiles && amx::are_fast(dtype);
                assert_eq!(amx::flushes(&spec, &p, isa), tiles, "{spec:?}");
                let chosen = choose(&spec, isa, Filter::Kept);
                let direct = chosen == Conv2dAlgorithm::Direct;
                assert!(!tiles || dtype == DType::F32 || direct, "{spec:?}: {chosen}");
            }
        }
    }

    /// Splitting pays only if the parts are used often enough, and if the filter can be read fast.
    #[test]
    fn f32_is_split_where_that_pays() {
        for isa in Isa::tested().into_iter().filter(|isa| isa.has_tiles() && !has_many_cores()) {
            let chosen = |c: usize, side: usize, k: usize, [r, stride]: [usize; 2], filter| {
                let w = TensorDesc::contiguous(DType::F32, &[k, c, r, r]).unwrap();
                let layout = Layout::with_order(&[1, c, side, side], &[0, 2, 3, 1]).unwrap();
                let params = Conv2dParams { stride: [stride; 2], ..Default::default() };
                let x = TensorDesc::new(DType::F32, layout);
                let spec = Conv2dSpec::new(x, w, &params).unwrap();
                choose(&spec, isa, filter)
            };
            for (c, side, k, filter, splits) in [
                (512, 28, 128, [1, 1], true),
                (64, 56, 256, [1, 1], false),
                (256, 56, 64, [1, 1], false),
                (128, 56, 128, [3, 2], true),
                (160, 7, 960, [1, 1], true),
                (2048, 7, 512, [1, 1], false),
            ] {
                let want =
                    if splits { Conv2dAlgorithm::Direct } else { Conv2dAlgorithm::Im2colGemm };
                assert_eq!(chosen(c, side, k, filter, Filter::Kept), want, "{c} {side} {k}");
            }
            // A filter of few pixels is split on each call.
            let changing = |side| chosen(512, side, 256, [1, 1], Filter::Changing);
            assert_eq!(changing(14), Conv2dAlgorithm::Im2colGemm);
            assert_eq!(changing(28), Conv2dAlgorithm::Direct);
        }
    }

    /// Large layers, by a tile that has less error than what vectors take.
    #[test]
    fn winograd_splits_where_that_pays() {
        for isa in Isa::tested().into_iter().filter(|isa| isa.has_tiles() && !has_many_cores()) {
            let chosen = |c: usize, side: usize, accuracy| {
                let w = TensorDesc::contiguous(DType::F32, &[c, c, 3, 3]).unwrap();
                let x = TensorDesc::contiguous(DType::F32, &[1, c, side, side]).unwrap();
                let params = Conv2dParams { padding: [1, 1], accuracy, ..Default::default() };
                let spec = Conv2dSpec::new(x, w, &params).unwrap();
                let p = spec.problem().unwrap();
                let tile = choose(&spec, isa, Filter::Kept).tile().unwrap_or(Tile::F6);
                (tile, Products::of(&Task::new(&spec, &p, isa, 1).unwrap(), &p, tile))
            };
            for (c, side, want) in [
                (256, 128, (Tile::F4, Products::Tiles)),
                (256, 56, (Tile::F4, Products::Tiles)),
                (512, 64, (Tile::F4, Products::Tiles)),
                (128, 112, (Tile::F6, Products::Vectors)),
                (512, 28, (Tile::F4, Products::Vectors)),
                (128, 28, (Tile::F4, Products::Vectors)),
                (512, 14, (Tile::F2, Products::Vectors)),
            ] {
                assert_eq!(chosen(c, side, Accuracy::Fp32), want, "{c} {side}");
                assert_eq!(chosen(c, side, Accuracy::Exact).1, Products::Vectors, "{c} {side}");
            }
        }
    }

    #[test]
    fn a_filter_that_changes_counts_its_packing() {
        let chosen = |n, c, side, filter| {
            let w = TensorDesc::contiguous(DType::F32, &[c, c, 3, 3]).unwrap();
            let x = TensorDesc::contiguous(DType::F32, &[n, c, side, side]).unwrap();
            let params = Conv2dParams { padding: [1, 1], ..Default::default() };
            let spec = Conv2dSpec::new(x, w, &params).unwrap();
            choose(&spec, Isa::best(), filter)
        };
        let f6 = Conv2dAlgorithm::WinogradGemm(Tile::F6);
        // Many pixels: the same.
        assert_eq!(chosen(64, 128, 56, Filter::Changing), f6);
        assert_eq!(chosen(64, 128, 56, Filter::Kept), f6);
        // Few: a smaller tile; and none where the channels are few as well.
        let [f2, f4] = [Tile::F2, Tile::F4].map(Conv2dAlgorithm::WinogradGemm);
        assert_eq!(chosen(4, 512, 14, Filter::Changing), f4);
        assert_eq!(chosen(1, 512, 7, Filter::Changing), f2);
        assert_eq!(chosen(1, 16, 7, Filter::Changing), Conv2dAlgorithm::Im2colGemm);
        assert!(chosen(1, 16, 7, Filter::Kept).is_winograd());
    }

    #[test]
    fn few_channels_are_read_in_runs() {
        let sums = |isa: Isa, dtype| isa.has_bf16_products() && dtype == DType::BF16;
        for isa in Isa::available().into_iter().filter(|isa| !isa.has_tiles() && !isa.is_small()) {
            for (dtype, [c, side, k], [r, stride], order, runs) in [
                (DType::F32, [3, 60, 32], [3, 1], [0, 2, 3, 1], true),
                (DType::F16, [3, 60, 64], [7, 2], [0, 2, 3, 1], true),
                (DType::BF16, [64, 28, 128], [3, 2], [0, 2, 3, 1], true),
                (DType::F32, [16, 28, 32], [5, 1], [0, 2, 3, 1], true),
                (DType::F32, [16, 28, 32], [3, 1], [0, 2, 3, 1], false),
                (DType::F32, [64, 28, 128], [1, 1], [0, 2, 3, 1], false),
                (DType::F32, [128, 28, 256], [3, 2], [0, 2, 3, 1], false),
                (DType::F32, [64, 28, 128], [3, 2], [0, 1, 2, 3], false),
                (DType::F32, [64, 28, 8], [3, 2], [0, 2, 3, 1], false),
            ] {
                let w = TensorDesc::contiguous(dtype, &[k, c, r, r]).unwrap();
                let layout = Layout::with_order(&[1, c, side, side], &order).unwrap();
                let params = Conv2dParams { stride: [stride; 2], ..Default::default() };
                let spec = Conv2dSpec::new(TensorDesc::new(dtype, layout), w, &params).unwrap();
                let chosen = choose(&spec, isa, Filter::Kept);
                let runs = runs && !sums(isa, dtype);
                assert_eq!(chosen == Conv2dAlgorithm::Direct, runs, "{isa:?} {spec:?}: {chosen}");
            }
        }
    }

    /// 3x3 filters with so many channels in a group that vectors hold them, and half vectors the rest.
    #[test]
    fn groups_are_summed_directly() {
        let chosen = |isa, dtype, [c, groups, side, r, stride]: [usize; 5], order| {
            let w = TensorDesc::contiguous(dtype, &[c, c / groups, r, r]).unwrap();
            let x = Layout::with_order(&[1, c, side, side], order).unwrap();
            let (stride, padding) = ([stride; 2], [r / 2; 2]);
            let params = Conv2dParams { groups, stride, padding, ..Default::default() };
            let spec = Conv2dSpec::new(TensorDesc::new(dtype, x), w, &params).unwrap();
            choose(&spec, isa, Filter::Kept) == Conv2dAlgorithm::DirectGrouped
        };
        let last = &[0, 2, 3, 1];
        for isa in Isa::available().into_iter().filter(|isa| !isa.has_tiles()) {
            let sums = cfg!(target_arch = "x86_64") && !isa.is_small();
            let wide = sums && isa.name().starts_with("avx512");
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let f16 = dtype == DType::F16;
                for (layer, want) in [
                    ([336, 14, 14, 3, 1], sums),
                    ([336, 14, 14, 3, 2], sums),
                    ([888, 37, 7, 3, 1], sums),
                    ([160, 4, 28, 3, 1], wide || sums && !f16),
                    ([160, 4, 28, 3, 2], wide && !f16),
                    ([256, 4, 28, 3, 1], wide),
                    ([256, 4, 28, 3, 2], wide && !f16),
                    ([100, 5, 28, 3, 1], false),
                    ([336, 14, 14, 1, 1], false),
                    ([336, 14, 14, 5, 1], false),
                    ([336, 14, 14, 3, 3], false),
                    ([336, 14, 6, 3, 1], false),
                ] {
                    assert_eq!(chosen(isa, dtype, layer, last), want, "{isa:?} {layer:?}");
                }
                assert!(!chosen(isa, dtype, [336, 14, 14, 3, 1], &[0, 1, 2, 3]));
            }
            // Pixels lie whole pages apart.
            assert_eq!(chosen(isa, DType::F32, [1024, 32, 14, 3, 1], last), sums);
            assert!(!chosen(isa, DType::F32, [1024, 32, 14, 3, 2], last));
        }
    }

    #[test]
    fn few_channels_go_in_one_pass_where_rows_fill_vectors() {
        let chosen = |c, w| chosen(DType::F32, [2, c, 40, w], Isa::best(), 1, Accuracy::Fp32);
        let fused = Conv2dAlgorithm::WinogradFused(FUSED_TILE);
        for (c, w) in [(2, 18), (3, 114), (4, 34), (5, 66), (8, 114)] {
            assert_eq!(chosen(c, w), fused, "{c} {w}");
        }
        for (c, w) in [(1, 114), (2, 17), (3, 10), (4, 12)] {
            assert_eq!(chosen(c, w), Conv2dAlgorithm::Direct, "{c} {w}");
        }
        for (c, w) in [(5, 10), (8, 50), (9, 114)] {
            assert!(matches!(chosen(c, w), Conv2dAlgorithm::WinogradGemm(_)), "{c} {w}");
        }
    }
}
