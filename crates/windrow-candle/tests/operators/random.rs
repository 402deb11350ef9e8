//! Random problems against candle's own operators in f64 on the CPU: results and all gradients, in
//! random layouts, within what roundings can do.
//!
//! `WINDROW_TEST_SEED` is the number of the first problem, by default that of the day;
//! `WINDROW_TEST_PROBLEMS` how many of each operator are tried.

use super::*;
use std::time::{SystemTime, UNIX_EPOCH};
use windrow_candle::{Accuracy, CausalConv1dOptions, Conv2dParams, TensorExt};

/// Half a unit in the last place of f32.
const U: f64 = f64::EPSILON * (1u64 << 28) as f64;
/// The steepest slopes of SiLU and GELU, of hardswish, and of their derivatives, rounded up.
const SLOPE: f64 = 1.13;
const HARDSWISH_SLOPE: f64 = 1.5;
const CURVATURE: f64 = 1.0;
/// The error of an activation: roundings of f32, and the shorter polynomials for f16/bf16.
const ACTIVATION_ROUNDINGS: f64 = 16.0;
const HALF_POLYNOMIALS: f64 = 6.5e-5;
/// The factor by which roundings of Winograd's algorithm with tiles of 6 exceed those of a direct sum, and the
/// additions for its transforms. Both follow from its matrices.
const WINOGRAD_GROWTH: f64 = 46.3;
const WINOGRAD_ROUNDINGS: usize = 48;
/// No normal number is so many deviations from zero in as many tries as there are here.
const DEVIATIONS: f64 = 8.0;

fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => U,
    }
}

/// Choices of one problem.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // SplitMix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn choose<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// An argument: normal numbers in f32, from the sum of uniform ones.
    fn operand(&mut self, shape: &[usize], dtype: DType, scale: f64) -> Operand {
        let mut order: Vec<usize> = (0..shape.len()).collect();
        let mut margins = vec![0; shape.len()];
        match self.below(4) {
            0 if shape.len() > 2 => {
                let channels = order.remove(1);
                order.push(channels);
            }
            1 => (1..order.len()).for_each(|i| order.swap(i, self.below(i + 1))),
            2 => margins.iter_mut().for_each(|margin| *margin = self.below(3)),
            _ => {}
        }
        let memory: Vec<usize> = order.iter().map(|&i| shape[i] + 2 * margins[i]).collect();
        let len = memory.iter().product::<usize>();
        let number = |_| {
            let sum: f64 = (0..12).map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64).sum();
            ((sum - 6.0) * scale) as f32
        };
        let data: Vec<f32> = (0..len).map(number).collect();
        let tensor = Tensor::from_vec(data, memory, &Device::Cpu).unwrap();
        let var = Var::from_tensor(&tensor.to_dtype(dtype).unwrap()).unwrap();
        Operand { var, order, margins }
    }
}

/// A variable, and the view of it that an operator gets: dimensions in another order, with what lies
/// around left out.
struct Operand {
    var: Var,
    order: Vec<usize>,
    margins: Vec<usize>,
}

impl Operand {
    fn view(&self, memory: &Tensor) -> Tensor {
        let place = |i: usize| self.order.iter().position(|&d| d == i).unwrap();
        let inverse: Vec<usize> = (0..self.order.len()).map(place).collect();
        let mut view = memory.permute(inverse).unwrap();
        for (i, &margin) in self.margins.iter().enumerate() {
            let len = view.dim(i).unwrap() - 2 * margin;
            view = view.narrow(i, margin, len).unwrap();
        }
        view
    }

    /// A variable in f64, changed by `f`.
    fn wide(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Var {
        let wide = self.var.to_dtype(DType::F64).unwrap();
        Var::from_tensor(&f(&wide).unwrap()).unwrap()
    }
}

/// `act(linear(operands))`, linear in each of its operands.
struct Problem<'a> {
    operands: Vec<(&'static str, Operand)>,
    activation: Activation,
    dtype: DType,
    ours: &'a dyn Fn(&[Tensor]) -> Result<Tensor>,
    linear: &'a dyn Fn(&[Tensor]) -> Result<Tensor>,
    /// Terms of a sum of the result, and of that of each gradient.
    terms: usize,
    gradient_terms: Vec<usize>,
    /// The channels of the sums, for the result and for the gradient of the first operand, if Winograd's algorithm may
    /// compute them.
    winograd: Option<[usize; 2]>,
    /// The sum before the activation and its gradient are rounded to the type on the way back.
    rounded_before: bool,
}

impl Problem<'_> {
    /// The linear part of variables, and its gradients for a cotangent.
    fn linear(&self, vars: &[Var]) -> Tensor {
        let views = self.operands.iter().zip(vars).map(|((_, operand), var)| operand.view(var));
        (self.linear)(&views.collect::<Vec<_>>()).unwrap()
    }

    fn gradients(&self, vars: &[Var], cotangent: &Tensor) -> Vec<Tensor> {
        let sum = self.linear(vars).mul(cotangent).unwrap().sum_all().unwrap();
        let grads = sum.backward().unwrap();
        vars.iter().map(|v| grads.get(v).cloned().unwrap_or(v.zeros_like().unwrap())).collect()
    }

    fn wide(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Vec<Var> {
        self.operands.iter().map(|(_, operand)| operand.wide(&f)).collect()
    }

    /// The error that Winograd's algorithm may add to sums over so many channels with the given variances.
    fn winograd(&self, channels: usize, variance: &Tensor) -> f64 {
        let largest = flat(variance).into_iter().fold(0.0, f64::max);
        let roundings = ((channels + WINOGRAD_ROUNDINGS) as f64).sqrt();
        DEVIATIONS * WINOGRAD_GROWTH * U * roundings * largest.sqrt()
    }

    fn steepest(&self) -> f64 {
        if self.activation == Activation::Hardswish { HARDSWISH_SLOPE } else { SLOPE }
    }

    /// Where the derivative of the activation jumps, by 1 at most.
    fn kinks(&self) -> &'static [f64] {
        match self.activation {
            Activation::Relu | Activation::LeakyRelu(_) => &[0.0],
            Activation::Relu6 => &[0.0, 6.0],
            Activation::Hardswish => &[-3.0, 3.0],
            _ => &[],
        }
    }

    fn check(&self, random: &mut Random) -> std::result::Result<(), String> {
        let views: Vec<_> = self.operands.iter().map(|(_, o)| o.view(&o.var)).collect();
        let y = (self.ours)(&views).map_err(|e| e.to_string())?;
        let (exact, absolute) = (self.wide(|t| Ok(t.clone())), self.wide(Tensor::abs));
        let squares = self.wide(Tensor::sqr);
        let (v, scale) = (self.linear(&exact).detach(), self.linear(&absolute).detach());
        let half = if self.dtype == DType::F32 { 0.0 } else { HALF_POLYNOMIALS };
        let own = ACTIVATION_ROUNDINGS * U + half;
        let added = match self.winograd {
            Some([channels, _]) => self.winograd(channels, &self.linear(&squares)),
            None => 0.0,
        };
        let error = ((scale.clone() * ((self.terms + 2) as f64 * U)).unwrap() + added).unwrap();
        let v = Var::from_tensor(&v).unwrap();
        let activated = candle_activation(&v, self.activation).unwrap();
        let allowed = match self.activation {
            Activation::Identity | Activation::Relu | Activation::Relu6 => error.clone(),
            _ => ((&error * self.steepest()).unwrap() + (scale * own).unwrap()).unwrap(),
        };
        compare("y", &y, &activated.detach(), &allowed)?;

        let dy = random.operand(y.dims(), self.dtype, 1.0);
        let (dy, wide_dy) =
            (dy.view(&dy.var).detach(), dy.view(&dy.wide(|t| Ok(t.clone()))).detach());
        let ours = y.mul(&dy).and_then(|y| y.sum_all()?.backward()).map_err(|e| e.to_string())?;
        let slopes = activated.mul(&wide_dy).unwrap().sum_all().unwrap().backward().unwrap();
        let dv = match self.activation {
            Activation::Identity => wide_dy.clone(),
            _ => slopes.get(&v).unwrap().clone(),
        };
        let rounding = if self.rounded_before { unit(self.dtype) } else { 0.0 };
        let error = (error + (v.abs().unwrap() * rounding).unwrap()).unwrap();
        let beside = |kink: &f64| {
            let distance = (v.as_tensor() - *kink).unwrap().abs().unwrap();
            distance.le(&error).unwrap().to_dtype(DType::F64).unwrap()
        };
        let kinks = self.kinks().iter().map(beside).reduce(|a, b| (a + b).unwrap());
        let kinks = kinks.unwrap_or(wide_dy.zeros_like().unwrap());
        let jumps = wide_dy.abs().unwrap().mul(&kinks).unwrap();
        let dv_error = match self.activation {
            Activation::Identity | Activation::Relu | Activation::Relu6 => jumps,
            _ => {
                let slope = ((error * CURVATURE).unwrap() + own * self.steepest()).unwrap();
                let moved = wide_dy.abs().unwrap().mul(&slope).unwrap();
                (jumps + moved + (dv.abs().unwrap() * (2.0 * rounding)).unwrap()).unwrap()
            }
        };
        let wanted = self.gradients(&exact, &dv);
        for (i, (name, operand)) in self.operands.iter().enumerate() {
            let roundings = (self.gradient_terms[i] + 4) as f64 * U;
            let cotangent = (&dv_error + (dv.abs().unwrap() * roundings).unwrap()).unwrap();
            let mut allowed = self.gradients(&absolute, &cotangent).swap_remove(i);
            if let (0, Some([_, channels])) = (i, self.winograd) {
                let variance = self.gradients(&squares, &dv.sqr().unwrap()).swap_remove(0);
                allowed = (allowed + self.winograd(channels, &variance)).unwrap();
            }
            let got = ours.get(&operand.var).ok_or(format!("d{name} is missing"))?;
            compare(&format!("d{name}"), got, &wanted[i], &allowed)?;
        }
        Ok(())
    }
}

fn flat(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Each element within what is allowed and a rounding to its type.
fn compare(
    what: &str,
    got: &Tensor,
    want: &Tensor,
    allowed: &Tensor,
) -> std::result::Result<(), String> {
    if got.dims() != want.dims() {
        return Err(format!("{what}: {:?} instead of {:?}", got.dims(), want.dims()));
    }
    let smallest = if got.dtype() == DType::F16 { 2f64.powi(-25) } else { 2f64.powi(-126) };
    let unit = unit(got.dtype());
    let elements = flat(got).into_iter().zip(flat(want)).zip(flat(allowed));
    for (i, ((got, want), allowed)) in elements.enumerate() {
        let allowed = allowed + unit * (want.abs() + allowed) + smallest;
        // NaN is within nothing.
        let within = (got - want).abs() <= allowed;
        if !within {
            return Err(format!("{what}[{i}]: {got} instead of {want}, allowed {allowed:.3e}"));
        }
    }
    Ok(())
}

/// Runs `check` on so many problems; the first failure says how to repeat it.
fn each_problem(
    test: &str,
    problems: usize,
    check: impl Fn(&mut Random) -> (String, std::result::Result<(), String>),
) {
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let today = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() / 86_400;
    let first = number("WINDROW_TEST_SEED").unwrap_or(today);
    let problems = number("WINDROW_TEST_PROBLEMS").unwrap_or(problems as u64);
    println!("{problems} problems, WINDROW_TEST_SEED={first}");
    for i in 0..problems {
        let seed = first + i * 1_000_003;
        let (problem, result) = check(&mut Random(seed));
        if let Err(why) = result {
            panic!(
                "WINDROW_TEST_SEED={seed} WINDROW_TEST_PROBLEMS=1 cargo test -p windrow-candle \
                 --test operators random::{test}\n{problem}\n{why}"
            );
        }
    }
}

fn zero_or_one(condition: bool) -> f64 {
    f64::from(u8::from(condition))
}

#[test]
fn gelu() {
    each_problem("gelu", 150, |random| {
        let dtype = random.choose(&DTYPES);
        let rank = 1 + random.below(4);
        let shape: Vec<usize> = (0..rank).map(|_| random.choose(&[1, 2, 3, 7, 16, 33])).collect();
        let approximate = random.choose(&[Approximate::None, Approximate::Tanh]);
        let problem = Problem {
            operands: vec![("x", random.operand(&shape, dtype, 2.0))],
            activation: Activation::Gelu(approximate),
            dtype,
            ours: &|t| t[0].windrow_gelu(approximate),
            linear: &|t| t[0].contiguous(),
            terms: 0,
            gradient_terms: vec![0],
            winograd: None,
            rounded_before: false,
        };
        (format!("{dtype:?} {shape:?} {approximate:?}"), problem.check(random))
    });
}

#[test]
fn causal_conv1d() {
    each_problem("causal_conv1d", 200, |random| {
        let dtype = random.choose(&DTYPES);
        let (b, d) = (random.choose(&[1, 2, 3]), random.choose(&[1, 2, 3, 8, 16, 33, 64]));
        let l = random.choose(&[1, 2, 3, 5, 13, 16, 17, 31, 64, 65, 130]);
        let width = random.choose(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33]);
        let activation = random.choose(Activation::ALL);
        let d_out = if random.below(6) == 0 { Some(random.choose(&[1, 5, 16])) } else { None };
        let (with_bias, with_states) = (random.below(2) == 0, random.below(3) == 0);
        // Runs of tokens of one number each; negative ones are padding.
        let numbers: Option<Vec<i32>> = (random.below(2) == 0).then(|| {
            let longest = random.choose(&[3, 17, 80]);
            let mut run = (0, 0);
            let token = |t| {
                if run.1 == 0 {
                    let number = if random.below(6) == 0 { -1 } else { (t % l) as i32 };
                    run = (number, 1 + random.below(longest));
                }
                run.1 -= 1;
                run.0
            };
            (0..b * l).map(token).collect()
        });
        let numbers = numbers.map(|mut numbers| {
            // A row begins with a run of its own.
            numbers.chunks_mut(l).for_each(|row| row[0] = row[0].max(0));
            numbers
        });
        let weight_shape = match d_out {
            Some(d_out) => vec![d_out, d, width],
            None => vec![d, width],
        };
        let summed = width * if d_out.is_some() { d } else { 1 };
        let mut operands = vec![("x", random.operand(&[b, d, l], dtype, 1.0))];
        let scale = (summed as f64).powf(-0.5);
        operands.push(("weight", random.operand(&weight_shape, dtype, scale)));
        let channels = d_out.unwrap_or(d);
        let back = width * if d_out.is_some() { channels } else { 1 };
        let mut gradient_terms = vec![back, b * l];
        if with_bias {
            operands.push(("bias", random.operand(&[channels], dtype, 1.0)));
            gradient_terms.push(b * l);
        }
        if with_states && width > 1 {
            operands.push(("states", random.operand(&[b, d, width - 1], dtype, 1.0)));
            gradient_terms.push(back);
        }
        let with_states = with_states && width > 1;
        let seq_idx = numbers
            .as_ref()
            .map(|n| Tensor::new(n.as_slice(), &Device::Cpu).unwrap().reshape((b, l)).unwrap());
        let pick = |t: &[Tensor]| {
            let bias = with_bias.then(|| t[2].clone());
            (bias, with_states.then(|| t[t.len() - 1].clone()))
        };
        // Whether the tap at distance `back` of a token is of its sequence, and if it is none itself.
        let mask = |tap: usize| {
            let numbers = numbers.as_ref()?;
            let seen = |i: usize| {
                let (row, t) = (i / l * l, i % l);
                let at = row + (t + tap).saturating_sub(width - 1);
                zero_or_one(numbers[at] == numbers[i] && numbers[i] >= 0)
            };
            let mask: Vec<f64> = (0..b * l).map(seen).collect();
            Some(Tensor::from_vec(mask, (b, 1, l), &Device::Cpu).unwrap())
        };
        let problem = Problem {
            operands,
            activation,
            dtype,
            ours: &|t| {
                let (bias, states) = pick(t);
                let options = CausalConv1dOptions {
                    bias: bias.as_ref(),
                    activation,
                    seq_idx: seq_idx.as_ref(),
                    initial_states: states.as_ref(),
                    ..Default::default()
                };
                t[0].causal_conv1d(&t[1], &options)
            },
            linear: &|t| {
                let (bias, states) = pick(t);
                let joined = match states {
                    Some(states) => Tensor::cat(&[&states, &t[0]], 2)?,
                    None => t[0].pad_with_zeros(2, width - 1, 0)?,
                };
                let mut y = Tensor::zeros((b, channels, l), DType::F64, &Device::Cpu)?;
                for tap in 0..width {
                    let mut taken = joined.narrow(2, tap, l)?.contiguous()?;
                    if let Some(mask) = mask(tap) {
                        taken = taken.broadcast_mul(&mask)?;
                    }
                    let last = t[1].rank() - 1;
                    let w = t[1].narrow(last, tap, 1)?;
                    let part = match d_out {
                        Some(_) => w.squeeze(2)?.contiguous()?.broadcast_matmul(&taken)?,
                        None => taken.broadcast_mul(&w.unsqueeze(0)?)?,
                    };
                    y = (y + part)?;
                }
                if let Some(bias) = bias {
                    y = y.broadcast_add(&bias.reshape((1, channels, 1))?)?;
                }
                match mask(width - 1) {
                    Some(own) => y.broadcast_mul(&own),
                    None => Ok(y),
                }
            },
            terms: summed,
            gradient_terms,
            winograd: None,
            rounded_before: false,
        };
        let name = format!(
            "{dtype:?} b {b} d {d} l {l} width {width} d_out {d_out:?} {activation:?} bias \
             {with_bias} states {with_states} seq_idx {numbers:?}"
        );
        (name, problem.check(random))
    });
}

#[test]
fn conv2d() {
    each_problem("conv2d", 150, |random| {
        let dtype = random.choose(&DTYPES);
        let groups = random.choose(&[1, 1, 1, 2, 3]);
        let sizes: &[usize] = if groups == 1 { &[1, 2, 3, 8, 16, 33] } else { &[1, 2, 4] };
        let (n, c, k) = (random.choose(&[1, 2, 3]), random.choose(sizes), random.choose(sizes));
        let filter = random.choose(&[3, 3, 3, 1, 2, 5, 7]);
        let stride = random.choose(&[1, 1, 1, 2, 3]);
        let dilation = random.choose(&[1, 1, 1, 2]);
        let reach = dilation * (filter - 1) + 1;
        let padding = random.below(reach);
        // candle's own gradient of a strided convolution wants this, and the same remainder in both.
        let least = reach.saturating_sub(2 * padding).max(if stride == 1 { 1 } else { stride });
        let h = least + random.choose(&[0, 1, 3, 6, 11, 17]);
        let w = if stride == 1 { least + random.choose(&[0, 1, 4, 7, 13, 18]) } else { h };
        let activation = random.choose(Activation::ALL);
        let accuracy = random.choose(&[Accuracy::Fp32, Accuracy::Fp32, Accuracy::Exact]);
        let with_bias = random.below(2) == 0;
        let winograd =
            accuracy != Accuracy::Exact && (filter, stride, dilation, groups) == (3, 1, 1, 1);
        let summed = c * filter * filter;
        let mut operands = vec![("x", random.operand(&[n, c * groups, h, w], dtype, 1.0))];
        let scale = (summed as f64).powf(-0.5);
        operands.push(("weight", random.operand(&[k * groups, c, filter, filter], dtype, scale)));
        let out = |size: usize| (size + 2 * padding - reach) / stride + 1;
        let positions = n * out(h) * out(w);
        let mut gradient_terms = vec![k * filter * filter, positions];
        if with_bias {
            operands.push(("bias", random.operand(&[k * groups], dtype, 1.0)));
            gradient_terms.push(positions);
        }
        let params = Conv2dParams::default()
            .with_stride([stride; 2])
            .with_padding([padding; 2])
            .with_dilation([dilation; 2])
            .with_groups(groups)
            .with_activation(activation)
            .with_accuracy(accuracy);
        let problem = Problem {
            operands,
            activation,
            dtype,
            ours: &|t| t[0].windrow_conv2d(&t[1], t.get(2), &params),
            linear: &|t| {
                let (x, w) = (t[0].contiguous()?, t[1].contiguous()?);
                let y = x.conv2d(&w, padding, stride, dilation, groups)?;
                match t.get(2) {
                    Some(bias) => y.broadcast_add(&bias.reshape((1, (), 1, 1))?),
                    None => Ok(y),
                }
            },
            terms: summed,
            gradient_terms,
            winograd: winograd.then_some([c, k]),
            rounded_before: true,
        };
        (
            format!("{dtype:?} {n}x{c}x{h}x{w} k {k} filter {filter} bias {with_bias} {params:?}"),
            problem.check(random),
        )
    });
}
