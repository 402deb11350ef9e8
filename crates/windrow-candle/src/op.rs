//! The way to give candle an operator with any number of arguments.

use crate::storage::{Memory, View};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Storage, Tensor,
};

/// An operator whose arguments are candle's: they are locked for the call, and gradients flow to
/// them.
pub(crate) trait Operator: Send + Sync + 'static {
    const NAME: &'static str;

    /// The result's storage and its shape in memory.
    fn forward(&self, args: &[View<'_>]) -> Result<(Storage, Shape)>;

    /// Gradients of those arguments that need one.
    fn backward(&self, args: &[&Tensor], y: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>>;
}

/// Applies an operator to one, two or three tensors.
pub(crate) fn apply<T: Operator>(operator: T, args: &[&Tensor]) -> Result<Tensor> {
    let op = Op(operator);
    match args {
        [x] => x.apply_op1(op),
        [x, y] => x.apply_op2(y, op),
        [x, y, z] => x.apply_op3(y, z, op),
        _ => unreachable!("an operator has one to three arguments"),
    }
}

struct Op<T>(T);

impl<T: Operator> Op<T> {
    fn run(&self, args: &[(Memory<'_>, &Layout)]) -> Result<(Storage, Shape)> {
        let views = args.iter().map(|(memory, layout)| memory.view(T::NAME, layout));
        self.0.forward(&views.collect::<Result<Vec<_>>>()?)
    }

    fn cpu(&self, args: &[(Memory<'_>, &Layout)]) -> Result<(CpuStorage, Shape)> {
        match self.run(args)? {
            (Storage::Cpu(storage), shape) => Ok((storage, shape)),
            _ => unreachable!("results are where the arguments are"),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, args: &[(Memory<'_>, &Layout)]) -> Result<(CudaStorage, Shape)> {
        match self.run(args)? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            _ => unreachable!("results are where the arguments are"),
        }
    }

    fn gradients<const N: usize>(
        &self,
        args: [&Tensor; N],
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<[Option<Tensor>; N]> {
        let mut gradients = self.0.backward(&args, y, dy)?.into_iter();
        Ok(std::array::from_fn(|_| gradients.next().flatten()))
    }
}

impl<T: Operator> CustomOp1 for Op<T> {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        self.cpu(&[(Memory::Cpu(s), l)])
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, s: &CudaStorage, l: &Layout) -> Result<(CudaStorage, Shape)> {
        self.cuda(&[(Memory::Cuda(s), l)])
    }

    fn bwd(&self, arg: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let [d] = self.gradients([arg], y, dy)?;
        Ok(d)
    }
}

impl<T: Operator> CustomOp2 for Op<T> {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.cpu(&[(Memory::Cpu(s1), l1), (Memory::Cpu(s2), l2)])
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        s1: &CudaStorage,
        l1: &Layout,
        s2: &CudaStorage,
        l2: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.cuda(&[(Memory::Cuda(s1), l1), (Memory::Cuda(s2), l2)])
    }

    fn bwd(
        &self,
        arg1: &Tensor,
        arg2: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [d1, d2] = self.gradients([arg1, arg2], y, dy)?;
        Ok((d1, d2))
    }
}

impl<T: Operator> CustomOp3 for Op<T> {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.cpu(&[(Memory::Cpu(s1), l1), (Memory::Cpu(s2), l2), (Memory::Cpu(s3), l3)])
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        s1: &CudaStorage,
        l1: &Layout,
        s2: &CudaStorage,
        l2: &Layout,
        s3: &CudaStorage,
        l3: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.cuda(&[(Memory::Cuda(s1), l1), (Memory::Cuda(s2), l2), (Memory::Cuda(s3), l3)])
    }

    fn bwd(
        &self,
        arg1: &Tensor,
        arg2: &Tensor,
        arg3: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [d1, d2, d3] = self.gradients([arg1, arg2, arg3], y, dy)?;
        Ok((d1, d2, d3))
    }
}
