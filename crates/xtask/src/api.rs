//! The public surface of the library and of the candle crate, as a text that shows in review when it changes.
//!
//! It is read from rustdoc's pages, which know what macros make and what re-exports name: declarations, methods
//! and traits of every public item.

use crate::steps::{Result, cargo, root, target};
use std::fmt::Write;
use std::fs;
use std::path::Path;

const FILE: &str = "docs/api.txt";
const CRATES: [&str; 2] = ["windrow", "windrow_candle"];

/// Writes the listing.
pub(crate) fn write() -> Result {
    fs::write(root().join(FILE), listing()?).map_err(|e| format!("{FILE}: {e}").into())
}

/// Fails if the listing is not that of the code.
pub(crate) fn check() -> Result {
    let (old, new) = (fs::read_to_string(root().join(FILE)).unwrap_or_default(), listing()?);
    let changed =
        |a: &str, b: &str| a.lines().find(|line| !b.lines().any(|l| l == *line)).map(str::to_owned);
    if old == new {
        return Ok(());
    }
    let first = changed(&new, &old).or_else(|| changed(&old, &new)).unwrap_or_default();
    Err(format!("{FILE} is not the public surface (`{}`); run `cargo xtask api`", first.trim())
        .into())
}

fn listing() -> Result<String> {
    // Pages of items that are gone would stay.
    for name in CRATES {
        let old = target().join("doc").join(name);
        if old.exists() {
            fs::remove_dir_all(old)?;
        }
    }
    let built = cargo(&[
        "doc",
        "--quiet",
        "--no-deps",
        "--package",
        "windrow",
        "--package",
        "windrow-candle",
    ])
    .status()?;
    if !built.success() {
        return Err(format!("the documentation does not build: {built}").into());
    }
    let mut out = String::new();
    for name in CRATES {
        let mut items = Vec::new();
        collect(&target().join("doc").join(name), name, &mut items)?;
        items.sort();
        // What is only a way to another page says nothing.
        for (path, lines) in items.into_iter().filter(|(_, lines)| !lines.is_empty()) {
            let _ = writeln!(out, "{path}");
            for line in lines {
                let _ = writeln!(out, "    {line}");
            }
        }
    }
    Ok(out)
}

/// The items of a module's folder and of those below: path and what is said of each.
fn collect(folder: &Path, module: &str, items: &mut Vec<(String, Vec<String>)>) -> Result {
    for entry in fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))? {
        let (entry, name) =
            entry.map(|e| (e.path(), e.file_name().to_string_lossy().into_owned()))?;
        if entry.is_dir() {
            collect(&entry, &format!("{module}::{name}"), items)?;
        } else if name == "index.html" {
            let page = fs::read_to_string(&entry)?;
            items.push((module.to_owned(), reexports(&page)));
        } else if let [_kind, item, "html"] = name.split('.').collect::<Vec<_>>()[..] {
            let page = fs::read_to_string(&entry)?;
            items.push((format!("{module}::{item}"), lines(&page)));
        }
    }
    Ok(())
}

/// `pub use` of a module's page.
fn reexports(page: &str) -> Vec<String> {
    let found = between(page, "<code>pub use ", "</code>");
    found.into_iter().map(|text| format!("pub use {}", plain(text))).collect()
}

/// The declaration of a page's item, its methods and its traits.
fn lines(page: &str) -> Vec<String> {
    // What follows here every type has.
    let own = page.find("id=\"synthetic-implementations\"").map_or(page, |end| &page[..end]);
    let traits = own.find("id=\"trait-implementations\"").unwrap_or(own.len());
    let declaration = between(own, "<pre class=\"rust item-decl\"><code>", "</code></pre>");
    let mut out: Vec<String> = declaration.into_iter().map(plain).collect();
    let headers = |part| between(part, "class=\"code-header\">", "</h").into_iter().map(plain);
    out.extend(headers(&own[..traits]).filter(|h| h.starts_with("pub ") || h.starts_with("impl")));
    let mut of_traits: Vec<String> =
        headers(&own[traits..]).filter(|h| h.starts_with("impl")).collect();
    of_traits.sort();
    out.extend(of_traits);
    out
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Vec<&'a str> {
    text.split(start)
        .skip(1)
        .filter_map(|rest| rest.split_once(end).map(|(inside, _)| inside))
        .collect()
}

/// The text of a piece of a page on one line: without tags, comments and what unfolds.
fn plain(html: &str) -> String {
    let mut out = String::new();
    let mut rest = html;
    while let Some((before, tag)) = rest.split_once('<') {
        out += before;
        // Lines that are words for the reader, not code.
        let hidden = ["summary", "a href=\"#\" class=\"tooltip\"", "span class=\"comment\""];
        let skipped = hidden.iter().find(|h| tag.starts_with(**h)).and_then(|h| {
            let name = h.split(' ').next().unwrap_or(h);
            tag.split_once(&format!("</{name}>"))
        });
        rest = match skipped.or_else(|| tag.split_once('>')) {
            Some((_, after)) => after,
            None => "",
        };
    }
    out += rest;
    let text =
        out.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&#39;", "'");
    text.replace("&amp;", "&").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "<pre class=\"rust item-decl\"><code><div class=\"code-attribute\">#[non_exhaustive]</div>\
        pub struct <a href=\"x\">P</a>&lt;T&gt; {\n    pub a: <a class=\"x\">u8</a>, <span class=\"comment\">/* private \
        fields */</span>\n}</code></pre><h2>Variants</h2><h3 class=\"code-header\">Less = -1</h3>\
        <h3 class=\"code-header\">impl P</h3><h4 class=\"code-header\">pub fn f(&amp;self) -&gt; u8</h4>\
        <h2 id=\"trait-implementations\"></h2><h3 class=\"code-header\">impl Debug for P</h3>\
        <h4 class=\"code-header\">fn fmt(&amp;self)</h4><h3 class=\"code-header\">impl Clone for P</h3>\
        <h2 id=\"synthetic-implementations\"></h2><h3 class=\"code-header\">impl Send for P</h3>";

    #[test]
    fn a_page_gives_declaration_methods_and_traits() {
        let wanted = [
            "#[non_exhaustive]pub struct P<T> { pub a: u8, }",
            "impl P",
            "pub fn f(&self) -> u8",
            "impl Clone for P",
            "impl Debug for P",
        ];
        assert_eq!(lines(PAGE), wanted);
        assert_eq!(reexports("<code>pub use <a>half</a>::f16;</code>"), ["pub use half::f16;"]);
    }
}
