//! `y = gelu(x + bias) * gate`

use super::nest::Nest;
use super::table::{self, Tail};
use super::{BLOCK, Bias, Block, PARALLEL_FROM, bias_strides, gather, load, scatter, store};
use crate::cpu::{Isa, Kernel, SendPtr, Simd, SimdElement, dispatch, parallel_for};
use crate::dtype::with_element;
use crate::gelu::{GeluArgs, GeluSpec};
use crate::{Approximate, MAX_RANK, TensorMut};

/// The smallest number of elements of a parallel task. It is a whole number of memory pages.
const TASK: usize = 16 << 10;

/// Outputs of at least this many bytes are written with non-temporal stores, which bypass the cache. The cache could
/// not hold them until they are read again, and the CPU need not read each line before it is written.
const STREAM_FROM: usize = 24 << 20;

/// Runs a checked plan. `args` fit `spec`.
pub(in crate::gelu) fn forward(
    isa: Isa,
    threads: usize,
    spec: &GeluSpec,
    batch_invariant: bool,
    args: &GeluArgs<'_>,
    y: TensorMut<'_>,
) {
    let limit = table::limit(batch_invariant);
    let zero = [0; MAX_RANK];
    let shape = spec.x.shape();
    let zero = &zero[..shape.len()];
    let bias = bias_strides(shape.len(), spec.bias.as_ref().map(|b| b.strides()[0]));
    let nest = Nest::new(
        shape,
        [
            spec.y.strides(),
            spec.x.strides(),
            spec.gate.as_ref().map_or(zero, |g| g.strides()),
            &bias[..shape.len()],
        ],
    );
    with_element!(spec.x.dtype, T => match spec.approximate {
        Approximate::None => run::<T, false>(isa, threads, &nest, limit, args, y),
        Approximate::Tanh => run::<T, true>(isa, threads, &nest, limit, args, y),
    })
}

fn run<T: SimdElement, const TANH: bool>(
    isa: Isa,
    threads: usize,
    nest: &Nest<4>,
    limit: f32,
    args: &GeluArgs<'_>,
    mut y: TensorMut<'_>,
) {
    // In place the line is in the cache anyway.
    let stream = y.layout().len() * size_of::<T>() >= STREAM_FROM && y.as_ptr() != args.x.as_ptr();
    let y = SendPtr(y.as_mut_ptr().cast::<T>());
    let len = nest.len();
    let threads = if len * size_of::<T>() < PARALLEL_FROM { 1 } else { threads };
    // A few tasks for each thread, so that a late one does not hold up the others.
    let task = if threads == 1 { len } else { (len / (4 * threads)).next_multiple_of(TASK) };
    parallel_for(threads, len.div_ceil(task.max(1)), |i| {
        let kernel = Forward::<T, TANH> {
            nest,
            limit,
            tail: Tail::of::<T>(if TANH { Approximate::Tanh } else { Approximate::None }),
            x: args.x.as_ptr().cast(),
            bias: Bias::of(args.bias.as_ref()),
            gate: args.gate.map_or(std::ptr::null(), |g| g.as_ptr().cast()),
            y: y.get(),
            begin: i * task,
            end: ((i + 1) * task).min(len),
            stream,
        };
        dispatch(isa, kernel);
    });
}

/// The elements `begin..end` of a nest over (y, x, gate, bias).
struct Forward<'a, T, const TANH: bool> {
    nest: &'a Nest<4>,
    /// As [`table::limit`] gives it.
    limit: f32,
    tail: &'static Tail,
    x: *const T,
    bias: Bias<T>,
    /// Null if there is none.
    gate: *const T,
    y: *mut T,
    begin: usize,
    end: usize,
    /// True to use non-temporal stores.
    stream: bool,
}

impl<T: SimdElement, const TANH: bool> Kernel for Forward<'_, T, TANH> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let table = self.tail.load(s);
        let [y_stride, x_stride, gate_stride, bias_stride] = self.nest.inner_strides();
        let contiguous = y_stride == 1
            && x_stride == 1
            && (self.gate.is_null() || gate_stride == 1)
            && (matches!(self.bias, Bias::None) || bias_stride == 1);
        let (mut xs, mut biases, mut gates, mut ys) =
            (Block::new(), Block::new(), Block::new(), Block::new());
        for ([y, x, gate, bias], run) in self.nest.runs(self.begin, self.end) {
            let block = if contiguous { run } else { BLOCK };
            for begin in (0..run).step_by(block) {
                let n = block.min(run - begin);
                let at = |offset: isize, stride: isize| offset + begin as isize * stride;
                // SAFETY: the nest visits elements of the operands, whose strides it was made from;
                // y's elements belong to this task alone. Null pointers are not read.
                unsafe {
                    let to = self.y.offset(at(y, y_stride));
                    let gate = if self.gate.is_null() {
                        self.gate
                    } else {
                        gather(self.gate.offset(at(gate, gate_stride)), gate_stride, n, &mut gates)
                    };
                    let row = Row::<T, TANH> {
                        limit: self.limit,
                        x: gather(self.x.offset(at(x, x_stride)), x_stride, n, &mut xs),
                        bias: self.bias.block(at(bias, bias_stride), bias_stride, n, &mut biases),
                        gate,
                        y: if y_stride == 1 { to } else { ys.as_mut_ptr() },
                    };
                    if self.stream && y_stride == 1 && !S::IS_SMALL {
                        row.run::<S, true>(s, &table, n);
                    } else {
                        row.run::<S, false>(s, &table, n);
                    }
                    scatter(to, y_stride, n, &mut ys);
                }
            }
        }
        if self.stream {
            s.stream_fence();
        }
    }
}

/// Contiguous elements.
struct Row<T, const TANH: bool> {
    limit: f32,
    x: *const T,
    bias: Bias<T>,
    gate: *const T,
    y: *mut T,
}

impl<T: SimdElement, const TANH: bool> Row<T, TANH> {
    /// # Safety
    /// `n` elements of each operand are readable, those of `y` writable.
    #[inline(always)]
    unsafe fn run<S: Simd, const STREAM: bool>(
        &self,
        s: S,
        table: &[S::Table; table::TERMS],
        n: usize,
    ) {
        let pair = 2 * S::LANES;
        let mut i = 0;
        // SAFETY: passed on; streaming begins where y is aligned.
        unsafe {
            if !matches!(self.bias, Bias::F32(_)) && !S::IS_SMALL {
                if STREAM {
                    let beyond = self.y.addr() % (pair * size_of::<T>()) / size_of::<T>();
                    let ahead = ((pair - beyond) % pair).min(n);
                    while i < ahead {
                        let n = S::LANES.min(ahead - i);
                        self.vector(s, table, i, n);
                        i += n;
                    }
                }
                while i + pair <= n {
                    self.pair::<S, STREAM>(s, table, i);
                    i += pair;
                }
            }
            while i < n {
                let n = S::LANES.min(n - i);
                self.vector(s, table, i, n);
                i += n;
            }
        }
    }

    /// Elements `i..i + 2 LANES`.
    #[inline(always)]
    unsafe fn pair<S: Simd, const STREAM: bool>(
        &self,
        s: S,
        table: &[S::Table; table::TERMS],
        i: usize,
    ) {
        // SAFETY: passed on.
        unsafe {
            let x = self.bias.add2(s, T::load2(s, self.x.add(i)), i);
            let mut y = x;
            if table::beyond(s, self.limit, x) {
                // Otherwise the registers that it needs would push the tables out.
                crate::cpu::seldom();
                for y in &mut y {
                    *y = table::exponentials::<S, TANH>(s, *y);
                }
                self.store_pair::<S, STREAM, false>(s, i, y);
            } else {
                for y in &mut y {
                    *y = table::within::<S, T>(s, table, *y);
                }
                self.store_pair::<S, STREAM, true>(s, i, y);
            }
        }
    }

    /// Stores two vectors. With `NUMBERS` no element of `y` may be NaN, and a value halfway between two numbers of the
    /// type may be rounded away from zero.
    #[inline(always)]
    unsafe fn store_pair<S: Simd, const STREAM: bool, const NUMBERS: bool>(
        &self,
        s: S,
        i: usize,
        mut y: [S::F32; 2],
    ) {
        // SAFETY: passed on.
        unsafe {
            if !self.gate.is_null() {
                let gate = T::load2(s, self.gate.add(i));
                y = [s.mul(y[0], gate[0]), s.mul(y[1], gate[1])];
            } else if NUMBERS {
                return T::store2_numbers::<S, STREAM>(s, self.y.add(i), y);
            }
            T::store2::<S, STREAM>(s, self.y.add(i), y);
        }
    }

    /// Elements `i..i + n`.
    #[inline(always)]
    unsafe fn vector<S: Simd>(&self, s: S, table: &[S::Table; table::TERMS], i: usize, n: usize) {
        // SAFETY: passed on.
        unsafe {
            let x = self.bias.add(s, load(s, self.x.add(i), n), i, n);
            let mut y = if table::beyond(s, self.limit, [x]) {
                crate::cpu::seldom();
                table::exponentials::<S, TANH>(s, x)
            } else {
                table::within::<S, T>(s, table, x)
            };
            if !self.gate.is_null() {
                y = s.mul(y, load(s, self.gate.add(i), n));
            }
            store(s, self.y.add(i), y, n);
        }
    }
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use super::*;
    use crate::cpu::compiled::assert_in_registers;

    #[test]
    #[cfg_attr(debug_assertions, ignore = "of a release build")]
    fn sums_stay_in_registers() {
        assert_in_registers::<Forward<'static, f32, false>>([0, 0]);
        assert_in_registers::<Forward<'static, f32, true>>([1, 0]);
    }
}
