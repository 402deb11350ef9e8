//! The search among configurations of a convolution.

use super::spec::is_channels_last;
use super::{
    Conv2d, Conv2dArgs, Conv2dConfiguration, Conv2dPlan, Conv2dSpec, PackedWeights, Weights, cpu,
    gpu,
};
use crate::cpu::resolve_threads;
use crate::plan::{Measured, PlanInputs, Tuned, dense, joined};
use crate::verification::Comparison;
use crate::{
    Device, Error, Filter, Layout, PlanOptions, Result, TensorDesc, TensorMut, TensorRef, Workspace,
};
use std::ops::Range;

impl Conv2dConfiguration {
    /// Rejects parameters that the algorithm does not have on the device of the options, or with which it cannot run.
    pub(super) fn check_parameters(&self, options: &PlanOptions) -> Result<()> {
        let on_cpu = options.device == Device::Cpu;
        let own = cpu::parameters(self.algorithm);
        let takes = |name: &str, value: usize| match on_cpu {
            true => value > 0 && (name == "threads" || own.contains(&name)),
            false => gpu::takes(self.algorithm, name, value),
        };
        if self.parameters().all(|(name, value)| value.is_none_or(|value| takes(name, value))) {
            return Ok(());
        }
        let parameters = match on_cpu {
            true if own.is_empty() => "threads, a positive number".into(),
            true => format!("{} and threads, which are positive", own.join(", ")),
            false => gpu::parameters(self.algorithm),
        };
        Err(Error::unsupported(
            format!("conv2d with {self} on {}", options.device),
            format!("{} has {parameters} there", self.algorithm),
        ))
    }
}

/// Bytes of x and y beyond which more images change nothing on the CPU.
const ENOUGH_BYTES: usize = 96 << 20;
/// The number of output channels that a search compares with the oracle: the first ones of the first image, and as many
/// of the last ones of the last image.
const SAMPLED_CHANNELS: usize = 2;

/// `nchw`, `nhwc`: dimensions by falling stride.
fn order(desc: &TensorDesc) -> &'static str {
    if is_channels_last(&desc.layout) { "nhwc" } else { "nchw" }
}

impl Measured for Conv2d {
    /// Packed filters.
    type SearchData = Vec<PackedWeights>;

    fn y(spec: &Conv2dSpec) -> &TensorDesc {
        &spec.y
    }

    /// Activations as after a ReLU, and weights of mean zero.
    fn range(input: &'static str) -> (f64, f64) {
        (if input == "x" { 0.0 } else { -1.0 }, 1.0)
    }

    /// Packs the filter before the runs if it is kept. On GPUs packing is a small part of a run.
    fn prepare(
        bound: &PlanInputs<'_, Conv2d>,
        kept: &mut Vec<PackedWeights>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let plan = bound.plan;
        let is_kept = plan.options.filter == Filter::Kept || plan.device() != Device::Cpu;
        if let Weights::Raw(w) = bound.args().w
            && is_kept
            && !kept.iter().any(|packed| plan.accepts(packed))
        {
            kept.push(plan.pack_weights(&w, workspace)?);
        }
        Ok(())
    }

    fn run(
        bound: &PlanInputs<'_, Conv2d>,
        kept: &Vec<PackedWeights>,
        y: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let (plan, mut args) = (bound.plan, bound.args());
        if let Some(packed) = kept.iter().find(|packed| plan.accepts(packed)) {
            args.w = Weights::Packed(packed);
        }
        plan.run(&args, y, workspace)
    }

    fn compare(plan: &Conv2dPlan, args: &Conv2dArgs<'_>, y: &TensorRef<'_>) -> Result<Comparison> {
        let want = plan.expected(args, &plan.known_filter(&args.w)?)?;
        want.compare(y, plan.tolerance())
    }

    /// Output channels: the first ones of the first image, the last ones of the last. Groups of channels belong
    /// to inputs of their own, so all of them are compared.
    fn compare_ends(
        plan: &Conv2dPlan,
        args: &Conv2dArgs<'_>,
        y: &TensorRef<'_>,
        count: Option<usize>,
    ) -> Result<Comparison> {
        let [n, k] = [y.shape()[0], y.shape()[1]];
        let Weights::Raw(w) = args.w else { return Self::compare(plan, args, y) };
        let count = match plan.spec.groups {
            1 => count.unwrap_or(SAMPLED_CHANNELS).min(k),
            _ => k,
        };
        let part = |image: Range<usize>, channels: Range<usize>| {
            let x = args.x.narrow(0, image.clone())?;
            let w = w.narrow(0, channels.clone())?;
            let bias = args.bias.map(|b| b.narrow(0, channels.clone())).transpose()?;
            let residual =
                args.residual.map(|r| r.narrow(0, image.clone())?.narrow(1, channels.clone()));
            let residual = residual.transpose()?;
            let y = y.narrow(0, image)?.narrow(1, channels)?;
            let spec = Conv2dSpec::new(*x.desc(), *w.desc(), &plan.spec.params())?;
            let args = Conv2dArgs { x, w: Weights::Raw(w), bias, residual };
            let want = plan.expected_of(&spec.problem()?, &args, &w.to_f64_vec()?)?;
            want.compare(&y, plan.tolerance())
        };
        let mut comparison = part(0..n.min(1), 0..count)?;
        if n > 1 || k > count {
            comparison.merge(&part(n.saturating_sub(1)..n, k - count..k)?);
        }
        Ok(comparison)
    }
}

impl Tuned for Conv2d {
    /// The spec with dense tensors in the spec's order of dimensions. On the CPU a large batch is represented by as
    /// many images as exceed the caches; further images take as long each.
    fn plain(spec: &Conv2dSpec, options: &PlanOptions) -> Result<Conv2dSpec> {
        let n = spec.problem()?.n;
        let image = (spec.x.layout.len() + spec.y.layout.len()) / n.max(1) * spec.x.dtype.size();
        let n = match options.device == Device::Cpu {
            true => n.min(ENOUGH_BYTES.div_ceil(image.max(1))),
            false => n,
        };
        let images = |desc: &TensorDesc| {
            let shape = [&[n], &desc.shape()[1..]].concat();
            let layout = Layout::strided(&shape, desc.strides())?;
            dense(&TensorDesc { layout, ..*desc })
        };
        let (x, y) = (images(&spec.x)?, images(&spec.y)?);
        let w = TensorDesc::contiguous(spec.w.dtype, spec.w.shape())?;
        let bias = spec.bias.map(|b| TensorDesc::contiguous(b.dtype, b.shape())).transpose()?;
        Ok(Conv2dSpec { x, w, y, bias, ..spec.clone() })
    }

    fn key(spec: &Conv2dSpec, options: &PlanOptions) -> String {
        let Conv2dSpec { x, w, y, stride, padding, dilation, groups, .. } = spec;
        let (dtype, accuracy) = (x.dtype, spec.accuracy.name());
        let mut key = format!("conv2d {dtype} {} {}", joined(x.shape()), joined(w.shape()));
        for (name, values, default) in
            [("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)]
        {
            if *values != [default; 2] {
                key += &format!(" {name} {}", joined(values));
            }
        }
        if *groups > 1 {
            key += &format!(" groups {groups}");
        }
        key += &format!(" {}-{} {accuracy}", order(x), order(y));
        if options.device == Device::Cpu {
            key += &format!(" {} threads", resolve_threads(options.threads));
            if options.filter == Filter::Changing {
                key += " packing";
            }
        }
        key
    }
}

#[cfg(all(test, feature = "tuning"))]
mod tests;
