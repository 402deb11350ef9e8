//! Which algorithm the planner takes on CUDA.

use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem, Tile};
use crate::{Accuracy, DType};

/// The algorithm that should be fastest among those that are supported and that the spec's accuracy
/// allows. `cudnn` runs only where it is asked for by name. The rules follow times of layers on an H200 (`benchmarks/record/2026-11-21-h200`).
pub(super) fn choose(
    spec: &Conv2dSpec,
    p: &Problem,
    supported: &[Conv2dAlgorithm],
) -> Conv2dAlgorithm {
    let has = |algorithm| supported.contains(&algorithm);
    let few = p.k_group() < 8 || p.taps() < 8;
    let sums = if few { Conv2dAlgorithm::Direct } else { Conv2dAlgorithm::Im2colGemm };
    if !p.is_winograd() || !may_transform(spec) {
        return sums;
    }
    let staged = Conv2dAlgorithm::WinogradGemm(tile(spec));
    let wins = |algorithm| p.c.min(p.k) >= 16 || algorithm == Conv2dAlgorithm::WinogradRow;
    let candidates = if stages_pay(spec, p) {
        [staged, Conv2dAlgorithm::WinogradRow]
    } else {
        [Conv2dAlgorithm::WinogradRow, staged]
    };
    candidates.into_iter().find(|&a| has(a) && wins(a)).unwrap_or(sums)
}

/// Whether the spec's accuracy allows an algorithm.
pub(crate) fn allows(spec: &Conv2dSpec, algorithm: Conv2dAlgorithm) -> bool {
    match algorithm {
        // Transforms in f32 throughout: a third of the tier's limit.
        Conv2dAlgorithm::WinogradGemm(Tile::F6) => is_strict(spec) && may_transform(spec),
        Conv2dAlgorithm::WinogradGemm(asked) => may_transform(spec) && asked.m() <= tile(spec).m(),
        _ => !algorithm.is_winograd() || may_transform(spec),
    }
}

/// Time that the model expects, in multiplications of the sums: those that are left, slower where stages pass
/// through memory.
pub(crate) fn cost(p: &Problem, configuration: &Conv2dConfiguration) -> f64 {
    let sums = p.flops() / 2.0;
    match configuration.algorithm {
        Conv2dAlgorithm::Direct => 10.0 * sums,
        Conv2dAlgorithm::WinogradRow => sums * 5.0 / 9.0,
        Conv2dAlgorithm::WinogradGemm(tile) => {
            let share = tile.alpha().pow(2) as f64 / (9 * tile.m().pow(2)) as f64;
            share * (sums + 64.0 * (p.c + p.k) as f64 * sums / (p.c * p.k).max(1) as f64)
        }
        _ => sums,
    }
}

fn may_transform(spec: &Conv2dSpec) -> bool {
    match spec.x.dtype {
        // f32 stays of f32 class, by split operands too; TF32 has the mantissa of f16.
        DType::F32 => spec.accuracy >= Accuracy::Fp32,
        DType::F16 => spec.accuracy >= Accuracy::Tf32,
        _ => spec.accuracy == Accuracy::Half,
    }
}

/// F4 raises errors more than F2, which f32 can afford, and f16 if it is asked for.
fn tile(spec: &Conv2dSpec) -> Tile {
    match (spec.x.dtype, spec.accuracy) {
        (DType::F32, _) | (DType::F16, Accuracy::Half) => Tile::F4,
        _ => Tile::F2,
    }
}

fn is_strict(spec: &Conv2dSpec) -> bool {
    spec.x.dtype == DType::F32 && spec.accuracy <= Accuracy::Fp32
}

/// True if the stages are ahead of the fused kernel: where products outweigh passes over
/// V and M.
fn stages_pay(spec: &Conv2dSpec, p: &Problem) -> bool {
    let (c, k) = match (spec.x.dtype, is_channels_last(&spec.y.layout)) {
        (DType::F32, true) => (256, 256),
        (_, true) => (512, 1024),
        (_, false) => (512, 512),
    };
    let m = tile(spec).m();
    let tiles = p.n * p.oh.div_ceil(m) * p.ow.div_ceil(m);
    !is_strict(spec) && p.c >= c && p.k >= k && tiles >= 1024
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::Conv2dParams;
    use crate::{Layout, TensorDesc};
    use Conv2dAlgorithm::{Cudnn, Direct, Im2colGemm, WinogradGemm, WinogradRow};

    const OWN: [Conv2dAlgorithm; 4] =
        [Direct, Im2colGemm, WinogradGemm(Tile::F2), WinogradGemm(Tile::F4)];

    /// What is taken for 64 images of 50x50 with `more` beside the algorithms of every device.
    fn taken(
        dtype: DType,
        accuracy: Accuracy,
        [c, k, taps, groups]: [usize; 4],
        more: &[Conv2dAlgorithm],
    ) -> Conv2dAlgorithm {
        let x = Layout::with_order(&[64, c, 50, 50], &[0, 1, 2, 3]).unwrap();
        let w = TensorDesc::contiguous(dtype, &[k, c / groups, taps, taps]).unwrap();
        let params = Conv2dParams { accuracy, groups, ..Default::default() };
        let spec = Conv2dSpec::new(TensorDesc { dtype, layout: x }, w, &params).unwrap();
        choose(&spec, &spec.problem().unwrap(), &[&OWN, more].concat())
    }

    #[test]
    fn accuracy_decides_what_is_allowed() {
        use Accuracy::{Exact, Fp32, Half, Tf32};
        for more in [&[][..], &[WinogradRow], &[Cudnn, WinogradRow]] {
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
                assert!(allowed <= algorithm.is_winograd(), "{dtype} {accuracy:?} {more:?}");
            }
        }
    }

    #[test]
    fn every_device_has_an_algorithm() {
        let f32 = |sizes, more: &[_]| taken(DType::F32, Accuracy::Fp32, sizes, more);
        assert_eq!(f32([64, 64, 3, 1], &[]), WinogradGemm(Tile::F4));
        assert_eq!(f32([64, 64, 3, 1], &[WinogradRow, Cudnn]), WinogradRow);
        assert_eq!(f32([3, 64, 3, 1], &[]), Im2colGemm);
        assert_eq!(f32([64, 64, 5, 1], &[WinogradRow, Cudnn]), Im2colGemm);
        assert_eq!(f32([64, 64, 3, 64], &[WinogradRow, Cudnn]), Direct);
        let half = |sizes| taken(DType::F16, Accuracy::Half, sizes, &[WinogradRow, Cudnn]);
        assert_eq!(half([512, 2048, 3, 1]), WinogradGemm(Tile::F4));
    }
}
