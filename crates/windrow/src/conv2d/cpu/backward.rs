//! The gradients on the CPU, apart from data gradients by Winograd.

use super::super::{Conv2dSpec, Problem, Tile};
use super::bias_grad::bias_grad;
use super::choice::tiles_pay;
use super::direct::Direct;
use super::epilogue::Epilogue;
use super::im2col::Im2colGemm;
use super::stencil::Stencil;
use super::weight_grad::WeightGrad;
use super::winograd::{WinogradWeight, weight_cost};
use super::{Gather, tolerance, with_element};
use crate::cpu::{Isa, SimdElement};
use crate::dtype::not_computed;
use crate::lists::room_for;
use crate::{Accuracy, DType, Filter, Result, TensorMut, TensorRef};

/// How the gradients of a convolution are computed.
#[derive(Clone, Debug)]
pub(crate) struct Backward {
    /// Run one after the other, each writes its part of dx; the first may write zeros over all.
    data: Vec<Gather>,
    weight: Weight,
    forward: Stencil,
    isa: Isa,
    threads: usize,
}

/// How the filter's gradient is computed.
#[derive(Clone, Debug)]
enum Weight {
    Product(Box<WeightGrad>),
    Winograd(WinogradWeight),
}

impl Weight {
    fn new(forward: &Stencil, spec: &Conv2dSpec, p: &Problem, isa: Isa, threads: usize) -> Self {
        // A term of the direct sum takes longer than one of the products: it is packed beside few others.
        const TERM: f64 = 1.25;
        let terms = (p.n * p.oh * p.ow * p.k * p.taps()) as f64;
        let winograd = p.is_winograd() && spec.accuracy != Accuracy::Exact;
        if winograd && terms > 0.0 && weight_cost(p) < TERM * terms {
            return Weight::Winograd(WinogradWeight::new(p, isa, threads));
        }
        Weight::Product(Box::new(WeightGrad::new(forward.clone(), isa, threads)))
    }

    fn scratch_len(&self) -> usize {
        match self {
            Weight::Product(w) => w.scratch_len(),
            Weight::Winograd(w) => w.scratch_len(),
        }
    }

    /// # Safety
    /// x and dy are those of the spec, of type T; elements of dw, whose strides are given, are in memory and touched
    /// by nobody else; `scratch` holds [`Weight::scratch_len`] elements.
    unsafe fn run<T: SimdElement, W: SimdElement>(
        &self,
        x: &TensorRef<'_>,
        dy: &TensorRef<'_>,
        dw: *mut W,
        strides: [isize; 4],
        scratch: *mut f32,
    ) {
        // SAFETY: passed on.
        unsafe {
            match self {
                Weight::Product(w) => {
                    w.run::<T, W>(x.as_ptr().cast(), dy.as_ptr().cast(), dw, strides, scratch);
                }
                Weight::Winograd(w) => w.run::<T, W>(x, dy, dw, strides, scratch),
            }
        }
    }
}

impl Backward {
    pub(crate) fn new(spec: &Conv2dSpec, p: &Problem, isa: Isa, threads: usize) -> Result<Self> {
        let stencils = Stencil::backward_data(spec, p)?;
        let written: usize = stencils.iter().map(Stencil::pixels).sum();
        let zero = (written < p.n * p.h * p.w).then(|| Stencil::zero(spec, p));
        let (direct, tiles) = (p.prefers_direct(), tiles_pay(spec, p, isa, Filter::Changing));
        let mut data = room_for(stencils.len() + 1)?;
        for stencil in zero.into_iter().chain(stencils) {
            data.push(match direct {
                _ if tiles => {
                    Gather::Direct(Direct::by_tiles(stencil, spec.x.dtype, isa, threads)?)
                }
                true => Gather::Direct(Direct::new(stencil, isa, threads)?),
                false => Gather::Im2colGemm(Im2colGemm::new(stencil, isa, threads)),
            });
        }
        let forward = Stencil::forward(spec, p)?;
        let weight = Weight::new(&forward, spec, p, isa, threads);
        Ok(Backward { data, weight, forward, isa, threads })
    }

    /// Bytes of the packed filter, and of scratch memory, for the data gradient.
    pub(crate) fn data_bytes(&self) -> [usize; 2] {
        let packed = self.data.iter().map(Gather::packed_len).max().unwrap_or(0);
        let scratch = self.data.iter().map(Gather::scratch_len).max().unwrap_or(0);
        [(packed * size_of::<f32>()).next_multiple_of(64), scratch * size_of::<f32>()]
    }

    pub(crate) fn data_tolerance(&self) -> f64 {
        tolerance(self.data.iter().map(Gather::additions).max().unwrap_or(0))
    }

    /// Bytes of scratch memory for the weight gradient.
    pub(crate) fn weight_bytes(&self) -> usize {
        self.weight.scratch_len() * size_of::<f32>()
    }

    pub(crate) fn weight_tolerance(&self) -> f64 {
        match &self.weight {
            Weight::Product(w) => tolerance(w.additions()),
            Weight::Winograd(w) => w.tolerance(),
        }
    }

    /// The tile of a weight gradient in Winograd's domain.
    pub(crate) fn weight_tile(&self) -> Option<Tile> {
        match &self.weight {
            Weight::Product(_) => None,
            Weight::Winograd(w) => Some(w.tile()),
        }
    }

    /// Views agree with the spec, memory with [`Backward::data_bytes`].
    pub(crate) fn data(
        &self,
        w: &TensorRef<'_>,
        dy: &TensorRef<'_>,
        dx: &mut TensorMut<'_>,
        packed: &mut [f32],
        scratch: &mut [f32],
    ) {
        let [packed_bytes, scratch_bytes] = self.data_bytes();
        let fits = size_of_val(packed) >= packed_bytes && size_of_val(scratch) >= scratch_bytes;
        assert!(fits, "workspace");
        let (w, src, dst) = (w.as_ptr(), dy.as_ptr(), dx.as_mut_ptr());
        for gather in &self.data {
            // SAFETY: the stencils were made for these layouts; dx is borrowed mutably.
            with_element!(dx.dtype(), T => unsafe {
                gather.pack::<T>(w, packed);
                gather.run::<T>(packed, src, dst, Epilogue::NONE, scratch.as_mut_ptr());
            });
        }
    }

    /// Views agree with the spec, scratch memory with [`Backward::weight_bytes`].
    pub(crate) fn weight(
        &self,
        x: &TensorRef<'_>,
        dy: &TensorRef<'_>,
        dw: &mut TensorMut<'_>,
        scratch: &mut [f32],
    ) {
        assert!(scratch.len() >= self.weight.scratch_len(), "workspace");
        let strides = dw.strides().try_into().expect("dw was checked to have four dimensions");
        let (dst, scratch) = (dw.as_mut_ptr(), scratch.as_mut_ptr());
        // SAFETY: the plan was made for these layouts; dw is borrowed mutably.
        with_element!(x.dtype(), T => unsafe {
            match dw.dtype() {
                DType::F32 => self.weight.run::<T, f32>(x, dy, dst.cast(), strides, scratch),
                DType::F16 | DType::BF16 | not_computed!() => self.weight.run::<T, T>(x, dy, dst.cast(), strides, scratch),
            }
        });
    }

    /// Views agree with the spec.
    pub(crate) fn bias(&self, dy: &TensorRef<'_>, db: &mut TensorMut<'_>) {
        let (stencil, isa, threads) = (&self.forward, self.isa, self.threads);
        let (dst, stride) = (db.as_mut_ptr(), db.strides()[0]);
        // SAFETY: the stencil was made for this layout; db is borrowed mutably.
        with_element!(dy.dtype(), T => unsafe {
            let dy = dy.as_ptr().cast::<T>();
            match db.dtype() {
                DType::F32 => bias_grad(stencil, isa, threads, dy, dst.cast::<f32>(), stride),
                DType::F16 | DType::BF16 | not_computed!() => bias_grad(stencil, isa, threads, dy, dst.cast::<T>(), stride),
            }
        });
    }
}
