//! Each operation beside plain loops in f64.

use super::*;
use crate::Tensor;

/// Numbers of [n, h, w, c], with gaps between pixels.
struct Image {
    sizes: [usize; 4],
    pitch: usize,
    numbers: Vec<f32>,
}

impl Image {
    fn new(sizes: [usize; 4], mut of: impl FnMut() -> f32) -> Self {
        Image {
            sizes,
            pitch: sizes[3],
            numbers: (0..sizes.iter().product()).map(|_| of()).collect(),
        }
    }

    /// The same image with a gap of NaN behind each pixel.
    fn spread(&self, gap: usize) -> Self {
        let [n, h, w, c] = self.sizes;
        let pixel = |pixel: usize| {
            let numbers = &self.numbers[pixel * self.pitch..][..c];
            numbers.iter().copied().chain((0..gap).map(|_| f32::NAN))
        };
        let numbers = (0..n * h * w).flat_map(pixel).collect();
        Image { sizes: self.sizes, pitch: c + gap, numbers }
    }

    fn at(&self, [n, h, w, c]: [usize; 4]) -> f64 {
        let [_, height, width, _] = self.sizes;
        f64::from(self.numbers[((n * height + h) * width + w) * self.pitch + c])
    }

    fn desc(&self) -> TensorDesc {
        let [n, h, w, c] = self.sizes;
        desc([n, c, h, w], self.pitch)
    }
}

fn desc(shape @ [_, _, h, w]: [usize; 4], pitch: usize) -> TensorDesc {
    let strides = [h * w * pitch, 1, w * pitch, pitch].map(|stride| stride as isize);
    TensorDesc::new(DType::F32, Layout::strided(&shape, &strides).unwrap())
}

/// Each element of the result with the sum of its terms' magnitudes, in f64.
fn oracle(step: &ImageStep, x: &Image, second: Option<&Image>) -> Vec<(f64, f64)> {
    let [n, h, w, c] = x.sizes;
    let mut all = Vec::new();
    for n in 0..n {
        for oh in 0..step.result[0] {
            for ow in 0..step.result[1] {
                for c in 0..c {
                    let window = |window: Window| {
                        let mut inside = Vec::new();
                        for r in 0..window.size[0] {
                            for s in 0..window.size[1] {
                                let ih = (oh * window.stride[0] + r).checked_sub(window.padding[0]);
                                let iw = (ow * window.stride[1] + s).checked_sub(window.padding[1]);
                                if let (Some(ih), Some(iw)) = (ih, iw)
                                    && ih < h
                                    && iw < w
                                {
                                    inside.push(x.at([n, ih, iw, c]));
                                }
                            }
                        }
                        inside
                    };
                    let mean = |terms: Vec<f64>| {
                        let of = |all: f64| all / terms.len() as f64;
                        (of(terms.iter().sum()), of(terms.iter().map(|t| t.abs()).sum()))
                    };
                    all.push(match step.operation {
                        ImageOperation::Mean => {
                            mean(window(Window { size: [h, w], stride: [1, 1], padding: [0, 0] }))
                        }
                        ImageOperation::AveragePool(of) => mean(window(of)),
                        ImageOperation::MaxPool(of) => {
                            let larger = |a: f64, b: f64| if a >= b || a.is_nan() { a } else { b };
                            (window(of).into_iter().reduce(larger).unwrap(), 0.0)
                        }
                        ImageOperation::Gate(gate) => {
                            let g = second.unwrap().at([n, 0, 0, c]);
                            let g = match gate {
                                Gate::Sigmoid => 1.0 / (1.0 + (-g).exp()),
                                Gate::HardSigmoid => (g + 3.0).clamp(0.0, 6.0) / 6.0,
                            };
                            let y = x.at([n, oh, ow, c]) * g;
                            (y, y.abs())
                        }
                        ImageOperation::ChannelsLast | ImageOperation::Copy => {
                            (x.at([n, oh, ow, c]), 0.0)
                        }
                        ImageOperation::Add => {
                            let terms = [x, second.unwrap()].map(|x| x.at([n, oh, ow, c]));
                            (terms[0] + terms[1], terms[0].abs() + terms[1].abs())
                        }
                        ImageOperation::Upsample([down, right]) => {
                            (x.at([n, oh / down, ow / right, c]), 0.0)
                        }
                    });
                }
            }
        }
    }
    all
}

/// The result on an instruction set, written over `x` if that is allowed and `in_place`.
fn computed(
    step: &ImageStep,
    isa: Isa,
    threads: usize,
    (x, second): (&Image, Option<&Image>),
    in_place: bool,
) -> Vec<f32> {
    let second = second.map_or(std::ptr::null(), |second| second.numbers.as_ptr());
    if in_place && step.may_be_in_place() {
        let mut y = x.numbers.clone();
        // SAFETY: tensors as described.
        unsafe { step.run_on(isa, threads, y.as_ptr(), second, y.as_mut_ptr()) };
        return y;
    }
    let (c, pitch) = (step.c, step.pitches[2]);
    const GAP: f32 = 12345.0;
    let mut y = vec![GAP; step.y.layout.len() / c * pitch];
    // SAFETY: tensors as described.
    unsafe { step.run_on(isa, threads, x.numbers.as_ptr(), second, y.as_mut_ptr()) };
    let pixels = || y.chunks_exact(pitch);
    assert!(pixels().all(|pixel| pixel[c..].iter().all(|&gap| gap == GAP)), "gaps are left alone");
    pixels().flat_map(|pixel| &pixel[..c]).copied().collect()
}

fn windows() -> impl Iterator<Item = Window> {
    [
        ([3, 3], [2, 2], [1, 1]),
        ([2, 2], [2, 2], [0, 0]),
        ([2, 3], [1, 2], [1, 0]),
        ([5, 1], [3, 1], [2, 0]),
    ]
    .into_iter()
    .map(|(size, stride, padding)| Window { size, stride, padding })
}

fn operations() -> Vec<ImageOperation> {
    let gates = [Gate::Sigmoid, Gate::HardSigmoid].map(ImageOperation::Gate);
    let pools = windows().map(ImageOperation::MaxPool);
    let means = windows().map(ImageOperation::AveragePool);
    let others = [ImageOperation::Mean, ImageOperation::Add, ImageOperation::Copy];
    let repeated = [[2, 2], [1, 3]].map(ImageOperation::Upsample);
    pools.chain(means).chain(gates).chain(others).chain(repeated).collect()
}

/// xorshift: -4 to 4.
fn random(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed * 2 + 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 21) as f32 - 4.0
    }
}

/// The operation's second value, of a gate and an image.
fn second(operation: ImageOperation, [gate, image]: [&Image; 2]) -> Option<&Image> {
    match operation {
        ImageOperation::Gate(_) => Some(gate),
        ImageOperation::Add => Some(image),
        _ => None,
    }
}

fn step_of(operation: ImageOperation, x: &Image, second: Option<&Image>) -> Option<ImageStep> {
    ImageStep::new(operation, &x.desc(), second.map(Image::desc).as_ref(), None)
}

#[test]
fn agrees_with_f64() {
    let sizes = [
        [1, 5, 7, 3],
        [2, 6, 4, 33],
        [3, 1, 1, 16],
        [1, 60, 60, 24],
        [2, 64, 50, 17],
        [1, 9, 8, 700],
        [0, 8, 8, 4],
        [1, 100, 100, 1],
    ];
    let mut seen = 0;
    for (i, sizes) in sizes.into_iter().enumerate() {
        let mut random = random(i as u64);
        let x = Image::new(sizes, &mut random);
        let gate = Image::new([sizes[0], 1, 1, sizes[3]], || 3.0 * random());
        let image = Image::new(sizes, &mut random);
        for operation in operations() {
            let given = (&x, second(operation, [&gate, &image]));
            let Some(step) = step_of(operation, given.0, given.1) else { continue };
            let expected = oracle(&step, given.0, given.1);
            let first = computed(&step, Isa::best(), 1, given, false);
            assert_eq!(first, computed(&step, Isa::best(), 3, given, true), "threads, place");
            // Parts of larger images.
            let (x, image) = (x.spread(5), image.spread(2));
            let given = (&x, second(operation, [&gate, &image]));
            let [n, c] = [step.n, step.c];
            let y = desc([n, c, step.result[0], step.result[1]], c + 3);
            let of = given.1.map(Image::desc);
            let spread = ImageStep::new(operation, &x.desc(), of.as_ref(), Some(&y)).unwrap();
            assert_eq!(first, computed(&spread, Isa::best(), 2, given, false), "gaps");
            for isa in Isa::available() {
                let y = computed(&spread, isa, 2, given, false);
                assert_eq!(y.len(), expected.len());
                for (&y, &(expected, scale)) in y.iter().zip(&expected) {
                    // A few roundings, whatever the number of terms.
                    let bound = 8.0 * f64::from(f32::EPSILON) * scale;
                    let error = (f64::from(y) - expected).abs();
                    assert!(error <= bound, "{operation:?} {sizes:?} {isa:?}: {y} {expected}");
                }
                seen += 1;
            }
        }
    }
    assert!(seen > 50);
}

#[test]
fn nan_and_infinities_stay() {
    let mut numbers = [1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -2.0].into_iter().cycle();
    // Each channel of a row has one of the numbers first.
    let x = Image::new([1, 3, 4, 19], || numbers.next().unwrap());
    let gate = Image::new([1, 1, 1, 19], || numbers.next().unwrap());
    let image = Image::new([1, 3, 4, 19], || numbers.next().unwrap());
    for operation in operations() {
        let given = (&x, second(operation, [&gate, &image]));
        let Some(step) = step_of(operation, given.0, given.1) else { continue };
        let expected = oracle(&step, given.0, given.1);
        for isa in Isa::available() {
            let y = computed(&step, isa, 1, given, false);
            for (&y, &(expected, _)) in y.iter().zip(&expected) {
                let expected = expected as f32;
                let is_near = (y - expected).abs() <= 1e-6 * expected.abs();
                assert!(
                    y == expected || is_near || (y.is_nan() && expected.is_nan()),
                    "{operation:?} {isa:?}: {y} {expected}"
                );
            }
        }
    }
}

#[test]
fn row_major_images_are_copied() {
    for (i, [n, h, w, c]) in [
        [1, 224, 224, 3],
        [2, 7, 5, 3],
        [3, 1, 1, 4],
        [2, 90, 91, 2],
        [1, 200, 100, 1],
        [0, 4, 4, 3],
    ]
    .into_iter()
    .enumerate()
    {
        let x = Image::new([n, h, w, c], random(i as u64));
        let mut given = x.numbers.clone();
        for (at, number) in x.numbers.iter().enumerate() {
            let (pixel, channel) = (at / c, at % c);
            given[(pixel / (h * w) * c + channel) * h * w + pixel % (h * w)] = *number;
        }
        let desc = TensorDesc::contiguous(DType::F32, &[n, c, h, w]).unwrap();
        let step = ImageStep::new(ImageOperation::ChannelsLast, &desc, None, None).unwrap();
        assert_eq!(step.y(), &x.desc());
        let given = Image { numbers: given, ..x.spread(0) };
        for isa in Isa::available() {
            for threads in [1, 3] {
                assert_eq!(computed(&step, isa, threads, (&given, None), false), x.numbers);
            }
        }
    }
}

#[test]
fn other_tensors_are_refused() {
    let of = |shape: &[usize]| *Tensor::zeros(DType::F32, shape).unwrap().desc();
    let last = Image::new([2, 4, 4, 8], || 0.0).desc();
    let gate = of(&[2, 8, 1, 1]);
    let sigmoid = ImageOperation::Gate(Gate::Sigmoid);
    assert!(ImageStep::new(sigmoid, &last, Some(&gate), None).is_some());
    for (operation, x, second) in [
        (ImageOperation::Mean, of(&[2, 8, 4, 4]), None),
        (ImageOperation::Mean, last, Some(gate)),
        (ImageOperation::Copy, last, Some(last)),
        (ImageOperation::Add, last, None),
        (ImageOperation::Add, last, Some(gate)),
        (ImageOperation::Add, last, Some(of(&[2, 8, 4, 4]))),
        (ImageOperation::Upsample([0, 2]), last, None),
        (ImageOperation::Upsample([2, usize::MAX]), last, None),
        (ImageOperation::Mean, of(&[8, 4, 4]), None),
        (ImageOperation::Mean, *Tensor::zeros(DType::F16, &[1, 1, 1, 1]).unwrap().desc(), None),
        (ImageOperation::ChannelsLast, last, None),
        (ImageOperation::ChannelsLast, of(&[2, 5, 4, 4]), None),
        (ImageOperation::ChannelsLast, of(&[2, 3, 4, 4]), Some(gate)),
        (sigmoid, last, None),
        (sigmoid, last, Some(of(&[1, 8, 1, 1]))),
        (sigmoid, last, Some(last)),
    ] {
        assert!(ImageStep::new(operation, &x, second.as_ref(), None).is_none());
    }
    for (size, stride, padding) in
        [([5, 1], [1, 1], [0, 0]), ([2, 2], [0, 1], [0, 0]), ([2, 2], [1, 1], [2, 0])]
    {
        let window = Window { size, stride, padding };
        assert!(ImageStep::new(ImageOperation::MaxPool(window), &last, None, None).is_none());
    }
    let padded = Window { size: [3, 3], stride: [1, 1], padding: [1, 1] };
    assert!(ImageStep::new(ImageOperation::AveragePool(padded), &last, None, None).is_none());
    assert!(ImageStep::new(ImageOperation::MaxPool(padded), &last, None, None).is_some());
    // Results of other shapes, with channels apart, and with pixels nearer than they are long.
    for y in [of(&[2, 8, 4, 4]), of(&[2, 8, 4]), desc([2, 8, 4, 5], 8), desc([2, 8, 4, 4], 7)] {
        assert!(ImageStep::new(ImageOperation::Copy, &last, None, Some(&y)).is_none(), "{y:?}");
    }
    assert!(
        ImageStep::new(ImageOperation::Copy, &last, None, Some(&desc([2, 8, 4, 4], 9))).is_some()
    );
}
