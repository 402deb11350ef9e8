//! Figures in the documentation have a record behind them.
//!
//! A section that gives a measured figure (a number with a unit of time or rate) names a file or folder of
//! benchmarks/record that exists, or says openly that there is none ("no record").

use crate::pages::{self, Page};
use crate::record::RECORDS;
use crate::steps::{Result, root};

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

/// Fails if a page gives a figure without a record.
pub(crate) fn check() -> Result {
    let mut faults = Vec::new();
    for Page { name, text } in pages::all()?.into_iter().filter(Page::is_guide) {
        faults.extend(sections_without_record(&text).into_iter().map(|(heading, figure)| {
            format!("{name}, \"{heading}\": {figure} without a file of {RECORDS}")
        }));
    }
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

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(page("12 ms, see [it](../benchmarks/record/unnamed.txt).").is_empty());
        assert!(page("<!-- speed from unnamed.txt -->\n12 ms").is_empty());
        assert!(page("12 ms while building it, no record").is_empty());
        assert!(page("no figure").is_empty());
        assert!(page("```sh\n# 3\n```\n").is_empty());
    }
}
