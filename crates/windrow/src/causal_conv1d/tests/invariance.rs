//! The bits of a sequence do not depend on the pieces in which its tokens come, or on what is computed beside it.

use super::*;
use crate::verification::choices::Choices;
use crate::verification::random;
use std::ops::Range;

/// One sequence of a batch: its inputs, and the options that all ways to compute it share.
struct Sequence {
    isa: Isa,
    activation: Activation,
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
    fn tokens(&self) -> usize {
        self.x.as_ref().shape()[2]
    }

    /// A state [1, d, width - 1] of zeros.
    fn state(&self) -> Held {
        let (x, weight) = (self.x.as_ref(), self.weight.as_ref());
        let (d, width) = (weight.shape()[0], weight.shape()[1]);
        let desc = TensorDesc::contiguous(x.dtype(), &[1, d, width - 1]).unwrap();
        Held::new(desc, &vec![0.0; desc.layout.len()]).unwrap()
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
            .with_activation(self.activation);
        let plan = CausalConv1dPlan::on_isa(&spec, &by, &options(threads), self.isa).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        plan.run(&args, CausalConv1dOutputs::new(y), &mut workspace).unwrap();
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
            .with_activation(self.activation);
        let plan = CausalConv1dServingPlan::on_isa(&spec, &direct(), &options(2), self.isa);
        let plan = plan.unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
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
        let plan = CausalConv1dUpdatePlan::on_isa(&spec, &direct(), &options(1), self.isa).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        plan.run(&args, state, y, &mut workspace).unwrap();
    }

    /// The bits of y if `n` tokens at a time are computed, and those of the state after them.
    fn in_pieces(
        &self,
        n: usize,
        step: fn(&Self, Range<usize>, &mut Held, TensorMut<'_>),
    ) -> [Vec<u64>; 2] {
        let mut y = Held::new(*self.x.as_ref().desc(), &[]).unwrap();
        let mut state = self.state();
        for t in (0..self.tokens()).step_by(n) {
            let range = t..(t + n).min(self.tokens());
            let part = y.as_mut().unwrap().narrow(2, range.clone()).unwrap();
            step(self, range, &mut state, part);
        }
        [bits(&y), bits(&state)]
    }
}

#[test]
fn bits_do_not_depend_on_pieces_or_neighbours() {
    let mut choices = Choices::from_seed(5);
    for case in 0..24 {
        let dtype = choices.of(&DTYPES);
        let (d, l) = (choices.size(300).max(1), choices.within(1..=200));
        let width = if choices.one_in(6) { choices.within(6..=20) } else { choices.within(1..=5) };
        let activation = choices.of(&[
            Activation::Silu,
            Activation::Silu,
            Activation::Identity,
            Activation::Gelu(Approximate::None),
        ]);
        let order = choices.of(&[[0, 1, 2], [0, 2, 1]]);
        let b = 3;
        let desc = |shape: [usize; 3]| TensorDesc {
            dtype,
            layout: Layout::with_order(&shape, &order).unwrap(),
        };
        let hold = |what: u64, desc: TensorDesc| {
            Held::new(desc, &random(case * 7 + what, desc.layout.len(), -9.0, 9.0)).unwrap()
        };
        let batch = hold(0, desc([b, d, l]));
        let parameter = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
        for isa in Isa::available() {
            let rows = batch.values().unwrap();
            let row = (b - 1) * d * l;
            let sequence = Sequence {
                isa,
                activation,
                x: Held::new(desc([1, d, l]), &rows[row..]).unwrap(),
                weight: hold(1, parameter(&[d, width])),
                bias: hold(2, parameter(&[d])),
            };
            let what = format!("{dtype} {d} x {l} width {width} {activation:?} {order:?} {isa:?}");
            let whole = |by: CausalConv1dConfiguration, x: &Held, threads: usize| {
                let mut y = Held::new(*x.as_ref().desc(), &[]).unwrap();
                sequence.whole(by, &x.as_ref(), y.as_mut().unwrap(), threads);
                bits(&y)
            };
            for by in [im2col(), direct()] {
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
            }
            for n in [1, 4] {
                let [y, kept] = sequence.in_pieces(n, Sequence::update);
                assert_eq!(y, alone, "updates of {n} tokens: {what}");
                assert_eq!(kept, state, "the state of updates of {n} tokens: {what}");
            }
        }
    }
}
