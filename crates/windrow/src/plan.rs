//! What all plans share: where to run, how exact, whether to check.

use crate::buffer::Buffer;
use crate::{Device, Error, Result};
use std::ffi::c_void;
use std::num::NonZeroUsize;

/// How exact a result has to be. The planner takes only algorithms whose measured error against
/// the f64 oracle stays inside the tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Accuracy {
    /// The direct algorithm with f32 accumulation: no transform, no reduced operands.
    Exact,
    /// Relative RMS error of f32 class (at most 1e-5 at 256 input channels): Winograd in f32, or split operands on
    /// tensor cores.
    #[default]
    Fp32,
    /// Operands may be rounded to TF32 (10-bit mantissa), accumulation in f32.
    Tf32,
    /// Operands may be rounded to half precision, accumulation in f32.
    Half,
}

impl Accuracy {
    /// `exact`, `fp32`, `tf32` or `half`.
    pub const fn name(self) -> &'static str {
        match self {
            Accuracy::Exact => "exact",
            Accuracy::Fp32 => "fp32",
            Accuracy::Tf32 => "tf32",
            Accuracy::Half => "half",
        }
    }
}

impl std::str::FromStr for Accuracy {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        [Accuracy::Exact, Accuracy::Fp32, Accuracy::Tf32, Accuracy::Half]
            .into_iter()
            .find(|a| a.name() == s)
            .ok_or_else(|| Error::parameter("accuracy", s, "exact, fp32, tf32 or half"))
    }
}

/// Whether a plan checks each of its runs against the f64 oracle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verify {
    /// No check.
    Off,
    /// Every run is compared with the oracle and returns [`Error::Verification`] where it differs
    /// by more than the documented tolerance. Slow; runs allocate.
    On,
}

impl Default for Verify {
    /// `On` if the environment variable `WINDROW_VERIFY` is `1`, else `Off`.
    fn default() -> Self {
        use std::sync::LazyLock;
        static ON: LazyLock<bool> =
            LazyLock::new(|| std::env::var_os("WINDROW_VERIFY").is_some_and(|v| v == "1"));
        if *ON { Verify::On } else { Verify::Off }
    }
}

/// Where and how a plan runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PlanOptions {
    /// The device; every tensor of a run must be there.
    pub device: Device,
    /// CPU threads; `None` takes [`cpu::num_threads`](crate::cpu::num_threads).
    pub threads: Option<NonZeroUsize>,
    /// Check every run against the oracle.
    pub verify: Verify,
}

/// Scratch memory that plans run in, and the stream on which their work is ordered.
///
/// Running a plan allocates nothing: make a workspace of [`Workspace::for_sizes`] over all plans
/// that will use it. Plans that share a workspace run one after the other, on its stream.
#[derive(Debug)]
pub struct Workspace {
    device: Device,
    memory: Buffer,
    stream: Option<RawStream>,
}

/// A borrowed `cudaStream_t` / `CUstream`.
#[derive(Clone, Copy, Debug)]
struct RawStream(*mut c_void);
// SAFETY: a stream handle may be used from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

impl Workspace {
    /// An empty workspace on the CPU, enough for plans that need none.
    pub fn empty() -> Self {
        Self::new(Device::Cpu, 0).expect("an empty workspace needs no memory")
    }

    /// A workspace of `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::NoDevice`].
    pub fn new(device: Device, bytes: usize) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Workspace { device, memory: Buffer::new(bytes)?, stream: None }),
            Device::Cuda(_) => Err(Error::NoDevice {
                device: device.to_string(),
                reason: "this build has no CUDA backend".into(),
            }),
        }
    }

    /// One workspace for several plans: as large as the largest of their
    /// `workspace_bytes()`.
    ///
    /// # Errors
    /// As [`Workspace::new`].
    pub fn for_sizes(device: Device, bytes: impl IntoIterator<Item = usize>) -> Result<Self> {
        Self::new(device, bytes.into_iter().max().unwrap_or(0))
    }

    /// Orders the work of every following run on a stream that the caller owns.
    ///
    /// # Safety
    /// `stream` must be a live stream of this workspace's device for as long as runs use it.
    pub unsafe fn set_stream(&mut self, stream: *mut c_void) {
        self.stream = Some(RawStream(stream));
    }

    /// The device it is for.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// True if it has no memory.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first `bytes` bytes, aligned to 64, contents arbitrary but initialised.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<&mut [u8]> {
        let len = self.len();
        self.memory.as_mut_slice().get_mut(..bytes).ok_or_else(|| {
            Error::parameter(
                "workspace",
                format!("{len} bytes"),
                format!("at least {bytes} bytes (see `workspace_bytes()` of the plan)"),
            )
        })
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
    }

    #[test]
    fn accuracy_names_parse_back() {
        for a in [Accuracy::Exact, Accuracy::Fp32, Accuracy::Tf32, Accuracy::Half] {
            assert_eq!(a.name().parse::<Accuracy>().unwrap(), a);
        }
        assert!("double".parse::<Accuracy>().is_err());
    }
}
