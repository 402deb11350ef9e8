//! Matrix products by cuBLASLt.
//!
//! It counts in columns, as Fortran does: row-major memory of `A` (`m` x `k`) is, read that way, `A^T` (`k` x `m`).
//! Instead of transposing anything, the product is asked for as `C^T = B^T A^T`: operands swapped, `m` and `n`
//! swapped, and a stored transpose staying one.

use super::toolkit;
use crate::dtype::by_type;
use crate::gpu::library::{Describe, Library, describe, library};
use crate::gpu::made;
use crate::gpu::{Failure, GemmCompute, GemmOperands, GemmSpec, Handle, Matrix, Outcome, Product};
use crate::{Device, Error, Result};
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{LazyLock, Mutex};

static LIBCUBLASLT: Library = toolkit("libcublasLt.so", "nvidia-cublas");

/// `cublasLtMatmulAlgo_t`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Algorithm([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Default)]
struct Found {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

library! {
    struct CublasLt in LIBCUBLASLT;

    fn cublasLtGetStatusName(status: c_int) -> *const c_char;
    fn cublasLtCreate(handle: *mut Handle);
    fn cublasLtMatmulDescCreate(operation: *mut Handle, compute: c_int, scale: c_int);
    fn cublasLtMatmulDescDestroy(operation: Handle);
    fn cublasLtMatmulDescSetAttribute(operation: Handle, name: c_int, value: *const c_void, bytes: usize);
    fn cublasLtMatrixLayoutCreate(layout: *mut Handle, dtype: c_int, rows: u64, columns: u64, stride: i64);
    fn cublasLtMatrixLayoutDestroy(layout: Handle);
    fn cublasLtMatrixLayoutSetAttribute(layout: Handle, name: c_int, value: *const c_void, bytes: usize);
    fn cublasLtMatmulPreferenceCreate(preference: *mut Handle);
    fn cublasLtMatmulPreferenceDestroy(preference: Handle);
    fn cublasLtMatmulPreferenceSetAttribute(
        preference: Handle,
        name: c_int,
        value: *const c_void,
        bytes: usize,
    );
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: Handle,
        operation: Handle,
        a: Handle,
        b: Handle,
        c: Handle,
        d: Handle,
        preference: Handle,
        wanted: c_int,
        found: *mut Found,
        count: *mut c_int,
    );
    fn cublasLtMatmulAlgoCheck(
        handle: Handle,
        operation: Handle,
        a: Handle,
        b: Handle,
        c: Handle,
        d: Handle,
        algorithm: *const Algorithm,
        found: *mut Found,
    );
    fn cublasLtMatmul(
        handle: Handle,
        operation: Handle,
        alpha: *const c_void,
        a: *const c_void,
        a_layout: Handle,
        b: *const c_void,
        b_layout: Handle,
        beta: *const c_void,
        c: *const c_void,
        c_layout: Handle,
        d: *mut c_void,
        d_layout: Handle,
        algorithm: *const Algorithm,
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: Handle,
    );
}

describe!(CublasLt by cublasLtGetStatusName);

/// `cublasStatus_t`
const NOT_SUPPORTED: c_int = 15;
/// The maximum workspace of an algorithm in bytes: that of cuBLAS itself on Hopper.
const MAX_WORKSPACE: usize = 32 << 20;

/// `Ok` if cuBLASLt was found.
///
/// # Errors
/// [`Error::Backend`], which says what to install.
pub(super) fn available() -> Result<()> {
    CublasLt::get().map(|_| ())
}

/// A product with an algorithm of cuBLASLt chosen by its heuristic.
#[derive(Debug)]
pub(super) struct CublasLtProduct {
    library: &'static CublasLt,
    handle: Handle,
    operation: Descriptor,
    /// The layouts of cuBLASLt's first operand (our B), of its second (our A), and of the result.
    layouts: [Descriptor; 3],
    algorithm: Algorithm,
    workspace_bytes: usize,
}

// SAFETY: "the cuBLASLt handle can be used from any thread", says its documentation.
unsafe impl Send for CublasLtProduct {}
// SAFETY: by several threads at once, says the same sentence; descriptors are only read.
unsafe impl Sync for CublasLtProduct {}

impl CublasLtProduct {
    /// The product on the device of this index, which is current, by the algorithm that the heuristic chooses for `like`, or
    /// for the product itself.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if cuBLASLt has no algorithm, or if this one does not compute the product; [`Error::Backend`]
    /// without cuBLASLt, or if it fails.
    pub(super) fn new(index: u32, spec: &GemmSpec, like: Option<&GemmSpec>) -> Result<Self> {
        let library = CublasLt::get()?;
        let device = Device::Cuda(index);
        let count = c_int::try_from(spec.batch)
            .map_err(|_| Error::parameter("batch", spec.batch, "below 2^31 products"))?;
        Self::find(library, index, spec, like, count)
            .map_err(|failure| failure.on(device))?
            .ok_or_else(|| {
                let GemmSpec { m, n, k, batch, .. } = *spec;
                Error::unsupported(
                    format!("{batch} products of {m} x {k} by {k} x {n} on {device}"),
                    "cuBLASLt has no algorithm for them",
                )
            })
    }

    fn find(
        library: &'static CublasLt,
        index: u32,
        spec: &GemmSpec,
        like: Option<&GemmSpec>,
        batch: c_int,
    ) -> Outcome<Option<Self>> {
        let handle = handle(library, index)?;
        let GemmSpec { a, b, c, compute, .. } = *spec;
        let operation = operation(library, compute, [b.transposed, a.transposed])?;
        let layouts = layouts(library, spec, batch)?;
        let layouts_of_like = like.map(|like| self::layouts(library, like, batch)).transpose()?;
        let preference = preference(library, [&b, &a, &c])?;
        let (mut found, mut count) = (Found::default(), 0);
        let [first, second, result] = raw(layouts_of_like.as_ref().unwrap_or(&layouts));
        // SAFETY: all descriptors are alive, and there is room for the one result asked for.
        let outcome = unsafe {
            library.cublasLtMatmulAlgoGetHeuristic(
                handle,
                operation.raw,
                first,
                second,
                result,
                result,
                preference.raw,
                1,
                &mut found,
                &mut count,
            )
        };
        match outcome {
            Err(Failure { status: NOT_SUPPORTED, .. }) => return Ok(None),
            _ if count == 0 => return Ok(None),
            outcome => outcome?,
        }
        library.check("cublasLtMatmulAlgoGetHeuristic", found.state)?;
        let algorithm = found.algorithm;
        if like.is_some() {
            let [first, second, result] = raw(&layouts);
            // SAFETY: all descriptors are alive, and the call writes one result.
            let outcome = unsafe {
                library.cublasLtMatmulAlgoCheck(
                    handle,
                    operation.raw,
                    first,
                    second,
                    result,
                    result,
                    &algorithm,
                    &mut found,
                )
            };
            match outcome {
                Err(Failure { status: NOT_SUPPORTED, .. }) => return Ok(None),
                outcome => outcome?,
            }
            library.check("cublasLtMatmulAlgoCheck", found.state)?;
        }
        let workspace_bytes = found.workspace_bytes.next_multiple_of(256);
        Ok(Some(CublasLtProduct {
            library,
            handle,
            operation,
            layouts,
            algorithm,
            workspace_bytes,
        }))
    }
}

impl Product for CublasLtProduct {
    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    unsafe fn run(&self, operands: GemmOperands, stream: Handle, add: bool) -> Outcome<()> {
        let GemmOperands { a, b, c, workspace } = operands;
        let (one, beta) = (1f32, if add { 1f32 } else { 0f32 });
        let [first, second, result] = raw(&self.layouts);
        // SAFETY: the descriptors are alive, the scalars are f32 as the operation says and are read
        // before the call returns; the rest is the caller's promise.
        unsafe {
            self.library.cublasLtMatmul(
                self.handle,
                self.operation.raw,
                (&raw const one).cast(),
                b.cast(),
                first,
                a.cast(),
                second,
                (&raw const beta).cast(),
                c.cast(),
                result,
                c.cast(),
                result,
                &self.algorithm,
                workspace.cast(),
                self.workspace_bytes,
                stream,
            )
        }
    }
}

/// cuBLASLt's state for a device, which is current. Made once, lives as long as the process, used by any thread.
fn handle(library: &CublasLt, index: u32) -> Outcome<Handle> {
    static HANDLES: LazyLock<Mutex<HashMap<u32, usize>>> = LazyLock::new(Mutex::default);
    let mut handles = HANDLES.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(handle) = handles.get(&index) {
        return Ok(*handle as Handle);
    }
    // SAFETY: the device is current; the call writes one pointer.
    let raw = made(|raw| unsafe { library.cublasLtCreate(raw) })?;
    handles.insert(index, raw as usize);
    Ok(raw)
}

/// A descriptor of cuBLASLt, destroyed when dropped. Read-only once made.
#[derive(Debug)]
struct Descriptor {
    raw: Handle,
    library: &'static CublasLt,
    kind: Kind,
}

/// The functions of a kind of descriptor.
#[derive(Debug)]
struct Kind {
    set: unsafe fn(&CublasLt, Handle, c_int, *const c_void, usize) -> Outcome<()>,
    destroy: unsafe fn(&CublasLt, Handle) -> Outcome<()>,
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by the constructor and not used after.
        let _ = unsafe { (self.kind.destroy)(self.library, self.raw) };
    }
}

impl Descriptor {
    /// Sets an attribute.
    fn set<V>(&self, name: c_int, value: &V) -> Outcome<()> {
        let (value, bytes) = (std::ptr::from_ref(value).cast(), size_of::<V>());
        // SAFETY: the descriptor is alive and the value of the attribute's size.
        unsafe { (self.kind.set)(self.library, self.raw, name, value, bytes) }
    }
}

fn operation(
    library: &'static CublasLt,
    compute: GemmCompute,
    transposed: [bool; 2],
) -> Outcome<Descriptor> {
    // `cublasComputeType_t`, `cudaDataType_t`
    let compute = match compute {
        GemmCompute::F32 => 68,
        GemmCompute::Tf32 => 77,
    };
    const SCALE_F32: c_int = 0;
    // `cublasLtMatmulDescAttributes_t`
    const TRANSPOSED: [c_int; 2] = [3, 4];
    // SAFETY: the call writes one pointer.
    let raw = made(|raw| unsafe { library.cublasLtMatmulDescCreate(raw, compute, SCALE_F32) })?;
    let kind = Kind {
        set: CublasLt::cublasLtMatmulDescSetAttribute,
        destroy: CublasLt::cublasLtMatmulDescDestroy,
    };
    let operation = Descriptor { raw, library, kind };
    for (name, transposed) in TRANSPOSED.into_iter().zip(transposed) {
        // `cublasOperation_t`: N, T.
        operation.set(name, &i32::from(transposed))?;
    }
    Ok(operation)
}

/// The layouts of cuBLASLt's first operand (our B), of its second (our A), and of the result.
fn layouts(library: &'static CublasLt, spec: &GemmSpec, batch: c_int) -> Outcome<[Descriptor; 3]> {
    let GemmSpec { m, n, k, a, b, c, .. } = *spec;
    Ok([
        layout(library, &b, if b.transposed { (k, n) } else { (n, k) }, batch)?,
        layout(library, &a, if a.transposed { (m, k) } else { (k, m) }, batch)?,
        layout(library, &c, (n, m), batch)?,
    ])
}

fn raw(layouts: &[Descriptor; 3]) -> [Handle; 3] {
    layouts.each_ref().map(|layout| layout.raw)
}

/// The layout of a column-major `rows` x `columns` matrix.
fn layout(
    library: &'static CublasLt,
    x: &Matrix,
    (rows, columns): (usize, usize),
    count: c_int,
) -> Outcome<Descriptor> {
    // `cudaDataType_t`
    let dtype = by_type!(x.dtype, F32 => 0, F16 => 2, BF16 => 14);
    // `cublasLtMatrixLayoutAttribute_t`
    const BATCH_COUNT: c_int = 5;
    const BATCH_STRIDE: c_int = 6;
    let (rows, columns, stride) = (rows as u64, columns as u64, x.row_stride as i64);
    // SAFETY: the call writes one pointer.
    let raw = made(|raw| unsafe {
        library.cublasLtMatrixLayoutCreate(raw, dtype, rows, columns, stride)
    })?;
    let kind = Kind {
        set: CublasLt::cublasLtMatrixLayoutSetAttribute,
        destroy: CublasLt::cublasLtMatrixLayoutDestroy,
    };
    let layout = Descriptor { raw, library, kind };
    layout.set(BATCH_COUNT, &count)?;
    layout.set(BATCH_STRIDE, &(x.batch_stride as i64))?;
    Ok(layout)
}

fn preference(library: &'static CublasLt, operands: [&Matrix; 3]) -> Outcome<Descriptor> {
    // `cublasLtMatmulPreferenceAttributes_t`
    const WORKSPACE_BYTES: c_int = 1;
    const REDUCTION_SCHEMES: c_int = 3;
    const ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];
    // SAFETY: the call writes one pointer.
    let raw = made(|raw| unsafe { library.cublasLtMatmulPreferenceCreate(raw) })?;
    let kind = Kind {
        set: CublasLt::cublasLtMatmulPreferenceSetAttribute,
        destroy: CublasLt::cublasLtMatmulPreferenceDestroy,
    };
    let preference = Descriptor { raw, library, kind };
    preference.set(WORKSPACE_BYTES, &MAX_WORKSPACE)?;
    // Where a sum is split, its parts stay f32 and are added in a fixed order: the scheme "compute type".
    preference.set(REDUCTION_SCHEMES, &2u32)?;
    let [first, second, result] = operands.map(|x| x.alignment.min(256) as u32);
    for (name, alignment) in ALIGNMENTS.into_iter().zip([first, second, result, result]) {
        preference.set(name, &alignment)?;
    }
    Ok(preference)
}
