//! What is added to a finished convolution, and the activation behind that.

use super::general::one_thread_each;
use super::{epilogue, kernel, source};
use crate::conv2d::Conv2dSpec;
use crate::gpu::{Gpu, Kernel, KernelSpec, Source, Stream, params};
use crate::{DType, Layout, Result, TensorDesc};

static RESIDUAL: Source = source!("residual.cu");

/// `y = act(y + residual)` in place.
#[derive(Debug)]
pub(crate) struct Residual {
    kernel: &'static Kernel,
    y: TensorDesc,
}

params! {
    struct Params {
        y: *mut u8,
        residual: *const u8,
        elements: i64,
        sizes: [i64; 4],
        strides: [i64; 4],
    }
}

impl Residual {
    pub(crate) fn new(gpu: &'static Gpu, spec: &Conv2dSpec) -> Result<Self> {
        Ok(Residual { kernel: gpu.kernel(&residual_kernel(spec))?, y: spec.y })
    }

    /// Of the sums, which halves are rounded to before the residual is added.
    pub(crate) fn tolerance(&self) -> f64 {
        let dtype = self.y.dtype;
        if dtype == DType::F32 { 0.0 } else { dtype.unit_roundoff() }
    }

    /// # Errors
    /// [`Error::Backend`](crate::Error::Backend).
    ///
    /// # Safety
    /// Both are tensors of y's layout on the stream's device.
    pub(crate) unsafe fn run(
        &self,
        stream: &Stream,
        y: *mut u8,
        residual: *const u8,
    ) -> Result<()> {
        let elements = self.y.layout.len();
        let [sizes, strides] = dimensions(&self.y.layout);
        let params = Params { y, residual, elements: elements as i64, sizes, strides };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.kernel.launch(stream, one_thread_each(elements), &params) }
    }
}

/// Sizes and strides by falling stride, those that follow each other without a gap as one, behind ones of size 1.
fn dimensions(layout: &Layout) -> [[i64; 4]; 2] {
    let mut dims: Vec<_> =
        layout.shape().iter().zip(layout.strides()).map(|(&n, &s)| (n as i64, s as i64)).collect();
    dims.retain(|&(size, _)| size != 1);
    dims.sort_by_key(|&(_, stride)| std::cmp::Reverse(stride.abs()));
    let mut merged: Vec<(i64, i64)> = Vec::new();
    for (size, stride) in dims {
        match merged.last_mut() {
            Some(last) if last.1 == size * stride => *last = (last.0 * size, stride),
            _ => merged.push((size, stride)),
        }
    }
    let at = |i: usize| (i + merged.len()).checked_sub(4).map_or((1, 0), |i| merged[i]);
    [std::array::from_fn(|i| at(i).0), std::array::from_fn(|i| at(i).1)]
}

fn residual_kernel(spec: &Conv2dSpec) -> KernelSpec {
    kernel(&RESIDUAL, "residual", spec.y.dtype)
        .define("EPILOGUE", epilogue(spec.activation))
        .params::<Params>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activation, Approximate};

    #[test]
    fn kernels_compile_without_spills() {
        let mut kernels = Vec::new();
        for spec in super::super::test_specs() {
            let activation = Activation::Gelu(Approximate::None);
            kernels.push(residual_kernel(&Conv2dSpec { activation, ..spec }));
        }
        crate::gpu::compile_tests::check_compiles(&kernels);
    }

    #[test]
    fn dimensions_without_gaps_are_one() {
        let of = |strides: &[isize]| dimensions(&Layout::strided(&[2, 3, 4, 5], strides).unwrap());
        assert_eq!(of(&[60, 20, 5, 1]), [[1, 1, 1, 120], [0, 0, 0, 1]]);
        assert_eq!(of(&[60, 1, 15, 3]), [[1, 1, 1, 120], [0, 0, 0, 1]]);
        assert_eq!(of(&[120, 20, 5, 1]), [[1, 1, 2, 60], [0, 0, 120, 1]]);
        assert_eq!(of(&[240, 80, 20, 4]), [[1, 1, 1, 120], [0, 0, 0, 4]]);
        assert_eq!(of(&[-60, 20, 5, 1]), [[1, 1, 2, 60], [0, 0, -60, 1]]);
        let one = Layout::strided(&[1, 1, 1, 1], &[7, 7, 7, 7]).unwrap();
        assert_eq!(dimensions(&one), [[1; 4], [0; 4]]);
    }
}
