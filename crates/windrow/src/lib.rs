//! Three deep-learning operators for CPUs and GPUs, fast and with measured accuracy: causal conv1d, conv2d and GELU.
//!
//! ```
//! use windrow::{Activation, TensorRef, causal_conv1d};
//!
//! let x = TensorRef::new(&[1.0f32, 2.0, 3.0, 4.0], &[1, 1, 4])?; // [b, d, l]
//! let weight = TensorRef::new(&[10.0f32, 1.0], &[1, 2])?; // [d, width]
//! let y = causal_conv1d(&x, &weight, None, Activation::Identity)?;
//! assert_eq!(y.as_slice::<f32>()?, [1.0, 12.0, 23.0, 34.0]);
//! # Ok::<(), windrow::Error>(())
//! ```
//!
//! [`gelu`], [`geglu`], [`causal_conv1d`], [`causal_conv1d_update`] and [`conv2d()`] each compute a result in one call,
//! as above. Their tensors are views ([`TensorRef`], [`TensorMut`]) of the caller's memory. The elements are f32, f16
//! or bf16. A view may have any strides, so a tensor need not be made contiguous. (An algorithm may still copy `x` or
//! the filter to temporary memory.)
//!
//! # The life of a plan
//!
//! To run an operation many times, make its plan once. A *spec* says what to compute. A *plan* is a checked spec that
//! is bound to a device, with an algorithm and the size of the temporary memory that a run needs, the *workspace*. A
//! *run* computes the result: it reads and writes the caller's memory, and allocates none (except as [`Plan`] says).
//!
//! ```
//! use windrow::{Approximate, DType, GeluArgs, GeluPlan, GeluSpec, PlanOptions, Tensor, TensorDesc, Workspace};
//!
//! let desc = TensorDesc::contiguous(DType::F32, &[2, 3])?;
//! let options = PlanOptions::default(); // the CPU, all its threads
//! let plan = GeluPlan::new(&GeluSpec::new(desc, Approximate::None)?, &options)?;
//! let mut workspace = Workspace::for_sizes(options.device, [plan.workspace_bytes()])?;
//! let mut y = Tensor::zeros(DType::F32, &[2, 3])?;
//! for step in 0..3 {
//!     let x = Tensor::from_vec(vec![step as f32; 6], &[2, 3])?;
//!     plan.run(&GeluArgs::new(x.as_ref()), y.as_mut(), &mut workspace)?;
//! }
//! assert!((y.as_slice::<f32>()?[0] - 1.9545).abs() < 1e-4);
//! # Ok::<(), windrow::Error>(())
//! ```
//!
//! A plan may be shared by any number of threads, each with a workspace of its own. Plans may share a workspace if it
//! is at least as large as the largest of their `workspace_bytes()`. The same plan on the same input gives the same
//! bits. On a GPU, `run` is asynchronous: it returns when its work is enqueued on the workspace's stream.
//! [`Workspace::synchronize`] waits for it. `explain` describes a plan in one line: its algorithm with all parameters,
//! the device, and how the work is divided (block sizes on the CPU, the launch on a GPU). [`PlanOptions::tuning`] says
//! how an algorithm is chosen. [`Accuracy`] says how accurate the result must be.
//!
//! # Prefill (the prompt) and decoding (one token at a time)
//!
//! A model with short convolutions, such as Mamba, first convolves its whole prompt (the *prefill*). It keeps the last
//! `width - 1` inputs, the *state* (`width` is the number of filter taps). Then each new token is one step, which reads
//! and updates the state:
//!
//! ```
//! use windrow::{
//!     CausalConv1dArgs, CausalConv1dOutputs, CausalConv1dPlan, CausalConv1dSpec, CausalConv1dUpdateArgs,
//!     CausalConv1dUpdatePlan, CausalConv1dUpdateSpec, DType, PlanOptions, Tensor, TensorDesc, Workspace,
//! };
//!
//! let f32 = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape);
//! let (weight, width) = (Tensor::from_vec(vec![10.0f32, 1.0], &[1, 2])?, 2);
//! let options = PlanOptions::default();
//!
//! let prompt = Tensor::from_vec(vec![1.0f32, 2.0, 3.0], &[1, 1, 3])?; // [b, d, l]
//! let spec = CausalConv1dSpec::new(*prompt.desc(), *weight.desc())?.with_final_states(f32(&[1, 1, width - 1])?);
//! let prefill = CausalConv1dPlan::new(&spec, &options)?;
//! let spec = CausalConv1dUpdateSpec::new(f32(&[1, 1, 1])?, f32(&[1, 1, width - 1])?, *weight.desc())?;
//! let step = CausalConv1dUpdatePlan::new(&spec, &options)?;
//! let sizes = [prefill.workspace_bytes(), step.workspace_bytes()];
//! let mut workspace = Workspace::for_sizes(options.device, sizes)?;
//!
//! let mut y = Tensor::zeros(DType::F32, &[1, 1, 3])?;
//! let mut state = Tensor::zeros(DType::F32, &[1, 1, width - 1])?;
//! let outputs = CausalConv1dOutputs::new(y.as_mut()).with_final_states(state.as_mut());
//! prefill.run(&CausalConv1dArgs::new(prompt.as_ref(), weight.as_ref()), outputs, &mut workspace)?;
//! assert_eq!(y.as_slice::<f32>()?, [1.0, 12.0, 23.0]);
//!
//! let mut y = Tensor::zeros(DType::F32, &[1, 1, 1])?;
//! for (token, wanted) in [(4.0f32, 34.0f32), (5.0, 45.0)] {
//!     let token = Tensor::from_vec(vec![token], &[1, 1, 1])?;
//!     let args = CausalConv1dUpdateArgs::new(token.as_ref(), weight.as_ref());
//!     step.run(&args, state.as_mut(), y.as_mut(), &mut workspace)?; // the state moves on in place
//!     assert_eq!(y.as_slice::<f32>()?, [wanted]);
//! }
//! # Ok::<(), windrow::Error>(())
//! ```
//!
//! # Errors
//!
//! A call with a wrong argument returns an [`Error`]. Its variant is the kind of mistake. Its fields name the argument,
//! what was given and what was expected. Plans and their runs return errors instead of panicking. A call that is
//! rejected before its work starts writes no output.
//!
//! # Speed
//!
//! The kernels rely on compiler optimisation: a debug build is hundreds of times slower. To optimise Windrow in debug
//! builds too, add this to the `Cargo.toml` of your workspace:
//!
//! ```toml
//! [profile.dev.package.windrow]
//! opt-level = 3
//! ```
//!
//! # Features
//!
//! All features are on by default.
//!
//! - `cuda`: NVIDIA GPUs. CUDA is not needed to build: its libraries are loaded at run time.
//! - `hip`: AMD GPUs. ROCm is not needed to build. The kernels have run in an emulator, not yet on an AMD GPU.
//!   `docs/amd.md` lists what was executed.
//! - `parallel`: operators on several GPUs and machines. It enables `cuda`.
//! - `tuning`: the search for the fastest *configuration* (an algorithm with its parameters) by measurement (module
//!   `tuning`), and tables of earlier results. Without it, a plan takes the configuration for which a formula, the
//!   *cost model*, predicts the shortest time.
//! - `threads`: work on the CPU is split over rayon's threads. Without it, work runs on the caller's thread only,
//!   unless [`cpu::use_team`] provides others.

mod activation;
mod buffer;
mod causal_conv1d;
mod conv2d;
pub mod cpu;
pub mod cuda;
mod device;
mod dtype;
mod error;
mod folder;
mod forms;
mod gelu;
// Some functions of `gpu` are unused in some builds. If there is no backend, these are the functions that only backends
// call; if `parallel` is off, those that synchronize several devices.
#[cfg_attr(not(feature = "parallel"), allow(dead_code, unused_imports))]
mod gpu;
pub mod hip;
mod layout;
mod lists;
#[cfg(feature = "parallel")]
pub mod parallel;
mod plan;
mod tensor;
mod try_once_lock;
#[cfg(feature = "tuning")]
pub mod tuning;
mod verification;
pub mod verify;

/// The backends of this build.
static BACKENDS: &[gpu::Backend] = &[
    #[cfg(feature = "cuda")]
    cuda::device::BACKEND,
    #[cfg(feature = "hip")]
    hip::device::BACKEND,
];

/// The operators that can be tuned. In the tuning tables, the key of an entry begins with the name of its operator.
#[cfg(feature = "tuning")]
static TUNABLE: &[tuning::TunableOperator] = &[
    tuning::TunableOperator::of::<Gelu>(),
    tuning::TunableOperator::of::<CausalConv1d>(),
    tuning::TunableOperator::of::<Conv2d>(),
];

pub use activation::{Activation, Approximate, NegativeSlope};
pub use causal_conv1d::{
    CausalConv1d, CausalConv1dAlgorithm, CausalConv1dArgs, CausalConv1dConfiguration,
    CausalConv1dGrads, CausalConv1dOutputs, CausalConv1dPlan, CausalConv1dServing,
    CausalConv1dServingArgs, CausalConv1dServingOutputs, CausalConv1dServingPlan,
    CausalConv1dServingSpec, CausalConv1dSpec, CausalConv1dUpdate, CausalConv1dUpdateArgs,
    CausalConv1dUpdatePlan, CausalConv1dUpdateSpec, HeadNorm, causal_conv1d, causal_conv1d_update,
};
pub use conv2d::{
    Conv2d, Conv2dAlgorithm, Conv2dArgs, Conv2dConfiguration, Conv2dParams, Conv2dPlan, Conv2dSpec,
    Conv3d, Conv3dArgs, Conv3dOutputs, Conv3dParams, Conv3dPlan, Conv3dSpec, FilterCache,
    PackedWeights, Tile, TimePadding, Weights, conv2d, conv3d,
};
pub use device::Device;
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use gelu::{
    Gelu, GeluAlgorithm, GeluArgs, GeluConfiguration, GeluGrads, GeluPlan, GeluSpec, HalfMath,
    geglu, gelu,
};
#[doc(no_inline)]
pub use half::{bf16, f16};
pub use layout::{Layout, MAX_RANK};
pub use plan::{Accuracy, Filter, Placed, Plan, PlanOptions, Tuning, Verify, Workspace};
pub use tensor::{Tensor, TensorDesc, TensorMut, TensorRef};

/// Traits that let the command of this repository handle all operators alike, and what its Python package computes
/// between convolutions. They are not part of the stable API: any release may change them.
#[doc(hidden)]
pub mod internal {
    pub use crate::conv2d::{Conv2dChain, Conv2dLink};
    pub use crate::cpu::images::{Gate, ImageOperation, ImageStep, Window};
    pub use crate::cpu::prefetch::prefetch;
    pub use crate::plan::{Configuration, Measured, Operator, PlanInputs, Tuned};
}
