//! The description of a convolution that is given to methods.

use super::chips::Chip;
use crate::conv2d::frame_reads::FrameReads;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::gpu::Gpu;
use crate::{Filter, Layout, PlanOptions, TensorDesc, Tuning};

/// The numbers of images whose expected times are compared if the bits of an image must not depend on the number.
const BATCHES: [usize; 3] = [1, 8, 64];

/// A convolution on a GPU, with the algorithm and the options of its plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task<'a> {
    pub(super) chip: Chip,
    pub(super) spec: &'a Conv2dSpec,
    pub(super) problem: &'a Problem,
    /// The algorithm, and its parameters that are given.
    pub(super) configuration: Conv2dConfiguration,
    pub(super) options: PlanOptions,
    /// The frames that images read, if they are those of a video.
    pub(super) frames: Option<FrameReads>,
}

impl<'a> Task<'a> {
    /// A task with the algorithm [`Conv2dAlgorithm::Im2colGemm`], which runs on every GPU. [`Task::by`] and
    /// [`Task::with`] choose another.
    pub(crate) fn new(
        gpu: &Gpu,
        spec: &'a Conv2dSpec,
        problem: &'a Problem,
        options: &PlanOptions,
    ) -> Self {
        Self::on(Chip::of(gpu), spec, problem, options)
    }

    /// The same, from the cost model's data of a GPU.
    pub(super) fn on(
        chip: Chip,
        spec: &'a Conv2dSpec,
        problem: &'a Problem,
        options: &PlanOptions,
    ) -> Self {
        let configuration = Conv2dConfiguration::new(Conv2dAlgorithm::Im2colGemm);
        Task { chip, spec, problem, configuration, options: *options, frames: None }
    }

    /// The same over the frames of a video, if any are given.
    pub(crate) fn with_frames(self, frames: Option<FrameReads>) -> Self {
        Task { frames, ..self }
    }

    /// The task on an H200 with default options.
    #[cfg(test)]
    pub(super) fn on_h200(spec: &'a Conv2dSpec, problem: &'a Problem) -> Self {
        Self::on(Chip::h200(132), spec, problem, &PlanOptions::default())
    }

    /// The task with another algorithm, without given parameters.
    pub(crate) fn by(&self, algorithm: Conv2dAlgorithm) -> Self {
        self.with(&Conv2dConfiguration::new(algorithm))
    }

    /// The task with another configuration.
    pub(crate) fn with(&self, configuration: &Conv2dConfiguration) -> Self {
        Task { configuration: *configuration, ..*self }
    }

    /// Calls `f` with the task that decides which methods are possible. If the bits of an image must not depend on the
    /// number of images, that task has a fixed number of them.
    pub(super) fn for_choice<T>(&self, f: impl FnOnce(&Task<'_>) -> T) -> T {
        if !self.options.batch_invariant {
            return f(self);
        }
        self.for_images(self.problem.for_choice(true).n, f)
    }

    /// Calls `f` with the same task for another number of images.
    fn for_images<T>(&self, n: usize, f: impl FnOnce(&Task<'_>) -> T) -> T {
        let [x, y] = [&self.spec.x, &self.spec.y].map(|desc| with_images(desc, n));
        let spec = Conv2dSpec { x, y, ..self.spec.clone() };
        f(&Task { spec: &spec, problem: &Problem { n, ..*self.problem }, ..*self })
    }

    /// The values of `f` for the tasks whose expected times decide about bits. If the bits of an image must not depend on
    /// the number of images, there is one task for each of [`BATCHES`]. Otherwise it is the task itself.
    pub(super) fn for_batches<T>(&self, mut f: impl FnMut(&Task<'_>) -> T) -> Vec<T> {
        match self.options.batch_invariant {
            true => BATCHES.into_iter().map(|n| self.for_images(n, &mut f)).collect(),
            false => vec![f(self)],
        }
    }

    /// The choice with the least product of expected times in all of [`Task::for_batches`], which is also the least mean
    /// of their logarithms: a factor counts as much in a small batch as in a large one.
    pub(super) fn least<C>(
        &self,
        choices: impl IntoIterator<Item = C>,
        micros: impl Fn(&Task<'_>, &C) -> f64,
    ) -> Option<C> {
        let product = |choice: &C| -> f64 {
            self.for_batches(|task| micros(task, choice)).into_iter().product()
        };
        let products = choices.into_iter().map(|choice| (product(&choice), choice));
        products.min_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, choice)| choice)
    }

    /// A task for the convolution of a gradient, on the same GPU. Its filter is packed on each run.
    pub(super) fn gradient<'b>(&self, spec: &'b Conv2dSpec, problem: &'b Problem) -> Task<'b> {
        let options = PlanOptions::default()
            .with_tuning(Tuning::Model)
            .with_filter(Filter::Changing)
            .with_batch_invariant(self.options.batch_invariant);
        let (chip, configuration) = (self.chip, self.configuration);
        Task { chip, spec, problem, configuration, options, frames: None }
    }

    pub(super) fn algorithm(&self) -> Conv2dAlgorithm {
        self.configuration.algorithm
    }

    /// True if a group has fewer than 8 input channels, or an element of dx sums fewer than 8 terms. One thread for
    /// each element is then fastest.
    pub(super) fn is_few(&self) -> bool {
        let p = self.problem;
        p.c_group() < 8 || p.k_group() * p.r * p.s < 8
    }
}

/// The tensor [n, c, h, w] with another number of images. The stride of a single image may be any number, so at least
/// the image's extent counts.
fn with_images(desc: &TensorDesc, n: usize) -> TensorDesc {
    let (&[images, c, h, w], &[image, s_c, s_h, s_w]) = (desc.shape(), desc.strides()) else {
        return *desc;
    };
    let strided = |n, stride| Layout::strided(&[n, c, h, w], &[stride, s_c, s_h, s_w]);
    let extent = strided(1, 0).ok().and_then(|image| image.extent());
    let least = extent.map_or(0, |(first, last)| last - first + 1);
    let stride = if images == 1 { image.max(least) } else { image };
    strided(n, stride).map_or(*desc, |layout| TensorDesc { layout, ..*desc })
}

#[cfg(test)]
mod tests {
    use super::super::choice::choose;
    use super::super::methods;
    use super::*;
    use crate::Tile::{F2, F4};
    use crate::conv2d::Conv2dParams;
    use crate::{Accuracy, DType};
    use Conv2dAlgorithm::{Direct, Im2colGemm, ImplicitGemm, WinogradGemm, WinogradRow};

    /// The algorithm with its parameters that is chosen for an image tensor.
    fn chosen(
        x: TensorDesc,
        w: &[usize],
        accuracy: Accuracy,
        padding: usize,
    ) -> Conv2dConfiguration {
        let w = TensorDesc::contiguous(x.dtype, w).unwrap();
        let params = Conv2dParams { accuracy, padding: [padding; 2], ..Default::default() };
        let spec = Conv2dSpec::new(x, w, &params).unwrap();
        let problem = spec.problem().unwrap();
        let mut task = Task::on_h200(&spec, &problem);
        task.options.batch_invariant = true;
        let own =
            [Direct, Im2colGemm, ImplicitGemm, WinogradRow, WinogradGemm(F2), WinogradGemm(F4)];
        let algorithm = choose(&task, &own);
        methods::complete(&task.by(algorithm))
    }

    /// The configuration without what changes no bits: the tiles of a chunk, and of a block that reads no strips; and the block
    /// of sums of one product, which are those of f16 and bf16, and of f32 where it is rounded to TF32.
    fn for_bits(
        (dtype, accuracy): (DType, Accuracy),
        columns: usize,
        configuration: Conv2dConfiguration,
    ) -> Conv2dConfiguration {
        let is_split = dtype == DType::F32 && accuracy == Accuracy::Fp32;
        let in_strips = configuration.algorithm == ImplicitGemm && columns == 3;
        let block = configuration.block.filter(|_| is_split);
        Conv2dConfiguration {
            block,
            tiles: configuration.tiles.filter(|_| in_strips),
            ..configuration
        }
    }

    #[test]
    fn the_number_of_images_does_not_choose() {
        for (dtype, accuracy) in [
            (DType::F32, Accuracy::Fp32),
            (DType::F32, Accuracy::Tf32),
            (DType::F16, Accuracy::Half),
            (DType::BF16, Accuracy::Fp32),
        ] {
            for order in [[0, 1, 2, 3], [0, 2, 3, 1]] {
                for (c, size, w) in [
                    (64, 56, [64, 64, 3, 3]),
                    (512, 7, [512, 512, 3, 3]),
                    (256, 14, [1024, 256, 1, 1]),
                    (2048, 3, [64, 2048, 1, 1]),
                    (32, 20, [64, 32, 5, 5]),
                ] {
                    let of = |n| TensorDesc {
                        dtype,
                        layout: Layout::with_order(&[n, c, size, size], &order).unwrap(),
                    };
                    let chosen = |x| for_bits((dtype, accuracy), w[3], chosen(x, &w, accuracy, 1));
                    let want = chosen(of(8));
                    for n in [1, 2, 7, 64, 256] {
                        assert_eq!(chosen(of(n)), want, "{n} {dtype} {w:?}");
                    }
                    // A single image that has got its dimension in another way.
                    let one = of(1);
                    let mut strides = [0; 4];
                    strides.copy_from_slice(one.strides());
                    strides[0] = strides[1];
                    let layout = Layout::strided(one.shape(), &strides).unwrap();
                    let one = TensorDesc { layout, ..one };
                    assert_eq!(chosen(one), want, "{dtype} {w:?}");
                }
            }
        }
    }

    /// The choice for 8 images alone was expected to take 5.4, 4.5 and 2.1 times as long as the one without the option: for
    /// 64 images with sums in four parts, for one image in blocks of 256 channels, and for one image by `winograd_row`.
    #[test]
    fn batches_of_1_8_and_64_images_choose_together() {
        let channels_last = |dtype, [c, size, k]: [usize; 3], n| {
            let layout = Layout::with_order(&[n, c, size, size], &[0, 2, 3, 1]).unwrap();
            let c = chosen(TensorDesc { dtype, layout }, &[k, c, 3, 3], Accuracy::Fp32, 0);
            (c.algorithm, c.block.unwrap_or(0), c.parts.unwrap_or(0))
        };
        let of = |dtype, sizes| [1, 8, 64].map(|n| channels_last(dtype, sizes, n));
        let blocks = |blocks: [usize; 3], parts| blocks.map(|block| (ImplicitGemm, block, parts));
        assert_eq!(of(DType::BF16, [96, 12, 192]), blocks([64; 3], 1));
        assert_eq!(of(DType::BF16, [512, 16, 2048]), blocks([64, 128, 128], 2));
        assert_eq!(of(DType::F32, [64, 112, 64]), blocks([64; 3], 1));
    }
}
