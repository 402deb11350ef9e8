//! Packed filters: filters in the form that an algorithm reads, made before the run.

use super::{Conv2dPlan, Cpu, Gpu};
use crate::buffer::Buffer;
use crate::conv2d::cpu::{Prepared, floats, floats_mut};
use crate::conv2d::{Conv2dAlgorithm, Problem, gpu};
use crate::gpu::SharedBuffer;
use crate::plan::{Backend, Checks, engine};
use crate::tensor::check_device;
use crate::{Device, Error, Result, TensorRef, Verify, Workspace};
use std::sync::Arc;

/// The properties that decide whether a plan can use a packed filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::conv2d) struct Packing {
    algorithm: Conv2dAlgorithm,
    /// k, c/groups, kt, r, s
    filter: [usize; 5],
    groups: usize,
    form: PackedForm,
}

impl Packing {
    pub(in crate::conv2d) fn new(
        p: &Problem,
        algorithm: Conv2dAlgorithm,
        form: PackedForm,
    ) -> Self {
        let filter = [p.k, p.c_group(), p.frames.kt, p.r, p.s];
        Packing { algorithm, filter, groups: p.groups, form }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::conv2d) enum PackedForm {
    Cpu {
        /// The name of the method alone: methods that have one name for a user pack differently.
        method: Conv2dAlgorithm,
        /// The number of channels that lie next to each other in the packed filter.
        width: usize,
    },
    Cuda(gpu::PackedForm),
}

/// A packed filter: a filter in the form that an algorithm reads. [`Conv2dPlan::pack_weights`] and
/// [`Conv3dPlan::pack_weights`](crate::Conv3dPlan::pack_weights) make it once for any number of runs.
///
/// Another plan on the same device can use it if [`Conv2dPlan::accepts`] is true. For that, the two plans must have the
/// same algorithm, filter shape, number of groups and packed layout, and on a GPU the same element type. Batch, image
/// size and padding may differ, and on the CPU also the element type.
///
/// On a GPU, dropping it does not wait. Its memory is freed after the enqueued runs that use it. A graph that captured
/// such a run keeps the memory.
#[derive(Debug)]
pub struct PackedWeights {
    pub(in crate::conv2d) packing: Packing,
    pub(super) data: PackedData,
    /// The original filter, kept only if the plan was made with [`Verify::On`].
    pub(super) source: Option<Vec<f64>>,
}

#[derive(Debug)]
pub(super) enum PackedData {
    Host(Buffer),
    Device(Arc<SharedBuffer>),
}

impl PackedWeights {
    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        match &self.data {
            PackedData::Host(data) => data.len(),
            PackedData::Device(data) => data.len(),
        }
    }

    /// The algorithm it is packed for.
    pub fn algorithm(&self) -> Conv2dAlgorithm {
        self.packing.algorithm
    }

    /// A filter packed on the CPU, with its original elements if they are kept.
    pub(in crate::conv2d) fn on_cpu(
        packing: Packing,
        prepared: &dyn Prepared,
        w: &TensorRef<'_>,
        source: Option<Vec<f64>>,
    ) -> Result<Self> {
        let mut data = Buffer::new(prepared.packed_bytes())?;
        prepared.pack(w, floats_mut(data.as_mut_slice()));
        Ok(PackedWeights { packing, data: PackedData::Host(data), source })
    }

    /// A filter packed on a GPU, with its original elements if they are kept. The call waits for the workspace's stream.
    pub(in crate::conv2d) fn on_gpu(
        packing: Packing,
        (prepared, device): (&dyn gpu::Prepared, &'static crate::gpu::Gpu),
        w: &TensorRef<'_>,
        source: Option<Vec<f64>>,
        workspace: &mut Workspace,
    ) -> Result<Self> {
        let (stream, _) = workspace.take_on(device, 0)?;
        let data = SharedBuffer::new(stream, prepared.packed_bytes().max(1))?;
        let to = gpu::PackTo { memory: data.as_mut_ptr(), ticket: None };
        // SAFETY: the caller has checked the view; the memory is as large as asked for.
        unsafe { prepared.pack(stream, w.as_ptr(), to)? };
        // Runs on other streams may use it from here on.
        stream.synchronize()?;
        Ok(PackedWeights { packing, data: PackedData::Device(Arc::new(data)), source })
    }

    /// The error for a filter that is packed on another device than this one.
    pub(in crate::conv2d) fn elsewhere(&self, expected: Device) -> Error {
        let given = match &self.data {
            PackedData::Host(_) => Device::Cpu,
            PackedData::Device(data) => data.gpu().device(),
        };
        Error::WrongDevice { arg: "w", given, expected }
    }

    /// Returns [`Error::ForeignPack`] for a filter that is packed in another way.
    pub(in crate::conv2d) fn check(&self, expected: Packing) -> Result<()> {
        if self.packing == expected {
            return Ok(());
        }
        let [given, expected] = [self.packing, expected].map(|packing| format!("{packing:?}"));
        Err(Error::ForeignPack { arg: "w", given, expected })
    }

    /// The elements in host memory; `None` for a filter packed on a GPU.
    pub(in crate::conv2d) fn elements(&self) -> Option<&[f32]> {
        match &self.data {
            PackedData::Host(data) => Some(floats(data.as_slice())),
            PackedData::Device(_) => None,
        }
    }

    /// Changes the sign of the first f32 element, to test that a comparison notices it.
    #[cfg(test)]
    pub(in crate::conv2d) fn spoil(&mut self) {
        if let PackedData::Host(data) = &mut self.data {
            data.as_mut_slice()[3] ^= 0x80;
        }
    }
}

impl Conv2dPlan {
    /// Packs a filter [k, c/groups, r, s] of the spec's type and strides for any number of runs. The packed filter has
    /// its own memory; the workspace's memory is not used. On a GPU the call waits for the workspace's stream.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`] or [`Error::Strides`] if `w` does not agree with the spec,
    /// [`Error::WrongDevice`], [`Error::OutOfMemory`], and on a GPU [`Error::Backend`].
    pub fn pack_weights(
        &self,
        w: &TensorRef<'_>,
        workspace: &mut Workspace,
    ) -> Result<PackedWeights> {
        check_device("workspace", workspace.device(), self.device())?;
        Checks::new(self.device()).read("w", Some(w), Some(&self.spec.w))?;
        match &self.backend {
            Backend::Cpu(cpu) => self.pack_on_cpu(cpu, w),
            Backend::Gpu(Gpu { prepared, gpu: device, .. }) => {
                let on_gpu = (&**prepared, *device);
                PackedWeights::on_gpu(self.packing(), on_gpu, w, self.source(w)?, workspace)
            }
        }
    }

    /// Packs a filter that agrees with the spec, for a plan on the CPU.
    pub(super) fn pack_on_cpu(&self, cpu: &Cpu, w: &TensorRef<'_>) -> Result<PackedWeights> {
        PackedWeights::on_cpu(self.packing(), cpu.prepared.as_ref(), w, self.source(w)?)
    }

    /// The original filter, if the plan verifies.
    fn source(&self, w: &TensorRef<'_>) -> Result<Option<Vec<f64>>> {
        (self.options.verify == Verify::On).then(|| w.to_f64_vec()).transpose()
    }

    /// True if `packed` has the form that this plan reads (see [`PackedWeights`]). A run also checks that it is on the
    /// plan's device.
    pub fn accepts(&self, packed: &PackedWeights) -> bool {
        packed.packing == self.packing()
    }

    pub(super) fn packing(&self) -> Packing {
        let form = engine!(self, engine => engine.form());
        Packing::new(&self.problem, self.algorithm(), form)
    }

    /// The size in bytes of a packed filter.
    pub fn packed_bytes(&self) -> usize {
        engine!(self, engine => engine.packed_bytes())
    }

    /// The number of bytes that a [`FilterCache`](crate::FilterCache) stores for the filter `w` and this plan; 0 if it
    /// can read the filter in place.
    pub fn kept_bytes(&self, w: &TensorRef<'_>) -> usize {
        engine!(self, engine => engine.kept_bytes(w))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    /// Plans on GPUs accept only filters with their own packed layout and element type.
    #[test]
    fn packs_of_another_form_are_others() {
        let of = |groups, method, dtype, products, order| Packing {
            algorithm: Conv2dAlgorithm::Direct,
            filter: [64, 4, 1, 3, 3],
            groups,
            form: PackedForm::Cuda(gpu::PackedForm::new(method, dtype, products, order)),
        };
        let grouped = of(16, "grouped", DType::F32, 1, 0);
        assert_eq!(grouped, of(16, "grouped", DType::F32, 1, 0));
        for other in [
            of(1, "grouped", DType::F32, 1, 0),
            of(16, "direct", DType::F32, 1, 0),
            of(16, "grouped", DType::BF16, 1, 0),
            of(16, "grouped", DType::F32, 3, 0),
            of(16, "grouped", DType::F32, 1, 1),
            Packing {
                form: PackedForm::Cpu { method: Conv2dAlgorithm::Direct, width: 8 },
                ..grouped
            },
        ] {
            assert_ne!(grouped, other);
        }
    }
}
