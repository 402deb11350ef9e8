//! `windrow run conv3d`.

use super::{Common, Files, place, plan};
use crate::failure::Failure;
use crate::names;
use std::path::{Path, PathBuf};
use windrow::{
    Accuracy, Activation, Conv2dAlgorithm, Conv3dArgs, Conv3dOutputs, Conv3dParams, Conv3dPlan,
    Conv3dSpec, Placed, Tensor, TensorDesc, TimePadding, Workspace,
};

/// 3-D convolution of videos or volumes
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  windrow run conv3d --input x.npy --weight w.npy --padding 1 --output y.npy
  windrow run conv3d --input chunk.npy --weight w.npy --padding 0,1,1 --time-padding causal \\
      --initial-frames before.npy --final-frames after.npy --output y.npy")]
#[command(override_usage = "\
windrow run conv3d [OPTIONS] --input <FILE> --weight <FILE>
                          --output <FILE>")]
pub(crate) struct Conv3d {
    /// x [n, c, t, h, w], f32, f16 or bf16; `-` is standard input
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// w [k, c/groups, kt, r, s]
    #[arg(long, value_name = "FILE")]
    weight: PathBuf,
    /// Bias [k]
    #[arg(long, value_name = "FILE")]
    bias: Option<PathBuf>,
    /// Frames before x, [n, c, (kt-1)*dilation, h, w]; for causal convolutions
    #[arg(long, value_name = "FILE")]
    initial_frames: Option<PathBuf>,
    /// File for the frames that the next chunk takes as its initial frames
    #[arg(long, value_name = "FILE")]
    final_frames: Option<PathBuf>,
    /// Stride: one number, or three as frames,rows,columns
    #[arg(long, default_value = "1", value_name = "N", value_parser = three, allow_negative_numbers = true)]
    stride: [usize; 3],
    /// Zeros around x: one number, or three as frames,rows,columns
    #[arg(long, default_value = "0", value_name = "N", value_parser = three, allow_negative_numbers = true)]
    padding: [usize; 3],
    /// Distance of filter taps: one number, or three as frames,rows,columns
    #[arg(long, default_value = "1", value_name = "N", value_parser = three, allow_negative_numbers = true)]
    dilation: [usize; 3],
    /// Groups of channels
    #[arg(long, default_value_t = 1)]
    groups: usize,
    /// What is read before the first frame: zeros (and after the last), causal, or causal_repeat
    #[arg(long, value_name = "NAME", default_value = "zeros", value_parser = str::parse::<TimePadding>)]
    time_padding: TimePadding,
    /// Activation of the sums; swish is another name of silu, none of identity. leaky_relu takes its slope in
    /// parentheses: 'leaky_relu(0.2)'
    #[arg(long, value_name = "NAME", default_value = "identity", value_parser = names::activation())]
    activation: Activation,
    /// Accuracy that the algorithm must have [default: fp32]
    #[arg(long, value_name = "NAME", value_parser = names::accuracy())]
    accuracy: Option<Accuracy>,
    /// Algorithm by name [default: the cost model's choice]
    #[arg(long, value_name = "NAME", value_parser = names::conv2d())]
    algorithm: Option<Conv2dAlgorithm>,
    #[command(flatten)]
    common: Common,
}

impl Conv3d {
    pub(super) fn run(&self) -> Result<(), Failure> {
        let last = self.final_frames.as_deref();
        let files = Files::new([&*self.common.output].into_iter().chain(last))?;
        let (x, w) = (files.read(&self.input)?, files.read(&self.weight)?);
        let bias = files.read_optional(self.bias.as_ref())?;
        let initial = files.read_optional(self.initial_frames.as_ref())?;
        let params = Conv3dParams::default()
            .with_stride(self.stride)
            .with_padding(self.padding)
            .with_dilation(self.dilation)
            .with_groups(self.groups)
            .with_time_padding(self.time_padding)
            .with_activation(self.activation)
            .with_accuracy(self.accuracy.unwrap_or_default());
        let mut spec = Conv3dSpec::new(*x.desc(), *w.desc(), &params)?
            .with_bias(bias.as_ref().map(|t| *t.desc()))
            .with_initial_frames(initial.as_ref().map(|t| *t.desc()));
        if last.is_some() {
            let (x, w) = (spec.x.shape(), spec.w.shape());
            let frames = w[2].saturating_sub(1).saturating_mul(self.dilation[0]);
            let shape = [x[0], x[1], frames, x[3], x[4]];
            spec.final_frames = Some(TensorDesc::contiguous(spec.x.dtype, &shape)?);
        }
        let options = self.common.options()?;
        let plan: Conv3dPlan = plan(&spec, self.algorithm, &options)?;
        let dtypes = [Some(spec.y), spec.final_frames].into_iter().flatten().map(|d| d.dtype);
        files.start(&plan.explain(), &options, dtypes)?;
        let device = options.device;
        let (x, w) = (Placed::new(x, device)?, Placed::new(w, device)?);
        let added = place([bias, initial], device)?;
        let [bias, initial] = [0, 1].map(|i: usize| added[i].as_ref().map(Placed::as_ref));
        let mut y = Placed::output(spec.y, device)?;
        let output = |desc| Placed::output(desc, device);
        let mut final_frames = spec.final_frames.map(output).transpose()?;
        let mut workspace = Workspace::new(device, plan.workspace_bytes())?;
        let outputs = Conv3dOutputs::new(y.as_mut()?)
            .with_final_frames(final_frames.as_mut().map(Placed::as_mut).transpose()?);
        let args = Conv3dArgs::new(x.as_ref(), w.as_ref()).with_bias(bias);
        plan.run(&args.with_initial_frames(initial), outputs, &mut workspace)?;
        workspace.synchronize()?;
        let y = y.into_host()?;
        let final_frames = final_frames.map(Placed::into_host).transpose()?;
        let mut results: Vec<(&Path, &str, &Tensor)> = vec![(&self.common.output, "y", &y)];
        if let (Some(path), Some(frames)) = (last, &final_frames) {
            results.push((path, "final_frames", frames));
        }
        files.finish(&results, &plan.explain())
    }
}

/// `2` or `1,2,2`.
fn three(text: &str) -> Result<[usize; 3], String> {
    let number = |t: &str| t.trim().parse::<usize>().map_err(|_| "not a size".to_owned());
    let numbers: Result<Vec<usize>, String> = text.split(',').map(number).collect();
    match numbers.as_deref() {
        Ok(&[all]) => Ok([all; 3]),
        Ok(&[frames, rows, columns]) => Ok([frames, rows, columns]),
        _ => Err("expected one or three numbers of at least 0: FRAMES,ROWS,COLUMNS".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::three;

    #[test]
    fn one_or_three_numbers() {
        assert_eq!((three("2"), three("0, 3,1")), (Ok([2, 2, 2]), Ok([0, 3, 1])));
        for bad in ["", "-1", "1,2", "1,2,3,4", "1.5", "99999999999999999999"] {
            assert!(three(bad).is_err(), "{bad}");
        }
    }
}
