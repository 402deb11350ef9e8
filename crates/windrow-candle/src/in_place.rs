//! Operators that write into a tensor that the caller owns.

use crate::storage::{Held, View, ViewMut, view_mut};
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor};
use std::cell::RefCell;

/// Runs `work` with views of `sources` and of the tensor that it writes into.
///
/// # Errors
/// What `work` returns, and an error if the target takes part in a gradient, which writing would
/// make wrong, has elements that share memory, or shares storage with a source.
pub(crate) fn in_place(
    op: &'static str,
    target: (&'static str, &Tensor),
    sources: &[(&'static str, &Tensor)],
    work: impl FnMut(&[View<'_>], &mut ViewMut<'_>) -> Result<()>,
) -> Result<()> {
    let (name, target) = target;
    if target.track_op() {
        candle_core::bail!("{op}: `{name}` takes part in a gradient, expected a detached tensor")
    }
    let address = Held::new(target).storage_address(op)?;
    let mut held = Vec::with_capacity(sources.len());
    for &(source_name, source) in sources {
        let source = Held::new(source);
        // candle locks storage as a whole: waiting for the lock would be for ever.
        if address.is_some() && source.storage_address(op)? == address {
            candle_core::bail!(
                "{op}: `{name}` shares storage with `{source_name}`, expected a tensor of its own"
            )
        }
        held.push(source);
    }
    let views = held.iter().map(|source| source.view(op)).collect::<Result<Vec<_>>>()?;
    target.inplace_op1(&Write { op, views, work: RefCell::new(work) })
}

struct Write<'a, F> {
    op: &'static str,
    views: Vec<View<'a>>,
    work: RefCell<F>,
}

impl<F: FnMut(&[View<'_>], &mut ViewMut<'_>) -> Result<()>> InplaceOp1 for Write<'_, F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let mut target = view_mut(self.op, storage, layout)?;
        (self.work.borrow_mut())(&self.views, &mut target)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> Result<()> {
        let stream = storage.device.cuda_stream();
        let mut target = crate::storage::cuda_view_mut(self.op, storage, &stream, layout)?;
        (self.work.borrow_mut())(&self.views, &mut target)
    }
}
