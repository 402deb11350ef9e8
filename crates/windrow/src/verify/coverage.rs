//! Kernel coverage: a list of all GPU kernels that plans can launch, with the number of launches of each.

use crate::gpu::{Feature, Gpu, KernelSpec};
use crate::{Device, Result};
use std::collections::BTreeMap;

/// The number of launches of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelLaunches {
    /// Source, entry point, and the macros that select its code.
    pub kernel: String,
    /// The operator whose cases launch the kernel; `None` if no case is known.
    pub operator: Option<&'static str>,
    /// Launches by this process.
    pub launches: u64,
    /// False for kernels of another architecture or backend.
    pub for_device: bool,
    /// False for a kernel that was launched but is not in the list of kernels. Then the list must be corrected.
    pub listed: bool,
}

impl KernelLaunches {
    /// An entry without an operator, for a kernel that is in the list and that this device can run.
    pub fn new(kernel: impl Into<String>, launches: u64) -> Self {
        let kernel = kernel.into();
        KernelLaunches { kernel, operator: None, launches, for_device: true, listed: true }
    }
}

/// Every kernel that a plan can launch, with the number of times that this process has launched it on `device`. An
/// integer as `device` is the index of a CUDA device.
///
/// # Errors
/// [`Error::NoDevice`](crate::Error::NoDevice), [`Error::Backend`](crate::Error::Backend).
pub fn kernel_launches(device: impl Into<Device>) -> Result<Vec<KernelLaunches>> {
    let gpu = Gpu::get(device.into())?;
    let features = FEATURES.into_iter().filter(|(feature, _)| gpu.has(*feature));
    let names = [&*gpu.info.architecture, gpu.device().backend()];
    let names: Vec<_> = names.into_iter().chain(features.map(|(_, name)| name)).collect();
    Ok(count(&gpu.launches(), &names))
}

/// Features that the list names.
const FEATURES: [(Feature, &str); 2] = [
    (Feature::WavefrontProducts, "wavefronts"),
    (Feature::WavefrontFloatProducts, "wavefronts_f32"),
];

/// The launches of each listed kernel, counted. `names` has the names of the device's architecture, backend and
/// features.
fn count(launched: &[(KernelSpec, u64)], names: &[&str]) -> Vec<KernelLaunches> {
    let listed = listed();
    let mut all: BTreeMap<String, KernelLaunches> = BTreeMap::new();
    for &Listed { ref kernel, operator, ref only_for, .. } in &listed {
        let for_device = only_for.is_empty() || only_for.iter().any(|only| names.contains(only));
        let entry = KernelLaunches { operator, for_device, ..KernelLaunches::new(kernel, 0) };
        all.insert(entry.kernel.clone(), entry);
    }
    for (spec, launches) in launched {
        let (file, entry) = spec.name();
        let of_entry = || listed.iter().filter(|l| l.is(file, entry));
        let agrees =
            |l: &&Listed| l.macros.iter().all(|(name, value)| value_of(spec, name) == value);
        // Lines of an entry point may name other macros: it counts for each whose values are its own.
        let mut kernels: Vec<String> =
            of_entry().filter(agrees).map(|l| l.kernel.clone()).collect();
        if kernels.is_empty() {
            let macros = of_entry().map(|l| &l.macros[..]).max_by_key(|macros| macros.len());
            let mut kernel = format!("{file} {entry}");
            for (name, _) in macros.unwrap_or_default() {
                kernel += &format!(" {name}={}", value_of(spec, name));
            }
            kernels.push(kernel);
        }
        for kernel in kernels {
            let unlisted = || KernelLaunches { listed: false, ..KernelLaunches::new(&kernel, 0) };
            all.entry(kernel.clone()).or_insert_with(unlisted).launches += launches;
        }
    }
    all.into_values().collect()
}

fn value_of<'a>(spec: &'a KernelSpec, name: &str) -> &'a str {
    spec.value_of(name).unwrap_or("0")
}

/// A line of the list.
#[derive(Debug)]
struct Listed {
    /// The kernel's name, without the devices that it is for.
    kernel: String,
    /// Names and values.
    macros: Vec<(String, String)>,
    operator: Option<&'static str>,
    /// The architectures, backends or features for which the kernel exists, of which one must match. If the list is
    /// empty, the kernel is for all devices.
    only_for: Vec<&'static str>,
}

impl Listed {
    fn is(&self, file: &str, entry: &str) -> bool {
        let mut words = self.kernel.split(' ');
        words.next() == Some(file) && words.next() == Some(entry)
    }
}

/// The list of all kernels, one for each variant.
fn listed() -> Vec<Listed> {
    let lines = include_str!("kernels.txt").lines().filter(|line| !line.starts_with('#'));
    lines.chain(crate::conv2d::gpu_kernels()).flat_map(expand).collect()
}

fn expand(line: &'static str) -> Vec<Listed> {
    let is_device = |word: &str| {
        let names = FEATURES.map(|(_, name)| name);
        word.starts_with("sm_") || ["cuda", "hip"].contains(&word) || names.contains(&word)
    };
    let (mut line, mut only_for) = (line, Vec::new());
    while let Some((rest, last)) = line.rsplit_once(' ').filter(|(_, last)| is_device(last)) {
        line = rest;
        only_for.push(last);
    }
    let (line, by) = line.split_once(" by:").unwrap_or((line, ""));
    let kernels = braces(line).into_iter().map(|kernel| {
        let macros = kernel.split(' ').filter_map(|word| word.split_once('='));
        let macros = macros.map(|(name, value)| (name.into(), value.into())).collect();
        let of = |name: &&str| by == *name || kernel.contains(name);
        let operators = super::OPERATORS.map(|(name, _)| name);
        let operator = operators.into_iter().filter(of).max_by_key(|name| name.len());
        Listed { kernel, macros, operator, only_for: only_for.clone() }
    });
    kernels.collect()
}

/// `a{b,c}d` as `abd` and `acd`, for each pair of braces.
fn braces(text: &str) -> Vec<String> {
    let Some((before, rest)) = text.split_once('{') else { return vec![text.to_owned()] };
    let Some((choices, after)) = rest.split_once('}') else { return vec![text.to_owned()] };
    let after = braces(after);
    choices.split(',').flat_map(|c| after.iter().map(move |a| format!("{before}{c}{a}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Source;
    use std::path::PathBuf;

    static SOURCE: Source = Source { name: "channel_first.cu", text: "", includes: &[] };
    static SERVING: Source = Source { name: "serving.cu", text: "", includes: &[] };

    #[test]
    fn launches_are_counted_by_variant() {
        let entry = "causal_conv1d_channel_first_f32";
        let spec = |mask: u32, width: u32| {
            KernelSpec::new(&SOURCE, entry).define("MASK", mask).define("WIDTH", width)
        };
        let launched = [(spec(1, 3), 2), (spec(1, 4), 5), (KernelSpec::new(&SOURCE, "other"), 1)];
        let counted = count(&launched, &["sm_100", "cuda"]);
        let of = |kernel: &str| counted.iter().find(|k| k.kernel == kernel).unwrap();
        let masked = of(&format!("channel_first.cu {entry} MASK=1"));
        assert_eq!((masked.launches, masked.for_device, masked.listed), (7, true, true));
        assert_eq!(of(&format!("channel_first.cu {entry} MASK=0")).launches, 0);
        assert!(!of("channel_first.cu other").listed);
        let hopper = of("backward_rows_sm90.cu causal_conv1d_backward_rows_f16");
        assert!(!hopper.for_device && hopper.launches == 0);
        let product = "block_product.cu block_product_f32";
        assert_eq!(
            (of(product).operator, hopper.operator),
            (Some("conv2d"), Some("causal_conv1d"))
        );
        assert!(!of(product).for_device);
        let counted = count(&launched, &["gfx942", "hip"]);
        assert!(counted.iter().any(|k| k.kernel == product && k.for_device));
        let few = "few_taps.cu conv2d_few_taps_f32 PRODUCTS=1 STORE=0";
        for (names, known) in [
            (&["sm_80", "cuda"][..], true),
            (&["gfx1100", "hip", "wavefronts"], false),
            (&["gfx942", "hip", "wavefronts", "wavefronts_f32"], true),
        ] {
            let counted = count(&[], names);
            assert_eq!(counted.iter().find(|k| k.kernel == few).unwrap().for_device, known);
        }
    }

    #[test]
    fn lines_of_an_entry_point_may_name_other_macros() {
        let spec = |vector: u32, along: u32| {
            let spec = KernelSpec::new(&SERVING, "causal_conv1d_serving_f32");
            let spec = spec.define("VECTOR", vector).define("ALONG_CHANNELS", along);
            (spec.define("AHEAD", 4).define("WINDOWS", 0), 1)
        };
        let counted = count(&[spec(1, 0), spec(2, 0), spec(2, 1), spec(3, 1)], &["cuda"]);
        let launched: Vec<_> = counted.iter().filter(|k| k.launches > 0).collect();
        let names = launched.iter().map(|k| (k.kernel.rsplit_once("f32 ").unwrap().1, k.listed));
        let listed = [
            "VECTOR=1 AHEAD=4 WINDOWS=0",
            "VECTOR=2 ALONG_CHANNELS=0 AHEAD=4 WINDOWS=0",
            "VECTOR=2 ALONG_CHANNELS=1 AHEAD=4 WINDOWS=0",
        ];
        let mut want = listed.map(|name| (name, true)).to_vec();
        want.push(("VECTOR=3 ALONG_CHANNELS=1 AHEAD=4 WINDOWS=0", false));
        assert_eq!(names.collect::<Vec<_>>(), want);
    }

    /// A new file must be listed, in whatever folder it is.
    #[test]
    fn every_file_of_kernels_is_listed() {
        let listed = listed();
        let mut folders = vec![PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let file = path.file_name().unwrap().to_str().unwrap();
                // What measures the speed of memory is no kernel of a plan.
                if file.ends_with(".cu") && file != "copy.cu" {
                    let start = format!("{file} ");
                    let mut of_file = listed.iter().filter(|l| l.kernel.starts_with(&start));
                    assert!(of_file.any(|l| l.operator.is_some()), "{file}");
                }
                if path.is_dir() {
                    folders.push(path);
                }
            }
        }
    }
}
