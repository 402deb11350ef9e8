//! The device that a table of configurations is valid for.

use crate::cpu::{self, Isa};
use crate::gpu::Gpu;
use crate::{Device, Result};
use serde::{Deserialize, Serialize};

/// A type of device (a product, not a single device), with the instruction set or the driver version, because speed
/// depends on these too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeviceModel {
    pub(crate) name: String,
    /// The architecture: `x86_64`, `sm_90`, `gfx942`, ...
    pub(crate) architecture: String,
    /// The instruction set that kernels use; empty for GPUs.
    pub(crate) features: String,
    /// CUDA or HIP version of the driver; empty for CPUs.
    pub(crate) driver: String,
}

impl DeviceModel {
    /// The type of a device of this machine.
    ///
    /// # Errors
    /// [`crate::Error::NoDevice`], [`crate::Error::Backend`].
    pub(crate) fn of(device: Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(DeviceModel {
                name: cpu::name(),
                architecture: std::env::consts::ARCH.into(),
                features: Isa::best().name().into(),
                driver: String::new(),
            }),
            Device::Cuda(_) | Device::Hip(_) => {
                let info = &Gpu::get(device)?.info;
                Ok(DeviceModel {
                    name: info.name.clone(),
                    architecture: info.architecture.clone(),
                    features: String::new(),
                    driver: format!("{}.{}", info.driver.0, info.driver.1),
                })
            }
        }
    }

    /// True if both have the same hardware and instruction set; the driver may differ.
    pub(crate) fn is_like(&self, other: &DeviceModel) -> bool {
        let hardware =
            |d: &DeviceModel| (d.name.clone(), d.architecture.clone(), d.features.clone());
        hardware(self) == hardware(other)
    }

    /// The name of the device's file: all fields and the library version, reduced to lower-case letters, digits and
    /// hyphens, as in `nvidia-h200-sm-90-13-0-0-1-0.json`.
    pub(crate) fn file_name(&self) -> String {
        let DeviceModel { name, architecture, features, driver } = self;
        let parts = [name, architecture, features, driver, super::VERSION];
        let all = parts.map(String::from).join(" ").to_lowercase();
        let words = all.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
        let stem = words.collect::<Vec<_>>().join("-");
        // Most file systems limit a file name to 255 bytes.
        format!("{}.json", &stem[..stem.len().min(200)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_cpu_has_a_file() {
        let cpu = DeviceModel::of(Device::Cpu).unwrap();
        assert!(!cpu.name.is_empty() && cpu.is_like(&cpu));
        let name = cpu.file_name();
        assert!(name.ends_with(".json") && name.contains(Isa::best().name()), "{name}");
    }

    #[test]
    fn file_names_are_plain() {
        let gpu = DeviceModel {
            name: "NVIDIA H200 (../x)".into(),
            architecture: "sm_90".into(),
            features: String::new(),
            driver: "13.0".into(),
        };
        assert!(gpu.file_name().starts_with("nvidia-h200-x-sm-90-13-0-"), "{}", gpu.file_name());
        let newer = DeviceModel { driver: "13.1".into(), ..gpu.clone() };
        assert!(gpu.is_like(&newer) && gpu != newer && gpu.file_name() != newer.file_name());
        let long = DeviceModel { name: "x".repeat(1000), ..gpu };
        assert!(long.file_name().len() < 255);
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        assert!(DeviceModel::of(Device::Cuda(4000)).is_err());
    }
}
