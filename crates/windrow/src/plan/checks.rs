//! Checks of the tensors of a run.

use crate::tensor::{check_device, check_dtype, check_optional_view, check_tensor};
use crate::{DType, Device, Error, Result, TensorDesc, TensorMut, TensorRef};

/// The maximum number of tensors of a run, gradients included.
const MOST: usize = 18;

/// The checks of a run's tensors, made one after the other. Each tensor must have the right type, shape and device. An
/// output must not share memory with a tensor that was checked earlier, so inputs are checked first.
pub(crate) struct Checks {
    device: Device,
    /// The name of each tensor, and its addresses from the lowest to just past the highest.
    seen: [(&'static str, Option<(usize, usize)>); MOST],
    len: usize,
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
        view.map_or(Ok(()), |view| self.see(name, view.device(), view.address_range()))
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
        self.see(name, view.device(), view.address_range())
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
        let range = view.address_range();
        let shares = |other: Option<(usize, usize)>| {
            range.zip(other).is_some_and(|((y0, y1), (x0, x1))| y0 < x1 && x0 < y1)
        };
        check_device(name, view.device(), self.device)?;
        match self.seen[..self.len].iter().find(|(n, other)| over != Some(n) && shares(*other)) {
            None => self.see(name, view.device(), range),
            Some((input, _)) => {
                Err(Error::Aliasing { output: name, input, expected: "separate memory" })
            }
        }
    }

    fn see(
        &mut self,
        name: &'static str,
        device: Device,
        range: Option<(usize, usize)>,
    ) -> Result<()> {
        check_device(name, device, self.device)?;
        self.seen[self.len] = (name, range);
        self.len += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;

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
}
