//! The inner loops, each a kernel of its own, compiled for each instruction set, element type and width.

use super::operand::Staged;
use super::store::{Sum, store, store_all};
use crate::cpu::{Kernel, Simd, SimdElement};

/// Tokens that [`along_channels`] computes at once where there are several, so that each is loaded
/// once for all taps.
pub(crate) const TOKENS: usize = 4;

/// Vectors that the loops take at once. A pair of bf16 vectors is taken apart and put together with fewer shuffles than
/// two vectors, and a pair of f16 or bf16 vectors fills a line of the cache.
const fn vectors<S: Simd, T: SimdElement>(elements: usize) -> usize {
    if size_of::<T>() == 2 && S::REGISTERS >= 32 && elements >= 2 * S::LANES { 2 } else { 1 }
}

/// `V` vectors from `x`, in the order of [`store`].
///
/// # Safety
/// `V * LANES` elements are readable at `x`.
#[inline(always)]
unsafe fn load<S: Simd, T: SimdElement, const V: usize>(s: S, x: *const T) -> [S::F32; V] {
    // SAFETY: promised by the caller.
    unsafe {
        if V == 2 {
            let [first, second] = T::load2(s, x);
            let mut v = [first; V];
            v[V - 1] = second;
            v
        } else {
            [T::load(s, x); V]
        }
    }
}

/// `V` vectors of parameters from `p`, in the order of elements of type T.
///
/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn load_parameters<S: Simd, T: SimdElement, const V: usize>(
    s: S,
    p: *const f32,
) -> [S::F32; V] {
    // SAFETY: promised by the caller.
    unsafe {
        if V == 2 {
            let [first, second] = T::order2(s, [s.load(p), s.load(p.add(S::LANES))]);
            let mut v = [first; V];
            v[V - 1] = second;
            v
        } else {
            [s.load(p); V]
        }
    }
}

/// The kernel of a width without dilation, or of any: `$kernel<T, W>` or `$kernel<T, W, N>`.
macro_rules! of_width {
    ($s:expr, $sum:expr, $kernel:ident<$t:ty $(, $n:ident)?> $fields:tt) => {
        match if $sum.dilation > 1 { 0 } else { $sum.width } {
            2 if !S::IS_SMALL => $s.outlined($kernel::<$t, 2 $(, $n)?> $fields),
            3 if !S::IS_SMALL => $s.outlined($kernel::<$t, 3 $(, $n)?> $fields),
            4 if !S::IS_SMALL => $s.outlined($kernel::<$t, 4 $(, $n)?> $fields),
            _ => $s.outlined($kernel::<$t, 0 $(, $n)?> $fields),
        }
    };
}

/// `n >= LANES` tokens, neighbours in memory, of the first `channels` of `staged`. `x` and `y` are the first channel's, x at
/// the history of its first token, and the distance of channels.
///
/// # Safety
/// Of each channel `n + (width - 1) * dilation` elements are readable from `x` on and `n` writable from `y` on.
#[inline(always)]
pub(crate) unsafe fn along_tokens<S: Simd, T: SimdElement>(
    s: S,
    sum: Sum,
    x: (*const T, isize),
    y: (*mut T, isize),
    (n, channels): (usize, usize),
    staged: &Staged,
) {
    of_width!(s, sum, AlongTokens<T> { sum, x, y, n, channels, staged });
}

/// [`along_tokens`] for one width. The caller guarantees that the pointers are valid.
struct AlongTokens<'a, T, const W: usize> {
    sum: Sum,
    x: (*const T, isize),
    y: (*mut T, isize),
    n: usize,
    channels: usize,
    staged: &'a Staged,
}

impl<T: SimdElement, const W: usize> Kernel for AlongTokens<'_, T, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let AlongTokens { sum, x, y, n, channels, staged } = self;
        for c in 0..channels {
            let x = x.0.wrapping_offset(c as isize * x.1);
            let y = y.0.wrapping_offset(c as isize * y.1);
            let staged = &staged.from(c);
            // SAFETY: promised by the caller; `n` is at least that many vectors.
            unsafe {
                match (vectors::<S, T>(n), sum.is_silu()) {
                    (2, true) => along_tokens_by::<S, T, W, 2, true>(s, sum, x, y, n, staged),
                    (2, false) => along_tokens_by::<S, T, W, 2, false>(s, sum, x, y, n, staged),
                    (_, true) => along_tokens_by::<S, T, W, 1, true>(s, sum, x, y, n, staged),
                    (_, false) => along_tokens_by::<S, T, W, 1, false>(s, sum, x, y, n, staged),
                }
            }
        }
    }
}

/// `V` vectors of a channel at once, and several times as many where there are, so that their activations overlap.
#[inline(always)]
unsafe fn along_tokens_by<
    S: Simd,
    T: SimdElement,
    const W: usize,
    const V: usize,
    const SILU: bool,
>(
    s: S,
    sum: Sum,
    x: *const T,
    y: *mut T,
    n: usize,
    staged: &Staged,
) {
    let step = V * S::LANES;
    // Sixteen registers do not hold four sums and SiLU's constants.
    let several = if SILU && S::REGISTERS < 32 { 2 } else { 4 };
    // SAFETY: promised by the caller; `i` stays at most n - step, and with several steps at most n less these.
    unsafe {
        let bias = s.splat(*staged.bias);
        let mut taps = [s.zero(); W];
        for (k, tap) in taps.iter_mut().enumerate() {
            *tap = s.splat(*staged.weight.add(k * staged.stride));
        }
        let parameters = (bias, &taps, staged);
        let mut i = 0;
        loop {
            let (x, to) = (x.add(i), y.add(i));
            let misaligned = to.addr() / size_of::<T>() % step;
            // Pairs of sums without an activation are bound by their loads, and other widths are rare.
            let gains = W > 0 && (SILU || V == 1);
            let fit = gains && misaligned == 0 && i + several * step <= n;
            let count = if fit { several } else { 1 };
            match count {
                1 => steps::<S, T, W, V, 1, SILU>(s, sum, x, to, parameters),
                2 => steps::<S, T, W, V, 2, SILU>(s, sum, x, to, parameters),
                _ => steps::<S, T, W, V, 4, SILU>(s, sum, x, to, parameters),
            }
            if i + count * step >= n {
                break;
            }
            // Vectors after the first are aligned, the first and the last overlap their neighbours
            // and write the same values again.
            i = (i + count * step - misaligned).min(n - step);
        }
    }
}

/// `N` times `V` vectors of a channel from x's first history on. The parameters are the bias, and the filter's taps as
/// vectors and where they lie.
///
/// # Safety
/// `N * V * LANES + (width - 1) * dilation` elements are readable at `x` and `N * V * LANES` writable at `y`.
#[inline(always)]
unsafe fn steps<
    S: Simd,
    T: SimdElement,
    const W: usize,
    const V: usize,
    const N: usize,
    const SILU: bool,
>(
    s: S,
    sum: Sum,
    x: *const T,
    y: *mut T,
    (bias, taps, staged): (S::F32, &[S::F32; W], &Staged),
) {
    let (width, dilation) = if W > 0 { (W, 1) } else { (sum.width, sum.dilation) };
    let step = V * S::LANES;
    // SAFETY: promised by the caller.
    unsafe {
        let mut sums = [[bias; V]; N];
        for k in 0..width {
            let tap = match taps.get(k) {
                Some(tap) => *tap,
                None => s.splat(*staged.weight.add(k * staged.stride)),
            };
            for (i, sums) in sums.iter_mut().enumerate() {
                let x = load::<S, T, V>(s, x.add(i * step + k * dilation));
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = s.mul_add(tap, x[v], *sum);
                }
            }
        }
        store_all::<S, T, V, N, SILU>(s, sum, sum.stream, (y, step as isize), &mut sums);
    }
}

/// `n` tokens of `channels >= LANES` channels, neighbours in memory; `x` is at the history of the first
/// token. `N` tokens are computed at once.
///
/// # Safety
/// `max(n, N) + (width - 1) * dilation` tokens are readable at `x` and `max(n, N)` writable at `y`, `staged` holds the
/// channels.
#[inline(always)]
pub(crate) unsafe fn along_channels<S: Simd, T: SimdElement, const N: usize>(
    s: S,
    sum: Sum,
    x: (*const T, isize),
    y: (*mut T, isize),
    shape: (usize, usize),
    staged: &Staged,
) {
    of_width!(s, sum, AlongChannels<T, N> { sum, x, y, shape, staged });
}

/// [`along_channels`] for one width. The caller guarantees that the pointers are valid.
struct AlongChannels<'a, T, const W: usize, const N: usize> {
    sum: Sum,
    x: (*const T, isize),
    y: (*mut T, isize),
    shape: (usize, usize),
    staged: &'a Staged,
}

impl<T: SimdElement, const W: usize, const N: usize> Kernel for AlongChannels<'_, T, W, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let AlongChannels { sum, x, y, shape, staged } = self;
        // SAFETY: promised by the caller; there are at least that many vectors of channels.
        unsafe {
            match (vectors::<S, T>(shape.1), sum.is_silu()) {
                (2, true) => along_channels_by::<S, T, W, N, 2, true>(s, sum, x, y, shape, staged),
                (2, false) => {
                    along_channels_by::<S, T, W, N, 2, false>(s, sum, x, y, shape, staged)
                }
                (_, true) => along_channels_by::<S, T, W, N, 1, true>(s, sum, x, y, shape, staged),
                (_, false) => {
                    along_channels_by::<S, T, W, N, 1, false>(s, sum, x, y, shape, staged)
                }
            }
        }
    }
}

/// [`along_channels`], `V` vectors at once.
#[inline(always)]
unsafe fn along_channels_by<
    S: Simd,
    T: SimdElement,
    const W: usize,
    const N: usize,
    const V: usize,
    const SILU: bool,
>(
    s: S,
    sum: Sum,
    (x, x_token): (*const T, isize),
    (y, y_token): (*mut T, isize),
    (n, channels): (usize, usize),
    staged: &Staged,
) {
    let (width, dilation) = if W > 0 { (W, 1) } else { (sum.width, sum.dilation) };
    // By value: for all that the compiler knows, a store could change what a reference leads to.
    let staged = *staged;
    let step = V * S::LANES;
    let streams = sum.stream && y_token.unsigned_abs().is_multiple_of(step);
    // SAFETY: promised by the caller; `t` stays at most max(n, N) - N and `c` at most
    // channels - step.
    unsafe {
        let mut t = 0;
        loop {
            let x = x.offset(t as isize * x_token);
            let y = y.offset(t as isize * y_token);
            let mut c = 0;
            loop {
                let mut sums = [load_parameters::<S, T, V>(s, staged.bias.add(c)); N];
                for k in 0..width {
                    let taps = staged.weight.add(k * staged.stride + c);
                    let taps = load_parameters::<S, T, V>(s, taps);
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let token = (i + k * dilation) as isize * x_token;
                        let x = load::<S, T, V>(s, x.offset(token).add(c));
                        for (v, sum) in sums.iter_mut().enumerate() {
                            *sum = s.mul_add(taps[v], x[v], *sum);
                        }
                    }
                }
                store_all::<S, T, V, N, SILU>(s, sum, streams, (y.add(c), y_token), &mut sums);
                if c + step >= channels {
                    break;
                }
                // Overlapping as along tokens.
                c = (c + step).min(channels - step);
            }
            if t + N >= n {
                break;
            }
            t = (t + N).min(n - N);
        }
    }
}

/// A token after a window of `width - 1` tokens, each with its channels as neighbours.
#[derive(Clone, Copy)]
pub(crate) struct Step<T> {
    /// The oldest token, and the distance of tokens.
    pub window: (*const T, isize),
    pub x: *const T,
    /// May be x.
    pub y: *mut T,
    /// The destination of the window that ends with x. It is the window itself, tokens before it, or memory that it
    /// does not share.
    pub next: Option<(*mut T, isize)>,
    /// Window and x of the step that follows: any addresses.
    pub ahead: (*const T, *const T),
}

/// A step of `channels` channels by a filter of width 2, 3 or 4. Those that do not fill a vector are left: how many are
/// done.
///
/// # Safety
/// `width - 1` tokens of the window and of `next`, x and y have the channels, and `staged` holds them; `y` and `next`
/// share no memory with what is read but as [`Step`] allows.
#[inline(always)]
pub(crate) unsafe fn next_token<S: Simd, T: SimdElement>(
    s: S,
    sum: Sum,
    step: Step<T>,
    channels: usize,
    staged: &Staged,
) -> usize {
    match sum.width {
        _ if S::IS_SMALL => 0,
        2 => s.outlined(NextToken::<T, 2> { sum, step, channels, staged }),
        3 => s.outlined(NextToken::<T, 3> { sum, step, channels, staged }),
        4 => s.outlined(NextToken::<T, 4> { sum, step, channels, staged }),
        _ => 0,
    }
}

/// [`next_token`] for one width. The caller guarantees that the pointers are valid.
struct NextToken<'a, T, const W: usize> {
    sum: Sum,
    step: Step<T>,
    channels: usize,
    staged: &'a Staged,
}

impl<T: SimdElement, const W: usize> Kernel for NextToken<'_, T, W> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> usize {
        let NextToken { sum, step, channels, staged } = self;
        let mut done = 0;
        // SAFETY: promised by the caller; vectors end at most with the channels.
        unsafe {
            if vectors::<S, T>(channels) == 2 {
                while done + 2 * S::LANES <= channels {
                    next_token_by::<S, T, W, 2>(s, sum, step, done, staged);
                    done += 2 * S::LANES;
                }
            }
            while done + S::LANES <= channels {
                next_token_by::<S, T, W, 1>(s, sum, step, done, staged);
                done += S::LANES;
            }
        }
        done
    }
}

/// [`next_token`] of `V` vectors from channel `c` on.
#[inline(always)]
unsafe fn next_token_by<S: Simd, T: SimdElement, const W: usize, const V: usize>(
    s: S,
    sum: Sum,
    step: Step<T>,
    c: usize,
    staged: &Staged,
) {
    let (window, window_token) = step.window;
    // The next sequence is at an address that the processor's prefetchers cannot predict.
    for k in 0..W {
        s.prefetch(match k + 1 == W {
            true => step.ahead.1.wrapping_add(c),
            false => step.ahead.0.wrapping_offset(k as isize * window_token).wrapping_add(c),
        });
    }
    // SAFETY: promised by the caller.
    unsafe {
        let token = |k: usize| match k + 1 == W {
            true => step.x.add(c),
            false => window.offset(k as isize * window_token).add(c),
        };
        let mut sums = load_parameters::<S, T, V>(s, staged.bias.add(c));
        for k in 0..W {
            let taps = load_parameters::<S, T, V>(s, staged.weight.add(k * staged.stride + c));
            let x = load::<S, T, V>(s, token(k));
            for (v, sum) in sums.iter_mut().enumerate() {
                *sum = s.mul_add(taps[v], x[v], *sum);
            }
        }
        if let Some((next, next_token)) = step.next {
            // The oldest first: each token moves to where an older one was.
            for k in 1..W {
                let to = next.offset((k as isize - 1) * next_token).add(c);
                std::ptr::copy(token(k), to, V * S::LANES);
            }
        }
        match sum.is_silu() {
            true => store::<S, T, V, true>(s, sum, step.y.add(c), sums),
            false => store::<S, T, V, false>(s, sum, step.y.add(c), sums),
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
        // Loops along channels call rare activations.
        assert_in_registers::<AlongTokens<'static, f32, 4>>([0, 0]);
        assert_in_registers::<NextToken<'static, f32, 4>>([0, 0]);
    }
}
