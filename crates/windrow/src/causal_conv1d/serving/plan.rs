//! Plans for serving, and their runs.

use super::comparison::Oracle;
use super::cpu::{Operands, Walk, Windows};
use super::entries::{Entry, Lookup};
use super::reference::{Memory, ServingReference};
use super::{
    CausalConv1dServingArgs, CausalConv1dServingOutputs, CausalConv1dServingSpec, Sizes, gpu,
};
use crate::causal_conv1d::CausalConv1dConfiguration;
use crate::causal_conv1d::cpu::shared::{Operand, Outputs, Parameters};
use crate::causal_conv1d::plan::OnlyMethod;
use crate::cpu::Isa;
use crate::dtype::with_element;
use crate::plan::{Backend, Operator, Plan, Setup, inputs};
use crate::{DType, Device, Result, TensorMut, Workspace};
use std::mem::MaybeUninit;

/// A [`CausalConv1dServingSpec`] that was checked and bound to a device.
///
/// ```
/// use windrow::{CausalConv1dServingArgs, CausalConv1dServingOutputs, CausalConv1dServingPlan};
/// use windrow::{CausalConv1dServingSpec, PlanOptions, TensorMut, TensorRef, Workspace};
///
/// // A sequence of two tokens behind state 2, and one of one token behind state 1; one channel, width 2.
/// let (x, mut y) = ([5.0f32, 6.0, 7.0], [0.0f32; 3]);
/// let weight = [10.0f32, 1.0];
/// let mut states = [0.0f32, 3.0, 4.0];
/// let args = CausalConv1dServingArgs::new(TensorRef::new(&x, &[1, 1, 3])?, TensorRef::new(&weight, &[1, 2])?)
///     .with_query_start_loc(TensorRef::new(&[0i32, 2, 3], &[3])?)
///     .with_conv_state_indices(TensorRef::new(&[2i32, 1], &[2])?);
/// let conv_states = TensorMut::new(&mut states, &[3, 1, 1])?;
///
/// let spec = CausalConv1dServingSpec::new(*args.x.desc(), *conv_states.desc(), *args.weight.desc())?
///     .with_query_start_loc(args.query_start_loc.map(|starts| *starts.desc()))
///     .with_conv_state_indices(args.conv_state_indices.map(|indices| *indices.desc()));
/// let plan = CausalConv1dServingPlan::new(&spec, &PlanOptions::default())?;
/// let mut workspace = Workspace::new(plan.device(), plan.workspace_bytes())?;
/// let outputs = CausalConv1dServingOutputs::new(conv_states, TensorMut::new(&mut y, &[1, 1, 3])?);
/// plan.run(&args, outputs, &mut workspace)?;
/// assert_eq!((y, states), ([45.0, 56.0, 37.0], [0.0, 7.0, 6.0]));
/// # Ok::<(), windrow::Error>(())
/// ```
pub type CausalConv1dServingPlan = Plan<CausalConv1dServing>;

/// The operator of a serving call, as a type parameter of [`Plan`].
#[derive(Clone, Copy, Debug)]
pub struct CausalConv1dServing;

impl Operator for CausalConv1dServing {
    const NAME: &'static str = "causal_conv1d_serving";
    inputs!(CausalConv1dServingSpec, CausalConv1dServingArgs: x, weight; ? bias, query_start_loc, conv_state_indices, has_initial_state, num_accepted_tokens, initial_block, last_block, first_block, tokens_before, intermediate_indices, next_token, next_sibling);
    type Spec = CausalConv1dServingSpec;
    type Problem = Sizes;
    type Configuration = CausalConv1dConfiguration;
    type Args<'a> = CausalConv1dServingArgs<'a>;
    type Cpu = Cpu;
    type Gpu = gpu::Serving;

    fn problem(spec: &CausalConv1dServingSpec) -> Result<Sizes> {
        spec.sizes()
    }
}

/// The engine on the CPU.
#[derive(Clone, Debug)]
pub struct Cpu {
    isa: Isa,
    walk: Walk,
    /// Bytes of an entry for each sequence, of the parent of each token of a tree, and of a bit for each state of the
    /// pool and each slot.
    entries_bytes: usize,
    parents_bytes: usize,
    seen_bytes: usize,
}

impl OnlyMethod<CausalConv1dServing> for Cpu {
    type Place = Isa;

    fn new(setup: &Setup<'_, CausalConv1dServing, Isa>) -> Result<Self> {
        let &Setup { spec, problem: sizes, place, .. } = setup;
        let walk = Walk::new(spec, *sizes, setup.threads())?;
        // If there is nothing to compute, sizes can be larger than any memory.
        let [sequences, pool, slots, tokens] = match sizes.problem.is_empty() {
            true => [0; 4],
            false => [sizes.sequences, sizes.pool, sizes.slots, sizes.problem.b * sizes.problem.l],
        };
        let entries_bytes = (sequences * size_of::<Entry>()).next_multiple_of(64);
        let parents = if spec.next_token.is_some() { tokens } else { 0 };
        let parents_bytes = (parents * size_of::<u16>()).next_multiple_of(64);
        let states = if spec.conv_state_indices.is_some() { pool } else { 0 };
        let slots = if spec.intermediate_indices.is_some() { slots } else { 0 };
        let seen_bytes = states.max(slots).div_ceil(8);
        Ok(Cpu { isa: place, walk, entries_bytes, parents_bytes, seen_bytes })
    }

    fn workspace_bytes(&self) -> usize {
        self.entries_bytes + self.parents_bytes + self.walk.workspace_bytes() + self.seen_bytes
    }

    fn explain(&self, _: &CausalConv1dServingPlan) -> String {
        format!(" on {}: {}", self.isa.name(), self.walk.explain())
    }
}

impl Cpu {
    /// Computes the outputs. The caller has checked the views, and that outputs share no memory with inputs or each
    /// other.
    fn run(
        &self,
        plan: &CausalConv1dServingPlan,
        args: &CausalConv1dServingArgs<'_>,
        outputs: &mut CausalConv1dServingOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let sizes = plan.problem;
        if sizes.problem.is_empty() {
            return Ok(());
        }
        let scratch = workspace.take(self.workspace_bytes())?;
        let (entries, scratch) = scratch.split_at_mut(self.entries_bytes);
        let (parents, scratch) = scratch.split_at_mut(self.parents_bytes);
        let (scratch, seen) = scratch.split_at_mut(self.walk.workspace_bytes());
        let entries = entries_in(entries, sizes.sequences);
        let lookup = Lookup::new(&plan.spec, sizes, args);
        // SAFETY: any bytes are a u16; a workspace begins at a multiple of 64.
        let (_, parents, _) = unsafe { parents.align_to_mut::<u16>() };
        let tokens = lookup.resolve(entries, seen, parents)?;
        let CausalConv1dServingOutputs {
            conv_states,
            y,
            intermediate_windows,
            parent_token,
            y2,
            y3,
        } = outputs;
        if let Some(to) = parent_token {
            write_parents(to, entries, parents, sizes.problem.l);
        }
        with_element!(plan.spec.x.dtype, T => {
            let operands = Operands::<T> {
                x: Operand::input(&args.x),
                in_place: is_in_place(args, y),
                outputs: Outputs::new(y, [y2, y3]),
                conv_states: Operand::output(conv_states),
                windows: intermediate_windows.as_mut().map(Windows::new),
                parents,
                parameters: Parameters { weight: args.weight, bias: args.bias },
                lookup,
                entries,
                tokens,
            };
            // SAFETY: views, aliasing, indices and the size of the workspace have been checked.
            unsafe { self.walk.run(self.isa, &operands, scratch.as_mut_ptr()) }
        });
        Ok(())
    }
}

/// Memory of a workspace, which begins at a multiple of 64, as entries.
fn entries_in(bytes: &mut [u8], sequences: usize) -> &mut [Entry] {
    const NONE: Entry = Entry { row: 0, start: 0, tokens: 0, states: None };
    // SAFETY: any bytes are an entry that is not initialised.
    let (_, entries, _) = unsafe { bytes.align_to_mut::<MaybeUninit<Entry>>() };
    let entries = &mut entries[..sequences];
    entries.iter_mut().for_each(|entry| _ = entry.write(NONE));
    // SAFETY: all have just been written.
    unsafe { std::slice::from_raw_parts_mut(entries.as_mut_ptr().cast(), sequences) }
}

/// Writes the parents of the tokens of each sequence that is no padding.
fn write_parents(to: &mut TensorMut<'_>, entries: &[Entry], parents: &[u16], l: usize) {
    let (dtype, layout, first) = (to.dtype(), *to.layout(), to.as_mut_ptr());
    for (i, entry) in entries.iter().enumerate().filter(|(_, entry)| entry.states.is_some()) {
        for (t, &parent) in parents[entry.tokens_of_x(l)].iter().enumerate() {
            let offset = layout.offset(&[i, t]);
            // SAFETY: an element of the tensor, which is i32 or i64: a sequence has no more tokens than it has columns.
            unsafe {
                if dtype == DType::I64 {
                    first.cast::<i64>().offset(offset).write(i64::from(parent));
                } else {
                    first.cast::<i32>().offset(offset).write(i32::from(parent));
                }
            }
        }
    }
}

fn is_in_place(args: &CausalConv1dServingArgs<'_>, y: &TensorMut<'_>) -> bool {
    y.as_ptr() == args.x.as_ptr() && y.layout() == args.x.layout()
}

impl OnlyMethod<CausalConv1dServing> for gpu::Serving {
    type Place = Device;

    fn new(setup: &Setup<'_, CausalConv1dServing, Device>) -> Result<Self> {
        gpu::Serving::new(setup.place, setup.spec, setup.problem)
    }

    fn explain(&self, plan: &CausalConv1dServingPlan) -> String {
        format!(" on {}: {}", plan.device(), gpu::Serving::explain(self))
    }
}

impl CausalConv1dServingPlan {
    /// Computes `y` and moves the states on; the tokens in them are exact copies. Without a tree or a split, `y` may be the same
    /// tensor as `x` (same address and layout). Otherwise outputs must not share memory with inputs or with each other.
    ///
    /// # Errors
    /// As [`CausalConv1dPlan::run`](crate::CausalConv1dPlan::run). [`Error::Index`](crate::Error::Index) is returned
    /// for an index that [`CausalConv1dServingSpec`] forbids, before anything is written. On a GPU it is about an
    /// earlier run on the same GPU. There a sequence with a wrong index counts as padding, and a state or slot that two
    /// sequences use is not noticed.
    pub fn run(
        &self,
        args: &CausalConv1dServingArgs<'_>,
        mut outputs: CausalConv1dServingOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let mut checks = self.check_run(args, workspace)?;
        let spec = &self.spec;
        let CausalConv1dServingOutputs {
            conv_states,
            y,
            intermediate_windows,
            parent_token,
            y2,
            y3,
        } = &outputs;
        checks.write("conv_states", Some(conv_states), Some(&spec.conv_states))?;
        let over = (is_in_place(args, y) && spec.next_token.is_none()).then_some("x");
        checks.write_over("y", Some(y), Some(&spec.y), over)?;
        let windows = intermediate_windows.as_ref();
        checks.write("intermediate_windows", windows, spec.intermediate_windows.as_ref())?;
        checks.write("parent_token", parent_token.as_ref(), spec.parent_token.as_ref())?;
        checks.write("y2", y2.as_ref(), spec.y2.as_ref())?;
        checks.write("y3", y3.as_ref(), spec.y3.as_ref())?;
        self.verified(
            &mut outputs,
            workspace,
            |outputs| Ok((ServingReference::new(spec, args)?, Memory::of(outputs)?)),
            |outputs, workspace| match &self.backend {
                Backend::Cpu(cpu) => cpu.run(self, args, outputs, workspace),
                Backend::Gpu(serving) => serving.run(args, outputs, workspace),
            },
            |outputs, (reference, memory)| {
                Oracle::of(&reference, memory, spec.x.dtype)?.checks(outputs)
            },
        )
    }
}
