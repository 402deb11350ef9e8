//! Convolutions on the CPU of which each reads the result of the one before it, as one run.

use super::{Conv2dPlan, PackedWeights, Weights};
use crate::conv2d::cpu::{self, Bands, Link, LinkArgs, Slices};
use crate::cpu::second_level_cache;
use crate::plan::{Backend, Checks};
use crate::tensor::check_device;
use crate::{Device, Error, Result, TensorMut, TensorRef, Verify, Workspace};
use std::sync::Arc;

/// Convolutions on the CPU of which each reads the result of the one before it, as one run. It computes them by bands of
/// rows or by slices of channels, so that what is between them stays in the second-level cache. The last result has the
/// same bits as that of the plans one by one.
#[derive(Debug)]
pub struct Conv2dChain {
    plans: Vec<Arc<Conv2dPlan>>,
    form: Form,
}

#[derive(Debug)]
enum Form {
    Bands(Bands),
    /// Of two convolutions.
    Slices(Box<Slices>),
}

/// The convolution for the computation by bands; `None` for plans on GPUs and those that verify.
fn link(plan: &Conv2dPlan) -> Option<Link<'_>> {
    match &plan.backend {
        Backend::Cpu(engine) if plan.options.verify == Verify::Off => Some(Link {
            spec: &plan.spec,
            problem: &plan.problem,
            prepared: &*engine.prepared,
            isa: engine.isa,
            threads: engine.threads,
        }),
        _ => None,
    }
}

/// The bytes of the second-level cache for what is between convolutions: for all that of bands, and for a slice, beside
/// the whole image. The rest is for images, results and filters.
fn cache() -> [usize; 2] {
    [second_level_cache() / 2, second_level_cache() / 8]
}

/// The packed form of a filter that is not given in this form.
fn kept(plan: &Conv2dPlan, w: &Weights<'_>) -> Result<Option<Arc<PackedWeights>>> {
    match (&plan.backend, w) {
        (Backend::Cpu(engine), Weights::Cached(w, cache)) => engine.kept(plan, w, cache).map(Some),
        (Backend::Cpu(engine), Weights::Raw(w)) => {
            plan.pack_on_cpu(engine, w).map(|packed| Some(Arc::new(packed)))
        }
        _ => Ok(None),
    }
}

/// What a convolution of a chain reads beside its image.
#[derive(Clone, Copy, Debug)]
pub struct Conv2dLink<'a> {
    /// The filter.
    pub w: Weights<'a>,
    /// The bias, if the spec has one.
    pub bias: Option<TensorRef<'a>>,
    /// The residual, if the spec has one.
    pub residual: Option<TensorRef<'a>>,
}

impl Conv2dChain {
    /// The largest number of convolutions of a chain.
    pub const MOST: usize = 4;

    /// True if the second convolution, of the result of the first one, is faster in a chain with it.
    pub fn pays(first: &Conv2dPlan, second: &Conv2dPlan) -> bool {
        let (links, [bands, slices]) = (link(first).zip(link(second)), cache());
        links.is_some_and(|(first, second)| {
            cpu::pays(&first, &second, bands) || cpu::slices_pay(&first, &second, slices)
        })
    }

    /// The chain of plans for which [`Conv2dChain::pays`] is true, each with the one before it. `None` if there are too few
    /// or too many of them, or if not even some rows or channels between them fit into the cache.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(plans: &[Arc<Conv2dPlan>]) -> Result<Option<Self>> {
        Self::with_cache(plans, cache())
    }

    /// The same for a cache of so many bytes.
    fn with_cache(plans: &[Arc<Conv2dPlan>], [bands, slices]: [usize; 2]) -> Result<Option<Self>> {
        let links: Option<Vec<_>> = plans.iter().map(|plan| link(plan)).collect();
        let Some(links) = links.filter(|links| (2..=Self::MOST).contains(&links.len())) else {
            return Ok(None);
        };
        let mut form = None;
        if links.windows(2).all(|pair| cpu::pays(&pair[0], &pair[1], bands)) {
            form = Bands::new(&links, bands)?.map(Form::Bands);
        }
        if let (None, [first, second]) = (&form, &links[..]) {
            form = Slices::new(first, second, slices)?.map(|slices| Form::Slices(Box::new(slices)));
        }
        Ok(form.map(|form| Conv2dChain { plans: plans.to_vec(), form }))
    }

    /// Bytes of the workspace of a run.
    pub fn workspace_bytes(&self) -> usize {
        match &self.form {
            Form::Bands(bands) => bands.workspace_bytes(),
            Form::Slices(slices) => slices.workspace_bytes(),
        }
    }

    /// Computes the last result from the first image. `links` has the filter, bias and residual of each convolution.
    ///
    /// # Errors
    /// As [`Conv2dPlan::run`], and [`Error::Parameter`] if there are not as many links as plans.
    pub fn run(
        &self,
        x: &TensorRef<'_>,
        links: &[Conv2dLink<'_>],
        mut y: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        if links.len() != self.plans.len() {
            let expected = format!("{} of them", self.plans.len());
            return Err(Error::parameter("links", links.len(), expected));
        }
        check_device("workspace", workspace.device(), Device::Cpu)?;
        let mut checks = Checks::new(Device::Cpu);
        let (first, last) = (self.plans[0].spec(), self.plans[links.len() - 1].spec());
        checks.read("x", Some(x), Some(&first.x))?;
        for (plan, link) in self.plans.iter().zip(links) {
            let spec = plan.spec();
            checks.read("bias", link.bias.as_ref(), spec.bias.as_ref())?;
            let residual = spec.residual.then_some(&spec.y);
            checks.read("residual", link.residual.as_ref(), residual)?;
            if let Some(w) = link.w.view() {
                checks.read("w", Some(w), Some(&spec.w))?;
            }
            plan.check_packed(&link.w)?;
        }
        checks.write("y", Some(&y), Some(&last.y))?;
        let kept = self.plans.iter().zip(links).map(|(plan, link)| kept(plan, &link.w));
        let kept = kept.collect::<Result<Vec<_>>>()?;
        let mut args = Vec::with_capacity(links.len());
        for ((plan, link), kept) in self.plans.iter().zip(links).zip(&kept) {
            let packed = match &link.w {
                Weights::Packed(packed) => packed,
                _ => kept.as_deref().expect("what is not packed is kept"),
            };
            args.push(LinkArgs {
                packed: packed.elements().ok_or_else(|| packed.elsewhere(Device::Cpu))?,
                bias: link.bias,
                residual: link.residual,
                activation: plan.spec.activation,
            });
        }
        let memory = workspace.take(self.workspace_bytes())?;
        let (from, to) = (x.as_ptr().cast(), y.as_mut_ptr().cast());
        // SAFETY: all tensors were checked, and the plans' filters are packed in the form that they read.
        unsafe {
            match &self.form {
                Form::Bands(bands) => bands.run(&args, from, to, memory),
                Form::Slices(slices) => slices.run([&args[0], &args[1]], from, to, memory),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::{Conv2dAlgorithm, Conv2dArgs, Conv2dParams, Conv2dSpec, Tile};
    use crate::{Activation, DType, Layout, PlanOptions, Tensor, TensorDesc};
    use std::num::NonZeroUsize;

    /// A convolution: output channels, side of the filter, stride, dilation, groups, activation, and whether there is a
    /// residual.
    type Layer = (usize, usize, usize, usize, usize, Activation, bool);

    fn channels_last(shape: &[usize]) -> TensorDesc {
        with_gaps(shape, 0)
    }

    /// Channels-last, with so many other elements behind the channels of each pixel.
    fn with_gaps(shape: &[usize], gap: usize) -> TensorDesc {
        let &[_, c, h, w] = shape else { panic!("an image: {shape:?}") };
        let strides = [h * w * (c + gap), 1, w * (c + gap), c + gap].map(|stride| stride as isize);
        TensorDesc::new(DType::F32, Layout::strided(shape, &strides).unwrap())
    }

    /// Memory for an image, with its gaps.
    fn memory(desc: &TensorDesc, seed: u32) -> Tensor {
        let &[n, _, h, w] = desc.shape() else { panic!("an image: {desc:?}") };
        numbers(channels_last(&[n, desc.strides()[3] as usize, h, w]), seed)
    }

    /// The channels of an image that lie at the beginning of each pixel of this memory.
    fn view<'a>(memory: &'a Tensor, desc: &TensorDesc) -> TensorRef<'a> {
        memory.as_ref().narrow(1, 0..desc.shape()[1]).unwrap()
    }

    fn view_mut<'a>(memory: &'a mut Tensor, desc: &TensorDesc) -> TensorMut<'a> {
        memory.as_mut().narrow(1, 0..desc.shape()[1]).unwrap()
    }

    /// Numbers between -1 and 1.
    fn numbers(desc: TensorDesc, seed: u32) -> Tensor {
        let mut tensor = Tensor::uninitialised(desc).unwrap();
        let mut state = seed;
        for bytes in tensor.as_bytes_mut().chunks_exact_mut(4) {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let number = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
            bytes.copy_from_slice(&number.to_ne_bytes());
        }
        tensor
    }

    struct Made {
        plans: Vec<Arc<Conv2dPlan>>,
        filters: Vec<PackedWeights>,
        biases: Vec<Tensor>,
        residuals: Vec<Option<Tensor>>,
    }

    fn made(image: [usize; 3], layers: &[Layer], threads: usize) -> Made {
        made_with_gaps(image, layers, threads, 0)
    }

    /// With gaps in the first image and in the last result.
    fn made_with_gaps(image: [usize; 3], layers: &[Layer], threads: usize, gap: usize) -> Made {
        let mut x = with_gaps(&[1, image[0], image[1], image[2]], gap);
        let options = PlanOptions { threads: NonZeroUsize::new(threads), ..PlanOptions::default() };
        let mut all = Made { plans: vec![], filters: vec![], biases: vec![], residuals: vec![] };
        for (seed, &(k, side, stride, dilation, groups, activation, adds)) in (1..).zip(layers) {
            let w = TensorDesc::contiguous(DType::F32, &[k, x.shape()[1] / groups, side, side]);
            let w = numbers(w.unwrap(), seed);
            let (stride, dilation) = ([stride; 2], [dilation; 2]);
            let padding = [dilation[0] * (side / 2); 2];
            let params = Conv2dParams { padding, stride, dilation, groups, ..Default::default() };
            let mut spec = Conv2dSpec::new(x, *w.desc(), &params).unwrap();
            let is_last = all.plans.len() + 1 == layers.len();
            spec.y = with_gaps(spec.y.shape(), if is_last { gap } else { 0 });
            spec.activation = activation;
            spec.residual = adds;
            let bias = numbers(TensorDesc::contiguous(DType::F32, &[k]).unwrap(), seed + 100);
            spec.bias = Some(*bias.desc());
            let algorithm = match groups {
                1 if image[0] == 3 && x.shape()[1] == 3 => Conv2dAlgorithm::DirectRuns,
                1 => Conv2dAlgorithm::Im2colGemm,
                _ => Conv2dAlgorithm::DirectGrouped,
            };
            let plan = Conv2dPlan::with_algorithm(&spec, algorithm, &options).unwrap();
            let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
            all.filters.push(plan.pack_weights(&w.as_ref(), &mut workspace).unwrap());
            all.plans.push(Arc::new(plan));
            all.biases.push(bias);
            all.residuals.push(adds.then(|| memory(&spec.y, seed + 200)));
            x = spec.y;
        }
        all
    }

    impl Made {
        fn links(&self) -> Vec<Conv2dLink<'_>> {
            let link = |i: usize| Conv2dLink {
                w: Weights::Packed(&self.filters[i]),
                bias: Some(self.biases[i].as_ref()),
                residual: self.residuals[i].as_ref().map(|r| view(r, &self.plans[i].spec().y)),
            };
            (0..self.plans.len()).map(link).collect()
        }

        /// The memory of the last result by the plans, one after the other.
        fn one_by_one(&self, x: &Tensor) -> Tensor {
            let mut image: Option<Tensor> = None;
            for (plan, link) in self.plans.iter().zip(self.links()) {
                let spec = plan.spec();
                let mut y = memory(&spec.y, 9);
                let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
                let args = Conv2dArgs::new(view(image.as_ref().unwrap_or(x), &spec.x), link.w)
                    .with_bias(link.bias)
                    .with_residual(link.residual);
                plan.run(&args, view_mut(&mut y, &spec.y), &mut workspace).unwrap();
                image = Some(y);
            }
            image.unwrap()
        }

        fn chain(&self, cache: usize) -> Option<Conv2dChain> {
            Conv2dChain::with_cache(&self.plans, [cache, 0]).unwrap()
        }
    }

    const RELU6: Activation = Activation::Relu6;
    const NONE: Activation = Activation::Identity;

    #[test]
    fn bits_are_those_of_the_plans() {
        let mut by_two = 0;
        let one = |k, activation| (k, 1, 1, 1, 1, activation, false);
        let depthwise = |k, side, stride| (k, side, stride, 1, k, RELU6, false);
        let gaps = [0, 40];
        let adding = (16, 1, 1, 1, 1, NONE, true);
        for (image, layers) in [
            ([16, 40, 14], vec![one(64, RELU6), depthwise(64, 3, 1), adding]),
            ([24, 69, 15], vec![one(48, Activation::Silu), depthwise(48, 5, 1), one(24, NONE)]),
            ([16, 41, 9], vec![one(32, RELU6), depthwise(32, 3, 2), one(24, NONE)]),
            ([16, 70, 9], vec![one(32, RELU6), depthwise(32, 5, 2)]),
            ([32, 33, 8], vec![depthwise(32, 3, 1), one(16, NONE)]),
            ([40, 33, 8], vec![depthwise(40, 1, 1), one(16, NONE)]),
            ([40, 33, 3], vec![(40, 1, 1, 1, 40, Activation::Silu, false), adding]),
            ([3, 94, 31], vec![(32, 3, 2, 1, 1, RELU6, false), depthwise(32, 3, 1), one(16, NONE)]),
            // A dilated filter, one that leaves out rows, groups, and convolutions of which each reads rows of padding.
            ([16, 90, 9], vec![one(32, NONE), (32, 3, 1, 3, 32, NONE, false), one(32, NONE)]),
            ([16, 64, 9], vec![one(32, NONE), (16, 1, 2, 1, 1, NONE, true)]),
            ([16, 40, 9], vec![one(64, RELU6), (64, 3, 1, 1, 4, RELU6, false), one(16, NONE)]),
            ([16, 40, 9], vec![one(48, RELU6), (48, 3, 1, 1, 2, RELU6, false), one(16, NONE)]),
            ([32, 40, 9], vec![depthwise(32, 7, 1), depthwise(32, 3, 2), depthwise(32, 5, 1)]),
        ] {
            let cases = gaps.into_iter().flat_map(|gap| [1, 2, 3].map(|threads| (gap, threads)));
            // Runs of three channels have no gaps.
            for (gap, threads) in cases.filter(|&(gap, _)| gap == 0 || image[0] > 3) {
                let made = made_with_gaps(image, &layers, threads, gap);
                let [x_desc, y_desc] =
                    [made.plans[0].spec().x, made.plans[made.plans.len() - 1].spec().y];
                let x = memory(&x_desc, 7);
                let want = made.one_by_one(&x);
                let mut found = 0;
                // From one row of the widest value on.
                for cache in (1..40).map(|i| i << 10) {
                    let Some(chain) = made.chain(cache) else { continue };
                    found += 1;
                    let mut y = memory(&y_desc, 9);
                    let bytes = chain.workspace_bytes();
                    let mut workspace = Workspace::new(Device::Cpu, bytes).unwrap();
                    let (x, to) = (view(&x, &x_desc), view_mut(&mut y, &y_desc));
                    chain.run(&x, &made.links(), to, &mut workspace).unwrap();
                    // Gaps too.
                    let case = (&layers, gap, threads, cache);
                    assert_eq!(y.as_bytes(), want.as_bytes(), "{case:?}");
                }
                assert!(found > 0 || threads > 1, "{layers:?}");
                by_two += usize::from(found > 0 && threads == 2);
            }
        }
        // Others have so few rows that two threads would compute too many of them twice.
        assert!(by_two >= 18, "{by_two}");
    }

    #[test]
    fn bits_of_slices_are_those_of_the_plans() {
        let one = |k, activation| (k, 1, 1, 1, 1, activation, false);
        let deep = |k, side, stride| (k, side, stride, 1, k, RELU6, false);
        let mut found = 0;
        for (image, layers) in [
            ([16, 14, 14], [one(64, RELU6), deep(64, 3, 1)]),
            ([24, 9, 15], [one(80, Activation::Silu), deep(80, 5, 1)]),
            ([40, 7, 7], [one(960, NONE), deep(960, 3, 1)]),
            ([200, 28, 3], [one(192, RELU6), deep(192, 3, 2)]),
            ([7, 1, 1], [one(96, RELU6), (96, 3, 1, 2, 96, Activation::Silu, false)]),
        ] {
            for (gap, threads) in [0, 40].into_iter().flat_map(|gap| [1, 2, 3].map(|n| (gap, n))) {
                let made = made_with_gaps(image, &layers, threads, gap);
                let chain = Conv2dChain::with_cache(&made.plans, [usize::MAX, 1 << 20]).unwrap();
                let Some(chain) = chain else { continue };
                assert!(matches!(chain.form, Form::Slices(_)));
                let [x_desc, y_desc] = [made.plans[0].spec().x, made.plans[1].spec().y];
                let x = memory(&x_desc, 7);
                let want = made.one_by_one(&x);
                let mut y = memory(&y_desc, 9);
                let bytes = chain.workspace_bytes();
                let mut workspace = Workspace::new(Device::Cpu, bytes).unwrap();
                for _ in 0..2 {
                    let (x, to) = (view(&x, &x_desc), view_mut(&mut y, &y_desc));
                    chain.run(&x, &made.links(), to, &mut workspace).unwrap();
                    // Gaps too.
                    assert_eq!(y.as_bytes(), want.as_bytes(), "{layers:?}, {gap}, {threads}");
                }
                found += 1;
            }
        }
        assert!(found >= 20, "{found}");
    }

    /// Slices are for 1x1 filters before depthwise ones, and for threads that all have the same number of them.
    #[test]
    fn other_convolutions_have_no_slices() {
        let chain = |image, layers: &[Layer], threads| {
            let made = made(image, layers, threads);
            let chain = Conv2dChain::with_cache(&made.plans, [usize::MAX, 64 << 10]).unwrap();
            chain.is_some_and(|chain| matches!(chain.form, Form::Slices(_)))
        };
        let one = (128, 1, 1, 1, 1, RELU6, false);
        let deep = (128, 3, 1, 1, 128, RELU6, false);
        assert!(chain([16, 14, 14], &[one, deep], 2));
        assert!(!chain([16, 14, 14], &[one, deep], 3));
        // Not even one slice fits.
        assert!(!chain([16, 60, 14], &[one, deep], 2));
        for layers in [
            [one, one],
            [deep, deep],
            [(128, 3, 1, 1, 1, RELU6, false), deep],
            [(128, 1, 2, 1, 1, RELU6, false), deep],
            [one, (128, 3, 1, 1, 16, RELU6, false)],
            [one, (128, 3, 1, 1, 128, RELU6, true)],
            [(128, 1, 1, 1, 1, RELU6, true), deep],
        ] {
            let channels = if layers[0].4 == 128 { 128 } else { 16 };
            assert!(!chain([channels, 14, 14], &layers, 2), "{layers:?}");
        }
    }

    #[test]
    fn wrong_arguments_are_errors() {
        let layers = [(64, 1, 1, 1, 1, RELU6, false), (64, 3, 1, 1, 64, RELU6, false)];
        let made = made([16, 20, 14], &layers, 1);
        let chain = made.chain(20 << 10).unwrap();
        let x = numbers(channels_last(&[1, 16, 20, 14]), 7);
        let mut y = Tensor::uninitialised(channels_last(&[1, 64, 20, 14])).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, chain.workspace_bytes()).unwrap();
        let links = made.links();
        let mut run = |x: &Tensor, links: &[Conv2dLink<'_>], workspace: &mut Workspace| {
            chain.run(&x.as_ref(), links, y.as_mut(), workspace)
        };
        assert!(run(&x, &links, &mut workspace).is_ok());
        let error = run(&x, &links[..1], &mut workspace);
        assert!(matches!(error, Err(Error::Parameter { name: "links", .. })), "{error:?}");
        let error = run(&made.biases[0], &links, &mut workspace);
        assert!(matches!(error, Err(Error::Shape { arg: "x", .. })), "{error:?}");
        let error = run(&x, &[links[1], links[0]], &mut workspace);
        assert!(matches!(error, Err(Error::ForeignPack { .. })), "{error:?}");
        let without = [links[0], Conv2dLink { bias: None, ..links[1] }];
        let error = run(&x, &without, &mut workspace);
        assert!(matches!(error, Err(Error::Parameter { name: "bias", .. })), "{error:?}");
        let error = run(&x, &links, &mut Workspace::empty());
        assert!(matches!(error, Err(Error::WorkspaceTooSmall { .. })), "{error:?}");
    }

    /// Chains are for what would leave the cache, and for methods whose rows do not depend on each other.
    #[test]
    fn small_values_and_other_methods_are_no_chains() {
        let one = |k| (k, 1, 1, 1, 1, RELU6, false);
        let depthwise = |k| (k, 3, 1, 1, k, RELU6, false);
        let block = made([16, 20, 14], &[one(64), depthwise(64)], 1);
        assert!(block.chain(71_679).is_some());
        assert!(block.chain(71_680).is_none());
        assert!(made([16, 20, 14], &[one(64), depthwise(64)], 2).chain(35_840).is_none());
        assert!(made([16, 20, 14], &[one(64)], 1).chain(1024).is_none());
        assert!(made([16, 20, 14], &[one(64); 5], 1).chain(20 << 10).is_none());
        // Not even one row fits.
        assert!(block.chain(1 << 10).is_none());
        // A layer that little but memory bounds, if threads have as many rows.
        let scaled = |rows, side, threads| {
            let layers = [(32, 1, 1, 1, 32, RELU6, false), (64, side, 1, 1, 1, RELU6, false)];
            made([32, rows, 14], &layers, threads).chain(1 << 20).is_some()
        };
        assert!(scaled(14, 1, 1) && scaled(14, 1, 2) && scaled(7, 1, 1));
        assert!(!scaled(7, 1, 2) && !scaled(14, 3, 1));
        let mut winograd = made([16, 20, 14], &[one(64), (64, 3, 1, 1, 1, RELU6, false)], 1);
        assert!(winograd.chain(20 << 10).is_some());
        let (spec, f4) =
            (winograd.plans[1].spec().clone(), Conv2dAlgorithm::WinogradGemm(Tile::F4));
        let plan = Conv2dPlan::with_algorithm(&spec, f4, &PlanOptions::default()).unwrap();
        winograd.plans[1] = Arc::new(plan);
        assert!(winograd.chain(20 << 10).is_none());
    }
}
