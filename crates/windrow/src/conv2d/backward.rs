//! The gradients of a convolution.

use super::cpu::{Engine, Gradients, by_bf16_products, choose, floats_mut};
use super::cuda;
use super::plan::{compare, values};
use super::reference::{self, Expected};
use super::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dPlan, Conv2dSpec, Problem, Tile};
use crate::cpu::Isa;
use crate::cuda::Gpu;
use crate::tensor::{check_device, check_disjoint, check_dtype, check_tensor};
use crate::{
    Activation, DType, Error, Filter, Layout, Result, TensorDesc, TensorMut, TensorRef, Verify,
    Workspace,
};

/// How the gradients are computed.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // a plan has one
pub(crate) enum Backward {
    Cpu(CpuBackward),
    Cuda(&'static Gpu, Box<cuda::Gradients>),
}

#[derive(Debug)]
pub(crate) struct CpuBackward {
    /// The data gradient as a convolution, where its algorithm is Winograd or products of bf16.
    data: Option<Engine>,
    gradients: Gradients,
}

impl Backward {
    pub(crate) fn on_cpu(spec: &Conv2dSpec, p: &Problem, isa: Isa, threads: usize) -> Self {
        let data = mirrored(spec, p).and_then(|spec| {
            let p = spec.problem().ok()?;
            // Its filter is packed on each run.
            let algorithm = choose(&spec, &p, isa, Filter::Changing);
            let direct = algorithm == Conv2dAlgorithm::Direct && by_bf16_products(&spec, &p, isa);
            let configuration = Conv2dConfiguration::new(algorithm);
            (direct || algorithm.tile().is_some())
                .then(|| Engine::new(&spec, &p, &configuration, isa, threads))
        });
        Backward::Cpu(CpuBackward { data, gradients: Gradients::new(spec, p, isa, threads) })
    }

    /// Bytes of workspace for any of the gradients.
    fn workspace_bytes(&self, p: &Problem) -> usize {
        match self {
            Backward::Cpu(b) => b.data_bytes(p).max(b.gradients.weight_bytes()),
            Backward::Cuda(_, g) => g.data_bytes().max(g.weight_bytes()).max(g.bias_bytes()),
        }
    }

    /// Outputs of a tile, where the data gradient is one of Winograd's.
    fn data_tile(&self) -> Option<usize> {
        match self {
            Backward::Cpu(b) => b.data.as_ref().and_then(Engine::tile).map(Tile::m),
            Backward::Cuda(_, g) => g.data_tile(),
        }
    }
}

impl CpuBackward {
    /// Elements of the packed filter and bytes of scratch memory for the data gradient.
    fn data_sizes(&self, p: &Problem) -> (usize, usize) {
        match &self.data {
            Some(engine) => (engine.raw_len(), engine.workspace_bytes(p.c)),
            None => self.gradients.data_sizes(),
        }
    }

    fn data_bytes(&self, p: &Problem) -> usize {
        let (packed, scratch) = self.data_sizes(p);
        (packed * size_of::<f32>()).next_multiple_of(64) + scratch
    }

    /// The data gradient into `dx`, which has elements, with [`CpuBackward::data_bytes`] of memory.
    fn data(
        &self,
        p: &Problem,
        w: &TensorRef<'_>,
        dy: &TensorRef<'_>,
        dx: &mut TensorMut<'_>,
        memory: &mut [u8],
    ) {
        let (packed_len, _) = self.data_sizes(p);
        let bytes = (packed_len * size_of::<f32>()).next_multiple_of(64);
        let (packed, scratch) = memory.split_at_mut(bytes);
        let packed = floats_mut(packed);
        match (&self.data, turn(w)) {
            (Some(engine), Some(w)) => {
                engine.run_raw(&w, packed, dy, None, Activation::Identity, dx, scratch);
            }
            _ => self.gradients.data(w, dy, dx, packed, floats_mut(scratch)),
        }
    }
}

/// The data gradient of a convolution of stride 1 as a convolution of dy: by the filter turned
/// around, with input and output channels swapped. `None` where it is not one.
pub(super) fn mirrored(spec: &Conv2dSpec, p: &Problem) -> Option<Conv2dSpec> {
    let padding = |d: usize| ([p.r, p.s][d] - 1).checked_sub(p.padding[d]);
    if p.stride != [1, 1] || p.dilation != [1, 1] || p.groups != 1 {
        return None;
    }
    Some(Conv2dSpec {
        x: spec.y,
        w: TensorDesc { layout: turned(&spec.w.layout)?, ..spec.w },
        y: spec.x,
        bias: None,
        padding: [padding(0)?, padding(1)?],
        activation: Activation::Identity,
        ..spec.clone()
    })
}

/// A filter's layout [k, c, r, s] as [c, k, r, s] with rows and columns in reverse order.
fn turned(w: &Layout) -> Option<Layout> {
    let (shape, strides) = (w.shape(), w.strides());
    Layout::strided(
        &[shape[1], shape[0], shape[2], shape[3]],
        &[strides[1], strides[0], -strides[2], -strides[3]],
    )
    .ok()
}

/// The view of a filter that [`turned`] describes.
fn turn<'a>(w: &TensorRef<'a>) -> Option<TensorRef<'a>> {
    let desc = TensorDesc { layout: turned(w.layout())?, dtype: w.dtype() };
    let last = w.layout().offset(&[0, 0, w.shape()[2] - 1, w.shape()[3] - 1]);
    let ptr = w.as_ptr().wrapping_offset(last * w.dtype().size() as isize);
    // SAFETY: the same elements: counted from the last row and column, backwards.
    Some(unsafe { TensorRef::from_raw(ptr.cast(), desc, w.device()) })
}

impl Conv2dPlan {
    /// Bytes of workspace that the three gradients need; 0 if their kernels cannot be had on a device:
    /// then asking for a gradient says why.
    pub fn backward_workspace_bytes(&self) -> usize {
        self.backward().map_or(0, |backward| backward.workspace_bytes(&self.problem))
    }

    /// `dx`, the gradient of x, from the filter and `dy`, the gradient of y. Views have the spec's
    /// types, shapes and strides: `w` those of w, `dy` those of y, `dx` those of x. For stride 1
    /// this is a convolution itself, and Winograd where the spec's accuracy allows.
    ///
    /// # Errors
    /// As [`Conv2dPlan::run`], and [`Error::Unsupported`] if the spec has an activation: multiply
    /// `dy` by its derivative first.
    pub fn backward_data(
        &self,
        w: &TensorRef<'_>,
        dy: &TensorRef<'_>,
        mut dx: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        self.check_backward(workspace)?;
        self.check_view("w", w.desc(), w.device(), &self.spec().w)?;
        self.check_view("dy", dy.desc(), dy.device(), &self.spec().y)?;
        self.check_view("dx", dx.desc(), dx.device(), &self.spec().x)?;
        check_disjoint("dx", &dx, "w", w)?;
        check_disjoint("dx", &dx, "dy", dy)?;
        match self.backward()? {
            Backward::Cpu(backward) => {
                let memory = workspace.take(backward.data_bytes(&self.problem))?;
                if dx.layout().is_empty() {
                    return Ok(());
                }
                backward.data(&self.problem, w, dy, &mut dx, memory);
            }
            Backward::Cuda(gpu, gradients) => {
                let (stream, memory) = workspace.take_on(gpu, gradients.data_bytes())?;
                if dx.layout().is_empty() {
                    return Ok(());
                }
                let filter = match turn(w) {
                    Some(w) if gradients.data_is_mirrored() => w.as_ptr(),
                    _ => w.as_ptr(),
                };
                // SAFETY: the views were checked against the spec and are on the device.
                unsafe { gradients.data(stream, filter, dy.as_ptr(), dx.as_mut_ptr(), memory)? };
            }
        }
        if self.verify == Verify::Off {
            return Ok(());
        }
        workspace.synchronize()?;
        let want = self.expected_data(&values(w)?, &values(dy)?)?;
        compare(&dx.as_ref(), &want, self.data_tolerance()?)?.into_result("conv2d's data gradient")
    }

    /// `dw`, the gradient of the filter, [k, c/groups, r, s] with any strides, in f32 or the
    /// filter's type. The order of its sums does not depend on threads.
    ///
    /// # Errors
    /// As [`Conv2dPlan::backward_data`].
    pub fn backward_weight(
        &self,
        x: &TensorRef<'_>,
        dy: &TensorRef<'_>,
        mut dw: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        self.check_backward(workspace)?;
        self.check_view("x", x.desc(), x.device(), &self.spec().x)?;
        self.check_view("dy", dy.desc(), dy.device(), &self.spec().y)?;
        self.check_gradient("dw", &dw, self.spec().w.shape())?;
        check_disjoint("dw", &dw, "x", x)?;
        check_disjoint("dw", &dw, "dy", dy)?;
        match self.backward()? {
            Backward::Cpu(CpuBackward { gradients, .. }) => {
                let scratch = workspace.take(gradients.weight_bytes())?;
                gradients.weight(x, dy, &mut dw, floats_mut(scratch));
            }
            Backward::Cuda(gpu, gradients) => {
                let (stream, scratch) = workspace.take_on(gpu, gradients.weight_bytes())?;
                let out = (dw.as_mut_ptr(), &dw.desc().clone());
                // SAFETY: the views were checked against the spec and are on the device.
                unsafe { gradients.weight(stream, x.as_ptr(), dy.as_ptr(), out, scratch)? };
            }
        }
        if self.verify == Verify::Off {
            return Ok(());
        }
        workspace.synchronize()?;
        let want = self.expected_weight(&values(x)?, &values(dy)?)?;
        compare(&dw.as_ref(), &want, self.weight_tolerance()?)?
            .into_result("conv2d's weight gradient")
    }

    /// `db`, the gradient of the bias, `[k]`, in f32 or x's type: sums of `dy`.
    ///
    /// # Errors
    /// As [`Conv2dPlan::backward_data`].
    pub fn backward_bias(
        &self,
        dy: &TensorRef<'_>,
        mut db: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        self.check_backward(workspace)?;
        self.check_view("dy", dy.desc(), dy.device(), &self.spec().y)?;
        self.check_gradient("db", &db, &[self.problem.k])?;
        check_disjoint("db", &db, "dy", dy)?;
        match self.backward()? {
            Backward::Cpu(CpuBackward { gradients, .. }) => gradients.bias(dy, &mut db),
            Backward::Cuda(gpu, gradients) => {
                let (stream, scratch) = workspace.take_on(gpu, gradients.bias_bytes())?;
                let out = (db.as_mut_ptr(), &db.desc().clone());
                // SAFETY: the views were checked against the spec and are on the device.
                unsafe { gradients.bias(stream, dy.as_ptr(), out, scratch)? };
            }
        }
        if self.verify == Verify::Off {
            return Ok(());
        }
        workspace.synchronize()?;
        let want = reference::backward_bias(&self.problem, &values(dy)?);
        compare(&db.as_ref(), &want, self.bias_tolerance()?)?.into_result("conv2d's bias gradient")
    }

    /// The data gradient that the oracle gives, with the scale that [`Self::data_tolerance`] refers
    /// to.
    pub(crate) fn expected_data(&self, w: &[f64], dy: &[f64]) -> Result<Expected> {
        self.widened_data(&reference::backward_data(&self.problem, w, dy), w, dy)
    }

    /// As [`Self::expected_data`], of what the oracle computed before.
    pub(super) fn widened_data(&self, want: &Expected, w: &[f64], dy: &[f64]) -> Result<Expected> {
        let mut tiles = None;
        if let (Some(tile), Some(spec)) =
            (self.backward()?.data_tile(), mirrored(self.spec(), &self.problem))
            && let Ok(p) = spec.problem()
        {
            // As in the forward direction, with the channels of the filter swapped; how its taps are
            // ordered does not matter.
            let taps = p.r * p.s;
            let swapped: Vec<f64> = (0..p.k * p.c * taps)
                .map(|i| w[((i / taps % p.c) * p.k + i / taps / p.c) * taps + i % taps])
                .collect();
            tiles = Some(reference::winograd_scale(&p, tile, dy, &swapped));
        }
        Ok(want.clone().widened(tiles))
    }

    /// The weight gradient that the oracle gives, with the scale that [`Self::weight_tolerance`] refers
    /// to.
    pub(crate) fn expected_weight(&self, x: &[f64], dy: &[f64]) -> Result<Expected> {
        self.widened_weight(&reference::backward_weight(&self.problem, x, dy), x, dy)
    }

    /// As [`Self::expected_weight`], of what the oracle computed before.
    pub(super) fn widened_weight(
        &self,
        want: &Expected,
        x: &[f64],
        dy: &[f64],
    ) -> Result<Expected> {
        let tile = match self.backward()? {
            Backward::Cpu(_) => None,
            Backward::Cuda(_, gradients) => gradients.weight_tile(),
        };
        let tiles = tile.map(|tile| reference::winograd_weight_scale(&self.problem, tile, x, dy));
        Ok(want.clone().widened(tiles))
    }

    pub(crate) fn data_tolerance(&self) -> Result<f64> {
        Ok(match self.backward()? {
            Backward::Cpu(CpuBackward { data: Some(engine), .. }) => engine.tolerance(),
            Backward::Cpu(CpuBackward { gradients, .. }) => gradients.data_tolerance(),
            Backward::Cuda(_, gradients) => gradients.data_tolerance(),
        })
    }

    pub(crate) fn weight_tolerance(&self) -> Result<f64> {
        Ok(match self.backward()? {
            Backward::Cpu(CpuBackward { gradients, .. }) => gradients.weight_tolerance(),
            Backward::Cuda(_, gradients) => gradients.weight_tolerance(),
        })
    }

    pub(crate) fn bias_tolerance(&self) -> Result<f64> {
        Ok(match self.backward()? {
            // A row is summed in f32, the rest in f64.
            Backward::Cpu(_) => (self.problem.ow + 2) as f64 * DType::F32.unit_roundoff(),
            Backward::Cuda(_, gradients) => gradients.bias_tolerance(),
        })
    }

    fn check_backward(&self, workspace: &Workspace) -> Result<()> {
        check_device("workspace", workspace.device(), self.device())?;
        match self.spec().activation {
            Activation::Identity => Ok(()),
            other => Err(Error::unsupported(
                format!("the gradient of conv2d with the activation {}", other.name()),
                "make a plan without it and multiply dy by its derivative first",
            )),
        }
    }

    /// A gradient of the filter or the bias: x's type or f32.
    fn check_gradient(
        &self,
        arg: &'static str,
        given: &TensorMut<'_>,
        shape: &[usize],
    ) -> Result<()> {
        check_device(arg, given.device(), self.device())?;
        if given.dtype() != DType::F32 {
            check_dtype(arg, given.dtype(), self.spec().x.dtype)?;
        }
        check_tensor(arg, given.desc(), given.dtype(), shape)
    }
}
