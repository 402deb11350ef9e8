//! Plans at work: packed filters, shared workspaces, checked runs, extreme sizes.

use super::*;
use crate::Accuracy;
use crate::cpu::has_many_cores;
use crate::verification::{random, random_tensor};

fn desc(shape: &[usize]) -> TensorDesc {
    TensorDesc::contiguous(DType::F32, shape).unwrap()
}

/// A VGG-like stack: 3x3 convolutions, some of stride 2, with bias and ReLU, and a 1x1 head.
#[test]
fn a_network_shares_one_workspace() {
    let layers = [
        (3, 16, 3, 1),
        (16, 16, 3, 2),
        (16, 32, 3, 1),
        (32, 32, 3, 1),
        (32, 64, 3, 2),
        (64, 64, 3, 1),
        (64, 10, 1, 1),
    ];
    let options = PlanOptions { verify: Verify::On, ..Default::default() };
    let mut x = random_tensor(1, desc(&[2, 3, 24, 20]), 0.0, 1.0).unwrap();
    let mut plans = Vec::new();
    let mut shape = *x.desc();
    for (i, &(c, k, r, stride)) in layers.iter().enumerate() {
        let w = random_tensor(i as u64, desc(&[k, c, r, r]), -0.2, 0.2).unwrap();
        let params = Conv2dParams {
            stride: [stride; 2],
            padding: [r / 2; 2],
            activation: Activation::Relu,
            ..Default::default()
        };
        let spec = Conv2dSpec::new(shape, *w.desc(), &params).unwrap().with_bias(desc(&[k]));
        shape = spec.y;
        plans.push((Conv2dPlan::new(&spec, &options).unwrap(), w));
    }
    let sizes = plans.iter().map(|(plan, _)| plan.packed_workspace_bytes());
    let mut workspace = Workspace::for_sizes(Device::Cpu, sizes).unwrap();
    let packed: Vec<_> = plans
        .iter()
        .map(|(plan, w)| plan.pack_weights(&w.as_ref(), &mut workspace).unwrap())
        .collect();
    for ((plan, _), packed) in plans.iter().zip(&packed) {
        let bias = random_tensor(9, plan.spec().bias.unwrap(), -0.1, 0.1).unwrap();
        let mut y = Tensor::uninitialised(plan.spec().y).unwrap();
        let bias = Some(bias.as_ref());
        let args = Conv2dArgs::new(x.as_ref(), packed).with_bias(bias);
        // Verify::On compares each layer with the oracle.
        plan.run(&args, y.as_mut(), &mut workspace).unwrap();
        x = y;
    }
    assert_eq!(x.shape(), [2, 10, 6, 5]);
    assert!(x.to_vec::<f32>().unwrap().iter().any(|&y| y > 0.0));
}

/// A filter packed once serves plans for other batches, image sizes and types of layout.
#[test]
fn packed_filters_serve_similar_plans() {
    let w = random_tensor(1, desc(&[20, 6, 3, 3]), -1.0, 1.0).unwrap();
    for algorithm in [Conv2dAlgorithm::Im2colGemm, Conv2dAlgorithm::WinogradGemm(Tile::F4)] {
        let plan = |shape: &[usize]| {
            let spec = Conv2dSpec::new(desc(shape), *w.desc(), &Conv2dParams::default()).unwrap();
            Conv2dPlan::with_algorithm(&spec, algorithm, &PlanOptions::default()).unwrap()
        };
        let first = plan(&[1, 6, 9, 9]);
        let mut workspace = Workspace::new(Device::Cpu, first.workspace_bytes()).unwrap();
        let packed = first.pack_weights(&w.as_ref(), &mut workspace).unwrap();
        assert!(packed.bytes() >= 20 * 6 * 9 * 4);
        let second = plan(&[3, 6, 12, 31]);
        let x = random_tensor(2, second.spec().x, -1.0, 1.0).unwrap();
        let run = |w: Weights<'_>| {
            let mut ws = Workspace::new(Device::Cpu, second.workspace_bytes()).unwrap();
            let mut y = Tensor::uninitialised(second.spec().y).unwrap();
            let args = Conv2dArgs::new(x.as_ref(), w);
            second.run(&args, y.as_mut(), &mut ws).unwrap();
            y.to_vec::<f32>().unwrap()
        };
        assert_eq!(run(Weights::Packed(&packed)), run(Weights::Raw(w.as_ref())));
    }
}

#[test]
fn one_call_takes_any_layout() {
    let layout = Layout::with_order(&[1, 8, 7, 7], &[0, 2, 3, 1]).unwrap();
    let x = random_tensor(1, TensorDesc { dtype: DType::BF16, layout }, -1.0, 1.0).unwrap();
    let filter = TensorDesc::contiguous(DType::BF16, &[4, 8, 3, 3]).unwrap();
    let w = random_tensor(2, filter, -1.0, 1.0).unwrap();
    let y = conv2d(&x.as_ref(), &w.as_ref(), None, &Conv2dParams::default()).unwrap();
    assert_eq!(y.shape(), [1, 4, 5, 5]);
    assert_eq!(y.desc().strides()[1], 1, "channels-last in, channels-last out");
}

/// Whatever the batch, the workspace with packed filters stays below 64 MiB.
#[test]
fn workspaces_do_not_grow_with_the_batch() {
    for (c, k, r, stride) in [(3, 64, 7, 2), (512, 512, 3, 1), (512, 2048, 3, 1), (256, 64, 1, 1)] {
        for order in [[0, 1, 2, 3], [0, 2, 3, 1]] {
            let layout = Layout::with_order(&[4096, c, 112, 112], &order).unwrap();
            let x = TensorDesc { dtype: DType::F32, layout };
            let params = Conv2dParams { stride: [stride; 2], ..Default::default() };
            let spec = Conv2dSpec::new(x, desc(&[k, c, r, r]), &params).unwrap();
            for algorithm in Conv2dPlan::algorithms(&spec, Device::Cpu) {
                let options = PlanOptions { threads: 2.try_into().ok(), ..Default::default() };
                let plan = Conv2dPlan::with_algorithm(&spec, algorithm, &options).unwrap();
                let bytes = plan.packed_workspace_bytes();
                assert!(bytes <= 64 << 20, "{bytes} bytes: {}", plan.explain());
            }
        }
    }
}

/// Far padding, dilation and stride, which reach only zeros or few pixels.
#[test]
fn extreme_options() {
    let case = |x, filter, params| Case {
        x,
        filter,
        params,
        dtype: DType::F32,
        bias: Some(DType::F32),
        forms: [Arrangement::Nchw; 3],
    };
    let base = Conv2dParams::default();
    for case in [
        // Padding larger than the input: most outputs are only the bias.
        case([1, 2, 3, 4], [5, 3, 3], Conv2dParams { padding: [40, 9], ..base }),
        case([1, 2, 0, 4], [5, 2, 2], Conv2dParams { padding: [1, 0], ..base }),
        case([1, 3, 9, 70], [4, 3, 3], Conv2dParams { dilation: [4, 30], ..base }),
        case([2, 3, 9, 70], [4, 3, 3], Conv2dParams { stride: [1000, 1000], ..base }),
        case([2, 3, 1, 300], [4, 1, 200], Conv2dParams { padding: [0, 7], ..base }),
        case([1, 0, 4, 4], [4, 3, 3], base),
        case([1, 4, 4, 4], [0, 3, 3], base),
        case([0, 4, 4, 4], [4, 3, 3], base),
    ] {
        assert!(case.spec().is_ok(), "{case:?}");
        case.check();
        case.check_backward();
    }
}

/// A filter whose packed form is larger than a workspace may be is packed in parts, and one that few tiles share in
/// panels, with the same result.
#[test]
fn large_filters_are_packed_in_parts() {
    raw_is_as_packed([1, 1024, 62, 62]);
    raw_is_as_packed([1, 1024, 6, 5]);
    raw_is_as_packed([7, 40, 9, 8]);
}

fn raw_is_as_packed(x: [usize; 4]) {
    let w = random_tensor(2, desc(&[180, x[1], 3, 3]), -1.0, 1.0).unwrap();
    let x = random_tensor(1, desc(&x), -1.0, 1.0).unwrap();
    let bias = random_tensor(3, desc(&[180]), -1.0, 1.0).unwrap();
    let mut spec = Conv2dSpec::new(*x.desc(), *w.desc(), &Conv2dParams::default()).unwrap();
    spec.bias = Some(*bias.desc());
    let algorithm = Conv2dAlgorithm::WinogradGemm(Tile::F6);
    let options = PlanOptions { threads: 2.try_into().ok(), ..Default::default() };
    let plan = Conv2dPlan::with_algorithm(&spec, algorithm, &options).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let packed = plan.pack_weights(&w.as_ref(), &mut workspace).unwrap();
    if packed.bytes() > 32 << 20 {
        assert!(plan.workspace_bytes() - plan.packed_workspace_bytes() < packed.bytes());
    }
    let mut run = |w: Weights<'_>| {
        let mut y = Tensor::uninitialised(plan.spec().y).unwrap();
        let args = Conv2dArgs::new(x.as_ref(), w).with_bias(bias.as_ref());
        plan.run(&args, y.as_mut(), &mut workspace).unwrap();
        y.to_vec::<f32>().unwrap()
    };
    assert_eq!(run(Weights::Raw(w.as_ref())), run(Weights::Packed(&packed)));
}

/// NaN and infinity reach exactly the outputs whose taps read them, in algorithms without transforms.
#[test]
fn nan_stays_where_it_is() {
    nan_stays(1f32, f32::NAN, f32::is_nan);
    nan_stays(bf16::ONE, bf16::NAN, bf16::is_nan);
    nan_stays(bf16::ONE, bf16::INFINITY, |y| y == bf16::INFINITY);
}

fn nan_stays<T: crate::Element>(one: T, marker: T, is_marked: fn(T) -> bool) {
    let mut values = vec![one; 49];
    values[3 * 7 + 3] = marker;
    let x = Tensor::from_slice(&values, &[1, 1, 7, 7]).unwrap();
    let w = Tensor::from_slice(&[one; 4 * 9], &[4, 1, 3, 3]).unwrap();
    let params = Conv2dParams { padding: [1, 1], ..Default::default() };
    let spec = Conv2dSpec::new(*x.desc(), *w.desc(), &params).unwrap();
    for algorithm in [Conv2dAlgorithm::Direct, Conv2dAlgorithm::Im2colGemm] {
        let plan = Conv2dPlan::with_algorithm(&spec, algorithm, &PlanOptions::default()).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        let mut y = Tensor::uninitialised(spec.y).unwrap();
        let args = Conv2dArgs::new(x.as_ref(), w.as_ref());
        plan.run(&args, y.as_mut(), &mut workspace).unwrap();
        for (i, y) in y.to_vec::<T>().unwrap().into_iter().enumerate() {
            let near = (2..=4).contains(&(i / 7 % 7)) && (2..=4).contains(&(i % 7));
            assert_eq!(is_marked(y), near, "{algorithm} at {i}");
        }
    }
}

/// `Exact` keeps numbers below 2^-126, which products of bf16 count as zero.
#[test]
fn tiny_numbers_are_kept_by_exact_sums() {
    let tiny = bf16::from_bits(1);
    let x = Tensor::from_slice(&[tiny; 64], &[1, 1, 8, 8]).unwrap();
    let w = Tensor::from_slice(&[bf16::ONE; 4], &[4, 1, 1, 1]).unwrap();
    for (accuracy, isa) in [Accuracy::Exact, Accuracy::Fp32]
        .into_iter()
        .flat_map(|accuracy| Isa::tested().into_iter().map(move |isa| (accuracy, isa)))
    {
        let params = Conv2dParams { accuracy, ..Default::default() };
        let spec = Conv2dSpec::new(*x.desc(), *w.desc(), &params).unwrap();
        let configuration = Conv2dConfiguration::new(Conv2dAlgorithm::Direct);
        let options = PlanOptions::default();
        let plan = Conv2dPlan::on_isa(&spec, &configuration, &options, isa).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        let mut y = Tensor::uninitialised(spec.y).unwrap();
        let args = Conv2dArgs::new(x.as_ref(), w.as_ref());
        plan.run(&args, y.as_mut(), &mut workspace).unwrap();
        let zero = accuracy != Accuracy::Exact && (isa.has_bf16_products() || isa.has_tiles());
        let want = if zero { bf16::ZERO } else { tiny };
        assert_eq!(y.to_vec::<bf16>().unwrap(), [want; 4 * 64], "{accuracy:?} on {isa:?}");
    }
}

/// Infinities reach what they belong to, also where numbers of f32 are split: only their first part is infinite.
#[test]
fn sums_of_infinities_have_their_signs() {
    const C: usize = 48;
    for (isa, channels_last, r) in Isa::tested()
        .into_iter()
        .flat_map(|isa| [(isa, false, 1), (isa, true, 1), (isa, false, 3), (isa, true, 3)])
    {
        let order: &[usize] = if channels_last { &[0, 2, 3, 1] } else { &[0, 1, 2, 3] };
        let layout = Layout::with_order(&[1, C, 5, 7], order).unwrap();
        let w = desc(&[40, C, r, r]);
        let params = Conv2dParams { padding: [r / 2; 2], ..Default::default() };
        let spec = Conv2dSpec::new(TensorDesc::new(DType::F32, layout), w, &params).unwrap();
        let configuration = Conv2dConfiguration::new(Conv2dAlgorithm::Direct);
        let plan = Conv2dPlan::on_isa(&spec, &configuration, &PlanOptions::default(), isa).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        let mut x: Vec<_> = random(1, C * 5 * 7, -1.0, 1.0).into_iter().map(|x| x as f32).collect();
        let w = random_tensor(2, spec.w, 0.5, 1.0).unwrap();
        // A pixel of each kind, in the first channel of memory, or pixels of the first channel.
        let at = |pixel: usize| if channels_last { pixel * C } else { pixel };
        let values = [(0, f32::INFINITY), (10, f32::NEG_INFINITY), (34, f32::NAN), (20, 3.3e38)];
        for (pixel, value) in values {
            x[at(pixel)] = value;
        }
        // SAFETY: the vector has the elements of that layout, and outlives the view.
        let x = unsafe { TensorRef::from_raw(x.as_ptr().cast(), spec.x, Device::Cpu) };
        let mut y = Tensor::uninitialised(spec.y).unwrap();
        let args = Conv2dArgs::new(x, w.as_ref());
        plan.run(&args, y.as_mut(), &mut workspace).unwrap();
        let y = y.as_ref().to_f64_vec().unwrap();
        for (pixel, value) in values {
            for y in y.chunks(5 * 7).map(|channel| channel[pixel] as f32) {
                let is_same = match value {
                    _ if value.is_finite() => y.is_finite() && y > 1e38,
                    _ => y == value || y.is_nan() && value.is_nan(),
                };
                assert!(is_same, "{isa:?} {channels_last} {r} {pixel}: {y}");
            }
        }
    }
}

/// `Verify::On` finds a wrong result.
#[test]
fn verification_finds_a_wrong_filter() {
    let spec = Conv2dSpec::new(desc(&[1, 4, 8, 8]), desc(&[4, 4, 3, 3]), &Conv2dParams::default());
    let spec = spec.unwrap();
    let options = PlanOptions { verify: Verify::On, ..Default::default() };
    let plan = Conv2dPlan::new(&spec, &options).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let x = random_tensor(1, spec.x, -1.0, 1.0).unwrap();
    let w = random_tensor(2, spec.w, -1.0, 1.0).unwrap();
    let mut packed = plan.pack_weights(&w.as_ref(), &mut workspace).unwrap();
    let mut y = Tensor::uninitialised(spec.y).unwrap();
    let mut run = |packed: &PackedWeights| {
        let args = Conv2dArgs::new(x.as_ref(), packed);
        plan.run(&args, y.as_mut(), &mut workspace)
    };
    run(&packed).unwrap();
    packed.spoil();
    assert!(matches!(run(&packed), Err(Error::Verification { .. })));
}

/// Numbers of threads and parameters beyond all reason are cut to what there is to do.
#[test]
fn extreme_parameters() {
    let (x, w) = (desc(&[1, 10, 14, 14]), desc(&[40, 10, 3, 3]));
    let spec = Conv2dSpec::new(x, w, &Conv2dParams::default()).unwrap();
    let x = random_tensor(1, spec.x, 0.0, 1.0).unwrap();
    let w = random_tensor(2, spec.w, -1.0, 1.0).unwrap();
    let dy = random_tensor(3, spec.y, -1.0, 1.0).unwrap();
    for threads in [1000, 1 << 62] {
        let threads = std::num::NonZeroUsize::new(threads);
        let options = PlanOptions { threads, verify: Verify::On, ..Default::default() };
        for algorithm in Conv2dPlan::algorithms(&spec, Device::Cpu) {
            let model = Conv2dConfiguration::new(algorithm);
            let mut configurations = vec![model];
            if matches!(algorithm, Conv2dAlgorithm::WinogradGemm(_)) {
                for most in [usize::MAX, 1 << 62] {
                    let most = Some(most);
                    configurations.push(Conv2dConfiguration { tiles: most, ..model });
                    configurations.push(Conv2dConfiguration { vectors: most, ..model });
                    configurations.push(Conv2dConfiguration { parts: most, ..model });
                    configurations.push(Conv2dConfiguration { threads: most, ..model });
                }
            }
            for configuration in configurations {
                let plan = Conv2dPlan::with_configuration(&spec, &configuration, &options).unwrap();
                let bytes = plan.workspace_bytes().max(plan.backward_workspace_bytes().unwrap());
                assert!(bytes <= 64 << 20, "{bytes} bytes: {}", plan.explain());
                let mut workspace = Workspace::new(Device::Cpu, bytes).unwrap();
                let mut y = Tensor::uninitialised(spec.y).unwrap();
                let args = Conv2dArgs::new(x.as_ref(), w.as_ref());
                plan.run(&args, y.as_mut(), &mut workspace).unwrap();
                if configuration != model {
                    continue;
                }
                let mut dx = Tensor::uninitialised(spec.x).unwrap();
                let (w, dy) = (w.as_ref(), dy.as_ref());
                plan.backward_data(&w, &dy, dx.as_mut(), &mut workspace).unwrap();
                let mut dw = Tensor::uninitialised(spec.w).unwrap();
                plan.backward_weight(&x.as_ref(), &dy, dw.as_mut(), &mut workspace).unwrap();
            }
        }
    }
}

/// Large enough for Winograd's products to be summed by tiles, where the machine has them; and their data gradient. The bits
/// depend neither on the number of threads nor on who packs the filter.
#[test]
fn large_layers_sum_winograds_products_by_tiles() {
    for isa in Isa::available().into_iter().filter(|isa| isa.has_tiles() && !has_many_cores()) {
        let [x, dy] = [[1, 257, 54, 55], [1, 260, 54, 55]]
            .map(|shape| random_tensor(1, desc(&shape), -1.0, 1.0).unwrap());
        let w = random_tensor(2, desc(&[260, 257, 3, 3]), -1.0, 1.0).unwrap();
        let run = |accuracy, threads, packs: bool| {
            let params = Conv2dParams { padding: [1, 1], accuracy, ..Default::default() };
            let spec = Conv2dSpec::new(*x.desc(), *w.desc(), &params).unwrap();
            let threads = std::num::NonZeroUsize::new(threads);
            let options = PlanOptions { threads, ..Default::default() };
            let algorithm = Conv2dPlan::new(&spec, &options).unwrap().algorithm();
            let algorithm = match accuracy {
                Accuracy::Exact => algorithm,
                _ => Conv2dAlgorithm::WinogradGemm(Tile::F4),
            };
            let configuration = Conv2dConfiguration::new(algorithm);
            let plan = Conv2dPlan::on_isa(&spec, &configuration, &options, isa).unwrap();
            let by_tiles = plan.explain().contains("products by tiles");
            assert_eq!(by_tiles, accuracy != Accuracy::Exact, "{}", plan.explain());
            let bytes = plan.workspace_bytes().max(plan.backward_workspace_bytes().unwrap());
            let mut workspace = Workspace::new(Device::Cpu, bytes).unwrap();
            let [mut y, mut dx] = [spec.y, spec.x].map(|desc| Tensor::uninitialised(desc).unwrap());
            let (x, w) = (x.as_ref(), w.as_ref());
            let packed = packs.then(|| plan.pack_weights(&w, &mut workspace).unwrap());
            let weights = packed.as_ref().map_or(Weights::Raw(w), Weights::Packed);
            plan.run(&Conv2dArgs::new(x, weights), y.as_mut(), &mut workspace).unwrap();
            plan.backward_data(&w, &dy.as_ref(), dx.as_mut(), &mut workspace).unwrap();
            [y, dx].map(|t| t.to_vec::<f32>().unwrap())
        };
        let (exact, one) = (run(Accuracy::Exact, 2, true), run(Accuracy::Fp32, 1, true));
        for (exact, got) in exact.iter().flatten().zip(one.iter().flatten()) {
            // Of a tile's scale: sums of 9 * 257 terms of a half, times the largest number.
            assert!((exact - got).abs() <= 4e-6 * 9.0 * 257.0 * 0.6, "{got} instead of {exact}");
        }
        assert!(run(Accuracy::Fp32, 1, false) == one && run(Accuracy::Fp32, 2, true) == one);
        assert!(run(Accuracy::Fp32, 9, false) == one && run(Accuracy::Fp32, 3, true) == one);
    }
}

/// The residual is added before the activation, and must not overlap y.
#[test]
fn a_residual_is_added_before_the_activation() {
    let x = Tensor::from_slice(&[1f32, -4.0, 9.0, f32::NAN], &[1, 1, 2, 2]).unwrap();
    let w = Tensor::from_slice(&[1f32], &[1, 1, 1, 1]).unwrap();
    let added = Tensor::from_slice(&[-3f32, 5.0, -1.0, 1.0], &[1, 1, 2, 2]).unwrap();
    let params = Conv2dParams { activation: Activation::Relu6, ..Default::default() };
    let spec = Conv2dSpec::new(*x.desc(), *w.desc(), &params).unwrap().with_residual(true);
    for algorithm in Conv2dPlan::algorithms(&spec, Device::Cpu) {
        let plan = Conv2dPlan::with_algorithm(&spec, algorithm, &PlanOptions::default()).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        let mut y = Tensor::uninitialised(spec.y).unwrap();
        let args = Conv2dArgs::new(x.as_ref(), w.as_ref()).with_residual(added.as_ref());
        plan.run(&args, y.as_mut(), &mut workspace).unwrap();
        let got = y.to_vec::<f32>().unwrap();
        assert_eq!(got[..3], [0.0, 1.0, 6.0], "{algorithm}");
        assert!(got[3].is_nan(), "{algorithm}");
        // SAFETY: the plan must refuse the two views of y together.
        let alias = unsafe { TensorRef::from_raw(y.as_ref().as_ptr().cast(), spec.y, Device::Cpu) };
        let args = Conv2dArgs::new(x.as_ref(), w.as_ref()).with_residual(alias);
        let refused = plan.run(&args, y.as_mut(), &mut workspace);
        assert!(matches!(refused, Err(Error::Aliasing { input: "residual", .. })), "{refused:?}");
    }
}

/// y may be some channels of an image of which x and the residual are others, and nothing else is written.
#[test]
fn channels_of_one_image_are_read_and_written() {
    for order in [[0, 2, 3, 1], [0, 1, 2, 3]] {
        let image = Layout::with_order(&[2, 16, 9, 10], &order).unwrap();
        let part = |channels| {
            let layout = Layout::strided(&[2, channels, 9, 10], image.strides()).unwrap();
            TensorDesc { dtype: DType::F32, layout }
        };
        let at = |channel: usize| channel * image.strides()[1] as usize;
        let params = Conv2dParams { padding: [1; 2], ..Default::default() };
        let mut spec = Conv2dSpec::new(part(8), desc(&[4, 8, 3, 3]), &params).unwrap();
        (spec.y, spec.residual) = (part(4), true);
        let w = random_tensor(2, desc(&[4, 8, 3, 3]), -0.2, 0.2).unwrap();
        let numbers: Vec<f32> =
            random(1, image.len(), 0.0, 1.0).iter().map(|&v| v as f32).collect();
        for algorithm in Conv2dPlan::algorithms(&spec, Device::Cpu) {
            let options = PlanOptions { verify: Verify::On, ..Default::default() };
            let plan = Conv2dPlan::with_algorithm(&spec, algorithm, &options).unwrap();
            let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
            // The channels 0 to 7, 8 to 11, and those from `first` on.
            let mut run = |data: &mut [f32], first| {
                let ptr = data.as_mut_ptr();
                // SAFETY: all within `data`, which nobody else touches; the plan refuses views that share elements.
                let (x, residual, y) = unsafe {
                    let read = |channel, desc| {
                        TensorRef::from_raw(ptr.add(at(channel)).cast(), desc, Device::Cpu)
                    };
                    let y = TensorMut::from_raw(ptr.add(at(first)).cast(), spec.y, Device::Cpu);
                    (read(0, spec.x), read(8, spec.y), y.unwrap())
                };
                let args = Conv2dArgs::new(x, w.as_ref()).with_residual(Some(residual));
                plan.run(&args, y, &mut workspace)
            };
            let mut data = numbers.clone();
            // Compared with the oracle, since the plan verifies its results.
            run(&mut data, 12).unwrap();
            let is_written = |i: usize| i / at(1) % 16 >= 12;
            let changed = data.iter().zip(&numbers).map(|(now, before)| now != before);
            assert!(changed.enumerate().all(|(i, is)| is == is_written(i)), "{algorithm}");
            for (first, input) in [(7, "x"), (11, "residual")] {
                let refused = run(&mut data, first).unwrap_err().to_string();
                let expected =
                    format!("`y` shares memory with `{input}`, expected separate memory");
                assert_eq!(refused, expected, "{algorithm}");
            }
        }
    }
}
