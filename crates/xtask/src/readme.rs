//! The README's tables, made from the record that it names, so that no figure is typed by hand.
//!
//! A table stands between `<!-- NAME from RECORD -->` and `<!-- end -->`, where RECORD is a folder
//! of benchmarks/record.

use crate::record::RECORDS;
use crate::steps::{Result, root};
use crate::tables;
use serde_json::Value;
use std::fmt::Write;

const END: &str = "<!-- end -->";

pub(crate) fn write() -> Result {
    let path = root().join("README.md");
    let (_, new) = texts()?;
    std::fs::write(&path, new).map_err(|e| format!("{}: {e}", path.display()).into())
}

pub(crate) fn check() -> Result {
    let (old, new) = texts()?;
    if old == new {
        return Ok(());
    }
    Err("README.md: its tables are not those of the record; run `cargo xtask readme`".into())
}

/// The README as it is and as it should be.
fn texts() -> Result<(String, String)> {
    let old = read("README.md")?;
    let new = fill(&old, |name, record| match name {
        "speed" => tables::speed(&json(record, "bench")?),
        "accuracy" => tables::accuracy(&json(record, "verify")?),
        "peers" => tables::peers(&json(record, "cpu")?),
        "cuda-conv2d" => tables::cuda_conv2d(&json(record, "conv2d")?),
        "cuda-memory" => tables::cuda_memory(&json(record, "gelu-causal_conv1d")?),
        _ => Err(format!("README.md: no table `{name}`").into()),
    })?;
    Ok((old, new))
}

fn read(name: &str) -> Result<String> {
    std::fs::read_to_string(root().join(name)).map_err(|e| format!("{name}: {e}").into())
}

fn json(record: &str, file: &str) -> Result<Value> {
    let name = format!("{RECORDS}/{record}/{file}.json");
    serde_json::from_str(&read(&name)?).map_err(|e| format!("{name}: {e}").into())
}

/// Replaces what stands between the markers.
fn fill(text: &str, table: impl Fn(&str, &str) -> Result<String>) -> Result<String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("<!-- ") {
        let Some((marker, body)) = after.split_once(" -->\n") else { break };
        out += before;
        let _ = writeln!(out, "<!-- {marker} -->");
        rest = body;
        if let Some((name, record)) = marker.split_once(" from ") {
            let Some((_, after)) = body.split_once(END) else {
                return Err(format!("README.md: no `{END}` after `{marker}`").into());
            };
            out += &table(name, record)?;
            out += END;
            rest = after;
        }
    }
    Ok(out + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_filled_and_the_rest_stays() {
        let text = "a\n<!-- note -->\nb\n<!-- speed from r -->\nold\n<!-- end -->\nc";
        let filled = fill(text, |name, record| Ok(format!("{name} {record}\n"))).unwrap();
        assert_eq!(filled, "a\n<!-- note -->\nb\n<!-- speed from r -->\nspeed r\n<!-- end -->\nc");
        assert_eq!(fill(&filled, |name, record| Ok(format!("{name} {record}\n"))).unwrap(), filled);
        assert!(fill("<!-- speed from r -->\nold", |_, _| Ok(String::new())).is_err());
    }
}
