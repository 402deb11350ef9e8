//! The choice of an instruction set, and the dispatch of kernels to it.

use super::Simd;
use super::bf16::Bf16Kernel;
#[cfg(test)]
use super::bf16::Bf16Model;
#[cfg(target_arch = "x86_64")]
use super::bf16::Bf16Products;
use super::lanes::Lanes;
use super::tiles::TileKernel;
#[cfg(test)]
use super::tiles::TileModel;
#[cfg(target_arch = "x86_64")]
use super::x86::{Amx, Avx2, Avx512, Avx512Bf16};
use std::sync::LazyLock;

/// An instruction set that this machine has: values come from [`Isa::best`] and
/// [`Isa::available`] only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(Avx512Bf16),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    Lanes(Lanes),
    /// The portable instruction set with a software model of AMX tiles.
    #[cfg(test)]
    TileModel,
}

impl Isa {
    /// The fastest instruction set of this machine, or the one that the environment variable
    /// `WINDROW_ISA` names (`amx`, `avx512bf16`, `avx512`, `avx2`, `neon` or `portable`), if this
    /// machine has it.
    pub fn best() -> Self {
        static BEST: LazyLock<Isa> = LazyLock::new(|| {
            let available = Isa::available();
            let wanted = std::env::var("WINDROW_ISA").unwrap_or_default();
            let named = available.iter().find(|isa| isa.name() == wanted);
            if named.is_none() && !wanted.is_empty() {
                tracing::warn!(
                    "WINDROW_ISA={wanted} is not one of {:?} that this machine has; ignored",
                    available.iter().map(|isa| isa.name()).collect::<Vec<_>>()
                );
            }
            let fastest = || available.iter().find(|isa| isa.is_fast());
            *named.or_else(fastest).unwrap_or(&available[0])
        });
        *BEST
    }

    /// The instruction sets of this machine, the widest first.
    pub fn available() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(Amx::detect().map(|t| Isa(Kind::Amx(t))));
            all.extend(Avx512Bf16::detect().map(|t| Isa(Kind::Avx512Bf16(t))));
            all.extend(Avx512::detect().map(|t| Isa(Kind::Avx512(t))));
            all.extend(Avx2::detect().map(|t| Isa(Kind::Avx2(t))));
        }
        all.push(Isa(Kind::Lanes(Lanes)));
        all
    }

    /// The instruction sets for random cases; in this crate's own tests also one with a software model of AMX.
    pub(crate) fn tested() -> Vec<Self> {
        #[allow(unused_mut)] // only tests add the model
        let mut all = Self::available();
        #[cfg(test)]
        all.push(Isa(Kind::TileModel));
        all
    }

    /// The name: `amx`, `avx512bf16`, `avx512`, `avx2`, `neon` or `portable`.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx(_) => "amx",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(_) => "avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => "avx2",
            Kind::Lanes(_) if cfg!(target_arch = "aarch64") => "neon",
            Kind::Lanes(_) => "portable",
            #[cfg(test)]
            Kind::TileModel => "tile model",
        }
    }

    /// True if this set is faster than the next one in [`Isa::available`].
    fn is_fast(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(_) => Avx512Bf16::is_fast(),
            _ => true,
        }
    }

    /// True for the set whose bf16 kernels use AVX512_BF16's products of pairs. [`dispatch_bf16`] also runs such
    /// kernels on the set with AMX, but there tiles are faster.
    pub(crate) fn has_bf16_products(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(_) => true,
            _ => false,
        }
    }

    /// True if kernels for this set are compiled for size. This is so for the portable set on x86-64, which is used
    /// only on CPUs without AVX2.
    pub(crate) fn is_small(self) -> bool {
        match self.0 {
            Kind::Lanes(_) => Lanes::IS_SMALL,
            #[cfg(test)]
            Kind::TileModel => Lanes::IS_SMALL,
            #[cfg(target_arch = "x86_64")]
            _ => false,
        }
    }

    /// True if the set has AMX tiles (or their model), so that [`dispatch_tiles`] can run a kernel.
    pub(crate) fn has_tiles(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx(_) => true,
            #[cfg(test)]
            Kind::TileModel => true,
            _ => false,
        }
    }
}

/// A computation written once for all instruction sets.
pub(crate) trait Kernel {
    type Output;
    /// True if a more general kernel computes the same. Sets with [`Isa::is_small`] have no code for such a kernel.
    const IS_SPECIAL: bool = false;
    /// Must be `#[inline(always)]`, and so must every generic function it calls: code is compiled for an instruction
    /// set by being inlined into a function that enables it. A large function that is called once for a task or a row
    /// is a separate kernel, called by [`Simd::outlined`].
    /// The standard library's `zip`, `map` of arrays and `array::from_fn` are not always inlined, so kernels use indices
    /// and [`array`](super::array) instead.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs a kernel that uses products of bf16, on an `isa` that has them or tiles.
#[inline]
pub(crate) fn dispatch_bf16<K: Bf16Kernel>(isa: Isa, kernel: K) {
    match isa.0 {
        // SAFETY: the token exists, so the machine has these instructions.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512Bf16(t) => unsafe { with_avx512bf16(t, kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Kind::Amx(t) => unsafe { with_avx512bf16(t.bf16(), kernel) },
        #[cfg(test)]
        Kind::TileModel => kernel.run(Bf16Model),
        _ => {
            drop(kernel);
            unreachable!("{} has no products of bf16", isa.name())
        }
    }
}

/// Runs a kernel with the tiles of an `isa` that has them.
#[inline]
pub(crate) fn dispatch_tiles<K: TileKernel>(isa: Isa, kernel: K) {
    match isa.0 {
        #[cfg(target_arch = "x86_64")]
        Kind::Amx(t) => t.run(kernel),
        #[cfg(test)]
        Kind::TileModel => kernel.run(&mut TileModel::new()),
        _ => {
            drop(kernel);
            unreachable!("{} has no tiles", isa.name())
        }
    }
}

/// Runs a kernel with the instructions of `isa`. It is not `#[inline]`, because then each codegen unit would have its
/// own copy.
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    match isa.0 {
        // SAFETY: the token exists, so the machine has these instructions.
        #[cfg(target_arch = "x86_64")]
        Kind::Amx(t) => unsafe { with_avx512(t.bf16().simd(), kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512Bf16(t) => unsafe { with_avx512(t.simd(), kernel) },
        // SAFETY: an `Avx512` is made only where AVX-512 was detected.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512(t) => unsafe { with_avx512(t, kernel) },
        // SAFETY: an `Avx2` is made only where AVX2, FMA and F16C were detected.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2(t) => unsafe { with_avx2(t, kernel) },
        Kind::Lanes(t) => general(isa, t, kernel),
        #[cfg(test)]
        Kind::TileModel => general(isa, Lanes, kernel),
    }
}

fn general<K: Kernel>(isa: Isa, t: Lanes, kernel: K) -> K::Output {
    if const { K::IS_SPECIAL && Lanes::IS_SMALL } {
        unreachable!("{} has no code for special cases", isa.name())
    } else {
        with_lanes(t, kernel)
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(
    enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,f16c,bmi1,bmi2"
)]
fn with_avx512bf16<K: Bf16Kernel>(t: Avx512Bf16, kernel: K) {
    kernel.run(t);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,f16c,bmi1,bmi2")]
pub(super) fn with_avx512<K: Kernel>(t: Avx512, kernel: K) -> K::Output {
    kernel.run(t)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2")]
pub(super) fn with_avx2<K: Kernel>(t: Avx2, kernel: K) -> K::Output {
    kernel.run(t)
}

// `Simd::outlined` of each set. The compiler ignores `#[inline(never)]` on a function that enables features. These
// functions enable none. So nothing is inlined into them, either.

#[cfg(target_arch = "x86_64")]
#[inline(never)]
pub(super) fn call_avx512<K: Kernel>(t: Avx512, kernel: K) -> K::Output {
    // SAFETY: an `Avx512` is made only where AVX-512 was detected.
    unsafe { with_avx512(t, kernel) }
}

#[cfg(target_arch = "x86_64")]
#[inline(never)]
pub(super) fn call_avx2<K: Kernel>(t: Avx2, kernel: K) -> K::Output {
    // SAFETY: an `Avx2` is made only where AVX2, FMA and F16C were detected.
    unsafe { with_avx2(t, kernel) }
}

#[inline(never)]
pub(super) fn with_lanes<K: Kernel>(t: Lanes, kernel: K) -> K::Output {
    kernel.run(t)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_is_available_and_portable_always_is() {
        let all = Isa::available();
        assert!(all.contains(&Isa::best()));
        assert!(["portable", "neon"].contains(&all.last().unwrap().name()));
        if std::env::var_os("WINDROW_ISA").is_none() {
            assert_eq!(all.iter().find(|isa| isa.is_fast()), Some(&Isa::best()));
        }
    }
}
