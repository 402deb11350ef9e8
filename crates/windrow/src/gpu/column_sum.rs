//! Sums over the rows of a matrix, for gradients that are summed in several blocks.

use super::{Gpu, KernelSpec, Launch, Source, Stream, params, type_name};
use crate::{Result, TensorMut};

static SOURCE: Source =
    Source { name: "column_sum.cu", text: include_str!("kernels/column_sum.cu"), includes: &[] };

params! {
    struct Params {
        partial: *const f32,
        rows: usize,
        columns: usize,
        row_stride: usize,
        out: *mut u8,
        group: usize,
        stride: [isize; 2],
    }
}

/// `out` = sum over `rows` of `partial`, added in a fixed order with compensation: the same bits every time. Rows have
/// `columns` elements and begin `row_stride` elements apart. `out` has `columns` elements, in one dimension or
/// row-major in two.
///
/// # Errors
/// [`Error::Backend`](crate::Error::Backend).
///
/// # Safety
/// `partial` must be that matrix on the stream's device, and `out` have `columns` elements there.
pub(crate) unsafe fn column_sum(
    gpu: &'static Gpu,
    stream: &Stream,
    partial: *const f32,
    [rows, columns, row_stride]: [usize; 3],
    out: &TensorMut<'_>,
) -> Result<()> {
    let (group, stride) = match *out.strides() {
        [step] => (1, [step, 0]),
        [outer, step] => (out.shape()[1].max(1), [outer, step]),
        _ => unreachable!("outputs are vectors or matrices"),
    };
    let params =
        Params { partial, rows, columns, row_stride, out: out.as_ptr().cast_mut(), group, stride };
    let kernel = gpu.column_sums.get(gpu, out.dtype(), || kernel_spec(out.dtype()))?;
    // See column_sum.cu.
    let launch = Launch { grid: [columns.div_ceil(32) as u32, 1, 1], block: [256, 1, 1] };
    // SAFETY: `Params` is the kernel's structure; the rest is the caller's promise.
    unsafe { kernel.launch(stream, launch, &params) }
}

fn kernel_spec(out: crate::DType) -> KernelSpec {
    KernelSpec::new(&SOURCE, format!("column_sum_{out}"))
        .define("OUT", type_name(out))
        .params::<Params>()
        .overlapped(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn compiles_without_spills() {
        let specs = [DType::F32, DType::F16, DType::BF16].map(kernel_spec);
        crate::gpu::compile_tests::check_compiles(&specs);
    }
}
