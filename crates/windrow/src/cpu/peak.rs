//! Measurements of the machine's peak arithmetic rate and copy bandwidth, which benchmarks use as limits.

use super::{Isa, Kernel, SendPtr, Simd, dispatch, parallel_for};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// The number of independent chains of multiply-adds: more than latency times throughput of any current core (4 cycles
/// x 2 per cycle), and few enough for 16 registers.
const CHAINS: usize = 12;

/// The measured peak rate of f32 multiply-adds, of `threads` threads together and with the fastest instruction set, in
/// GFLOP/s (a multiply-add counts 2). Takes about 0.2 s.
///
/// ```
/// let peak = windrow::cpu::peak_gflops(1);
/// assert!(peak > 0.1, "{peak}");
/// ```
pub fn peak_gflops(threads: usize) -> f64 {
    const STEPS: usize = 200_000;
    let lanes = dispatch(Isa::best(), Lanes);
    let flops = (2 * CHAINS * lanes * STEPS * threads) as f64;
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    // Many short runs: the fastest one is undisturbed and at full clock.
    while begin.elapsed() < Duration::from_millis(200) {
        let start = Instant::now();
        parallel_for(threads, threads, |_| {
            black_box(dispatch(Isa::best(), MultiplyAdds { steps: black_box(STEPS) }));
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    flops / best / 1e9
}

/// Copies `from` to the beginning of `to` on `threads` threads. Its speed is the upper bound for an operator that reads
/// and writes as many bytes.
///
/// # Panics
/// If `to` is shorter than `from`.
pub fn copy(threads: usize, from: &[u8], to: &mut [u8]) {
    let part = from.len().div_ceil(threads.max(1)).next_multiple_of(64).max(64);
    let to = SendPtr(to[..from.len()].as_mut_ptr());
    parallel_for(threads, from.len().div_ceil(part), |i| {
        let start = i * part;
        let from = &from[start..(start + part).min(from.len())];
        // SAFETY: `to` is as long as all parts together, and each task writes its own.
        unsafe { to.get().add(start).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
    });
}

struct Lanes;
impl Kernel for Lanes {
    type Output = usize;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::LANES
    }
}

struct MultiplyAdds {
    steps: usize,
}

impl Kernel for MultiplyAdds {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let (a, b) = (s.splat(black_box(0.5)), s.splat(black_box(1.0)));
        let mut chains = [s.zero(); CHAINS];
        for _ in 0..self.steps {
            for c in &mut chains {
                *c = s.mul_add(*c, a, b);
            }
        }
        chains.into_iter().map(|c| s.reduce_add(c)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_converge_to_two() {
        for isa in Isa::available() {
            let sum = dispatch(isa, MultiplyAdds { steps: 100 });
            assert_eq!(sum % 2.0, 0.0);
            assert!(sum >= 2.0 * CHAINS as f32, "{sum}");
        }
    }

    #[test]
    fn copy_copies_any_length() {
        for (len, threads) in [(0, 1), (1, 4), (1000, 3), (1000, 0)] {
            let from: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let mut to = vec![0xffu8; len + 1];
            copy(threads, &from, &mut to);
            assert_eq!(to[..len], from);
            assert_eq!(to[len], 0xff);
        }
    }
}
