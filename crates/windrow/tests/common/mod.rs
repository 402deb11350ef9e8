//! Calls of every operator on the CPU, for tests of how they are called rather than of what they compute.

use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher;
use std::num::NonZeroUsize;
use std::sync::Arc;
use windrow::verify::random_tensor;
use windrow::{
    Activation, Approximate, CausalConv1dAlgorithm, CausalConv1dArgs, CausalConv1dGrads,
    CausalConv1dOutputs, CausalConv1dPlan, CausalConv1dSpec, CausalConv1dUpdateArgs,
    CausalConv1dUpdatePlan, CausalConv1dUpdateSpec, Conv2dAlgorithm, Conv2dArgs, Conv2dParams,
    Conv2dPlan, Conv2dSpec, DType, Device, FilterCache, GeluArgs, GeluGrads, GeluPlan, GeluSpec,
    PlanOptions, Result, Tensor, TensorDesc, Tuning, Verify, Weights, Workspace,
};

/// Runs a plan and gives a hash of all results' bytes.
pub type Runner = Box<dyn Fn() -> Result<u64> + Send + Sync>;

/// An operator, a problem, and inputs.
pub struct Call {
    pub name: String,
    plan: Box<dyn Fn(Verify) -> Result<Runner> + Send + Sync>,
}

impl Call {
    fn new(name: String, plan: impl Fn(Verify) -> Result<Runner> + Send + Sync + 'static) -> Self {
        Call { name, plan: Box::new(plan) }
    }

    /// Makes a plan.
    pub fn plan(&self, verify: Verify) -> Result<Runner> {
        (self.plan)(verify)
    }

    /// Makes a plan and runs it.
    pub fn results(&self, verify: Verify) -> Result<u64> {
        self.plan(verify)?()
    }
}

pub fn options(verify: Verify) -> PlanOptions {
    let threads = NonZeroUsize::new(2);
    PlanOptions::default().with_threads(threads).with_verify(verify).with_tuning(Tuning::Model)
}

fn desc(dtype: DType, shape: &[usize]) -> TensorDesc {
    TensorDesc::contiguous(dtype, shape).unwrap()
}

fn tensor(seed: u64, dtype: DType, shape: &[usize]) -> Arc<Tensor> {
    Arc::new(random_tensor(seed, desc(dtype, shape), -1.0, 1.0).unwrap())
}

/// A hash of the bytes; a copy of them would itself be an allocation that grows with the problem.
fn hash<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> u64 {
    let mut hasher = DefaultHasher::new();
    tensors.into_iter().for_each(|tensor| hasher.write(tensor.as_bytes()));
    hasher.finish()
}

/// Bias and gate, forward and all gradients.
pub fn gelu(dtype: DType, shape: &[usize]) -> Call {
    let [x, gate, dy] = [1, 2, 3].map(|seed| tensor(seed, dtype, shape));
    let bias = tensor(4, DType::F32, &shape[shape.len() - 1..]);
    Call::new(format!("gelu {dtype} {shape:?}"), move |verify| {
        let spec = GeluSpec::new(*x.desc(), Approximate::Tanh)?;
        let spec = spec.with_bias(*bias.desc()).with_gate(*gate.desc());
        let plan = GeluPlan::new(&spec, &options(verify))?;
        let [x, gate, dy, bias] = [&x, &gate, &dy, &bias].map(Arc::clone);
        Ok(Box::new(move || {
            let (bias, gate) = (Some(bias.as_ref().as_ref()), Some(gate.as_ref().as_ref()));
            let args = GeluArgs::new(x.as_ref().as_ref()).with_bias(bias).with_gate(gate);
            let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes())?;
            let mut y = Tensor::uninitialised(spec.y)?;
            plan.run(&args, y.as_mut(), &mut workspace)?;
            let (mut dx, mut dgate) =
                (Tensor::uninitialised(spec.x)?, Tensor::uninitialised(spec.x)?);
            let mut dbias = Tensor::uninitialised(*args.bias.unwrap().desc())?;
            let grads = GeluGrads::default()
                .with_dx(dx.as_mut())
                .with_dgate(dgate.as_mut())
                .with_dbias(dbias.as_mut());
            plan.backward(&args, &dy.as_ref().as_ref(), grads, &mut workspace)?;
            Ok(hash([&y, &dx, &dgate, &dbias]))
        }))
    })
}

/// A causal convolution with bias, SiLU and states, forward and all gradients.
#[derive(Clone, Copy, Debug)]
pub struct Causal {
    pub dtype: DType,
    pub algorithm: CausalConv1dAlgorithm,
    /// b, d, l
    pub x: [usize; 3],
    pub width: usize,
    /// Output channels of a dense convolution.
    pub dense: Option<usize>,
    pub packing: Packing,
}

impl Causal {
    /// Depthwise in f32 by the direct algorithm, of whole rows.
    pub const fn new(x: [usize; 3], width: usize) -> Self {
        let (dtype, algorithm) = (DType::F32, CausalConv1dAlgorithm::Direct);
        Causal { dtype, algorithm, x, width, dense: None, packing: Packing::Rows }
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Packing {
    Rows,
    SeqIdx,
    /// A row of so many sequences.
    Boundaries(usize),
}

pub fn causal_conv1d(problem: Causal) -> Call {
    let Causal { dtype, algorithm, x: [b, d, l], width, dense, packing } = problem;
    let x = tensor(1, dtype, &[b, d, l]);
    let d_out = dense.unwrap_or(d);
    let weight = match dense {
        None => tensor(2, dtype, &[d, width]),
        Some(d_out) => tensor(2, dtype, &[d_out, d, width]),
    };
    let bias = tensor(3, DType::F32, &[d_out]);
    let mut spec = CausalConv1dSpec::new(*x.desc(), *weight.desc()).unwrap();
    spec.bias = Some(*bias.desc());
    spec.activation = Activation::Silu;
    let indices = match packing {
        Packing::Rows => None,
        Packing::SeqIdx => {
            let numbers: Vec<i32> = (0..b * l).map(|i| (i % l) as i32 / 7 - 1).collect();
            Some(Tensor::from_slice(&numbers, &[b, l]).unwrap())
        }
        Packing::Boundaries(sequences) => {
            let ends: Vec<i32> = (0..=sequences).map(|i| (i * l / sequences) as i32).collect();
            Some(Tensor::from_slice(&ends, &[sequences + 1]).unwrap())
        }
    };
    let indices = Arc::new(indices);
    let indices_desc = indices.as_ref().as_ref().map(|t| *t.desc());
    match packing {
        Packing::Rows => {}
        Packing::SeqIdx => spec.seq_idx = indices_desc,
        Packing::Boundaries(_) => spec.cu_seqlens = indices_desc,
    }
    let states = desc(dtype, &spec.states_shape().unwrap());
    (spec.initial_states, spec.final_states) = (Some(states), Some(states));
    let initial = tensor(4, dtype, states.shape());
    let dy = tensor(5, dtype, &[b, d_out, l]);
    let dfinal = tensor(6, dtype, states.shape());
    Call::new(format!("{problem:?}"), move |verify| {
        let plan = CausalConv1dPlan::with_algorithm(&spec, algorithm, &options(verify))?;
        let [x, weight, bias, initial, dy, dfinal] =
            [&x, &weight, &bias, &initial, &dy, &dfinal].map(Arc::clone);
        let indices = Arc::clone(&indices);
        Ok(Box::new(move || {
            let spec = plan.spec();
            let mut args = CausalConv1dArgs::new(x.as_ref().as_ref(), weight.as_ref().as_ref());
            (args.bias, args.initial_states) =
                (Some(bias.as_ref().as_ref()), Some(initial.as_ref().as_ref()));
            let indices = indices.as_ref().as_ref().map(Tensor::as_ref);
            match packing {
                Packing::Rows => {}
                Packing::SeqIdx => args.seq_idx = indices,
                Packing::Boundaries(_) => args.cu_seqlens = indices,
            }
            let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes())?;
            let make = Tensor::uninitialised;
            let (mut y, mut last) = (make(spec.y)?, make(states)?);
            let outputs = CausalConv1dOutputs::new(y.as_mut()).with_final_states(last.as_mut());
            plan.run(&args, outputs, &mut workspace)?;
            let (mut dx, mut dweight) = (make(spec.x)?, make(spec.weight)?);
            let (mut dbias, mut dinitial) = (make(*bias.desc())?, make(states)?);
            let grads = CausalConv1dGrads::default()
                .with_dx(dx.as_mut())
                .with_dweight(dweight.as_mut())
                .with_dbias(dbias.as_mut())
                .with_dinitial_states(dinitial.as_mut());
            let (dy, dfinal) = (dy.as_ref().as_ref(), Some(dfinal.as_ref().as_ref()));
            plan.backward(&args, dy, dfinal, grads, &mut workspace)?;
            Ok(hash([&y, &last, &dx, &dweight, &dbias, &dinitial]))
        }))
    })
}

/// A step of decoding of `b` entries with states of a pool that is half as large again, as ring buffers.
pub fn update(dtype: DType, [b, d, l]: [usize; 3], width: usize) -> Call {
    let pool = b + b / 2;
    let x = tensor(1, dtype, &[b, d, l]);
    let weight = tensor(2, dtype, &[d, width]);
    let states = tensor(3, dtype, &[pool, d, width]);
    let indices: Vec<i32> = (0..b).map(|i| (pool - 1 - i) as i32).collect();
    let lengths: Vec<i32> = (0..b).map(|i| i as i32 % 100).collect();
    let [indices, lengths] =
        [indices, lengths].map(|i| Arc::new(Tensor::from_slice(&i, &[b]).unwrap()));
    Call::new(format!("causal_conv1d_update {dtype} {:?} {width}", [b, d, l]), move |verify| {
        let spec = CausalConv1dUpdateSpec::new(*x.desc(), *states.desc(), *weight.desc())?
            .with_cache_seqlens(*lengths.desc())
            .with_conv_state_indices(*indices.desc());
        let plan = CausalConv1dUpdatePlan::new(&spec, &options(verify))?;
        let [x, weight, states, indices, lengths] =
            [&x, &weight, &states, &indices, &lengths].map(Arc::clone);
        Ok(Box::new(move || {
            let mut args =
                CausalConv1dUpdateArgs::new(x.as_ref().as_ref(), weight.as_ref().as_ref());
            args.cache_seqlens = Some(lengths.as_ref().as_ref());
            args.conv_state_indices = Some(indices.as_ref().as_ref());
            let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes())?;
            let mut state = Tensor::uninitialised(*states.desc())?;
            state.as_bytes_mut().copy_from_slice(states.as_bytes());
            let mut y = Tensor::uninitialised(plan.spec().y)?;
            plan.run(&args, state.as_mut(), y.as_mut(), &mut workspace)?;
            Ok(hash([&y, &state]))
        }))
    })
}

/// A convolution with bias, its filter raw, packed and cached, and all gradients.
#[derive(Clone, Copy, Debug)]
pub struct Conv {
    pub dtype: DType,
    pub algorithm: Conv2dAlgorithm,
    /// n, c, h, w
    pub x: [usize; 4],
    /// k, c/groups, r, s
    pub w: [usize; 4],
    pub stride: usize,
    pub groups: usize,
}

impl Conv {
    /// A convolution in f32 by the direct algorithm, with stride 1 and one group.
    pub const fn new(x: [usize; 4], w: [usize; 4]) -> Self {
        let (dtype, algorithm) = (DType::F32, Conv2dAlgorithm::Direct);
        Conv { dtype, algorithm, x, w, stride: 1, groups: 1 }
    }

    pub fn spec(&self) -> Conv2dSpec {
        let params = Conv2dParams::default()
            .with_stride([self.stride; 2])
            .with_padding([self.w[2] / 2, self.w[3] / 2])
            .with_groups(self.groups);
        let (x, w) = (desc(self.dtype, &self.x), desc(self.dtype, &self.w));
        let spec = Conv2dSpec::new(x, w, &params).unwrap();
        spec.with_bias(desc(DType::F32, &self.w[..1]))
    }

    /// The same with each algorithm that can compute it.
    pub fn by_all_algorithms(self) -> impl Iterator<Item = Call> {
        let algorithms = Conv2dPlan::algorithms(&self.spec(), Device::Cpu);
        algorithms.into_iter().map(move |algorithm| conv2d(Conv { algorithm, ..self }))
    }
}

pub fn conv2d(problem: Conv) -> Call {
    let spec = problem.spec();
    let x = tensor(1, problem.dtype, spec.x.shape());
    let w = tensor(2, problem.dtype, spec.w.shape());
    let bias = tensor(3, DType::F32, &spec.w.shape()[..1]);
    let dy = tensor(4, problem.dtype, spec.y.shape());
    Call::new(format!("{problem:?}"), move |verify| {
        let plan = Conv2dPlan::with_algorithm(&spec, problem.algorithm, &options(verify))?;
        let [x, w, bias, dy] = [&x, &w, &bias, &dy].map(Arc::clone);
        let cache = FilterCache::new();
        Ok(Box::new(move || {
            let spec = plan.spec();
            let (w, dy) = (w.as_ref().as_ref(), dy.as_ref().as_ref());
            let bytes = plan.workspace_bytes().max(plan.backward_workspace_bytes()?);
            let mut workspace = Workspace::new(Device::Cpu, bytes)?;
            let packed = plan.pack_weights(&w, &mut workspace)?;
            let make = Tensor::uninitialised;
            let mut ys = [make(spec.y)?, make(spec.y)?, make(spec.y)?];
            let forms = [Weights::Raw(w), Weights::Packed(&packed), Weights::Cached(w, &cache)];
            for (y, w) in ys.iter_mut().zip(forms) {
                let args =
                    Conv2dArgs::new(x.as_ref().as_ref(), w).with_bias(bias.as_ref().as_ref());
                plan.run(&args, y.as_mut(), &mut workspace)?;
            }
            let (mut dx, mut dw) = (make(spec.x)?, make(spec.w)?);
            let mut db = make(*bias.desc())?;
            plan.backward_data(&w, &dy, dx.as_mut(), &mut workspace)?;
            plan.backward_weight(&x.as_ref().as_ref(), &dy, dw.as_mut(), &mut workspace)?;
            plan.backward_bias(&dy, db.as_mut(), &mut workspace)?;
            Ok(hash(ys.iter().chain([&dx, &dw, &db])))
        }))
    })
}

/// Small problems of all operators and algorithms: a run takes milliseconds.
pub fn small() -> Vec<Call> {
    use DType::{BF16, F16, F32};
    let mut calls = vec![gelu(F32, &[40, 60]), gelu(BF16, &[3, 7, 301])];
    let depthwise = Causal { packing: Packing::SeqIdx, ..Causal::new([2, 20, 70], 4) };
    let packed = Causal { x: [1, 33, 120], packing: Packing::Boundaries(30), ..depthwise };
    let product = Causal {
        algorithm: CausalConv1dAlgorithm::Im2colGemm,
        dtype: F16,
        packing: Packing::Rows,
        ..depthwise
    };
    let dense = Causal { dtype: F32, dense: Some(24), ..product };
    calls.extend([depthwise, packed, product, dense].map(causal_conv1d));
    calls.push(update(F32, [40, 70, 1], 4));
    calls.push(update(F16, [9, 130, 3], 3));
    let conv = Conv::new([1, 8, 13, 14], [10, 8, 3, 3]);
    let half = Conv { dtype: BF16, ..conv };
    let strided = Conv { w: [6, 4, 5, 5], stride: 2, groups: 2, ..conv };
    calls.extend([conv, half, strided].into_iter().flat_map(Conv::by_all_algorithms));
    calls
}
