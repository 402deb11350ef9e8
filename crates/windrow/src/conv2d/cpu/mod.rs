//! Convolution on the CPU.

mod activation;
mod backward;
mod bias_grad;
mod choice;
mod direct;
mod epilogue;
mod im2col;
mod pack;
mod rows;
mod stencil;
mod weight_grad;
pub(crate) mod winograd;

use super::winograd_reference::Stages;
use super::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem, Tile};
use crate::cpu::{Isa, SimdElement};
use crate::dtype::with_element;
use crate::{Activation, DType, Filter, Result, TensorMut, TensorRef};
pub(crate) use activation::apply as activate;
pub(crate) use backward::Backward;
use choice::winograd_products;
pub(crate) use choice::{by_bf16_products, by_runs, by_tiles, choose, supported};
use direct::Direct;
use epilogue::Epilogue;
pub(crate) use epilogue::Residual;
use im2col::Im2colGemm;
use stencil::Stencil;
use winograd::{FUSED_TILE, WinogradCpu, WinogradFused};

/// A [`Stencil`] by one algorithm. Sizes are in f32 elements.
#[derive(Clone, Debug)]
pub(crate) enum Gather {
    Direct(Direct),
    Im2colGemm(Im2colGemm),
}

impl Gather {
    /// Most additions in a row that form an element.
    fn additions(&self) -> usize {
        match self {
            Gather::Direct(g) => g.additions(),
            Gather::Im2colGemm(g) => g.additions(),
        }
    }

    fn packed_len(&self) -> usize {
        match self {
            Gather::Direct(g) => g.packed_len(),
            Gather::Im2colGemm(g) => g.packed_len(),
        }
    }

    fn scratch_len(&self) -> usize {
        match self {
            Gather::Direct(g) => g.scratch_len(),
            Gather::Im2colGemm(g) => g.scratch_len(),
        }
    }

    /// # Safety
    /// The stencil's filter elements are readable from `filter`, and of type T.
    unsafe fn pack<T: SimdElement>(&self, filter: *const u8, packed: &mut [f32]) {
        // SAFETY: passed on.
        unsafe {
            match self {
                Gather::Direct(g) => g.pack::<T>(filter.cast(), packed),
                Gather::Im2colGemm(g) => g.pack::<T>(filter.cast(), packed),
            }
        }
    }

    /// # Safety
    /// As for [`Im2colGemm::run`], with elements of type T.
    unsafe fn run<T: SimdElement>(
        &self,
        packed: &[f32],
        src: *const u8,
        dst: *mut u8,
        epilogue: Epilogue,
        scratch: *mut f32,
    ) {
        // SAFETY: passed on.
        unsafe {
            match self {
                Gather::Direct(g) => g.run::<T>(packed, src.cast(), dst.cast(), epilogue, scratch),
                Gather::Im2colGemm(g) => {
                    g.run::<T>(packed, src.cast(), dst.cast(), epilogue, scratch);
                }
            }
        }
    }
}

/// `y = act(conv(x, w) + bias + residual)` but for the filter. `x` [n, c, h, w] and `y` [n, k, oh, ow] have one type,
/// `bias` [k] that or f32; the residual is that of `y`; `workspace` is aligned to 64.
pub(crate) struct Run<'a, 'y> {
    pub(crate) x: &'a TensorRef<'a>,
    pub(crate) bias: Option<&'a TensorRef<'a>>,
    pub(crate) residual: Residual,
    pub(crate) activation: Activation,
    pub(crate) y: &'a mut TensorMut<'y>,
    pub(crate) workspace: &'a mut [u8],
}

/// A convolution by one algorithm with the instructions of one set.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // a plan has one
pub(crate) enum Forward {
    Gather(Gather),
    Winograd(WinogradCpu),
    Fused(WinogradFused),
}

impl Forward {
    /// For a configuration whose algorithm can compute the spec.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), for lists of the filter's taps.
    pub(crate) fn new(
        spec: &Conv2dSpec,
        p: &Problem,
        configuration: &Conv2dConfiguration,
        isa: Isa,
        threads: usize,
    ) -> Result<Self> {
        let stencil = || Stencil::forward(spec, p);
        let Conv2dConfiguration { algorithm, tiles, parts, vectors, .. } = *configuration;
        Ok(match algorithm {
            Conv2dAlgorithm::Direct => {
                let (stencil, dtype) = (stencil()?, spec.x.dtype);
                Forward::Gather(Gather::Direct(match () {
                    () if by_tiles(spec, p, isa) => Direct::by_tiles(stencil, dtype, isa, threads)?,
                    () if by_bf16_products(spec, p, isa) => {
                        Direct::by_bf16_products(stencil, isa, threads)?
                    }
                    () => Direct::new(stencil, isa, threads)?,
                }))
            }
            Conv2dAlgorithm::Im2colGemm => {
                Forward::Gather(Gather::Im2colGemm(Im2colGemm::new(stencil()?, isa, threads)))
            }
            Conv2dAlgorithm::WinogradGemm(tile) => {
                let products = winograd_products(spec, p, isa, tile);
                let engine = WinogradCpu::with_isa(p, tile, threads, isa, products);
                Forward::Winograd(engine.with_blocking([tiles, parts, vectors]))
            }
            Conv2dAlgorithm::WinogradFused(FUSED_TILE) => {
                Forward::Fused(WinogradFused::new(p, isa, threads))
            }
            Conv2dAlgorithm::WinogradFused(_)
            | Conv2dAlgorithm::ImplicitGemm
            | Conv2dAlgorithm::WinogradRow
            | Conv2dAlgorithm::Cudnn => {
                unreachable!("plans take algorithms of their device")
            }
        })
    }

    /// Blocking in words.
    pub(crate) fn explain(&self) -> String {
        match self {
            Forward::Gather(Gather::Direct(g)) => g.explain(),
            Forward::Gather(Gather::Im2colGemm(g)) => g.explain(),
            Forward::Winograd(w) => w.explain(),
            Forward::Fused(w) => w.explain(),
        }
    }

    /// The algorithm's parameters that are not `None` of what it runs with.
    pub(crate) fn configuration(&self, algorithm: Conv2dAlgorithm) -> Conv2dConfiguration {
        let mut configuration = Conv2dConfiguration::new(algorithm);
        if let Forward::Winograd(engine) = self {
            let [tiles, parts, vectors] = engine.blocking().map(Some);
            configuration = Conv2dConfiguration { tiles, parts, vectors, ..configuration };
        }
        configuration
    }

    /// Elements of the packed filter.
    pub(crate) fn packed_len(&self) -> usize {
        match self {
            Forward::Gather(g) => g.packed_len(),
            Forward::Winograd(w) => w.packed_len(),
            Forward::Fused(w) => w.packed_len(),
        }
    }

    /// Channels that lie next to each other in the packed filter: with algorithm and filter shape,
    /// what its form depends on.
    pub(crate) fn packed_width(&self) -> usize {
        match self {
            Forward::Gather(Gather::Direct(g)) => g.packed_width(),
            Forward::Gather(Gather::Im2colGemm(g)) => g.packed_width(),
            Forward::Winograd(w) => w.packed_width(),
            Forward::Fused(w) => w.packed_width(),
        }
    }

    /// The tile of a Winograd algorithm.
    pub(crate) fn tile(&self) -> Option<Tile> {
        match self {
            Forward::Gather(_) => None,
            Forward::Winograd(w) => Some(w.tile()),
            Forward::Fused(_) => Some(FUSED_TILE),
        }
    }

    /// Whether an activation follows results with a residual in a pass of its own, by [`activation::apply`].
    pub(crate) fn leaves(spec: &Conv2dSpec) -> bool {
        let epilogue = Epilogue { activation: spec.activation, ..Epilogue::NONE };
        spec.residual && epilogue.bounds().is_none()
    }

    /// How far an element may be off, relative to its scale: a rounding for each addition in a row;
    /// for Winograd, which mixes a tile's pixels, a few times what was measured.
    pub(crate) fn tolerance(&self) -> f64 {
        match self {
            Forward::Gather(g) => tolerance(g.additions()),
            Forward::Winograd(w) => winograd_tolerance(w.tile()),
            Forward::Fused(_) => winograd_tolerance(FUSED_TILE),
        }
    }

    /// Bytes of scratch memory for a run with a packed filter.
    pub(crate) fn workspace_bytes(&self, k: usize) -> usize {
        match self {
            Forward::Gather(g) => (bias_len(k) + g.scratch_len()) * size_of::<f32>(),
            Forward::Winograd(w) => w.workspace_bytes(),
            Forward::Fused(w) => w.workspace_bytes(),
        }
    }

    /// Bytes of scratch memory for a run with the filter itself.
    pub(crate) fn raw_bytes(&self, k: usize) -> usize {
        match self {
            Forward::Winograd(w) => w.raw_bytes(),
            Forward::Gather(_) | Forward::Fused(_) => self.packed_bytes() + self.workspace_bytes(k),
        }
    }

    /// Bytes of the packed filter, in whole cache lines.
    pub(crate) fn packed_bytes(&self) -> usize {
        (self.packed_len() * size_of::<f32>()).next_multiple_of(64)
    }

    /// Packs a filter that agrees with the spec.
    pub(crate) fn pack(&self, w: &TensorRef<'_>, packed: &mut [f32]) {
        match self {
            // SAFETY: the stencil was made for this filter's layout.
            Forward::Gather(g) => unsafe {
                with_element!(w.dtype(), T => g.pack::<T>(w.as_ptr(), packed))
            },
            Forward::Winograd(engine) => engine.pack(w, packed),
            Forward::Fused(engine) => engine.pack(w, packed),
        }
    }

    /// The im2col matrix [group, term, pixel] of an input that agrees with the spec; `None` for an
    /// algorithm that has none.
    pub(crate) fn im2col(&self, x: &TensorRef<'_>) -> Result<Option<Vec<f32>>> {
        let Forward::Gather(Gather::Im2colGemm(g)) = self else { return Ok(None) };
        // SAFETY: the stencil was made for this layout.
        let matrix = with_element!(x.dtype(), T => unsafe { g.matrix(x.as_ptr().cast::<T>()) });
        matrix.map(Some)
    }

    /// What the stages of Winograd's algorithm form of views that agree with the spec; `None` for
    /// other algorithms.
    pub(crate) fn winograd_stages(
        &self,
        w: &TensorRef<'_>,
        x: &TensorRef<'_>,
    ) -> Result<Option<Stages<Vec<f32>>>> {
        let Forward::Winograd(engine) = self else { return Ok(None) };
        engine.stages(w, x).map(Some)
    }

    /// [`Forward::run`] with the filter itself, in a workspace of [`Forward::raw_bytes`].
    pub(crate) fn run_raw(&self, w: &TensorRef<'_>, run: Run<'_, '_>) {
        match self {
            Forward::Winograd(e) => e.run_raw(w, run),
            Forward::Gather(_) | Forward::Fused(_) => {
                let (packed, workspace) = run.workspace.split_at_mut(self.packed_bytes());
                let packed = floats_mut(packed);
                self.pack(w, packed);
                self.run(packed, Run { workspace, ..run });
            }
        }
    }

    /// Runs on views that agree with the spec.
    pub(crate) fn run(&self, packed: &[f32], run: Run<'_, '_>) {
        match self {
            Forward::Winograd(w) => w.run(packed, run),
            Forward::Fused(w) => w.run(packed, run),
            Forward::Gather(g) => {
                let Run { x, bias, residual, activation, y, workspace } = run;
                let (staged, scratch) = stage_bias(bias, y.shape()[1], workspace);
                let bias = bias.map_or(std::ptr::null(), |_| staged.as_ptr());
                assert!(scratch.len() >= g.scratch_len(), "workspace");
                let epilogue = Epilogue { bias, residual, activation };
                let (src, dst) = (x.as_ptr(), y.as_mut_ptr());
                // SAFETY: the stencil was made for these layouts; `y` is borrowed mutably.
                unsafe {
                    let scratch = scratch.as_mut_ptr();
                    with_element!(x.dtype(), T => g.run::<T>(packed, src, dst, epilogue, scratch));
                }
            }
        }
    }
}

/// Error of Winograd's algorithm relative to its scale.
fn winograd_tolerance(tile: Tile) -> f64 {
    match tile {
        Tile::F2 => 1e-6,
        Tile::F4 => 4e-6,
        Tile::F6 => 2e-5,
    }
}

/// Rounding errors of sums in f32 of which each element passes through up to `additions`, relative
/// to the sum of absolute terms.
fn tolerance(additions: usize) -> f64 {
    (additions + 2) as f64 * DType::F32.unit_roundoff()
}

/// Elements of the workspace for the bias in f32, in whole cache lines.
fn bias_len(k: usize) -> usize {
    k.next_multiple_of(16)
}

/// Writes the bias of `k` channels, or zeros without one, to the beginning of a workspace, with zeros
/// up to whole cache lines. Gives it and what follows.
fn stage_bias<'a>(
    bias: Option<&TensorRef<'_>>,
    k: usize,
    workspace: &'a mut [u8],
) -> (&'a [f32], &'a mut [f32]) {
    let (staged, rest) = floats_mut(workspace).split_at_mut(bias_len(k));
    fill_bias(bias, staged);
    (staged, rest)
}

/// The bias as f32, zeros beyond it.
pub(crate) fn fill_bias(bias: Option<&TensorRef<'_>>, out: &mut [f32]) {
    out.fill(0.0);
    let Some(bias) = bias else { return };
    for (k, out) in out[..bias.shape()[0]].iter_mut().enumerate() {
        let offset = k as isize * bias.strides()[0];
        // SAFETY: element k of the bias.
        *out = with_element!(bias.dtype(), T => unsafe {
            bias.as_ptr().cast::<T>().offset(offset).read().to_f32()
        });
    }
}

/// Aligned memory as f32.
pub(crate) fn floats(bytes: &[u8]) -> &[f32] {
    // SAFETY: every bit pattern is an f32.
    let (before, floats, _) = unsafe { bytes.align_to::<f32>() };
    assert!(before.is_empty(), "memory is aligned");
    floats
}

/// Aligned memory as f32.
pub(crate) fn floats_mut(bytes: &mut [u8]) -> &mut [f32] {
    // SAFETY: every bit pattern is an f32.
    let (before, floats, _) = unsafe { bytes.align_to_mut::<f32>() };
    assert!(before.is_empty(), "memory is aligned");
    floats
}

/// Time that the model expects, in multiplications at the rate of Winograd's products.
pub(crate) fn cost(
    spec: &Conv2dSpec,
    p: &Problem,
    isa: Isa,
    algorithm: Conv2dAlgorithm,
    filter: Filter,
) -> f64 {
    // Of an element of the filter.
    const PACK: f64 = 30.0;
    let terms = p.flops() / 2.0;
    match algorithm {
        Conv2dAlgorithm::WinogradGemm(tile) => {
            winograd::cost(p, tile, filter, winograd_products(spec, p, isa, tile))
        }
        // Transformed along rows only.
        Conv2dAlgorithm::WinogradFused(tile) => terms * tile.alpha() as f64 / (3 * tile.m()) as f64,
        _ if filter == Filter::Changing => terms + PACK * (p.k * p.taps()) as f64,
        _ => terms,
    }
}
