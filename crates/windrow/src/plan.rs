//! Plan options, the workspace, and the generic `Plan` of all operators.

mod checks;
pub(crate) mod configuration;
mod operator;
mod placed;
mod plan_inputs;
mod planned;
#[cfg(feature = "tuning")]
mod search;

pub(crate) use checks::{Checks, Type};
pub(crate) use configuration::{configuration, dense, joined};
pub use operator::{Configuration, Measured, Operator, Tuned};
pub(crate) use operator::{Engine, Input, Setup, Views, inputs, views};
pub use placed::Placed;
pub(crate) use plan_inputs::HeldInputs;
pub use plan_inputs::PlanInputs;
pub use planned::Plan;
pub(crate) use planned::{Backend, engine};
#[cfg(feature = "tuning")]
pub(crate) use search::decide;
#[cfg(all(test, feature = "tuning"))]
pub(crate) use search::{CandidateRuns, SearchTask};

use crate::buffer::Buffer;
use crate::forms::{names, setters};
use crate::gpu::{DeviceBuffer, Gpu, Stream};
use crate::{Device, Error, Result};
use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

/// The accuracy that a result must have. [`Plan::new`] chooses only among algorithms that fulfil it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Accuracy {
    /// Algorithms that sum products directly, in f32: no Winograd transform, and no operand rounded to a lower
    /// precision.
    Exact,
    /// A relative RMS error close to that of plain f32 sums, against the f64 oracle: for a convolution with 256 input
    /// channels at most 1e-5. It allows Winograd in f32, and tensor cores with each f32 operand split into several
    /// numbers of lower precision.
    #[default]
    Fp32,
    /// Operands may be rounded to TF32 (10-bit mantissa). Sums are in f32.
    Tf32,
    /// Operands may be rounded to f16 or bf16. Sums are in f32.
    Half,
}

names! { Accuracy, "accuracy": Exact = "exact", Fp32 = "fp32", Tf32 = "tf32", Half = "half" }

/// A switch that says whether a plan compares the result of each run with the f64 oracle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verify {
    /// No check.
    Off,
    /// Every result is compared with the oracle. The run returns [`Error::Verification`] if an element is outside its
    /// tolerance, which `docs/accuracy.md` defines. Such runs are slow and allocate memory. They return
    /// [`Error::OutOfMemory`] if there is no memory for the oracle.
    On,
}

impl Default for Verify {
    /// The value of the environment variable `WINDROW_VERIFY`, parsed by `FromStr`; `Off` if it is not set. It is read
    /// once per process. An invalid value logs a warning and counts as `On`.
    fn default() -> Self {
        use std::sync::LazyLock;
        static FROM_ENV: LazyLock<Verify> = LazyLock::new(|| {
            let Some(value) = std::env::var_os("WINDROW_VERIFY") else { return Verify::Off };
            value.to_string_lossy().parse().unwrap_or_else(|error| {
                tracing::warn!(%error, "every result is compared with the oracle");
                Verify::On
            })
        });
        *FROM_ENV
    }
}

impl std::str::FromStr for Verify {
    type Err = Error;

    /// The value of a word, in any case: `1`, `true`, `yes` and `on` mean `On`; `0`, `false`, `no`, `off` and the empty
    /// string mean `Off`.
    fn from_str(s: &str) -> Result<Self> {
        match s.to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" | "on" => Ok(Verify::On),
            "" | "0" | "false" | "no" | "off" => Ok(Verify::Off),
            _ => {
                Err(Error::parameter("WINDROW_VERIFY", s, "1, true, yes, on, 0, false, no or off"))
            }
        }
    }
}

/// The way in which a plan's configuration (an algorithm with its parameters) is chosen. Without the feature `tuning`
/// there are no measurements: `Cached` acts like `Model`, and `Search` returns [`Error::Unsupported`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Tuning {
    /// The configuration that the cost model chooses; measurements are ignored.
    Model,
    /// The configuration that a search on this machine found for this spec. If there is none, the one that ships with
    /// the library for this type of device. If there is none either, the cost model's. A configuration found on this
    /// machine is used only with the type of device, the driver and the version of Windrow with which it was measured.
    /// A shipped one is used with any driver. One that is not valid for the spec is ignored.
    #[default]
    Cached,
    /// The configuration found on this machine. If there is none, the candidates are measured while the plan is made,
    /// and the best of them is saved. Shipped configurations are not used.
    Search {
        /// The time that measuring may take.
        budget: Duration,
    },
}

/// A hint for the cost model: whether the filter of a convolution changes between runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Filter {
    /// A filter that seldom changes. The time of packing it does not count when an algorithm is chosen. Runs should get
    /// it as [`Weights::Packed`](crate::Weights::Packed) or [`Weights::Cached`](crate::Weights::Cached), so that it is
    /// packed once for many runs.
    #[default]
    Kept,
    /// A filter that changes with every run, as in training. The time of packing it counts when an algorithm is chosen.
    Changing,
}

/// The options of a plan: where and how it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PlanOptions {
    /// The device; every tensor of a run must be there.
    pub device: Device,
    /// The number of CPU threads. Numbers above 1024 count as 1024. `None` means
    /// [`cpu::num_threads`](crate::cpu::num_threads).
    pub threads: Option<NonZeroUsize>,
    /// Whether every run is checked against the oracle.
    pub verify: Verify,
    /// The way in which the configuration is chosen.
    pub tuning: Tuning,
    /// Whether the filter changes between runs; only [`Conv2dPlan`](crate::Conv2dPlan) uses it.
    pub filter: Filter,
    /// The limit in bytes for the memory of a convolution on a GPU: the sum of packed filter and workspace. `None`
    /// means no limit. Winograd algorithms split the work into smaller pieces to stay below the limit. They are not
    /// chosen if even the smallest pieces exceed it. Other algorithms ignore the limit. With a limit, the tuning tables
    /// are not used, because their entries were measured without one.
    pub memory: Option<usize>,
    /// True if the bits of each image or sequence must not depend on what else is in its batch. The cost model then
    /// chooses for a fixed number of images and a kept filter, whatever `tuning` and `filter` say. On GPUs it is
    /// [`Error::Unsupported`] for convolutions of videos, for dense weights of causal convolutions, and for algorithms
    /// of libraries (`cudnn`, `winograd_gemm`). See `docs/batch-invariance.md`.
    pub batch_invariant: bool,
}

setters! {
    PlanOptions {
        with_device(device: Device);
        with_verify(verify: Verify);
        with_tuning(tuning: Tuning);
        with_filter(filter: Filter);
        with_batch_invariant(batch_invariant: bool);
        ? with_threads(threads: NonZeroUsize);
        ? with_memory(memory: usize);
    }
}

impl PlanOptions {
    /// Whether the cost model counts the packing of the filter.
    pub(crate) fn counted_filter(&self) -> Filter {
        if self.batch_invariant { Filter::Kept } else { self.filter }
    }
}

/// The measured configuration for a plan. Without the feature `tuning` there is none: the result is `None`, or an error
/// for [`Tuning::Search`].
#[cfg(not(feature = "tuning"))]
pub(crate) fn decide<O: Tuned>(
    _: &O::Spec,
    options: &PlanOptions,
) -> Result<Option<O::Configuration>> {
    match options.tuning {
        Tuning::Model | Tuning::Cached => Ok(None),
        Tuning::Search { .. } => Err(Error::unsupported(
            "a search",
            "this library was built without the feature `tuning`",
        )),
    }
}

/// The temporary memory of runs, and the stream on which their work is ordered.
///
/// A run takes its temporary memory from the workspace, so the workspace must be large enough for every plan that uses
/// it. [`Workspace::for_sizes`] makes such a workspace. Plans that share a workspace run one after the other, on its
/// stream.
///
/// On the CPU a run is done when it returns. On a GPU a run is enqueued on the stream and may still be running when the
/// call returns. [`Workspace::synchronize`] waits until it has finished.
#[derive(Debug)]
pub struct Workspace {
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    Host(Buffer),
    Device { buffer: DeviceBuffer, stream: Arc<Stream> },
}

impl Workspace {
    /// An empty workspace on the CPU, enough for plans that need none.
    pub fn empty() -> Self {
        Self::new(Device::Cpu, 0).expect("an empty workspace needs no memory")
    }

    /// A workspace of `bytes` bytes. On a GPU it uses the device's legacy default stream. The driver orders work on
    /// that stream with work on every *blocking* stream of the device (one that was made without
    /// `cudaStreamNonBlocking` or `hipStreamNonBlocking`). So a run sees what earlier runs on these streams wrote, even
    /// if they used another workspace. Concurrent runs and graph capture need another stream, because this one
    /// serializes runs and cannot be captured: see [`Workspace::on_stream`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::NoDevice`], [`Error::Backend`].
    pub fn new(device: Device, bytes: usize) -> Result<Self> {
        let memory = match device {
            Device::Cpu => Memory::Host(Buffer::new(bytes)?),
            gpu => return Self::on_shared(&default_stream(gpu)?, bytes),
        };
        Ok(Workspace { memory })
    }

    /// One workspace for several plans: as large as the largest of their `workspace_bytes()`.
    ///
    /// # Errors
    /// As [`Workspace::new`].
    pub fn for_sizes(device: Device, bytes: impl IntoIterator<Item = usize>) -> Result<Self> {
        Self::new(device, bytes.into_iter().max().unwrap_or(0))
    }

    /// A workspace on a stream that the caller owns: `stream` is a `cudaStream_t` or `hipStream_t` of `device`, or null
    /// for the legacy default stream. An integer as `device` is the index of a CUDA device. The memory is
    /// stream-ordered: it is allocated, used and freed on the stream. So a workspace can be made and dropped for every
    /// run without waiting.
    ///
    /// # Errors
    /// As [`Workspace::new`].
    ///
    /// # Safety
    /// `stream` must stay alive until the workspace is dropped. If other streams use the tensors of a run, the caller
    /// must synchronize them with this one. Only blocking streams and the legacy default stream are synchronized
    /// implicitly.
    pub unsafe fn on_stream(
        device: impl Into<Device>,
        stream: *mut c_void,
        bytes: usize,
    ) -> Result<Self> {
        // SAFETY: the caller's promise.
        Self::on_shared(&Arc::new(unsafe { Stream::from_raw(device, stream)? }), bytes)
    }

    /// A workspace like that of [`Workspace::on_stream`], in memory that the caller provides: `bytes` bytes at
    /// `memory`, for example from the program's own allocator. So runs can use that allocator's cached memory, and no
    /// second memory pool is needed.
    ///
    /// # Errors
    /// [`Error::Parameter`] for memory that is not aligned to 256 bytes; otherwise as [`Workspace::new`].
    ///
    /// # Safety
    /// As [`Workspace::on_stream`]. The memory must be on the device. Nothing else may use it until the workspace is
    /// dropped and its runs on the stream have finished.
    pub unsafe fn on_memory(
        device: impl Into<Device>,
        stream: *mut c_void,
        memory: *mut c_void,
        bytes: usize,
    ) -> Result<Self> {
        const ALIGNMENT: usize = 256;
        if !memory.addr().is_multiple_of(ALIGNMENT) {
            let expected = format!("a multiple of {ALIGNMENT}");
            return Err(Error::parameter("memory", format!("{memory:?}"), expected));
        }
        // SAFETY: the caller's promise.
        let stream = Arc::new(unsafe { Stream::from_raw(device, stream)? });
        // SAFETY: the caller's promise; the alignment was checked above.
        let buffer = unsafe { DeviceBuffer::lent(&stream, memory.cast(), bytes) };
        Ok(Workspace { memory: Memory::Device { buffer, stream } })
    }

    /// A workspace on a stream that other workspaces may share.
    pub(crate) fn on_shared(stream: &Arc<Stream>, bytes: usize) -> Result<Self> {
        let buffer = DeviceBuffer::new(stream, bytes)?;
        Ok(Workspace { memory: Memory::Device { buffer, stream: stream.clone() } })
    }

    /// Sets the stream for later runs. The caller owns the stream. The call first waits for the runs that have not
    /// finished. A workspace on the CPU is left unchanged.
    ///
    /// # Errors
    /// [`Error::Backend`] if earlier work on the old stream has failed.
    ///
    /// # Safety
    /// `stream` must be a `cudaStream_t` or `hipStream_t` of this workspace's device that stays alive until another one
    /// is set or the workspace is dropped. The caller must synchronize other streams as described for
    /// [`Workspace::on_stream`].
    pub unsafe fn set_stream(&mut self, stream: *mut c_void) -> Result<()> {
        // The memory may still be in use by earlier runs.
        self.synchronize()?;
        if let Memory::Device { stream: current, .. } = &mut self.memory {
            // SAFETY: the caller's promise.
            *current = Arc::new(unsafe { Stream::from_raw(current.device(), stream)? });
        }
        Ok(())
    }

    /// Waits until all runs in this workspace are done.
    ///
    /// # Errors
    /// [`Error::Backend`] if a kernel failed; [`Error::Index`] if any run on the device, in this workspace or another,
    /// found an index out of range that has not been reported yet.
    pub fn synchronize(&self) -> Result<()> {
        match &self.memory {
            Memory::Host(_) => Ok(()),
            Memory::Device { stream, .. } => {
                stream.synchronize()?;
                stream.gpu().check_indices()
            }
        }
    }

    /// The stream of the runs in this workspace; `None` on the CPU.
    pub fn stream(&self) -> Option<&Stream> {
        match &self.memory {
            Memory::Host(_) => None,
            Memory::Device { stream, .. } => Some(stream),
        }
    }

    /// The device of the workspace.
    pub fn device(&self) -> Device {
        self.stream().map_or(Device::Cpu, Stream::device)
    }

    /// The size of the workspace in bytes.
    pub fn len(&self) -> usize {
        match &self.memory {
            Memory::Host(buffer) => buffer.len(),
            Memory::Device { buffer, .. } => buffer.len(),
        }
    }

    /// True if the workspace has no memory.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first `bytes` bytes on the CPU, aligned to 64. Their values are arbitrary, but they are initialised.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<&mut [u8]> {
        self.check_len(bytes)?;
        match &mut self.memory {
            Memory::Host(buffer) => Ok(&mut buffer.as_mut_slice()[..bytes]),
            Memory::Device { stream, .. } => Err(Error::WrongDevice {
                arg: "workspace",
                given: stream.device(),
                expected: Device::Cpu,
            }),
        }
    }

    /// The stream and the address of the first `bytes` bytes on `gpu`, aligned to 256.
    pub(crate) fn take_on(&mut self, gpu: &Gpu, bytes: usize) -> Result<(&Stream, *mut u8)> {
        crate::tensor::check_device("workspace", self.device(), gpu.device())?;
        self.check_len(bytes)?;
        match &mut self.memory {
            Memory::Device { buffer, stream } => Ok((stream, buffer.as_mut_ptr())),
            Memory::Host(_) => unreachable!("the device was compared above"),
        }
    }

    fn check_len(&self, bytes: usize) -> Result<()> {
        if bytes <= self.len() {
            return Ok(());
        }
        Err(Error::WorkspaceTooSmall { given: self.len(), needed: bytes })
    }
}

/// The legacy default stream of a GPU.
fn default_stream(gpu: Device) -> Result<Arc<Stream>> {
    // SAFETY: null is the legacy default stream, which always exists.
    Ok(Arc::new(unsafe { Stream::from_raw(gpu, std::ptr::null_mut())? }))
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // The memory is freed on the stream that allocated it. If later runs used another stream, they have to end
        // first.
        if let Memory::Device { buffer, stream } = &self.memory
            && !buffer.is_allocated_on(stream)
        {
            // An error here was or will be reported by a call that can return it.
            let _ = stream.synchronize();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workspace_is_sized_over_plans() {
        let mut ws = Workspace::for_sizes(Device::Cpu, [10, 300, 20]).unwrap();
        assert_eq!(ws.len(), 300);
        assert_eq!(ws.take(300).unwrap().len(), 300);
        let message = ws.take(301).unwrap_err().to_string();
        assert!(message.contains("300 bytes") && message.contains("301"), "{message}");
        assert!(Workspace::empty().is_empty());
        assert!(ws.stream().is_none() && ws.synchronize().is_ok());
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        assert!(matches!(Workspace::new(Device::Cuda(4000), 1), Err(Error::NoDevice { .. })));
    }

    #[test]
    fn memory_that_is_lent_is_aligned() {
        let memory = std::ptr::without_provenance_mut(256 + 64);
        // SAFETY: it is refused before anything is done with it.
        let refused = unsafe { Workspace::on_memory(0, std::ptr::null_mut(), memory, 8) };
        assert!(matches!(refused, Err(Error::Parameter { name: "memory", .. })));
    }

    #[test]
    fn verify_has_the_usual_words() {
        for (word, verify) in [
            ("1", Verify::On),
            ("true", Verify::On),
            ("ON", Verify::On),
            ("Yes", Verify::On),
            ("", Verify::Off),
            ("0", Verify::Off),
            ("False", Verify::Off),
            ("off", Verify::Off),
        ] {
            assert_eq!(word.parse::<Verify>().unwrap(), verify, "{word}");
        }
        assert!("maybe".parse::<Verify>().unwrap_err().to_string().contains("WINDROW_VERIFY"));
    }

    #[test]
    fn accuracy_names_parse_back() {
        for a in [Accuracy::Exact, Accuracy::Fp32, Accuracy::Tf32, Accuracy::Half] {
            assert_eq!(a.name().parse::<Accuracy>().unwrap(), a);
        }
        assert!("double".parse::<Accuracy>().is_err());
    }
}
