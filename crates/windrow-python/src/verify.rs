//! The functions of `python -m windrow`: the devices, and the cases of verification.

use crate::call::word;
use crate::error::IntoPy;
use pyo3::prelude::*;
use windrow::Device;
use windrow::cpu::{Isa, num_threads};

/// The devices that can be used, by the names that `device` takes, with a description.
#[pyfunction]
pub(crate) fn devices() -> Vec<(String, String)> {
    let isa = Isa::best().name();
    let cpu = ("cpu".to_owned(), format!("{isa} kernels, {} threads", num_threads()));
    let cuda = windrow::cuda::devices().unwrap_or_default().into_iter().map(|gpu| {
        let (major, minor) = gpu.compute_capability;
        (
            Device::Cuda(gpu.index).to_string(),
            format!("{}, compute capability {major}.{minor}", gpu.name),
        )
    });
    let hip = windrow::hip::devices().unwrap_or_default().into_iter().map(|gpu| {
        (Device::Hip(gpu.index).to_string(), format!("{}, {}", gpu.name, gpu.architecture))
    });
    std::iter::once(cpu).chain(cuda).chain(hip).collect()
}

/// Every case of every operator that a device can run.
#[pyfunction]
pub(crate) fn verification_cases(device: &str) -> PyResult<Vec<Case>> {
    Ok(windrow::verify::cases(word(device)?).into_iter().map(Case).collect())
}

/// One case of an operator, for comparison with its f64 oracle.
#[pyclass(module = "windrow._native", frozen)]
pub(crate) struct Case(windrow::verify::Case);

#[pymethods]
impl Case {
    /// Operator, algorithm, element type and layout.
    #[getter]
    fn kind(&self) -> (&str, &str, &str, &str) {
        let case = &self.0;
        (case.op, &case.algorithm, case.dtype.name(), &case.layout)
    }

    /// Runs it: what was compared, how many elements, how many of them are errors, and the largest
    /// absolute error.
    fn __call__(&self, py: Python<'_>) -> PyResult<Vec<(&'static str, usize, usize, f64)>> {
        let checks = py.detach(|| (self.0.run)()).py()?;
        let numbers = |c: &windrow::verify::Check| {
            (c.what, c.comparison.count(), c.comparison.errors(), c.comparison.max_abs())
        };
        Ok(checks.iter().map(numbers).collect())
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}
