//! GELU over matrices of S rows and K columns.

use super::{Case, Description, Entry, Selection, Work, by_x, ends};
use crate::failure::Failure;
use crate::placed::Placed;
use rayon::prelude::*;
use windrow::verify::{Comparison, random_tensor};
use windrow::{
    Activation, Approximate, DType, Element, GeluAlgorithm, GeluArgs, GeluPlan, GeluSpec,
    PlanOptions, Tensor, TensorDesc, Workspace, bf16, cpu, f16,
};

const SIZES: [usize; 3] = [1024, 2048, 4096];
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// Rows that are compared with the oracle at each end.
const SAMPLED_ROWS: usize = 32;

struct Gelu {
    plan: GeluPlan,
    options: PlanOptions,
    threads: usize,
    x: Placed,
    y: Placed,
    scalar: Box<dyn FnMut()>,
    copied: Placed,
    workspace: Workspace,
}

pub(super) fn entries(s: &Selection<'_>) -> Result<Vec<Entry>, Failure> {
    let algorithm = match s.algorithm.map(str::parse::<GeluAlgorithm>) {
        Some(Err(_)) => return Ok(Vec::new()),
        named => named.and_then(Result::ok),
    };
    let mut entries: Vec<Entry> = Vec::new();
    for &dtype in s.dtypes(&DTYPES) {
        for spec in specs(dtype)? {
            let can = GeluPlan::algorithms(&spec, s.options.device);
            if algorithm.is_none_or(|a| can.contains(&a)) {
                let options = s.options;
                entries.push(Box::new(move || Ok(Box::new(Gelu::new(&spec, algorithm, options)?))));
            }
        }
    }
    Ok(entries)
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

impl Gelu {
    fn new(
        spec: &GeluSpec,
        algorithm: Option<GeluAlgorithm>,
        options: PlanOptions,
    ) -> windrow::Result<Self> {
        let plan = match algorithm {
            Some(algorithm) => GeluPlan::with_algorithm(spec, algorithm, &options)?,
            None => GeluPlan::new(spec, &options)?,
        };
        let workspace = Workspace::new(options.device, plan.workspace_bytes())?;
        let threads = options.threads.map_or_else(cpu::num_threads, usize::from);
        let x = random_tensor(1, spec.x, -6.0, 6.0)?;
        let scalar = match spec.x.dtype {
            DType::F16 => scalar_loop::<f16>(&x, spec.approximate, threads)?,
            DType::BF16 => scalar_loop::<bf16>(&x, spec.approximate, threads)?,
            _ => scalar_loop::<f32>(&x, spec.approximate, threads)?,
        };
        let device = options.device;
        let x = Placed::new(x, device)?;
        let (y, copied) = (Placed::output(spec.y, device)?, Placed::output(spec.y, device)?);
        Ok(Gelu { plan, options, threads, x, y, scalar, copied, workspace })
    }
}

/// What one writes first: the formula for one element after the other, on all threads.
fn scalar_loop<T: Element>(
    x: &Tensor,
    approximate: Approximate,
    threads: usize,
) -> windrow::Result<Box<dyn FnMut()>> {
    let x = x.to_vec::<T>()?;
    let mut y = vec![T::default(); x.len()];
    let gelu = Activation::Gelu(approximate);
    let part = x.len().div_ceil(threads).max(1);
    Ok(Box::new(move || {
        y.par_chunks_mut(part).zip(x.par_chunks(part)).for_each(|(y, x)| {
            for (y, x) in y.iter_mut().zip(x) {
                *y = T::from_f64(gelu.apply_f64(x.to_f64()));
            }
        });
    }))
}

impl Case for Gelu {
    fn describe(&self) -> Description {
        let spec = self.plan.spec();
        Description {
            op: "gelu",
            name: spec.approximate.name().into(),
            device: self.options.device,
            dtype: spec.x.dtype,
            algorithm: self.plan.algorithm().name().into(),
            configuration: self.plan.configuration().to_string(),
            shape: by_x(spec.x.shape()),
            plan: self.plan.explain(),
            work: Work::Bytes((spec.x.bytes() + spec.y.bytes()) as f64),
            direct: "a scalar loop",
        }
    }

    fn run(&mut self) -> windrow::Result<()> {
        let args = GeluArgs { x: self.x.as_ref(), bias: None, gate: None };
        self.plan.run(&args, self.y.as_mut()?, &mut self.workspace)?;
        self.workspace.synchronize()
    }

    fn run_direct(&mut self) -> windrow::Result<()> {
        (self.scalar)();
        Ok(())
    }

    fn copy(&mut self) -> windrow::Result<()> {
        self.copied.copy_from(&self.x, self.threads, &self.workspace)?;
        self.workspace.synchronize()
    }

    fn compare(&mut self) -> windrow::Result<Comparison> {
        let parts = ends(self.x.desc().shape()[0], SAMPLED_ROWS).map(|rows| {
            let x = self.x.as_ref().narrow(0, rows.clone())?;
            let y = self.y.as_ref().narrow(0, rows)?;
            let spec = GeluSpec::new(*x.desc(), self.plan.spec().approximate)?.y(*y.desc());
            let plan = GeluPlan::with_algorithm(&spec, self.plan.algorithm(), &self.options)?;
            plan.compare(&GeluArgs { x, bias: None, gate: None }, &y)
        });
        let [first, last] = parts;
        let mut comparison = first?;
        comparison.merge(&last?);
        Ok(comparison)
    }

    fn elements(&self) -> usize {
        self.y.desc().layout.len()
    }
}
