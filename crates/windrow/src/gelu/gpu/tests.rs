use super::backward::{backward_kernel, backward_words, bias_gradient_kernel, bias_gradient_words};
use super::loops::Dim;
use super::*;
use crate::gelu::GeluGrads;
use crate::{Device, Layout, Tensor, TensorDesc};

fn spec(dtype: DType, shape: &[usize], order: &[usize], approximate: Approximate) -> GeluSpec {
    let layout = Layout::with_order(shape, order).unwrap();
    GeluSpec::new(TensorDesc { dtype, layout }, approximate).unwrap()
}

/// The wave of an H200.
const WAVE: usize = 2048;
const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const FORMS: [Approximate; 2] = [Approximate::None, Approximate::Tanh];

#[test]
fn loops_are_as_few_as_strides_allow() {
    let dense = spec(DType::F16, &[2, 3, 4, 5], &[0, 2, 3, 1], Approximate::None);
    let loops = Loops::of(&dense);
    assert_eq!((loops.inner.size, loops.rank(), loops.unit), (120, 0, true));
    let bias = TensorDesc::contiguous(DType::F32, &[5]).unwrap();
    let loops = Loops::of(&dense.with_bias(bias));
    assert_eq!((loops.inner.size, loops.inner.strides), (3, [1, 1, 0, 0]));
    assert_eq!(loops.outer[0], Dim { size: 5, strides: [3, 3, 0, 1] });
    assert_eq!((loops.rows(), loops.rank(), loops.unit), (40, 2, true));
    let gate = Layout::strided(&[2, 3, 4, 5], &[0, 0, 0, 1]).unwrap();
    let loops = Loops::of(&dense.with_gate(TensorDesc { dtype: DType::F16, layout: gate }));
    assert!(!loops.unit);
    let scalar = Loops::of(&spec(DType::F32, &[], &[], Approximate::None));
    assert_eq!((scalar.inner.size, scalar.rank(), scalar.unit), (1, 0, true));
    assert!(Loops::of(&spec(DType::F32, &[3, 0], &[0, 1], Approximate::None)).is_empty());
}

#[test]
fn accesses_of_a_thread_follow_the_waves() {
    let unroll = |rows: usize| {
        let spec = spec(DType::F16, &[rows, 2048], &[0, 1], Approximate::None);
        complete_for(WAVE, &spec, &GeluConfiguration::new(GeluAlgorithm::F16x8Pack)).unroll
    };
    // One wave exactly, and more.
    assert_eq!([512, 1024, 1025, 8191, 8192].map(unroll), [1, 1, 2, 2, 1].map(Some));
}

#[test]
fn forward_kernels_compile_without_spills() {
    let mut kernels = Vec::new();
    for dtype in TYPES {
        for approximate in FORMS {
            let flat = spec(dtype, &[64, 48], &[0, 1], approximate);
            let bias = |d| TensorDesc::contiguous(d, &[48]).unwrap();
            for algorithm in algorithms(&flat) {
                let configuration = GeluConfiguration::new(algorithm);
                kernels.push(forward(WAVE, &flat, &configuration).0);
                let large = GeluConfiguration { block: Some(1024), ..configuration };
                kernels.push(forward(WAVE, &flat, &large).0);
            }
            let specs = [
                flat.with_bias(bias(dtype)).with_gate(flat.x),
                flat.with_bias(bias(DType::F32)),
                flat.with_half_math(HalfMath::Native),
            ];
            kernels.extend(
                specs.map(|spec| {
                    forward(WAVE, &spec, &GeluConfiguration::new(algorithms(&spec)[0])).0
                }),
            );
        }
    }
    let deep = Layout::strided(&[2; 8], &[256, 1, 3, 7, 17, 37, 77, 1000]).unwrap();
    let deep = TensorDesc { dtype: DType::F32, layout: deep };
    let spec = GeluSpec::new(deep, Approximate::None).unwrap();
    kernels.push(forward(WAVE, &spec, &GeluConfiguration::new(GeluAlgorithm::F32)).0);
    crate::gpu::compile_tests::check_compiles(&kernels);
}

#[test]
fn backward_kernels_compile_without_spills() {
    let mut kernels = Vec::new();
    for dtype in TYPES {
        for approximate in FORMS {
            let plain = spec(dtype, &[64, 48], &[0, 1], approximate);
            let bias = TensorDesc::contiguous(DType::F32, &[48]).unwrap();
            let t = || Tensor::zeros(dtype, &[64, 48]).unwrap();
            let (x, dy, mut dx, mut dgate) = (t(), t(), t(), t());
            let bias_tensor = Tensor::zeros(DType::F32, &[48]).unwrap();
            for fused in [false, true] {
                let spec = if fused { plain.with_bias(bias).with_gate(plain.x) } else { plain };
                let args = GeluArgs {
                    x: x.as_ref(),
                    bias: fused.then(|| bias_tensor.as_ref()),
                    gate: fused.then(|| x.as_ref()),
                };
                let grads = GeluGrads {
                    dx: Some(dx.as_mut()),
                    dgate: fused.then(|| dgate.as_mut()),
                    dbias: None,
                };
                let dy = dy.as_ref();
                let (loops, words) = backward_words(&spec, &args, &dy, &grads);
                kernels.push(backward_kernel(&spec, &loops, &words, true, fused));
                if fused {
                    let (loops, words) = bias_gradient_words(&spec, &args, &dy, std::ptr::null());
                    kernels.push(bias_gradient_kernel(&spec, &loops, &words));
                }
            }
        }
    }
    crate::gpu::compile_tests::check_compiles(&kernels);
}

#[test]
fn without_a_device_a_plan_is_an_error() {
    let spec = spec(DType::F16, &[8], &[0], Approximate::None);
    assert!(matches!(
        Forward::new(Device::Cuda(4000), &spec, &GeluConfiguration::new(GeluAlgorithm::F16x8Pack)),
        Err(crate::Error::NoDevice { .. })
    ));
    let options = crate::PlanOptions { device: Device::Cpu, ..Default::default() };
    let native = spec.with_half_math(HalfMath::Native);
    assert!(matches!(
        crate::GeluPlan::new(&native, &options),
        Err(crate::Error::Unsupported { .. })
    ));
}
