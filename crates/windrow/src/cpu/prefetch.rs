//! Memory that is asked for before it is read.

use super::{Isa, Kernel, Simd, dispatch};

/// Asks for cache lines at these addresses, which may be any, and waits for none of them. Many lines that are far apart
/// and not in the cache then come at the same time, not one after the other.
pub fn prefetch(addresses: &[usize]) {
    dispatch(Isa::best(), Lines(addresses));
}

struct Lines<'a>(&'a [usize]);

impl Kernel for Lines<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for &address in self.0 {
            s.prefetch(std::ptr::without_provenance::<u8>(address));
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn any_address_may_be_asked_for() {
        super::prefetch(&[]);
        super::prefetch(&[0, 1, usize::MAX, usize::MAX / 2, [0u8].as_ptr().addr()]);
    }
}
