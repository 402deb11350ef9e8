//! `windrow run conv2d`.

use super::{Common, Placed, finish, place, read_optional, read_ordered, view};
use crate::failure::Failure;
use crate::files;
use windrow::{
    Accuracy, Activation, Conv2dAlgorithm, Conv2dArgs, Conv2dParams, Conv2dPlan, Conv2dSpec,
    Weights, Workspace,
};

/// 2-D convolution: y[n,k] = act(bias[k] + sum over c of w[k,c] * x[n,c])
#[derive(Debug, clap::Args)]
pub(crate) struct Conv2d {
    /// x [n, c, h, w]
    #[arg(long, value_name = "FILE")]
    input: String,
    /// w [k, c/groups, r, s]
    #[arg(long, value_name = "FILE")]
    weight: String,
    /// Bias [k]
    #[arg(long, value_name = "FILE")]
    bias: Option<String>,
    /// Step, one number or rows,columns
    #[arg(long, default_value = "1", value_parser = pair, allow_negative_numbers = true)]
    stride: [usize; 2],
    /// Zeros around x, one number or rows,columns
    #[arg(long, default_value = "0", value_parser = pair, allow_negative_numbers = true)]
    padding: [usize; 2],
    /// Distance of filter taps, one number or rows,columns
    #[arg(long, default_value = "1", value_parser = pair, allow_negative_numbers = true)]
    dilation: [usize; 2],
    /// Groups of channels
    #[arg(long, default_value_t = 1)]
    groups: usize,
    /// identity, relu, silu, gelu or gelu_tanh
    #[arg(long, default_value = "identity")]
    activation: Activation,
    /// exact, fp32, tf32 or half: what the planner may choose from
    #[arg(long, default_value = "fp32")]
    accuracy: Accuracy,
    /// Algorithm by name [default: the planner's choice]
    #[arg(long, value_name = "NAME")]
    algorithm: Option<Conv2dAlgorithm>,
    /// x and y are [n, h, w, c] in their files
    #[arg(long)]
    channels_last: bool,
    #[command(flatten)]
    common: Common,
}

impl Conv2d {
    pub(super) fn run(&self) -> Result<(), Failure> {
        let x = read_ordered(&self.input, "x", self.channels_last.then_some(&[0, 3, 1, 2]))?;
        let w = files::read(&self.weight)?;
        let bias = read_optional(self.bias.as_ref())?;
        let params = Conv2dParams {
            stride: self.stride,
            padding: self.padding,
            dilation: self.dilation,
            groups: self.groups,
            activation: self.activation,
            accuracy: self.accuracy,
        };
        let mut spec = Conv2dSpec::new(*x.desc(), *w.desc(), &params)?;
        spec.bias = bias.as_ref().map(|t| *t.desc());
        let options = self.common.options();
        let plan = match self.algorithm {
            Some(algorithm) => Conv2dPlan::with_algorithm(&spec, algorithm, &options)?,
            None => Conv2dPlan::new(&spec, &options)?,
        };
        files::check_output(&self.common.output, spec.y.dtype)?;
        let device = options.device;
        let (x, w, bias) = (Placed::new(x, device)?, Placed::new(w, device)?, place(bias, device)?);
        let mut y = Placed::output(spec.y, device)?;
        let mut workspace = Workspace::new(device, plan.workspace_bytes())?;
        let args = Conv2dArgs { x: x.as_ref(), w: Weights::Raw(w.as_ref()), bias: view(&bias) };
        plan.run(&args, y.as_mut()?, &mut workspace)?;
        workspace.synchronize()?;
        let mut y = y.into_host()?;
        if self.channels_last {
            y = y.permute(&[0, 2, 3, 1]);
        }
        finish(&[(&self.common.output, "y", &y)], &plan.explain())
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
