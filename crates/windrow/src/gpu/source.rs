//! Sources and constants of kernels.

use super::cache;
use super::params::{Params, agreement, elements};
use super::runtime::Feature;
use crate::dtype::by_type;
use crate::{Activation, DType};
use std::any::TypeId;
use std::hash::{Hash, Hasher};

/// Device code embedded in the binary. Each is a static of its own: two are the same if their
/// addresses are.
#[derive(Debug)]
pub(crate) struct Source {
    /// File name, for the compiler's messages.
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
    /// The headers of its operator; those in `gpu/kernels` may always be included.
    pub(crate) includes: &'static [Source],
}

impl PartialEq for Source {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Source {}

impl Hash for Source {
    fn hash<H: Hasher>(&self, state: &mut H) {
        std::ptr::hash(self, state);
    }
}

const fn header(name: &'static str, text: &'static str) -> Source {
    Source { name, text, includes: &[] }
}

/// The headers that every source may include.
const HEADERS: &[Source] = &[
    header("windrow.cuh", include_str!("kernels/windrow.cuh")),
    header("intrinsics.cuh", include_str!("kernels/intrinsics.cuh")),
    header("hip.cuh", include_str!("kernels/hip.cuh")),
    header("activation.cuh", include_str!("kernels/activation.cuh")),
    header("copy_engine_sm90.cuh", include_str!("kernels/copy_engine_sm90.cuh")),
];

/// A kernel to compile: a source, the name of its entry point (the macro `KERNEL`), and constants.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KernelSpec {
    pub(crate) source: &'static Source,
    pub(crate) entry: String,
    /// The bytes of dynamic shared memory of a launch.
    pub(super) shared_bytes: u32,
    /// True if a launch may overlap the end of the previous kernel.
    pub(super) overlapped: bool,
    /// The type of the structure that is the kernel's argument.
    pub(super) params: Option<TypeId>,
    /// The feature that the source needs, if not every device has it.
    pub(crate) needs: Option<Feature>,
    pub(crate) defines: Vec<(&'static str, String)>,
}

impl KernelSpec {
    /// A kernel of a source, without constants. The source must define `extern "C" __global__ void KERNEL(...)`.
    pub(crate) fn new(source: &'static Source, entry: impl Into<String>) -> Self {
        KernelSpec {
            source,
            entry: entry.into(),
            shared_bytes: 0,
            overlapped: false,
            params: None,
            needs: None,
            defines: Vec::new(),
        }
    }

    /// Defines a macro for the source.
    pub(crate) fn define(mut self, name: &'static str, value: impl ToString) -> Self {
        self.defines.push((name, value.to_string()));
        self
    }

    /// Defines a macro as an activation's name in `activation.cuh`, and the slope that goes with it.
    pub(crate) fn define_activation(self, name: &'static str, activation: Activation) -> Self {
        let kernel = self.define(name, activation.constant());
        match activation {
            Activation::LeakyRelu(slope) if slope.get() != 0.0 => {
                kernel.define("NEGATIVE_SLOPE", format!("({:e}f)", slope.get()))
            }
            _ => kernel,
        }
    }

    /// Sets the structure of the kernel's parameters to `P`. The source declares it as `Params` and checks it with
    /// `static_assert(PARAMS_AGREE)`.
    pub(crate) fn params<P: Params>(self) -> Self {
        self.params_as::<P>("Params", "PARAMS_AGREE")
    }

    /// Sets the parameters like [`KernelSpec::params`], with other names for the structure and the macro: for a
    /// structure that begins with another.
    pub(crate) fn params_as<P: Params>(self, name: &str, agree: &'static str) -> Self {
        let spec = self.define(agree, agreement(name, elements(P::FIELDS), size_of::<P>()));
        KernelSpec { params: Some(TypeId::of::<P>()), ..spec }
    }

    /// Sets the parameters like [`KernelSpec::params`], for a `P` whose fields (name, offset, bytes) and size in bytes
    /// depend on its value.
    pub(crate) fn params_of<P: Params>(
        self,
        fields: impl Iterator<Item = (&'static str, usize, usize)>,
        bytes: usize,
    ) -> Self {
        let spec = self.define("PARAMS_AGREE", agreement("Params", fields, bytes));
        KernelSpec { params: Some(TypeId::of::<P>()), ..spec }
    }

    /// Allows blocks to start while the previous kernel still runs (programmatic dependent launch), if the device can.
    /// The source must call `wait_for_previous` first. With `early`, blocks of the next kernel may start as soon as all
    /// blocks of this one have started, not only at their end: for launches of so few blocks that the device runs them
    /// in one or two waves.
    pub(crate) fn overlapped(mut self, early: bool) -> Self {
        self.overlapped = true;
        self.define("EARLY", u8::from(early))
    }

    /// Declares that the source uses `feature`, so that it is compiled only for devices that have it.
    pub(crate) fn needs(mut self, feature: Feature) -> Self {
        self.needs = Some(feature);
        self
    }

    /// Sets the bytes of dynamic shared memory of a launch, which may exceed 48 KiB.
    pub(crate) fn shared_bytes(mut self, bytes: u32) -> Self {
        self.shared_bytes = bytes;
        self
    }

    /// Its file and its entry point.
    pub(crate) fn name(&self) -> (&'static str, &str) {
        (self.source.name, &self.entry)
    }

    /// The value of a macro in this kernel.
    pub(crate) fn value_of(&self, name: &str) -> Option<&str> {
        let found = self.defines.iter().find(|(defined, _)| *defined == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn headers(&self) -> impl Iterator<Item = &'static Source> {
        HEADERS.iter().chain(self.source.includes)
    }

    /// The cache key of the image that this version of the compiler makes of the kernel with these options.
    pub(super) fn key(&self, version: &str, options: &[String]) -> String {
        let parts = [version, self.source.text]
            .into_iter()
            .chain(self.headers().map(|h| h.text))
            .chain(options.iter().map(String::as_str));
        cache::key(parts)
    }
}

/// The name of an element type in device code.
///
/// # Panics
/// For types that no kernel takes as elements.
pub(crate) fn type_name(dtype: DType) -> &'static str {
    by_type!(dtype, F32 => "F32", F16 => "F16", BF16 => "Bf16")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NegativeSlope;

    /// Only leaky ReLU has a slope, so other kernels are what they were without it.
    #[test]
    fn leaky_relu_has_its_slope_as_a_constant() {
        static SOURCE: Source = header("none.cuh", "");
        let defines = |activation| {
            let kernel = KernelSpec::new(&SOURCE, "none").define_activation("ACT", activation);
            kernel.defines.iter().map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>()
        };
        let leaky = |slope| Activation::LeakyRelu(NegativeSlope::new(slope).unwrap());
        assert_eq!(defines(leaky(0.2)), ["ACT LEAKY_RELU", "NEGATIVE_SLOPE (2e-1f)"]);
        assert_eq!(defines(leaky(-1.5)), ["ACT LEAKY_RELU", "NEGATIVE_SLOPE (-1.5e0f)"]);
        assert_eq!(defines(leaky(0.0)), ["ACT RELU"]);
        for &activation in Activation::ALL {
            if !matches!(activation, Activation::LeakyRelu(_)) {
                assert_eq!(defines(activation), [format!("ACT {}", activation.constant())]);
            }
        }
    }
}
