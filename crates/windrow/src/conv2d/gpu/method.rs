//! The interface of a method: a way to compute convolutions on a GPU.

use super::prepared::Prepared;
use super::task::Task;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration};
use crate::gpu::{Feature, Gpu};
use crate::{DType, Error, Result};

/// A way to compute convolutions: which ones, how accurately, how fast, and with which parameters.
pub(super) trait Method: Sync {
    fn about(&self) -> &'static About;

    /// True if it has kernels for a spec, on some device and at some accuracy.
    fn computes(&self, task: &Task<'_>) -> bool;

    /// Checks that the device and its libraries have what the kernels need.
    ///
    /// # Errors
    /// What is missing.
    fn runs_on(&self, _gpu: &Gpu, _task: &Task<'_>) -> Result<()> {
        Ok(())
    }

    /// Checks that a library has a kernel, if only a request to the library can tell.
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

    /// True if it was the fastest method in all measurements. It is then chosen without a comparison.
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

    /// The configuration with all parameters that a plan by this method has; nothing is compiled.
    fn complete(&self, task: &Task<'_>) -> Conv2dConfiguration {
        Conv2dConfiguration::new(task.algorithm())
    }

    /// Compiles and loads the kernels.
    ///
    /// # Errors
    /// [`Error::Backend`].
    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Box<dyn Prepared>>;
}

/// The description of a method.
pub(super) struct About {
    /// Algorithms, as users name them, that it computes.
    pub(super) algorithms: &'static [Conv2dAlgorithm],
    /// The convolutions that it computes, in words, for the error message about others.
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
