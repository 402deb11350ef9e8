//! `windrow tune --import`: a table from elsewhere taken over.

use crate::failure::Failure;
use crate::files::{read_text, shown};
use crate::print;
use serde_json::Value;
use std::path::Path;
use windrow::{CausalConv1dConfiguration, Conv2dConfiguration, GeluConfiguration, tuning};

pub(super) fn run(path: &Path) -> Result<(), Failure> {
    let table = read_text(path)?;
    let count = tuning::import(&table)?;
    for (problem, configuration) in unknown(&table) {
        print::note(format!("{problem}: `{configuration}` is no configuration of this version"));
    }
    print::summary(false, format_args!("{}: {count} entries taken over\n", shown(path)))
}

/// Problems and their configurations of a table that no plan of this version can take.
fn unknown(table: &str) -> Vec<(String, String)> {
    let table: Value = serde_json::from_str(table).unwrap_or_default();
    let entries = table["entries"].as_object().into_iter().flatten();
    let configurations = entries.filter_map(|(problem, entry)| {
        Some((problem.clone(), entry["configuration"].as_str()?.to_owned()))
    });
    configurations.filter(|(problem, configuration)| !is_known(problem, configuration)).collect()
}

fn is_known(problem: &str, configuration: &str) -> bool {
    match problem.split(' ').next() {
        Some("gelu") => configuration.parse::<GeluConfiguration>().is_ok(),
        Some("causal_conv1d") => configuration.parse::<CausalConv1dConfiguration>().is_ok(),
        Some("conv2d") => configuration.parse::<Conv2dConfiguration>().is_ok(),
        _ => false,
    }
}
