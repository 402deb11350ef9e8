//! The list of the methods that compute convolutions on a GPU, and functions that search it.

use super::cudnn::CudnnMethod;
use super::few_taps::FewTapsMethod;
use super::general::{DIRECT, IM2COL_GEMM};
use super::group_products::GroupProductsMethod;
use super::grouped::GroupedMethod;
use super::implicit_gemm::ImplicitGemmMethod;
use super::method::{Method, check, supports};
use super::prepared::Prepared;
use super::task::Task;
use super::winograd_gemm::WinogradGemmMethod;
use super::winograd_row::WinogradRowMethod;
use crate::conv2d::problem::Frames;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::gpu::Gpu;
use crate::{Error, Result};

/// The methods on GPUs. If several have the same algorithm, the first that supports a problem computes it.
pub(super) static METHODS: [&dyn Method; 9] = [
    &GroupedMethod,
    &DIRECT,
    &FewTapsMethod,
    &IM2COL_GEMM,
    &GroupProductsMethod,
    &ImplicitGemmMethod,
    &WinogradGemmMethod,
    &WinogradRowMethod,
    &CudnnMethod,
];

/// The methods of an algorithm.
fn methods_of(algorithm: Conv2dAlgorithm) -> impl Iterator<Item = &'static dyn Method> {
    METHODS.into_iter().filter(move |method| method.about().algorithms.contains(&algorithm))
}

/// The first method of the task's algorithm that has kernels for the spec. If no method has, the last method of the
/// algorithm, which is the most general one. `None` if the algorithm does not run on GPUs.
pub(super) fn method_for(task: &Task<'_>) -> Option<&'static dyn Method> {
    let fits = fits_i32(task.problem);
    let computes = methods_of(task.algorithm()).find(|method| fits && method.computes(task));
    computes.or_else(|| methods_of(task.algorithm()).last())
}

/// The algorithms that can compute the spec on `gpu`, whatever their accuracy.
pub(crate) fn supported(gpu: &Gpu, task: &Task<'_>) -> Vec<Conv2dAlgorithm> {
    let mut found = Vec::new();
    if fits_i32(task.problem) {
        for method in METHODS.into_iter().filter(|&method| supports(method, gpu, task)) {
            for &algorithm in method.about().algorithms {
                if !found.contains(&algorithm) {
                    found.push(algorithm);
                }
            }
        }
    }
    found
}

/// Compiles and loads the kernels of the task's configuration. For cuDNN, a kernel is chosen by measuring unless the
/// options say [`Tuning::Model`](crate::Tuning::Model).
///
/// # Errors
/// [`Error::Backend`] if compiling or loading fails, [`Error::Unsupported`] if the algorithm is not among those of
/// [`supported`].
pub(crate) fn prepare(gpu: &'static Gpu, task: &Task<'_>) -> Result<Box<dyn Prepared>> {
    if !fits_i32(task.problem) {
        return Err(too_large());
    }
    let method = task.for_choice(|task| first_of(gpu, task))?;
    if !method.computes(task) {
        return Err(too_many_images(task));
    }
    method.prepare(gpu, task)
}

/// The first method of the task's algorithm that computes it on `gpu`.
fn first_of(gpu: &Gpu, task: &Task<'_>) -> Result<&'static dyn Method> {
    let algorithm = task.algorithm();
    let mut missing = None;
    for method in methods_of(algorithm).filter(|method| method.computes(task)) {
        match check(method, gpu, task) {
            Ok(()) => return Ok(method),
            Err(error) => missing = Some(error),
        }
    }
    Err(missing.unwrap_or_else(|| {
        let last = methods_of(algorithm).last();
        let domain = last.map_or("runs on the CPU alone", |method| method.about().domain);
        Error::unsupported(
            format!("conv2d by {algorithm} on {}", gpu.device()),
            format!("{algorithm} {domain}; direct and im2col_gemm compute everything"),
        )
    }))
}

/// True if the spec's accuracy allows the task's algorithm.
pub(crate) fn allows(task: &Task<'_>) -> bool {
    methods_of(task.algorithm()).any(|method| method.allows(task))
}

/// The expected microseconds of a run with the task's configuration and a packed filter.
pub(crate) fn micros(task: &Task<'_>) -> f64 {
    method_for(task).map_or(f64::INFINITY, |method| method.micros(task))
}

/// The expected time of packing in microseconds: the time of a launch, plus the time to read and write the filter.
pub(super) fn pack_micros(task: &Task<'_>) -> f64 {
    let p = task.problem;
    let source = p.r * p.s * task.spec.w.dtype.size();
    let packed = method_for(task).map_or(source, |method| method.pair_bytes(task));
    let rates = &task.chip.rates.packing;
    rates.launch + rates.byte * (p.k * p.c_group() * (source + packed)) as f64
}

/// The task's configuration, with each missing parameter set to the value that a plan would use. Nothing is compiled.
pub(crate) fn complete(task: &Task<'_>) -> Conv2dConfiguration {
    method_for(task).map_or(task.configuration, |method| method.complete(task))
}

/// The configurations of the task's algorithm that a search tries in addition to the cost model's choice.
pub(crate) fn candidates(task: &Task<'_>) -> Vec<Conv2dConfiguration> {
    methods_of(task.algorithm()).flat_map(|method| method.candidates(task)).collect()
}

/// The configurations of an algorithm for which separate kernels are compiled.
pub(crate) fn variants(
    (spec, problem): (&Conv2dSpec, &Problem),
    algorithm: Conv2dAlgorithm,
) -> Vec<Conv2dConfiguration> {
    methods_of(algorithm).flat_map(|method| method.variants(spec, problem)).collect()
}

/// True if a method of the algorithm accepts this value of the parameter `name`.
pub(crate) fn takes(algorithm: Conv2dAlgorithm, name: &str, value: usize) -> bool {
    let mut parameters = methods_of(algorithm).flat_map(|method| method.about().parameters);
    parameters.any(|parameter| parameter.name == name && (parameter.is_valid)(value))
}

/// The parameters of an algorithm with their values, in words.
pub(crate) fn parameters(algorithm: Conv2dAlgorithm) -> String {
    let all = methods_of(algorithm).flat_map(|method| method.about().parameters);
    let all: Vec<_> = all.map(|p| format!("{} ({})", p.name, p.values)).collect();
    if all.is_empty() { "no parameters".into() } else { all.join(" and ") }
}

/// True if all numbers that kernels count in 32 bits (positions, frames, channels, taps) are below 2^30. Elements are counted
/// in 64 bits.
fn fits_i32(p: &Problem) -> bool {
    const LIMIT: usize = 1 << 30;
    let padded = |size: usize, pad: usize| size.checked_add(2 * pad).is_some_and(|s| s < LIMIT);
    let product = |sizes: &[usize]| {
        sizes.iter().try_fold(1usize, |a, &b| a.checked_mul(b)).is_some_and(|s| s < LIMIT)
    };
    let Frames { t, kt, stride, padding, dilation, .. } = p.frames;
    p.padding.iter().all(|&x| x < LIMIT)
        && padded(p.h, p.padding[0])
        && padded(p.w, p.padding[1])
        && p.stride.iter().chain(&p.dilation).all(|&x| x < LIMIT)
        && p.n < LIMIT
        && product(&[p.h, p.w])
        && product(&[p.oh, p.ow])
        && padded(t, padding)
        && stride.max(dilation) < LIMIT
        && product(&[p.c, kt, p.r, p.s])
        && product(&[p.k, kt, p.r, p.s])
}

pub(super) fn too_large() -> Error {
    Error::unsupported(
        "a convolution with 2^30 or more pixels of an image, images, frames or filter taps on a GPU",
        "kernels count them in 32 bits; split the batch or the image",
    )
}

/// The error for a batch that the method for its images does not compute, though bits must not depend on the batch.
pub(super) fn too_many_images(task: &Task<'_>) -> Error {
    Error::unsupported(
        format!("conv2d of {} images with batch_invariant by {}", task.problem.n, task.algorithm()),
        "its kernels do not count so many elements; parts of the batch give the same bits",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_algorithm_of_gpus_has_a_method() {
        for &algorithm in Conv2dAlgorithm::ALL {
            let name = algorithm.name();
            let on_the_cpu = name.starts_with("direct_") || name.starts_with("winograd_fused");
            assert_eq!(methods_of(algorithm).count() == 0, on_the_cpu, "{algorithm}");
        }
    }

    #[test]
    fn parameters_are_those_of_the_algorithm() {
        let staged = Conv2dAlgorithm::WinogradGemm(crate::conv2d::Tile::F4);
        assert!(takes(staged, "block", 64) && !takes(staged, "block", 100));
        assert!(takes(staged, "tiles", 100) && !takes(staged, "parts", 2));
        let implicit = Conv2dAlgorithm::ImplicitGemm;
        assert!(takes(implicit, "parts", 8) && !takes(implicit, "parts", 3));
        assert!(!takes(Conv2dAlgorithm::Direct, "block", 64));
        assert_eq!(parameters(Conv2dAlgorithm::Direct), "no parameters");
    }
}
