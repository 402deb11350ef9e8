//! The gradients of `x`, `gate` and `bias` in one pass.
//!
//! The gradient of the bias sums over all dimensions except the last. The work is divided by the shape only, not by the
//! number of threads. The last dimension is divided into ranges, and the other dimensions of each range into parts.
//! Each part has its own partial sums. They are compensated (Kahan), so that the error does not grow with the number of
//! terms. At the end they are added in a fixed order. So the result has the same bits for any number of threads.

use super::nest::Nest;
use super::{BLOCK, Bias, Block, PARALLEL_FROM, bias_strides, gather, load, scatter, store};
use crate::cpu::math::{activate, activate_grad};
use crate::cpu::{Isa, Kernel, SendPtr, Simd, SimdElement, array, dispatch, parallel_for};
use crate::dtype::with_element;
use crate::gelu::{GeluArgs, GeluGrads, GeluSpec};
use crate::{Activation, Approximate, DType, MAX_RANK, Result, TensorRef, Workspace};

/// The division of a backward pass into tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gelu) struct Partition {
    /// Length of the last dimension.
    last: usize,
    /// Elements of the last dimension in a range.
    range: usize,
    /// Parts that a range is cut into.
    parts: usize,
}

impl Partition {
    /// About this many tasks, if there is work for them.
    const TASKS: usize = 64;
    /// The smallest number of elements of a task.
    const TASK: usize = 16 << 10;
    /// The smallest number of elements of the last dimension in a range: whole pages.
    const RANGE: usize = 2048;

    pub(in crate::gelu) fn new(shape: &[usize]) -> Self {
        let len: usize = shape.iter().product();
        let last = shape.last().copied().unwrap_or(1);
        let tasks = (len / Self::TASK).clamp(1, Self::TASKS);
        let range = last.div_ceil(tasks).next_multiple_of(Self::RANGE).min(last).max(1);
        let parts = (tasks / last.div_ceil(range).max(1)).max(1);
        Partition { last, range, parts }
    }

    /// Bytes of the partial sums of the bias gradient: for each part a sum and its compensation.
    pub(in crate::gelu) fn workspace_bytes(&self) -> usize {
        self.parts * 2 * self.last * size_of::<f32>()
    }
}

/// Runs a checked plan. `args`, `dy` and `grads` fit `spec`; the workspace is large enough.
pub(in crate::gelu) fn backward(
    isa: Isa,
    threads: usize,
    spec: &GeluSpec,
    args: &GeluArgs<'_>,
    dy: &TensorRef<'_>,
    grads: GeluGrads<'_>,
    workspace: &mut Workspace,
) -> Result<()> {
    with_element!(spec.x.dtype, T => run::<T>(isa, threads, spec, args, dy, grads, workspace))
}

fn run<T: SimdElement>(
    isa: Isa,
    threads: usize,
    spec: &GeluSpec,
    args: &GeluArgs<'_>,
    dy: &TensorRef<'_>,
    mut grads: GeluGrads<'_>,
    workspace: &mut Workspace,
) -> Result<()> {
    let shape = spec.x.shape();
    let partition = Partition::new(shape);
    let Partition { last, range, parts } = partition;
    let sums = match &grads.dbias {
        None => SendPtr(std::ptr::null_mut()),
        Some(_) => {
            let bytes = workspace.take(partition.workspace_bytes())?;
            bytes.fill(0);
            SendPtr(bytes.as_mut_ptr().cast::<f32>())
        }
    };
    let zero = [0; MAX_RANK];
    let zero = &zero[..shape.len()];
    let bias = bias_strides(shape.len(), spec.bias.as_ref().map(|b| b.strides()[0]));
    let sum = bias_strides(shape.len(), grads.dbias.as_ref().map(|_| 1));
    let dx_layout = grads.dx.as_ref().map(|t| *t.layout());
    let dgate_layout = grads.dgate.as_ref().map(|t| *t.layout());
    let operands = [
        dx_layout.as_ref().map_or(zero, |l| l.strides()),
        dy.strides(),
        args.x.strides(),
        dgate_layout.as_ref().map_or(zero, |l| l.strides()),
        args.gate.as_ref().map_or(zero, |t| t.strides()),
        &bias[..shape.len()],
        &sum[..shape.len()],
    ];
    let mut shape_of_range = [1; MAX_RANK];
    shape_of_range[..shape.len()].copy_from_slice(shape);
    let nest_of = |n: usize| {
        let mut shape_of_range = shape_of_range;
        if let Some(d) = shape.len().checked_sub(1) {
            shape_of_range[d] = n;
        }
        Nest::new(&shape_of_range[..shape.len()], operands)
    };
    let steps = operands.map(|strides| strides.last().copied().unwrap_or(0));
    let dx =
        SendPtr(grads.dx.as_mut().map_or(std::ptr::null_mut(), |t| t.as_mut_ptr().cast::<T>()));
    let dgate =
        SendPtr(grads.dgate.as_mut().map_or(std::ptr::null_mut(), |t| t.as_mut_ptr().cast::<T>()));
    let threads = if spec.x.bytes() < PARALLEL_FROM { 1 } else { threads };
    parallel_for(threads, last.div_ceil(range) * parts, |task| {
        let (first, part) = (task / parts * range, task % parts);
        let nest = nest_of(range.min(last - first));
        let per_part = nest.len().div_ceil(parts);
        let kernel = Backward::<T> {
            nest: &nest,
            approximate: spec.approximate,
            first: steps.map(|step| step * first as isize),
            dx: dx.get(),
            dy: dy.as_ptr().cast(),
            x: args.x.as_ptr().cast(),
            dgate: dgate.get(),
            gate: args.gate.map_or(std::ptr::null(), |g| g.as_ptr().cast()),
            bias: Bias::of(args.bias.as_ref()),
            sums: if sums.get().is_null() {
                sums.get()
            } else {
                // SAFETY: the workspace holds `parts` pairs of rows of `last` elements.
                unsafe { sums.get().add(part * 2 * last) }
            },
            last,
            begin: (part * per_part).min(nest.len()),
            end: ((part + 1) * per_part).min(nest.len()),
        };
        dispatch(isa, kernel);
    });
    if let Some(mut dbias) = grads.dbias {
        let stride = dbias.strides()[0];
        for i in 0..last {
            let mut total = 0.0;
            for part in 0..parts {
                // SAFETY: the workspace holds `parts` pairs of rows; the tasks that wrote them have ended.
                let (sum, lost) = unsafe {
                    let row = sums.get().add(part * 2 * last);
                    (*row.add(i), *row.add(last + i))
                };
                total += f64::from(sum) - f64::from(lost);
            }
            let offset = i as isize * stride;
            // SAFETY: element i of a checked tensor; its type was checked to be f32 or T.
            unsafe {
                if dbias.dtype() == DType::F32 {
                    dbias.as_mut_ptr().cast::<f32>().offset(offset).write(total as f32);
                } else {
                    dbias.as_mut_ptr().cast::<T>().offset(offset).write(T::from_f64(total));
                }
            }
        }
    }
    Ok(())
}

/// The kernel for the elements `begin..end` of a loop nest over (dx, dy, x, dgate, gate, bias, sums). Absent operands
/// are null.
struct Backward<'a, T> {
    nest: &'a Nest<7>,
    approximate: Approximate,
    /// Offset in each operand of the nest's first element.
    first: [isize; 7],
    dx: *mut T,
    dy: *const T,
    x: *const T,
    dgate: *mut T,
    gate: *const T,
    bias: Bias<T>,
    /// A row of `last` sums and a row of their compensations, for this task alone.
    sums: *mut f32,
    last: usize,
    begin: usize,
    end: usize,
}

impl<T: SimdElement> Kernel for Backward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.approximate {
            Approximate::None => self.nest::<S, false>(s),
            Approximate::Tanh => self.nest::<S, true>(s),
        }
    }
}

impl<T: SimdElement> Backward<'_, T> {
    #[inline(always)]
    fn nest<S: Simd, const TANH: bool>(&self, s: S) {
        let strides = self.nest.inner_strides();
        let [dx_stride, dy_stride, x_stride, dgate_stride, gate_stride, bias_stride, _] = strides;
        let mut blocks: [Block; 7] = array(|_| Block::new());
        let [dxs, dys, xs, dgates, gates, biases, slopes] = &mut blocks;
        for (offsets, run) in self.nest.runs(self.begin, self.end) {
            for begin in (0..run).step_by(BLOCK) {
                let n = BLOCK.min(run - begin);
                let at: [isize; 7] =
                    array(|k| self.first[k] + offsets[k] + begin as isize * strides[k]);
                // SAFETY: the nest visits elements of the operands, whose strides it was made from;
                // those of outputs belong to this task alone. Absent operands are not touched.
                unsafe {
                    let row = Row::<T, TANH> {
                        dx: target(self.dx, at[0], dx_stride, dxs),
                        dy: gather(self.dy.offset(at[1]), dy_stride, n, dys),
                        x: gather(self.x.offset(at[2]), x_stride, n, xs),
                        dgate: target(self.dgate, at[3], dgate_stride, dgates),
                        gate: if self.gate.is_null() {
                            self.gate
                        } else {
                            gather(self.gate.offset(at[4]), gate_stride, n, gates)
                        },
                        bias: self.bias.block(at[5], bias_stride, n, biases),
                        slopes: slopes.as_mut_ptr(),
                    };
                    row.run(s, n);
                    if !self.dx.is_null() {
                        scatter(self.dx.offset(at[0]), dx_stride, n, dxs);
                    }
                    if !self.dgate.is_null() {
                        scatter(self.dgate.offset(at[3]), dgate_stride, n, dgates);
                    }
                    if !self.sums.is_null() {
                        let sums = self.sums.offset(at[6]);
                        if strides[6] == 1 {
                            self.add_each(s, sums, row.slopes, n);
                        } else {
                            self.add_all(s, sums, row.slopes, n);
                        }
                    }
                }
            }
        }
    }

    /// Adds `n` terms to `n` sums (Kahan). # Safety: the sums and their compensations, `last` further on, belong to
    /// this task; the terms are readable.
    #[inline(always)]
    unsafe fn add_each<S: Simd>(&self, s: S, sums: *mut f32, terms: *const f32, n: usize) {
        for i in (0..n).step_by(S::LANES) {
            let n = S::LANES.min(n - i);
            // SAFETY: by this function's contract.
            unsafe {
                let (sum_at, lost_at) = (sums.add(i), sums.add(self.last + i));
                let sum = load(s, sum_at, n);
                let term = s.sub(load(s, terms.add(i), n), load(s, lost_at, n));
                let new = s.add(sum, term);
                let lost = s.sub(s.sub(new, sum), term);
                // The compensation of an infinite sum is zero.
                let finite = s.lt(s.abs(lost), s.splat(f32::INFINITY));
                store(s, lost_at, s.select(finite, lost, s.zero()), n);
                store(s, sum_at, new, n);
            }
        }
    }

    /// Adds `n` terms to one sum. # Safety: as for [`Self::add_each`].
    #[inline(always)]
    unsafe fn add_all<S: Simd>(&self, s: S, sum: *mut f32, terms: *const f32, n: usize) {
        let mut total = s.zero();
        for i in (0..n).step_by(S::LANES) {
            // SAFETY: by this function's contract.
            total = s.add(total, unsafe { load(s, terms.add(i), S::LANES.min(n - i)) });
        }
        let total = s.reduce_add(total);
        // SAFETY: one sum, one term.
        unsafe { self.add_each(s, sum, &total, 1) };
    }
}

/// The address to which results are written: `p` plus the offset if `stride` is 1, otherwise that of `block`. A null
/// `p` stays null.
/// # Safety: `p` is null or the offset lies in its tensor.
#[inline(always)]
unsafe fn target<T: SimdElement>(
    p: *mut T,
    offset: isize,
    stride: isize,
    block: &mut Block,
) -> *mut T {
    match p.is_null() {
        true => p,
        // SAFETY: by this function's contract.
        false if stride == 1 => unsafe { p.offset(offset) },
        false => block.as_mut_ptr(),
    }
}

/// Contiguous elements; null if an operand is absent.
struct Row<T, const TANH: bool> {
    dx: *mut T,
    dy: *const T,
    x: *const T,
    dgate: *mut T,
    gate: *const T,
    bias: Bias<T>,
    /// The gradient of the sum `x + bias`, not rounded to T.
    slopes: *mut f32,
}

impl<T: SimdElement, const TANH: bool> Row<T, TANH> {
    /// # Safety
    /// `n` elements of each operand that is not null are readable, or writable.
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, s: S, n: usize) {
        let form = Activation::Gelu(if TANH { Approximate::Tanh } else { Approximate::None });
        for i in (0..n).step_by(S::LANES) {
            let n = S::LANES.min(n - i);
            // SAFETY: by this function's contract.
            unsafe {
                let x = self.bias.add(s, load(s, self.x.add(i), n), i, n);
                let dy = load(s, self.dy.add(i), n);
                let mut slope = s.mul(dy, activate_grad(s, form, x));
                if !self.gate.is_null() {
                    slope = s.mul(slope, load(s, self.gate.add(i), n));
                }
                store(s, self.slopes.add(i), slope, n);
                if !self.dx.is_null() {
                    store(s, self.dx.add(i), slope, n);
                }
                if !self.dgate.is_null() {
                    let y = activate(s, form, x);
                    store(s, self.dgate.add(i), s.mul(dy, y), n);
                }
            }
        }
    }
}
