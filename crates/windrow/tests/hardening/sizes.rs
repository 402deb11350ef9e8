//! Many channels, batches, sequences and tokens, compared with the oracle.

use crate::common::{Call, Causal, Conv, Packing, causal_conv1d, conv2d, gelu, options, update};
use windrow::{
    CausalConv1dAlgorithm, CausalConv1dArgs, CausalConv1dGrads, CausalConv1dOutputs,
    CausalConv1dPlan, CausalConv1dSpec, Conv2dAlgorithm, DType, Device, TensorMut, TensorRef, Tile,
    Verify, Workspace,
};

/// A size that needs more than 16 bits.
const MANY: usize = 66_000;

fn check(calls: impl IntoIterator<Item = Call>) {
    for call in calls {
        println!("{}", call.name);
        if let Err(error) = call.results(Verify::On) {
            panic!("{}: {error}", call.name);
        }
    }
}

const CAUSAL: Causal = Causal { dtype: DType::BF16, ..Causal::new([1, 1, MANY], 3) };

#[test]
fn many_rows_and_columns_of_gelu() {
    check([gelu(DType::BF16, &[MANY, 2]), gelu(DType::F32, &[2, MANY])]);
}

#[test]
fn many_batches_channels_and_sequences() {
    check(
        [
            Causal { x: [MANY, 1, 2], packing: Packing::SeqIdx, ..CAUSAL },
            Causal { x: [1, MANY, 2], ..CAUSAL },
            Causal { packing: Packing::Boundaries(MANY), ..CAUSAL },
            Causal { x: [1, 2, MANY], algorithm: CausalConv1dAlgorithm::Im2colGemm, ..CAUSAL },
        ]
        .map(causal_conv1d),
    );
    check([update(DType::F32, [MANY, 1, 1], 3), update(DType::F16, [1, MANY, 1], 3)]);
}

const CONV: Conv = Conv::new([1, 1, 1, 1], [1, 1, 3, 3]);

#[test]
fn many_images() {
    use Conv2dAlgorithm::{Direct, Im2colGemm, WinogradGemm};
    let by = |algorithm| conv2d(Conv { x: [MANY, 1, 1, 1], algorithm, ..CONV });
    check([Direct, Im2colGemm, WinogradGemm(Tile::F2)].map(by));
}

#[test]
fn many_channels_and_groups() {
    let convs = [
        Conv { x: [1, MANY, 1, 1], w: [1, MANY, 1, 1], dtype: DType::F16, ..CONV },
        Conv { w: [MANY, 1, 1, 1], ..CONV },
        Conv { x: [1, MANY, 1, 1], w: [MANY, 1, 1, 1], groups: MANY, ..CONV },
    ];
    check(convs.into_iter().flat_map(Conv::by_all_algorithms));
}

#[test]
fn many_pixels_in_a_line() {
    let by = |x| conv2d(Conv { x, ..CONV });
    check([[1, 1, 1, MANY], [1, 1, MANY, 1]].map(by));
}

/// Small whole numbers, so that every sum but those over all tokens is exact: no oracle of this size is needed.
#[test]
fn ten_million_tokens() {
    const TOKENS: usize = 10_000_000;
    let of = |step: usize| (0..TOKENS).map(|t| (t % step) as f32).collect::<Vec<_>>();
    let (x, dy) = (of(7), of(5));
    let (mut y, mut dx, mut dweight) = (vec![-1f32; TOKENS], vec![-1f32; TOKENS], [0f32; 2]);
    let shape = [1, 1, TOKENS];
    let args = CausalConv1dArgs::new(
        TensorRef::new(&x, &shape).unwrap(),
        TensorRef::new(&[1f32, 2.0], &[1, 2]).unwrap(),
    );
    let spec = CausalConv1dSpec::new(*args.x.desc(), *args.weight.desc()).unwrap();
    let plan = CausalConv1dPlan::new(&spec, &options(Verify::Off)).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let outputs = CausalConv1dOutputs::new(TensorMut::new(&mut y, &shape).unwrap());
    plan.run(&args, outputs, &mut workspace).unwrap();
    let grads = CausalConv1dGrads::default()
        .with_dx(TensorMut::new(&mut dx, &shape).unwrap())
        .with_dweight(TensorMut::new(&mut dweight, &[1, 2]).unwrap());
    let dy_view = TensorRef::new(&dy, &shape).unwrap();
    plan.backward(&args, dy_view, None, grads, &mut workspace).unwrap();
    let mut want = [0f64; 2];
    for t in 0..TOKENS {
        let before = if t > 0 { x[t - 1] } else { 0.0 };
        let after = if t + 1 < TOKENS { dy[t + 1] } else { 0.0 };
        assert_eq!((y[t], dx[t]), (before + 2.0 * x[t], 2.0 * dy[t] + after), "token {t}");
        want[0] += f64::from(before * dy[t]);
        want[1] += f64::from(x[t] * dy[t]);
    }
    for (got, want) in dweight.into_iter().zip(want) {
        // A sum of sums of blocks of tokens.
        assert!((f64::from(got) - want).abs() < 1e-5 * want, "{got} for {want}");
    }
}
