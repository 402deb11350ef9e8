//! Views whose elements are more than 2^31 elements apart, in memory of which few pages exist.

use crate::common::options;
use std::ffi::c_void;
use std::ptr::null_mut;
use windrow::verify::random;
use windrow::{
    Activation, Approximate, CausalConv1dAlgorithm, CausalConv1dArgs, CausalConv1dGrads,
    CausalConv1dOutputs, CausalConv1dPlan, CausalConv1dSpec, CausalConv1dUpdateArgs,
    CausalConv1dUpdatePlan, CausalConv1dUpdateSpec, Conv2dArgs, Conv2dParams, Conv2dPlan,
    Conv2dSpec, DType, Device, GeluArgs, GeluGrads, GeluPlan, GeluSpec, Layout, TensorDesc,
    TensorMut, TensorRef, Verify, Workspace, bf16, f16,
};

/// A tensor one of whose dimensions has a stride with which it reaches beyond 2^31 elements.
struct Far {
    memory: *mut c_void,
    bytes: usize,
    /// The address of the element at index zero.
    first: *mut c_void,
    desc: TensorDesc,
}

impl Far {
    /// Random numbers; the dimension after `dim` that has more than one index is the one, backwards for an odd
    /// `dim`.
    fn new(seed: u64, dtype: DType, shape: &[usize], dim: usize) -> Self {
        Self::of(dtype, shape, dim, &random(seed, shape.iter().product(), -1.0, 1.0))
    }

    fn of(dtype: DType, shape: &[usize], dim: usize, values: &[f64]) -> Self {
        let rank = shape.len();
        let far = (dim..dim + rank).map(|d| d % rank).find(|&d| shape[d] > 1).unwrap();
        let mut strides = Layout::contiguous(shape).unwrap().strides().to_vec();
        strides[far] = ((1 << 31) / (shape[far] - 1) + 13) as isize;
        if dim % 2 == 1 {
            strides[far] = -strides[far];
        }
        let layout = Layout::strided(shape, &strides).unwrap();
        let (low, high) = layout.extent().unwrap();
        assert!(high - low > 1 << 31);
        let bytes = (high - low + 1) as usize * dtype.size();
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, whose pages come into being when they are written.
        let memory = unsafe { libc::mmap(null_mut(), bytes, access, flags, -1, 0) };
        assert_ne!(memory, libc::MAP_FAILED);
        let first = memory.wrapping_byte_add(low.unsigned_abs() * dtype.size());
        let mut index = vec![0; rank];
        for &value in values {
            let at = first.wrapping_byte_offset(layout.offset(&index) * dtype.size() as isize);
            // SAFETY: an element of the layout, of this type, in the mapping.
            unsafe {
                match dtype {
                    DType::F32 => at.cast::<f32>().write(value as f32),
                    DType::F16 => at.cast::<f16>().write(f16::from_f64(value)),
                    DType::BF16 => at.cast::<bf16>().write(bf16::from_f64(value)),
                    DType::I32 => at.cast::<i32>().write(value as i32),
                    other => panic!("no operand here is {other}"),
                }
            }
            for d in (0..rank).rev() {
                index[d] = (index[d] + 1) % shape[d];
                if index[d] > 0 {
                    break;
                }
            }
        }
        Far { memory, bytes, first, desc: TensorDesc::new(dtype, layout) }
    }

    fn as_ref(&self) -> TensorRef<'_> {
        // SAFETY: the mapping reaches as far as the layout and is borrowed.
        unsafe { TensorRef::from_raw(self.first, self.desc, Device::Cpu) }
    }

    fn as_mut(&mut self) -> TensorMut<'_> {
        // SAFETY: the mapping reaches as far as the layout and is borrowed mutably.
        unsafe { TensorMut::from_raw(self.first, self.desc, Device::Cpu).unwrap() }
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        // SAFETY: the whole of its own mapping.
        unsafe { libc::munmap(self.memory, self.bytes) };
    }
}

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn workspace(bytes: usize) -> Workspace {
    Workspace::new(Device::Cpu, bytes).unwrap()
}

#[test]
fn gelu() {
    let shape = [3, 5, 7];
    for (dim, dtype) in (0..3).flat_map(|dim| DTYPES.map(|dtype| (dim, dtype))) {
        let [x, gate, dy] = [1, 2, 3].map(|seed| Far::new(seed, dtype, &shape, dim));
        let bias = Far::new(4, DType::F32, &[7], dim);
        let [mut y, mut dx, mut dgate] = [(); 3].map(|()| Far::of(dtype, &shape, dim + 1, &[]));
        let mut dbias = Far::of(dtype, &[7], dim, &[]);
        let spec = GeluSpec::new(x.desc, Approximate::None).unwrap();
        let spec = spec.with_bias(bias.desc).with_gate(gate.desc).with_output(y.desc);
        let plan = GeluPlan::new(&spec, &options(Verify::On)).unwrap();
        let mut workspace = workspace(plan.workspace_bytes());
        let (bias, gate) = (Some(bias.as_ref()), Some(gate.as_ref()));
        let args = GeluArgs::new(x.as_ref()).with_bias(bias).with_gate(gate);
        plan.run(&args, y.as_mut(), &mut workspace).unwrap();
        let grads = GeluGrads::default()
            .with_dx(dx.as_mut())
            .with_dgate(dgate.as_mut())
            .with_dbias(dbias.as_mut());
        plan.backward(&args, &dy.as_ref(), grads, &mut workspace).unwrap();
    }
}

#[test]
fn causal_conv1d() {
    let (b, d, l, width) = (2, 5, 9, 4);
    let states = [b, d, width - 1];
    let numbers: Vec<f64> = (0..b * l).map(|i| ((i % l) / 4) as f64).collect();
    for (dim, dtype) in (0..3).flat_map(|dim| DTYPES.map(|dtype| (dim, dtype))) {
        for (algorithm, dense) in [
            (CausalConv1dAlgorithm::Direct, false),
            (CausalConv1dAlgorithm::Im2colGemm, false),
            (CausalConv1dAlgorithm::Im2colGemm, true),
        ] {
            let (d_out, weight): (_, &[usize]) =
                if dense { (3, &[3, d, width]) } else { (d, &[d, width]) };
            let make = |shape: &[usize], dim| Far::of(dtype, shape, dim, &[]);
            let x = Far::new(1, dtype, &[b, d, l], dim);
            let w = Far::new(2, dtype, weight, dim);
            let bias = Far::new(3, dtype, &[d_out], dim);
            let initial = Far::new(4, dtype, &states, dim);
            let dy = Far::new(5, dtype, &[b, d_out, l], dim + 1);
            let dfinal = Far::new(6, dtype, &states, dim);
            let seq_idx = Far::of(DType::I32, &[b, l], dim, &numbers);
            let (mut y, mut last) = (make(&[b, d_out, l], dim + 1), make(&states, dim + 1));
            let mut spec = CausalConv1dSpec::new(x.desc, w.desc).unwrap();
            spec.activation = Activation::Silu;
            (spec.y, spec.bias, spec.seq_idx) = (y.desc, Some(bias.desc), Some(seq_idx.desc));
            (spec.initial_states, spec.final_states) = (Some(initial.desc), Some(last.desc));
            let plan =
                CausalConv1dPlan::with_algorithm(&spec, algorithm, &options(Verify::On)).unwrap();
            let mut workspace = workspace(plan.workspace_bytes());
            let mut args = CausalConv1dArgs::new(x.as_ref(), w.as_ref());
            args.bias = Some(bias.as_ref());
            args.seq_idx = Some(seq_idx.as_ref());
            args.initial_states = Some(initial.as_ref());
            let outputs = CausalConv1dOutputs::new(y.as_mut()).with_final_states(last.as_mut());
            plan.run(&args, outputs, &mut workspace).unwrap();
            let mut dx = make(&[b, d, l], dim + 1);
            let mut dweight = make(weight, dim + 1);
            let (mut dbias, mut dinitial) = (make(&[d_out], dim), make(&states, dim));
            let grads = CausalConv1dGrads::default()
                .with_dx(dx.as_mut())
                .with_dweight(dweight.as_mut())
                .with_dbias(dbias.as_mut())
                .with_dinitial_states(dinitial.as_mut());
            let dfinal = Some(dfinal.as_ref());
            plan.backward(&args, dy.as_ref(), dfinal, grads, &mut workspace).unwrap();
        }
    }
}

#[test]
fn causal_conv1d_update() {
    let (b, d, l, width) = (3, 20, 2, 4);
    for (dim, dtype) in (0..3).flat_map(|dim| DTYPES.map(|dtype| (dim, dtype))) {
        let x = Far::new(1, dtype, &[b, d, l], dim);
        let w = Far::new(2, dtype, &[d, width], dim);
        let mut states = Far::new(3, dtype, &[5, d, width], dim);
        let indices = Far::of(DType::I32, &[b], dim, &[4.0, -1.0, 0.0]);
        let lengths = Far::of(DType::I32, &[b], dim, &[7.0, 8.0, 1.0]);
        let mut y = Far::of(dtype, &[b, d, l], dim + 1, &[]);
        let spec = CausalConv1dUpdateSpec::new(x.desc, states.desc, w.desc).unwrap();
        let spec = spec.with_conv_state_indices(indices.desc).with_cache_seqlens(lengths.desc);
        let spec = spec.with_output(y.desc);
        let plan = CausalConv1dUpdatePlan::new(&spec, &options(Verify::On)).unwrap();
        let mut workspace = workspace(plan.workspace_bytes());
        let mut args = CausalConv1dUpdateArgs::new(x.as_ref(), w.as_ref());
        args.conv_state_indices = Some(indices.as_ref());
        args.cache_seqlens = Some(lengths.as_ref());
        plan.run(&args, states.as_mut(), y.as_mut(), &mut workspace).unwrap();
    }
}

#[test]
fn conv2d() {
    let (x_shape, w_shape, groups) = ([2, 4, 6, 5], [6, 2, 3, 3], 2);
    for (dim, dtype) in (0..4).flat_map(|dim| DTYPES.map(|dtype| (dim, dtype))) {
        for stride in [1, 2] {
            let params = Conv2dParams::default()
                .with_padding([1, 1])
                .with_stride([stride; 2])
                .with_groups(groups);
            let x = Far::new(1, dtype, &x_shape, dim);
            let w = Far::new(2, dtype, &w_shape, dim);
            let bias = Far::new(3, dtype, &w_shape[..1], dim);
            let spec = Conv2dSpec::new(x.desc, w.desc, &params).unwrap().with_bias(bias.desc);
            let mut y = Far::of(dtype, spec.y.shape(), dim + 1, &[]);
            let dy = Far::new(4, dtype, spec.y.shape(), dim + 1);
            let spec = spec.with_output(y.desc);
            for algorithm in Conv2dPlan::algorithms(&spec, Device::Cpu) {
                let options = options(Verify::On);
                let plan = Conv2dPlan::with_algorithm(&spec, algorithm, &options).unwrap();
                let bytes = plan.workspace_bytes().max(plan.backward_workspace_bytes().unwrap());
                let mut workspace = workspace(bytes);
                let (w_view, bias) = (w.as_ref(), Some(bias.as_ref()));
                let args = Conv2dArgs::new(x.as_ref(), w_view).with_bias(bias);
                plan.run(&args, y.as_mut(), &mut workspace).unwrap();
                let mut dx = Far::of(dtype, &x_shape, dim, &[]);
                let mut dw = Far::of(dtype, &w_shape, dim + 1, &[]);
                let mut db = Far::of(dtype, &w_shape[..1], dim + 1, &[]);
                let (x, dy) = (x.as_ref(), dy.as_ref());
                plan.backward_data(&w_view, &dy, dx.as_mut(), &mut workspace).unwrap();
                plan.backward_weight(&x, &dy, dw.as_mut(), &mut workspace).unwrap();
                plan.backward_bias(&dy, db.as_mut(), &mut workspace).unwrap();
            }
        }
    }
}
