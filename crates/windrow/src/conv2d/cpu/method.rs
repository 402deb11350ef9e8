//! A method that computes convolutions on the CPU, and a convolution bound to it. The only error is
//! [`OutOfMemory`](crate::Error::OutOfMemory), if there is no memory for a list of the filter's taps.

use super::shared::epilogue::Residual;
use super::shared::floats_mut;
use super::shared::frames::FrameTaps;
use super::shared::stencil::Stencil;
use crate::conv2d::winograd_reference::Stages;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem, Tile};
use crate::cpu::Isa;
use crate::{Accuracy, Activation, Filter, Result, TensorMut, TensorRef};
use std::fmt::Debug;
use std::sync::Arc;

/// A convolution, or a part of its data gradient, with the instruction set and the number of threads that compute it.
pub(crate) struct Task<'a> {
    pub(super) spec: &'a Conv2dSpec,
    pub(super) problem: &'a Problem,
    /// The sums: those of the convolution, or of a part of its data gradient.
    pub(super) stencil: Stencil,
    pub(super) isa: Isa,
    pub(super) threads: usize,
    /// True if the bits of an image must not depend on the number of images.
    pub(super) batch_invariant: bool,
}

impl<'a> Task<'a> {
    /// The convolution itself.
    pub(crate) fn new(
        spec: &'a Conv2dSpec,
        problem: &'a Problem,
        isa: Isa,
        threads: usize,
    ) -> Result<Self> {
        let stencil = Stencil::forward(spec, problem)?;
        Ok(Task { spec, problem, stencil, isa, threads, batch_invariant: false })
    }

    /// The same with the choice whether the bits of an image may depend on the number of images.
    pub(crate) fn with_batch_invariant(mut self, batch_invariant: bool) -> Self {
        self.batch_invariant = batch_invariant;
        self
    }

    /// The sizes for which everything is chosen that changes bits.
    pub(super) fn sizes(&self) -> Problem {
        self.problem.for_choice(self.batch_invariant)
    }

    /// The same over the frames of a video, if any are given.
    pub(crate) fn with_frames(mut self, frames: Option<Arc<FrameTaps>>) -> Self {
        self.stencil.frames = frames;
        self
    }
}

/// The method prepared for a task; `None` if the method does not support the task.
pub(crate) type Found = Result<Option<Box<dyn Prepared>>>;

/// A way to compute convolutions. It says which convolutions it computes, how fast, and with which parameters.
pub(super) trait Method: Sync {
    /// The algorithms (the names that users may ask for) that the method computes.
    fn algorithms(&self) -> &'static [Conv2dAlgorithm];

    /// True if the accuracy allows the method.
    fn allows(&self, _: Accuracy) -> bool {
        true
    }

    /// The expected time of a task that the method supports. The unit is the time of one f32 multiplication in
    /// vectorised code.
    fn cost(&self, task: &Task<'_>, _: Conv2dAlgorithm, filter: Filter) -> f64 {
        sums_cost(&task.sizes(), filter, 1.0)
    }

    /// The names of the parameters of a [`Conv2dConfiguration`] that the method accepts. Each parameter is a positive
    /// number.
    fn parameters(&self) -> &'static [&'static str] {
        &[]
    }

    /// The configurations that a search tries in addition to the cost model's choice.
    fn candidates(&self, _: Conv2dAlgorithm, _threads: usize) -> Vec<Conv2dConfiguration> {
        Vec::new()
    }

    /// The task bound to the method; `None` if the method does not support the task.
    fn prepare(&self, task: &Task<'_>, configuration: &Conv2dConfiguration) -> Found;

    /// True if the method computes the task.
    fn supports(&self, task: &Task<'_>) -> Result<bool> {
        let configuration = Conv2dConfiguration::new(self.algorithms()[0]);
        Ok(self.prepare(task, &configuration)?.is_some())
    }
}

/// The tensors of `y = act(conv(x, w) + bias + residual)` except the filter. `x` [n, c, h, w] and `y` [n, k, oh, ow]
/// have the same type. `bias` [k] has this type or f32. The residual has the type and strides of `y`. `workspace` is
/// aligned to 64 bytes.
pub(crate) struct Run<'a, 'y> {
    pub(crate) x: &'a TensorRef<'a>,
    /// The initial frames, if the stencil reads any.
    pub(crate) initial: Option<&'a TensorRef<'a>>,
    pub(crate) bias: Option<&'a TensorRef<'a>>,
    pub(crate) residual: Residual,
    pub(crate) activation: Activation,
    pub(crate) y: &'a mut TensorMut<'y>,
    pub(crate) workspace: &'a mut [u8],
}

/// A convolution bound to a method and an instruction set. It is called once per run; its kernels are compiled for
/// types and sizes.
pub(crate) trait Prepared: Debug + Send + Sync {
    /// The method's algorithm with all of its parameters.
    fn configuration(&self) -> Conv2dConfiguration;

    /// A description of how the work is divided into blocks.
    fn explain(&self) -> String;

    /// Elements of the packed filter.
    fn packed_len(&self) -> usize;

    /// The number of channels that lie next to each other in the packed filter. The form of the packed filter depends
    /// on this number, the algorithm and the filter's shape.
    fn packed_width(&self) -> usize;

    /// Bytes of the packed filter, in whole cache lines.
    fn packed_bytes(&self) -> usize {
        (self.packed_len() * size_of::<f32>()).next_multiple_of(64)
    }

    /// Bytes of scratch memory for a run with a packed filter.
    fn workspace_bytes(&self) -> usize;

    /// Bytes of scratch memory for a run with the filter itself.
    fn raw_bytes(&self) -> usize {
        self.packed_bytes() + self.workspace_bytes()
    }

    /// True if runs read the filter itself and not what [`Prepared::pack`] makes of it: it lies as they need it.
    fn reads_filter(&self) -> bool {
        false
    }

    /// The allowed error of an element, relative to its scale: one rounding for each of the additions that follow one
    /// another. For Winograd, which mixes a tile's pixels, it is a few times the measured error.
    fn tolerance(&self) -> f64;

    /// The tile of a Winograd algorithm.
    fn tile(&self) -> Option<Tile> {
        None
    }

    /// Packs a filter that agrees with the spec.
    fn pack(&self, w: &TensorRef<'_>, packed: &mut [f32]);

    /// Runs on views that agree with the spec.
    fn run(&self, packed: &[f32], run: Run<'_, '_>);

    /// [`Prepared::run`] with the filter itself, in a workspace of [`Prepared::raw_bytes`].
    fn run_raw(&self, w: &TensorRef<'_>, run: Run<'_, '_>) {
        let (packed, workspace) = run.workspace.split_at_mut(self.packed_bytes());
        let packed = floats_mut(packed);
        self.pack(w, packed);
        self.run(packed, Run { workspace, ..run });
    }

    /// The im2col matrix [group, term, pixel] of an input that agrees with the spec; `None` for a method that has none.
    fn im2col(&self, _x: &TensorRef<'_>) -> Result<Option<Vec<f32>>> {
        Ok(None)
    }

    /// The stages of Winograd's algorithm for views that agree with the spec; `None` for other methods.
    fn winograd_stages(
        &self,
        _w: &TensorRef<'_>,
        _x: &TensorRef<'_>,
    ) -> Result<Option<Stages<Vec<f32>>>> {
        Ok(None)
    }
}

/// The cost of sums of products at `rate` times the rate of f32 vectors, including the packing of the filter if it
/// changes.
pub(super) fn sums_cost(p: &Problem, filter: Filter, rate: f64) -> f64 {
    // The cost of packing an element of the filter.
    const PACK: f64 = 30.0;
    let pack = if filter == Filter::Changing { PACK * (p.k * p.taps()) as f64 } else { 0.0 };
    p.flops() / 2.0 / rate + pack
}
