//! Decoding: new tokens one or a few at a time, and states that carry what they see.

use super::Problem;
use super::cpu::update::{Operands, Update};
use super::cpu::{Operand, Parameters};
use super::cuda;
use super::problem::{output_layout, rank};
use super::reference::{UpdateReference, integers};
use super::sequences::Indices;
use super::verify;
use crate::cpu::{Isa, SimdElement, resolve_threads};
use crate::dtype::with_element;
use crate::tensor::{
    check_device, check_disjoint, check_optional_view, check_tensor, check_unique, check_view,
};
use crate::{
    Activation, DType, Device, Error, PlanOptions, Result, Tensor, TensorDesc, TensorMut,
    TensorRef, Verify, Workspace,
};

/// One step of decoding: `y` of new tokens `x` that follow those in `conv_state`, which is advanced.
///
/// A state holds the last `state_len >= width - 1` tokens of a sequence, oldest first; a step moves it
/// by l tokens. With `cache_seqlens` it is a ring buffer instead: token number `n` of the sequence is in
/// slot `n % state_len`, and `cache_seqlens[i]` says how many tokens came before.
///
/// With `conv_state_indices`, entry `i` of the batch uses state `conv_state_indices[i]` of a
/// larger pool. A negative index is padding: its `y` is 0 and no state is touched. No two entries
/// may use the same state.
///
/// Source: Dao, causal-conv1d (<https://github.com/Dao-AILab/causal-conv1d>), `causal_conv1d_update`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CausalConv1dUpdateSpec {
    /// New tokens [b, d, l], f32, f16 or bf16; any strides.
    pub x: TensorDesc,
    /// States [b, d, state_len], or [pool, d, state_len] with `conv_state_indices`; x's type,
    /// read and written.
    pub conv_state: TensorDesc,
    /// Filter [d, width], f32 or x's type.
    pub weight: TensorDesc,
    /// Bias `[d]`, f32 or x's type.
    pub bias: Option<TensorDesc>,
    /// Output [b, d, l] of x's type; strides such that every element has its own memory.
    pub y: TensorDesc,
    /// Applied to sum and bias.
    pub activation: Activation,
    /// Tokens before, `[b]`, i32.
    pub cache_seqlens: Option<TensorDesc>,
    /// State of each entry, `[b]`, i32.
    pub conv_state_indices: Option<TensorDesc>,
}

common_options!(CausalConv1dUpdateSpec);

impl CausalConv1dUpdateSpec {
    /// A step of `x` [b, d, l] with `conv_state` [b or pool, d, state_len] and `weight` [d, width],
    /// without bias, activation, ring buffer or indices. `y` is dense: channel-last if x is, else
    /// channel-first.
    ///
    /// # Errors
    /// [`Error::Rank`], [`Error::DType`], [`Error::Shape`] if channels do not match, the width is 0 or the
    /// state is too short, [`Error::SizeOverflow`].
    pub fn new(x: TensorDesc, conv_state: TensorDesc, weight: TensorDesc) -> Result<Self> {
        let shape = Problem::new(&x, &weight)?.y_shape();
        let y = TensorDesc { dtype: x.dtype, layout: output_layout(&x.layout, &shape)? };
        let (bias, cache_seqlens, conv_state_indices) = (None, None, None);
        let activation = Activation::Identity;
        let spec = CausalConv1dUpdateSpec {
            x,
            conv_state,
            weight,
            bias,
            y,
            activation,
            cache_seqlens,
            conv_state_indices,
        };
        spec.check_state(&spec.problem_of_x()?)?;
        Ok(spec)
    }

    /// With states as ring buffers, and the number of tokens before `[b]`.
    #[must_use]
    pub fn with_cache_seqlens(self, cache_seqlens: TensorDesc) -> Self {
        Self { cache_seqlens: Some(cache_seqlens), ..self }
    }

    /// With states chosen from a pool by index `[b]`.
    #[must_use]
    pub fn with_conv_state_indices(self, conv_state_indices: TensorDesc) -> Self {
        Self { conv_state_indices: Some(conv_state_indices), ..self }
    }

    fn problem_of_x(&self) -> Result<Problem> {
        let problem = Problem::new(&self.x, &self.weight)?;
        if problem.dense {
            return Err(rank("weight", &self.weight, "2: [d, width]"));
        }
        Ok(problem)
    }

    fn check_state(&self, problem: &Problem) -> Result<()> {
        let &[_, d, state_len] = self.conv_state.shape() else {
            return Err(rank("conv_state", &self.conv_state, "3: [b or pool, d, state_len]"));
        };
        if d != problem.d || state_len < problem.history() {
            let (d, history) = (problem.d, problem.history());
            let expected = format!("[b or pool, {d}, state_len] with state_len at least {history}");
            return Err(Error::shape("conv_state", self.conv_state.shape(), expected));
        }
        let shape = self.conv_state.shape();
        check_tensor("conv_state", &self.conv_state, self.x.dtype, shape)?;
        check_unique("conv_state", &self.conv_state.layout)
    }

    /// Every check that needs no data, and the sizes.
    fn problem(&self) -> Result<Problem> {
        let problem = self.problem_of_x()?;
        self.check_state(&problem)?;
        if self.conv_state_indices.is_none() && self.conv_state.shape()[0] != problem.b {
            let expected = format!("{} states, as many as x has rows", problem.b);
            return Err(Error::shape("conv_state", self.conv_state.shape(), expected));
        }
        problem.check_output(&self.y, self.x.dtype)?;
        if let Some(bias) = &self.bias {
            problem.check_bias(bias, self.x.dtype)?;
        }
        for (name, indices) in [
            ("cache_seqlens", &self.cache_seqlens),
            ("conv_state_indices", &self.conv_state_indices),
        ] {
            if let Some(indices) = indices {
                check_tensor(name, indices, DType::I32, &[problem.b])?;
            }
        }
        Ok(problem)
    }
}

/// The inputs of an update; see [`CausalConv1dUpdateSpec`] for shapes and types.
#[derive(Clone, Copy, Debug)]
pub struct CausalConv1dUpdateArgs<'a> {
    /// [b, d, l]
    pub x: TensorRef<'a>,
    /// [d, width]
    pub weight: TensorRef<'a>,
    /// `[d]`
    pub bias: Option<TensorRef<'a>>,
    /// `[b]`
    pub cache_seqlens: Option<TensorRef<'a>>,
    /// `[b]`
    pub conv_state_indices: Option<TensorRef<'a>>,
}

impl<'a> CausalConv1dUpdateArgs<'a> {
    /// New tokens and weight alone.
    pub fn new(x: TensorRef<'a>, weight: TensorRef<'a>) -> Self {
        let (bias, cache_seqlens, conv_state_indices) = (None, None, None);
        CausalConv1dUpdateArgs { x, weight, bias, cache_seqlens, conv_state_indices }
    }
}

/// A checked [`CausalConv1dUpdateSpec`] on a device.
///
/// ```
/// use windrow::{CausalConv1dUpdateArgs, CausalConv1dUpdatePlan, CausalConv1dUpdateSpec};
/// use windrow::{PlanOptions, TensorMut, TensorRef, Workspace};
///
/// let weight = [100.0f32, 10.0, 1.0];
/// let mut state = [1.0f32, 2.0]; // the last two tokens
/// let (x, mut y) = ([3.0f32], [0.0f32]);
/// let args = CausalConv1dUpdateArgs::new(TensorRef::new(&x, &[1, 1, 1])?, TensorRef::new(&weight, &[1, 3])?);
/// let conv_state = TensorMut::new(&mut state, &[1, 1, 2])?;
///
/// let spec = CausalConv1dUpdateSpec::new(*args.x.desc(), *conv_state.desc(), *args.weight.desc())?;
/// let plan = CausalConv1dUpdatePlan::new(&spec, &PlanOptions::default())?;
/// let mut workspace = Workspace::new(plan.device(), plan.workspace_bytes())?;
/// plan.run(&args, conv_state, TensorMut::new(&mut y, &[1, 1, 1])?, &mut workspace)?;
/// assert_eq!((y, state), ([123.0], [2.0, 3.0]));
/// # Ok::<(), windrow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CausalConv1dUpdatePlan {
    spec: CausalConv1dUpdateSpec,
    problem: Problem,
    options: PlanOptions,
    isa: Isa,
    update: Update,
    /// On CUDA the compiled kernel.
    cuda: Option<cuda::update::Update>,
}

impl CausalConv1dUpdatePlan {
    /// Checks the spec.
    ///
    /// # Errors
    /// What is wrong with it: [`Error::Rank`], [`Error::Shape`], [`Error::DType`],
    /// [`Error::OverlappingOutput`], [`Error::SizeOverflow`]; [`Error::NoDevice`].
    pub fn new(spec: &CausalConv1dUpdateSpec, options: &PlanOptions) -> Result<Self> {
        Self::on_isa(spec, options, Isa::best())
    }

    /// As [`CausalConv1dUpdatePlan::new`], with the instructions of `isa`.
    pub(crate) fn on_isa(
        spec: &CausalConv1dUpdateSpec,
        options: &PlanOptions,
        isa: Isa,
    ) -> Result<Self> {
        let problem = spec.problem()?;
        let cuda = match options.device {
            Device::Cpu => None,
            Device::Cuda(index) => Some(cuda::update::Update::new(index, spec, &problem)?),
        };
        let (threads, state_len) = (resolve_threads(options.threads), spec.conv_state.shape()[2]);
        let update = Update::new(problem, spec.activation, state_len, threads)?;
        let (spec, options) = (spec.clone(), *options);
        Ok(CausalConv1dUpdatePlan { spec, problem, options, isa, update, cuda })
    }

    /// What it computes.
    pub fn spec(&self) -> &CausalConv1dUpdateSpec {
        &self.spec
    }

    /// Where it runs.
    pub fn device(&self) -> Device {
        self.options.device
    }

    /// Bytes of workspace that a run needs.
    pub fn workspace_bytes(&self) -> usize {
        if self.cuda.is_some() {
            return 0;
        }
        self.update.workspace_bytes() + self.seen_bytes()
    }

    /// A bit for each state of a pool, to find indices that are there twice.
    fn seen_bytes(&self) -> usize {
        match self.spec.conv_state_indices {
            Some(_) => self.spec.conv_state.shape()[0].div_ceil(8),
            None => 0,
        }
    }

    /// Instruction set, blocking and threads, in one line.
    pub fn explain(&self) -> String {
        if let Some(cuda) = &self.cuda {
            return format!("causal_conv1d_update ({}): {}", self.options.device, cuda.explain());
        }
        format!("causal_conv1d_update ({}): {}", self.isa.name(), self.update.explain())
    }

    /// Computes `y` and advances the states, in copies bit for bit. `y` and `conv_state` share no
    /// memory with inputs or each other.
    ///
    /// # Errors
    /// As [`CausalConv1dPlan::run`](crate::CausalConv1dPlan::run); [`Error::Index`] for a negative
    /// `cache_seqlens`, and for an index of no state or of the state of another entry: all before
    /// anything is written.
    pub fn run(
        &self,
        args: &CausalConv1dUpdateArgs<'_>,
        mut conv_state: TensorMut<'_>,
        mut y: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        self.check(args, &conv_state, &y)?;
        let expected = match self.options.verify {
            Verify::Off => None,
            Verify::On => Some(self.reference(args, &conv_state)?),
        };
        if let Some(cuda) = &self.cuda {
            cuda.run(args, &conv_state, &y, workspace)?;
        } else {
            let scratch = workspace.take(self.workspace_bytes())?;
            let (scratch, seen) = scratch.split_at_mut(self.update.workspace_bytes());
            let cache_seqlens = args.cache_seqlens.map(Indices::new);
            let conv_state_indices = args.conv_state_indices.map(Indices::new);
            if !self.problem.is_empty() {
                self.check_indices(cache_seqlens, conv_state_indices, seen)?;
            }
            let indices = (cache_seqlens, conv_state_indices);
            with_element!(self.spec.x.dtype, T => {
                self.run_as::<T>(args, indices, &mut conv_state, &mut y, scratch);
            });
        }
        if let Some((reference, mut state)) = expected {
            workspace.synchronize()?;
            let checks = verify::update_checks(&reference, &mut state, &conv_state, &y)?;
            verify::require("causal_conv1d_update", checks)?;
        }
        Ok(())
    }

    fn run_as<T: SimdElement>(
        &self,
        args: &CausalConv1dUpdateArgs<'_>,
        (cache_seqlens, conv_state_indices): (Option<Indices<'_>>, Option<Indices<'_>>),
        conv_state: &mut TensorMut<'_>,
        y: &mut TensorMut<'_>,
        scratch: &mut [u8],
    ) {
        let operands = Operands::<T> {
            x: Operand::input(&args.x),
            y: Operand::output(y),
            conv_state: Operand::output(conv_state),
            parameters: Parameters { weight: args.weight, bias: args.bias },
            cache_seqlens,
            conv_state_indices: conv_state_indices
                .map(|indices| (indices, self.spec.conv_state.shape()[0])),
        };
        // SAFETY: views, aliasing, indices and the size of the workspace have been checked.
        unsafe { self.update.run(self.isa, &operands, scratch.as_mut_ptr()) }
    }

    fn check(
        &self,
        args: &CausalConv1dUpdateArgs<'_>,
        conv_state: &TensorMut<'_>,
        y: &TensorMut<'_>,
    ) -> Result<()> {
        let spec = &self.spec;
        check_view("x", args.x.desc(), &spec.x)?;
        check_view("weight", args.weight.desc(), &spec.weight)?;
        check_view("conv_state", conv_state.desc(), &spec.conv_state)?;
        check_view("y", y.desc(), &spec.y)?;
        let inputs: [(_, Option<&TensorRef<'_>>, Option<&TensorDesc>); 5] = [
            ("x", Some(&args.x), Some(&spec.x)),
            ("weight", Some(&args.weight), Some(&spec.weight)),
            ("bias", args.bias.as_ref(), spec.bias.as_ref()),
            ("cache_seqlens", args.cache_seqlens.as_ref(), spec.cache_seqlens.as_ref()),
            (
                "conv_state_indices",
                args.conv_state_indices.as_ref(),
                spec.conv_state_indices.as_ref(),
            ),
        ];
        for (name, given, planned) in inputs {
            check_optional_view(name, given.map(TensorRef::desc), planned)?;
            let Some(given) = given else { continue };
            check_device(name, given.device(), self.options.device)?;
            check_disjoint("y", y, name, given)?;
            check_disjoint("conv_state", conv_state, name, given)?;
        }
        check_device("conv_state", conv_state.device(), self.options.device)?;
        check_device("y", y.device(), self.options.device)?;
        check_disjoint("y", y, "conv_state", &conv_state.as_ref())
    }

    fn check_indices(
        &self,
        cache_seqlens: Option<Indices<'_>>,
        conv_state_indices: Option<Indices<'_>>,
        seen: &mut [u8],
    ) -> Result<()> {
        let error = |arg, position, given, expected: String| {
            Err(Error::Index { arg, position, given, expected })
        };
        for i in 0..cache_seqlens.map_or(0, |lens| lens.len()) {
            let given = cache_seqlens.map_or(0, |lens| lens.at([i]));
            if given < 0 {
                return error("cache_seqlens", i, given, "at least 0".into());
            }
        }
        let Some(indices) = conv_state_indices else { return Ok(()) };
        let pool = self.spec.conv_state.shape()[0];
        seen.fill(0);
        for i in 0..indices.len() {
            let given = indices.at([i]);
            let Ok(index) = usize::try_from(given) else { continue };
            if index >= pool {
                let expected = format!("below {pool}, the number of states, or negative");
                return error("conv_state_indices", i, given, expected);
            }
            let bit = 1 << (index % 8);
            if seen[index / 8] & bit != 0 {
                let expected = "a state that no other entry uses".into();
                return error("conv_state_indices", i, given, expected);
            }
            seen[index / 8] |= bit;
        }
        Ok(())
    }

    /// The same computation in f64, and the state before it.
    pub(crate) fn reference(
        &self,
        args: &CausalConv1dUpdateArgs<'_>,
        conv_state: &TensorMut<'_>,
    ) -> Result<(UpdateReference, Vec<f64>)> {
        let reference = UpdateReference {
            problem: self.problem,
            activation: self.spec.activation,
            state_len: self.spec.conv_state.shape()[2],
            x: args.x.to_f64_vec()?,
            weight: args.weight.to_f64_vec()?,
            bias: args.bias.as_ref().map(TensorRef::to_f64_vec).transpose()?,
            cache_seqlens: args.cache_seqlens.as_ref().map(integers).transpose()?,
            conv_state_indices: args.conv_state_indices.as_ref().map(integers).transpose()?,
        };
        Ok((reference, conv_state.as_ref().to_f64_vec()?))
    }
}

/// One step of decoding on the CPU: `x` [b, d, l] follows `conv_state` [b, d, state_len], which is
/// advanced; see [`CausalConv1dUpdateSpec`].
///
/// # Errors
/// As [`CausalConv1dUpdatePlan::new`] and [`CausalConv1dUpdatePlan::run`], and
/// [`Error::OutOfMemory`].
///
/// ```
/// use windrow::{Activation, TensorMut, TensorRef};
/// let mut state = [1.0f32, 2.0];
/// let conv_state = TensorMut::new(&mut state, &[1, 1, 2])?;
/// let x = TensorRef::new(&[3.0f32], &[1, 1, 1])?;
/// let weight = TensorRef::new(&[100.0f32, 10.0, 1.0], &[1, 3])?;
/// let y = windrow::causal_conv1d_update(&x, conv_state, &weight, None, Activation::Identity)?;
/// assert_eq!((y.to_vec::<f32>()?, state), (vec![123.0], [2.0, 3.0]));
/// # Ok::<(), windrow::Error>(())
/// ```
pub fn causal_conv1d_update(
    x: &TensorRef<'_>,
    conv_state: TensorMut<'_>,
    weight: &TensorRef<'_>,
    bias: Option<&TensorRef<'_>>,
    activation: Activation,
) -> Result<Tensor> {
    let spec = CausalConv1dUpdateSpec {
        bias: bias.map(|bias| *bias.desc()),
        activation,
        ..CausalConv1dUpdateSpec::new(*x.desc(), *conv_state.desc(), *weight.desc())?
    };
    let plan = CausalConv1dUpdatePlan::new(&spec, &PlanOptions::default())?;
    let mut workspace = Workspace::new(plan.device(), plan.workspace_bytes())?;
    let mut y = Tensor::uninitialised(spec.y)?;
    let args =
        CausalConv1dUpdateArgs { bias: bias.copied(), ..CausalConv1dUpdateArgs::new(*x, *weight) };
    plan.run(&args, conv_state, y.as_mut(), &mut workspace)?;
    Ok(y)
}
