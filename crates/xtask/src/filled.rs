//! The parts of pages that come from records: tables and pictures, so that no figure is typed by hand.
//!
//! A table or a picture stands between `<!-- NAME from RECORD -->` and `<!-- end -->`, where RECORD is one or more
//! folders of benchmarks/record, divided by commas. `NAME of OPERATOR` is the part of a table for one operator,
//! `models of MODES` that of some modes of the networks, `compiled of MODE` those that torch.compile took.

use crate::pages;
use crate::record::RECORDS;
use crate::steps::{Result, root};
use crate::{
    accuracy_picture, networks_cpu_table, published_table, speed_picture, tables, ways_picture,
};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;

const END: &str = "<!-- end -->";

/// The folder of pictures, below the root.
const PICTURES: &str = "docs/pictures";

/// Writes the pages and pictures that differ from their records.
pub(crate) fn write() -> Result {
    for (name, new) in differing()? {
        let path = root().join(&name);
        fs::create_dir_all(path.parent().unwrap_or(root()))?;
        fs::write(&path, new).map_err(|e| format!("{name}: {e}"))?;
        println!("{name}");
    }
    Ok(())
}

/// Fails if a page or a picture is not what its records say.
pub(crate) fn check() -> Result {
    let names: Vec<_> = differing()?.into_keys().collect();
    if names.is_empty() {
        return Ok(());
    }
    Err(format!("{}: not as in the records; run `cargo xtask readme`", names.join(", ")).into())
}

/// Files that are not as they should be, with what should be in them.
fn differing() -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    for page in pages::all()? {
        let up = "../".repeat(page.name.matches('/').count());
        let mut pictures = Vec::new();
        let new = fill(&page.name, &page.text, |name, records| {
            let filled = content(name, records).map_err(|e| format!("{}: {e}", page.name))?;
            let Filled::Picture { file, alt, svg } = filled else { return Ok(filled.text()) };
            let file = format!("{PICTURES}/{file}.svg");
            let line = format!("![{alt}]({up}{file})\n");
            pictures.push((file, svg));
            Ok(line)
        })?;
        pictures.push((page.name, new));
        files.extend(pictures);
    }
    files.retain(|name, new| fs::read_to_string(root().join(name)).ok().as_ref() != Some(new));
    Ok(files)
}

/// The content between two markers.
enum Filled {
    Table(String),
    Picture { file: &'static str, alt: &'static str, svg: String },
}

impl Filled {
    fn text(self) -> String {
        match self {
            Self::Table(text) => text,
            Self::Picture { svg, .. } => svg,
        }
    }
}

/// The table or picture of that name from these records.
fn content(name: &str, records: &[&str]) -> Result<Filled> {
    let [record, others @ ..] = records else { return Err("a marker without a record".into()) };
    let second = others.first().copied().unwrap_or(record);
    let last = others.last().copied().unwrap_or(record);
    let (name, op) = name.split_once(" of ").unwrap_or((name, ""));
    let table = match name {
        "speed" => tables::speed(&json(record, "bench")?),
        "accuracy" => tables::accuracy(&json(record, "verify")?),
        "peers" => tables::peers(&json(record, "cpu")?, op),
        "cuda-conv2d" => tables::cuda_conv2d(&json(record, "conv2d")?),
        "cuda-memory" => tables::cuda_memory(&json(record, "gelu-causal_conv1d")?, op),
        "amd" => tables::amd(&json(record, "verify")?),
        "models" => tables::models(&json(record, "models")?, op),
        "compiled" => tables::compiled(&json(record, "models")?, op),
        "networks-cpu" => networks_cpu_table::tables(&json(record, "networks_cpu")?),
        "published" => published_table::table(&json(record, "published")?),
        "model-errors" => tables::model_errors(&json(record, "models")?),
        "speed-picture" => {
            let conv2d = json(second, "conv2d")?;
            let memory = json(second, "gelu-causal_conv1d")?;
            let models = json(last, "models")?;
            let svg = speed_picture::svg(&json(record, "cpu")?, &conv2d, &memory, &models)?;
            return Ok(Filled::Picture { file: "speed", alt: speed_picture::ALT, svg });
        }
        "ways-picture" => {
            let svg = ways_picture::svg(&json(record, "models")?, &json(second, "networks_cpu")?)?;
            return Ok(Filled::Picture { file: "ways", alt: ways_picture::ALT, svg });
        }
        "accuracy-picture" => {
            let (verify, models) = (json(second, "verify")?, json(last, "models")?);
            let svg = accuracy_picture::svg(&json(record, "verify")?, &verify, &models)?;
            return Ok(Filled::Picture { file: "accuracy", alt: accuracy_picture::ALT, svg });
        }
        _ => return Err(format!("no table or picture `{name}`").into()),
    };
    Ok(Filled::Table(table?))
}

fn json(record: &str, file: &str) -> Result<Value> {
    let name = format!("{RECORDS}/{record}/{file}.json");
    let text = fs::read_to_string(root().join(&name)).map_err(|e| format!("{name}: {e}"))?;
    serde_json::from_str(&text).map_err(|e| format!("{name}: {e}").into())
}

/// Replaces what stands between the markers of a page.
fn fill(
    page: &str,
    text: &str,
    mut content: impl FnMut(&str, &[&str]) -> Result<String>,
) -> Result<String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("<!-- ") {
        let Some((marker, body)) = after.split_once(" -->\n") else { break };
        out += before;
        let _ = writeln!(out, "<!-- {marker} -->");
        rest = body;
        if let Some((name, records)) = marker.split_once(" from ") {
            let Some((_, after)) = body.split_once(END) else {
                return Err(format!("{page}: no `{END}` after `{marker}`").into());
            };
            out += &content(name, &records.split(", ").collect::<Vec<_>>())?;
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
        let text = "a\n<!-- note -->\nb\n<!-- speed from r, s -->\nold\n<!-- end -->\nc";
        let table = |name: &str, records: &[&str]| Ok(format!("{name} {}\n", records.join("+")));
        let filled = fill("page", text, table).unwrap();
        let expected = "a\n<!-- note -->\nb\n<!-- speed from r, s -->\nspeed r+s\n<!-- end -->\nc";
        assert_eq!(filled, expected);
        assert_eq!(fill("page", &filled, table).unwrap(), filled);
        assert!(fill("page", "<!-- speed from r -->\nold", table).is_err());
    }
}
