//! Sums over the taps on GPUs, for depthwise convolutions.

mod form;
mod gradients;
mod taps;

use self::form::Form;
use super::shared::{
    MASK, NormBehind, Params, kernel_spec, plain_launch, rows_launch, source, states_kernel,
};
use crate::causal_conv1d::{CausalConv1dArgs, CausalConv1dOutputs, CausalConv1dSpec, Problem};
use crate::gpu::{Feature, Gpu, Kernel, KernelSpec, Kernels};
use crate::{Device, Result, Workspace};

source!(PLAIN, "plain.cu");

/// A depthwise plan on a GPU, with its kernels compiled and loaded.
#[derive(Clone, Debug)]
pub(crate) struct Direct {
    gpu: &'static Gpu,
    form: Form,
    /// Bytes of an element of x.
    element: usize,
    /// True if rows hold several sequences, which the vector kernels read from a mask.
    packed: bool,
    params: Params,
    /// The bytes of the partial sums of a backward run.
    partial_bytes: usize,
    main: Option<&'static Kernel>,
    /// The kernel for addresses that the main kernel cannot take.
    plain: &'static Kernel,
    mask: Option<&'static Kernel>,
    states: Option<&'static Kernel>,
    /// True if the main kernel divides heads by their norm.
    has_norm: bool,
    /// The norm behind a kernel that does not.
    norm: Option<NormBehind>,
    gradients: Kernels<gradients::Key>,
}

fn mask_kernel(spec: &CausalConv1dSpec, form: Form) -> Option<KernelSpec> {
    let packed = spec.seq_idx.is_some() || spec.cu_seqlens.is_some();
    (packed && form != Form::Plain).then(|| kernel_spec(&MASK, "mask", spec))
}

impl Direct {
    /// The plan's kernels. With `batch_invariant` no kernel uses tensor cores, which add in another order than those of
    /// single tokens.
    pub(crate) fn new(
        device: Device,
        spec: &CausalConv1dSpec,
        problem: &Problem,
        batch_invariant: bool,
    ) -> Result<Self> {
        let gpu = Gpu::get(device)?;
        let form = Form::of(spec, problem, |feature| {
            gpu.has(feature) && !(batch_invariant && feature == Feature::MatrixProducts)
        });
        let load = |kernel: Option<KernelSpec>| kernel.map(|k| gpu.kernel(&k)).transpose();
        let params = Params::of(spec, problem)?;
        Ok(Direct {
            gpu,
            form,
            element: spec.x.dtype.size(),
            packed: spec.seq_idx.is_some() || spec.cu_seqlens.is_some(),
            params,
            partial_bytes: gradients::partial_bytes(gpu, spec, &params),
            main: load(form.kernel(spec))?,
            plain: gpu.kernel(&kernel_spec(&PLAIN, "plain", spec))?,
            mask: load(mask_kernel(spec, form))?,
            states: load(states_kernel(spec, form != Form::Plain))?,
            has_norm: form.norm(spec).is_some(),
            norm: NormBehind::of(gpu, spec.norm, spec.outputs())?,
            gradients: Kernels::default(),
        })
    }

    /// A description of the kernel's blocks, in one line.
    pub(crate) fn explain(&self) -> String {
        let norm = match (&self.norm, self.has_norm) {
            (None, _) => "",
            (_, true) => ", norm in the same kernel",
            (_, false) => ", norm in a second kernel",
        };
        format!("{}{norm}", self.form.explain())
    }

    fn mask_bytes(&self) -> usize {
        let positions = self.params.batch * self.params.length;
        if self.packed { (positions * size_of::<u16>()).next_multiple_of(256) } else { 0 }
    }

    /// Bytes for a run or a backward run.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.mask_bytes() + self.partial_bytes
    }

    /// Computes the outputs. The caller has checked the views. Index values cannot be checked without waiting for the
    /// GPU, so the kernels clamp boundaries to 0..=l. Wrong ones give wrong results, but nothing else is accessed, and
    /// they are reported later.
    pub(crate) fn run(
        &self,
        args: &CausalConv1dArgs<'_>,
        outputs: &CausalConv1dOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let (stream, scratch) = workspace.take_on(self.gpu, self.mask_bytes())?;
        let mut params = Params {
            mask: scratch as usize,
            ..self.params.with_inputs(self.gpu, args)?.with_outputs(outputs)
        };
        let Params { batch, channels, length, sequences, .. } = params;
        let mut is_divided = batch * channels * length == 0;
        // SAFETY: `Params` is the kernels' structure (they compare its size); views are valid on this
        // device for the strides in it, and the mask has one word for every position.
        unsafe {
            if batch * channels * length > 0 {
                if let Some(mask) = self.mask {
                    mask.launch(stream, rows_launch(length, batch), &params)?;
                }
                match (self.main, self.form.launch(&mut params, self.element)) {
                    (Some(main), Some(launch)) => {
                        main.launch(stream, launch, &params)?;
                        is_divided = self.has_norm;
                    }
                    _ => self.plain.launch(stream, plain_launch(&params), &params)?,
                }
            }
            if let Some(states) = self.states {
                states.launch(stream, rows_launch(channels, sequences), &params)?;
            }
            if let Some(norm) = self.norm.as_ref().filter(|_| !is_divided) {
                norm.run(stream, &outputs.y, [outputs.y2.as_ref(), outputs.y3.as_ref()])?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::causal_conv1d::HeadNorm;
    use crate::{Activation, Approximate, DType, Layout, TensorDesc};

    const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    pub(super) fn spec(
        dtype: DType,
        shape: [usize; 3],
        width: usize,
        order: [usize; 3],
    ) -> CausalConv1dSpec {
        let x = TensorDesc { dtype, layout: Layout::with_order(&shape, &order).unwrap() };
        let weight = TensorDesc::contiguous(dtype, &[shape[1], width]).unwrap();
        CausalConv1dSpec::new(x, weight).unwrap()
    }

    #[test]
    fn kernels_of_split_outputs_compile_without_spills() {
        let mut kernels = Vec::new();
        for dtype in TYPES {
            for (shape, order, width) in [
                ([8, 4096, 2048], [0, 1, 2], 4),
                ([8, 4096, 2048], [0, 1, 2], 24),
                ([1, 64, 2048], [0, 2, 1], 4),
                ([8, 4096, 2048], [0, 2, 1], 4),
                ([8, 4096, 2048], [0, 2, 1], 24),
            ] {
                let spec = spec(dtype, shape, width, order).with_activation(Activation::Silu);
                let states = TensorDesc::contiguous(dtype, &[shape[0], shape[1], width - 1]);
                let spec = spec.with_initial_states(states.unwrap());
                let rest = shape[1] - 16;
                for channels in [&[16, rest][..], &[8, 8, rest]] {
                    let split = spec.clone().with_split(channels).unwrap();
                    for bulk in [false, true] {
                        let form = Form::of(&split, &split.problem().unwrap(), |_| bulk);
                        assert_eq!(form, Form::of(&spec, &spec.problem().unwrap(), |_| bulk));
                        kernels.extend(form.kernel(&split));
                        kernels.extend(states_kernel(&split, form != Form::Plain));
                    }
                    kernels.push(kernel_spec(&PLAIN, "plain", &split));
                }
            }
        }
        crate::gpu::compile_tests::check_compiles_in_turn(&kernels);
    }

    #[test]
    fn kernels_with_a_norm_compile_without_spills() {
        let mut kernels = Vec::new();
        for (shape, width) in
            [([8, 4096, 2048], 4), ([8, 4096, 2048], 5), ([8, 4096, 2048], 2), ([1, 256, 2048], 4)]
        {
            for dtype in TYPES {
                let bias = TensorDesc::contiguous(dtype, &shape[1..2]).unwrap();
                let plain = spec(dtype, shape, width, [0, 2, 1])
                    .with_activation(Activation::Silu)
                    .with_bias(bias);
                let split = plain.clone().with_split(&[128, 128, shape[1] - 256]);
                let split = split.unwrap_or(plain.clone());
                let numbers = TensorDesc::contiguous(DType::I32, &[shape[0], shape[2]]).unwrap();
                for spec in [split.clone().with_seq_idx(numbers), split, plain] {
                    for head in [32, 128] {
                        let spec = spec.clone().with_norm(HeadNorm::new(head));
                        for bulk in [false, true] {
                            let form = Form::of(&spec, &spec.problem().unwrap(), |_| bulk);
                            let kernel = form.kernel(&spec).unwrap();
                            assert!(
                                form.norm(&spec).is_some() && kernel.value_of("HEAD").is_some()
                            );
                            kernels.push(kernel);
                        }
                    }
                }
            }
        }
        crate::gpu::compile_tests::check_compiles_in_turn(&kernels);
    }

    /// Else the kernel of the states would compute outputs behind the norm.
    #[test]
    fn states_take_the_norm_in_a_second_kernel() {
        let spec = spec(DType::BF16, [1, 256, 2048], 4, [0, 2, 1]).with_norm(HeadNorm::new(128));
        let form = Form::of(&spec, &spec.problem().unwrap(), |_| true);
        assert!(form.norm(&spec).is_some());
        let states = TensorDesc::contiguous(DType::BF16, &[1, 256, 3]).unwrap();
        let spec = spec.with_initial_states(states);
        assert_eq!(form.norm(&spec), None);
        assert_eq!(form.kernel(&spec).unwrap().value_of("HEAD"), None);
    }

    #[test]
    fn a_split_between_vectors_takes_narrower_ones() {
        let form = |channels: &[usize]| {
            let spec = spec(DType::BF16, [2, 4096, 2048], 4, [0, 2, 1]);
            let spec = spec.with_split(channels).unwrap();
            Form::of(&spec, &spec.problem().unwrap(), |_| true)
        };
        assert_eq!(form(&[8, 4088]), Form::ChannelLastShared { vector: 4, rows: 16, lanes: 128 });
        for (channels, vector) in [(&[4, 4092], 4), (&[2, 4094], 2), (&[1, 4095], 1)] {
            assert_eq!(form(channels), Form::ChannelLast { vector, chunk: 32 });
        }
    }

    #[test]
    fn kernels_compile_without_spills() {
        let (mut kernels, mut large) = (Vec::new(), Vec::new());
        let mut push = |spec: &CausalConv1dSpec| {
            let form = Form::of(spec, &spec.problem().unwrap(), |_| false);
            kernels.extend(form.kernel(spec));
            kernels.extend(states_kernel(spec, form != Form::Plain));
            kernels.extend(mask_kernel(spec, form));
            kernels.push(kernel_spec(&PLAIN, "plain", spec));
            kernels.extend(gradients::all_kernels(spec));
        };
        for dtype in TYPES {
            for order in [[0, 1, 2], [0, 2, 1]] {
                let bias = TensorDesc::contiguous(DType::F32, &[64]).unwrap();
                let spec = spec(dtype, [1, 64, 2048], 4, order)
                    .with_bias(bias)
                    .with_activation(Activation::Silu);
                push(&spec);
                let states = TensorDesc::contiguous(dtype, &[1, 64, 3]).unwrap();
                let seq_idx = TensorDesc::contiguous(DType::I32, &[1, 2048]).unwrap();
                let cu_seqlens = TensorDesc::contiguous(DType::I64, &[2]).unwrap();
                let spec = spec.with_initial_states(states).with_final_states(states);
                push(&spec.clone().with_seq_idx(seq_idx));
                push(&spec.clone().with_cu_seqlens(cu_seqlens));
                let states = TensorDesc::contiguous(dtype, &[1, 64, 6]).unwrap();
                let spec = spec.with_dilation(2).with_initial_states(states);
                push(&spec.clone().with_final_states(states).with_seq_idx(seq_idx));
                push(&spec.with_final_states(states));
            }
        }
        for (order, dtype) in
            [([0, 1, 2], DType::F16), ([0, 2, 1], DType::F16), ([0, 2, 1], DType::F32)]
        {
            // As large ones, and on Hopper.
            for activation in [Activation::Silu, Activation::Gelu(Approximate::None)] {
                for width in [2, 4, 5] {
                    let spec =
                        spec(dtype, [8, 4096, 2048], width, order).with_activation(activation);
                    push(&spec);
                    let form = Form::of(&spec, &spec.problem().unwrap(), |_| true);
                    large.extend(form.kernel(&spec));
                }
            }
        }
        for width in [1, 2, 3, 5, 7, 9] {
            push(&spec(DType::F16, [1, 64, 2048], width, [0, 1, 2]));
        }
        for width in [7, 9, 16, 20, 65, 128, 256] {
            for (dtype, order) in
                TYPES.into_iter().flat_map(|t| [[0, 1, 2], [0, 2, 1]].map(|order| (t, order)))
            {
                let spec =
                    spec(dtype, [8, 4096, 2048], width, order).with_activation(Activation::Silu);
                push(&spec);
                let form = Form::of(&spec, &spec.problem().unwrap(), |_| true);
                large.extend(form.kernel(&spec));
            }
        }
        for &activation in Activation::ALL {
            push(&spec(DType::F32, [1, 64, 2048], 4, [0, 1, 2]).with_activation(activation));
        }
        kernels.extend(large);
        crate::gpu::compile_tests::check_compiles_in_turn(&kernels);
    }
}
