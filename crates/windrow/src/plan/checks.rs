//! Checks of the tensors of a run.

use crate::tensor::{check_device, check_dtype, check_optional_view, check_tensor};
use crate::{DType, Device, Error, MAX_RANK, Result, TensorDesc, TensorMut, TensorRef};

/// The maximum number of tensors of a run, gradients included.
const MOST: usize = 20;

/// The checks of a run's tensors, made one after the other. Each tensor must have the right type, shape and device. An
/// output must not share memory with a tensor that was checked earlier, so inputs are checked first.
pub(crate) struct Checks {
    device: Device,
    /// The name of each tensor, and its memory if it has elements.
    seen: [(&'static str, Option<Memory>); MOST],
    len: usize,
}

/// The memory of a tensor: runs of so many bytes. Each begins at a multiple of `step` bytes from the first, between the
/// addresses `low` and `high`.
#[derive(Clone, Copy)]
struct Memory {
    low: usize,
    high: usize,
    run: usize,
    step: usize,
}

impl Memory {
    fn new(desc: &TensorDesc, range: Option<(usize, usize)>) -> Option<Self> {
        let (low, high) = range?;
        let (mut run, mut step, mut seen) = (desc.dtype.size(), 0, [false; MAX_RANK]);
        let dims = || desc.shape().iter().zip(desc.strides()).enumerate();
        let bytes = |stride: isize| stride.unsigned_abs() * desc.dtype.size();
        // Dimensions whose elements follow each other without gaps make one run.
        while let Some((d, (&n, _))) =
            dims().find(|&(d, (&n, &s))| !seen[d] && n > 1 && bytes(s) == run)
        {
            seen[d] = true;
            run *= n;
        }
        for (d, (&n, &s)) in dims() {
            if !seen[d] && n > 1 {
                step = gcd(step, bytes(s));
            }
        }
        Some(Memory { low, high, run, step })
    }

    /// True if an element may lie in both. Some channels of a channels-last image share none with others, though these
    /// lie between them.
    fn shares(&self, other: &Self) -> bool {
        let (first, second) = if self.low <= other.low { (self, other) } else { (other, self) };
        let step = gcd(first.step, second.step);
        let is_between = (second.low - first.low)
            .checked_rem(step)
            .is_some_and(|gap| gap >= first.run && gap + second.run <= step);
        second.low < first.high && !is_between
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The element types that a gradient may have.
#[derive(Clone, Copy)]
pub(crate) enum Type {
    Exactly(DType),
    /// This type, or f32.
    OrF32(DType),
}

impl Checks {
    /// The checks for a run on this device.
    pub(crate) fn new(device: Device) -> Self {
        Checks { device, seen: [("", None); MOST], len: 0 }
    }

    /// Checks a tensor that is read. It must be given if and only if the plan has it, and must agree with the plan.
    pub(crate) fn read(
        &mut self,
        name: &'static str,
        view: Option<&TensorRef<'_>>,
        planned: Option<&TensorDesc>,
    ) -> Result<()> {
        check_optional_view(name, view.map(TensorRef::desc), planned)?;
        view.map_or(Ok(()), |view| {
            self.see(name, view.device(), Memory::new(view.desc(), view.address_range()))
        })
    }

    /// Checks a tensor that is read. It may have any strides.
    pub(crate) fn read_strided(
        &mut self,
        name: &'static str,
        view: &TensorRef<'_>,
        dtype: DType,
        shape: &[usize],
    ) -> Result<()> {
        check_tensor(name, view.desc(), dtype, shape)?;
        self.see(name, view.device(), Memory::new(view.desc(), view.address_range()))
    }

    /// Checks a tensor that is written. It must be given if and only if the plan has it, and must agree with the plan.
    pub(crate) fn write(
        &mut self,
        name: &'static str,
        view: Option<&TensorMut<'_>>,
        planned: Option<&TensorDesc>,
    ) -> Result<()> {
        self.write_over(name, view, planned, None)
    }

    /// Checks an output as [`Checks::write`] does, except that it may share memory with the input `over`.
    pub(crate) fn write_over(
        &mut self,
        name: &'static str,
        view: Option<&TensorMut<'_>>,
        planned: Option<&TensorDesc>,
        over: Option<&'static str>,
    ) -> Result<()> {
        check_optional_view(name, view.map(TensorMut::desc), planned)?;
        view.map_or(Ok(()), |view| self.see_written(name, view, over))
    }

    /// Checks a gradient, if it is given. It may have any strides.
    pub(crate) fn gradient(
        &mut self,
        name: &'static str,
        view: Option<&TensorMut<'_>>,
        dtype: Type,
        shape: &[usize],
    ) -> Result<()> {
        let Some(view) = view else { return Ok(()) };
        match dtype {
            Type::Exactly(dtype) => check_dtype(name, view.dtype(), dtype)?,
            Type::OrF32(dtype) if [dtype, DType::F32].contains(&view.dtype()) => {}
            Type::OrF32(dtype) => {
                return Err(Error::dtype(name, view.dtype(), format!("f32 or {dtype}")));
            }
        }
        check_tensor(name, view.desc(), view.dtype(), shape)?;
        self.see_written(name, view, None)
    }

    fn see_written(
        &mut self,
        name: &'static str,
        view: &TensorMut<'_>,
        over: Option<&'static str>,
    ) -> Result<()> {
        let memory = Memory::new(view.desc(), view.address_range());
        let shares = |other: Option<Memory>| memory.zip(other).is_some_and(|(y, x)| y.shares(&x));
        check_device(name, view.device(), self.device)?;
        match self.seen[..self.len].iter().find(|(n, other)| over != Some(n) && shares(*other)) {
            None => self.see(name, view.device(), memory),
            Some((input, _)) => {
                Err(Error::Aliasing { output: name, input, expected: "separate memory" })
            }
        }
    }

    fn see(&mut self, name: &'static str, device: Device, memory: Option<Memory>) -> Result<()> {
        check_device(name, device, self.device)?;
        self.seen[self.len] = (name, memory);
        self.len += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;
    use crate::tensor::for_each_offset;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn aliasing_is_seen() {
        let mut data = [0f32; 8];
        let layout = Layout::contiguous(&[4]).unwrap();
        let desc = TensorDesc { dtype: DType::F32, layout };
        let ptr = data.as_mut_ptr();
        // SAFETY: all within `data`, which nobody else touches.
        let (y, a, b) = unsafe {
            (
                TensorMut::from_raw(ptr.cast(), desc, Device::Cpu).unwrap(),
                TensorRef::from_raw(ptr.add(3).cast(), desc, Device::Cpu),
                TensorRef::from_raw(ptr.add(4).cast(), desc, Device::Cpu),
            )
        };
        let write = |x: &TensorRef<'_>, over| {
            let mut checks = Checks::new(Device::Cpu);
            checks.read("x", Some(x), Some(&desc)).unwrap();
            checks.write_over("y", Some(&y), Some(&desc), over)
        };
        assert!(matches!(write(&a, None), Err(Error::Aliasing { output: "y", input: "x", .. })));
        assert!(write(&a, Some("x")).is_ok());
        assert!(write(&b, None).is_ok());
        let mut checks = Checks::new(Device::Cpu);
        checks.gradient("dx", Some(&y), Type::Exactly(DType::F32), &[4]).unwrap();
        let again = checks.gradient("dw", Some(&y), Type::OrF32(DType::F16), &[4]);
        assert!(matches!(again, Err(Error::Aliasing { output: "dw", input: "dx", .. })));
    }

    fn memory(at: usize, dtype: DType, shape: &[usize], strides: &[isize]) -> Option<Memory> {
        let desc = TensorDesc { dtype, layout: Layout::strided(shape, strides).unwrap() };
        let bytes =
            |elements: isize| at.checked_add_signed(elements * dtype.size() as isize).unwrap();
        let range = desc.layout.extent().map(|(low, high)| (bytes(low), bytes(high + 1)));
        Memory::new(&desc, range)
    }

    /// The channels of two ranges share memory if the ranges share a channel, in both layouts.
    #[test]
    fn channels_of_one_image_share_nothing() {
        let ranges = || (0..5usize).flat_map(|a| (a + 1..6).map(move |b| (a, b)));
        for (n, h, w) in [(1, 1, 1), (1, 1, 3), (1, 2, 1), (2, 1, 1), (2, 2, 3)] {
            for order in [[0, 1, 2, 3], [0, 2, 3, 1]] {
                let image = Layout::with_order(&[n, 5, h, w], &order).unwrap();
                let of = |(first, last): (usize, usize)| {
                    let at = 1000 + 2 * first * image.strides()[1] as usize;
                    memory(at, DType::F16, &[n, last - first, h, w], image.strides()).unwrap()
                };
                for (x, y) in ranges().flat_map(|x| ranges().map(move |y| (x, y))) {
                    let is_common = x.0 < y.1 && y.0 < x.1;
                    assert_eq!(of(x).shares(&of(y)), is_common, "{x:?} and {y:?} of {image:?}");
                }
            }
        }
    }

    proptest! {
        /// Views that share an address are never taken for separate.
        #[test]
        fn no_shared_address_is_missed(
            views in prop::array::uniform2((
                0usize..80,
                prop::sample::select(vec![DType::F32, DType::F16]),
                prop::collection::vec((0usize..4, -20isize..20), 0..4),
            )),
        ) {
            let of = |(at, dtype, dims): &(usize, DType, Vec<(usize, isize)>)| {
                let (shape, strides): (Vec<_>, Vec<_>) = dims.iter().copied().unzip();
                let at = 1000 + at * dtype.size();
                let mut addresses = HashSet::new();
                for_each_offset(&Layout::strided(&shape, &strides).unwrap(), |o| {
                    let first = at.checked_add_signed(o * dtype.size() as isize).unwrap();
                    addresses.extend(first..first + dtype.size());
                });
                (memory(at, *dtype, &shape, &strides), addresses)
            };
            let ((x, xs), (y, ys)) = (of(&views[0]), of(&views[1]));
            let shares = x.zip(y).is_some_and(|(x, y)| x.shares(&y));
            let back = x.zip(y).is_some_and(|(x, y)| y.shares(&x));
            prop_assert_eq!(shares, back);
            prop_assert!(shares || xs.is_disjoint(&ys), "{:?}", views);
        }
    }
}
