//! Where tensors live and plans run.

use crate::{Error, Result};
use std::fmt;

/// A device: the CPU, or a CUDA GPU by index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// Main memory and the processor's cores.
    #[default]
    Cpu,
    /// CUDA device of this index, as the driver counts (after `CUDA_VISIBLE_DEVICES`).
    Cuda(u32),
}

impl Device {
    /// `cpu` or `cuda`, whatever the index.
    pub(crate) const fn backend(self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Cuda(_) => "cuda",
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(i) => write!(f, "cuda:{i}"),
        }
    }
}

impl std::str::FromStr for Device {
    type Err = Error;

    /// `cpu`, `cuda` (the first one) or `cuda:INDEX`.
    fn from_str(s: &str) -> Result<Self> {
        match s {
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda(0)),
            _ => s
                .strip_prefix("cuda:")
                .and_then(|i| i.parse().ok())
                .map(Device::Cuda)
                .ok_or_else(|| Error::parameter("device", s, "cpu, cuda or cuda:INDEX")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for d in [Device::Cpu, Device::Cuda(0), Device::Cuda(7)] {
            assert_eq!(d.to_string().parse::<Device>().unwrap(), d);
        }
        assert_eq!("cuda".parse::<Device>().unwrap(), Device::Cuda(0));
        for bad in ["", "gpu", "cuda:", "cuda:-1", "cpu:0"] {
            assert!(bad.parse::<Device>().is_err(), "{bad}");
        }
    }
}
