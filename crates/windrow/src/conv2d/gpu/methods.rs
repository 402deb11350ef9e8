//! Ways to compute a convolution on a GPU: what each has to say of itself, and the functions that ask all of them.

use super::prepared::Prepared;
use super::task::Task;
use super::{METHODS, choice};
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Problem};
use crate::gpu::{Feature, Gpu};
use crate::{DType, Error, Result};

/// A way to compute convolutions: which ones, how accurately, how fast, and with which parameters.
pub(super) trait Method: Sync {
    fn about(&self) -> &'static About;

    /// True if it has kernels for a spec, on some device and at some accuracy.
    fn computes(&self, task: &Task<'_>) -> bool;

    /// Whether the device and its libraries have what the kernels need.
    ///
    /// # Errors
    /// What is missing.
    fn runs_on(&self, _gpu: &Gpu, _task: &Task<'_>) -> Result<()> {
        Ok(())
    }

    /// Whether there is a kernel after all, for a library that tells only when it is asked for one.
    ///
    /// # Errors
    /// Those of the library.
    fn confirm(&self, _gpu: &'static Gpu, _task: &Task<'_>) -> Result<()> {
        Ok(())
    }

    /// True if the spec's accuracy allows it.
    fn allows(&self, _task: &Task<'_>) -> bool {
        true
    }

    /// True if it was ahead of every other method wherever it was measured: taken without a comparison.
    fn leads(&self, _task: &Task<'_>) -> bool {
        false
    }

    /// Expected microseconds of a run with a packed filter; infinite for parameters that no kernel has.
    fn micros(&self, task: &Task<'_>) -> f64;

    /// Bytes of a packed filter for each pair of an input and an output channel.
    fn pair_bytes(&self, task: &Task<'_>) -> usize {
        task.problem.r * task.problem.s * task.spec.w.dtype.size()
    }

    /// Fewest bytes of packed filter and workspace together, for a method that can work in pieces.
    fn least_bytes(&self, _task: &Task<'_>) -> usize {
        0
    }

    /// Configurations with kernels of their own.
    fn variants(&self, _dtype: DType) -> Vec<Conv2dConfiguration> {
        Vec::new()
    }

    /// Configurations that a search tries beside the model's.
    fn candidates(&self, task: &Task<'_>) -> Vec<Conv2dConfiguration> {
        self.variants(task.spec.x.dtype)
    }

    /// The configuration with all parameters of a plan by it; nothing is compiled.
    fn complete(&self, task: &Task<'_>) -> Conv2dConfiguration {
        Conv2dConfiguration::new(task.algorithm())
    }

    /// Compiles and loads the kernels.
    ///
    /// # Errors
    /// [`Error::Backend`].
    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Box<dyn Prepared>>;
}

/// What a method says of itself.
pub(super) struct About {
    /// Algorithms, as users name them, that it computes.
    pub(super) algorithms: &'static [Conv2dAlgorithm],
    /// Convolutions that it computes, in words, for the error of others.
    pub(super) domain: &'static str,
    /// Variants of its kernels, as lines of `verify/kernels.txt`.
    pub(super) kernels: &'static [&'static str],
    /// Parameters that a configuration may give.
    pub(super) parameters: &'static [Parameter],
}

/// A number of a [`Conv2dConfiguration`] that a method takes.
pub(super) struct Parameter {
    pub(super) name: &'static str,
    /// Its values, in words.
    pub(super) values: &'static str,
    pub(super) is_valid: fn(usize) -> bool,
}

/// Variants of all kernels that plans of convolutions can launch, as lines of `verify/kernels.txt`.
pub(crate) fn kernels() -> impl Iterator<Item = &'static str> {
    let methods = METHODS.into_iter().flat_map(|method| method.about().kernels);
    methods.chain(super::shared::KERNELS).chain(super::gradients::kernels()).copied()
}

/// The methods of an algorithm.
fn methods_of(algorithm: Conv2dAlgorithm) -> impl Iterator<Item = &'static dyn Method> {
    METHODS.into_iter().filter(move |method| method.about().algorithms.contains(&algorithm))
}

/// The method of the task's algorithm that has kernels for the spec; if none has, the most general one.
fn method_for(task: &Task<'_>) -> Option<&'static dyn Method> {
    let fits = fits_i32(task.problem);
    let computes = methods_of(task.algorithm()).find(|method| fits && method.computes(task));
    computes.or_else(|| methods_of(task.algorithm()).last())
}

/// True if the method computes the spec on `gpu`.
pub(super) fn supports(method: &dyn Method, gpu: &Gpu, task: &Task<'_>) -> bool {
    method.computes(task) && method.runs_on(gpu, task).is_ok()
}

/// [`Method::runs_on`] of kernels with products of warpgroups.
pub(super) fn needs_warpgroups(gpu: &Gpu, algorithm: Conv2dAlgorithm) -> Result<()> {
    if gpu.has(Feature::WarpgroupProducts) {
        return Ok(());
    }
    Err(Error::unsupported(
        format!("conv2d by {algorithm} on {}", gpu.device()),
        "it needs products of warpgroups, which compute capability 9.0 has",
    ))
}

/// Every algorithm that can compute the spec on `gpu`, whatever its accuracy.
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

/// The algorithm that should be fastest among those that the spec's accuracy and the options' memory allow.
///
/// # Errors
/// [`Error::Unsupported`] for sizes of 2^30 and more in one direction.
pub(crate) fn best(gpu: &'static Gpu, task: &Task<'_>) -> Result<Conv2dAlgorithm> {
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
        let chosen = choice::choose(task, &supported);
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

/// Compiles and loads the kernels of the task's configuration. Unless the options say
/// [`Tuning::Model`](crate::Tuning::Model), cuDNN's kernel is chosen by measuring.
///
/// # Errors
/// [`Error::Backend`] if that fails, [`Error::Unsupported`] if the algorithm is not among those of [`supported`].
pub(crate) fn prepare(gpu: &'static Gpu, task: &Task<'_>) -> Result<Box<dyn Prepared>> {
    if !fits_i32(task.problem) {
        return Err(too_large());
    }
    let algorithm = task.algorithm();
    let mut missing = None;
    for method in methods_of(algorithm).filter(|method| method.computes(task)) {
        match method.runs_on(gpu, task) {
            Ok(()) => return method.prepare(gpu, task),
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

/// Expected microseconds of the task's configuration with a packed filter.
pub(crate) fn micros(task: &Task<'_>) -> f64 {
    method_for(task).map_or(f64::INFINITY, |method| method.micros(task))
}

/// Expected microseconds of packing: a launch, and the filter read and written.
pub(super) fn pack_micros(task: &Task<'_>) -> f64 {
    let p = task.problem;
    let source = p.r * p.s * task.spec.w.dtype.size();
    let packed = method_for(task).map_or(source, |method| method.pair_bytes(task));
    let rates = &task.chip.rates.packing;
    rates.launch + rates.byte * (p.k * p.c_group() * (source + packed)) as f64
}

/// The task's configuration with the parameters that a plan would have; nothing is compiled.
pub(crate) fn complete(task: &Task<'_>) -> Conv2dConfiguration {
    method_for(task).map_or(task.configuration, |method| method.complete(task))
}

/// Configurations of the task's algorithm that a search tries beside the model's.
pub(crate) fn candidates(task: &Task<'_>) -> Vec<Conv2dConfiguration> {
    methods_of(task.algorithm()).flat_map(|method| method.candidates(task)).collect()
}

/// Configurations of an algorithm with kernels of their own.
pub(crate) fn variants(dtype: DType, algorithm: Conv2dAlgorithm) -> Vec<Conv2dConfiguration> {
    methods_of(algorithm).flat_map(|method| method.variants(dtype)).collect()
}

/// Whether a method of the algorithm takes a parameter, with this value.
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

/// True if kernels can count the convolution: positions and channels in 32 bits, elements in 64.
fn fits_i32(p: &Problem) -> bool {
    const LIMIT: usize = 1 << 30;
    let padded = |size: usize, pad: usize| size.checked_add(2 * pad).is_some_and(|s| s < LIMIT);
    let product = |sizes: &[usize]| {
        sizes.iter().try_fold(1usize, |a, &b| a.checked_mul(b)).is_some_and(|s| s < LIMIT)
    };
    p.padding.iter().all(|&x| x < LIMIT)
        && padded(p.h, p.padding[0])
        && padded(p.w, p.padding[1])
        && p.stride.iter().chain(&p.dilation).all(|&x| x < LIMIT)
        && p.n < LIMIT
        && product(&[p.h, p.w])
        && product(&[p.oh, p.ow])
        && product(&[p.c, p.r, p.s])
        && product(&[p.k, p.r, p.s])
}

fn too_large() -> Error {
    Error::unsupported(
        "a convolution with 2^30 or more pixels of an image, images or filter taps on a GPU",
        "kernels count them in 32 bits; split the batch or the image",
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
