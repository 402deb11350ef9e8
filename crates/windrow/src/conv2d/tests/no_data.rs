//! Pixels without data, such as -9999 and 1e9: the error that they cause in outputs that do not depend on them, as
//! `docs/conv2d.md` says.

use super::*;
use crate::verification::random_tensor;

const SIDE: usize = 48;
const AT: usize = 20;

/// The largest difference that a value of the pixel makes in outputs that do not depend on it.
fn difference(algorithm: Conv2dAlgorithm, value: f32) -> f32 {
    let of = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
    let spec =
        Conv2dSpec::new(of(&[1, 8, SIDE, SIDE]), of(&[16, 8, 3, 3]), &Conv2dParams::default());
    let spec = spec.unwrap();
    let plan = Conv2dPlan::with_algorithm(&spec, algorithm, &PlanOptions::default()).unwrap();
    let w = random_tensor(2, spec.w, -1.0, 1.0).unwrap();
    let mut image = random_tensor(1, spec.x, -1.0, 1.0).unwrap().to_vec::<f32>().unwrap();
    let mut run = |value| {
        image[AT * SIDE + AT] = value;
        let x = TensorRef::new(&image, &[1, 8, SIDE, SIDE]).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        let mut y = Tensor::uninitialised(spec.y).unwrap();
        plan.run(&Conv2dArgs::new(x, w.as_ref()), y.as_mut(), &mut workspace).unwrap();
        y.to_vec::<f32>().unwrap()
    };
    let (clean, y) = (run(0.5), run(value));
    let side = SIDE - 2;
    // Without padding, the outputs that depend on it end at its own row and column.
    let sees = |i: usize| (AT - 2..=AT).contains(&i);
    let unseen = (0..y.len()).filter(|i| !sees(i % side) || !sees(i / side % side));
    let differences = unseen.map(|i| (y[i] - clean[i]).abs());
    differences.map(|d| if d.is_finite() { d } else { f32::INFINITY }).fold(0.0, f32::max)
}

#[test]
fn sums_of_what_an_output_sees_are_what_they_were() {
    for algorithm in [Conv2dAlgorithm::Direct, Conv2dAlgorithm::Im2colGemm] {
        for value in [-9999.0, 1e9, f32::MIN, f32::NAN, f32::INFINITY] {
            assert_eq!(difference(algorithm, value), 0.0, "{algorithm} {value}");
        }
    }
    for value in [-9999.0, 1e9, f32::MIN] {
        let f2 = difference(Conv2dAlgorithm::WinogradGemm(Tile::F2), value);
        assert!(f2 < 1e-5, "{value} {f2}");
    }
}

/// About as many digits as the pixel has more than the others, and not more. An output that is not finite differs without end.
#[test]
fn transforms_lose_digits() {
    let [f4, f6] = [Tile::F4, Tile::F6].map(Conv2dAlgorithm::WinogradGemm);
    for (algorithm, of_pixel) in
        [(f4, 2e-6), (f6, 4e-5), (Conv2dAlgorithm::WinogradFused(Tile::F4), 2e-6)]
    {
        for value in [-9999f32, 1e9] {
            let lost = difference(algorithm, value);
            assert!(lost > 1e-4 && lost < of_pixel * value.abs(), "{algorithm} {value} {lost}");
        }
        let lost = difference(algorithm, f32::MIN);
        assert_eq!(lost, f32::INFINITY, "{algorithm}");
    }
}
