//! Ways to compute a convolution on a GPU: what each has to say of itself, and the list of them.

use super::chips::Chip;
use super::shared::parameters::Operands;
use super::{METHODS, choice};
use crate::conv2d::winograd_reference::Stages;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::gpu::{Gpu, Stream};
use crate::{DType, Error, PlanOptions, Result, TensorRef};
use std::fmt::Debug;

/// A way to compute convolutions: which ones, how accurately, how fast, and with which parameters.
pub(super) trait Method: Sync {
    /// Algorithms, as users name them, that it computes.
    fn algorithms(&self) -> &'static [Conv2dAlgorithm];

    /// Convolutions that it computes, in words, for the error of others.
    fn domain(&self) -> &'static str;

    /// Variants of its kernels, as lines of `verify/kernels.txt`.
    fn kernels(&self) -> &'static [&'static str];

    /// True if it has kernels for a spec, on some device and at some accuracy.
    fn computes(&self, spec: &Conv2dSpec, problem: &Problem) -> bool;

    /// Whether the device and its libraries have what the kernels need.
    ///
    /// # Errors
    /// What is missing.
    fn runs_on(&self, _gpu: &Gpu, _spec: &Conv2dSpec) -> Result<()> {
        Ok(())
    }

    /// Whether there is a kernel after all, for a library that tells only when it is asked for one.
    ///
    /// # Errors
    /// Those of the library.
    fn confirm(&self, _gpu: &'static Gpu, _spec: &Conv2dSpec, _problem: &Problem) -> Result<()> {
        Ok(())
    }

    /// True if the spec's accuracy allows it.
    fn allows(&self, _spec: &Conv2dSpec, _algorithm: Conv2dAlgorithm) -> bool {
        true
    }

    /// True if it was ahead of every other method wherever it was measured: taken without a comparison.
    fn leads(&self, _problem: &Problem) -> bool {
        false
    }

    /// Expected microseconds of a run with a packed filter; infinite for parameters that no kernel has.
    fn micros(
        &self,
        chip: Chip,
        spec: &Conv2dSpec,
        problem: &Problem,
        configuration: &Conv2dConfiguration,
    ) -> f64;

    /// Bytes of a packed filter for each pair of an input and an output channel.
    fn pair_bytes(&self, spec: &Conv2dSpec, p: &Problem, _algorithm: Conv2dAlgorithm) -> usize {
        p.r * p.s * spec.w.dtype.size()
    }

    /// Fewest bytes of packed filter and workspace together, for a method that can work in pieces.
    fn least_bytes(
        &self,
        _multiprocessors: u32,
        _spec: &Conv2dSpec,
        _problem: &Problem,
        _algorithm: Conv2dAlgorithm,
    ) -> usize {
        0
    }

    /// Parameters that a configuration may give.
    fn parameters(&self) -> &'static [Parameter] {
        &[]
    }

    /// Configurations with kernels of their own.
    fn variants(&self, _dtype: DType) -> Vec<Conv2dConfiguration> {
        Vec::new()
    }

    /// Configurations that a search tries beside the model's.
    fn candidates(
        &self,
        spec: &Conv2dSpec,
        _algorithm: Conv2dAlgorithm,
    ) -> Vec<Conv2dConfiguration> {
        self.variants(spec.x.dtype)
    }

    /// The configuration with all parameters of a plan by it; nothing is compiled.
    fn complete(
        &self,
        _gpu: &Gpu,
        _spec: &Conv2dSpec,
        _problem: &Problem,
        configuration: &Conv2dConfiguration,
        _options: &PlanOptions,
    ) -> Conv2dConfiguration {
        Conv2dConfiguration::new(configuration.algorithm)
    }

    /// Compiles and loads the kernels.
    ///
    /// # Errors
    /// [`Error::Backend`].
    fn prepare(
        &self,
        gpu: &'static Gpu,
        spec: &Conv2dSpec,
        problem: &Problem,
        configuration: &Conv2dConfiguration,
        options: &PlanOptions,
    ) -> Result<Box<dyn Prepared>>;
}

/// A number of a [`Conv2dConfiguration`] that a method takes.
pub(super) struct Parameter {
    pub(super) name: &'static str,
    /// Its values, in words.
    pub(super) values: &'static str,
    pub(super) is_valid: fn(usize) -> bool,
}

/// A convolution bound to a device and a method: its kernels are compiled and loaded.
pub(crate) trait Prepared: Debug + Send + Sync {
    /// The algorithm's configuration with all parameters of one that runs with it.
    fn configuration(&self, algorithm: Conv2dAlgorithm) -> Conv2dConfiguration {
        Conv2dConfiguration::new(algorithm)
    }

    /// What the packed filter looks like beside its shape and algorithm.
    fn packed_form(&self) -> PackedForm;

    /// Bytes of a packed filter.
    fn packed_bytes(&self) -> usize;

    /// Bytes of scratch memory of a run, aligned to 256.
    fn scratch_bytes(&self) -> usize {
        0
    }

    /// Bytes behind a pack that is kept, by which [`Prepared::pack`] sees whether it is still that of the filter. None
    /// where a copy takes as long as a comparison.
    fn seen_bytes(&self) -> usize {
        0
    }

    /// True if [`Prepared::run`] can read the filter at `w` as it is, without a pack.
    fn reads_in_place(&self, _w: *const u8) -> bool {
        false
    }

    /// Packs the filter at `w`, which has the spec's layout.
    ///
    /// With a `ticket`, which is a number of the memory at `packed` and no other, the pack is kept there, in the order of
    /// one stream: if the filter is as it was packed before, by its content, the pack is left as it is, without waiting.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// `w` must be the filter on the stream's device, `packed` [`Prepared::packed_bytes`] there and, with a ticket,
    /// [`Prepared::seen_bytes`] more behind them.
    unsafe fn pack(
        &self,
        stream: &Stream,
        w: *const u8,
        packed: *mut u8,
        ticket: Option<u64>,
    ) -> Result<()>;

    /// The filter at `w` in the form that [`Prepared::run`] takes: as it is, or packed to `memory`.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// As [`Prepared::pack`].
    unsafe fn packed(&self, stream: &Stream, w: *const u8, memory: *mut u8) -> Result<*const u8> {
        if self.reads_in_place(w) {
            return Ok(w);
        }
        // SAFETY: the caller's promise.
        unsafe { self.pack(stream, w, memory, None)? };
        Ok(memory)
    }

    /// Computes y.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// The operands must be tensors of the spec's layouts on the stream's device, `packed` what [`Prepared::packed`]
    /// gives, `scratch` [`Prepared::scratch_bytes`] there.
    unsafe fn run(
        &self,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
        scratch: *mut u8,
    ) -> Result<()>;

    /// How far a sum may be off before the activation, relative to its scale.
    fn tolerance(&self) -> f64;

    /// Outputs of a tile in each direction, of Winograd's algorithms.
    fn tile(&self) -> Option<usize> {
        None
    }

    /// U, V and M of views that agree with the spec, for a method in stages if one chunk holds them.
    ///
    /// # Errors
    /// [`Error::Backend`], [`Error::OutOfMemory`].
    fn winograd_stages(
        &self,
        _gpu: &'static Gpu,
        _w: &TensorRef<'_>,
        _x: &TensorRef<'_>,
    ) -> Result<Option<Stages<Vec<f32>>>> {
        Ok(None)
    }

    /// Relative errors of U and V of [`Prepared::winograd_stages`]: as stored, and as multiplied.
    fn operand_roundings(&self) -> (f64, f64) {
        (0.0, 0.0)
    }

    /// Errors of U and V beside those, relative to the largest number of an output channel's filters and of an image.
    fn underflows(&self) -> [f64; 2] {
        [0.0; 2]
    }

    /// Blocking, in words.
    fn explain(&self) -> String;
}

/// What a packed filter looks like beside its shape and algorithm: equal forms are read alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PackedForm {
    pub(super) method: &'static str,
    pub(super) dtype: DType,
    /// Products that the split operands take part in.
    pub(super) products: usize,
    /// What else of the method decides the order of the elements.
    pub(super) order: usize,
}

/// Variants of all kernels that plans of convolutions can launch, as lines of `verify/kernels.txt`.
pub(crate) fn kernels() -> impl Iterator<Item = &'static str> {
    let methods = METHODS.into_iter().flat_map(Method::kernels);
    methods.chain(super::shared::KERNELS).chain(super::gradients::kernels()).copied()
}

/// The methods of an algorithm.
fn methods_of(algorithm: Conv2dAlgorithm) -> impl Iterator<Item = &'static dyn Method> {
    METHODS.into_iter().filter(move |method| method.algorithms().contains(&algorithm))
}

/// The method of an algorithm that has kernels for the spec; if none has, the most general one.
fn method_for(
    algorithm: Conv2dAlgorithm,
    spec: &Conv2dSpec,
    problem: &Problem,
) -> Option<&'static dyn Method> {
    let fits = fits_i32(problem);
    let computes = methods_of(algorithm).find(|method| fits && method.computes(spec, problem));
    computes.or_else(|| methods_of(algorithm).last())
}

/// True if the method computes the spec on `gpu`.
pub(super) fn supports(
    method: &dyn Method,
    gpu: &Gpu,
    spec: &Conv2dSpec,
    problem: &Problem,
) -> bool {
    method.computes(spec, problem) && method.runs_on(gpu, spec).is_ok()
}

/// Every algorithm that can compute the spec on `gpu`, whatever its accuracy.
pub(crate) fn supported(gpu: &Gpu, spec: &Conv2dSpec, problem: &Problem) -> Vec<Conv2dAlgorithm> {
    let mut found = Vec::new();
    if fits_i32(problem) {
        for method in METHODS.into_iter().filter(|&method| supports(method, gpu, spec, problem)) {
            for &algorithm in method.algorithms() {
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
pub(crate) fn best(
    gpu: &'static Gpu,
    spec: &Conv2dSpec,
    problem: &Problem,
    options: &PlanOptions,
) -> Result<Conv2dAlgorithm> {
    let mut supported = supported(gpu, spec, problem);
    if supported.is_empty() {
        return Err(too_large());
    }
    let chip = Chip::of(gpu);
    if let Some(memory) = options.memory {
        let least = |algorithm| {
            let method = method_for(algorithm, spec, problem);
            method.map_or(0, |m| m.least_bytes(chip.multiprocessors, spec, problem, algorithm))
        };
        supported.retain(|&algorithm| least(algorithm) <= memory);
    }
    let leads =
        |method: &&dyn Method| method.leads(problem) && supports(*method, gpu, spec, problem);
    if let Some(leader) = METHODS.into_iter().find(leads) {
        return Ok(leader.algorithms()[0]);
    }
    loop {
        let chosen = choice::choose(spec, problem, &supported, chip, options.filter);
        let method = method_for(chosen, spec, problem);
        match method.map_or(Ok(()), |method| method.confirm(gpu, spec, problem)) {
            Err(error) if supported.contains(&chosen) => {
                tracing::debug!(%error, "conv2d without {chosen}");
                supported.retain(|&other| other != chosen);
            }
            Ok(()) | Err(_) => return Ok(chosen),
        }
    }
}

/// Compiles and loads the kernels of a configuration. Unless the options say [`Tuning::Model`](crate::Tuning::Model),
/// cuDNN's kernel is chosen by measuring.
///
/// # Errors
/// [`Error::Backend`] if that fails, [`Error::Unsupported`] if the algorithm is not among those of [`supported`].
pub(crate) fn prepare(
    gpu: &'static Gpu,
    spec: &Conv2dSpec,
    problem: &Problem,
    configuration: &Conv2dConfiguration,
    options: &PlanOptions,
) -> Result<Box<dyn Prepared>> {
    if !fits_i32(problem) {
        return Err(too_large());
    }
    let algorithm = configuration.algorithm;
    let mut missing = None;
    for method in methods_of(algorithm).filter(|method| method.computes(spec, problem)) {
        match method.runs_on(gpu, spec) {
            Ok(()) => return method.prepare(gpu, spec, problem, configuration, options),
            Err(error) => missing = Some(error),
        }
    }
    Err(missing.unwrap_or_else(|| {
        let domain = methods_of(algorithm).last().map_or("runs on the CPU alone", Method::domain);
        Error::unsupported(
            format!("conv2d by {algorithm} on {}", gpu.device()),
            format!("{algorithm} {domain}; direct and im2col_gemm compute everything"),
        )
    }))
}

/// True if the spec's accuracy allows an algorithm.
pub(crate) fn allows(spec: &Conv2dSpec, algorithm: Conv2dAlgorithm) -> bool {
    methods_of(algorithm).any(|method| method.allows(spec, algorithm))
}

/// Expected microseconds of a configuration with a packed filter.
pub(super) fn micros(
    chip: Chip,
    spec: &Conv2dSpec,
    problem: &Problem,
    configuration: &Conv2dConfiguration,
) -> f64 {
    let method = method_for(configuration.algorithm, spec, problem);
    method.map_or(f64::INFINITY, |m| m.micros(chip, spec, problem, configuration))
}

/// Expected microseconds of a configuration on a device, with a packed filter.
pub(crate) fn cost(
    gpu: &Gpu,
    spec: &Conv2dSpec,
    problem: &Problem,
    configuration: &Conv2dConfiguration,
) -> f64 {
    micros(Chip::of(gpu), spec, problem, configuration)
}

/// Expected microseconds of packing: a launch, and the filter read and written.
pub(super) fn pack_micros(
    chip: Chip,
    spec: &Conv2dSpec,
    p: &Problem,
    algorithm: Conv2dAlgorithm,
) -> f64 {
    let source = p.r * p.s * spec.w.dtype.size();
    let method = method_for(algorithm, spec, p);
    let packed = method.map_or(source, |method| method.pair_bytes(spec, p, algorithm));
    let rates = &chip.rates.packing;
    rates.launch + rates.byte * (p.k * p.c_group() * (source + packed)) as f64
}

/// A configuration with the parameters that a plan would have; nothing is compiled.
pub(crate) fn complete(
    gpu: &Gpu,
    spec: &Conv2dSpec,
    problem: &Problem,
    configuration: &Conv2dConfiguration,
    options: &PlanOptions,
) -> Conv2dConfiguration {
    let method = method_for(configuration.algorithm, spec, problem);
    method.map_or(*configuration, |m| m.complete(gpu, spec, problem, configuration, options))
}

/// Configurations of an algorithm that a search tries beside the model's.
pub(crate) fn candidates(
    spec: &Conv2dSpec,
    algorithm: Conv2dAlgorithm,
) -> Vec<Conv2dConfiguration> {
    methods_of(algorithm).flat_map(|method| method.candidates(spec, algorithm)).collect()
}

/// Configurations of an algorithm with kernels of their own.
pub(crate) fn variants(dtype: DType, algorithm: Conv2dAlgorithm) -> Vec<Conv2dConfiguration> {
    methods_of(algorithm).flat_map(|method| method.variants(dtype)).collect()
}

/// Whether a method of the algorithm takes a parameter, with this value.
pub(crate) fn takes(algorithm: Conv2dAlgorithm, name: &str, value: usize) -> bool {
    let mut parameters = methods_of(algorithm).flat_map(|method| method.parameters());
    parameters.any(|parameter| parameter.name == name && (parameter.is_valid)(value))
}

/// The parameters of an algorithm with their values, in words.
pub(crate) fn parameters(algorithm: Conv2dAlgorithm) -> String {
    let all = methods_of(algorithm).flat_map(|method| method.parameters());
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
            let on_the_cpu = matches!(algorithm, Conv2dAlgorithm::WinogradFused(_));
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
