//! Cases of serving for `windrow verify`.

use super::comparison::Oracle;
use super::reference::{Memory, ServingReference};
use super::{
    CausalConv1dServing, CausalConv1dServingOutputs, CausalConv1dServingPlan,
    CausalConv1dServingSpec, Sizes, TREE,
};
use crate::causal_conv1d::CausalConv1dAlgorithm;
use crate::causal_conv1d::sample::{heads, thirds};
use crate::lists::filled;
use crate::plan::HeldInputs;
use crate::verification::choices::Choices;
use crate::verification::data::{Held, scratch};
use crate::verification::{Case, Check, random};
use crate::{Activation, DType, Device, Layout, PlanOptions, Result, TensorDesc, TensorMut};

/// Values of the index tensors that a spec has.
#[derive(Clone, Debug, Default)]
pub(crate) struct IndexValues {
    pub query_start_loc: Vec<f64>,
    pub conv_state_indices: Vec<f64>,
    pub has_initial_state: Vec<f64>,
    pub num_accepted_tokens: Vec<f64>,
    pub initial_block: Vec<f64>,
    pub last_block: Vec<f64>,
    pub first_block: Vec<f64>,
    pub tokens_before: Vec<f64>,
    pub intermediate_indices: Vec<f64>,
    pub next_token: Vec<f64>,
    pub next_sibling: Vec<f64>,
}

impl IndexValues {
    /// The numbers of an index tensor.
    fn of(&self, name: &str) -> &[f64] {
        match name {
            "query_start_loc" => &self.query_start_loc,
            "conv_state_indices" => &self.conv_state_indices,
            "has_initial_state" => &self.has_initial_state,
            "num_accepted_tokens" => &self.num_accepted_tokens,
            "initial_block" => &self.initial_block,
            "last_block" => &self.last_block,
            "first_block" => &self.first_block,
            "tokens_before" => &self.tokens_before,
            "intermediate_indices" => &self.intermediate_indices,
            "next_token" => &self.next_token,
            "next_sibling" => &self.next_sibling,
            _ => unreachable!("{name} is no index tensor"),
        }
    }

    /// The inputs of a call with these values, and the other ones as they are made of name and descriptor.
    pub(crate) fn inputs(
        &self,
        spec: &CausalConv1dServingSpec,
        device: Device,
        make: impl Fn(&str, TensorDesc) -> Result<Held>,
    ) -> Result<HeldInputs<CausalConv1dServing>> {
        HeldInputs::new(spec, |name, desc| match name {
            "x" | "weight" | "bias" => make(name, desc),
            index => Held::at(desc, self.of(index), 0, device),
        })
    }

    /// Values that the rules allow, where states suffice.
    pub(crate) fn random(
        choices: &mut Choices<'_>,
        spec: &CausalConv1dServingSpec,
        sizes: &Sizes,
    ) -> Self {
        let (n, blocks, l) = (sizes.sequences, sizes.blocks, sizes.problem.l);
        let mut values = IndexValues::default();
        let mut end = 0;
        values.query_start_loc.push(0.0);
        for i in 0..n {
            let left = (l - end).min(sizes.most);
            end += match choices.below(8) {
                7 => 0,
                6 => left.min(1),
                // Mostly all tokens belong to a sequence.
                _ if i + 1 == n && !choices.one_in(4) => left,
                _ => choices.within(0..=left.min(2 * l / n)),
            };
            values.query_start_loc.push(end as f64);
        }
        let block_size = spec.block_size.max(1);
        let mut columns = Vec::new();
        for _ in 0..n {
            let last = choices.below(blocks.max(1));
            let first = last - choices.within(0..=last);
            let initial = choices.below(blocks.max(1));
            columns.push((initial, first, last));
            values.initial_block.push(initial as f64);
            values.first_block.push(first as f64);
            values.last_block.push(last as f64);
            values.tokens_before.push(choices.below(4 * block_size + 1) as f64);
            values.has_initial_state.push(choices.of(&[0.0, 1.0, 1.0, 255.0]));
            values.num_accepted_tokens.push(choices.within(1..=sizes.most_accepted()) as f64);
        }
        values.conv_state_indices = table(choices, spec, sizes, &columns);
        let mut slots: Vec<usize> = (0..sizes.slots).collect();
        let mut slot = |_| slots.swap_remove(choices.below(slots.len())) as f64;
        values.intermediate_indices = (0..n.min(sizes.slots)).map(&mut slot).collect();
        if let Some(next) = &spec.next_token {
            for i in 0..n {
                let tokens = match spec.query_start_loc {
                    Some(_) => values.query_start_loc[i + 1] - values.query_start_loc[i],
                    None => l as f64,
                };
                values.link(choices, tokens as usize, next.shape()[1]);
            }
        }
        values
    }

    /// The links of one tree more, of so many tokens: most of them as engines make them, children behind each other.
    fn link(&mut self, choices: &mut Choices<'_>, tokens: usize, columns: usize) {
        let (mut next, mut sibling) = (vec![-1.0; columns], vec![-1.0; columns]);
        match choices.below(8) {
            // Links of any kind.
            7 => {
                for t in 0..tokens.saturating_sub(1) {
                    for links in [&mut next, &mut sibling] {
                        if choices.one_in(2) {
                            links[t] = choices.within(t + 1..=tokens - 1) as f64;
                        }
                    }
                }
            }
            kind => {
                for t in (1..tokens).rev() {
                    let parent = if kind == 6 { t - 1 } else { choices.below(t) };
                    sibling[t] = std::mem::replace(&mut next[parent], t as f64);
                }
            }
        }
        self.next_token.extend(next);
        self.next_sibling.extend(sibling);
    }
}

/// States that no two sequences share, but that several may read one that none writes; some of them null.
fn table(
    choices: &mut Choices<'_>,
    spec: &CausalConv1dServingSpec,
    sizes: &Sizes,
    columns: &[(usize, usize, usize)],
) -> Vec<f64> {
    let null = spec.null_index.map_or(-1.0, |null| null as f64);
    let mut pool: Vec<usize> =
        (0..sizes.pool).filter(|&state| Some(state as i64) != spec.null_index).collect();
    let shared = if pool.len() > 2 { pool.pop() } else { None };
    let mut table = Vec::new();
    for &(initial, first, last) in columns {
        let first = if spec.first_block.is_some() { first } else { last };
        let last = if spec.last_block.is_some() { last } else { 0 };
        let first = first.min(last);
        for column in 0..sizes.blocks {
            let writes = (first..=last).contains(&column);
            let is_read = column == if spec.initial_block.is_some() { initial } else { 0 };
            let state = match choices.below(8) {
                7 => None,
                5 | 6 if is_read && !writes && shared.is_some() => shared,
                _ if pool.is_empty() => None,
                _ => Some(pool.swap_remove(choices.below(pool.len()))),
            };
            table.push(match state {
                Some(state) => state as f64,
                None => choices.of(&[null, null, -1.0, -7.0]),
            });
        }
    }
    table
}

/// The tensors of a call in memory of their own.
pub(crate) struct ServingSample {
    pub inputs: HeldInputs<CausalConv1dServing>,
    pub conv_states: Held,
    /// `None` where x takes the output.
    pub y: Option<Held>,
    /// The outputs behind y.
    pub further: [Option<Held>; 2],
    pub intermediate_windows: Option<Held>,
    pub parent_token: Option<Held>,
}

impl ServingSample {
    /// Numbers and indices of a seed.
    pub(crate) fn on(
        spec: &CausalConv1dServingSpec,
        seed: u64,
        in_place: bool,
        device: Device,
    ) -> Result<Self> {
        let hold = |what: u64, desc: TensorDesc| {
            let mut values = random(seed * 31 + what, desc.layout.len(), -2.0, 2.0);
            if spec.activation.has_kinks() {
                values.iter_mut().for_each(|value| *value = (*value * 8.0).round() / 8.0);
            }
            Held::at(desc, &values, 0, device)
        };
        let values = IndexValues::random(&mut Choices::from_seed(seed), spec, &spec.sizes()?);
        Ok(ServingSample {
            inputs: values.inputs(spec, device, |name, desc| match name {
                "x" => hold(1, desc),
                "weight" => hold(2, desc),
                _ => hold(3, desc),
            })?,
            conv_states: hold(4, spec.conv_states)?,
            y: if in_place { None } else { Some(Held::at(spec.y, &[], 0, device)?) },
            further: Self::further(spec, [0; 2], device)?,
            intermediate_windows: spec
                .intermediate_windows
                .map(|desc| hold(5, desc))
                .transpose()?,
            parent_token: Self::parents(spec, 0, device)?,
        })
    }

    /// The destinations of the outputs behind y.
    pub(crate) fn further(
        spec: &CausalConv1dServingSpec,
        leads: [usize; 2],
        device: Device,
    ) -> Result<[Option<Held>; 2]> {
        let hold = |desc: Option<TensorDesc>, lead| {
            desc.map(|desc| Held::at(desc, &[], lead, device)).transpose()
        };
        Ok([hold(spec.y2, leads[0])?, hold(spec.y3, leads[1])?])
    }

    /// The destination of the parents of tokens: -7 where nothing is written.
    pub(crate) fn parents(
        spec: &CausalConv1dServingSpec,
        lead: usize,
        device: Device,
    ) -> Result<Option<Held>> {
        let hold =
            |desc: TensorDesc| Held::at(desc, &filled(-7.0, desc.layout.len())?, lead, device);
        spec.parent_token.map(hold).transpose()
    }

    /// The tensors that a run writes. Nothing else reads the memory of these views while they are used, except that y
    /// may be x.
    fn outputs(&mut self) -> Result<CausalConv1dServingOutputs<'static>> {
        let view = |held: &mut Held| -> Result<TensorMut<'static>> {
            let view = held.as_mut()?;
            let (desc, device) = (*view.desc(), view.device());
            // SAFETY: kernels read an element of x before they write it, and make no references; the sample outlives
            // the call.
            unsafe { TensorMut::from_raw(view.as_ptr().cast_mut().cast(), desc, device) }
        };
        let y = view(self.output())?;
        let [y2, y3] = self.further.each_mut().map(|held| held.as_mut().map(view).transpose());
        Ok(CausalConv1dServingOutputs::new(view(&mut self.conv_states)?, y)
            .with_intermediate_windows(self.intermediate_windows.as_mut().map(view).transpose()?)
            .with_parent_token(self.parent_token.as_mut().map(view).transpose()?)
            .with_y2(y2?)
            .with_y3(y3?))
    }

    /// Runs the plan on it.
    pub(crate) fn run(&mut self, plan: &CausalConv1dServingPlan) -> Result<()> {
        let mut workspace = scratch(plan.device(), plan.workspace_bytes())?;
        let outputs = self.outputs()?;
        plan.run(&self.inputs.args(), outputs, &mut workspace)?;
        workspace.synchronize()
    }

    /// The oracle's result of the sample.
    pub(crate) fn oracle(&mut self, spec: &CausalConv1dServingSpec) -> Result<Oracle> {
        let memory = Memory::of(&self.outputs()?)?;
        let reference = ServingReference::new(spec, &self.inputs.args())?;
        Oracle::of(&reference, memory, spec.x.dtype)
    }

    /// The destination of the output.
    pub(crate) fn output(&mut self) -> &mut Held {
        match &mut self.y {
            Some(y) => y,
            None => self.inputs.get_mut("x"),
        }
    }

    /// [`ServingSample::run`], compared with the oracle.
    pub(crate) fn checked(&mut self, plan: &CausalConv1dServingPlan) -> Result<Vec<Check>> {
        let oracle = self.oracle(plan.spec())?;
        self.run(plan)?;
        oracle.checks(&self.outputs()?)
    }
}

/// The sizes: sequences, tokens of all of them, channels; and width. The cases of 33 sequences are steps that keep a
/// device busy: their channels are whole vectors of 16 bytes in f16/bf16, of 8 bytes, and whole heads.
const SIZES: [([usize; 3], usize); 9] = [
    ([1, 1, 1], 1),
    ([4, 4, 72], 4),
    ([5, 90, 33], 3),
    ([3, 400, 264], 4),
    ([2, 40, 16], 9),
    ([33, 33, 504], 4),
    ([33, 33, 516], 4),
    ([3, 60, NORM], 4),
    ([33, 33, NORM], 4),
];

/// The number of channels of cases with a norm alone: whole heads of 128.
const NORM: usize = 512;

const OPTIONS: [&str; 28] = [
    "decode",
    "decode flags",
    "decode in place",
    "rows",
    "prompts",
    "prompts across",
    "prompts flags null",
    "drafts in place",
    "few drafts in place",
    "table",
    "table ends flags",
    "rows windows in place",
    "prompts windows across null",
    "rows tree",
    "rows tree windows null flags",
    "drafts tree windows across",
    "decode split",
    "rows split",
    "prompts split",
    "prompts flags null across split",
    "few drafts split",
    "table ends flags split",
    "rows tree split",
    "decode split norm",
    "rows norm in place",
    "prompts flags null split norm",
    "few drafts split norm",
    "rows tree split norm",
];

pub(crate) fn cases(device: Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (layout, order) in [("channel_first", [0, 1, 2]), ("channel_last", [0, 2, 1])] {
            for (sizes, width) in SIZES {
                for option in OPTIONS {
                    if sizes[2] == NORM && !option.contains("norm") {
                        continue;
                    }
                    let Ok(spec) = spec(dtype, &order, sizes, width, option) else { continue };
                    let options = PlanOptions { device, ..PlanOptions::default() };
                    cases.push(Case {
                        op: "causal_conv1d_serving",
                        algorithm: CausalConv1dAlgorithm::Direct.name().into(),
                        dtype,
                        layout: layout.into(),
                        name: format!("{sizes:?} width {width} {option}"),
                        elements: spec.x.layout.len(),
                        run: Box::new(move || {
                            let plan = CausalConv1dServingPlan::new(&spec, &options)?;
                            let in_place = option.contains("in place");
                            ServingSample::on(&spec, 1, in_place, device)?.checked(&plan)
                        }),
                    });
                }
            }
        }
    }
    cases
}

fn spec(
    dtype: DType,
    order: &[usize; 3],
    [sequences, tokens, d]: [usize; 3],
    width: usize,
    option: &str,
) -> Result<CausalConv1dServingSpec> {
    let has = |word: &str| option.contains(word);
    let ordered = |shape: [usize; 3], order: &[usize; 3]| -> Result<TensorDesc> {
        Ok(TensorDesc { dtype, layout: Layout::with_order(&shape, order)? })
    };
    let x = match () {
        _ if has("decode") => [sequences, d, 1],
        _ if has("rows") => [sequences, d, 3],
        _ => [1, d, tokens],
    };
    let blocks = if has("table") { 4 } else { 1 };
    // Columns for more tokens than one: of few a device need not loop over.
    let drafts = match () {
        _ if has("few drafts") => 3,
        _ if has("drafts") => 4,
        _ => 0,
    };
    let states = [2 * sequences * blocks + 1, d, width - 1 + drafts];
    // The states' layout is x's or the other one.
    let &[_, d_place, l_place] = order;
    let states = ordered(states, &if has("across") { [0, l_place, d_place] } else { *order })?;
    let weight = TensorDesc::contiguous(dtype, &[d, width])?;
    let x_desc = ordered(x, order)?;
    let spec = CausalConv1dServingSpec::new(x_desc, states, weight)?;
    let y = if has("in place") { x_desc } else { spec.y };
    let spec = spec
        .with_output(y)
        .with_bias(TensorDesc::contiguous(dtype, &[d])?)
        .with_activation(Activation::Silu)
        .with_null_index(has("null").then_some(0));
    let index = |shape: &[usize]| TensorDesc::contiguous(DType::I32, shape);
    let each = index(&[sequences])?;
    let flags = TensorDesc::contiguous(DType::U8, &[sequences])?;
    let packed = !has("decode") && !has("rows");
    let table = if blocks > 1 { index(&[sequences, blocks])? } else { each };
    // Windows have the states' order of columns and channels.
    let windows = [2 * sequences + 1, x[2] + 1, d, width];
    let order = if (d_place < l_place) == has("across") { [0, 1, 3, 2] } else { [0, 1, 2, 3] };
    let windows = TensorDesc { dtype, layout: Layout::with_order(&windows, &order)? };
    let has_windows = has("windows");
    let links = has("tree").then_some(index(&[sequences, x[2].min(TREE)])?);
    let spec = spec
        .with_query_start_loc(packed.then_some(index(&[sequences + 1])?))
        .with_conv_state_indices(table)
        .with_has_initial_state(has("flags").then_some(flags))
        .with_num_accepted_tokens(has("drafts").then_some(each))
        .with_initial_block(has("table").then_some(each))
        .with_last_block(has("table").then_some(each))
        .with_first_block(has("ends").then_some(each))
        .with_tokens_before(has("ends").then_some(each))
        .with_block_size(if has("ends") { 16 } else { 0 })
        .with_intermediate_windows(has_windows.then_some(windows))
        .with_intermediate_indices(has_windows.then_some(each))
        .with_next_token(links)
        .with_next_sibling(links)
        .with_parent_token(links);
    let spec = match has("split") {
        true if d == NORM => spec.with_split(&[d / 4, d / 4, d / 2])?,
        true => spec.with_split(&thirds(d))?,
        false => spec,
    };
    let norm = has("norm").then(|| heads(spec.outputs()));
    Ok(spec.with_norm(norm))
}
