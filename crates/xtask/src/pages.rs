//! The pages of the project: which files they are, and the blocks of code in them.

use crate::record::RECORDS;
use crate::steps::{Result, root};
use std::fs;

/// A page: its path below the root, with `/`, and its text.
pub(crate) struct Page {
    pub(crate) name: String,
    pub(crate) text: String,
}

impl Page {
    /// True for README.md and docs/: their figures have records, their examples run.
    pub(crate) fn is_guide(&self) -> bool {
        self.name == "README.md" || self.name.starts_with("docs/")
    }
}

/// Every Markdown file of the project but those of the records, in order of their names.
pub(crate) fn all() -> Result<Vec<Page>> {
    let mut pages = Vec::new();
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root().join(&folder))? {
            let entry = entry?;
            let file = entry.file_name().to_string_lossy().into_owned();
            let name = if folder.is_empty() { file.clone() } else { format!("{folder}/{file}") };
            let kind = entry.file_type()?;
            if kind.is_dir() && !file.starts_with('.') && file != "target" && name != RECORDS {
                folders.push(name);
            } else if kind.is_file() && name.ends_with(".md") {
                let text = fs::read_to_string(entry.path()).map_err(|e| format!("{name}: {e}"))?;
                pages.push(Page { name, text });
            }
        }
    }
    pages.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(pages)
}

/// A block of code: what stands behind the opening fence, the number of that line (from 1), and the lines within.
#[derive(Debug, PartialEq)]
pub(crate) struct Block<'a> {
    pub(crate) info: &'a str,
    pub(crate) line: usize,
    pub(crate) code: String,
}

/// The fenced blocks of a page, in order.
pub(crate) fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut found = Vec::new();
    let mut open: Option<Block<'_>> = None;
    for (i, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(info), None) => {
                open = Some(Block { info: info.trim(), line: i + 1, code: String::new() });
            }
            (Some(_), Some(_)) => found.extend(open.take()),
            (None, Some(block)) => {
                block.code += line;
                block.code += "\n";
            }
            (None, None) => {}
        }
    }
    found
}

/// The page with its blocks of code left empty, line for line.
pub(crate) fn prose(text: &str) -> String {
    let mut code = false;
    let mut out = String::new();
    for line in text.lines() {
        let fence = line.trim_start().starts_with("```");
        if !fence && !code {
            out += line;
        }
        code ^= fence;
        out += "\n";
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_and_prose_share_the_lines() {
        let text = "a\n```sh ignore\nb\nc\n```\nd\n";
        let block = Block { info: "sh ignore", line: 2, code: "b\nc\n".into() };
        assert_eq!(blocks(text), [block]);
        assert_eq!(prose(text), "a\n\n\n\n\nd\n");
    }

    #[test]
    fn records_are_no_pages() {
        let pages = all().unwrap();
        assert!(pages.iter().any(|p| p.name == "README.md"));
        assert!(pages.iter().any(|p| p.name == "docs/gelu.md"));
        assert!(!pages.iter().any(|p| p.name.starts_with(RECORDS)));
    }
}
