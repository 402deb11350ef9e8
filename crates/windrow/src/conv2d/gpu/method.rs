//! The interface of a method: a way to compute convolutions on a GPU.

use super::prepared::Prepared;
use super::task::Task;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::gpu::{Feature, Gpu};
use crate::{Error, Result};

/// A way to compute convolutions. It says which convolutions it computes, how accurately and how fast, and with which
/// parameters.
pub(super) trait Method: Sync {
    fn about(&self) -> &'static About;

    /// True if the method has kernels for the task's spec. The device and the accuracy are not checked.
    fn computes(&self, task: &Task<'_>) -> bool;

    /// Checks that the GPU and its libraries have what the kernels need.
    ///
    /// # Errors
    /// [`Error::Unsupported`], which says what is missing.
    fn runs_on(&self, _gpu: &Gpu, _task: &Task<'_>) -> Result<()> {
        Ok(())
    }

    /// False if the bits of an image's result may depend on the number of images.
    fn is_batch_invariant(&self) -> bool {
        true
    }

    /// A request to cuDNN, whether it has a kernel for the task. Other methods need none.
    ///
    /// # Errors
    /// The errors of the library.
    fn confirm(&self, _gpu: &'static Gpu, _task: &Task<'_>) -> Result<()> {
        Ok(())
    }

    /// True if the spec's accuracy allows this method.
    fn allows(&self, _task: &Task<'_>) -> bool {
        true
    }

    /// True if the method was the fastest in all measurements of such tasks. It is then chosen without comparing
    /// expected times, whatever the memory limit is.
    fn leads(&self, _task: &Task<'_>) -> bool {
        false
    }

    /// Expected microseconds of a run with a packed filter; infinite for parameters that no kernel has.
    fn micros(&self, task: &Task<'_>) -> f64;

    /// Bytes of the packed filter divided by (output channels times input channels of a group).
    fn pair_bytes(&self, task: &Task<'_>) -> usize {
        task.problem.r * task.problem.s * task.spec.w.dtype.size()
    }

    /// The smallest number of bytes, of packed filter and workspace together, with which a method can run that splits
    /// its work into pieces. 0 for methods that cannot split it.
    fn least_bytes(&self, _task: &Task<'_>) -> usize {
        0
    }

    /// The configurations of a spec for which separate kernels are compiled.
    fn variants(&self, _spec: &Conv2dSpec, _problem: &Problem) -> Vec<Conv2dConfiguration> {
        Vec::new()
    }

    /// The configurations that a search tries in addition to the cost model's choice.
    fn candidates(&self, task: &Task<'_>) -> Vec<Conv2dConfiguration> {
        self.variants(task.spec, task.problem)
    }

    /// The task's configuration with all parameters that a plan with this method has. Nothing is compiled.
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
    /// The algorithms (the names that users may ask for) that the method computes.
    pub(super) algorithms: &'static [Conv2dAlgorithm],
    /// A description of the convolutions that it computes, for the error message if it cannot compute one.
    pub(super) domain: &'static str,
    /// The variants of its kernels, as lines of `verify/kernels.txt`.
    pub(super) kernels: &'static [&'static str],
    /// The parameters that a configuration may give.
    pub(super) parameters: &'static [Parameter],
}

/// A numeric parameter of a [`Conv2dConfiguration`] that a method accepts.
pub(super) struct Parameter {
    pub(super) name: &'static str,
    /// Its values, in words.
    pub(super) values: &'static str,
    pub(super) is_valid: fn(usize) -> bool,
}

/// True if the method computes the task on `gpu`.
pub(super) fn supports(method: &dyn Method, gpu: &Gpu, task: &Task<'_>) -> bool {
    method.computes(task) && check(method, gpu, task).is_ok()
}

/// Checks that the GPU has what the kernels need, and that the method's bits are as the task's options demand.
///
/// # Errors
/// [`Error::Unsupported`].
pub(super) fn check(method: &dyn Method, gpu: &Gpu, task: &Task<'_>) -> Result<()> {
    if task.options.batch_invariant && !method.is_batch_invariant() {
        return Err(Error::unsupported(
            format!("conv2d by {} with batch_invariant", task.algorithm()),
            "its library chooses kernels by the number of images",
        ));
    }
    method.runs_on(gpu, task)
}

/// The check of [`Method::runs_on`] for kernels with warpgroup matrix instructions (wgmma).
pub(super) fn needs_warpgroups(gpu: &Gpu, algorithm: Conv2dAlgorithm) -> Result<()> {
    if gpu.has(Feature::WarpgroupProducts) {
        return Ok(());
    }
    Err(Error::unsupported(
        format!("conv2d by {algorithm} on {}", gpu.device()),
        "it needs products of warpgroups, which compute capability 9.0 has",
    ))
}
