//! Gradients of GELU on GPUs.

use super::loops::{Dim, Loops, Words, bias_strides, strides};
use super::{Forward, INCLUDES, THREADS, kernel_spec};
use crate::gelu::{GeluArgs, GeluGrads, GeluSpec};
use crate::gpu::{KernelSpec, Launch, Source, Stream, column_sum};
use crate::{Result, TensorDesc, TensorMut, TensorRef, Workspace};

static BACKWARD: Source =
    Source { name: "backward.cu", text: include_str!("backward.cu"), includes: INCLUDES };
static BIAS_GRADIENT: Source =
    Source { name: "bias_gradient.cu", text: include_str!("bias_gradient.cu"), includes: INCLUDES };

/// The properties of a call, in addition to the plan's spec, for which a separate gradient kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Elementwise { rank: usize, unit: bool, dx: bool, dgate: bool },
    Bias { rank: usize },
}

impl Forward {
    /// Computes the gradients. A kernel is compiled at the first call with a new combination of rank, contiguity and
    /// requested gradients.
    pub(in crate::gelu) fn backward(
        &self,
        spec: &GeluSpec,
        args: &GeluArgs<'_>,
        dy: &TensorRef<'_>,
        grads: &GeluGrads<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let (stream, partial) = workspace.take_on(self.kernel.gpu(), workspace_bytes(spec))?;
        if grads.dx.is_some() || grads.dgate.is_some() {
            self.elementwise(spec, args, dy, grads, stream)?;
        }
        match &grads.dbias {
            Some(dbias) => self.bias_gradient(spec, args, dy, dbias, stream, partial),
            None => Ok(()),
        }
    }

    fn elementwise(
        &self,
        spec: &GeluSpec,
        args: &GeluArgs<'_>,
        dy: &TensorRef<'_>,
        grads: &GeluGrads<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let (loops, words) = backward_words(spec, args, dy, grads);
        if loops.is_empty() {
            return Ok(());
        }
        let vector = vector_of(spec, loops.unit);
        let launch = loops.launch(vector, vector, 1, THREADS);
        let (dx, dgate) = (grads.dx.is_some(), grads.dgate.is_some());
        let key = Key::Elementwise { rank: loops.rank(), unit: loops.unit, dx, dgate };
        let kernel = self
            .gradients
            .get(self.kernel.gpu(), key, || backward_kernel(spec, &loops, &words, dx, dgate))?;
        // SAFETY: the words are the kernel's parameters, and the views were checked to be on this
        // device and of the spec's shapes.
        unsafe { kernel.launch(stream, launch, &words) }
    }

    fn bias_gradient(
        &self,
        spec: &GeluSpec,
        args: &GeluArgs<'_>,
        dy: &TensorRef<'_>,
        dbias: &TensorMut<'_>,
        stream: &Stream,
        partial: *mut u8,
    ) -> Result<()> {
        let (rows, columns) = rows_and_columns(&spec.x);
        if columns == 0 {
            return Ok(());
        }
        let gpu = self.kernel.gpu();
        let (loops, words) = bias_gradient_words(spec, args, dy, partial);
        let key = Key::Bias { rank: loops.rank() };
        let kernel = self.gradients.get(gpu, key, || bias_gradient_kernel(spec, &loops, &words))?;
        let chunks = rows.div_ceil(bias_chunk(rows, columns));
        let launch = Launch {
            grid: [columns.div_ceil(THREADS) as u32, chunks.min(65535) as u32, 1],
            block: [THREADS as u32, 1, 1],
        };
        // SAFETY: the words are the kernel's parameters, the views were checked to be on this
        // device and of the spec's shapes, and the workspace holds `chunks` rows of partial sums.
        unsafe {
            kernel.launch(stream, launch, &words)?;
            column_sum(gpu, stream, partial.cast(), [chunks, columns, columns], dbias)
        }
    }
}

/// The number of rows in one partial sum of a bias gradient. It depends only on the shape, so that results do not
/// depend on the GPU.
fn bias_chunk(rows: usize, columns: usize) -> usize {
    rows.div_ceil(((1 << 18) / columns.max(1)).max(1)).max(1)
}

/// Rows and columns of a bias gradient's sum.
fn rows_and_columns(x: &TensorDesc) -> (usize, usize) {
    let columns = x.shape().last().copied().unwrap_or(1);
    (x.shape().iter().rev().skip(1).product(), columns)
}

/// Bytes of workspace for a backward run.
pub(in crate::gelu) fn workspace_bytes(spec: &GeluSpec) -> usize {
    let (rows, columns) = rows_and_columns(&spec.x);
    if spec.bias.is_none() {
        return 0;
    }
    rows.div_ceil(bias_chunk(rows, columns)) * columns * size_of::<f32>()
}

fn pointer(view: Option<&TensorRef<'_>>) -> *const u8 {
    view.map_or(std::ptr::null(), TensorRef::as_ptr)
}

/// The number of elements in a 16-byte access if elements are contiguous, otherwise 1.
fn vector_of(spec: &GeluSpec, unit: bool) -> usize {
    if unit { 16 / spec.x.dtype.size() } else { 1 }
}

pub(super) fn backward_words(
    spec: &GeluSpec,
    args: &GeluArgs<'_>,
    dy: &TensorRef<'_>,
    grads: &GeluGrads<'_>,
) -> (Loops<6>, Words) {
    let rank = spec.x.layout.rank();
    let (dx, dgate) = (grads.dx.as_ref(), grads.dgate.as_ref());
    let desc = |t: Option<&TensorMut<'_>>| strides(t.map(TensorMut::desc));
    // An output that is requested comes first, because it decides the order.
    let first = desc(dx.or(dgate));
    let operands = [
        first,
        strides(Some(args.x.desc())),
        strides(args.gate.as_ref().map(TensorRef::desc)),
        bias_strides(spec.bias.as_ref(), rank),
        strides(Some(dy.desc())),
        desc(dgate),
    ];
    let unit = [true, true, spec.gate.is_some(), false, true, dgate.is_some()];
    let loops = Loops::new(spec.x.shape(), operands, unit);
    let mut words = Words::new();
    loops.push_shape(&mut words);
    let address = |t: Option<&TensorMut<'_>>| t.map_or(std::ptr::null(), TensorMut::as_ptr);
    loops.push_operand(&mut words, "x", 1, args.x.as_ptr());
    loops.push_operand(&mut words, "gate", 2, pointer(args.gate.as_ref()));
    loops.push_operand(&mut words, "bias", 3, pointer(args.bias.as_ref()));
    loops.push_operand(&mut words, "dy", 4, dy.as_ptr());
    loops.push_operand(&mut words, "dx", 0, address(dx));
    loops.push_operand(&mut words, "dgate", 5, address(dgate));
    (loops, words)
}

pub(super) fn backward_kernel(
    spec: &GeluSpec,
    loops: &Loops<6>,
    words: &Words,
    dx: bool,
    dgate: bool,
) -> KernelSpec {
    let vector = vector_of(spec, loops.unit);
    let entry = format!("gelu_backward_{}", spec.x.dtype);
    kernel_spec(&BACKWARD, entry, spec, loops, (vector, vector), words)
        .define("DX", u8::from(dx))
        .define("DGATE", u8::from(dgate))
        .overlapped(false)
}

pub(super) fn bias_gradient_words(
    spec: &GeluSpec,
    args: &GeluArgs<'_>,
    dy: &TensorRef<'_>,
    partial: *const u8,
) -> (Loops<4>, Words) {
    let (rows, columns) = rows_and_columns(&spec.x);
    let rank = spec.x.layout.rank();
    let operands = [
        strides(Some(args.x.desc())),
        strides(args.gate.as_ref().map(TensorRef::desc)),
        bias_strides(spec.bias.as_ref(), rank),
        strides(Some(dy.desc())),
    ];
    // The last dimension stays separate, because the sums do not run over it.
    let last = Dim { size: columns, strides: operands.map(|s| s[rank - 1]) };
    let rest = Loops::new(&spec.x.shape()[..rank - 1], operands, [false; 4]);
    let mut outer = rest.outer;
    if rank > 1 {
        outer.insert(0, rest.inner);
    }
    let loops = Loops { inner: last, outer, unit: false };
    let mut words = Words::new();
    loops.push_shape(&mut words);
    let pointers = [
        ("x", args.x.as_ptr()),
        ("gate", pointer(args.gate.as_ref())),
        ("bias", pointer(args.bias.as_ref())),
        ("dy", dy.as_ptr()),
    ];
    for (i, (name, pointer)) in pointers.into_iter().enumerate() {
        loops.push_operand(&mut words, name, i, pointer);
    }
    words.begin("partial");
    words.push(partial as usize);
    words.begin("chunk");
    words.push(bias_chunk(rows, columns));
    (loops, words)
}

pub(super) fn bias_gradient_kernel(spec: &GeluSpec, loops: &Loops<4>, words: &Words) -> KernelSpec {
    let entry = format!("gelu_bias_gradient_{}", spec.x.dtype);
    kernel_spec(&BIAS_GRADIENT, entry, spec, loops, (1, 1), words).overlapped(false)
}
