//! GELU over matrices of S rows and K columns.

use super::subject::{self, About, Direct, Plain};
use super::{Entry, Selection, Work, by_x};
use rayon::prelude::*;
use windrow::verify::random_tensor;
use windrow::{
    Activation, Approximate, DType, Element, Error, Gelu, GeluSpec, TensorDesc, bf16, f16,
};

const SIZES: [usize; 3] = [1024, 2048, 4096];
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// Rows that are compared with the oracle at each end.
const SAMPLED_ROWS: usize = 32;

pub(super) fn entries(s: &Selection<'_>) -> windrow::Result<Vec<Entry>> {
    let mut all = Vec::new();
    for &dtype in s.dtypes(&DTYPES) {
        all.extend(specs(dtype)?);
    }
    subject::entries::<Gelu>(s, all.into_iter().map(|spec| Ok(about(spec))))
}

fn about(spec: GeluSpec) -> About<Gelu> {
    About {
        spec,
        algorithm: None,
        name: spec.approximate.name().into(),
        dtype: spec.x.dtype,
        shape: by_x(spec.x.shape()),
        work: Work::Bytes((spec.x.bytes() + spec.y.bytes()) as f64),
        sampled: SAMPLED_ROWS,
        direct: Direct::Loop(|spec: &GeluSpec, threads| match spec.x.dtype {
            DType::F32 => scalar_loop::<f32>(spec, threads),
            DType::F16 => scalar_loop::<f16>(spec, threads),
            DType::BF16 => scalar_loop::<bf16>(spec, threads),
            other => {
                Err(Error::DType { arg: "x", given: other, expected: "f32, f16 or bf16".into() })
            }
        }),
    }
}

/// The exact form at every S and K, and the tanh form where they are equal.
pub(crate) fn specs(dtype: DType) -> windrow::Result<Vec<GeluSpec>> {
    let all = SIZES.into_iter().flat_map(|rows| SIZES.map(|columns| (rows, columns)));
    let exact = all.map(|(rows, columns)| (Approximate::None, rows, columns));
    let tanh = SIZES.into_iter().map(|size| (Approximate::Tanh, size, size));
    exact
        .chain(tanh)
        .map(|(approximate, rows, columns)| {
            GeluSpec::new(TensorDesc::contiguous(dtype, &[rows, columns])?, approximate)
        })
        .collect()
}

/// The simplest program: the formula for one element after the other, on all threads.
fn scalar_loop<T: Element>(spec: &GeluSpec, threads: usize) -> windrow::Result<Plain> {
    let x = random_tensor(1, spec.x, -6.0, 6.0)?.to_vec::<T>()?;
    let mut y = vec![T::default(); x.len()];
    let gelu = Activation::Gelu(spec.approximate);
    let part = x.len().div_ceil(threads).max(1);
    Ok(Box::new(move || {
        y.par_chunks_mut(part).zip(x.par_chunks(part)).for_each(|(y, x)| {
            for (y, x) in y.iter_mut().zip(x) {
                *y = T::from_f64(gelu.apply_f64(x.to_f64()));
            }
        });
    }))
}
