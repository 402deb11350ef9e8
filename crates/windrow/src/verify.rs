//! Comparison of results with the f64 oracles, and the lists of all test cases.
//!
//! The lists of operators for [`cases`] and [`random_case`] are here, because only this module, its submodule
//! `coverage` and `lib.rs` may import operators.

mod coverage;

pub use crate::verification::{
    Case, Check, Choices, Comparison, Outcome, random, random_tensor, ulp,
};
pub use coverage::{KernelLaunches, kernel_launches};

use crate::verification::choices::mix;
use crate::verification::random::{Run, trial};
use crate::{Device, causal_conv1d, conv2d, gelu};

/// The functions that make the cases, one for each operator and for conv3d. The cases of decoding and serving are those
/// of causal conv1d.
const CASES: [fn(Device) -> Vec<Case>; 4] = [
    gelu::verify::cases,
    causal_conv1d::verify::cases,
    conv2d::verify::cases,
    conv2d::conv3d::verify::cases,
];

/// Operators and their functions for random cases. Case `i` uses entry `i` modulo the length, so an operator that is
/// listed twice gets twice as many cases. Decoding and serving are parts of causal conv1d with names of their own, and
/// conv3d is one of conv2d.
const OPERATORS: [(&str, Run); 8] = [
    ("conv2d", conv2d::random::run),
    ("causal_conv1d", causal_conv1d::random::run),
    ("gelu", gelu::random::run),
    ("conv2d", conv2d::random::run),
    ("causal_conv1d", causal_conv1d::random::run),
    ("causal_conv1d_update", causal_conv1d::random::run_update),
    ("causal_conv1d_serving", causal_conv1d::serving::random::run),
    ("conv3d", conv2d::conv3d::random::run),
];

/// Every case of every operator that `device` can run.
pub fn cases(device: Device) -> Vec<Case> {
    CASES.iter().flat_map(|cases| cases(device)).collect()
}

/// The name of the operator that [`random_case`] tries for this case.
pub fn operator_of_case(case: u64) -> &'static str {
    OPERATORS[(case % OPERATORS.len() as u64) as usize].0
}

/// Makes case number `case` of the sequence of cases that `seed` defines. Runs it on `device` (on the CPU once with
/// each instruction set that the CPU has), and compares all results with the oracle. The same arguments make the same
/// case on every machine.
pub fn random_case(seed: u64, case: u64, device: Device) -> Outcome {
    let mut choices = Choices::from_seed(mix(mix(seed).wrapping_add(case)));
    let (_, run) = OPERATORS[(case % OPERATORS.len() as u64) as usize];
    trial(run, &mut choices, device)
}

/// Runs and checks one case of `operator` on the CPU. The random decisions come from `choices`, for example from the
/// bytes of a fuzzer.
///
/// # Panics
/// If a result is wrong, or if there is no operator of this name.
pub fn try_choices(operator: &str, mut choices: Choices<'_>) {
    let found = OPERATORS.iter().find(|(name, _)| *name == operator);
    let (_, run) = found.unwrap_or_else(|| panic!("no operator {operator}"));
    let outcome = trial(*run, &mut choices, Device::Cpu);
    assert!(outcome.failures.is_empty(), "{}\n{:#?}", outcome.description, outcome.failures);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Cases of a fixed seed, on every instruction set; `windrow verify --random` tries others.
    #[test]
    fn random_cases_pass() {
        for case in 0..240 {
            let outcome = random_case(20, case, Device::Cpu);
            let Outcome { description, failures, .. } = &outcome;
            assert!(failures.is_empty(), "case {case}: {description}\n{failures:#?}");
            if case % 40 == 0 {
                assert_eq!(outcome, random_case(20, case, Device::Cpu));
            }
        }
    }

    proptest! {
        /// Bytes can be shrunk: a failure comes as the smallest case of its kind.
        #[test]
        fn any_choices_pass(bytes in prop::collection::vec(any::<u8>(), 0..200), operator in 0..OPERATORS.len()) {
            let outcome = trial(OPERATORS[operator].1, &mut Choices::from_bytes(&bytes), Device::Cpu);
            let Outcome { description, failures, .. } = &outcome;
            prop_assert!(failures.is_empty(), "{description}\n{failures:#?}");
        }
    }

    /// All memory of a case (tensors, workspaces, packed filters) begins, and in a second run ends, at an inaccessible
    /// page. A kernel that reads or writes beyond ends this process; it says which case that was.
    #[cfg(target_os = "linux")]
    #[test]
    fn random_cases_stay_inside_of_their_memory() {
        use crate::buffer::guarded::{Side, guard, report_faults};
        for case in 0..240 {
            for side in [Side::Start, Side::End] {
                report_faults(case, side);
                let outcome = guard(side, || random_case(21, case, Device::Cpu));
                let Outcome { description, failures, .. } = &outcome;
                assert!(failures.is_empty(), "case {case}: {description}\n{failures:#?}");
            }
        }
    }

    /// Does nothing without a GPU.
    #[test]
    fn random_cases_pass_on_cuda() {
        if !crate::cuda::devices().is_ok_and(|d| !d.is_empty()) {
            return;
        }
        let failed: Vec<_> = (0..600)
            .map(|case| (case, random_case(20, case, Device::Cuda(0))))
            .filter(|(_, outcome)| !outcome.failures.is_empty())
            .collect();
        assert!(failed.is_empty(), "{failed:#?}");
    }

    /// Does nothing on a machine without CUDA.
    #[test]
    fn every_case_passes_on_the_first_cuda_device() {
        if crate::cuda::devices().map_or(0, |d| d.len()) == 0 {
            return;
        }
        let mut failures = Vec::new();
        let cases = cases(Device::Cuda(0));
        for case in &cases {
            match (case.run)() {
                Ok(checks) => {
                    failures.extend(
                        checks
                            .into_iter()
                            .filter(|c| !c.comparison.passed())
                            .map(|c| format!("{case:?} {}: {}", c.what, c.comparison)),
                    );
                }
                Err(error) => failures.push(format!("{case:?}: {error}")),
            }
        }
        assert!(
            failures.is_empty(),
            "{} of {}:\n{}",
            failures.len(),
            cases.len(),
            failures.join("\n")
        );
    }
}
