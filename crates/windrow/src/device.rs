//! Devices: where tensors are stored and plans run.

use crate::{Error, Result};
use std::fmt;

/// A device: the CPU, or a GPU by index. An integer in place of a GPU is the index of a CUDA device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// Main memory and the processor's cores.
    #[default]
    Cpu,
    /// CUDA device of this index, as the driver counts (after `CUDA_VISIBLE_DEVICES`).
    Cuda(u32),
    /// HIP device of this index, as the runtime counts (after `HIP_VISIBLE_DEVICES`).
    Hip(u32),
}

impl From<u32> for Device {
    fn from(index: u32) -> Self {
        Device::Cuda(index)
    }
}

impl Device {
    /// `cpu`, `cuda` or `hip`, whatever the index.
    pub(crate) const fn backend(self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Cuda(_) => "cuda",
            Device::Hip(_) => "hip",
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(i) | Device::Hip(i) => write!(f, "{}:{i}", self.backend()),
        }
    }
}

impl std::str::FromStr for Device {
    type Err = Error;

    /// `cpu`; `cuda` or `hip` (the first one), or with `:INDEX`.
    fn from_str(s: &str) -> Result<Self> {
        let (kind, index) = s.split_once(':').unwrap_or((s, "0"));
        match (kind, index.parse()) {
            ("cuda", Ok(index)) => Ok(Device::Cuda(index)),
            ("hip", Ok(index)) => Ok(Device::Hip(index)),
            _ if s == "cpu" => Ok(Device::Cpu),
            _ => Err(Error::parameter("device", s, "cpu, cuda, cuda:INDEX, hip or hip:INDEX")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for d in [Device::Cpu, Device::Cuda(0), Device::Cuda(7), Device::Hip(1)] {
            assert_eq!(d.to_string().parse::<Device>().unwrap(), d);
        }
        assert_eq!("cuda".parse::<Device>().unwrap(), Device::Cuda(0));
        assert_eq!("hip".parse::<Device>().unwrap(), Device::Hip(0));
        for bad in ["", "gpu", "cuda:", "cuda:-1", "cpu:0", "hip:x"] {
            assert!(bad.parse::<Device>().is_err(), "{bad}");
        }
    }
}
