//! Causal depthwise convolutions of width 4 with bias and SiLU, as Mamba's.

use super::{Case, Description, Entry, Selection, Work, by_x, ends};
use crate::failure::Failure;
use crate::placed::Placed;
use std::ops::Range;
use windrow::verify::{Comparison, random_tensor};
use windrow::{
    Activation, CausalConv1dAlgorithm, CausalConv1dArgs, CausalConv1dOutputs, CausalConv1dPlan,
    CausalConv1dSpec, DType, Layout, PlanOptions, TensorDesc, Workspace, cpu,
};

const WIDTH: usize = 4;
/// Channels that are compared with the oracle at each end.
const SAMPLED_CHANNELS: usize = 8;

/// [b, d, l], whether channels lie next to each other, and the algorithm if not the planner's.
type Shape = ([usize; 3], bool, Option<CausalConv1dAlgorithm>);

const CASES: [Shape; 4] = [
    ([1, 64, 2048], false, None),
    ([1, 64, 2048], false, Some(CausalConv1dAlgorithm::Im2colGemm)),
    ([1, 2048, 2048], false, None),
    ([2, 4096, 512], true, None),
];
const FULL_CASES: [Shape; 3] =
    [([8, 4096, 2048], false, None), ([8, 4096, 2048], true, None), ([2, 8192, 8192], false, None)];

struct CausalConv1d {
    plan: CausalConv1dPlan,
    direct: CausalConv1dPlan,
    options: PlanOptions,
    threads: usize,
    x: Placed,
    weight: Placed,
    bias: Placed,
    y: Placed,
    y_direct: Placed,
    copied: Placed,
    workspace: Workspace,
}

pub(super) fn entries(s: &Selection<'_>) -> Result<Vec<Entry>, Failure> {
    let named = match s.algorithm.map(str::parse::<CausalConv1dAlgorithm>) {
        Some(Err(_)) => return Ok(Vec::new()),
        named => named.and_then(Result::ok),
    };
    let mut entries: Vec<Entry> = Vec::new();
    for (shape, channel_last, algorithm) in
        CASES.into_iter().chain(if s.full { &FULL_CASES[..] } else { &[] }.iter().copied())
    {
        if named.is_some() && algorithm.is_some() {
            continue; // the same shape is there without an algorithm of its own
        }
        let algorithm = named.or(algorithm);
        for &dtype in s.dtypes(&[DType::F32, DType::BF16]) {
            let spec = spec(shape, channel_last, dtype)?;
            let can = CausalConv1dPlan::algorithms(&spec, s.options.device);
            if algorithm.is_none_or(|a| can.contains(&a)) {
                let options = s.options;
                entries.push(Box::new(move || {
                    Ok(Box::new(CausalConv1d::new(&spec, algorithm, options)?))
                }));
            }
        }
    }
    Ok(entries)
}

fn spec(shape: [usize; 3], channel_last: bool, dtype: DType) -> windrow::Result<CausalConv1dSpec> {
    let order = if channel_last { [0, 2, 1] } else { [0, 1, 2] };
    let x = TensorDesc { dtype, layout: Layout::with_order(&shape, &order)? };
    let weight = TensorDesc::contiguous(dtype, &[shape[1], WIDTH])?;
    let bias = TensorDesc::contiguous(dtype, &[shape[1]])?;
    Ok(CausalConv1dSpec::new(x, weight)?.with_bias(bias).with_activation(Activation::Silu))
}

/// The specs of the cases, each once.
pub(crate) fn specs(dtype: DType, full: bool) -> windrow::Result<Vec<CausalConv1dSpec>> {
    let cases = CASES.into_iter().chain(if full { &FULL_CASES[..] } else { &[] }.iter().copied());
    cases
        .filter(|(_, _, algorithm)| algorithm.is_none())
        .map(|(shape, channel_last, _)| spec(shape, channel_last, dtype))
        .collect()
}

/// `channel-first` or `channel-last`.
pub(crate) fn layout(spec: &CausalConv1dSpec) -> &'static str {
    if spec.x.strides()[1] == 1 { "channel-last" } else { "channel-first" }
}

impl CausalConv1d {
    fn new(
        spec: &CausalConv1dSpec,
        algorithm: Option<CausalConv1dAlgorithm>,
        options: PlanOptions,
    ) -> windrow::Result<Self> {
        let plan = match algorithm {
            Some(algorithm) => CausalConv1dPlan::with_algorithm(spec, algorithm, &options)?,
            None => CausalConv1dPlan::new(spec, &options)?,
        };
        let direct =
            CausalConv1dPlan::with_algorithm(spec, CausalConv1dAlgorithm::Direct, &options)?;
        let bytes = [plan.workspace_bytes(), direct.workspace_bytes()];
        let workspace = Workspace::for_sizes(options.device, bytes)?;
        let threads = options.threads.map_or_else(cpu::num_threads, usize::from);
        let x = random_tensor(1, spec.x, -1.0, 1.0)?;
        let weight = random_tensor(2, spec.weight, -1.0, 1.0)?;
        let bias = TensorDesc::contiguous(spec.x.dtype, &[spec.x.shape()[1]])?;
        let bias = random_tensor(3, bias, -1.0, 1.0)?;
        let device = options.device;
        let (x, weight) = (Placed::new(x, device)?, Placed::new(weight, device)?);
        let bias = Placed::new(bias, device)?;
        let output = || Placed::output(spec.y, device);
        let (y, y_direct, copied) = (output()?, output()?, output()?);
        Ok(CausalConv1d {
            plan,
            direct,
            options,
            threads,
            x,
            weight,
            bias,
            y,
            y_direct,
            copied,
            workspace,
        })
    }

    fn args(&self) -> CausalConv1dArgs<'_> {
        arguments(&self.x, &self.weight, &self.bias)
    }

    /// Some channels against the oracle.
    fn compare_part(&self, channels: Range<usize>) -> windrow::Result<Comparison> {
        let args = CausalConv1dArgs {
            x: self.x.as_ref().narrow(1, channels.clone())?,
            weight: self.weight.as_ref().narrow(0, channels.clone())?,
            bias: Some(self.bias.as_ref().narrow(0, channels.clone())?),
            ..self.args()
        };
        let y = self.y.as_ref().narrow(1, channels)?;
        let spec = CausalConv1dSpec {
            x: *args.x.desc(),
            weight: *args.weight.desc(),
            bias: args.bias.map(|b| *b.desc()),
            y: *y.desc(),
            ..self.plan.spec().clone()
        };
        let algorithm = self.plan.algorithm();
        CausalConv1dPlan::with_algorithm(&spec, algorithm, &self.options)?.compare(&args, &y)
    }
}

fn arguments<'a>(x: &'a Placed, weight: &'a Placed, bias: &'a Placed) -> CausalConv1dArgs<'a> {
    CausalConv1dArgs {
        x: x.as_ref(),
        weight: weight.as_ref(),
        bias: Some(bias.as_ref()),
        seq_idx: None,
        cu_seqlens: None,
        initial_states: None,
    }
}

impl Case for CausalConv1d {
    fn describe(&self) -> Description {
        let spec = self.plan.spec();
        Description {
            op: "causal_conv1d",
            name: layout(spec).into(),
            device: self.options.device,
            dtype: spec.x.dtype,
            algorithm: self.plan.algorithm().name().into(),
            configuration: self.plan.configuration().to_string(),
            shape: format!("{} w{WIDTH}", by_x(spec.x.shape())),
            plan: self.plan.explain(),
            work: Work::Bytes((spec.x.bytes() + spec.y.bytes()) as f64),
            direct: "the direct algorithm",
        }
    }

    fn run(&mut self) -> windrow::Result<()> {
        let args = arguments(&self.x, &self.weight, &self.bias);
        let outputs = CausalConv1dOutputs { y: self.y.as_mut()?, final_states: None };
        self.plan.run(&args, outputs, &mut self.workspace)?;
        self.workspace.synchronize()
    }

    fn run_direct(&mut self) -> windrow::Result<()> {
        let args = arguments(&self.x, &self.weight, &self.bias);
        let outputs = CausalConv1dOutputs { y: self.y_direct.as_mut()?, final_states: None };
        self.direct.run(&args, outputs, &mut self.workspace)?;
        self.workspace.synchronize()
    }

    fn copy(&mut self) -> windrow::Result<()> {
        self.copied.copy_from(&self.x, self.threads, &self.workspace)?;
        self.workspace.synchronize()
    }

    fn compare(&mut self) -> windrow::Result<Comparison> {
        let [first, last] = ends(self.x.desc().shape()[1], SAMPLED_CHANNELS);
        let mut comparison = self.compare_part(first)?;
        comparison.merge(&self.compare_part(last)?);
        Ok(comparison)
    }

    fn elements(&self) -> usize {
        self.y.desc().layout.len()
    }
}
