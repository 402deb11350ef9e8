//! What becomes of a sum: the activation, and the store.

use super::epilogue::{silu, silu_of_all};
use crate::Activation;
use crate::cpu::math::{activate, activate_all};
use crate::cpu::{MAX_LANES, Simd, SimdElement, seldom};

/// The sum, and the operations that are applied to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sum {
    pub width: usize,
    /// The distance of neighbouring taps in tokens.
    pub dilation: usize,
    pub activation: Activation,
    /// Write around the cache.
    pub stream: bool,
}

impl Sum {
    /// True if the activation is SiLU, as in Mamba's layers. Loops of their own hold SiLU's constants in registers.
    #[inline(always)]
    pub(super) fn is_silu(self) -> bool {
        self.activation == Activation::Silu
    }
}

/// The activation of `v`, which is a clamp: see [`Activation::bounds`].
#[inline(always)]
fn clamped<S: Simd>(s: S, activation: Activation, v: S::F32) -> S::F32 {
    match activation {
        Activation::Relu => activate(s, Activation::Relu, v),
        Activation::Relu6 => activate(s, Activation::Relu6, v),
        _ => v,
    }
}

/// Stores the activation of `v`, around the cache if asked to and the address allows it. `SILU`: it is SiLU.
///
/// # Safety
/// `V * LANES` elements are writable at `y`.
#[inline(always)]
pub(super) unsafe fn store<S: Simd, T: SimdElement, const V: usize, const SILU: bool>(
    s: S,
    sum: Sum,
    y: *mut T,
    mut v: [S::F32; V],
) {
    debug_assert_eq!(SILU, sum.is_silu());
    if SILU {
        for v in &mut v {
            *v = silu::<S, T>(s, *v);
        }
    } else if sum.activation.bounds().is_none() {
        // No model has it here.
        seldom();
        let mut lanes = [0f32; 2 * MAX_LANES];
        // SAFETY: V vectors of at most MAX_LANES elements.
        unsafe {
            for (i, v) in v.iter().enumerate() {
                s.store(lanes.as_mut_ptr().add(i * S::LANES), *v);
            }
            activate_all(s, sum.activation, lanes.as_mut_ptr(), V * S::LANES);
            for (i, v) in v.iter_mut().enumerate() {
                *v = s.load(lanes.as_ptr().add(i * S::LANES));
            }
        }
    } else {
        for v in &mut v {
            *v = clamped(s, sum.activation, *v);
        }
    }
    // SAFETY: promised by the caller.
    unsafe { put_all(s, sum.stream, (y, 0), &[v]) }
}

/// Stores the activations of `N` tokens or steps, which are `apart` elements from each other, around the cache if `streams`
/// and the first is aligned. `SILU`: it is SiLU.
///
/// # Safety
/// `V * LANES` elements are writable at `y` and for each of the others. If `streams`, all are aligned if the first is.
#[inline(always)]
pub(super) unsafe fn store_all<
    S: Simd,
    T: SimdElement,
    const V: usize,
    const N: usize,
    const SILU: bool,
>(
    s: S,
    sum: Sum,
    streams: bool,
    (y, apart): (*mut T, isize),
    sums: &mut [[S::F32; V]; N],
) {
    // SAFETY: promised by the caller.
    unsafe {
        if SILU {
            silu_of_all::<S, T, V, N>(s, sums);
            put_all(s, streams, (y, apart), sums);
        } else if sum.activation.bounds().is_some() {
            for vectors in sums.iter_mut() {
                for v in vectors.iter_mut() {
                    *v = clamped(s, sum.activation, *v);
                }
            }
            put_all(s, streams, (y, apart), sums);
        } else {
            for (i, v) in sums.iter().enumerate() {
                store::<S, T, V, false>(s, sum, y.offset(i as isize * apart), *v);
            }
        }
    }
}

/// Stores vectors as [`store_all`] does. There is one branch for all: with a branch for each, the compiler computes later
/// ones behind the stores of earlier ones, and their operations do not overlap.
///
/// # Safety
/// As [`store_all`].
#[inline(always)]
unsafe fn put_all<S: Simd, T: SimdElement, const V: usize, const N: usize>(
    s: S,
    streams: bool,
    (y, apart): (*mut T, isize),
    all: &[[S::F32; V]; N],
) {
    // SAFETY: promised by the caller.
    unsafe {
        if streams && y.addr().is_multiple_of(V * S::LANES * size_of::<T>()) {
            for (i, v) in all.iter().enumerate() {
                put::<S, T, V, true>(s, y.offset(i as isize * apart), *v);
            }
        } else {
            for (i, v) in all.iter().enumerate() {
                put::<S, T, V, false>(s, y.offset(i as isize * apart), *v);
            }
        }
    }
}

/// Stores `v`, if `STREAM` around the cache.
///
/// # Safety
/// `V * LANES` elements are writable at `y`. If `STREAM`, it is aligned to their size.
#[inline(always)]
unsafe fn put<S: Simd, T: SimdElement, const V: usize, const STREAM: bool>(
    s: S,
    y: *mut T,
    v: [S::F32; V],
) {
    // SAFETY: promised by the caller.
    unsafe {
        match (V, STREAM) {
            (2, _) => T::store2::<S, STREAM>(s, y, [v[0], v[V - 1]]),
            (_, true) => T::stream(s, y, v[0]),
            (_, false) => T::store(s, y, v[0]),
        }
    }
}
