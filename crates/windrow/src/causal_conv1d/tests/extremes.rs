//! Threads without work, and indices that another thread changes while they are used.

use super::*;
use crate::causal_conv1d::cpu::shared::{Operand, Parameters};
use crate::causal_conv1d::sequences::{Indices, Run, Sequences, Source};
use crate::causal_conv1d::update::{Operands, Update};

/// A thousand threads need no more scratch memory than there are products to compute at once.
#[test]
fn threads_without_work_have_no_scratch_memory() {
    let desc = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
    for weight in [desc(&[40, 4]), desc(&[40, 40, 4])] {
        let spec = CausalConv1dSpec::new(desc(&[2, 40, 100]), weight).unwrap();
        for algorithm in CausalConv1dPlan::algorithms(&spec, Device::Cpu) {
            let plan = CausalConv1dPlan::with_algorithm(&spec, algorithm, &options(1000)).unwrap();
            let bytes = plan.workspace_bytes();
            assert!(bytes <= 16 << 20, "{bytes} bytes: {}", plan.explain());
        }
    }
}

/// Entries that change while a run reads them.
struct Changing(Vec<i32>);

impl Changing {
    fn view(&mut self, shape: &[usize]) -> (TensorRef<'static>, *mut i32) {
        let entries = self.0.as_mut_ptr();
        let desc = TensorDesc::contiguous(DType::I32, shape).unwrap();
        // SAFETY: the vector has these elements and stays as long as the test that has it; what changes them is the same
        // thread, by the pointer that the view is made of.
        (unsafe { TensorRef::from_raw(entries.cast(), desc, Device::Cpu) }, entries)
    }
}

const WILD: [i32; 6] = [i32::MAX, i32::MIN, -1, 9, 1000, 0];

/// Whatever boundaries and numbers become after the check: no token and no state outside of the tensors is named.
#[test]
fn boundaries_that_change_stay_in_range() {
    let (l, history, sequences) = (8, 3, 3);
    for &wild in &WILD {
        for place in 0..=sequences {
            let mut memory = Changing(vec![0, 2, 5, 8]);
            let (view, entries) = memory.view(&[sequences + 1]);
            let boundaries = Sequences::new(l, None, Some(view)).unwrap();
            // SAFETY: an element of the vector.
            unsafe { entries.add(place).write(wild) };
            stays_inside(&boundaries, (1, l), history, sequences);
        }
        for place in 0..2 * l {
            let mut memory = Changing([[0; 3].as_slice(), &[1; 5], &[-1; 2], &[7; 6]].concat());
            let (view, entries) = memory.view(&[2, l]);
            let numbers = Sequences::new(l, Some(view), None).unwrap();
            // SAFETY: an element of the vector.
            unsafe { entries.add(place).write(wild) };
            stays_inside(&numbers, (2, l), history, 2);
        }
    }
}

fn stays_inside(of: &Sequences<'_>, (b, l): (usize, usize), history: usize, states: usize) {
    let check = |b: usize, run: &Run| {
        assert!(run.start <= run.end && run.end <= l, "{of:?}: {run:?}");
        for p in -(history as isize)..(l + history) as isize {
            match of.source(b, run, p, history) {
                Source::Token(t) => assert!(t < l, "{of:?}: token {t}"),
                Source::State(row, j) => {
                    assert!(row < states && j < history + l, "{of:?}: state {row}, {j}")
                }
                Source::Nothing => {}
            }
            if let Some((row, j)) = of.final_entry(b, run, p, history) {
                assert!(row < states && j < history, "{of:?}: final state {row}, {j}");
            }
        }
    };
    for b in 0..b {
        (0..l).for_each(|t| check(b, &of.run(b, t, history, l)));
    }
    for row in 0..of.state_rows(b) {
        for last in [false, true] {
            let (b, run) = of.state_run(row, last);
            check(b, &run);
        }
    }
}

/// A row whose index no longer names a state counts as padding.
#[test]
fn states_that_are_chosen_anew_stay_in_range() {
    let (b, d, pool, width) = (2, 5, 3, 4);
    for isa in Isa::available() {
        for &wild in &WILD {
            let mut memory = Changing(vec![2, wild]);
            let (view, _) = memory.view(&[b]);
            let tensor = |shape: &[usize]| {
                let numbers: Vec<f32> =
                    (0..shape.iter().product()).map(|i: usize| 1.0 + i as f32).collect();
                Tensor::from_vec(numbers, shape).unwrap()
            };
            let (x, weight) = (tensor(&[b, d, 1]), tensor(&[d, width]));
            let (mut y, mut states) = (tensor(&[b, d, 1]), tensor(&[pool, d, width - 1]));
            let before = states.to_vec::<f32>().unwrap();
            let spec =
                CausalConv1dUpdateSpec::new(*x.desc(), *states.desc(), *weight.desc()).unwrap();
            let problem = spec.with_conv_state_indices(*view.desc()).problem().unwrap();
            let update = Update::new(problem, Activation::Identity, width - 1, 1).unwrap();
            let mut workspace = Workspace::new(Device::Cpu, update.workspace_bytes()).unwrap();
            let operands = Operands::<f32> {
                x: Operand::input(&x.as_ref()),
                y: Operand::output(&mut y.as_mut()),
                conv_state: Operand::output(&mut states.as_mut()),
                parameters: Parameters { weight: weight.as_ref(), bias: None },
                cache_seqlens: None,
                conv_state_indices: Some((Indices::new(view), pool)),
            };
            let scratch = workspace.take(update.workspace_bytes()).unwrap();
            // SAFETY: sizes are the problem's; that indices are out of range is what is tried.
            unsafe { update.run(isa, &operands, scratch.as_mut_ptr()) };
            let (y, states) = (y.to_vec::<f32>().unwrap(), states.to_vec::<f32>().unwrap());
            let of_states = d * (width - 1);
            let is_changed = |state: usize| {
                states[state * of_states..][..of_states] != before[state * of_states..][..of_states]
            };
            let chosen = usize::try_from(wild).ok().filter(|state| *state < pool);
            assert_eq!(y[d..].iter().all(|&y| y == 0.0), chosen.is_none(), "{wild}");
            for state in 0..pool {
                assert_eq!(
                    is_changed(state),
                    state == 2 || Some(state) == chosen,
                    "{wild}: state {state}"
                );
            }
        }
    }
}
