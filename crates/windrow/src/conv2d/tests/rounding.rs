//! Errors of sums over many channels on the average: the tolerance of an element is that of the worst of few channels.

use super::*;
use crate::verification::random_tensor;

/// Relative RMS error over 256 channels, after a ReLU.
fn error(algorithm: Conv2dAlgorithm, isa: Isa) -> f64 {
    let of = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
    let params = Conv2dParams::default();
    let spec = Conv2dSpec::new(of(&[1, 256, 14, 14]), of(&[16, 256, 3, 3]), &params).unwrap();
    let configuration = Conv2dConfiguration::new(algorithm);
    let plan = Conv2dPlan::on_isa(&spec, &configuration, &PlanOptions::default(), isa).unwrap();
    let w = random_tensor(2, spec.w, -1.0, 1.0).unwrap();
    let mut x = random_tensor(1, spec.x, -1.0, 1.0).unwrap().to_vec::<f32>().unwrap();
    x.iter_mut().for_each(|v| *v = v.max(0.0));
    let x = Tensor::from_slice(&x, spec.x.shape()).unwrap();
    let args = Conv2dArgs::new(x.as_ref(), w.as_ref());
    let want = plan.expected(&args, &w.as_ref().to_f64_vec().unwrap()).unwrap().values;
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let mut y = Tensor::uninitialised(spec.y).unwrap();
    plan.run(&args, y.as_mut(), &mut workspace).unwrap();
    let got = y.as_ref().to_f64_vec().unwrap();
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut got.iter().zip(&want).map(|(g, w)| g - w)) / norm(&mut want.iter().copied())
}

/// Measured: 1.7e-7, 4.6e-7 and 2.0e-6; with sums of 128 channels 2.8e-7, 7.5e-7 and 3.2e-6.
#[test]
fn sums_of_few_channels_round_less() {
    for isa in Isa::available().into_iter().filter(|isa| !isa.has_tiles()) {
        for (tile, most) in [(Tile::F2, 2.2e-7), (Tile::F4, 6e-7), (Tile::F6, 2.5e-6)] {
            let error = error(Conv2dAlgorithm::WinogradGemm(tile), isa);
            assert!(error < most, "{tile:?} on {}: {error:.1e}", isa.name());
        }
    }
}
