//! Convolution on CUDA devices: the algorithms, which of them can compute a spec, and which is taken.

mod choice;
mod cudnn;
mod few_taps;
mod general;
mod gradients;
mod grouped;
mod implicit_gemm;
mod shared;
mod times;
mod winograd_gemm;
mod winograd_row;

pub(crate) use self::choice::allows;
use self::cudnn::Cudnn;
use self::few_taps::FewTaps;
use self::general::{Direction, General, Method};
pub(crate) use self::gradients::Backward;
use self::gradients::weight_product;
use self::grouped::Groups;
use self::implicit_gemm::ImplicitGemm;
pub(crate) use self::implicit_gemm::{configurations as implicit_gemm_configurations, cuts_into};
pub(crate) use self::shared::packs::Packs;
pub(crate) use self::shared::parameters::Operands;
use self::shared::parameters::{Divisor, Seen, bias_of, kernel, strides, with_epilogue};
use self::shared::{ALIGNMENT, input, source, split};
pub(crate) use self::times::cost;
use self::winograd_gemm::{WinogradGemm, pieces};
use self::winograd_row::WinogradRow;
use super::winograd_reference::Stages;
use super::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem, Tile};
use crate::gpu::{Gpu, Stream};
use crate::{DType, Error, PlanOptions, Result, TensorRef};

/// A convolution bound to a device and an algorithm: its kernels are compiled and loaded.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // a plan has one
pub(crate) enum Forward {
    General(General),
    Cudnn(Box<Cudnn>),
    /// [`Conv2dAlgorithm::Direct`] where every group has one input channel, or few.
    Groups(Box<Groups>),
    /// [`Conv2dAlgorithm::Im2colGemm`] where outputs sum few taps.
    FewTaps(Box<FewTaps>),
    ImplicitGemm(Box<ImplicitGemm>),
    WinogradGemm(Box<WinogradGemm>),
    WinogradRow(Box<WinogradRow>),
}

/// What a packed filter looks like beside its shape and algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PackedForm {
    dtype: DType,
    /// Products that the split operands take part in.
    products: usize,
    order: FilterOrder,
}

/// The order of a packed filter's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum FilterOrder {
    /// The only one of its algorithm.
    Usual,
    /// Of [`FewTaps`].
    FewTaps,
    /// Of [`Cudnn`], with what tells whether it is still that of the filter.
    Turned,
    /// Of [`ImplicitGemm`], in blocks of so many channels.
    Blocks(usize),
}

impl Forward {
    /// Every algorithm that can compute the spec on `gpu`, whatever its accuracy.
    pub(crate) fn supported(
        gpu: &Gpu,
        spec: &Conv2dSpec,
        problem: &Problem,
    ) -> Vec<Conv2dAlgorithm> {
        let mut found = Vec::new();
        if fits_i32(problem) {
            found.push(Conv2dAlgorithm::Direct);
            found.push(Conv2dAlgorithm::Im2colGemm);
            if ImplicitGemm::supports(gpu, spec, problem) {
                found.push(Conv2dAlgorithm::ImplicitGemm);
            }
            if WinogradGemm::supports(gpu, spec, problem) {
                found.extend(Tile::ALL.map(Conv2dAlgorithm::WinogradGemm));
            }
            if WinogradRow::supports(gpu, problem) {
                found.push(Conv2dAlgorithm::WinogradRow);
            }
            if Cudnn::supports(gpu, spec, problem) {
                found.push(Conv2dAlgorithm::Cudnn);
            }
        }
        found
    }

    /// The algorithm that should be fastest among those that the spec's accuracy allows.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for sizes of 2^30 and more in one direction.
    pub(crate) fn best(
        gpu: &'static Gpu,
        spec: &Conv2dSpec,
        problem: &Problem,
        options: &PlanOptions,
    ) -> Result<Conv2dAlgorithm> {
        let mut supported = Self::supported(gpu, spec, problem);
        if supported.is_empty() {
            return Err(too_large());
        }
        let multiprocessors = gpu.info.multiprocessors;
        if let Some(memory) = options.memory {
            supported.retain(|&algorithm| {
                pieces::least_bytes(multiprocessors, spec, problem, algorithm) <= memory
            });
        }
        let filter = options.filter;
        if FewTaps::supports(gpu, spec, problem) && problem.k >= 8 {
            return Ok(Conv2dAlgorithm::Im2colGemm);
        }
        let algorithm = choice::choose(spec, problem, &supported, multiprocessors, filter);
        if algorithm != Conv2dAlgorithm::Cudnn {
            return Ok(algorithm);
        }
        // Whether it has a kernel, and whether what was found is cuDNN, it says only when asked.
        match Cudnn::check(gpu, spec, problem) {
            Ok(()) => Ok(algorithm),
            Err(error) => {
                tracing::debug!(%error, "conv2d without cuDNN");
                supported.retain(|&other| other != algorithm);
                Ok(choice::choose(spec, problem, &supported, multiprocessors, filter))
            }
        }
    }

    /// Compiles and loads the kernels. Unless the options say [`Tuning::Model`](crate::Tuning::Model), cuDNN's kernel is
    /// chosen by measuring.
    ///
    /// # Errors
    /// [`Error::Backend`] if that fails, [`Error::Unsupported`] if the algorithm is not among
    /// [`Forward::supported`].
    pub(crate) fn new(
        gpu: &'static Gpu,
        spec: &Conv2dSpec,
        problem: &Problem,
        configuration: &Conv2dConfiguration,
        options: &PlanOptions,
    ) -> Result<Self> {
        if !fits_i32(problem) {
            return Err(too_large());
        }
        let algorithm = configuration.algorithm;
        let general = |method| {
            General::new(gpu, spec, problem, method, Direction::Forward, true).map(Forward::General)
        };
        match algorithm {
            Conv2dAlgorithm::Direct if Groups::supports(problem) => {
                Ok(Forward::Groups(Box::new(Groups::new(gpu, spec, problem)?)))
            }
            Conv2dAlgorithm::Direct => general(Method::Direct),
            Conv2dAlgorithm::Im2colGemm if FewTaps::supports(gpu, spec, problem) => {
                Ok(Forward::FewTaps(Box::new(FewTaps::new(gpu, spec, problem)?)))
            }
            Conv2dAlgorithm::Im2colGemm => general(Method::Im2colGemm),
            Conv2dAlgorithm::ImplicitGemm if ImplicitGemm::supports(gpu, spec, problem) => {
                let engine = ImplicitGemm::new(gpu, spec, problem, configuration)?;
                Ok(Forward::ImplicitGemm(Box::new(engine)))
            }
            Conv2dAlgorithm::Cudnn if Cudnn::supports(gpu, spec, problem) => {
                Ok(Forward::Cudnn(Box::new(Cudnn::new(gpu, spec, problem, options.tuning)?)))
            }
            Conv2dAlgorithm::WinogradGemm(tile) if WinogradGemm::computes(spec, problem) => {
                let cut =
                    WinogradGemm::cut(gpu, spec, problem, tile, configuration, options.memory);
                Ok(Forward::WinogradGemm(Box::new(WinogradGemm::new(
                    gpu, spec, problem, tile, cut,
                )?)))
            }
            Conv2dAlgorithm::WinogradRow if WinogradRow::supports(gpu, problem) => {
                Ok(Forward::WinogradRow(Box::new(WinogradRow::new(
                    gpu,
                    spec,
                    problem,
                    options.memory,
                )?)))
            }
            _ => Err(Error::unsupported(
                format!("conv2d by {algorithm} on {}", gpu.device()),
                "winograd_gemm computes 3x3 filters of stride and dilation 1 in one group, \
                 winograd_row the same and implicit_gemm (halves in groups of whole vectors of channels) on \
                 compute capability 9.0, \
                 cudnn dense tensors of one layout where it is installed; direct and im2col_gemm \
                 compute everything",
            )),
        }
    }

    /// An algorithm's configuration with all parameters of one that runs with it.
    pub(crate) fn configuration(&self, algorithm: Conv2dAlgorithm) -> Conv2dConfiguration {
        match self {
            Forward::WinogradGemm(e) => e.configuration(algorithm),
            Forward::ImplicitGemm(e) => e.configuration(),
            _ => Conv2dConfiguration::new(algorithm),
        }
    }

    /// Bytes of a packed filter.
    pub(crate) fn packed_bytes(&self) -> usize {
        match self {
            Forward::General(e) => e.packed_bytes(),
            Forward::Groups(e) => e.packed_bytes(),
            Forward::Cudnn(e) => e.packed_bytes(),
            Forward::WinogradGemm(e) => e.packed_bytes(),
            Forward::FewTaps(e) => e.packed_bytes(),
            Forward::ImplicitGemm(e) => e.packed_bytes(),
            Forward::WinogradRow(e) => e.packed_bytes(),
        }
    }

    /// Bytes of scratch memory of a run, aligned to 256.
    pub(crate) fn scratch_bytes(&self) -> usize {
        match self {
            Forward::General(_) | Forward::Groups(_) | Forward::FewTaps(_) => 0,
            Forward::ImplicitGemm(e) => e.scratch_bytes(),
            Forward::Cudnn(e) => e.scratch_bytes(),
            Forward::WinogradGemm(e) => e.scratch_bytes(),
            Forward::WinogradRow(e) => e.scratch_bytes(),
        }
    }

    /// Bytes behind a pack that is kept, by which [`Forward::pack_kept`] sees whether it is still that of the filter.
    pub(crate) fn seen_bytes(&self) -> usize {
        match self {
            // A copy takes as long as a comparison.
            Forward::General(_) | Forward::Groups(_) | Forward::FewTaps(_) => 0,
            Forward::Cudnn(e) => e.seen_bytes(),
            Forward::ImplicitGemm(e) => e.seen_bytes(),
            Forward::WinogradGemm(e) => e.seen_bytes(),
            Forward::WinogradRow(e) => e.seen_bytes(),
        }
    }

    /// True if [`Forward::run`] can read the filter at `w` as it is, without a pack.
    pub(crate) fn reads_in_place(&self, w: *const u8) -> bool {
        match self {
            Forward::General(e) => e.reads_in_place(),
            Forward::Groups(e) => e.reads_in_place(),
            Forward::Cudnn(e) => e.reads_in_place(w),
            Forward::WinogradGemm(_)
            | Forward::FewTaps(_)
            | Forward::ImplicitGemm(_)
            | Forward::WinogradRow(_) => false,
        }
    }

    /// Packs the filter at `w`, which has the spec's layout.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// `w` must be the filter on the stream's device, `packed` [`Forward::packed_bytes`] there.
    pub(crate) unsafe fn pack(&self, stream: &Stream, w: *const u8, packed: *mut u8) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.pack_or_leave(stream, w, packed, None) }
    }

    /// As [`Forward::pack`] into memory that keeps the pack, in the order of one stream: what is as it was packed before is
    /// left as it is, by its content and without waiting. `ticket` is a number of this memory and no other.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// As [`Forward::pack`], with [`Forward::seen_bytes`] more behind the pack.
    pub(crate) unsafe fn pack_kept(
        &self,
        stream: &Stream,
        w: *const u8,
        packed: *mut u8,
        ticket: u64,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.pack_or_leave(stream, w, packed, Some(ticket)) }
    }

    /// The filter at `w` in the form that [`Forward::run`] takes: as it is, or packed to `memory`.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// As [`Forward::pack`].
    pub(crate) unsafe fn packed(
        &self,
        stream: &Stream,
        w: *const u8,
        memory: *mut u8,
    ) -> Result<*const u8> {
        if self.reads_in_place(w) {
            return Ok(w);
        }
        // SAFETY: the caller's promise.
        unsafe { self.pack(stream, w, memory)? };
        Ok(memory)
    }

    unsafe fn pack_or_leave(
        &self,
        stream: &Stream,
        w: *const u8,
        packed: *mut u8,
        ticket: Option<u64>,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Forward::General(e) => e.pack(stream, w, packed),
                Forward::Groups(e) => e.pack(stream, w, packed),
                Forward::Cudnn(e) => e.pack(stream, w, packed, ticket),
                Forward::WinogradGemm(e) => e.pack(stream, w, packed, ticket),
                Forward::FewTaps(e) => e.pack(stream, w, packed),
                Forward::ImplicitGemm(e) => e.pack(stream, w, packed, ticket),
                Forward::WinogradRow(e) => e.pack(stream, w, packed, ticket),
            }
        }
    }

    /// Computes y.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// The operands must be tensors of the spec's layouts on the stream's device, `packed` what
    /// [`Forward::pack`] made, `scratch` [`Forward::scratch_bytes`] there.
    pub(crate) unsafe fn run(
        &self,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
        scratch: *mut u8,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Forward::General(e) => e.run(stream, packed, operands),
                Forward::Groups(e) => e.run(stream, packed, operands),
                Forward::Cudnn(e) => e.run(stream, packed, operands, scratch),
                Forward::WinogradGemm(e) => e.run(stream, packed, operands, scratch),
                Forward::FewTaps(e) => e.run(stream, packed, operands),
                Forward::ImplicitGemm(e) => e.run(stream, packed, operands, scratch),
                Forward::WinogradRow(e) => e.run(stream, packed, operands, scratch),
            }
        }
    }

    pub(crate) fn packed_form(&self) -> PackedForm {
        match self {
            Forward::General(e) => {
                PackedForm { dtype: e.dtype(), products: 1, order: FilterOrder::Usual }
            }
            Forward::Groups(e) => {
                PackedForm { dtype: e.dtype(), products: 1, order: FilterOrder::Usual }
            }
            Forward::ImplicitGemm(e) => e.packed_form(),
            Forward::Cudnn(e) => e.packed_form(),
            Forward::WinogradGemm(e) => e.packed_form(),
            Forward::FewTaps(e) => e.packed_form(),
            Forward::WinogradRow(e) => e.packed_form(),
        }
    }

    /// How far a sum may be off before the activation, relative to its scale.
    pub(crate) fn tolerance(&self) -> f64 {
        match self {
            Forward::General(e) => e.tolerance(),
            Forward::Groups(e) => e.tolerance(),
            Forward::Cudnn(e) => e.tolerance(),
            Forward::WinogradGemm(e) => e.tolerance(),
            Forward::FewTaps(e) => e.tolerance(),
            Forward::ImplicitGemm(e) => e.tolerance(),
            Forward::WinogradRow(e) => e.tolerance(),
        }
    }

    /// Outputs of a tile in each direction, where it is one of Winograd's algorithms.
    pub(crate) fn tile(&self) -> Option<usize> {
        match self {
            Forward::General(_)
            | Forward::Groups(_)
            | Forward::FewTaps(_)
            | Forward::ImplicitGemm(_)
            | Forward::Cudnn(_) => None,
            Forward::WinogradGemm(e) => Some(e.tile()),
            Forward::WinogradRow(_) => Some(winograd_row::TILE),
        }
    }

    /// What the stages of [`Conv2dAlgorithm::WinogradGemm`] form of views that agree with the spec, if
    /// they fit one chunk; `None` for other algorithms.
    ///
    /// # Errors
    /// [`Error::Backend`], [`Error::OutOfMemory`].
    pub(crate) fn winograd_stages(
        &self,
        gpu: &'static Gpu,
        w: &TensorRef<'_>,
        x: &TensorRef<'_>,
    ) -> Result<Option<Stages<Vec<f32>>>> {
        let Forward::WinogradGemm(engine) = self else { return Ok(None) };
        engine.stages(gpu, w, x)
    }

    /// Relative errors of operands of the products of [`Conv2dAlgorithm::WinogradGemm`]: as stored, and
    /// as multiplied.
    pub(crate) fn operand_roundings(&self) -> (f64, f64) {
        match self {
            Forward::WinogradGemm(e) => e.operand_roundings(),
            _ => (0.0, 0.0),
        }
    }

    /// As [`WinogradGemm::underflows`]; of nothing else the stages are compared.
    pub(crate) fn underflows(&self) -> [f64; 2] {
        match self {
            Forward::WinogradGemm(e) => e.underflows(),
            _ => [0.0; 2],
        }
    }

    /// Blocking, in words.
    pub(crate) fn explain(&self) -> String {
        match self {
            Forward::General(e) => e.explain(),
            Forward::Groups(e) => e.explain(),
            Forward::Cudnn(e) => e.explain(),
            Forward::WinogradGemm(e) => e.explain(),
            Forward::ImplicitGemm(e) => e.explain(),
            Forward::FewTaps(_) => "filter in registers, tensor or matrix cores".into(),
            Forward::WinogradRow(e) => e.explain(),
        }
    }
}

/// A configuration with the parameters that a plan would have; nothing is compiled.
pub(crate) fn complete(
    gpu: &Gpu,
    spec: &Conv2dSpec,
    problem: &Problem,
    configuration: &Conv2dConfiguration,
    options: &PlanOptions,
) -> Conv2dConfiguration {
    match configuration.algorithm {
        Conv2dAlgorithm::WinogradGemm(tile) => {
            let cut = WinogradGemm::cut(gpu, spec, problem, tile, configuration, options.memory);
            cut.configuration(configuration.algorithm)
        }
        Conv2dAlgorithm::ImplicitGemm => implicit_gemm::complete(gpu, spec, problem, configuration),
        algorithm => Conv2dConfiguration::new(algorithm),
    }
}

/// Kernels count positions and channels in 32 bits, and elements in 64.
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
        "a convolution with 2^30 or more pixels of an image, images or filter taps on CUDA",
        "kernels count them in 32 bits; split the batch or the image",
    )
}

/// The same with what takes the most registers on the way to y.
#[cfg(test)]
fn with_largest_epilogue(spec: Conv2dSpec) -> Conv2dSpec {
    let activation = crate::Activation::Gelu(crate::Approximate::None);
    spec.with_activation(activation).with_residual(true)
}

/// Specs whose kernels are compiled in tests: each type and layout.
#[cfg(test)]
fn test_specs() -> Vec<Conv2dSpec> {
    use crate::{TensorDesc, conv2d::Conv2dParams};
    let mut specs = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for order in [[0, 1, 2, 3], [0, 2, 3, 1]] {
            let layout = crate::Layout::with_order(&[2, 32, 20, 20], &order).unwrap();
            let w = TensorDesc::contiguous(dtype, &[64, 32, 3, 3]).unwrap();
            let x = TensorDesc { dtype, layout };
            specs.push(Conv2dSpec::new(x, w, &Conv2dParams::default()).unwrap());
        }
    }
    specs
}
