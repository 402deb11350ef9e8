//! `VarlenCausalConvWithState`.

use crate::operator::{Kernel, Outcome};
use crate::plans::Plans;
use crate::tensors::{Attributes, Tensors, invalid, seen_as};
use std::ffi::CStr;
use windrow::{
    Activation, CausalConv1dArgs, CausalConv1dOutputs, CausalConv1dPlan, CausalConv1dSpec, DType,
    Device, Layout, TensorDesc, TensorMut, TensorRef, Workspace,
};

/// The largest number of tokens of a sequence that an update can have.
const MOST: i64 = 8;

/// The operator `VarlenCausalConvWithState` as in ONNX Runtime 1.30 (`com.microsoft`): packed sequences [tokens, c],
/// weight [c, 1, k], boundaries [sequences + 1], bias `[c]`, the states before [sequences, c, (k - 1) * dilation] and
/// `capture_count` [sequences]. Gives the output, the states after, and `state_update` [sequences, capacity, c]: the
/// first tokens of each sequence, as many as `capture_count` says, then zeros.
///
/// `activation` may be any of Windrow's. Sequences may be empty.
pub(crate) struct VarlenCausalConvWithState {
    activation: Activation,
    dilation: usize,
    capacity: usize,
    plans: Plans<CausalConv1dSpec, CausalConv1dPlan>,
}

impl Kernel for VarlenCausalConvWithState {
    const NAME: &'static CStr = c"VarlenCausalConvWithState";
    const INPUTS: &'static [bool] = &[true, true, true, false, true, false];
    const INDICES: &'static [usize] = &[2, 5];
    const OUTPUTS: usize = 3;
    const OPTIONAL_OUTPUTS: usize = 1;

    fn new(attributes: &Attributes<'_>) -> Outcome<Self> {
        let activation = attributes.word(c"activation")?;
        let dilation = attributes.int(c"dilation", 1)?;
        let Some(dilation) = usize::try_from(dilation).ok().filter(|&n| n > 0) else {
            return Err(invalid(format!("`dilation` is {dilation}, expected at least 1")));
        };
        let capacity = attributes.int(c"state_update_capacity", 0)?;
        if !(0..=MOST).contains(&capacity) {
            return Err(invalid(format!(
                "`state_update_capacity` is {capacity}, expected 0 to {MOST}"
            )));
        }
        let capacity = capacity as usize;
        Ok(VarlenCausalConvWithState { activation, dilation, capacity, plans: Plans::new() })
    }

    fn compute(&self, tensors: &Tensors<'_>) -> Outcome<()> {
        let (x, weight, boundaries) = (tensors.input(0)?, tensors.input(1)?, tensors.input(2)?);
        let (bias, past) = (tensors.optional_input(3)?, tensors.input(4)?);
        let counts = tensors.optional_input(5)?;
        let &[tokens, channels] = x.shape() else {
            let shape = x.shape();
            return Err(invalid(format!(
                "`input` has shape {shape:?}, expected [tokens, channels]"
            )));
        };
        let &[d, 1, width] = weight.shape() else {
            let shape = weight.shape();
            return Err(invalid(format!(
                "`weight` has shape {shape:?}, expected [channels, 1, k]"
            )));
        };
        let weight = seen_as(weight, &[d, width])?;
        let layout = Layout::with_order(&[1, channels, tokens], &[0, 2, 1])?;
        let row = TensorDesc::new(x.dtype(), layout);
        // SAFETY: the same elements, with channels that are neighbours.
        let rows = unsafe { x.with_layout(row.layout) };
        let spec = CausalConv1dSpec::new(row, *weight.desc())?
            .with_activation(self.activation)
            .with_dilation(self.dilation)
            .with_cu_seqlens(*boundaries.desc())
            .with_bias(bias.map(|b| *b.desc()))
            .with_initial_states(*past.desc());
        let states = TensorDesc::contiguous(x.dtype(), &spec.states_shape()?)?;
        let spec = spec.with_output(row).with_final_states(states);
        let sequences = states.shape()[0];
        let update = self.update(tensors, counts, [sequences, channels], x.dtype())?;
        let plan = self.plans.get(spec, CausalConv1dPlan::new)?;
        let mut y = tensors.output(0, x.shape(), *x.desc())?;
        // SAFETY: the same elements of an exclusive view, with channels that are neighbours.
        let y = unsafe { TensorMut::from_raw(y.as_mut_ptr().cast(), row, Device::Cpu)? };
        let present = tensors.output(1, states.shape(), states)?;
        let args = CausalConv1dArgs::new(rows, weight)
            .with_bias(bias)
            .with_cu_seqlens(boundaries)
            .with_initial_states(past);
        let outputs = CausalConv1dOutputs::new(y).with_final_states(present);
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes())?;
        plan.run(&args, outputs, &mut workspace)?;
        // The run has checked the boundaries.
        if let Some((mut update, counts)) = update {
            self.write_update(&x, integers(&boundaries), counts, &mut update);
        }
        Ok(())
    }
}

impl VarlenCausalConvWithState {
    /// The output `state_update` and the counts of its tokens; `None` if the node does not have the output.
    fn update<'a>(
        &self,
        tensors: &'a Tensors<'_>,
        counts: Option<TensorRef<'a>>,
        [sequences, channels]: [usize; 2],
        dtype: DType,
    ) -> Outcome<Option<(TensorMut<'a>, &'a [i32])>> {
        let counts = match (counts, self.capacity) {
            (None, 0) => &[][..],
            (Some(counts), 1..) if counts.shape() == [sequences] => integers(&counts),
            (Some(counts), 1..) => {
                let shape = counts.shape();
                return Err(invalid(format!(
                    "`capture_count` has shape {shape:?}, expected [{sequences}]"
                )));
            }
            _ => {
                return Err(invalid(
                    "`capture_count` is expected if `state_update_capacity` is positive, and only then"
                        .into(),
                ));
            }
        };
        if !tensors.has_output(2)? {
            return Ok(None);
        }
        let desc = TensorDesc::contiguous(dtype, &[sequences, self.capacity, channels])?;
        Ok(Some((tensors.output(2, desc.shape(), desc)?, counts)))
    }

    /// Copies the first tokens of each sequence, and writes zeros behind them. `boundaries` are within `x`.
    fn write_update(
        &self,
        x: &TensorRef<'_>,
        boundaries: &[i32],
        counts: &[i32],
        update: &mut TensorMut<'_>,
    ) {
        let token = x.shape()[1] * x.dtype().size();
        let (from, to) = (x.as_ptr().cast::<u8>(), update.as_mut_ptr().cast::<u8>());
        for (i, (&count, range)) in counts.iter().zip(boundaries.windows(2)).enumerate() {
            let (first, len) = (range[0] as usize, (range[1] - range[0]) as usize);
            let count = (count.max(0) as usize).min(self.capacity).min(len);
            // SAFETY: the tokens are in x, and the update has `capacity` tokens for each sequence.
            unsafe {
                let to = to.add(i * self.capacity * token);
                to.copy_from_nonoverlapping(from.add(first * token), count * token);
                to.add(count * token).write_bytes(0, (self.capacity - count) * token);
            }
        }
    }
}

/// The values of a dense tensor of i32.
fn integers<'a>(view: &TensorRef<'a>) -> &'a [i32] {
    debug_assert_eq!(view.dtype(), DType::I32);
    // SAFETY: ONNX Runtime's tensors are dense, aligned, and stay as they are until the node has run.
    unsafe { std::slice::from_raw_parts(view.as_ptr().cast(), view.layout().len()) }
}
