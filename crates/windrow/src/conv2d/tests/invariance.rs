//! The bits of an image depend neither on the images beside it nor on the number of threads.

use super::*;
use crate::conv2d::plan::Cpu;
use crate::gpu::first_devices;
use crate::plan::{Engine, Setup};
use crate::verification::choices::Choices;
use crate::verification::data::{Held, scratch};
use crate::{Accuracy, Filter, PlanOptions};
use std::ops::Range;

/// Images and what is convolved with them. Batches are parts of the images.
struct Images {
    device: Device,
    params: Conv2dParams,
    filter: Filter,
    x: Held,
    w: Held,
    bias: Held,
    /// The gradient of the result.
    dy: Held,
}

/// The way in which a batch is computed.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// `None` for the one that the cost model chooses.
    algorithm: Option<Conv2dAlgorithm>,
    /// For the CPU.
    isa: Isa,
    batch_invariant: bool,
}

/// The bits of an image's result, and of its gradient if the algorithm is the chosen one: others have the same.
type Bits = [Vec<u64>; 2];

/// The bits of each image of a batch.
fn by_image(held: &Held) -> Vec<Vec<u64>> {
    let bits: Vec<u64> = held.values().unwrap().into_iter().map(f64::to_bits).collect();
    let images = held.as_ref().shape()[0];
    bits.chunks(bits.len() / images).map(<[u64]>::to_vec).collect()
}

impl Images {
    /// A random convolution of images of few pixels, one of them with numbers that are not finite.
    fn new(choices: &mut Choices<'_>, seed: u64) -> Self {
        let pair = |choices: &mut Choices<'_>, most| [0; 2].map(|_| choices.within(1..=most));
        let [mut c, mut k] = pair(choices, 40);
        let (mut taps, mut groups) = ([3, 3], 1);
        let mut params = Conv2dParams {
            padding: pair(choices, 2).map(|padding| padding - 1),
            accuracy: choices.of(&[Accuracy::Fp32, Accuracy::Fp32, Accuracy::Exact]),
            ..Default::default()
        };
        match choices.below(6) {
            0..=2 => {}
            3 => {
                taps = [1, 1];
                params.stride = pair(choices, 2);
            }
            4 => {
                groups = choices.of(&[2, 5, 16, 20]);
                c = choices.of(&[1, 1, 4, 8]);
                k = c;
                params.stride = pair(choices, 2);
            }
            _ => {
                taps = pair(choices, 5);
                params.stride = pair(choices, 3);
                params.dilation = pair(choices, 2);
            }
        }
        params.groups = groups;
        params.activation = choices.of(Activation::ALL);
        let (n, most) = if choices.one_in(5) { (256, 6) } else { (64, 12) };
        let [h, w] = [0, 1].map(|d| {
            let span = (taps[d] - 1) * params.dilation[d] + 1;
            choices.within(1..=most).max(span)
        });
        if n * h * w * c * k * groups * taps[0] * taps[1] > 1_000_000 {
            [c, k] = [c.min(9), k.min(18)];
        }
        let dtype = choices.of(&[DType::F32, DType::F16, DType::BF16]);
        let order = choices.of(&[[0, 1, 2, 3], [0, 2, 3, 1]]);
        let desc = |shape: [usize; 4]| TensorDesc {
            dtype,
            layout: Layout::with_order(&shape, &order).unwrap(),
        };
        let numbers = |what: u64, len| random(seed * 7 + what, len, -1.0, 1.0);
        let held = |what, desc: TensorDesc| Held::new(desc, &numbers(what, desc.layout.len()));
        let x = desc([n, c * groups, h, w]);
        let mut pixels = numbers(0, x.layout.len());
        pixels[3 * x.layout.len() / n..][..2].copy_from_slice(&[f64::INFINITY, 1e9]);
        let filter = desc([k * groups, c, taps[0], taps[1]]);
        let spec = Conv2dSpec::new(x, filter, &params).unwrap();
        let bias = TensorDesc::contiguous(DType::F32, &[k * groups]).unwrap();
        Images {
            device: Device::Cpu,
            params,
            filter: choices.of(&[Filter::Kept, Filter::Changing]),
            x: Held::new(x, &pixels).unwrap(),
            w: held(1, filter).unwrap(),
            bias: held(2, bias).unwrap(),
            dy: held(3, spec.y).unwrap(),
        }
    }

    /// The same on another device.
    fn on(&self, device: Device) -> Self {
        let copy = |held: &Held| {
            let values = held.values().unwrap();
            Held::at(*held.as_ref().desc(), &values, 0, device).unwrap()
        };
        let [x, w, bias, dy] = [&self.x, &self.w, &self.bias, &self.dy].map(copy);
        Images { device, params: self.params, filter: self.filter, x, w, bias, dy }
    }

    fn spec(&self, images: &Range<usize>) -> Conv2dSpec {
        let x = self.x.as_ref().narrow(0, images.clone()).unwrap();
        let y = self.dy.as_ref().narrow(0, images.clone()).unwrap();
        let spec = Conv2dSpec::new(*x.desc(), *self.w.as_ref().desc(), &self.params).unwrap();
        spec.with_bias(*self.bias.as_ref().desc()).with_output(*y.desc())
    }

    fn options(&self, way: Way, threads: usize) -> PlanOptions {
        PlanOptions { filter: self.filter, threads: threads.try_into().ok(), ..Default::default() }
            .with_device(self.device)
            .with_batch_invariant(way.batch_invariant)
    }

    fn algorithms(&self, isa: Isa) -> Vec<Conv2dAlgorithm> {
        let spec = self.spec(&(0..1));
        match self.device {
            Device::Cpu => cpu::algorithms(&spec, &spec.problem().unwrap(), isa).unwrap(),
            gpu => Conv2dPlan::algorithms(&spec, gpu),
        }
    }

    /// The algorithm for a batch of these images.
    fn chosen(&self, way: Way, images: &Range<usize>, threads: usize) -> Conv2dAlgorithm {
        let (spec, options) = (&self.spec(images), &self.options(way, threads));
        if self.device != Device::Cpu {
            return way.algorithm.unwrap_or_else(|| Conv2dPlan::choice(spec, options).unwrap());
        }
        let problem = &spec.problem().unwrap();
        let setup = Setup { spec, problem, options, place: way.isa };
        way.algorithm.unwrap_or_else(|| Cpu::choose(&setup).unwrap())
    }

    /// The bits of a batch of these images, or `None` if the algorithm does not compute it.
    fn compute(&self, way: Way, images: Range<usize>, threads: usize) -> Option<Vec<Bits>> {
        let algorithm = self.chosen(way, &images, threads);
        let configuration = Conv2dConfiguration::new(algorithm);
        let (spec, options) = (self.spec(&images), self.options(way, threads));
        let plan = Conv2dPlan::on_isa(&spec, &configuration, &options, way.isa).ok()?;
        let bytes = plan.workspace_bytes().max(plan.backward_workspace_bytes().unwrap());
        let mut workspace = scratch(self.device, bytes).unwrap();
        let part = |held: &'_ Held| held.as_ref().narrow(0, images.clone()).unwrap().desc().layout;
        let dense = |held: &Held| TensorDesc { dtype: spec.x.dtype, layout: part(held) };
        let empty = |held: &Held| Held::at(dense(held), &[], 0, self.device).unwrap();
        let (mut y, mut dx) = (empty(&self.dy), empty(&self.x));
        let [x, dy] = [&self.x, &self.dy].map(|t| t.as_ref().narrow(0, images.clone()).unwrap());
        let args = Conv2dArgs::new(x, self.w.as_ref()).with_bias(self.bias.as_ref());
        plan.run(&args, y.as_mut().unwrap(), &mut workspace).unwrap();
        if way.algorithm.is_none() && spec.activation == Activation::Identity {
            let dx = dx.as_mut().unwrap();
            plan.backward_data(&self.w.as_ref(), &dy, dx, &mut workspace).unwrap();
        }
        let bits = by_image(&y).into_iter().zip(by_image(&dx)).map(|(y, dx)| [y, dx]);
        Some(bits.collect())
    }

    /// Compares the images of many batches with those of one batch of all images, and counts the comparisons. The error
    /// says which image has other bits.
    fn compare(&self, way: Way) -> std::result::Result<usize, String> {
        let all = self.x.as_ref().shape()[0];
        let Some(want) = self.compute(way, 0..all, 3) else { return Ok(0) };
        let batches = [
            (0..1, 1),
            (3..4, 3),
            (all - 1..all, 1),
            (2..4, 3),
            (9..11, 1),
            (0..7, 3),
            (40..47, 1),
            (0..64, 1),
            (all - 64..all, 3),
        ];
        let mut count = 0;
        for (images, threads) in batches {
            let got = self.compute(way, images.clone(), threads).ok_or("it is not computed")?;
            for (image, bits) in images.clone().zip(got) {
                for (i, what) in ["y", "dx"].into_iter().enumerate() {
                    if bits[i] != want[image][i] {
                        let spec = self.spec(&images);
                        return Err(format!("{what} of {image} in {images:?}: {way:?} {spec:?}"));
                    }
                    count += 1;
                }
            }
        }
        Ok(count)
    }
}

/// Each image alone, in batches of 2, 7, 64 and 256, by every algorithm and by the one that is chosen.
#[test]
fn bits_do_not_depend_on_neighbours() {
    let (mut choices, mut count) = (Choices::from_seed(17), 0);
    for seed in 0..10 {
        let images = Images::new(&mut choices, seed);
        for isa in isas(images.x.as_ref().dtype()) {
            let mut named = images.algorithms(isa);
            // Its model in software is slow, and only this algorithm uses it.
            named.retain(|&algorithm| !isa.has_tiles() || algorithm == Conv2dAlgorithm::DirectAmx);
            for algorithm in named.into_iter().map(Some).chain([None]) {
                let way = Way { algorithm, isa, batch_invariant: true };
                count += images.compare(way).unwrap_or_else(|error| panic!("{error}"));
            }
        }
    }
    assert!(count >= 10_000, "{count} comparisons");
}

/// Without the option the cost model looks at the number of images, and the comparison finds other bits.
#[test]
fn without_the_option_bits_depend_on_neighbours() {
    let (mut choices, isa, mut found) = (Choices::from_seed(17), Isa::best(), false);
    for seed in 0..40 {
        let images = Images::new(&mut choices, seed);
        let chosen = |batch_invariant: bool, images_of: Range<usize>| {
            images.chosen(Way { algorithm: None, isa, batch_invariant }, &images_of, 1)
        };
        assert_eq!(chosen(true, 0..1), chosen(true, 0..64));
        if !found && chosen(false, 0..1) != chosen(false, 0..64) {
            let way = Way { algorithm: None, isa, batch_invariant: false };
            found = images.compare(way).is_err();
        }
    }
    assert!(found, "no comparison fails");
}

/// The same on the first GPU of each kind. Without one the test does nothing.
#[test]
fn bits_on_gpus_do_not_depend_on_neighbours() {
    for device in first_devices() {
        // An emulator may execute it.
        let seeds = if matches!(device, Device::Hip(_)) { 0..2 } else { 0..20 };
        let (mut choices, mut count) = (Choices::from_seed(17), 0);
        for seed in seeds {
            let images = Images::new(&mut choices, seed).on(device);
            for algorithm in images.algorithms(Isa::best()).into_iter().map(Some).chain([None]) {
                let way = Way { algorithm, isa: Isa::best(), batch_invariant: true };
                count += images.compare(way).unwrap_or_else(|error| panic!("{error}"));
            }
        }
        assert!(count >= 1000, "{count} comparisons on {device}");
    }
}
