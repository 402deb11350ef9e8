//! The behaviour on which vLLM's callers rely, and bad input.

use super::verify::{IndexValues, ServingSample};
use super::*;
use crate::verification::choices::{Choices, mix};
use crate::verification::data::Held;
use crate::verification::random::trial;
use crate::verification::require;
use crate::{
    Activation, DType, Device, Error, Layout, PlanOptions, Result, Tensor, TensorDesc, TensorMut,
    Verify, Workspace,
};

const F32: DType = DType::F32;

fn desc(dtype: DType, shape: &[usize]) -> TensorDesc {
    TensorDesc::contiguous(dtype, shape).unwrap()
}

fn index(shape: &[usize]) -> TensorDesc {
    desc(DType::I32, shape)
}

fn new(spec: &CausalConv1dServingSpec) -> Result<CausalConv1dServingPlan> {
    CausalConv1dServingPlan::new(spec, &PlanOptions::default())
}

/// Packed sequences of 6 tokens in 2 channels, width 3, a pool of 5 states of 4 columns.
fn packed(sequences: usize) -> CausalConv1dServingSpec {
    let [x, states, weight] = [[1, 2, 6], [5, 2, 4], [2, 3, 1]].map(|shape| desc(F32, &shape));
    let weight = desc(F32, &weight.shape()[..2]);
    CausalConv1dServingSpec::new(x, states, weight)
        .unwrap()
        .with_query_start_loc(index(&[sequences + 1]))
        .with_conv_state_indices(index(&[sequences]))
}

#[test]
fn random_calls_agree_with_the_oracle() {
    for case in 0..600 {
        let outcome = trial(random::run, &mut Choices::from_seed(mix(case)), Device::Cpu);
        assert!(outcome.failures.is_empty(), "{}\n{:#?}", outcome.description, outcome.failures);
    }
}

/// One channel, width 3: y is 100, 10 and 1 times the tokens.
struct Call {
    spec: CausalConv1dServingSpec,
    states: Vec<f32>,
    x: Vec<f32>,
    /// The intermediate windows after a run, if the spec has them; -7 where nothing was written.
    windows: Vec<f32>,
    parents: Vec<i32>,
}

impl Call {
    fn new(x: &[f32], [pool, state_len]: [usize; 2], sequences: usize) -> Self {
        let states: Vec<f32> = (0..pool * state_len).map(|i| i as f32).collect();
        let spec = CausalConv1dServingSpec::new(
            desc(F32, &[1, 1, x.len()]),
            desc(F32, &[pool, 1, state_len]),
            desc(F32, &[1, 3]),
        );
        let spec = spec.unwrap().with_query_start_loc(index(&[sequences + 1]));
        Call { spec, states, x: x.to_vec(), windows: vec![], parents: vec![] }
    }

    /// y, and the states after it.
    fn run(&mut self, values: &IndexValues) -> Result<Vec<f32>> {
        let x: Vec<f64> = self.x.iter().copied().map(f64::from).collect();
        let inputs = values.inputs(&self.spec, Device::Cpu, |name, desc| {
            Held::new(desc, if name == "x" { &x } else { &[100.0, 10.0, 1.0] })
        })?;
        let plan = CausalConv1dServingPlan::new(
            &self.spec,
            &PlanOptions::default().with_verify(Verify::On),
        )?;
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes())?;
        let mut y = Tensor::uninitialised(self.spec.y)?;
        let shape = self.spec.conv_states.shape().to_vec();
        let states = TensorMut::new(&mut self.states, &shape)?;
        let mut outputs = CausalConv1dServingOutputs::new(states, y.as_mut());
        if let Some(desc) = &self.spec.intermediate_windows {
            self.windows = vec![-7.0; desc.layout.len()];
            outputs.intermediate_windows = Some(TensorMut::new(&mut self.windows, desc.shape())?);
        }
        if let Some(desc) = &self.spec.parent_token {
            self.parents = vec![-7; desc.layout.len()];
            outputs.parent_token = Some(TensorMut::new(&mut self.parents, desc.shape())?);
        }
        plan.run(&inputs.args(), outputs, &mut workspace)?;
        y.to_vec::<f32>()
    }
}

#[test]
fn a_padded_batch_of_prompts() {
    // Three prompts, of which the second has no state yet and the third is padding; one token of no sequence.
    let mut call = Call::new(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [4, 2], 3);
    call.spec = call.spec.with_conv_state_indices(index(&[3])).with_null_index(0);
    call.spec = call.spec.with_has_initial_state(desc(DType::U8, &[3]));
    let values = IndexValues {
        query_start_loc: vec![0.0, 3.0, 4.0, 5.0],
        conv_state_indices: vec![2.0, 1.0, 0.0],
        has_initial_state: vec![1.0, 0.0, 1.0],
        ..IndexValues::default()
    };
    let y = call.run(&values).unwrap();
    assert_eq!(y, [451.0, 512.0, 123.0, 4.0, 0.0, 0.0]);
    assert_eq!(call.states, [0.0, 1.0, 0.0, 4.0, 2.0, 3.0, 6.0, 7.0]);
}

#[test]
fn drafts_are_rolled_back() {
    // Two of the drafts of the call before were accepted; three tokens more.
    let mut call = Call::new(&[7.0, 8.0, 9.0], [2, 4], 1);
    call.spec = call.spec.with_conv_state_indices(index(&[1]));
    call.spec = call.spec.with_num_accepted_tokens(index(&[1]));
    let values = IndexValues {
        query_start_loc: vec![0.0, 3.0],
        conv_state_indices: vec![1.0],
        num_accepted_tokens: vec![2.0],
        ..IndexValues::default()
    };
    // State 1 was [4, 5, 6, 7].
    assert_eq!(call.run(&values).unwrap(), [567.0, 678.0, 789.0]);
    assert_eq!(call.states[4..], [6.0, 7.0, 8.0, 9.0]);
}

#[test]
fn states_at_ends_of_blocks_are_kept() {
    // Blocks of 4 tokens, of which 3 were there before; 6 more end in the third block. The first block's end is after
    // one token, so that its state begins in the window.
    let mut call = Call::new(&[11.0, 12.0, 13.0, 14.0, 15.0, 16.0], [5, 2], 1);
    call.spec = call.spec.with_conv_state_indices(index(&[1, 4])).with_block_size(4);
    call.spec = call.spec.with_initial_block(index(&[1])).with_last_block(index(&[1]));
    call.spec = call.spec.with_first_block(index(&[1])).with_tokens_before(index(&[1]));
    let values = IndexValues {
        query_start_loc: vec![0.0, 6.0],
        conv_state_indices: vec![3.0, 1.0, 4.0, -1.0],
        initial_block: vec![0.0],
        last_block: vec![2.0],
        first_block: vec![0.0],
        tokens_before: vec![3.0],
        ..IndexValues::default()
    };
    call.run(&values).unwrap();
    let kept = [0.0, 1.0, 14.0, 15.0, 4.0, 5.0, 7.0, 11.0, 15.0, 16.0];
    assert_eq!(call.states, kept);
}

#[test]
fn trees_follow_their_parents() {
    // Tokens 1 and 2 are children of 0, 3 is one of 1: the example of SGLang. Before them is state 1, of 6 and 7.
    let mut call = Call::new(&[1.0, 2.0, 3.0, 4.0], [2, 2], 1);
    call.spec = call.spec.with_conv_state_indices(index(&[1]));
    call.spec = call.spec.with_next_token(index(&[1, 5])).with_next_sibling(index(&[1, 5]));
    call.spec = call.spec.with_parent_token(index(&[1, 5]));
    call.spec = call.spec.with_intermediate_windows(desc(F32, &[3, 4, 1, 2]));
    call.spec = call.spec.with_intermediate_indices(index(&[1]));
    call.states = vec![4.0, 5.0, 6.0, 7.0];
    let values = IndexValues {
        query_start_loc: vec![0.0, 4.0],
        conv_state_indices: vec![1.0],
        intermediate_indices: vec![2.0],
        next_token: vec![1.0, 3.0, -1.0, -1.0, -9.0],
        next_sibling: vec![-1.0, 2.0, -1.0, -1.0, -9.0],
        ..IndexValues::default()
    };
    assert_eq!(call.run(&values).unwrap(), [671.0, 712.0, 713.0, 124.0]);
    // The state takes tokens in their order.
    assert_eq!(call.states, [4.0, 5.0, 3.0, 4.0]);
    assert_eq!(call.parents, [0, 0, 0, 1, -7]);
    let [windows, last] = [&call.windows[..16], &call.windows[16..]];
    assert!(windows.iter().all(|&value| value == -7.0));
    assert_eq!(last, [7.0, 1.0, 1.0, 2.0, 1.0, 3.0, 2.0, 4.0]);
}

#[test]
fn windows_on_the_way_are_kept() {
    // Two sequences, of which the first is padding; windows have a column more than they need.
    let mut call = Call::new(&[1.0, 2.0, 3.0], [2, 2], 2);
    call.spec = call.spec.with_conv_state_indices(index(&[2]));
    call.spec = call.spec.with_intermediate_windows(desc(F32, &[2, 2, 1, 3]));
    let values = IndexValues {
        query_start_loc: vec![0.0, 1.0, 3.0],
        conv_state_indices: vec![-1.0, 1.0],
        ..IndexValues::default()
    };
    assert_eq!(call.run(&values).unwrap(), [0.0, 232.0, 323.0]);
    assert_eq!(call.states, [0.0, 1.0, 2.0, 3.0]);
    assert_eq!(call.windows[..6], [-7.0; 6]);
    assert_eq!(call.windows[6..], [3.0, 2.0, -7.0, 2.0, 3.0, -7.0]);
}

#[test]
fn trees_are_not_computed_over_x() {
    let [x, states, weight] = [desc(F32, &[1, 2, 3]), desc(F32, &[1, 2, 2]), desc(F32, &[2, 3])];
    let links = index(&[1, 3]);
    let spec = CausalConv1dServingSpec::new(x, states, weight).unwrap();
    let spec = spec.with_next_token(links).with_next_sibling(links);
    let mut sample = ServingSample::on(&spec, 1, true, Device::Cpu).unwrap();
    let error = sample.run(&new(&spec).unwrap()).unwrap_err();
    assert!(matches!(error, Error::Aliasing { output: "y", input: "x", .. }), "{error}");
}

#[test]
fn prompts_in_pieces_are_the_same_as_whole() {
    let spec = |tokens: usize| {
        let layout = Layout::with_order(&[1, 40, tokens], &[0, 2, 1]).unwrap();
        let x = TensorDesc { dtype: F32, layout };
        CausalConv1dServingSpec::new(x, desc(F32, &[1, 40, 3]), desc(F32, &[40, 4]))
            .unwrap()
            .with_activation(Activation::Silu)
    };
    let mut whole = ServingSample::on(&spec(90), 5, false, Device::Cpu).unwrap();
    let before = whole.conv_states.values().unwrap();
    whole.run(&new(&spec(90)).unwrap()).unwrap();
    let (x, want) = (whole.inputs.get_mut("x").values().unwrap(), whole.output().values().unwrap());
    let mut pieces = ServingSample::on(&spec(90), 5, false, Device::Cpu).unwrap();
    pieces.conv_states = Held::new(spec(1).conv_states, &before).unwrap();
    let mut start = 0;
    for tokens in [1, 2, 40, 1, 46] {
        let part = |from: &[f64]| -> Vec<f64> {
            (0..40).flat_map(|d| from[d * 90 + start..][..tokens].to_vec()).collect()
        };
        *pieces.inputs.get_mut("x") = Held::new(spec(tokens).x, &part(&x)).unwrap();
        pieces.y = Some(Held::new(spec(tokens).y, &[]).unwrap());
        pieces.run(&new(&spec(tokens)).unwrap()).unwrap();
        assert_eq!(pieces.output().values().unwrap(), part(&want), "from token {start} on");
        start += tokens;
    }
    assert_eq!(pieces.conv_states.values().unwrap(), whole.conv_states.values().unwrap());
}

#[test]
fn verified_runs_pass() {
    for option in super::verify::cases(Device::Cpu).iter().take(40) {
        require(&option.name, (option.run)().unwrap()).unwrap();
    }
}

#[test]
fn specs_are_checked() {
    let message = |spec: CausalConv1dServingSpec, words: &str| {
        let message = new(&spec).unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
    };
    let [x, states, weight] = [desc(F32, &[1, 2, 6]), desc(F32, &[5, 2, 4]), desc(F32, &[2, 3])];
    let bad = |x, states, weight| CausalConv1dServingSpec::new(x, states, weight).unwrap_err();
    assert!(matches!(bad(weight, states, weight), Error::Rank { arg: "x", .. }));
    assert!(matches!(bad(x, weight, weight), Error::Rank { arg: "conv_states", .. }));
    let dense = desc(F32, &[2, 2, 3]);
    assert!(matches!(bad(x, states, dense), Error::Rank { arg: "weight", .. }));
    let short = desc(F32, &[5, 2, 1]);
    assert!(matches!(bad(x, short, weight), Error::Shape { arg: "conv_states", .. }));
    let half = desc(DType::F16, &[5, 2, 4]);
    assert!(matches!(bad(x, half, weight), Error::DType { arg: "conv_states", .. }));

    message(packed(3).with_bias(desc(F32, &[3])), "bias");
    message(packed(3).with_output(desc(F32, &[1, 2, 5])), "y");
    message(packed(3).with_query_start_loc(desc(F32, &[4])), "query_start_loc");
    message(packed(3).with_query_start_loc(index(&[0])), "query_start_loc");
    message(packed(3).with_query_start_loc(index(&[4, 1])), "query_start_loc");
    message(packed(3).with_conv_state_indices(index(&[4])), "conv_state_indices");
    message(packed(3).with_conv_state_indices(index(&[3, 0])), "at least one block");
    message(packed(3).with_conv_state_indices(index(&[3, 1, 1])), "conv_state_indices");
    message(packed(3).with_conv_state_indices(desc(F32, &[3])), "i32 or i64");
    message(packed(6).with_conv_state_indices(None), "at least 6 states");
    message(packed(3).with_has_initial_state(index(&[3])), "has_initial_state");
    message(packed(3).with_has_initial_state(desc(DType::U8, &[2])), "has_initial_state");
    message(packed(3).with_num_accepted_tokens(index(&[2])), "num_accepted_tokens");
    message(packed(3).with_last_block(index(&[3])), "without a table");
    let table = || packed(3).with_conv_state_indices(index(&[3, 2])).with_last_block(index(&[3]));
    assert!(new(&table()).is_ok());
    message(table().with_initial_block(index(&[2])), "initial_block");
    message(table().with_tokens_before(index(&[3])), "without `first_block`");
    message(table().with_first_block(index(&[3])), "tokens_before");
    let ends = || table().with_first_block(index(&[3])).with_tokens_before(index(&[3]));
    message(ends(), "block_size");
    assert!(new(&ends().with_block_size(2)).is_ok());
    message(ends().with_block_size(2).with_last_block(None), "last_block");
    let rows = CausalConv1dServingSpec::new(desc(F32, &[3, 2, 6]), states, weight).unwrap();
    message(rows.clone().with_query_start_loc(index(&[4])), "b = 1");
    message(rows.clone().with_num_accepted_tokens(index(&[3])), "state_len at least 7");

    let windows = |shape: &[usize]| rows.clone().with_intermediate_windows(desc(F32, shape));
    assert!(new(&windows(&[3, 6, 2, 2])).is_ok());
    message(windows(&[3, 6, 4]), "4: [slots, steps, d, columns]");
    message(windows(&[3, 6, 3, 2]), "intermediate_windows");
    message(windows(&[3, 6, 2, 1]), "at least 2 columns");
    message(windows(&[3, 5, 2, 2]), "at least 6 steps");
    message(windows(&[2, 6, 2, 2]), "at least 3 slots");
    message(rows.clone().with_intermediate_windows(desc(DType::F16, &[3, 6, 2, 2])), "f16");
    message(rows.clone().with_intermediate_indices(index(&[3])), "without `intermediate_windows`");
    let indices = |given| windows(&[9, 6, 2, 2]).with_intermediate_indices(given);
    assert!(new(&indices(index(&[3]))).is_ok());
    message(indices(index(&[4])), "intermediate_indices");
    message(indices(desc(F32, &[3])), "i32 or i64");
    let twice = Layout::strided(&[3, 6, 2, 2], &[24, 4, 2, 0]).unwrap();
    let twice = TensorDesc { dtype: F32, layout: twice };
    message(rows.clone().with_intermediate_windows(twice), "intermediate_windows");

    let links = |next: &[usize], sibling: &[usize]| {
        rows.clone().with_next_token(index(next)).with_next_sibling(index(sibling))
    };
    assert!(new(&links(&[3, 7], &[3, 7])).is_ok());
    message(links(&[3, 7], &[3, 6]), "next_sibling");
    message(links(&[3], &[3]), "2: [sequences, columns]");
    message(links(&[2, 6], &[2, 6]), "next_token");
    message(links(&[3, 5], &[3, 5]), "at least 6 columns");
    message(links(&[3, 6], &[3, 6]).with_next_sibling(None), "next_sibling");
    message(rows.clone().with_next_sibling(index(&[3, 6])), "without `next_token`");
    message(rows.clone().with_parent_token(index(&[3, 6])), "without `next_token`");
    message(links(&[3, 6], &[3, 6]).with_parent_token(desc(F32, &[3, 6])), "i32 or i64");
    let same = Layout::strided(&[3, 6], &[0, 1]).unwrap();
    let same = TensorDesc { dtype: DType::I32, layout: same };
    message(links(&[3, 6], &[3, 6]).with_parent_token(same), "parent_token");
    let ends = ends().with_block_size(2);
    message(ends.with_next_token(index(&[3, 6])).with_next_sibling(index(&[3, 6])), "first_block");
    let long = |l: usize| {
        let x = desc(F32, &[1, 2, l]);
        let links = index(&[1, 2000]);
        let spec = CausalConv1dServingSpec::new(x, states, weight).unwrap();
        spec.with_next_token(links).with_next_sibling(links)
    };
    assert!(new(&long(1024)).is_ok());
    message(long(1025), "at most 1024 tokens of a tree");
}

/// Checks that a good call runs, that a change of its indices is an error with certain words, and that nothing was
/// written then.
fn refusal(
    spec: impl Fn() -> Call,
    good: impl Fn() -> IndexValues,
) -> impl Fn(&str, &dyn Fn(&mut IndexValues)) {
    assert!(spec().run(&good()).is_ok());
    move |words, change| {
        let (mut call, mut values) = (spec(), good());
        let before = call.states.clone();
        change(&mut values);
        let message = call.run(&values).unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
        assert_eq!(call.states, before);
        assert!(call.windows.iter().all(|&value| value == -7.0));
        assert!(call.parents.iter().all(|&value| value == -7));
    }
}

#[test]
fn indices_are_checked_before_anything_is_written() {
    let spec = || {
        let mut call = Call::new(&[1.0, 2.0, 3.0, 4.0], [4, 3], 2);
        call.spec = call.spec.with_conv_state_indices(index(&[2, 2])).with_block_size(2);
        call.spec = call.spec.with_initial_block(index(&[2])).with_last_block(index(&[2]));
        call.spec = call.spec.with_first_block(index(&[2])).with_tokens_before(index(&[2]));
        call.spec = call.spec.with_num_accepted_tokens(index(&[2])).with_null_index(0);
        call
    };
    let good = || IndexValues {
        query_start_loc: vec![0.0, 2.0, 4.0],
        conv_state_indices: vec![1.0, 0.0, 2.0, 3.0],
        num_accepted_tokens: vec![1.0, 2.0],
        initial_block: vec![0.0, 0.0],
        last_block: vec![0.0, 1.0],
        first_block: vec![0.0, 0.0],
        tokens_before: vec![0.0, 1.0],
        ..IndexValues::default()
    };
    let refused = refusal(spec, good);
    refused("`query_start_loc`[0] is 1", &|v| v.query_start_loc[0] = 1.0);
    refused("at least the entry before it, 2", &|v| v.query_start_loc[2] = 1.0);
    refused("at most 4, the number of tokens", &|v| v.query_start_loc[2] = 5.0);
    refused("at most 2 more", &|v| v.query_start_loc[1] = 3.0);
    refused("`conv_state_indices`[2] is 4", &|v| v.conv_state_indices[2] = 4.0);
    refused("no other sequence writes", &|v| v.conv_state_indices[2] = 1.0);
    refused("no other sequence writes", &|v| v.conv_state_indices[3] = 1.0);
    refused("between 1 and 2", &|v| v.num_accepted_tokens[1] = 3.0);
    refused("between 1 and 2", &|v| v.num_accepted_tokens[1] = 0.0);
    refused("`initial_block`[1] is 2", &|v| v.initial_block[1] = 2.0);
    refused("`last_block`[0] is -1", &|v| v.last_block[0] = -1.0);
    refused("`first_block`[0] is 1, expected at most", &|v| v.first_block[0] = 1.0);
    refused("`tokens_before`[1] is -3", &|v| v.tokens_before[1] = -3.0);
}

#[test]
fn slots_and_links_are_checked_before_anything_is_written() {
    let spec = || {
        let mut call = Call::new(&[1.0, 2.0, 3.0, 4.0, 5.0], [2, 2], 2);
        call.spec = call.spec.with_intermediate_windows(desc(F32, &[3, 4, 1, 2]));
        call.spec = call.spec.with_intermediate_indices(index(&[2]));
        call.spec = call.spec.with_next_token(index(&[2, 3])).with_next_sibling(index(&[2, 3]));
        call.spec = call.spec.with_parent_token(index(&[2, 3]));
        call
    };
    let good = || IndexValues {
        query_start_loc: vec![0.0, 2.0, 5.0],
        intermediate_indices: vec![2.0, 0.0],
        next_token: vec![1.0, -1.0, -1.0, 2.0, -1.0, -1.0],
        next_sibling: vec![-1.0, -1.0, -1.0, 1.0, 2.0, -1.0],
        ..IndexValues::default()
    };
    let refused = refusal(spec, good);
    refused("at most 3 more", &|v| v.query_start_loc = vec![0.0, 4.0, 5.0]);
    refused("`intermediate_indices`[0] is 3", &|v| v.intermediate_indices[0] = 3.0);
    refused("`intermediate_indices`[1] is -1", &|v| v.intermediate_indices[1] = -1.0);
    refused("no other sequence has", &|v| v.intermediate_indices[1] = 2.0);
    refused("`next_token`[0] is 2", &|v| v.next_token[0] = 2.0);
    refused("`next_token`[3] is 0, expected -1 or a later", &|v| v.next_token[3] = 0.0);
    refused("`next_sibling`[4] is -2", &|v| v.next_sibling[4] = -2.0);
    refused("`next_sibling`[4] is 1", &|v| v.next_sibling[4] = 1.0);
}
