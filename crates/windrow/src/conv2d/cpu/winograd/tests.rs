use super::*;
use crate::Activation;
use crate::conv2d::cpu::Residual;
use crate::conv2d::reference;
use crate::verification::Expected;
use crate::{DType, Layout, Tensor, TensorDesc, bf16, f16};
use proptest::prelude::*;

/// Order of the dimensions in memory, outermost first.
const NCHW: [usize; 4] = [0, 1, 2, 3];
const NHWC: [usize; 4] = [0, 2, 3, 1];
/// Neither channels nor columns are neighbours.
const NWCH: [usize; 4] = [0, 3, 1, 2];

#[derive(Clone, Debug)]
struct Case {
    n: usize,
    c: usize,
    k: usize,
    /// Sizes of the output.
    size: [usize; 2],
    padding: [usize; 2],
    order: [usize; 4],
    dtype: DType,
    tile: Tile,
    threads: usize,
    activation: Activation,
    bias: bool,
    blocking: Option<Blocking>,
    /// Input as after a ReLU.
    rectified: bool,
}

impl Default for Case {
    fn default() -> Self {
        Case {
            n: 1,
            c: 3,
            k: 5,
            size: [7, 9],
            padding: [1, 1],
            order: NCHW,
            dtype: DType::F32,
            tile: Tile::F4,
            threads: 1,
            activation: Activation::Identity,
            bias: true,
            blocking: None,
            rectified: false,
        }
    }
}

/// Numbers in -1..1 from a seed, uniform.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e3779b97f4a7c15) | 1;
    let mut next = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// A tensor of the values, laid out in `order`, with the values that its type can hold.
fn tensor(values: &[f32], shape: &[usize; 4], order: [usize; 4], dtype: DType) -> Tensor {
    let layout = Layout::with_order(shape, &order).unwrap();
    let mut t = Tensor::uninitialised(TensorDesc { dtype, layout }).unwrap();
    let strides: [isize; 4] = layout.strides().try_into().unwrap();
    let base = t.as_mut().as_mut_ptr();
    for (i, &v) in values.iter().enumerate() {
        let mut rest = i;
        let mut offset = 0;
        for d in (0..4).rev() {
            offset += (rest % shape[d]) as isize * strides[d];
            rest /= shape[d];
        }
        // SAFETY: the index is inside of the tensor's shape.
        unsafe {
            match dtype {
                DType::F32 => *base.cast::<f32>().offset(offset) = v,
                DType::F16 => *base.cast::<f16>().offset(offset) = f16::from_f32(v),
                DType::BF16 => *base.cast::<bf16>().offset(offset) = bf16::from_f32(v),
                _ => unreachable!(),
            }
        }
    }
    t
}

/// The tensors of a test case.
struct Given {
    x: Tensor,
    filter: Tensor,
    bias: Option<Tensor>,
    problem: Problem,
}

impl Given {
    fn new(case: &Case) -> Self {
        let [oh, ow] = case.size;
        let [h, w] = [oh + 2 - 2 * case.padding[0], ow + 2 - 2 * case.padding[1]];
        let mut pixels = noise(1, case.n * case.c * h * w);
        if case.rectified {
            pixels.iter_mut().for_each(|x| *x = x.max(0.0));
        }
        let x = tensor(&pixels, &[case.n, case.c, h, w], case.order, case.dtype);
        let filter = noise(2, case.k * case.c * 9);
        let filter = tensor(&filter, &[case.k, case.c, 3, 3], NCHW, case.dtype);
        let bias = Tensor::from_slice(&noise(3, case.k), &[case.k]).unwrap();
        let bias = case.bias.then_some(bias);
        let problem =
            Problem::new(x.desc(), filter.desc(), [[1, 1], case.padding, [1, 1]], 1, false);
        Given { x, filter, bias, problem: problem.unwrap() }
    }

    /// The result of the pipeline, with the filter packed before or given as it is.
    fn by(&self, conv: &WinogradCpu, case: &Case, raw: bool) -> Tensor {
        let bytes = if raw { conv.raw_bytes() } else { conv.workspace_bytes() };
        let mut workspace = vec![u64::MAX; bytes / 8 + 16];
        let skip = workspace.as_ptr().align_offset(64);
        let len = workspace.len();
        // SAFETY: the bytes of a slice of integers.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(
                workspace[skip..].as_mut_ptr().cast::<u8>(),
                (len - skip) * 8,
            )
        };
        let nan = vec![f32::NAN; self.problem.y_shape().iter().product()];
        let mut y = tensor(&nan, &self.problem.y_shape(), case.order, case.dtype);
        let bias = self.bias.as_ref().map(Tensor::as_ref);
        let run = Run {
            x: &self.x.as_ref(),
            initial: None,
            bias: bias.as_ref(),
            residual: Residual::NONE,
            activation: case.activation,
            y: &mut y.as_mut(),
            workspace: bytes,
        };
        if raw {
            conv.run_raw(&self.filter.as_ref(), run);
        } else {
            let mut packed = vec![f32::NAN; conv.packed_len()];
            conv.pack(&self.filter.as_ref(), &mut packed);
            assert!(packed.iter().all(|u| u.is_finite()), "the packed filter has holes");
            conv.run(&packed, run);
        }
        y
    }
}

/// The instruction sets, each with the products that it has. On a machine without AMX a software model takes its place.
fn ways() -> Vec<(Isa, Products)> {
    let tiles = Isa::tested().into_iter().filter(|isa| isa.has_tiles());
    let vectors = Isa::available().into_iter().map(|isa| (isa, Products::Vectors));
    vectors.chain(tiles.map(|isa| (isa, Products::Tiles))).collect()
}

/// The result of the pipeline and of the oracle.
fn compute(case: &Case, (isa, products): (Isa, Products)) -> (Vec<f64>, Expected) {
    let given = Given::new(case);
    let Given { x, filter, bias, problem } = &given;
    let mut conv = WinogradCpu::with_isa(problem, case.tile, case.threads, isa, products);
    if let Some(blocking) = case.blocking {
        conv.blocking = blocking;
    }
    let y = given.by(&conv, case, false);
    let f64s = |t: &Tensor| t.as_ref().to_f64_vec().unwrap();
    let bias = bias.as_ref().map(f64s);
    let bias = bias.as_deref();
    let expected =
        reference::forward(problem, &f64s(x), &f64s(filter), [bias, None], case.activation)
            .unwrap();
    (f64s(&y), expected)
}

/// Error of an output element relative to the largest sum of absolute products of the output. The
/// sum of the element itself is no bound: a tile's transform mixes all of its pixels, so an output
/// whose own pixels are zero (padding) has an error from its neighbours.
fn tolerance(tile: Tile) -> f64 {
    match tile {
        Tile::F2 => 1e-6,
        Tile::F4 => 4e-6,
        Tile::F6 => 2e-5,
    }
}

fn check(case: &Case) {
    for way in ways() {
        let (got, expected) = compute(case, way);
        let scale = expected.scale.iter().copied().fold(0.0, f64::max);
        for (i, (got, want)) in got.iter().zip(&expected.values).enumerate() {
            // The smallest f16 is subnormal below 2^-14.
            let rounding = case.dtype.unit_roundoff() * want.abs().max(6.2e-5);
            let bound = tolerance(case.tile) * scale + rounding;
            assert!(
                (got - want).abs() <= bound,
                "{way:?} {i}: {got} instead of {want} (bound {bound:e}) in {case:?}",
            );
        }
    }
}

#[test]
fn every_tile_layout_and_type() {
    for tile in Tile::ALL {
        for order in [NCHW, NHWC, NWCH] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                check(&Case { tile, order, dtype, c: 19, k: 37, ..Case::default() });
            }
        }
    }
}

#[test]
fn wide_images_and_many_threads() {
    for tile in Tile::ALL {
        for order in [NCHW, NHWC] {
            check(&Case {
                tile,
                order,
                n: 2,
                size: [13, 75],
                c: 17,
                k: 16,
                threads: 3,
                ..Case::default()
            });
        }
    }
}

#[test]
fn tiny_and_empty() {
    for size in [[1, 1], [1, 8], [5, 1]] {
        for padding in [[0, 0], [1, 0], [1, 1]] {
            for (n, c, k) in [(1, 1, 1), (0, 2, 2), (2, 0, 3), (1, 3, 0)] {
                if size[0] + 2 > 2 * padding[0] && size[1] + 2 > 2 * padding[1] {
                    for tile in Tile::ALL {
                        check(&Case { n, c, k, size, padding, tile, ..Case::default() });
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn agrees_with_the_oracle(
        (n, c, k) in (1usize..4, 1usize..40, 1usize..80),
        (oh, ow) in (1usize..20, 1usize..40),
        padding in (0usize..3, 0usize..3),
        order in prop::sample::select(vec![NCHW, NHWC, NWCH]),
        dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::BF16]),
        tile in prop::sample::select(Tile::ALL.to_vec()),
        (threads, tiles, parts, pairs, stretch) in (1usize..4, 1usize..40, 1usize..4, 1usize..4, 0usize..60),
        bias: bool,
        activation in prop::sample::select(Activation::ALL.to_vec()),
    ) {
        let padding = [padding.0, padding.1];
        let size = [oh.max(2 * padding[0]), ow.max(2 * padding[1])];
        // V is shared where channels are parted.
        let stretch = if parts > 1 { stretch.max(tiles) } else { 0 };
        let blocking = Some(Blocking { tiles, parts, vectors: 2 * pairs, stretch });
        check(&Case { n, c, k, size, padding, order, dtype, tile, threads, activation, bias, blocking, rectified: false });
    }
}

/// Relative RMS error at 256 input channels with data as after a ReLU.
#[test]
fn errors_at_256_channels() {
    for (tile, bound) in [(Tile::F2, 1e-6), (Tile::F4, 1e-6), (Tile::F6, 5e-6)] {
        for way in ways() {
            let case = Case {
                c: 256,
                k: 32,
                size: [12, 12],
                tile,
                bias: false,
                rectified: true,
                ..Case::default()
            };
            let (got, expected) = compute(&case, way);
            let square = |x: f64| x * x;
            let error: f64 = got.iter().zip(&expected.values).map(|(a, b)| square(a - b)).sum();
            let norm: f64 = expected.values.iter().map(|x| square(*x)).sum();
            let rms = (error / norm).sqrt();
            println!("{tile:?} {way:?}: {rms:.2e}");
            assert!(rms <= bound, "{tile:?} {way:?}: {rms:e}");
        }
    }
}

/// Threads that share V, of all tiles or of a stretch after the other, form the bits of threads that each have their own.
#[test]
fn same_bits_on_any_number_of_threads() {
    let few = Case { n: 2, c: 131, k: 72, size: [13, 30], ..Case::default() };
    let large = Case { c: 260, k: 40, size: [152, 152], tile: Tile::F6, ..Case::default() };
    for (case, stretches) in [(few, 1..2), (large, 2..20)] {
        let given = Given::new(&case);
        // The model of tiles takes long.
        let is_large = stretches.end > 2;
        let has = |isa: &Isa| !is_large || Isa::available().contains(isa);
        for (isa, products) in ways().into_iter().filter(|(isa, _)| has(isa)) {
            let conv =
                |threads| WinogradCpu::with_isa(&given.problem, case.tile, threads, isa, products);
            let bits = |threads, raw| {
                let y = given.by(&conv(threads), &case, raw);
                y.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert_eq!(conv(1).blocking.stretch, 0, "{case:?}");
            let stretch = conv(16).blocking.stretch;
            let tiles = conv(16).geometry.tiles();
            assert!(
                stretch > 0 && stretches.contains(&tiles.div_ceil(stretch)),
                "{stretch}: {case:?}"
            );
            let one = bits(1, false);
            for threads in [1, 2, 5, 16] {
                for raw in [false, true] {
                    assert!(
                        bits(threads, raw) == one,
                        "{isa:?} {products:?} threads {threads} raw {raw}: {case:?}"
                    );
                }
            }
        }
    }
}

/// A number that is not finite reaches the outputs whose sums have it, and none but of the tiles that read it.
#[test]
fn numbers_that_are_not_finite_stay_in_their_tiles() {
    let case = Case { c: 40, k: 21, size: [16, 28], bias: false, ..Case::default() };
    for (way, tile) in ways().into_iter().flat_map(|way| Tile::ALL.map(|tile| (way, tile))) {
        let case = Case { tile, ..case };
        for number in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let mut given = Given::new(&case);
            let (at, m) = ([9, 10], tile.m());
            let pixel = (33 * case.size[0] + at[0]) * case.size[1] + at[1];
            // SAFETY: a pixel of channel 33, in a contiguous tensor of f32.
            unsafe { given.x.as_mut().as_mut_ptr().cast::<f32>().add(pixel).write(number) };
            let conv = WinogradCpu::with_isa(&given.problem, tile, 1, way.0, way.1);
            let y = given.by(&conv, &case, false).to_vec::<f32>().unwrap();
            for (i, y) in y.into_iter().enumerate() {
                let [row, column] = [i / case.size[1] % case.size[0], i % case.size[1]];
                let is_near = |i: usize, at: usize| i.abs_diff(at) <= 1;
                // A tile reads a pixel before its first output, and one after the last.
                let reads =
                    |i: usize, at: usize| (i / m * m..i / m * m + m + 2).contains(&(at + 1));
                if is_near(row, at[0]) && is_near(column, at[1]) {
                    assert!(!y.is_finite(), "{way:?} {tile:?} {number} {row} {column}: {y}");
                } else if !(reads(row, at[0]) && reads(column, at[1])) {
                    assert!(y.is_finite(), "{way:?} {tile:?} {number} {row} {column}: {y}");
                }
            }
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
#[cfg_attr(debug_assertions, ignore = "of a release build")]
fn sums_stay_in_registers() {
    use crate::cpu::compiled::assert_in_registers;
    assert_in_registers::<Gemm<'static, 'static>>([0, 0]);
    assert_in_registers::<InputTransform<'static, f32, 6>>([0, 0]);
    assert_in_registers::<InputTransform<'static, f32, 8>>([0, 0]);
    assert_in_registers::<OutputTransform<'static, f32, 6>>([0, 0]);
    assert_in_registers::<OutputTransform<'static, f32, 8>>([0, 0]);
}
