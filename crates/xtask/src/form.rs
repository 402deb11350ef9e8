//! The form of the pages: how wide and long they are, that their links lead somewhere, and that the files which the page
//! of the architecture names exist.

use crate::pages::{self, Page, prose};
use crate::steps::{Result, root};
use std::collections::HashMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The most columns of a line outside of tables.
const COLUMNS: usize = 120;

/// The most lines of README.md.
const README_LINES: usize = 150;

/// The page whose lists say which files a change touches.
const ARCHITECTURE: &str = "docs/ARCHITECTURE.md";

/// Folders that paths of that page are relative to.
const BASES: [&str; 3] = ["", "crates/windrow/src", "crates/windrow-python/python/windrow"];

/// Folders that hold a file which is named without its folder: each of them has the files of an operator.
const OPERATORS: [&str; 3] = ["gelu", "causal_conv1d", "conv2d"];

/// Fails with every fault of every page.
pub(crate) fn check() -> Result {
    let pages = pages::all()?;
    let mut faults = Vec::new();
    for page in &pages {
        let wide = wide(&page.text);
        faults.extend(wide.map(|n| format!("{}:{n}: more than {COLUMNS} columns", page.name)));
        faults.extend(broken(page).into_iter().map(|fault| format!("{}: {fault}", page.name)));
        if page.name == ARCHITECTURE {
            let missing = missing(&page.text).into_iter();
            faults.extend(missing.map(|path| format!("{ARCHITECTURE}: there is no {path}")));
        }
        let lines = page.text.lines().count();
        if page.name == "README.md" && lines > README_LINES {
            faults.push(format!("README.md: {lines} lines; at most {README_LINES}"));
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n").into()) }
}

/// Numbers of the lines that are too wide. A row of a table cannot be cut.
fn wide(text: &str) -> impl Iterator<Item = usize> {
    let lines = text.lines().enumerate();
    lines.filter(|(_, l)| l.chars().count() > COLUMNS && !l.starts_with('|')).map(|(i, _)| i + 1)
}

/// The paths in inline code of a page that do not exist.
fn missing(text: &str) -> Vec<String> {
    let prose = prose(text);
    let spans = prose.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    spans.filter(|span| is_path(span) && !exists(span)).map(str::to_owned).collect()
}

/// True for names of files, and for names of folders with a `/`. `<method>` stands for a name to choose.
fn is_path(span: &str) -> bool {
    let plain = span.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
    let ends = ["rs", "py", "pyi", "md", "txt", "toml", "cu", "cuh"];
    let is_file =
        span.rsplit_once('.').is_some_and(|(stem, end)| !stem.is_empty() && ends.contains(&end));
    plain && (is_file || span.contains('/'))
}

fn exists(path: &str) -> bool {
    let operators = OPERATORS.iter().map(|operator| root().join(BASES[1]).join(operator));
    let operators = operators.filter(|_| !path.contains('/'));
    BASES.iter().map(|base| root().join(base)).chain(operators).any(|base| base.join(path).exists())
}

/// The relative links of a page that lead nowhere.
fn broken(page: &Page) -> Vec<String> {
    let folder = Path::new(&page.name).parent().unwrap_or(Path::new(""));
    links(&page.text).filter_map(|link| fault(&page.name, folder, &link)).collect()
}

fn fault(page: &str, folder: &Path, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = if path.is_empty() { Some(page.into()) } else { inside(&folder.join(path)) };
    let Some(target) = target.filter(|t: &PathBuf| root().join(t).exists()) else {
        return Some(format!("({link}) leads to no file"));
    };
    if anchor.is_empty() {
        return None;
    }
    let text = fs::read_to_string(root().join(&target)).unwrap_or_default();
    (!anchors(&text).contains(&anchor.to_owned()))
        .then(|| format!("({link}) leads to no heading of {}", target.display()))
}

/// The path without `.` and `..`; nothing if it leaves the project.
fn inside(path: &Path) -> Option<PathBuf> {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => clean.push(name),
            Component::CurDir => {}
            Component::ParentDir if clean.pop() => {}
            _ => return None,
        }
    }
    Some(clean)
}

/// Targets of `[text](target)`, `![text](target)`, `[name]: target`, `src="target"` and `href="target"` outside of code.
fn links(text: &str) -> impl Iterator<Item = String> {
    let text = without_inline_code(&prose(text));
    let named = text.lines().filter(|line| line.starts_with('['));
    let named = named.filter_map(|line| Some(line.split_once("]: ")?.1.to_owned()));
    let mut found: Vec<String> = named.collect();
    for (start, end) in [("](", ')'), ("src=\"", '"'), ("srcset=\"", '"'), ("href=\"", '"')] {
        for (at, _) in text.match_indices(start) {
            let target = text[at + start.len()..].split(end).next().unwrap_or_default();
            found.push(target.split_whitespace().next().unwrap_or_default().to_owned());
        }
    }
    found.into_iter()
}

fn without_inline_code(text: &str) -> String {
    let line = |line: &str| line.split('`').step_by(2).collect::<Vec<_>>().join("") + "\n";
    text.lines().map(line).collect()
}

/// The anchors of a page's headings, as GitHub makes them.
fn anchors(text: &str) -> Vec<String> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let prose = prose(text);
    let headings = prose.lines().filter_map(|line| {
        let heading = line.trim_start_matches('#');
        (heading.len() < line.len() && heading.starts_with(' ')).then_some(heading.trim())
    });
    headings
        .map(|heading| {
            let slug = slug(heading);
            let count = seen.entry(slug.clone()).or_default();
            *count += 1;
            if *count == 1 { slug } else { format!("{slug}-{}", *count - 1) }
        })
        .collect()
}

fn slug(heading: &str) -> String {
    let kept = |c: char| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        c if c.is_alphanumeric() => Some(c),
        _ => None,
    };
    heading.to_lowercase().chars().filter_map(kept).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(text: &str) -> Page {
        Page { name: "docs/page.md".into(), text: text.into() }
    }

    #[test]
    fn a_link_to_no_file_is_broken() {
        assert!(
            broken(&page("[a](../README.md) ![b](../Cargo.toml) [c](https://x.org/y)")).is_empty()
        );
        assert_eq!(broken(&page("[a](none.md)")), ["(none.md) leads to no file"]);
        assert_eq!(broken(&page("<img src=\"none.svg\">")), ["(none.svg) leads to no file"]);
        assert_eq!(broken(&page("[a]: none.md")), ["(none.md) leads to no file"]);
        assert_eq!(broken(&page("[a](../../etc)")).len(), 1);
        assert!(broken(&page("```\n[a](none.md)\n```\nand `[a](none.md)`")).is_empty());
    }

    #[test]
    fn a_link_to_no_heading_is_broken() {
        assert!(broken(&page("[a](../README.md#license)")).is_empty());
        assert_eq!(
            broken(&page("[a](../README.md#licence)")),
            ["(../README.md#licence) leads to no heading of README.md"]
        );
    }

    #[test]
    fn files_of_the_architecture_exist() {
        let text = "`cpu/isa.rs`, `gelu/`, `torch/_patch.py`, `spec.rs`, `Plan::new`, `a b/c`, `x/<method>/`\n";
        assert!(missing(text).is_empty(), "{:?}", missing(text));
        assert_eq!(missing("`cpu/none.rs` and `none/`\n"), ["cpu/none.rs", "none/"]);
        assert_eq!(missing("`none.rs`\n"), ["none.rs"]);
    }

    #[test]
    fn anchors_are_those_of_github() {
        let text = "# `A b`: c_d, E-f\n```\n# no\n```\n## Speed\n### Speed\n#none\n";
        assert_eq!(anchors(text), ["a-b-c_d-e-f", "speed", "speed-1"]);
    }

    #[test]
    fn lines_are_counted_in_characters() {
        let line = "ä".repeat(COLUMNS);
        let text = format!("{line}\n{line}x\n| {line} |\n");
        assert_eq!(wide(&text).collect::<Vec<_>>(), [2]);
    }
}
