//! Random cases of serving for `windrow verify --random`.

use super::verify::{IndexValues, ServingSample};
use super::{CausalConv1dServingPlan, CausalConv1dServingSpec, Sizes, TREE};
use crate::causal_conv1d::sample::{DTYPES, any_heads, desc, parts};
use crate::causal_conv1d::{CausalConv1dAlgorithm, CausalConv1dConfiguration};
use crate::verification::choices::{Choices, shrink};
use crate::verification::data::{Held, Numbers, Style, activation, options};
use crate::verification::random::Trial;
use crate::{DType, Device, Result, TensorDesc};

/// The largest numbers of products that the oracle sums. The second limit is used rarely.
const PRODUCTS: [usize; 2] = [20_000, 200_000];

fn spec(choices: &mut Choices<'_>, style: Style) -> Result<CausalConv1dServingSpec> {
    let dtype = choices.of(&DTYPES);
    let width = if choices.one_in(8) { choices.within(6..=20) } else { choices.within(1..=5) };
    let [packed, drafts, indexed, table] = [(); 4].map(|()| choices.one_in(2));
    let [windows, trees] = [(); 2].map(|()| choices.one_in(4));
    let table = indexed && table;
    let mut sizes = [choices.size(20), choices.size(600), choices.size(700)];
    let most = PRODUCTS[choices.one_in(16) as usize];
    shrink(&mut sizes, most, |s| {
        let [sequences, d, l] = [s[0], s[1], s[2]].map(|n| n.max(1));
        (if packed { l } else { sequences * l }) * d * width
    });
    let [sequences, d, mut l] = sizes;
    let blocks = if table { choices.within(1..=5) } else { 1 };
    let mut state_len = width - 1 + if choices.one_in(2) { choices.size(9) } else { 0 };
    if drafts {
        state_len += choices.below(6);
        if !packed {
            l = l.min((state_len + 2).saturating_sub(width));
        }
    }
    if trees && !packed {
        l = l.min(TREE);
    }
    let more = if indexed { choices.size(9) } else { 0 };
    let pool = sequences * blocks + more;
    let x = if packed { [1, d, l] } else { [sequences, d, l] };
    let x = desc(choices, style, dtype, &x, false)?;
    let states = desc(choices, style, dtype, &[pool, d, state_len], false)?;
    let parameter = choices.of(&[dtype, DType::F32]);
    let weight = desc(choices, style, parameter, &[d, width], true)?;
    let mut spec =
        CausalConv1dServingSpec::new(x, states, weight)?.with_activation(activation(choices));
    if choices.one_in(2) {
        let parameter = choices.of(&[dtype, DType::F32]);
        spec.bias = Some(desc(choices, style, parameter, &[d], true)?);
    }
    spec.y = match choices.below(3) {
        0 => spec.y,
        1 => x,
        _ => desc(choices, style, dtype, x.shape(), false)?,
    };
    if d > 1 && choices.one_in(4) {
        let channels = parts(choices, d);
        let (b, l) = (x.shape()[0], x.shape()[2]);
        let mut output = |i: usize| {
            let n = channels.get(i);
            n.map(|&n| desc(choices, style, dtype, &[b, n, l], false)).transpose()
        };
        spec.y = output(0)?.unwrap_or(spec.y);
        (spec.y2, spec.y3) = (output(1)?, output(2)?);
    }
    if choices.one_in(4) {
        spec.norm = Some(any_heads(choices, spec.outputs()));
    }
    let index = |choices: &mut Choices<'_>, shape: &[usize]| {
        let dtype = choices.of(&[DType::I32, DType::I64]);
        desc(choices, style, dtype, shape, false)
    };
    if packed {
        spec.query_start_loc = Some(index(choices, &[sequences + 1])?);
    }
    if indexed {
        let shape = [sequences, blocks];
        spec.conv_state_indices = Some(index(choices, &shape[..1 + usize::from(table)])?);
        spec.null_index = choices.of(&[None, Some(0), Some(-1), Some(3)]);
    }
    if choices.one_in(2) {
        spec.has_initial_state = Some(desc(choices, style, DType::U8, &[sequences], false)?);
    }
    if drafts {
        spec.num_accepted_tokens = Some(index(choices, &[sequences])?);
    }
    let [initial, last, ends] = [(); 3].map(|()| table && choices.one_in(2));
    let ends = ends && !trees;
    if initial {
        spec.initial_block = Some(index(choices, &[sequences])?);
    }
    if last || ends {
        spec.last_block = Some(index(choices, &[sequences])?);
    }
    if ends {
        spec.first_block = Some(index(choices, &[sequences])?);
        spec.tokens_before = Some(index(choices, &[sequences])?);
        spec.block_size = choices.of(&[1, 3, 16, 64]);
    }
    let least = if packed { 0 } else { l };
    if windows {
        let shape =
            [sequences + choices.size(3), least + choices.size(9), d, width - 1 + choices.below(3)];
        spec.intermediate_windows = Some(desc(choices, style, dtype, &shape, false)?);
        if choices.one_in(2) {
            spec.intermediate_indices = Some(index(choices, &[sequences])?);
        }
    }
    if trees {
        let shape = [sequences, least + choices.size(9)];
        spec.next_token = Some(index(choices, &shape)?);
        spec.next_sibling = Some(index(choices, &shape)?);
        if choices.one_in(2) {
            let dtype = choices.of(&[DType::I32, DType::I64]);
            spec.parent_token = Some(desc(choices, style, dtype, &shape, false)?);
        }
    }
    Ok(spec)
}

/// One value that breaks a rule; false if there is none to break.
fn spoil(
    choices: &mut Choices<'_>,
    spec: &CausalConv1dServingSpec,
    sizes: &Sizes,
    values: &mut IndexValues,
) -> bool {
    // Of a sequence with tokens, and that is none for padding.
    let Some(i) = (0..sizes.sequences).find(|&i| {
        let tokens = match spec.query_start_loc {
            Some(_) => values.query_start_loc[i + 1] - values.query_start_loc[i],
            None => sizes.problem.l as f64,
        };
        let columns = &values.conv_state_indices[i * sizes.blocks..][..sizes.blocks];
        let null = spec.null_index.map(|null| null as f64);
        let is_null = |&state: &f64| state < 0.0 || Some(state) == null;
        tokens > 0.0 && !(spec.conv_state_indices.is_some() && columns.iter().any(is_null))
    }) else {
        return false;
    };
    let blocks = sizes.blocks as f64;
    match choices.below(9) {
        0 if spec.query_start_loc.is_some() => {
            values.query_start_loc[i + 1] = choices.of(&[-1.0, sizes.problem.l as f64 + 1.0]);
        }
        1 if spec.conv_state_indices.is_some() => {
            for column in 0..sizes.blocks {
                values.conv_state_indices[i * sizes.blocks + column] =
                    (sizes.pool + choices.below(3) + 4) as f64;
            }
        }
        2 if spec.num_accepted_tokens.is_some() => {
            values.num_accepted_tokens[i] =
                choices.of(&[-1.0, 0.0, sizes.most_accepted() as f64 + 1.0]);
        }
        3 if spec.initial_block.is_some() => values.initial_block[i] = choices.of(&[-1.0, blocks]),
        4 if spec.last_block.is_some() => values.last_block[i] = choices.of(&[-1.0, blocks]),
        5 if spec.first_block.is_some() => {
            values.first_block[i] = choices.of(&[-1.0, values.last_block[i] + 1.0]);
        }
        6 if spec.first_block.is_some() => values.tokens_before[i] = -1.0,
        7 if spec.intermediate_indices.is_some() => {
            values.intermediate_indices[i] = choices.of(&[-1.0, sizes.slots as f64]);
        }
        8 if let Some(next) = &spec.next_token => {
            // Token 0 is no child, and no token is its own.
            let links = match choices.one_in(2) {
                true => &mut values.next_token,
                false => &mut values.next_sibling,
            };
            links[i * next.shape()[1]] = choices.of(&[-2.0, 0.0, TREE as f64]);
        }
        _ => return false,
    }
    true
}

/// A random call: rows or packed sequences, states of a pool or a table, drafts, ends of blocks, in place.
pub(crate) fn run(choices: &mut Choices<'_>, trial: &mut Trial) -> Result<()> {
    let device = trial.device();
    let style = Style::random(choices);
    let spec = spec(choices, style)?;
    let sizes = spec.sizes()?;
    let options = options(choices, device);
    let numbers = Numbers::random(choices).before(spec.activation);
    let in_place = spec.y.layout == spec.x.layout && spec.next_token.is_none() && choices.one_in(2);
    let mut values = IndexValues::random(choices, &spec, &sizes);
    // Where there is nothing to compute no index is looked at.
    let looked_at = device == Device::Cpu && !sizes.problem.is_empty();
    let refused = looked_at && choices.one_in(12) && spoil(choices, &spec, &sizes, &mut values);
    trial.describe(format!(
        "causal_conv1d_serving of {numbers:?} numbers, {:?} threads, in place {in_place}: {spec:?}, {values:?}",
        options.threads
    ));
    let seed = choices.seed();
    // Sums of ReLU's argument are exact, so that kernels and oracle agree on its side of the kink.
    let exact = spec.activation.has_kinks();
    let leads: [usize; 9] = std::array::from_fn(|_| style.lead(choices));
    let hold =
        |i: usize, desc: TensorDesc, values: &[f64]| Held::at(desc, values, leads[i], device);
    let [x, states] =
        [(0, &spec.x), (1, &spec.conv_states)].map(|(i, desc)| numbers.data(seed + i, desc, exact));
    let windows =
        spec.intermediate_windows.as_ref().map(|desc| numbers.data(seed + 4, desc, exact));
    let parameters = |i: u64, desc: TensorDesc| Numbers::parameters(seed + i, &desc, exact);
    let make = || -> Result<ServingSample> {
        Ok(ServingSample {
            inputs: values.inputs(&spec, device, |name, desc| match name {
                "x" => hold(0, desc, &x),
                "weight" => hold(1, desc, &parameters(2, desc)),
                _ => hold(2, desc, &parameters(3, desc)),
            })?,
            conv_states: hold(3, spec.conv_states, &states)?,
            y: if in_place { None } else { Some(hold(4, spec.y, &[])?) },
            further: ServingSample::further(&spec, [leads[7], leads[8]], device)?,
            intermediate_windows: spec
                .intermediate_windows
                .zip(windows.as_ref())
                .map(|(desc, values)| hold(5, desc, values))
                .transpose()?,
            parent_token: ServingSample::parents(&spec, leads[6], device)?,
        })
    };
    let direct = CausalConv1dConfiguration::new(CausalConv1dAlgorithm::Direct);
    for lane in trial.lanes() {
        let plan = CausalConv1dServingPlan::on_isa(&spec, &direct, &options, lane.isa)?;
        let mut sample = make()?;
        if refused {
            let bits = |held: &Held| -> Result<Vec<u64>> {
                Ok(held.values()?.into_iter().map(f64::to_bits).collect())
            };
            let before = bits(&sample.conv_states)?;
            trial.expect_error("bad indices", sample.run(&plan), &["Index"]);
            if bits(&sample.conv_states)? != before {
                trial.fail("states were written before indices were refused");
            }
            continue;
        }
        let checks = sample.checked(&plan)?;
        trial.check(lane, "direct", checks);
        trial.result(lane, "y", sample.output())?;
        for output in sample.further.iter().flatten() {
            trial.result(lane, "an output", output)?;
        }
        trial.result(lane, "conv_states", &sample.conv_states)?;
        if let Some(windows) = &sample.intermediate_windows {
            trial.result(lane, "intermediate_windows", windows)?;
        }
        if let Some(parents) = &sample.parent_token {
            trial.result(lane, "parent_token", parents)?;
        }
    }
    Ok(())
}
