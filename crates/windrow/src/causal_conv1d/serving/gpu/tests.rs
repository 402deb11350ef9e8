use super::*;
use crate::causal_conv1d::HeadNorm;
use crate::{Activation, Approximate, Layout};

#[test]
fn kernels_compile_without_spills() {
    let mut kernels = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for width in [4, 20] {
            let desc = |shape: &[usize]| TensorDesc::contiguous(dtype, shape).unwrap();
            let layout = |shape: &[usize]| TensorDesc {
                dtype,
                layout: Layout::with_order(shape, &[0, 2, 1]).unwrap(),
            };
            let index = |shape: &[usize]| TensorDesc::contiguous(DType::I32, shape).unwrap();
            let (x, weight) = (layout(&[1, 64, 512]), desc(&[64, width]));
            for states in [layout(&[9, 64, width - 1]), desc(&[9, 64, width + 3])] {
                let spec = CausalConv1dServingSpec::new(x, states, weight).unwrap();
                let plain = spec.clone();
                let bias = TensorDesc::contiguous(DType::F32, &[64]).unwrap();
                let spec = spec.with_bias(bias).with_activation(Activation::Silu);
                // A step of decoding, whose strides between tokens mean nothing.
                let row = |sequences: usize| TensorDesc {
                    dtype,
                    layout: Layout::strided(&[sequences, 64, 1], &[64, 1, 1]).unwrap(),
                };
                let step = |sequences: usize| {
                    let states = layout(&[600, 64, width - 1]);
                    CausalConv1dServingSpec::new(row(sequences), states, weight)
                        .unwrap()
                        .with_output(row(sequences))
                        .with_conv_state_indices(index(&[sequences]))
                };
                let drafts = spec
                    .clone()
                    .with_query_start_loc(index(&[9]))
                    .with_conv_state_indices(index(&[8]))
                    .with_num_accepted_tokens(index(&[8]));
                let few_drafts = CausalConv1dServingSpec {
                    conv_states: layout(&[9, 64, width + 2]),
                    ..drafts.clone()
                };
                let prompts = spec.clone().with_query_start_loc(index(&[9]));
                let windows =
                    spec.clone().with_intermediate_windows(desc(&[9, 512, 64, width - 1]));
                let links = index(&[1, 512]);
                let tree = windows.clone().with_next_token(links).with_next_sibling(links);
                let specs =
                    [plain, spec, step(4), step(512), drafts, few_drafts, prompts, windows, tree];
                let split = |spec: CausalConv1dServingSpec| {
                    // A step has a row of its own for each sequence.
                    let is_step = spec.x.shape()[2] == 1;
                    let spec = spec.with_split(&[16, 16, 32]).unwrap();
                    let row = |desc: TensorDesc| match is_step {
                        false => desc,
                        true => {
                            let shape = desc.shape();
                            let strides = [shape[1] as isize, 1, 1];
                            TensorDesc { dtype, layout: Layout::strided(shape, &strides).unwrap() }
                        }
                    };
                    CausalConv1dServingSpec {
                        y: row(spec.y),
                        y2: spec.y2.map(row),
                        y3: spec.y3.map(row),
                        ..spec
                    }
                };
                let normed = |spec: &CausalConv1dServingSpec| {
                    split(spec.clone()).with_norm(HeadNorm::new(16))
                };
                let each =
                    |spec: CausalConv1dServingSpec| [normed(&spec), split(spec.clone()), spec];
                for spec in specs.into_iter().flat_map(each) {
                    let sizes = spec.sizes().unwrap();
                    let walks = Vectors::of_walks(&spec, &sizes);
                    assert_eq!(walks.is_some(), width == 4);
                    for vectors in walks.into_iter().chain([Vectors::ONE]) {
                        kernels.push(walk_kernel(&spec, &sizes, vectors));
                    }
                    let pieces = Vectors::of(&spec, 8).filter(|_| is_long(&spec, &sizes));
                    if let Some(vectors) = pieces {
                        kernels.push(chunks_kernel(&spec, vectors));
                        kernels.push(tiles_kernel(&spec, vectors));
                    }
                }
            }
        }
    }
    crate::gpu::compile_tests::check_compiles_in_turn(&kernels);
}

/// With each number of blocks of a multiprocessor.
#[test]
fn tiles_compile_without_spills() {
    let desc = |shape: &[usize]| TensorDesc {
        dtype: DType::BF16,
        layout: Layout::with_order(shape, &[0, 2, 1]).unwrap(),
    };
    let index = |shape: &[usize]| TensorDesc::contiguous(DType::I64, shape).unwrap();
    let mut kernels = Vec::new();
    for width in [3, 4, 5] {
        let weight = TensorDesc::contiguous(DType::BF16, &[64, width]).unwrap();
        let spec =
            CausalConv1dServingSpec::new(desc(&[1, 64, 512]), desc(&[9, 64, width - 1]), weight)
                .unwrap()
                .with_bias(TensorDesc::contiguous(DType::BF16, &[64]).unwrap())
                .with_query_start_loc(index(&[9]))
                .with_has_initial_state(TensorDesc::contiguous(DType::U8, &[8]).unwrap());
        let one = spec.clone().with_conv_state_indices(index(&[8]));
        let blocks = spec
            .with_conv_state_indices(index(&[8, 4]))
            .with_block_size(64)
            .with_initial_block(index(&[8]))
            .with_first_block(index(&[8]))
            .with_last_block(index(&[8]))
            .with_tokens_before(index(&[8]));
        let gelu = Activation::Gelu(Approximate::Tanh);
        for activation in [Activation::Identity, Activation::Silu, gelu] {
            for spec in [&one, &blocks] {
                let spec = spec.clone().with_activation(activation);
                let vectors = Vectors::of(&spec, 8).unwrap();
                assert!(takes_tiles(&spec, &spec.sizes().unwrap()));
                kernels.push(tiles_kernel(&spec, vectors));
            }
        }
    }
    crate::gpu::compile_tests::check_compiles_in_turn(&kernels);
}

#[test]
fn plain_steps_and_few_drafts_have_a_kernel_without_a_loop() {
    let ordered = |shape: &[usize], order: &[usize]| TensorDesc {
        dtype: DType::BF16,
        layout: Layout::with_order(shape, order).unwrap(),
    };
    let index = |n: usize| TensorDesc::contiguous(DType::I32, &[n]).unwrap();
    // Of so many tokens in a row, with states of so many columns.
    let spec = |sequences: usize, tokens: usize, columns: usize| {
        let x = ordered(&[sequences, 4096, tokens], &[0, 2, 1]);
        let states = ordered(&[600, 4096, columns], &[0, 2, 1]);
        let weight = TensorDesc::contiguous(DType::BF16, &[4096, 4]).unwrap();
        let spec = CausalConv1dServingSpec::new(x, states, weight).unwrap();
        spec.with_conv_state_indices(index(sequences))
    };
    let kernel = |spec: &CausalConv1dServingSpec| {
        let sizes = spec.sizes().unwrap();
        let kernel = walk_kernel(spec, &sizes, Vectors::of_walks(spec, &sizes).unwrap());
        let of = |name: &str| kernel.value_of(name).map(str::to_owned);
        (kernel.name().0, of("DRAFTS"), of("TOKENS"))
    };
    let step = |drafts: &str, tokens: &str| {
        let of = |value: &str| Some(value.to_owned());
        ("serving_step.cu", of(drafts), of(tokens))
    };
    let is_walked = |spec: &CausalConv1dServingSpec| kernel(spec).0 == "serving.cu";
    assert_eq!(kernel(&spec(64, 1, 3)), step("0", "1"));
    // Small, more than a token, or with more to do for each.
    assert!(is_walked(&spec(4, 1, 3)));
    assert!(is_walked(&spec(64, 2, 3)));
    let flags = TensorDesc::contiguous(DType::U8, &[64]).unwrap();
    assert!(is_walked(&spec(64, 1, 3).with_has_initial_state(flags)));
    assert!(is_walked(&spec(64, 1, 3).with_activation(Activation::Gelu(Approximate::None))));
    let table = TensorDesc::contiguous(DType::I32, &[64, 2]).unwrap();
    let blocks = spec(64, 1, 3).with_conv_state_indices(table);
    assert_eq!(kernel(&blocks), step("0", "1"));
    assert!(is_walked(&blocks.clone().with_initial_block(index(64))));
    assert!(is_walked(&blocks.with_last_block(index(64))));
    let states = ordered(&[600, 4096, 3], &[0, 1, 2]);
    assert!(is_walked(&CausalConv1dServingSpec { conv_states: states, ..spec(64, 1, 3) }));
    let drafts = |sequences: usize, tokens: usize, columns: usize| {
        spec(sequences, tokens, columns).with_num_accepted_tokens(index(sequences))
    };
    assert_eq!(kernel(&drafts(1, 4, 6)), step("1", "4"));
    assert_eq!(kernel(&drafts(64, 2, 6)), step("1", "2"));
    assert!(is_walked(&drafts(64, 5, 7)));
    // Packed ones may be as many as a state holds.
    let packed = |columns: usize| {
        let x = ordered(&[1, 4096, 64], &[0, 2, 1]);
        let spec = CausalConv1dServingSpec { x, y: x, ..drafts(16, 1, columns) };
        spec.with_query_start_loc(index(17))
    };
    assert_eq!(kernel(&packed(6)), step("1", "4"));
    assert!(is_walked(&packed(7)));
}

#[test]
fn steps_take_as_many_channels_a_thread_as_they_gain_from() {
    let channels = |dtype: DType, sequences: usize, width: usize, d: usize| {
        let desc = |shape: &[usize]| TensorDesc {
            dtype,
            layout: Layout::with_order(shape, &[0, 2, 1]).unwrap(),
        };
        let weight = TensorDesc::contiguous(dtype, &[d, width]).unwrap();
        let states = desc(&[sequences, d, width - 1]);
        let spec = CausalConv1dServingSpec::new(desc(&[sequences, d, 1]), states, weight).unwrap();
        Vectors::of_walks(&spec, &spec.sizes().unwrap()).map(|vectors| vectors.channels)
    };
    assert_eq!(channels(DType::BF16, 1, 4, 4096), Some(2));
    assert_eq!(channels(DType::BF16, 64, 4, 4096), Some(8));
    assert_eq!(channels(DType::BF16, 64, 4, 4100), Some(4));
    assert_eq!(channels(DType::F16, 64, 9, 4096), Some(4));
    assert_eq!(channels(DType::F32, 64, 4, 4096), Some(2));
    assert_eq!(channels(DType::F16, 64, 20, 4096), None);
    assert_eq!(channels(DType::F16, 1, 4, 4095), None);
}

/// Heads of 128 channels belong to the threads of a warp in steps, drafts and prompts of f16 and bf16.
#[test]
fn heads_are_divided_before_they_are_stored() {
    let desc = |dtype: DType, shape: &[usize]| TensorDesc {
        dtype,
        layout: Layout::with_order(shape, &[0, 2, 1]).unwrap(),
    };
    let index = |n: usize| TensorDesc::contiguous(DType::I32, &[n]).unwrap();
    let kernels = |dtype: DType, x: [usize; 3], starts: Option<usize>, head: usize| {
        let states = desc(dtype, &[600, 4096, 3]);
        let weight = TensorDesc::contiguous(dtype, &[4096, 4]).unwrap();
        let spec = CausalConv1dServingSpec::new(desc(dtype, &x), states, weight)
            .unwrap()
            .with_query_start_loc(starts.map(index))
            .with_split(&[1024, 1024, 2048])
            .unwrap()
            .with_norm(HeadNorm::new(head));
        let sizes = spec.sizes().unwrap();
        let mut kernels =
            vec![walk_kernel(&spec, &sizes, Vectors::of_walks(&spec, &sizes).unwrap())];
        if let Some(vectors) = Vectors::of(&spec, 8).filter(|_| is_long(&spec, &sizes)) {
            kernels.extend([chunks_kernel(&spec, vectors), tiles_kernel(&spec, vectors)]);
        }
        kernels
    };
    for dtype in [DType::F16, DType::BF16] {
        for (x, starts) in [([1, 4096, 1], None), ([64, 4096, 1], None), ([1, 4096, 8192], Some(9))]
        {
            for kernel in kernels(dtype, x, starts, 128) {
                assert_eq!(kernel.value_of("HEAD"), Some("128"), "{x:?}");
            }
        }
        // Of small steps too, whose threads have few channels.
        assert_eq!(kernels(dtype, [1, 4096, 1], None, 128)[0].value_of("VECTOR"), Some("4"));
        assert_eq!(kernels(dtype, [1, 4096, 1], None, 64)[0].value_of("VECTOR"), Some("2"));
        // Heads of other widths have a second kernel.
        assert_eq!(kernels(dtype, [64, 4096, 1], None, 512)[0].value_of("HEAD"), None);
    }
}
