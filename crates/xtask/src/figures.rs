//! Figures in the documentation have a record behind them.
//!
//! A section that gives a measured figure (a number with a unit of time or rate) names a file or folder of
//! benchmarks/record that exists, or says openly that there is none ("no record").

use crate::pages::{self, Page};
use crate::record::RECORDS;
use crate::steps::{Result, root};
use serde_json::Value;
use std::path::Path;
use std::{fs, io};

const UNITS: [&str; 13] = [
    "ms",
    "us",
    "ns",
    "GB/s",
    "TB/s",
    "MB/s",
    "GFLOP/s",
    "TFLOP/s",
    "times as fast",
    "times faster",
    "times slower",
    "% of a copy",
    "% faster",
];

/// Records made before files named the commit that they measured.
const UNNAMED: &str = "benchmarks/record/unnamed.txt";

/// Fails if a page gives a figure without a record, or a record does not name its commit.
pub(crate) fn check() -> Result {
    let mut faults = Vec::new();
    for Page { name, text } in pages::all()?.into_iter().filter(Page::is_guide) {
        faults.extend(sections_without_record(&text).into_iter().map(|(heading, figure)| {
            format!("{name}, \"{heading}\": {figure} without a file of {RECORDS}")
        }));
    }
    faults.extend(records_without_commit()?);
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n").into()) }
}

/// Headings of the sections that give a figure and name no record, with the figure.
fn sections_without_record(text: &str) -> Vec<(String, String)> {
    let mut faults = Vec::new();
    let (mut heading, mut figure, mut recorded, mut code) = (String::new(), None, false, false);
    for line in text.lines().chain(["#"]) {
        if line.starts_with("```") {
            code = !code;
        }
        if line.starts_with('#') && !code {
            if let (Some(figure), false) = (figure.take(), recorded) {
                faults.push((heading, figure));
            }
            (heading, recorded) = (line.trim_start_matches(['#', ' ']).to_owned(), false);
        }
        figure = figure.or_else(|| measured(line));
        recorded |= line.contains("no record") || names_record(line);
    }
    faults
}

/// The first measured figure of a line.
fn measured(line: &str) -> Option<String> {
    let digit = |c: char| c.is_ascii_digit();
    UNITS.iter().find_map(|unit| {
        line.match_indices(unit).find_map(|(at, _)| {
            let after = line[at + unit.len()..].chars().next();
            let before = line[..at].trim_end_matches([' ', 'x']);
            let number = before.rsplit(|c: char| !digit(c) && c != '.' && c != ',').next()?;
            let ends = after.is_none_or(|c| !c.is_alphanumeric() && c != '/' && c != '_');
            (ends && number.contains(digit)).then(|| format!("{number} {unit}"))
        })
    })
}

/// True if the line names something below benchmarks/record that exists, in a link or in the marker of a table.
fn names_record(line: &str) -> bool {
    let linked = line.match_indices(RECORDS).map(|(at, _)| &line[at..]);
    let marked = line.strip_prefix("<!-- ").and_then(|l| l.split_once(" from "));
    let marked = marked.map(|(_, record)| format!("{RECORDS}/{record}"));
    linked.map(str::to_owned).chain(marked).any(|name| {
        let end = name.find(|c: char| c.is_whitespace() || ")`,;:'\"]".contains(c));
        let name = name[..end.unwrap_or(name.len())].trim_end_matches(['.', '/']);
        name.len() > RECORDS.len() && root().join(name).exists()
    })
}

/// JSON files of the records that name no commit, but for those listed as older than that.
fn records_without_commit() -> Result<Vec<String>> {
    let older = fs::read_to_string(root().join(UNNAMED)).map_err(|e| format!("{UNNAMED}: {e}"))?;
    let mut faults = Vec::new();
    for folder in fs::read_dir(root().join(RECORDS))? {
        let folder = folder?.path();
        if !folder.is_dir() {
            continue;
        }
        let mut files: Vec<_> = fs::read_dir(&folder)?.collect::<io::Result<_>>()?;
        files.sort_by_key(fs::DirEntry::path);
        for file in files {
            let path = file.path();
            let name = name_of(&path);
            let is_json = path.extension().is_some_and(|e| e == "json");
            if is_json && !older.lines().any(|line| line == name) {
                let value: Value = serde_json::from_slice(&fs::read(&path)?)
                    .map_err(|e| format!("{name}: {e}"))?;
                faults.extend(commit_fault(&value).map(|fault| format!("{name}: {fault}")));
            }
        }
    }
    Ok(faults)
}

fn name_of(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).to_string_lossy().replace('\\', "/")
}

/// What is missing of `"commit": "abc123", "clean": true` at the top of a record.
fn commit_fault(record: &Value) -> Option<&'static str> {
    let hex = |c: &str| c.len() >= 7 && c.bytes().all(|b| b.is_ascii_hexdigit());
    if !record["commit"].as_str().is_some_and(hex) {
        return Some("no \"commit\" that it measured");
    }
    record["clean"].as_bool().is_none().then_some("does not say whether the tree was \"clean\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn figures_are_numbers_with_units() {
        for (line, figure) in [
            ("takes 4.2 ms a run", Some("4.2 ms")),
            ("(3,300 GB/s)", Some("3,300 GB/s")),
            ("2.5x times as fast", Some("2.5 times as fast")),
            ("items, terms and 3 msgs", None),
            ("GB/s of a copy", None),
            ("by 4 us.", Some("4 us")),
        ] {
            assert_eq!(measured(line).as_deref(), figure, "{line}");
        }
    }

    #[test]
    fn sections_need_a_record_that_exists() {
        let page = |body: &str| sections_without_record(&format!("# A\ntext\n## B\n{body}\n"));
        assert_eq!(page("12 ms"), [("B".to_owned(), "12 ms".to_owned())]);
        assert_eq!(page("12 ms, see benchmarks/record/none.json").len(), 1);
        assert_eq!(page("12 ms, see benchmarks/record").len(), 1);
        assert!(page(&format!("12 ms, see [it](../{UNNAMED}).")).is_empty());
        assert!(page("<!-- speed from unnamed.txt -->\n12 ms").is_empty());
        assert!(page("12 ms while building it, no record").is_empty());
        assert!(page("no figure").is_empty());
        assert!(page("```sh\n# 3\n```\n").is_empty());
    }

    #[test]
    fn records_name_commit_and_tree() {
        assert!(commit_fault(&json!({"commit": "bca828e", "clean": true})).is_none());
        assert!(commit_fault(&json!({"commit": "bca828e"})).is_some());
        assert!(commit_fault(&json!({"commit": "unknown", "clean": false})).is_some());
    }
}
