//! The cases to measure, with the same inputs for both.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::Conv2dConfig;
use std::fmt;
use windrow_candle::{
    Accuracy, Activation, Approximate, CausalConv1dOptions, CausalConv1dUpdateOptions, TensorExt,
    nn,
};

const LAYERS: &str = include_str!("../../../windrow-cli/assets/cnn18.csv");
/// Channels of the convolution in a Mamba-2 or Qwen3-Next layer.
const D: usize = 6144;
const WIDTH: usize = 4;

pub type Call = Box<dyn Fn() -> Result<Tensor>>;

/// The two ways to the same result.
pub struct Pair {
    pub candle: Call,
    pub windrow: Call,
}

pub enum Case {
    Gelu {
        dtype: DType,
        approximate: Approximate,
        size: usize,
    },
    /// 3x3, stride 1, no padding.
    Conv2d {
        dtype: DType,
        accuracy: Accuracy,
        n: usize,
        c: usize,
        h: usize,
        w: usize,
        k: usize,
    },
    /// No bias, no activation: candle's grouped conv1d has none.
    CausalConv1d {
        dtype: DType,
        b: usize,
        d: usize,
        l: usize,
    },
    /// A decoding step of one token.
    Update {
        dtype: DType,
        b: usize,
        d: usize,
    },
}

/// The cases of a run without a choice.
pub fn all(cuda: bool, full: bool) -> Vec<Case> {
    let dtypes = if cuda { vec![DType::F32, DType::BF16] } else { vec![DType::F32] };
    let mut cases = Vec::new();
    for &dtype in &dtypes {
        cases.extend([1, 512].map(|l| Case::CausalConv1d { dtype, b: 1, d: D, l }));
        cases.push(Case::Update { dtype, b: 1, d: D });
    }
    let dtypes = if cuda { vec![DType::F32, DType::F16] } else { vec![DType::F32] };
    for &dtype in &dtypes {
        let forms = [Approximate::None, Approximate::Tanh];
        cases.extend(forms.map(|approximate| Case::Gelu { dtype, approximate, size: 2048 }));
    }
    // candle's cuDNN computes f32 as TF32, so both are compared with it.
    let kinds =
        [(DType::F32, Accuracy::Fp32), (DType::F32, Accuracy::Tf32), (DType::F16, Accuracy::Half)];
    for &(dtype, accuracy) in &kinds[..if cuda { 3 } else { 1 }] {
        for line in LAYERS.lines().filter(|line| !line.starts_with('#')) {
            let sizes = line.split(',').skip(1).map(|n| n.trim().parse().unwrap_or(1));
            let &[n, c, h, w, k] = &sizes.collect::<Vec<usize>>()[..] else { continue };
            let n = if cuda && full { n } else { n.div_ceil(16) };
            cases.push(Case::Conv2d { dtype, accuracy, n, c, h, w, k });
        }
    }
    cases
}

pub fn dtype(name: &str) -> Result<DType> {
    name.parse().map_err(candle_core::Error::wrap)
}

pub fn number<T: std::str::FromStr>(text: &str) -> Result<T> {
    text.parse().map_err(|_| candle_core::Error::msg(format!("{text}: no number")))
}

impl Case {
    pub fn parse(args: &[String]) -> Result<Self> {
        let [op, name, rest @ ..] = args else {
            candle_core::bail!("expected an operator and a type")
        };
        let dtype = dtype(name)?;
        if op == "gelu" {
            let [form, size] = rest else {
                candle_core::bail!("expected gelu DTYPE none|tanh SIZE")
            };
            let approximate = form.parse().map_err(candle_core::Error::wrap)?;
            return Ok(Case::Gelu { dtype, approximate, size: number(size)? });
        }
        let sizes = rest.iter().map(|n| number(n)).collect::<Result<Vec<usize>>>()?;
        match (op.as_str(), &sizes[..]) {
            ("conv2d", &[n, c, h, w, k]) => {
                let accuracy = Accuracy::default();
                Ok(Case::Conv2d { dtype, accuracy, n, c, h, w, k })
            }
            ("causal_conv1d", &[b, d, l]) => Ok(Case::CausalConv1d { dtype, b, d, l }),
            ("causal_conv1d_update", &[b, d]) => Ok(Case::Update { dtype, b, d }),
            _ => candle_core::bail!("{op} with {} sizes: unknown", sizes.len()),
        }
    }

    pub fn op(&self) -> &'static str {
        match self {
            Case::Gelu { .. } => "gelu",
            Case::Conv2d { .. } => "conv2d",
            Case::CausalConv1d { .. } => "causal_conv1d",
            Case::Update { .. } => "causal_conv1d_update",
        }
    }

    /// Cases whose speeds have a common mean.
    pub fn group(&self) -> String {
        match self {
            Case::Conv2d { dtype, accuracy, .. } => {
                format!("conv2d {} accuracy {}", dtype.as_str(), accuracy.name())
            }
            other => format!("{} {}", other.op(), other.dtype().as_str()),
        }
    }

    pub fn dtype(&self) -> DType {
        match *self {
            Case::Gelu { dtype, .. }
            | Case::Conv2d { dtype, .. }
            | Case::CausalConv1d { dtype, .. }
            | Case::Update { dtype, .. } => dtype,
        }
    }

    /// Multiplications and additions of the direct algorithm; none are counted for GELU.
    pub fn flops(&self) -> f64 {
        match *self {
            Case::Gelu { .. } => 0.0,
            Case::Conv2d { n, c, h, w, k, .. } => 18.0 * (n * c * k * (h - 2) * (w - 2)) as f64,
            Case::CausalConv1d { b, d, l, .. } => 2.0 * (b * d * l * WIDTH) as f64,
            Case::Update { b, d, .. } => 2.0 * (b * d * WIDTH) as f64,
        }
    }

    pub fn prepare(&self, device: &Device) -> Result<Pair> {
        let random = |shape: &[usize], scale: f64| -> Result<Tensor> {
            let values = Tensor::randn(0f32, 1.0, shape, device)?;
            (values * scale)?.to_dtype(self.dtype())
        };
        match *self {
            Case::Gelu { approximate, size, .. } => {
                let x = random(&[size, size], 1.0)?;
                let same = x.clone();
                Ok(Pair {
                    candle: Box::new(move || match approximate {
                        Approximate::None => same.gelu_erf(),
                        Approximate::Tanh => same.gelu(),
                        other => candle_core::bail!("candle has no {other}"),
                    }),
                    windrow: Box::new(move || x.windrow_gelu(approximate)),
                })
            }
            Case::Conv2d { accuracy, n, c, h, w, k, .. } => {
                let x = random(&[n, c, h, w], 1.0)?;
                let weight = random(&[k, c, 3, 3], 1.0 / ((9 * c) as f64).sqrt())?;
                let theirs = candle_nn::Conv2d::new(weight, None, Conv2dConfig::default());
                let ours = nn::Conv2d::from(theirs.clone()).with_accuracy(accuracy);
                let same = x.clone();
                Ok(Pair {
                    candle: Box::new(move || theirs.forward(&same)),
                    windrow: Box::new(move || ours.forward(&x)),
                })
            }
            Case::CausalConv1d { b, d, l, .. } => {
                let (x, weight) = (random(&[b, d, l], 1.0)?, random(&[d, WIDTH], 0.5)?);
                let grouped = weight.unsqueeze(1)?;
                // Padding is not candle's convolution: it is done before.
                let padded = x.pad_with_zeros(2, WIDTH - 1, 0)?;
                Ok(Pair {
                    candle: Box::new(move || padded.conv1d(&grouped, 0, 1, 1, d)),
                    windrow: Box::new(move || {
                        x.causal_conv1d(&weight, &CausalConv1dOptions::default())
                    }),
                })
            }
            Case::Update { b, d, .. } => {
                let (x, weight) = (random(&[b, d, 1], 1.0)?, random(&[d, WIDTH], 0.5)?);
                // A state of equal tokens stays what it is, so that results can be compared.
                let state = x.repeat((1, 1, WIDTH - 1))?;
                let grouped = weight.unsqueeze(1)?;
                let (past, token) = (state.copy()?, x.clone());
                let options = CausalConv1dUpdateOptions {
                    activation: Activation::Silu,
                    ..Default::default()
                };
                Ok(Pair {
                    candle: Box::new(move || {
                        Tensor::cat(&[&past, &token], 2)?.conv1d(&grouped, 0, 1, 1, d)?.silu()
                    }),
                    windrow: Box::new(move || x.causal_conv1d_update(&state, &weight, &options)),
                })
            }
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = self.dtype().as_str();
        match self {
            Case::Gelu { approximate, size, .. } => {
                write!(f, "gelu {dtype} {} {size}x{size}", approximate.name())
            }
            Case::Conv2d { accuracy: Accuracy::Fp32, n, c, h, w, k, .. } => {
                write!(f, "conv2d {dtype} n{n} c{c} {h}x{w} k{k}")
            }
            Case::Conv2d { accuracy, n, c, h, w, k, .. } => {
                let accuracy = accuracy.name();
                write!(f, "conv2d {dtype} accuracy {accuracy} n{n} c{c} {h}x{w} k{k}")
            }
            Case::CausalConv1d { b, d, l, .. } => write!(f, "causal_conv1d {dtype} b{b} d{d} l{l}"),
            Case::Update { b, d, .. } => write!(f, "causal_conv1d_update {dtype} b{b} d{d}"),
        }
    }
}
