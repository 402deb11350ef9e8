//! `windrow verify --kernels`: cases that launch every kernel, first of all.

use super::places;
use std::collections::HashMap;
use windrow::Device;
use windrow::verify::{self, Case};

/// Cases with more elements come last.
const LARGE: usize = 1 << 20;

/// Puts the cases of `cover.txt` first, of which it gives the number. Of the others, kinds (algorithm, element type and
/// layout) take turns, and those of a kind are mixed: neighbours among them mostly launch the same kernels.
pub(super) fn order(cases: &mut Vec<Case>, device: Device) -> usize {
    let listed: HashMap<_, _> = listed(device).zip(0..).collect();
    let places = places(cases);
    let mut ordered: Vec<_> = places
        .into_iter()
        .zip(cases.drain(..))
        .map(|(place, case)| {
            let line = listed.get(&format!("{case:?}")).copied();
            // Multiples of the golden ratio's fraction: each falls into the widest gap between those before.
            let mixed = (place as u32).wrapping_mul(0x9e37_79b9);
            ((line.unwrap_or(u32::MAX), case.elements > LARGE, mixed), case)
        })
        .collect();
    ordered.sort_by_key(|(key, _)| *key);
    let count = ordered.iter().take_while(|(key, _)| key.0 < u32::MAX).count();
    cases.extend(ordered.into_iter().map(|(_, case)| case));
    count
}

/// Cases as [`Case`] prints them.
fn listed(device: Device) -> impl Iterator<Item = String> {
    let (common, cuda) =
        include_str!("cover.txt").split_once("# On CUDA these too:").expect("two parts");
    let cuda = if matches!(device, Device::Cuda(_)) { cuda } else { "" };
    let lines = common.lines().chain(cuda.lines());
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).flat_map(|line| {
        let (before, rest) = line.split_once('{').unwrap_or((line, "}"));
        let (types, after) = rest.split_once('}').unwrap_or(("", rest));
        types.split(',').map(move |dtype| format!("{before}{dtype}{after}"))
    })
}

/// Whether one of the kernels that the operator's cases may launch was not launched so far.
pub(super) fn has_open(device: Device, op: &str) -> bool {
    let launches = verify::kernel_launches(device).unwrap_or_default();
    let mut missed = launches.iter().filter(|k| k.for_device && k.listed && k.launches == 0);
    missed.any(|k| k.operator == Some(op))
}

#[cfg(test)]
mod tests {
    use super::*;
    use windrow::DType;

    fn case(layout: &str, name: &str) -> Case {
        Case::new("gelu", "f32", DType::F32, layout, name, || Ok(Vec::new()))
    }

    #[test]
    fn kinds_take_turns_and_their_cases_are_mixed() {
        let mut cases: Vec<_> = ["a", "b", "c"].map(|name| case("contiguous", name)).into();
        cases[0].elements = LARGE + 1;
        cases.push(case("strided", "d"));
        cases.push(case("contiguous", "[130, 517] none"));
        assert_eq!(order(&mut cases, Device::Hip(0)), 1);
        let names: Vec<_> = cases.iter().map(|c| c.name.as_str()).collect();
        assert_eq!(names, ["[130, 517] none", "d", "c", "b", "a"]);
    }

    /// Cases are renamed. Without a device conv2d has the CPU's algorithms and accuracy only.
    #[test]
    fn every_line_is_a_case() {
        let plain = |line: &str| {
            let (op, rest) = line.split_once(' ').unwrap();
            let (_, rest) = rest.split_once(' ').unwrap();
            let (rest, _parameters) = rest.split_once(" tiles=").unwrap_or((rest, ""));
            format!("{op} {}", rest.replace(") half ", ") fp32 "))
        };
        let all = [Device::Hip(0), Device::Cpu].into_iter().flat_map(verify::cases);
        let all: Vec<_> = all.map(|case| plain(&format!("{case:?}"))).collect();
        for line in listed(Device::Cuda(0)) {
            assert!(all.contains(&plain(&line)), "{line}");
        }
    }
}
