use super::*;
use windrow_candle::{Conv3dParams, TensorExt, TimePadding};

/// The convolution of padded frames as a sum of candle's convolutions of images.
fn of_images(frames: &Tensor, weight: &Tensor, bias: &Tensor) -> Tensor {
    let (count, taps) = (frames.dim(2).unwrap(), weight.dim(2).unwrap());
    let frame = |t: usize| {
        let taps = (0..taps).map(|f| {
            let at = |t: &Tensor, i| t.narrow(2, i, 1).unwrap().squeeze(2).unwrap();
            at(frames, t + f).conv2d(&at(weight, f).contiguous().unwrap(), 1, 1, 1, 1).unwrap()
        });
        let sum = taps.reduce(|a, b| (a + b).unwrap()).unwrap();
        sum.broadcast_add(&bias.reshape((1, (), 1, 1)).unwrap()).unwrap()
    };
    let frames: Vec<Tensor> = (0..=count - taps).map(frame).collect();
    Tensor::stack(&frames, 2).unwrap()
}

#[test]
fn equals_sums_of_candles_images() {
    let (weight, bias) = (numbers((6, 4, 3, 3, 3), 2, &Device::Cpu), numbers(6, 3, &Device::Cpu));
    let x = numbers((2, 4, 5, 8, 7), 1, &Device::Cpu);
    let zeros = |n: usize| Tensor::zeros((2, 4, n, 8, 7), DType::F32, &Device::Cpu).unwrap();
    let first = x.narrow(2, 0, 1).unwrap();
    let before = |frames: [&Tensor; 3]| Tensor::cat(&frames, 2).unwrap();
    let params = Conv3dParams::default().with_padding([1, 1, 1]);
    let causal = params.with_padding([0, 1, 1]).with_time_padding(TimePadding::Causal);
    let repeated = causal.with_time_padding(TimePadding::CausalRepeat);
    let cases = [
        (params, before([&zeros(1), &x, &zeros(1)])),
        (causal, before([&zeros(1), &zeros(1), &x])),
        (repeated, before([&first, &first, &x])),
    ];
    for (params, frames) in cases {
        let want = values(&of_images(&frames, &weight, &bias));
        for x in [x.clone(), x.permute((0, 2, 3, 4, 1)).unwrap().contiguous().unwrap()] {
            let x = if x.dim(1).unwrap() == 4 { x } else { x.permute((0, 4, 1, 2, 3)).unwrap() };
            let y = x.conv3d(&weight, Some(&bias), &params).unwrap();
            assert_eq!(y.dims(), [2, 6, 5, 8, 7]);
            for (got, want) in values(&y).iter().zip(&want) {
                assert!((got - want).abs() <= 2e-3, "{got} {want}");
            }
        }
    }
}

#[test]
fn errors() {
    let x = numbers((1, 4, 5, 8, 7), 1, &Device::Cpu);
    let weight = var((6, 3, 3, 3, 3), 2, &Device::Cpu);
    let error = x.conv3d(&weight, None, &Conv3dParams::default()).unwrap_err().to_string();
    assert!(error.contains("conv3d") || error.contains("`w`"), "{error}");
    let weight = var((6, 4, 3, 3, 3), 2, &Device::Cpu);
    let y = x.conv3d(&weight, None, &Conv3dParams::default()).unwrap();
    let error = y.sum_all().unwrap().backward().unwrap_err().to_string();
    assert!(error.contains("gradient of conv3d"), "{error}");
}
