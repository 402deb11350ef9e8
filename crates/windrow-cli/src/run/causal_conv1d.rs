//! `windrow run causal-conv1d`.

use super::{Common, Files, place, plan};
use crate::failure::Failure;
use crate::names;
use std::path::{Path, PathBuf};
use windrow::internal::PlanInputs;
use windrow::{
    Activation, CausalConv1dAlgorithm, CausalConv1dOutputs, CausalConv1dPlan, CausalConv1dSpec,
    Placed, Tensor, TensorDesc, Workspace,
};

/// Causal 1-D convolution: y[b,d,t] = act(bias[d] + sum over k of w[d,k] * x[b,d,t-(width-1)+k])
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  windrow run causal-conv1d --input x.npy --weight w.npy --activation silu --output y.npy
  windrow run causal-conv1d --input 1.npy --weight w.npy --output y1.npy --final-states s.npy
  windrow run causal-conv1d --input 2.npy --weight w.npy --output y2.npy --initial-states s.npy")]
#[command(override_usage = "\
windrow run causal-conv1d [OPTIONS] --input <FILE> --weight <FILE>
                                 --output <FILE>")]
pub(crate) struct CausalConv1d {
    /// x [b, d, l], f32, f16 or bf16; `-` is standard input
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// w [d, width], or [d_out, d, width] for a dense convolution
    #[arg(long, value_name = "FILE")]
    weight: PathBuf,
    /// Bias [d], or [d_out] for a dense convolution
    #[arg(long, value_name = "FILE")]
    bias: Option<PathBuf>,
    /// Activation of the sums; swish is another name of silu, none of identity. leaky_relu takes its slope in
    /// parentheses: 'leaky_relu(0.2)'
    #[arg(long, value_name = "NAME", default_value = "identity", value_parser = names::activation())]
    activation: Activation,
    /// Number of each token's sequence, i32 [b, l]; a negative number is padding
    #[arg(long, value_name = "FILE")]
    seq_idx: Option<PathBuf>,
    /// First token of each packed sequence, and the number of tokens, i32 or i64 [sequences + 1]
    #[arg(long, value_name = "FILE")]
    cu_seqlens: Option<PathBuf>,
    /// Distance of neighbouring taps in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 1)]
    dilation: usize,
    /// Inputs before x: [b or sequences, d, (width - 1) * dilation]
    #[arg(long, value_name = "FILE")]
    initial_states: Option<PathBuf>,
    /// File for the states after x, for the next call's --initial-states
    #[arg(long, value_name = "FILE")]
    final_states: Option<PathBuf>,
    /// The files of x and y have channels last: [b, l, d]
    #[arg(long, alias = "channel-last")]
    channels_last: bool,
    /// Algorithm by name [default: the cost model's choice]
    #[arg(long, value_name = "NAME", value_parser = names::causal_conv1d())]
    algorithm: Option<CausalConv1dAlgorithm>,
    #[command(flatten)]
    common: Common,
}

impl CausalConv1d {
    pub(super) fn run(&self) -> Result<(), Failure> {
        let states = self.final_states.as_deref();
        let files = Files::new([&*self.common.output].into_iter().chain(states))?;
        let order = self.channels_last.then_some(&[0, 2, 1][..]);
        let x = files.read_ordered(&self.input, "x", order)?;
        let weight = files.read(&self.weight)?;
        let bias = files.read_optional(self.bias.as_ref())?;
        let seq_idx = files.read_optional(self.seq_idx.as_ref())?;
        let cu_seqlens = files.read_optional(self.cu_seqlens.as_ref())?;
        let initial_states = files.read_optional(self.initial_states.as_ref())?;

        let desc = |t: &Option<Tensor>| t.as_ref().map(|t| *t.desc());
        let mut spec = CausalConv1dSpec::new(*x.desc(), *weight.desc())?;
        spec.bias = desc(&bias);
        spec.activation = self.activation;
        spec.dilation = self.dilation;
        spec.seq_idx = desc(&seq_idx);
        spec.cu_seqlens = desc(&cu_seqlens);
        spec.initial_states = desc(&initial_states);
        if self.final_states.is_some() {
            let shape = spec.states_shape()?;
            spec.final_states = Some(TensorDesc::contiguous(spec.x.dtype, &shape)?);
        }
        let options = self.common.options()?;
        let plan: CausalConv1dPlan = plan(&spec, self.algorithm, &options)?;
        let dtypes = [Some(spec.y), spec.final_states].into_iter().flatten().map(|d| d.dtype);
        files.start(&plan.explain(), &options, dtypes)?;

        let device = options.device;
        let tensors = [Some(x), Some(weight), bias, seq_idx, cu_seqlens, initial_states];
        let inputs = place(tensors, device)?;
        let mut y = Placed::output(spec.y, device)?;
        let output = |desc| Placed::output(desc, device);
        let mut final_states = spec.final_states.map(output).transpose()?;
        let mut workspace = Workspace::new(device, plan.workspace_bytes())?;
        let outputs = CausalConv1dOutputs::new(y.as_mut()?)
            .with_final_states(final_states.as_mut().map(Placed::as_mut).transpose()?);
        plan.run(&PlanInputs::new(&plan, &inputs).args(), outputs, &mut workspace)?;
        workspace.synchronize()?;
        let mut y = y.into_host()?;
        let final_states = final_states.map(Placed::into_host).transpose()?;
        if self.channels_last {
            y = y.permute(&[0, 2, 1]);
        }
        let mut results: Vec<(&Path, &str, &Tensor)> = vec![(&self.common.output, "y", &y)];
        if let (Some(path), Some(states)) = (&self.final_states, &final_states) {
            results.push((path, "final_states", states));
        }
        files.finish(&results, &plan.explain())
    }
}
