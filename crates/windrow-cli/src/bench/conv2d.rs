//! Convolution layers: 3x3, stride 1, no padding, NCHW, filter packed once.

use super::layers::Layer;
use super::{Case, Description, Entry, Selection, Work, ends};
use crate::failure::Failure;
use crate::placed::Placed;
use std::ops::Range;
use windrow::verify::{Comparison, random_tensor};
use windrow::{
    Conv2dAlgorithm, Conv2dArgs, Conv2dParams, Conv2dPlan, Conv2dSpec, DType, PackedWeights,
    PlanOptions, TensorDesc, Weights, Workspace,
};

/// Output channels of an image that are compared with the oracle at each end.
const SAMPLED_CHANNELS: usize = 2;

struct Conv2d {
    name: String,
    plan: Conv2dPlan,
    direct: Conv2dPlan,
    options: PlanOptions,
    x: Placed,
    w: Placed,
    packed: PackedWeights,
    y: Placed,
    y_direct: Placed,
    workspace: Workspace,
}

pub(super) fn entries(s: &Selection<'_>, layers: Vec<Layer>) -> Result<Vec<Entry>, Failure> {
    let algorithm = match s.algorithm.map(str::parse::<Conv2dAlgorithm>) {
        Some(Err(_)) => return Ok(Vec::new()),
        named => named.and_then(Result::ok),
    };
    let mut entries: Vec<Entry> = Vec::new();
    for layer in layers {
        for &dtype in s.dtypes(&[DType::F32]) {
            let spec = spec(&layer, dtype)?;
            let can = Conv2dPlan::algorithms(&spec, s.options.device);
            if algorithm.is_none_or(|a| can.contains(&a)) {
                let (name, options) = (layer.name.clone(), s.options);
                entries.push(Box::new(move || {
                    Ok(Box::new(Conv2d::new(name.clone(), &spec, algorithm, options)?))
                }));
            }
        }
    }
    Ok(entries)
}

pub(crate) fn spec(layer: &Layer, dtype: DType) -> windrow::Result<Conv2dSpec> {
    let x = TensorDesc::contiguous(dtype, &[layer.n, layer.c, layer.h, layer.w])?;
    let w = TensorDesc::contiguous(dtype, &[layer.k, layer.c, 3, 3])?;
    Conv2dSpec::new(x, w, &Conv2dParams::default())
}

pub(crate) fn shape(spec: &Conv2dSpec) -> String {
    format!("{} k{}", super::by_x(spec.x.shape()), spec.w.shape()[0])
}

impl Conv2d {
    fn new(
        name: String,
        spec: &Conv2dSpec,
        algorithm: Option<Conv2dAlgorithm>,
        options: PlanOptions,
    ) -> windrow::Result<Self> {
        let plan = match algorithm {
            Some(algorithm) => Conv2dPlan::with_algorithm(spec, algorithm, &options)?,
            None => Conv2dPlan::new(spec, &options)?,
        };
        let direct = Conv2dPlan::with_algorithm(spec, Conv2dAlgorithm::Direct, &options)?;
        let bytes = [plan.workspace_bytes(), direct.workspace_bytes()];
        let mut workspace = Workspace::for_sizes(options.device, bytes)?;
        // Activations behind a ReLU, and weights of mean zero.
        let x = random_tensor(1, spec.x, 0.0, 1.0)?;
        let w = random_tensor(2, spec.w, -1.0, 1.0)?;
        let device = options.device;
        let (x, w) = (Placed::new(x, device)?, Placed::new(w, device)?);
        let packed = plan.pack_weights(&w.as_ref(), &mut workspace)?;
        let (y, y_direct) = (Placed::output(spec.y, device)?, Placed::output(spec.y, device)?);
        Ok(Conv2d { name, plan, direct, options, x, w, packed, y, y_direct, workspace })
    }

    /// Some channels of one image against the oracle: a convolution of parts of x and w.
    fn compare_part(
        &self,
        image: Range<usize>,
        channels: Range<usize>,
    ) -> windrow::Result<Comparison> {
        let x = self.x.as_ref().narrow(0, image.clone())?;
        let w = self.w.as_ref().narrow(0, channels.clone())?;
        let y = self.y.as_ref().narrow(0, image)?.narrow(1, channels)?;
        let spec = Conv2dSpec::new(*x.desc(), *w.desc(), &self.plan.spec().params())?
            .with_output(*y.desc());
        let plan = Conv2dPlan::with_algorithm(&spec, self.plan.algorithm(), &self.options)?;
        plan.compare(&Conv2dArgs { x, w: Weights::Raw(w), bias: None }, &y)
    }
}

impl Case for Conv2d {
    fn describe(&self) -> Description {
        let spec = self.plan.spec();
        Description {
            op: "conv2d",
            name: self.name.clone(),
            device: self.options.device,
            dtype: spec.x.dtype,
            algorithm: self.plan.algorithm().name().into(),
            configuration: self.plan.configuration().to_string(),
            shape: shape(spec),
            plan: self.plan.explain(),
            work: Work::Flops(spec.flops().unwrap_or(0.0)),
            direct: "the direct algorithm",
        }
    }

    fn run(&mut self) -> windrow::Result<()> {
        let args = Conv2dArgs { x: self.x.as_ref(), w: Weights::Packed(&self.packed), bias: None };
        self.plan.run(&args, self.y.as_mut()?, &mut self.workspace)?;
        self.workspace.synchronize()
    }

    fn run_direct(&mut self) -> windrow::Result<()> {
        let args = Conv2dArgs { x: self.x.as_ref(), w: Weights::Raw(self.w.as_ref()), bias: None };
        self.direct.run(&args, self.y_direct.as_mut()?, &mut self.workspace)?;
        self.workspace.synchronize()
    }

    fn compare(&mut self) -> windrow::Result<Comparison> {
        let [n, k] = [self.y.desc().shape()[0], self.y.desc().shape()[1]];
        let [first, last] = ends(k, SAMPLED_CHANNELS);
        let mut comparison = self.compare_part(0..1, first)?;
        if !last.is_empty() {
            comparison.merge(&self.compare_part(n - 1..n, last)?);
        }
        Ok(comparison)
    }

    fn elements(&self) -> usize {
        self.y.desc().layout.len()
    }
}
