//! GELU on the CPU: one pass over memory for the result, and one for all gradients together.

mod backward;
mod forward;
mod nest;
mod table;

pub(super) use backward::{Partition, backward};
pub(super) use forward::forward;

use crate::TensorRef;
use crate::cpu::{Simd, SimdElement};

/// The number of elements that are copied to a contiguous buffer at a time if an operand's innermost stride is not 1.
const BLOCK: usize = 256;

/// The bytes of input below which waking another thread costs more than it saves.
const PARALLEL_FROM: usize = 32 << 10;

/// The bias for the kernels. It has the input's type, or f32 if the input is f16 or bf16.
#[derive(Clone, Copy)]
enum Bias<T> {
    None,
    F32(*const f32),
    Same(*const T),
}

impl<T: SimdElement> Bias<T> {
    fn of(bias: Option<&TensorRef<'_>>) -> Self {
        match bias {
            None => Bias::None,
            Some(b) if b.dtype() != T::DTYPE => Bias::F32(b.as_ptr().cast()),
            Some(b) => Bias::Same(b.as_ptr().cast()),
        }
    }

    /// The `n` elements of the bias from `offset` in contiguous memory. They are copied to `gathered` if they are not
    /// contiguous.
    /// # Safety: they are readable.
    #[inline(always)]
    unsafe fn block(self, offset: isize, stride: isize, n: usize, gathered: &mut Block) -> Self {
        // SAFETY: passed on.
        unsafe {
            match self {
                Bias::None => Bias::None,
                Bias::F32(p) => Bias::F32(gather(p.offset(offset), stride, n, gathered)),
                Bias::Same(p) => Bias::Same(gather(p.offset(offset), stride, n, gathered)),
            }
        }
    }

    /// `x`, loaded by `load2`, plus the bias of elements `i..i + 2 LANES`. The bias must have the input's type, because
    /// `load2` may load f16 and bf16 in another order than f32. # Safety: the elements are readable.
    #[inline(always)]
    unsafe fn add2<S: Simd>(self, s: S, x: [S::F32; 2], i: usize) -> [S::F32; 2] {
        match self {
            Bias::None => x,
            Bias::F32(_) => unreachable!("pairs are in the order of their type"),
            Bias::Same(p) => {
                // SAFETY: passed on.
                let [b0, b1] = unsafe { T::load2(s, p.add(i)) };
                [s.add(x[0], b0), s.add(x[1], b1)]
            }
        }
    }

    /// `x` plus the bias of elements `i..i + n`. # Safety: they are readable.
    #[inline(always)]
    unsafe fn add<S: Simd>(self, s: S, x: S::F32, i: usize, n: usize) -> S::F32 {
        // SAFETY: passed on.
        unsafe {
            match self {
                Bias::None => x,
                Bias::F32(p) => s.add(x, load(s, p.add(i), n)),
                Bias::Same(p) => s.add(x, load(s, p.add(i), n)),
            }
        }
    }
}

/// Room for [`BLOCK`] elements of any compute type.
#[repr(align(64))]
struct Block([f32; BLOCK]);

impl Block {
    #[inline(always)]
    fn new() -> Self {
        Block([0.0; BLOCK])
    }

    #[inline(always)]
    fn as_mut_ptr<T: SimdElement>(&mut self) -> *mut T {
        const { assert!(size_of::<T>() <= size_of::<f32>()) };
        self.0.as_mut_ptr().cast()
    }
}

/// The address of the `n` elements at `p` in contiguous memory: `p` itself if `stride` is 1, otherwise that of a copy
/// in `block`. For a copy, `n` must be at most [`BLOCK`].
/// # Safety: the elements are readable.
#[inline(always)]
unsafe fn gather<T: SimdElement>(
    p: *const T,
    stride: isize,
    n: usize,
    block: &mut Block,
) -> *const T {
    if stride == 1 {
        return p;
    }
    assert!(n <= BLOCK);
    let to = block.as_mut_ptr::<T>();
    for i in 0..n {
        // SAFETY: readable by this function's contract; the block has room for n elements.
        unsafe { to.add(i).write(p.offset(i as isize * stride).read()) };
    }
    to
}

/// Copies the `n` elements of `block` to `p`. If `stride` is 1 it does nothing, because the results were written to `p`
/// directly.
/// # Safety: the elements are writable, and `block` holds as many.
#[inline(always)]
unsafe fn scatter<T: SimdElement>(p: *mut T, stride: isize, n: usize, block: &mut Block) {
    if stride == 1 {
        return;
    }
    assert!(n <= BLOCK);
    let from = block.as_mut_ptr::<T>();
    for i in 0..n {
        // SAFETY: writable by this function's contract; the block holds n elements.
        unsafe { p.offset(i as isize * stride).write(from.add(i).read()) };
    }
}

/// A vector of the `n` elements at `p`, zero beyond. # Safety: they are readable.
#[inline(always)]
unsafe fn load<S: Simd, T: SimdElement>(s: S, p: *const T, n: usize) -> S::F32 {
    // SAFETY: passed on.
    unsafe { if n == S::LANES { T::load(s, p) } else { T::load_first(s, p, n) } }
}

/// Stores the first `n` lanes at `p`. # Safety: they are writable.
#[inline(always)]
unsafe fn store<S: Simd, T: SimdElement>(s: S, p: *mut T, v: S::F32, n: usize) {
    // SAFETY: passed on.
    unsafe { if n == S::LANES { T::store(s, p, v) } else { T::store_first(s, p, v, n) } }
}

/// Strides of the bias seen as a tensor of the input's shape.
fn bias_strides(rank: usize, stride: Option<isize>) -> [isize; crate::MAX_RANK] {
    let mut strides = [0; crate::MAX_RANK];
    if let (Some(stride), Some(last)) = (stride, rank.checked_sub(1)) {
        strides[last] = stride;
    }
    strides
}
