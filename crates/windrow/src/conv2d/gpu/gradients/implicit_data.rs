//! The data gradient as products of gathered dy and the filter, by the kernels of [`ImplicitGemm`]. The rows and
//! columns of dx are divided by their remainder modulo the stride. Those with one remainder use the same taps, so they
//! are a convolution of dy, of stride 1, with these taps.

use crate::conv2d::gpu::cudnn::kernel_micros;
use crate::conv2d::gpu::facts::is_strict;
use crate::conv2d::gpu::gradient::{DataGradient, GradientMethod};
use crate::conv2d::gpu::implicit_gemm::{ImplicitGemm, ImplicitGemmMethod};
use crate::conv2d::gpu::method::{Method, supports};
use crate::conv2d::gpu::methods;
use crate::conv2d::gpu::prepared::{Operands, PackTo, Prepared};
use crate::conv2d::gpu::task::Task;
use crate::conv2d::{Conv2dAlgorithm, Conv2dSpec, Problem};
use crate::gpu::{Gpu, Stream};
use crate::{Activation, Layout, Result, TensorDesc};

/// A data gradient.
#[derive(Debug)]
struct ImplicitData {
    parts: Vec<(Part, ImplicitGemm)>,
}

/// The convolution that gives some rows and columns of dx.
#[derive(Debug)]
struct Part {
    spec: Conv2dSpec,
    problem: Problem,
    /// Its first elements of w, dy and dx, counted from theirs.
    first: [isize; 3],
}

/// A part in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Axis {
    outputs: usize,
    taps: usize,
    /// The tap that comes first, and how many lie from it to the next, which is before it.
    first_tap: usize,
    step: usize,
    /// Rows of dy that no output reads, or zeros before the first.
    skipped: usize,
    padding: usize,
    dilation: usize,
}

impl Axis {
    /// Outputs `remainder`, `remainder + stride` and so on of `size`.
    fn new(p: &Problem, d: usize, remainder: usize) -> Self {
        let (size, taps, stride, dilation) =
            ([p.h, p.w][d], [p.r, p.s][d], p.stride[d], p.dilation[d]);
        let outputs = size.saturating_sub(remainder).div_ceil(stride);
        // Output i of the part reads row (place - tap * dilation) / stride + i of dy.
        let place = (remainder + p.padding[d]) as i64;
        let row = |tap: usize| place - (tap * dilation) as i64;
        let met = || (0..taps).filter(|&tap| row(tap) % stride as i64 == 0);
        let step = met().next().zip(met().nth(1)).map_or(1, |(first, second)| second - first);
        let last = met().next_back();
        let first = last.map_or(0, |tap| row(tap) / stride as i64);
        Axis {
            outputs,
            taps: met().count(),
            first_tap: last.unwrap_or(0),
            step,
            skipped: first.max(0) as usize,
            padding: (-first).max(0) as usize,
            dilation: if met().nth(1).is_some() { step * dilation / stride } else { 1 },
        }
    }
}

impl Part {
    fn new(spec: &Conv2dSpec, p: &Problem, remainders: [usize; 2]) -> Result<Self> {
        let axes = [0, 1].map(|d| Axis::new(p, d, remainders[d]));
        let rows = [p.oh, p.ow];
        // Rows of dy that are read; without them, or without taps, dx is zero.
        let read = [0, 1].map(|d| rows[d].saturating_sub(axes[d].skipped));
        let exists = axes.iter().all(|axis| axis.taps > 0) && !read.contains(&0);
        let [r, s] = if exists { axes.map(|axis| axis.taps) } else { [0, 1] };
        let [w, dy, dx] = [&spec.w, &spec.y, &spec.x].map(|desc| desc.strides());
        let desc = |shape: [usize; 4], strides: [isize; 4]| -> Result<TensorDesc> {
            Ok(TensorDesc { layout: Layout::strided(&shape, &strides)?, dtype: spec.x.dtype })
        };
        let along = |d: usize| -(axes[d].step as isize) * w[2 + d];
        let outputs = axes.map(|axis| axis.outputs);
        let scaled = |d: usize| dx[2 + d] * p.stride[d] as isize;
        let first = |strides: &[isize], at: [usize; 2]| {
            at[0] as isize * strides[2] + at[1] as isize * strides[3]
        };
        Ok(Part {
            spec: Conv2dSpec {
                x: desc([p.n, p.k, read[0], read[1]], [dy[0], dy[1], dy[2], dy[3]])?,
                w: desc([p.c, p.k_group(), r, s], [w[1], w[0], along(0), along(1)])?,
                y: desc([p.n, p.c, outputs[0], outputs[1]], [dx[0], dx[1], scaled(0), scaled(1)])?,
                bias: None,
                activation: Activation::Identity,
                ..spec.clone()
            },
            problem: Problem {
                n: p.n,
                c: p.k,
                h: read[0],
                w: read[1],
                k: p.c,
                r,
                s,
                frames: p.frames,
                oh: outputs[0],
                ow: outputs[1],
                stride: [1, 1],
                padding: axes.map(|axis| axis.padding),
                dilation: axes.map(|axis| axis.dilation),
                groups: p.groups,
            },
            first: [
                first(w, axes.map(|axis| axis.first_tap)),
                first(dy, axes.map(|axis| axis.skipped)),
                first(dx, remainders),
            ],
        })
    }

    /// The task for the part, on the same GPU as `whole`.
    fn task<'a>(&'a self, whole: &Task<'_>) -> Task<'a> {
        whole.gradient(&self.spec, &self.problem).by(Conv2dAlgorithm::ImplicitGemm)
    }

    /// The parts that have outputs; `None` if a layout cannot be described.
    fn all(spec: &Conv2dSpec, p: &Problem) -> Option<Vec<Self>> {
        let rows = 0..p.stride[0].min(p.h);
        rows.flat_map(|i| (0..p.stride[1].min(p.w)).map(move |j| [i, j]))
            .map(|remainders| Part::new(spec, p, remainders).ok())
            .collect()
    }
}

/// The method [`ImplicitData`], if it is faster than cuDNN's gradient or cuDNN has no kernel.
pub(crate) struct ImplicitDataMethod;

impl ImplicitDataMethod {
    /// True if it comes before cuDNN's: the plan's algorithm is [`Conv2dAlgorithm::ImplicitGemm`], or f32 is not
    /// rounded to TF32 and cuDNN's is expected to be slower.
    pub(crate) fn leads(gpu: &Gpu, task: &Task<'_>) -> bool {
        let micros = || ImplicitData::micros(gpu, task);
        match task.algorithm() {
            Conv2dAlgorithm::ImplicitGemm => micros().is_finite(),
            _ => is_strict(task.spec) && micros() < 0.9 * gathered_micros(task),
        }
    }
}

impl GradientMethod<dyn DataGradient> for ImplicitDataMethod {
    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Option<Box<dyn DataGradient>>> {
        let taken = |task: &Task<'_>| {
            let im2col = || methods::micros(&task.by(Conv2dAlgorithm::Im2colGemm));
            Self::leads(gpu, task) || !task.is_few() && ImplicitData::micros(gpu, task) < im2col()
        };
        match task.for_choice(taken) {
            true if ImplicitData::micros(gpu, task).is_finite() => {
                Ok(Some(Box::new(ImplicitData::new(gpu, task)?)))
            }
            true => Err(methods::too_many_images(task)),
            false => Ok(None),
        }
    }
}

/// The expected microseconds of a data gradient that is not a convolution of dy, by cuDNN or, for few channels, with
/// one thread for each element.
fn gathered_micros(task: &Task<'_>) -> f64 {
    match task.problem.c_group() < 8 {
        true => {
            let (launch, flop) = task.chip.rates.gradients.few_data;
            launch + flop * task.problem.flops()
        }
        false => kernel_micros(task),
    }
}

impl ImplicitData {
    /// Parts are launched one after the other.
    const MAX_PARTS: usize = 16;

    /// The expected microseconds; infinite if the method does not compute the gradient.
    fn micros(gpu: &Gpu, task: &Task<'_>) -> f64 {
        let (spec, p) = (task.spec, task.problem);
        if !methods::allows(&task.by(Conv2dAlgorithm::ImplicitGemm))
            || p.n == 0
            || p.stride[0].saturating_mul(p.stride[1]) > Self::MAX_PARTS
        {
            return f64::INFINITY;
        }
        let supported = |part: &Part| supports(&ImplicitGemmMethod, gpu, &part.task(task));
        match Part::all(spec, p).filter(|parts| parts.iter().all(supported)) {
            // Each packs its taps.
            Some(parts) => {
                parts.iter().map(|part| 3.0 + ImplicitGemmMethod.micros(&part.task(task))).sum()
            }
            None => f64::INFINITY,
        }
    }

    fn new(gpu: &'static Gpu, task: &Task<'_>) -> Result<Self> {
        let parts = Part::all(task.spec, task.problem).unwrap_or_default().into_iter();
        let parts = parts.map(|part| {
            let engine = ImplicitGemm::transposed(gpu, &part.task(task))?;
            Ok((part, engine))
        });
        Ok(ImplicitData { parts: parts.collect::<Result<_>>()? })
    }

    fn packed_bytes(&self) -> usize {
        self.parts.iter().map(|(_, engine)| engine.packed_bytes()).sum()
    }
}

impl DataGradient for ImplicitData {
    /// The filters of all parts, and scratch memory of a part at a time.
    fn scratch_bytes(&self) -> usize {
        let scratch = self.parts.iter().map(|(_, engine)| engine.scratch_bytes()).max();
        self.packed_bytes() + scratch.unwrap_or(0)
    }

    fn tolerance(&self) -> f64 {
        self.parts.iter().map(|(_, engine)| engine.tolerance()).fold(0.0, f64::max)
    }

    unsafe fn run(&self, stream: &Stream, w: *const u8, operands: Operands) -> Result<()> {
        let mut packed = operands.scratch;
        let scratch = packed.wrapping_add(self.packed_bytes());
        for (Part { spec, first, .. }, engine) in &self.parts {
            let [first_w, first_dy, first_dx] = first.map(|at| at * spec.x.dtype.size() as isize);
            let operands = Operands {
                x: operands.x.wrapping_offset(first_dy),
                y: operands.y.wrapping_offset(first_dx),
                scratch,
                ..operands
            };
            // SAFETY: the caller's promise: a part has elements of the tensors, and its own memory for the filter.
            unsafe {
                let to = PackTo { memory: packed, ticket: None };
                engine.pack(stream, w.wrapping_offset(first_w), to)?;
                engine.run(stream, packed, operands)?;
                packed = packed.add(engine.packed_bytes());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::conv2d::{Conv2dParams, reference};

    /// The parts of each problem, added up by plain loops, are the oracle's gradient.
    #[test]
    fn parts_make_the_whole_gradient() {
        for (size, taps, stride, padding, dilation, groups) in [
            (9, 3, 2, 1, 1, 1),
            (8, 1, 2, 0, 1, 1),
            (7, 3, 3, 2, 2, 2),
            (10, 4, 2, 0, 2, 1),
            (6, 2, 4, 1, 1, 1),
            (9, 3, 1, 4, 2, 2),
            (5, 3, 1, 1, 1, 1),
        ] {
            let x = TensorDesc::contiguous(DType::F32, &[2, 4, size, size + 1]).unwrap();
            let w = TensorDesc::contiguous(DType::F32, &[6, 4 / groups, taps, taps]).unwrap();
            let params = Conv2dParams {
                stride: [stride; 2],
                padding: [padding; 2],
                dilation: [dilation; 2],
                groups,
                ..Default::default()
            };
            let spec = Conv2dSpec::new(x, w, &params).unwrap();
            let p = spec.problem().unwrap();
            let filter: Vec<f64> = (0..w.layout.len()).map(|i| (i as f64 * 0.7).sin()).collect();
            let dy: Vec<f64> = (0..spec.y.layout.len()).map(|i| (i as f64 * 0.3).cos()).collect();
            let want = reference::backward_data(&p, &filter, &dy).unwrap().values;
            let mut dx = vec![f64::NAN; want.len()];
            for part in Part::all(&spec, &p).unwrap() {
                let q = part.problem;
                let at = |tensor: usize, desc: &TensorDesc, index: [usize; 4]| {
                    (part.first[tensor] + desc.layout.offset(&index)) as usize
                };
                for n in 0..q.n {
                    for (k, i, j) in (0..q.k).flat_map(|k| {
                        (0..q.oh).flat_map(move |i| (0..q.ow).map(move |j| (k, i, j)))
                    }) {
                        let (group, in_group) = (k / q.k_group(), k % q.k_group());
                        let mut sum = 0.0;
                        for (c, r, s) in (0..q.c_group()).flat_map(|c| {
                            (0..q.r).flat_map(move |r| (0..q.s).map(move |s| (c, r, s)))
                        }) {
                            let row = (i + r * q.dilation[0]).wrapping_sub(q.padding[0]);
                            let column = (j + s * q.dilation[1]).wrapping_sub(q.padding[1]);
                            if row < q.h && column < q.w {
                                let c_all = group * q.c_group() + c;
                                // The filter of a group is as far on as its terms.
                                let w = at(0, &part.spec.w, [in_group, c, r, s])
                                    + group * q.c_group() * spec.w.strides()[0] as usize;
                                sum += filter[w] * dy[at(1, &part.spec.x, [n, c_all, row, column])];
                            }
                        }
                        dx[at(2, &part.spec.y, [n, k, i, j])] = sum;
                    }
                }
            }
            for (got, want) in dx.iter().zip(&want) {
                assert!((got - want).abs() < 1e-12, "{got} {want}: {size} {taps} {stride}");
            }
        }
    }
}
