//! The records themselves: each names the commit that it measured, and has one case a line.

use crate::lines::lines;
use crate::record::RECORDS;
use crate::steps::{Result, root};
use serde_json::Value;
use std::{fs, io};

/// Records made before files named the commit that they measured.
const UNNAMED: &str = "benchmarks/record/unnamed.txt";

/// Fails if a record does not name its commit, or is not laid out with one case a line.
pub(crate) fn check() -> Result {
    let older = fs::read_to_string(root().join(UNNAMED)).map_err(|e| format!("{UNNAMED}: {e}"))?;
    let mut faults = Vec::new();
    let records = all()?;
    for (name, text) in &records {
        let value: Value = serde_json::from_str(text).map_err(|e| format!("{name}: {e}"))?;
        if !older.lines().any(|line| line == name) {
            faults.extend(commit_fault(&value).map(|fault| format!("{name}: {fault}")));
        }
        if lines(text) != *text {
            faults.push(format!("{name}: not one case a line; run `cargo xtask readme`"));
        }
    }
    let gone = older.lines().filter(|line| !records.iter().any(|(name, _)| name == line));
    faults.extend(gone.map(|line| format!("{UNNAMED}: there is no {line}")));
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n").into()) }
}

/// Writes the records that have another layout again, with one case a line. Their values stay.
pub(crate) fn lay_out() -> Result {
    for (name, text) in all()? {
        let value: Value = serde_json::from_str(&text).map_err(|e| format!("{name}: {e}"))?;
        let new = lines(&text);
        if serde_json::from_str::<Value>(&new).ok().as_ref() != Some(&value) {
            return Err(format!("{name}: laid out, it has other values").into());
        }
        if new != text {
            fs::write(root().join(&name), new).map_err(|e| format!("{name}: {e}"))?;
            println!("{name}");
        }
    }
    Ok(())
}

/// Names below the root and texts of all JSON files of the records, in order of their names.
fn all() -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for folder in fs::read_dir(root().join(RECORDS))? {
        let folder = folder?;
        if !folder.file_type()?.is_dir() {
            continue;
        }
        for file in fs::read_dir(folder.path())?.collect::<io::Result<Vec<_>>>()? {
            let names = [folder.file_name(), file.file_name()];
            let [folder, file_name] = names.map(|name| name.to_string_lossy().into_owned());
            if file_name.ends_with(".json") {
                let name = format!("{RECORDS}/{folder}/{file_name}");
                let text = fs::read_to_string(file.path()).map_err(|e| format!("{name}: {e}"))?;
                found.push((name, text));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The part of `"commit": "abc123", "clean": true` that is missing at the top of a record.
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
    fn records_name_commit_and_tree() {
        assert!(commit_fault(&json!({"commit": "bca828e", "clean": true})).is_none());
        assert!(commit_fault(&json!({"commit": "bca828e"})).is_some());
        assert!(commit_fault(&json!({"commit": "unknown", "clean": false})).is_some());
    }
}
