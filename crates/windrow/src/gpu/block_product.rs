//! Matrix products on AMD GPUs by Windrow's own kernel, for GPUs on which rocBLAS is not used or not installed.

use super::gemm::{GemmOperands, GemmSpec, Matrix, Product};
use super::runtime::{Handle, Launch, Outcome};
use super::{Gpu, Kernel, KernelSpec, Source, params, type_name};
use crate::Result;
use crate::dtype::by_type;

static SOURCE: Source = Source {
    name: "block_product.cu",
    text: include_str!("kernels/block_product.cu"),
    includes: &[],
};

/// The side of the tile of C that a block computes.
const TILE: usize = 32;
/// The number of wavefronts of a block.
const WAVEFRONTS: u32 = 4;
/// The maximum number of blocks of a launch. If there are more tiles, each block computes several.
const MAX_BLOCKS: usize = 1 << 20;

params! {
    struct Params {
        a: *const u8,
        b: *const u8,
        c: *mut u8,
        a_row: i64,
        a_batch: i64,
        b_row: i64,
        b_batch: i64,
        c_row: i64,
        c_batch: i64,
        m: i64,
        n: i64,
        k: i64,
        rows_of_tiles: i64,
        columns_of_tiles: i64,
        tiles: i64,
        add: i32,
    }
}

/// A [`GemmSpec`] bound to its kernel.
#[derive(Debug)]
pub(crate) struct BlockProduct {
    kernel: &'static Kernel,
    threads: u32,
    spec: GemmSpec,
}

impl BlockProduct {
    /// Binds a product to its kernel.
    ///
    /// # Errors
    /// As [`Gpu::kernel`].
    pub(crate) fn new(gpu: &'static Gpu, spec: &GemmSpec) -> Result<Self> {
        let threads = WAVEFRONTS * gpu.info.warp;
        Ok(BlockProduct { kernel: gpu.kernel(&kernel_spec(spec))?, threads, spec: *spec })
    }
}

impl Product for BlockProduct {
    fn workspace_bytes(&self) -> usize {
        0
    }

    unsafe fn run(&self, operands: GemmOperands, stream: Handle, add: bool) -> Outcome<()> {
        let GemmSpec { m, n, k, batch, a, b, c, .. } = self.spec;
        let [rows_of_tiles, columns_of_tiles] = [m, n].map(|size| size.div_ceil(TILE));
        let tiles = rows_of_tiles * columns_of_tiles * batch;
        let strides = |x: Matrix| [x.row_stride as i64, x.batch_stride as i64];
        let ([a_row, a_batch], [b_row, b_batch], [c_row, c_batch]) =
            (strides(a), strides(b), strides(c));
        let params = Params {
            a: operands.a,
            b: operands.b,
            c: operands.c,
            a_row,
            a_batch,
            b_row,
            b_batch,
            c_row,
            c_batch,
            m: m as i64,
            n: n as i64,
            k: k as i64,
            rows_of_tiles: rows_of_tiles as i64,
            columns_of_tiles: columns_of_tiles as i64,
            tiles: tiles as i64,
            add: i32::from(add),
        };
        let grid = [tiles.min(MAX_BLOCKS) as u32, 1, 1];
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.kernel.give(stream, Launch { grid, block: [self.threads, 1, 1] }, &params) }
    }
}

fn kernel_spec(spec: &GemmSpec) -> KernelSpec {
    let GemmSpec { a, b, c, .. } = spec;
    KernelSpec::new(&SOURCE, format!("block_product_{}", a.dtype))
        .define("T", type_name(a.dtype))
        .define("OUT", type_name(c.dtype))
        .define(
            by_type!(a.dtype, F32 => "ELEMENT_F32", F16 => "ELEMENT_F16", BF16 => "ELEMENT_BF16"),
            1,
        )
        .define("A_TRANSPOSED", u8::from(a.transposed))
        .define("B_TRANSPOSED", u8::from(b.transposed))
        .params::<Params>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::gpu::GemmCompute;

    #[test]
    fn compiles() {
        let mut specs = Vec::new();
        for (dtype, out) in [
            (DType::F32, DType::F32),
            (DType::F16, DType::F16),
            (DType::F16, DType::F32),
            (DType::BF16, DType::BF16),
            (DType::BF16, DType::F32),
        ] {
            for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
                let matrix = |dtype, transposed| Matrix {
                    dtype,
                    transposed,
                    row_stride: 8,
                    batch_stride: 64,
                    alignment: 16,
                };
                let (a, b, c) = (matrix(dtype, ta), matrix(dtype, tb), matrix(out, false));
                let compute = GemmCompute::F32;
                specs.push(kernel_spec(&GemmSpec { m: 8, n: 8, k: 8, batch: 1, a, b, c, compute }));
            }
        }
        crate::gpu::compile_tests::check_compiles_for_hip(&specs);
    }
}
