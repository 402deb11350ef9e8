//! Convolution on the CPU: a file or folder for each method.

mod amx;
mod bands;
mod bf16_pairs;
mod choice;
mod direct;
mod gradient;
mod gradients;
mod grouped;
mod im2col;
mod method;
mod methods;
mod one_pixel;
mod planar;
mod plane;
mod runs;
mod shared;
mod slices;
mod staged;
mod transposed;
pub(crate) mod winograd;

use self::amx::Amx;
pub(super) use self::amx::flushes;
pub(crate) use self::bands::{Bands, Link, LinkArgs, pays};
use self::bf16_pairs::Bf16Pairs;
pub(crate) use self::choice::choose;
use self::direct::ByTaps;
pub(crate) use self::gradients::Backward;
use self::grouped::Grouped;
use self::im2col::Im2colMethod;
use self::method::Method;
pub(crate) use self::method::{Prepared, Run, Task};
pub(crate) use self::methods::{
    algorithms, allows, candidates, cost, parameters, prepare, supported,
};
use self::one_pixel::OnePixelMethod;
use self::planar::Planar;
use self::plane::Plane;
use self::runs::Runs;
pub(crate) use self::shared::activation::{apply as activate, follows};
pub(crate) use self::shared::epilogue::Residual;
pub(crate) use self::shared::frames::FrameTaps;
pub(crate) use self::shared::{floats, floats_mut};
pub(crate) use self::slices::{Slices, slices_pay};
use self::transposed::Transposed;
use self::winograd::{FusedMethod, StagedMethod};

/// The methods on the CPU. If several have the same algorithm, the first that supports a convolution computes it.
static METHODS: [&dyn Method; 11] = [
    &AMX,
    &BF16_PAIRS,
    &RUNS,
    &GROUPED,
    &TRANSPOSED,
    &PLANE,
    &PLANAR,
    &OnePixelMethod,
    &IM2COL,
    &StagedMethod,
    &FusedMethod,
];

static AMX: ByTaps<Amx> = ByTaps::METHOD;
static BF16_PAIRS: ByTaps<Bf16Pairs> = ByTaps::METHOD;
static RUNS: ByTaps<Runs> = ByTaps::METHOD;
static GROUPED: ByTaps<Grouped> = ByTaps::METHOD;
static TRANSPOSED: ByTaps<Transposed> = ByTaps::METHOD;
static PLANE: ByTaps<Plane> = ByTaps::METHOD;
static PLANAR: ByTaps<Planar> = ByTaps::METHOD;
static IM2COL: Im2colMethod = Im2colMethod;
