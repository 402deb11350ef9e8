//! `windrow run conv2d`.

use super::{Common, Files, place, plan};
use crate::failure::Failure;
use crate::names;
use std::path::PathBuf;
use windrow::internal::PlanInputs;
use windrow::{
    Accuracy, Activation, Conv2dAlgorithm, Conv2dParams, Conv2dPlan, Conv2dSpec, Placed,
    PlanOptions, Workspace,
};

/// 2-D convolution: y[n,k] = act(bias[k] + residual[n,k] + sum over c of w[k,c] * x[n,c])
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  windrow run conv2d --input x.npy --weight w.npy --padding 1 --output y.npy
  windrow run conv2d --input image.npy --channels-last --weight net.safetensors:stem.weight \\
      --bias net.safetensors:stem.bias --stride 2 --padding 3 --activation relu --output y.npy")]
#[command(override_usage = "\
windrow run conv2d [OPTIONS] --input <FILE> --weight <FILE>
                          --output <FILE>")]
pub(crate) struct Conv2d {
    /// x [n, c, h, w], f32, f16 or bf16; `-` is standard input
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// w [k, c/groups, r, s]
    #[arg(long, value_name = "FILE")]
    weight: PathBuf,
    /// Bias [k]
    #[arg(long, value_name = "FILE")]
    bias: Option<PathBuf>,
    /// Residual of y's type and shape, added before the activation
    #[arg(long, value_name = "FILE")]
    residual: Option<PathBuf>,
    /// Stride: one number, or two as rows,columns
    #[arg(long, default_value = "1", value_name = "N", value_parser = pair, allow_negative_numbers = true)]
    stride: [usize; 2],
    /// Zeros around x: one number, or two as rows,columns
    #[arg(long, default_value = "0", value_name = "N", value_parser = pair, allow_negative_numbers = true)]
    padding: [usize; 2],
    /// Distance of filter taps: one number, or two as rows,columns
    #[arg(long, default_value = "1", value_name = "N", value_parser = pair, allow_negative_numbers = true)]
    dilation: [usize; 2],
    /// Groups of channels
    #[arg(long, default_value_t = 1)]
    groups: usize,
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
    /// The files of x and y have channels last: [n, h, w, c]
    #[arg(long, alias = "channel-last")]
    channels_last: bool,
    #[command(flatten)]
    common: Common,
}

impl Conv2d {
    pub(super) fn run(&self) -> Result<(), Failure> {
        let files = Files::new([&*self.common.output])?;
        let order = self.channels_last.then_some(&[0, 3, 1, 2][..]);
        let x = files.read_ordered(&self.input, "x", order)?;
        let w = files.read(&self.weight)?;
        let bias = files.read_optional(self.bias.as_ref())?;
        let residual = self.residual.as_ref();
        let residual =
            residual.map(|file| files.read_ordered(file, "residual", order)).transpose()?;
        let params = Conv2dParams::default()
            .with_stride(self.stride)
            .with_padding(self.padding)
            .with_dilation(self.dilation)
            .with_groups(self.groups)
            .with_activation(self.activation)
            .with_accuracy(self.accuracy.unwrap_or_default());
        let mut spec = Conv2dSpec::new(*x.desc(), *w.desc(), &params)?;
        spec.bias = bias.as_ref().map(|t| *t.desc());
        spec.residual = residual.is_some();
        // In its file it lies as x does; y is made so that both do.
        if let Some(residual) = &residual
            && residual.shape() == spec.y.shape()
        {
            spec.y.layout = residual.desc().layout;
        }
        let options = self.common.options()?;
        let plan: Conv2dPlan = match self.algorithm {
            Some(algorithm) if !self.allows(&spec, algorithm, &options)? => {
                let accuracy = spec.accuracy.name();
                let algorithm = algorithm.name();
                return Err(Failure::Input(format!(
                    "--accuracy {accuracy}: {algorithm} is less exact; leave out one of the two"
                )));
            }
            algorithm => plan(&spec, algorithm, &options)?,
        };
        files.start(&plan.explain(), &options, [spec.y.dtype])?;
        let device = options.device;
        let inputs = place([Some(x), bias, residual, Some(w)], device)?;
        let mut y = Placed::output(spec.y, device)?;
        let mut workspace = Workspace::new(device, plan.workspace_bytes())?;
        plan.run(&PlanInputs::new(&plan, &inputs).args(), y.as_mut()?, &mut workspace)?;
        workspace.synchronize()?;
        let mut y = y.into_host()?;
        if self.channels_last {
            y = y.permute(&[0, 2, 3, 1]);
        }
        files.finish(&[(&self.common.output, "y", &y)], &plan.explain())
    }
}

impl Conv2d {
    /// Whether an algorithm is as exact as was asked for. One that cannot compute the spec at all is left
    /// to its own error.
    fn allows(
        &self,
        spec: &Conv2dSpec,
        algorithm: Conv2dAlgorithm,
        options: &PlanOptions,
    ) -> Result<bool, Failure> {
        let can = Conv2dPlan::algorithms(spec, options.device).contains(&algorithm);
        if self.accuracy.is_none() || !can {
            return Ok(true);
        }
        let exact_enough = Conv2dPlan::configurations(spec, options)?;
        // Configurations name the method of an algorithm that has several, and so does a plan's.
        let method =
            Conv2dPlan::with_algorithm(spec, algorithm, options)?.configuration().algorithm;
        Ok(exact_enough.iter().any(|c| [algorithm, method].contains(&c.algorithm)))
    }
}

/// `2` or `2,1`.
fn pair(text: &str) -> Result<[usize; 2], String> {
    let number = |t: &str| t.trim().parse::<usize>().map_err(|_| "not a size".to_owned());
    let numbers: Result<Vec<usize>, String> = text.split(',').map(number).collect();
    match numbers.as_deref() {
        Ok(&[both]) => Ok([both; 2]),
        Ok(&[rows, columns]) => Ok([rows, columns]),
        _ => Err("expected one or two numbers of at least 0: ROWS,COLUMNS".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::pair;

    #[test]
    fn one_or_two_numbers() {
        assert_eq!((pair("2"), pair("2,1"), pair("0, 3")), (Ok([2, 2]), Ok([2, 1]), Ok([0, 3])));
        for bad in ["", "-1", "1,", "1,2,3", "1.5", "99999999999999999999"] {
            assert!(pair(bad).is_err(), "{bad}");
        }
    }
}
