//! Random decisions.

use std::ops::RangeInclusive;

/// The source of the random decisions of a test case: a seed, or the bytes of a fuzzer or a property test. Such a tool
/// can minimise a failing case by changing the bytes.
#[derive(Clone, Debug)]
pub struct Choices<'a>(Source<'a>);

#[derive(Clone, Debug)]
enum Source<'a> {
    /// State of SplitMix64.
    Seed(u64),
    Bytes(&'a [u8]),
}

impl<'a> Choices<'a> {
    /// Endless choices. The same seed gives the same choices on every machine.
    pub fn from_seed(seed: u64) -> Self {
        Choices(Source::Seed(seed))
    }

    /// Choices made from these bytes. After the last byte, every choice is the first of its options.
    pub fn from_bytes(bytes: &'a [u8]) -> Self {
        Choices(Source::Bytes(bytes))
    }

    /// A number in `0..n`; `n` must not be 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        match &mut self.0 {
            Source::Seed(state) => {
                let product = u128::from(next(state)) * n as u128;
                (product >> 64) as usize
            }
            Source::Bytes(bytes) => {
                // Take only as many bytes as a number below `n` needs.
                let needed = (usize::BITS - (n - 1).leading_zeros()).div_ceil(8) as usize;
                let (taken, rest) = bytes.split_at(needed.min(bytes.len()));
                *bytes = rest;
                taken.iter().fold(0, |value, &byte| value << 8 | usize::from(byte)) % n
            }
        }
    }

    /// A number in the range.
    pub(crate) fn within(&mut self, range: RangeInclusive<usize>) -> usize {
        range.start() + self.below(range.end() - range.start() + 1)
    }

    /// True with a probability of 1/`n`.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == n - 1
    }

    /// A value chosen from a list.
    pub(crate) fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// A seed for the numbers of a tensor.
    pub(crate) fn seed(&mut self) -> u64 {
        self.below(1 << 16) as u64
    }

    /// A random size of at most `most`. Often it is from 2 to 9, or within 1 of a multiple of a usual block size.
    /// Sometimes it is 1, from 1 to 40, or any size. Rarely it is 0.
    pub(crate) fn size(&mut self, most: usize) -> usize {
        const BLOCKS: [usize; 14] = [4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512];
        let size = match self.below(16) {
            0..=3 => self.within(2..=9),
            4 | 5 => 1,
            6 if self.one_in(3) => 0,
            6..=8 => self.within(1..=most.max(1)),
            9 | 10 => self.within(1..=40),
            _ => {
                let block = self.of(&BLOCKS);
                block * self.within(1..=(most / block).clamp(1, 5)) + self.below(3) - 1
            }
        };
        size.min(most)
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014).
pub(super) fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mix(*state)
}

/// The output function of SplitMix64: a bijection in which every output bit depends on every input bit.
pub(crate) fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Halves the largest size again and again until `work(sizes)` is at most `most`.
pub(crate) fn shrink(sizes: &mut [usize], most: usize, work: impl Fn(&[usize]) -> usize) {
    while work(sizes) > most {
        let Some(largest) = sizes.iter_mut().max() else { return };
        *largest = (*largest / 2).max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_of_a_seed_are_the_same_everywhere() {
        let mut choices = Choices::from_seed(1);
        let numbers: Vec<_> = (0..4).map(|_| choices.below(1000)).collect();
        assert_eq!(numbers, [566, 745, 971, 444]);
        assert!((0..1000).all(|_| choices.below(3) < 3 && choices.size(70) <= 70));
        assert!((0..1000).all(|_| (5..=6).contains(&choices.within(5..=6))));
    }

    #[test]
    fn bytes_are_taken_in_turn_and_may_run_out() {
        let mut choices = Choices::from_bytes(&[7, 1, 2, 9]);
        assert_eq!(choices.below(1), 0);
        assert_eq!(choices.below(256), 7);
        assert_eq!(choices.below(1000), 258);
        assert!(choices.one_in(10));
        assert_eq!((choices.below(5), choices.one_in(2), choices.size(9)), (0, false, 2));
    }

    #[test]
    fn sizes_come_close_to_borders() {
        let mut choices = Choices::from_seed(1);
        let sizes: Vec<_> = (0..5000).map(|_| choices.size(200)).collect();
        for size in [0, 1, 2, 63, 64, 65, 95, 127, 128, 129, 200] {
            assert!(sizes.contains(&size), "{size}");
        }
        let mut sizes = [5, 1000, 3];
        shrink(&mut sizes, 500, |s| s.iter().product());
        assert_eq!(sizes, [5, 31, 3]);
    }
}
