//! The bits of a sequence do not depend on the pieces in which its tokens come, or on what is computed beside it.

use super::*;
use crate::gpu::first_devices;
use crate::verification::choices::Choices;
use crate::verification::random;
use std::ops::Range;

/// One sequence of a batch: its inputs, and the options that all ways to compute it share.
struct Sequence {
    device: Device,
    /// For the CPU.
    isa: Isa,
    activation: Activation,
    norm: Option<HeadNorm>,
    /// [1, d, l]
    x: Held,
    weight: Held,
    bias: Held,
}

fn direct() -> CausalConv1dConfiguration {
    CausalConv1dConfiguration::new(CausalConv1dAlgorithm::Direct)
}

fn im2col() -> CausalConv1dConfiguration {
    CausalConv1dConfiguration::new(CausalConv1dAlgorithm::Im2colGemm)
}

fn bits(held: &Held) -> Vec<u64> {
    held.values().unwrap().into_iter().map(f64::to_bits).collect()
}

impl Sequence {
    fn options(&self, threads: usize) -> PlanOptions {
        options(threads).with_device(self.device).with_batch_invariant(true)
    }

    /// A tensor of NaN on the device.
    fn empty(&self, desc: TensorDesc) -> Held {
        Held::at(desc, &[], 0, self.device).unwrap()
    }

    fn tokens(&self) -> usize {
        self.x.as_ref().shape()[2]
    }

    /// A state [1, d, width - 1] of zeros.
    fn state(&self) -> Held {
        let (x, weight) = (self.x.as_ref(), self.weight.as_ref());
        let (d, width) = (weight.shape()[0], weight.shape()[1]);
        let desc = TensorDesc::contiguous(x.dtype(), &[1, d, width - 1]).unwrap();
        Held::at(desc, &vec![0.0; desc.layout.len()], 0, self.device).unwrap()
    }

    /// All tokens at once, from tokens `range` of rows [b, d, l].
    fn whole(
        &self,
        by: CausalConv1dConfiguration,
        x: &TensorRef<'_>,
        y: TensorMut<'_>,
        threads: usize,
    ) {
        let args = CausalConv1dArgs::new(*x, self.weight.as_ref()).with_bias(self.bias.as_ref());
        let spec = CausalConv1dSpec::new(*x.desc(), *args.weight.desc())
            .unwrap()
            .with_output(*y.desc())
            .with_bias(*self.bias.as_ref().desc())
            .with_activation(self.activation)
            .with_norm(self.norm);
        let plan = CausalConv1dPlan::on_isa(&spec, &by, &self.options(threads), self.isa).unwrap();
        let mut workspace = Workspace::new(self.device, plan.workspace_bytes()).unwrap();
        plan.run(&args, CausalConv1dOutputs::new(y), &mut workspace).unwrap();
    }

    /// Tokens `range` as a part of a longer sequence.
    fn chunk(&self, range: Range<usize>, state: &mut Held, y: TensorMut<'_>) {
        let x = self.x.as_ref().narrow(2, range).unwrap();
        let desc = *state.as_ref().desc();
        let mut next = self.empty(desc);
        let args = CausalConv1dArgs::new(x, self.weight.as_ref()).with_bias(self.bias.as_ref());
        let args = args.with_initial_states(state.as_ref());
        let spec = CausalConv1dSpec::new(*x.desc(), *args.weight.desc())
            .unwrap()
            .with_output(*y.desc())
            .with_bias(*self.bias.as_ref().desc())
            .with_initial_states(desc)
            .with_final_states(desc)
            .with_activation(self.activation)
            .with_norm(self.norm);
        let plan = CausalConv1dPlan::on_isa(&spec, &direct(), &self.options(2), self.isa).unwrap();
        let mut workspace = Workspace::new(self.device, plan.workspace_bytes()).unwrap();
        let outputs = CausalConv1dOutputs::new(y).with_final_states(next.as_mut().unwrap());
        plan.run(&args, outputs, &mut workspace).unwrap();
        *state = next;
    }

    /// Tokens `range` as a call of a serving engine.
    fn serve(&self, range: Range<usize>, state: &mut Held, y: TensorMut<'_>) {
        let x = self.x.as_ref().narrow(2, range).unwrap();
        let args = CausalConv1dServingArgs::new(x, self.weight.as_ref());
        let args = args.with_bias(self.bias.as_ref());
        let state = state.as_mut().unwrap();
        let spec = CausalConv1dServingSpec::new(*x.desc(), *state.desc(), *args.weight.desc())
            .unwrap()
            .with_output(*y.desc())
            .with_bias(*self.bias.as_ref().desc())
            .with_activation(self.activation)
            .with_norm(self.norm);
        let plan = CausalConv1dServingPlan::on_isa(&spec, &direct(), &self.options(2), self.isa);
        let plan = plan.unwrap();
        let mut workspace = Workspace::new(self.device, plan.workspace_bytes()).unwrap();
        plan.run(&args, CausalConv1dServingOutputs::new(state, y), &mut workspace).unwrap();
    }

    /// Tokens `range` as steps of decoding.
    fn update(&self, range: Range<usize>, state: &mut Held, y: TensorMut<'_>) {
        let x = self.x.as_ref().narrow(2, range).unwrap();
        let args = CausalConv1dUpdateArgs::new(x, self.weight.as_ref());
        let args = args.with_bias(self.bias.as_ref());
        let state = state.as_mut().unwrap();
        let spec = CausalConv1dUpdateSpec::new(*x.desc(), *state.desc(), *args.weight.desc())
            .unwrap()
            .with_output(*y.desc())
            .with_bias(*self.bias.as_ref().desc())
            .with_activation(self.activation);
        let plan = CausalConv1dUpdatePlan::on_isa(&spec, &direct(), &self.options(1), self.isa);
        let plan = plan.unwrap();
        let mut workspace = Workspace::new(self.device, plan.workspace_bytes()).unwrap();
        plan.run(&args, state, y, &mut workspace).unwrap();
    }

    /// The bits of y if `n` tokens at a time are computed, and those of the state after them.
    fn in_pieces(
        &self,
        n: usize,
        step: fn(&Self, Range<usize>, &mut Held, TensorMut<'_>),
    ) -> [Vec<u64>; 2] {
        let mut y = self.empty(*self.x.as_ref().desc());
        let mut state = self.state();
        for t in (0..self.tokens()).step_by(n) {
            let range = t..(t + n).min(self.tokens());
            let part = y.as_mut().unwrap().narrow(2, range.clone()).unwrap();
            step(self, range, &mut state, part);
        }
        [bits(&y), bits(&state)]
    }
}

/// A batch of random sequences [3, d, l] with what they are convolved with, and with a description.
struct Batch {
    x: (TensorDesc, Vec<f64>),
    weight: (TensorDesc, Vec<f64>),
    bias: (TensorDesc, Vec<f64>),
    activation: Activation,
    norm: Option<HeadNorm>,
    what: String,
}

impl Batch {
    /// At most these numbers of channels and tokens.
    fn random(choices: &mut Choices<'_>, case: u64, [channels, tokens]: [usize; 2]) -> Self {
        let dtype = choices.of(&DTYPES);
        let (d, l) = (choices.size(channels).max(1), choices.within(1..=tokens));
        let width = if choices.one_in(6) { choices.within(6..=20) } else { choices.within(1..=5) };
        let activation = choices.of(&[
            Activation::Silu,
            Activation::Silu,
            Activation::Identity,
            Activation::Gelu(Approximate::None),
        ]);
        let order = choices.of(&[[0, 1, 2], [0, 2, 1]]);
        let widths: Vec<usize> = (1..=d).filter(|&width| d.is_multiple_of(width)).collect();
        let norm = choices.one_in(2).then(|| HeadNorm::new(choices.of(&widths)));
        let layout = Layout::with_order(&[3, d, l], &order).unwrap();
        let with = |what: u64, desc: TensorDesc| {
            (desc, random(case * 7 + what, desc.layout.len(), -9.0, 9.0))
        };
        let parameter = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
        Batch {
            x: with(0, TensorDesc { dtype, layout }),
            weight: with(1, parameter(&[d, width])),
            bias: with(2, parameter(&[d])),
            activation,
            norm,
            what: format!("{dtype} {d} x {l} width {width} {activation:?} {norm:?} {order:?}"),
        }
    }

    /// Compares all ways to compute the last sequence, by methods that compute whole sequences.
    fn compare(&self, device: Device, isa: Isa, methods: &[CausalConv1dConfiguration]) {
        let hold =
            |(desc, values): &(TensorDesc, Vec<f64>)| Held::at(*desc, values, 0, device).unwrap();
        let (desc, values) = &self.x;
        let &[b, d, l] = desc.shape() else { unreachable!() };
        let row = (b - 1) * d * l;
        let mut one = TensorDesc::contiguous(desc.dtype, &[1, d, l]).unwrap();
        one.layout = Layout::strided(&[1, d, l], desc.strides()).unwrap();
        let sequence = Sequence {
            device,
            isa,
            activation: self.activation,
            norm: self.norm,
            x: hold(&(one, values[row..].to_vec())),
            weight: hold(&self.weight),
            bias: hold(&self.bias),
        };
        let (batch, what) = (hold(&self.x), format!("{} {device} {isa:?}", self.what));
        let whole = |by: CausalConv1dConfiguration, x: &Held, threads: usize| {
            let mut y = sequence.empty(*x.as_ref().desc());
            sequence.whole(by, &x.as_ref(), y.as_mut().unwrap(), threads);
            bits(&y)
        };
        for &by in methods {
            let alone = whole(by, &sequence.x, 1);
            for threads in [1, 3] {
                assert_eq!(whole(by, &batch, threads)[row..], alone, "in a batch: {what}");
            }
        }
        let alone = whole(direct(), &sequence.x, 1);
        let state = sequence.in_pieces(l, Sequence::serve)[1].clone();
        for n in [1, 2, 7, 64, 8192] {
            let [y, kept] = sequence.in_pieces(n, Sequence::serve);
            assert_eq!(y, alone, "serving {n} tokens at a time: {what}");
            assert_eq!(kept, state, "the state of {n} tokens at a time: {what}");
            let [y, kept] = sequence.in_pieces(n, Sequence::chunk);
            assert_eq!(y, alone, "chunks of {n} tokens: {what}");
            assert_eq!(kept, state, "the state of chunks of {n} tokens: {what}");
        }
        // Updates have no norm.
        for n in [1, 4].into_iter().filter(|_| self.norm.is_none()) {
            let [y, kept] = sequence.in_pieces(n, Sequence::update);
            assert_eq!(y, alone, "updates of {n} tokens: {what}");
            assert_eq!(kept, state, "the state of updates of {n} tokens: {what}");
        }
    }
}

#[test]
fn bits_do_not_depend_on_pieces_or_neighbours() {
    let mut choices = Choices::from_seed(5);
    for case in 0..24 {
        let batch = Batch::random(&mut choices, case, [300, 200]);
        for isa in Isa::available() {
            batch.compare(Device::Cpu, isa, &[im2col(), direct()]);
        }
    }
}

/// The same on the first GPU of each kind. Without one the test does nothing.
#[test]
fn bits_on_gpus_do_not_depend_on_pieces_or_neighbours() {
    for device in first_devices() {
        let (most, cases) = match device {
            Device::Hip(_) => ([40, 40], 8), // an emulator may execute it
            _ => ([300, 200], 24),
        };
        let mut choices = Choices::from_seed(5);
        for case in 0..cases {
            Batch::random(&mut choices, case, most).compare(device, Isa::best(), &[direct()]);
        }
    }
}

/// Products of a library on a GPU depend on the number of tokens.
#[test]
fn dense_weights_on_gpus_are_refused() {
    let desc = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
    let options = options(1).with_device(Device::Cuda(0)).with_batch_invariant(true);
    let dense = CausalConv1dSpec::new(desc(&[2, 8, 9]), desc(&[4, 8, 3])).unwrap();
    let error = CausalConv1dPlan::new(&dense, &options).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("batch_invariant"), "{error}");
}
