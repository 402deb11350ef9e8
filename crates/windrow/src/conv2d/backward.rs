//! The gradients of a convolution.

use super::cpu::{Engine, Gradients, floats_mut};
use super::plan::choose;
use super::reference::{self, Expected};
use super::{Conv2dPlan, Conv2dSpec, Problem};
use crate::cpu::Isa;
use crate::tensor::{check_device, check_disjoint, check_dtype, check_tensor};
use crate::verify::Comparison;
use crate::{
    Activation, DType, Device, Error, Layout, Result, TensorDesc, TensorMut, TensorRef, Verify,
    Workspace,
};

/// How the gradients are computed.
#[derive(Debug)]
pub(crate) struct Backward {
    /// The data gradient as a convolution, where its algorithm is Winograd.
    data: Option<Engine>,
    gradients: Gradients,
}

impl Backward {
    pub(crate) fn new(spec: &Conv2dSpec, p: &Problem, isa: Isa, threads: usize) -> Self {
        let data = mirrored(spec, p).and_then(|spec| {
            let p = spec.problem().ok()?;
            let algorithm = choose(&spec, &p);
            algorithm.tile().map(|_| Engine::new(&spec, &p, algorithm, isa, threads))
        });
        Backward { data, gradients: Gradients::new(spec, p, isa, threads) }
    }

    /// Elements of the packed filter and bytes of scratch memory for the data gradient.
    fn data_sizes(&self, p: &Problem) -> (usize, usize) {
        match &self.data {
            Some(engine) => (engine.packed_len(), engine.workspace_bytes(p.c)),
            None => self.gradients.data_sizes(),
        }
    }

    fn data_bytes(&self, p: &Problem) -> usize {
        let (packed, scratch) = self.data_sizes(p);
        (packed * size_of::<f32>()).next_multiple_of(64) + scratch
    }

    /// Bytes of workspace for any of the gradients.
    pub(crate) fn workspace_bytes(&self, p: &Problem) -> usize {
        self.data_bytes(p).max(self.gradients.weight_bytes())
    }
}

/// The data gradient of a convolution of stride 1 as a convolution of dy: by the filter turned
/// around, with input and output channels swapped. `None` where it is not one.
fn mirrored(spec: &Conv2dSpec, p: &Problem) -> Option<Conv2dSpec> {
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
    /// Bytes of workspace that the three gradients need.
    pub fn backward_workspace_bytes(&self) -> usize {
        match self.device() {
            Device::Cpu => self.backward().workspace_bytes(&self.problem),
            Device::Cuda(_) => 0,
        }
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
        let (p, backward) = (&self.problem, self.backward());
        let memory = workspace.take(backward.data_bytes(p))?;
        if dx.layout().is_empty() {
            return Ok(());
        }
        let (packed_len, _) = backward.data_sizes(p);
        let bytes = (packed_len * size_of::<f32>()).next_multiple_of(64);
        let (packed, scratch) = memory.split_at_mut(bytes);
        let packed = floats_mut(packed);
        match (&backward.data, turn(w)) {
            (Some(engine), Some(w)) => {
                engine.pack(&w, packed);
                engine.run(packed, dy, None, Activation::Identity, &mut dx, scratch);
            }
            _ => backward.gradients.data(w, dy, &mut dx, packed, floats_mut(scratch)),
        }
        if self.verify == Verify::Off {
            return Ok(());
        }
        let (w, dy) = (w.to_f64_vec()?, dy.to_f64_vec()?);
        let want = self.expected_data(&w, &dy);
        let tolerance = self.data_tolerance();
        Comparison::of(&dx.as_ref(), &want.values, &want.scale, tolerance)?
            .into_result("conv2d's data gradient")
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
        let gradients = &self.backward().gradients;
        let scratch = workspace.take(gradients.weight_bytes())?;
        gradients.weight(x, dy, &mut dw, floats_mut(scratch));
        if self.verify == Verify::Off {
            return Ok(());
        }
        let want = reference::backward_weight(&self.problem, &x.to_f64_vec()?, &dy.to_f64_vec()?);
        Comparison::of(&dw.as_ref(), &want.values, &want.scale, self.weight_tolerance())?
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
        self.backward().gradients.bias(dy, &mut db);
        if self.verify == Verify::Off {
            return Ok(());
        }
        let want = reference::backward_bias(&self.problem, &dy.to_f64_vec()?);
        Comparison::of(&db.as_ref(), &want.values, &want.scale, self.bias_tolerance())?
            .into_result("conv2d's bias gradient")
    }

    /// The data gradient that the oracle gives, with the scale that [`Self::data_tolerance`] refers
    /// to.
    pub(crate) fn expected_data(&self, w: &[f64], dy: &[f64]) -> Expected {
        let mut want = reference::backward_data(&self.problem, w, dy);
        let engine = self.backward().data.as_ref().and_then(Engine::tile);
        if let (Some(tile), Some(spec)) = (engine, mirrored(self.spec(), &self.problem))
            && let Ok(p) = spec.problem()
        {
            // As in the forward direction, with the channels of the filter swapped; how its taps are
            // ordered does not matter.
            let taps = p.r * p.s;
            let swapped: Vec<f64> = (0..p.k * p.c * taps)
                .map(|i| w[((i / taps % p.c) * p.k + i / taps / p.c) * taps + i % taps])
                .collect();
            let tiles = reference::winograd_scale(&p, tile.m(), dy, &swapped);
            want.scale.iter_mut().zip(tiles).for_each(|(scale, tile)| *scale += tile);
        }
        want
    }

    pub(crate) fn data_tolerance(&self) -> f64 {
        match &self.backward().data {
            Some(engine) => engine.tolerance(),
            None => self.backward().gradients.data_tolerance(),
        }
    }

    pub(crate) fn weight_tolerance(&self) -> f64 {
        self.backward().gradients.weight_tolerance()
    }

    /// A row is summed in f32, the rest in f64.
    pub(crate) fn bias_tolerance(&self) -> f64 {
        (self.problem.ow + 2) as f64 * DType::F32.unit_roundoff()
    }

    fn check_backward(&self, workspace: &Workspace) -> Result<()> {
        if self.device() != Device::Cpu {
            return Err(Error::unsupported(
                format!("the gradient of conv2d on {}", self.device()),
                "it is computed on the CPU only",
            ));
        }
        check_device("workspace", workspace.device(), Device::Cpu)?;
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
        check_device(arg, given.device(), Device::Cpu)?;
        if given.dtype() != DType::F32 {
            check_dtype(arg, given.dtype(), self.spec().x.dtype)?;
        }
        check_tensor(arg, given.desc(), given.dtype(), shape)
    }
}
