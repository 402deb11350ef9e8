//! The choice of the algorithm on a GPU.

use super::cudnn;
use super::cudnn::nhwc::NhwcConversion;
use super::facts::{has_epilogue, has_vectors, is_strict, may_transform};
use super::group_products::GroupProductsMethod;
use super::grouped::GroupedMethod;
use super::method::{Method, supports};
use super::methods::{self, METHODS, allows, method_for, pack_micros, supported, too_large};
use super::task::Task;
use super::winograd_gemm::{self, largest_tile, tiles};
use super::winograd_row::{self, WinogradRow};
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dAlgorithm, Tile};
use crate::dtype::not_computed;
use crate::gpu::Gpu;
use crate::{DType, Filter, Result};
use Conv2dAlgorithm::{Cudnn, Direct, Im2colGemm, ImplicitGemm, WinogradGemm, WinogradRow as Row};

/// The algorithm that should be fastest among those that the spec's accuracy and the options' memory allow.
///
/// # Errors
/// [`Error::Unsupported`] if the pixels of an image, the batch, or the channels times the taps of a filter are 2^30 or
/// more.
pub(crate) fn best(gpu: &'static Gpu, task: &Task<'_>) -> Result<Conv2dAlgorithm> {
    task.for_choice(|task| best_of(gpu, task))
}

fn best_of(gpu: &'static Gpu, task: &Task<'_>) -> Result<Conv2dAlgorithm> {
    let mut supported = supported(gpu, task);
    if supported.is_empty() {
        return Err(too_large());
    }
    if let Some(memory) = task.options.memory {
        let least = |task: &Task<'_>| method_for(task).map_or(0, |method| method.least_bytes(task));
        supported.retain(|&algorithm| least(&task.by(algorithm)) <= memory);
    }
    let leads = |method: &&dyn Method| method.leads(task) && supports(*method, gpu, task);
    if let Some(leader) = METHODS.into_iter().find(leads) {
        return Ok(leader.about().algorithms[0]);
    }
    loop {
        let chosen = choose(task, &supported);
        let confirmed = method_for(&task.by(chosen)).map_or(Ok(()), |m| m.confirm(gpu, task));
        match confirmed {
            Err(error) if supported.contains(&chosen) => {
                tracing::debug!(%error, "conv2d without {chosen}");
                supported.retain(|&other| other != chosen);
            }
            Ok(()) | Err(_) => return Ok(chosen),
        }
    }
}

/// A condition that says if a challenger is compared with the algorithm that is chosen so far.
type Condition<'a> = &'a dyn Fn(Conv2dAlgorithm) -> bool;

/// The number of terms of a sum below which `direct` (one thread for each output) is not compared with matrix products.
const FEW_TERMS: usize = 64;

/// The algorithm that should be fastest among those that are supported and that the spec's accuracy allows. If the bits of
/// an image must not depend on the number of images, each batch proposes an algorithm.
pub(super) fn choose(task: &Task<'_>, supported: &[Conv2dAlgorithm]) -> Conv2dAlgorithm {
    let proposed = task.for_batches(|task| fastest(task, supported));
    let micros = |task: &Task<'_>, &algorithm: &_| methods::micros(&task.by(algorithm));
    task.least(proposed, micros).unwrap_or(Im2colGemm)
}

/// The algorithm that should be fastest for a number of images, including the time of packing if the filter changes.
///
/// [`by_rules`] names a first candidate. Then each challenger whose condition holds replaces the candidate if it is
/// expected to take less than a share of the candidate's time.
fn fastest(task: &Task<'_>, supported: &[Conv2dAlgorithm]) -> Conv2dAlgorithm {
    let (spec, p) = (task.spec, task.problem);
    let has = |algorithm| supported.contains(&algorithm) && allows(&task.by(algorithm));
    // The rules expect cuDNN.
    let alone = !supported.contains(&Cudnn);
    let grouped = |_| (is_strict(spec) || alone) && GroupedMethod.computes(task);
    // cuDNN's kernels on tensor cores compute one product: for f32 at lower accuracy, and for f16/bf16 whose pixels are
    // whole vectors. So `implicit_gemm` is compared in strict f32. It is also compared with other pixels, or with bias,
    // residual, activation or another layout of y: it fuses these, and cuDNN needs a second pass. It multiplies groups of few
    // channels without the zeros between them.
    let sums = |chosen| {
        let unlike_cudnns = [Im2colGemm, Direct].contains(&chosen)
            || !p.c.is_multiple_of(8)
            || has_epilogue(spec)
            || NhwcConversion::suits(spec, p)
            || GroupProductsMethod.computes(&task.by(ImplicitGemm));
        let few = chosen == Direct && p.groups == 1 && p.taps() < FEW_TERMS;
        // The rates of `implicit_gemm` are those of images. Of videos that fill the GPU, the fused kernel was 1.4 to 2.0
        // times as fast.
        let whole_videos = chosen == Row
            && task.frames.is_some()
            && WinogradRow::share_in_use(p, task.chip.multiprocessors) >= 0.5;
        (is_strict(spec) || alone || unlike_cudnns) && !few && !whole_videos
    };
    let changes = |chosen: Conv2dAlgorithm| {
        task.options.filter == Filter::Changing && (chosen.is_winograd() || chosen == ImplicitGemm)
    };
    // The time to compare the filter with its packed form on each call. cuDNN needs none: it reads the filter in place.
    let comparison_micros = |chosen| {
        let reads_in_place =
            chosen == Cudnn && spec.x.dtype != DType::F32 && !NhwcConversion::suits(spec, p);
        if reads_in_place {
            1e-6 * (p.k * p.taps() * spec.w.dtype.size()) as f64 / 3.0
        } else {
            0.0
        }
    };
    // The rates of one product and cuDNN's on tensor cores are fitted to times of the same layers, without groups.
    let share = if is_strict(spec) || p.groups > 1 { 0.9 } else { 1.0 };
    // Each challenger with its share, whether packing counts, and its condition.
    let challengers: [(_, f64, bool, Condition<'_>); 4] = [
        (Direct, 1.0, false, &grouped),
        (ImplicitGemm, share, false, &sums),
        (ImplicitGemm, 1.0, true, &changes),
        (Cudnn, 1.0, true, &changes),
    ];
    let mut chosen = by_rules(task, &|algorithm| supported.contains(&algorithm));
    for (other, share, packing, condition) in challengers {
        let micros = |algorithm| {
            let task = task.by(algorithm);
            methods::micros(&task) + if packing { pack_micros(&task) } else { 0.0 }
        };
        let comparison = if packing { 0.0 } else { comparison_micros(chosen) };
        if has(other) && condition(chosen) && micros(other) + comparison < share * micros(chosen) {
            chosen = other;
        }
    }
    chosen
}

/// The algorithm of the first rule that holds. The rules follow times of layers on an H200
/// (`benchmarks/record/2026-11-22-h200`).
fn by_rules(task: &Task<'_>, has: &dyn Fn(Conv2dAlgorithm) -> bool) -> Conv2dAlgorithm {
    let (spec, p) = (task.spec, task.problem);
    // Sums without a transform. cuDNN sums in f32 too.
    let sums = match p.k_group() < 8 || p.taps() < 8 {
        true => Direct,
        false if has(Cudnn) => Cudnn,
        false => Im2colGemm,
    };
    if !p.is_winograd() || !may_transform(spec) {
        return sums;
    }
    if has(Cudnn) && is_small(task) {
        return Cudnn;
    }
    let tile = tile(task);
    let cudnn = has(Cudnn) && cudnn_reads(task);
    let staged_pays = has(Row) && stages_pay(task, tile, cudnn);
    if cudnn && !staged_pays && cudnn_pays(task) {
        return Cudnn;
    }
    if staged_pays && has(WinogradGemm(tile)) {
        return WinogradGemm(tile);
    }
    if has(Row) {
        return Row;
    }
    if has(WinogradGemm(tile)) && p.c.min(p.k) >= 16 {
        return WinogradGemm(tile);
    }
    sums
}

/// The tile. It is F4 if that is allowed, unless F4's tiles reach so far beyond the image that it saves nothing, or are
/// so few that they leave the GPU idle.
fn tile(task: &Task<'_>) -> Tile {
    const FEW: usize = 240;
    let micros = |tile| winograd_gemm::micros(task, tile);
    let pays = tiles(task.problem, Tile::F4) >= FEW && 1.05 * micros(Tile::F4) < micros(Tile::F2);
    if pays { largest_tile(task.spec) } else { Tile::F2 }
}

/// True if non-fused Winograd is faster than the fused kernel and, if cuDNN may be chosen, than cuDNN: if the products
/// outweigh the passes over V and M, or if the fused kernel has too few blocks for the GPU.
fn stages_pay(task: &Task<'_>, tile: Tile, cudnn: bool) -> bool {
    let (spec, p) = (task.spec, task.problem);
    let staged = winograd_gemm::micros(task, tile);
    let ahead = staged < winograd_row::micros(task);
    if spec.x.dtype == DType::F32 {
        return ahead && (!cudnn || staged < cudnn::micros(task));
    }
    // F2, which bf16 uses, moves too much memory in large layers.
    let least_k = if is_channels_last(&spec.y.layout) { 1024 } else { 512 };
    let many = tile == Tile::F4 && p.c >= 512 && p.k >= least_k && tiles(p, tile) >= 1024;
    many || ahead && winograd_row::rounds(task) <= 2.0
}

/// True if a layer is so small that the launches and passes of Winograd's algorithms take longer than sums without a
/// transform: cuDNN was 1.5 to 2.7 times as fast on layers of 7 to 24 channels in f32.
fn is_small(task: &Task<'_>) -> bool {
    is_strict(task.spec) && task.problem.c <= 24 && task.problem.flops() <= 2.5e8
}

/// True if cuDNN reads and writes the tensors in place, and its arithmetic may be faster than the fused kernel's. cuDNN
/// does so for channels-last tensors with whole vectors of channels. Otherwise it copies them.
fn cudnn_reads(task: &Task<'_>) -> bool {
    let spec = task.spec;
    !is_strict(spec) && is_channels_last(&spec.y.layout) && has_vectors(spec, task.problem)
}

/// True if cuDNN is faster than the fused kernel, for tensors with [`cudnn_reads`].
fn cudnn_pays(task: &Task<'_>) -> bool {
    let p = task.problem;
    let share = WinogradRow::share_in_use(p, task.chip.multiprocessors);
    match task.spec.x.dtype {
        // The fused kernel reads an f32 input once more, for its largest magnitude. Few products do not hide this read.
        DType::F32 => p.c < 256 || share < 0.75,
        // With few input channels the fused kernel is limited by its stores, and cuDNN's blocks have 128 output
        // channels. With many the fused kernel waits for the second-level cache.
        DType::F16 | DType::BF16 | not_computed!() => {
            (p.c <= 64 && p.k >= 128) || share < if p.c < 512 { 0.65 } else { 0.75 }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::frame_reads::FrameReads;
    use crate::conv2d::problem::Frames;
    use crate::conv2d::{Conv2dParams, Conv2dSpec, Problem};
    use crate::{Accuracy, Activation, Layout, TensorDesc};

    const OWN: [Conv2dAlgorithm; 4] =
        [Direct, Im2colGemm, WinogradGemm(Tile::F2), WinogradGemm(Tile::F4)];

    /// The choice for 64 images of 50x50 if a GPU has the algorithms `more` in addition to those of every GPU.
    fn taken(
        dtype: DType,
        accuracy: Accuracy,
        [c, k, taps, groups]: [usize; 4],
        more: &[Conv2dAlgorithm],
    ) -> Conv2dAlgorithm {
        let x = Layout::with_order(&[64, c, 50, 50], &[0, 1, 2, 3]).unwrap();
        let w = TensorDesc::contiguous(dtype, &[k, c / groups, taps, taps]).unwrap();
        let params = Conv2dParams { accuracy, groups, ..Default::default() };
        taken_for(TensorDesc { dtype, layout: x }, w, &params, more)
    }

    fn taken_for(
        x: TensorDesc,
        w: TensorDesc,
        params: &Conv2dParams,
        more: &[Conv2dAlgorithm],
    ) -> Conv2dAlgorithm {
        choose_on_h200(Conv2dSpec::new(x, w, params).unwrap(), more, Filter::Kept)
    }

    fn choose_on_h200(
        spec: Conv2dSpec,
        more: &[Conv2dAlgorithm],
        filter: Filter,
    ) -> Conv2dAlgorithm {
        let p = spec.problem().unwrap();
        let mut task = Task::on_h200(&spec, &p);
        task.options.filter = filter;
        choose(&task, &[&OWN, more].concat())
    }

    #[test]
    fn cudnn_computes_channels_last_layers_that_the_fused_kernel_would_lose() {
        let all = [Row, Cudnn];
        let taken = |dtype, accuracy, [n, c, size, k]: [usize; 4], order: &[usize], more: &[_]| {
            let layout = Layout::with_order(&[n, c, size, size], order).unwrap();
            let w = TensorDesc::contiguous(dtype, &[k, c, 3, 3]).unwrap();
            let params = Conv2dParams { accuracy, ..Default::default() };
            taken_for(TensorDesc { dtype, layout }, w, &params, more)
        };
        let (inner, outer) = ([0, 2, 3, 1], [0, 1, 2, 3]);
        for (dtype, accuracy, sizes, algorithm) in [
            (DType::F32, Accuracy::Tf32, [64, 64, 112, 128], Cudnn),
            (DType::F32, Accuracy::Tf32, [64, 256, 50, 256], Row),
            (DType::F32, Accuracy::Tf32, [64, 512, 50, 512], WinogradGemm(Tile::F4)),
            (DType::F32, Accuracy::Tf32, [128, 192, 12, 256], Cudnn),
            (DType::F32, Accuracy::Fp32, [64, 64, 112, 128], Row),
            (DType::F32, Accuracy::Fp32, [64, 256, 50, 256], WinogradGemm(Tile::F4)),
            (DType::F32, Accuracy::Fp32, [128, 256, 8, 512], WinogradGemm(Tile::F2)),
            (DType::F16, Accuracy::Half, [128, 192, 12, 256], Cudnn),
            (DType::F16, Accuracy::Half, [64, 64, 112, 128], Cudnn),
            (DType::F16, Accuracy::Half, [64, 32, 112, 64], Row),
            (DType::F16, Accuracy::Half, [64, 60, 112, 128], Row),
            (DType::F16, Accuracy::Half, [128, 128, 20, 96], Row),
            (DType::F16, Accuracy::Half, [128, 256, 8, 512], Row),
            (DType::F16, Accuracy::Half, [64, 512, 16, 2048], WinogradGemm(Tile::F4)),
            (DType::BF16, Accuracy::Half, [64, 512, 16, 2048], Cudnn),
            (DType::BF16, Accuracy::Half, [64, 512, 50, 512], Row),
        ] {
            assert_eq!(taken(dtype, accuracy, sizes, &inner, &all), algorithm, "{sizes:?}");
            assert_ne!(taken(dtype, accuracy, sizes, &outer, &all), Cudnn, "{sizes:?}");
            assert_ne!(taken(dtype, accuracy, sizes, &inner, &[Row]), Cudnn);
        }
    }

    #[test]
    fn packing_counts_where_filters_change() {
        let taken = |n, c, size, filter| {
            let x = Layout::with_order(&[n, c, size, size], &[0, 2, 3, 1]).unwrap();
            let x = TensorDesc { dtype: DType::F16, layout: x };
            let w = TensorDesc::contiguous(DType::F16, &[c, c, 3, 3]).unwrap();
            let params = Conv2dParams { accuracy: Accuracy::Half, ..Default::default() };
            let spec = Conv2dSpec::new(x, w, &params).unwrap();
            choose_on_h200(spec, &[Row, Cudnn], filter)
        };
        assert_eq!(taken(64, 256, 50, Filter::Kept), Row);
        assert!(taken(4, 512, 16, Filter::Kept).is_winograd());
        assert_eq!(taken(4, 512, 16, Filter::Changing), Cudnn);
    }

    #[test]
    fn accuracy_decides_what_is_allowed() {
        use Accuracy::{Exact, Fp32, Half, Tf32};
        for more in [&[][..], &[Row], &[Cudnn, Row]] {
            for (dtype, accuracy, allowed) in [
                (DType::F32, Exact, false),
                (DType::F32, Fp32, true),
                (DType::F16, Fp32, false),
                (DType::F16, Tf32, true),
                (DType::BF16, Tf32, false),
                (DType::BF16, Half, true),
            ] {
                let algorithm = taken(dtype, accuracy, [64, 64, 3, 1], more);
                assert!(allowed || !algorithm.is_winograd(), "{dtype} {accuracy:?} {more:?}");
                assert!(allowed || (algorithm == Cudnn) == more.contains(&Cudnn), "{algorithm}");
                assert!(allowed <= algorithm.is_winograd(), "{dtype} {accuracy:?} {more:?}");
            }
        }
    }

    #[test]
    fn every_device_has_an_algorithm() {
        let f32 = |sizes, more: &[_]| taken(DType::F32, Accuracy::Fp32, sizes, more);
        assert_eq!(f32([64, 64, 3, 1], &[]), WinogradGemm(Tile::F4));
        assert_eq!(f32([64, 64, 3, 1], &[Row, Cudnn]), Row);
        assert_eq!(f32([3, 64, 3, 1], &[]), Im2colGemm);
        assert_eq!(f32([64, 64, 5, 1], &[Row, Cudnn]), Cudnn);
        assert_eq!(f32([64, 64, 5, 1], &[Row]), Im2colGemm);
        assert_eq!(f32([64, 64, 3, 64], &[Row, Cudnn]), Direct);
        assert_eq!(f32([8, 64, 3, 1], &[Row, Cudnn]), Row);
        let half = |sizes| taken(DType::F16, Accuracy::Half, sizes, &[Row, Cudnn]);
        assert_eq!(half([512, 2048, 3, 1]), WinogradGemm(Tile::F4));
    }

    #[test]
    fn strict_sums_are_products_of_halves() {
        let taken = |accuracy, [n, c, size, k]: [usize; 4], taps, stride, filter| {
            let x = TensorDesc::contiguous(DType::F32, &[n, c, size, size]).unwrap();
            let w = TensorDesc::contiguous(DType::F32, &[k, c, taps, taps]).unwrap();
            let [stride, padding] = [[stride; 2], [taps / 2; 2]];
            let params = Conv2dParams { accuracy, stride, padding, ..Default::default() };
            let spec = Conv2dSpec::new(x, w, &params).unwrap();
            choose_on_h200(spec, &[ImplicitGemm, Row, Cudnn], filter)
        };
        let kept =
            |accuracy, sizes, taps, stride| taken(accuracy, sizes, taps, stride, Filter::Kept);
        let strict = |sizes, taps, stride| kept(Accuracy::Fp32, sizes, taps, stride);
        for n in [1, 8, 64] {
            assert_eq!(strict([n, 256, 56, 128], 1, 1), ImplicitGemm);
            assert_eq!(strict([n, 512, 14, 512], 3, 2), ImplicitGemm);
            assert_eq!(kept(Accuracy::Exact, [n, 256, 56, 128], 1, 1), Cudnn);
            assert_eq!(kept(Accuracy::Tf32, [n, 256, 56, 128], 1, 1), Cudnn);
        }
        assert_eq!(strict([64, 64, 56, 64], 3, 1), Row);
        assert_eq!(
            strict([64, 256, 14, 256], 3, 1),
            WinogradGemm(Tile::F4),
            "outputs beside the image"
        );
        assert_eq!(strict([1, 64, 56, 64], 3, 1), ImplicitGemm, "few tiles");
        assert_eq!(strict([64, 4, 56, 4], 1, 1), Direct);
        let changing = Filter::Changing;
        assert_eq!(taken(Accuracy::Fp32, [64, 256, 56, 128], 1, 1, changing), ImplicitGemm);
    }

    #[test]
    fn halves_are_products_of_their_own_without_cudnn() {
        for dtype in [DType::F16, DType::BF16] {
            for sizes in [[64, 64, 3, 1], [256, 512, 1, 1], [3, 64, 7, 1], [128, 128, 5, 2]] {
                let taken = |accuracy| taken(dtype, accuracy, sizes, &[ImplicitGemm, Row]);
                assert_eq!(taken(Accuracy::Fp32), ImplicitGemm, "{sizes:?}");
                assert_eq!(taken(Accuracy::Exact), Im2colGemm, "{sizes:?}");
            }
        }
    }

    #[test]
    fn videos_that_fill_the_gpu_are_for_the_fused_kernel() {
        let taken = |c, [t, h, w]: [usize; 3], dtype, accuracy| {
            let layout = Layout::with_order(&[t, c, h, w], &[0, 2, 3, 1]).unwrap();
            let filter = TensorDesc::contiguous(dtype, &[c, c, 3, 3]).unwrap();
            let params = Conv2dParams { accuracy, padding: [1; 2], ..Default::default() };
            let spec = Conv2dSpec::new(TensorDesc { dtype, layout }, filter, &params).unwrap();
            let frames = Frames { t, kt: 3, ot: 1, stride: 1, padding: 1, dilation: 1 };
            let p = Problem { frames, ..spec.problem().unwrap() };
            let reads = FrameReads { frames: Frames { ot: t, ..frames }, ..FrameReads::EXAMPLE };
            let task = Task::on_h200(&spec, &p).with_frames(Some(reads));
            choose(&task, &[Direct, Im2colGemm, ImplicitGemm, Row])
        };
        for (c, size) in [(96, [6, 480, 832]), (384, [6, 120, 208]), (512, [7, 64, 64])] {
            assert_eq!(taken(c, size, DType::BF16, Accuracy::Half), Row, "{c}");
            assert_eq!(taken(c, size, DType::BF16, Accuracy::Fp32), ImplicitGemm, "{c}");
            assert_eq!(taken(c, size, DType::F32, Accuracy::Fp32), Row, "{c}");
        }
    }

    #[test]
    fn what_follows_sums_of_halves_counts_against_cudnn() {
        let taken = |[n, c, size, k]: [usize; 4], activation| {
            let layout = Layout::with_order(&[n, c, size, size], &[0, 2, 3, 1]).unwrap();
            let w = TensorDesc::contiguous(DType::BF16, &[k, c, 1, 1]).unwrap();
            let params = Conv2dParams { activation, ..Default::default() };
            let more = [ImplicitGemm, Row, Cudnn];
            taken_for(TensorDesc { dtype: DType::BF16, layout }, w, &params, &more)
        };
        for sizes in [[64, 96, 56, 384], [64, 64, 56, 256], [64, 256, 14, 1024]] {
            assert_eq!(taken(sizes, Activation::Identity), Cudnn, "{sizes:?}");
            assert_eq!(taken(sizes, Activation::Relu), ImplicitGemm, "{sizes:?}");
        }
        // The comparison of a filter that is larger than the image takes time on each call.
        assert_eq!(taken([1, 4096, 4, 4096], Activation::Relu), Cudnn);
    }

    #[test]
    fn groups_of_few_channels_and_many_terms_of_few_outputs() {
        let taken = |dtype, [n, c, size, k, groups]: [usize; 5]| {
            let x = TensorDesc::contiguous(dtype, &[n, c, size, size]).unwrap();
            let w = TensorDesc::contiguous(dtype, &[k, c / groups, 3, 3]).unwrap();
            let params = Conv2dParams { groups, padding: [1; 2], ..Default::default() };
            taken_for(x, w, &params, &[ImplicitGemm, Row, Cudnn])
        };
        for n in [1, 8, 64] {
            assert_eq!(taken(DType::F32, [n, 128, 56, 128, 32]), Direct, "{n}");
            assert_eq!(taken(DType::F32, [n, 256, 28, 256, 32]), Direct, "{n}");
        }
        assert_eq!(taken(DType::BF16, [8, 128, 56, 128, 32]), Direct);
        assert_eq!(taken(DType::BF16, [8, 512, 14, 512, 32]), Cudnn);
        assert_eq!(taken(DType::BF16, [2, 320, 64, 4, 1]), ImplicitGemm);
    }

    #[test]
    fn first_layers_of_large_filters_are_products_of_their_own() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for order in [[0, 1, 2, 3], [0, 2, 3, 1]] {
                let taken = |n, c| {
                    let layout = Layout::with_order(&[n, c, 224, 224], &order).unwrap();
                    let w = TensorDesc::contiguous(dtype, &[64, c, 7, 7]).unwrap();
                    let (stride, padding) = ([2; 2], [3; 2]);
                    let params = Conv2dParams { stride, padding, ..Default::default() };
                    let more = [ImplicitGemm, Row, Cudnn];
                    taken_for(TensorDesc { dtype, layout }, w, &params, &more)
                };
                assert_eq!(taken(64, 3), ImplicitGemm, "{dtype} {order:?}");
                assert_eq!(taken(8, 3), ImplicitGemm, "{dtype} {order:?}");
                // cuDNN's kernel for f16/bf16 needs NCHW tensors converted.
                let ours = dtype == DType::F32 || order == [0, 1, 2, 3];
                let whole = if ours { ImplicitGemm } else { Cudnn };
                assert_eq!(taken(8, 16), whole, "{dtype} {order:?}");
            }
        }
    }

    #[test]
    fn stages_take_what_would_leave_the_device_idle() {
        let taken = |n, c, k, size| {
            let x = TensorDesc::contiguous(DType::F32, &[n, c, size, size]).unwrap();
            let w = TensorDesc::contiguous(DType::F32, &[k, c, 3, 3]).unwrap();
            let spec = Conv2dSpec::new(x, w, &Conv2dParams::default()).unwrap();
            choose_on_h200(spec, &[Row, Cudnn], Filter::Kept)
        };
        assert_eq!(taken(3, 496, 416, 12), WinogradGemm(Tile::F2));
        assert_eq!(taken(1, 8, 271, 30), Cudnn);
        assert_eq!(taken(128, 96, 192, 12), Row);
        assert_eq!(taken(64, 128, 128, 112), Row);
    }
}
