//! Imports among the modules of a crate, each resolved to the module that defines what is imported.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::Path;

/// A module, as the names of the folders and the file that lead to it; the root is empty.
pub(crate) type Module = Vec<String>;

/// Imports of a crate outside of its tests: from a module to the one that defines what it names, with the names.
pub(crate) struct Imports(pub(crate) BTreeMap<(Module, Module), BTreeSet<String>>);

/// The modules that a file mentions.
#[derive(Default)]
struct Names {
    /// Paths in `use`, with the name that each has here; `*` for all of a module's.
    uses: Vec<(Vec<String>, String)>,
    /// Other paths that begin with `crate`, `self` or `super`.
    paths: Vec<Vec<String>>,
    /// Modules of its own.
    modules: Vec<String>,
    /// The modules that are compiled for tests alone.
    tests: Vec<String>,
    text: String,
}

impl Imports {
    /// The imports of the crate whose sources lie in `folder`.
    pub(crate) fn of(folder: &Path) -> std::io::Result<Self> {
        let mut files = HashMap::new();
        collect(folder, &mut Vec::new(), &mut files)?;
        let tests: Vec<Module> = files
            .iter()
            .flat_map(|(module, names): (&Module, &Names)| {
                names.tests.iter().map(|test| [&module[..], std::slice::from_ref(test)].concat())
            })
            .collect();
        files.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
        let mut found: BTreeMap<_, BTreeSet<String>> = BTreeMap::new();
        for (module, names) in &files {
            let uses = names.uses.iter().map(|(path, name)| match &**name {
                "*" => &path[..path.len() - 1],
                _ => &path[..],
            });
            for path in uses.chain(names.paths.iter().map(|path| &path[..])) {
                let Some(absolute) = absolute(module, names, path) else { continue };
                if let Some(to) = defined(&files, &absolute, 0)
                    && to != *module
                {
                    let what = path.last().cloned().unwrap_or_default();
                    found.entry((module.clone(), to)).or_default().insert(what);
                }
            }
        }
        Ok(Imports(found))
    }

    /// Groups of files and folders of one folder that import each other in a circle. A folder's own `mod.rs`
    /// is no part of a circle: it re-exports the folder's items, and the parts may use what it declares.
    pub(crate) fn circles(&self) -> Vec<(Module, Vec<String>)> {
        let modules = self.0.keys().flat_map(|(from, to)| [from, to]);
        let folders: BTreeSet<_> =
            modules.flat_map(|module| (0..module.len()).map(|n| module[..n].to_vec())).collect();
        let mut circles = Vec::new();
        for folder in folders {
            let n = folder.len();
            let mut arrows: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
            for (from, to) in self.0.keys() {
                let inside = |module: &Module| module.len() > n && module.starts_with(&folder);
                if inside(from) && inside(to) && from[n] != to[n] {
                    arrows.entry(&from[n]).or_default().insert(&to[n]);
                }
            }
            circles.extend(rings(&arrows).into_iter().map(|ring| (folder.clone(), ring)));
        }
        circles
    }
}

/// The strongly connected parts of more than one member: who reaches whom and back.
fn rings(arrows: &BTreeMap<&str, BTreeSet<&str>>) -> Vec<Vec<String>> {
    let all: BTreeMap<_, _> = arrows.keys().map(|&name| (name, reached(arrows, name))).collect();
    let mut rings: BTreeSet<Vec<String>> = BTreeSet::new();
    for (name, to) in &all {
        let back = |other: &&str| all.get(*other).is_some_and(|reached| reached.contains(name));
        let ring: Vec<_> = to.iter().copied().filter(back).map(str::to_owned).collect();
        if ring.len() > 1 {
            rings.insert(ring);
        }
    }
    rings.into_iter().collect()
}

/// Whom one reaches by arrows.
fn reached<'a>(arrows: &BTreeMap<&'a str, BTreeSet<&'a str>>, from: &'a str) -> BTreeSet<&'a str> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(at) = next.pop() {
        let to = arrows.get(at).into_iter().flatten();
        next.extend(to.filter(|to| seen.insert(**to)));
    }
    seen
}

/// Reads the files of a folder and of those in it.
fn collect(
    folder: &Path,
    at: &mut Module,
    files: &mut HashMap<Module, Names>,
) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        if path.is_dir() {
            at.push(name);
            collect(&path, at, files)?;
            at.pop();
        } else if path.extension().is_some_and(|end| end == "rs") {
            let mut module = at.clone();
            if name != "mod" && name != "lib" {
                module.push(name);
            }
            files.insert(module, Names::of(&without_tests(&fs::read_to_string(&path)?)));
        }
    }
    Ok(())
}

/// A file without comments and without the items that are compiled for tests alone; their modules' names in lines
/// `#test NAME`.
fn without_tests(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let (mut kept, mut i) = (String::new(), 0);
    while i < lines.len() {
        if !lines[i].trim_start().starts_with("#[cfg(test)]") {
            kept += lines[i];
            kept.push('\n');
            i += 1;
            continue;
        }
        i += 1;
        while i < lines.len() && lines[i].trim_start().starts_with("#[") {
            i += 1;
        }
        let Some(first) = lines.get(i) else { break };
        if let Some((_, name)) = first.split_once("mod ")
            && let Some(name) = name.trim().strip_suffix(';')
        {
            kept += &format!("#test {name}\n");
        }
        // To the line that ends the item.
        let ends = |line: &str| line.trim_end().ends_with(';') || line.trim_end().ends_with('}');
        if !ends(first) {
            let outer = indent(first);
            i += 1;
            while i < lines.len()
                && !(indent(lines[i]) <= outer && ends(lines[i]) && !lines[i].trim().is_empty())
            {
                i += 1;
            }
        }
        i += 1;
    }
    kept
}

impl Names {
    fn of(text: &str) -> Self {
        let mut names = Names { text: text.to_owned(), ..Names::default() };
        let tests = text.lines().filter_map(|line| line.strip_prefix("#test "));
        names.tests = tests.map(str::to_owned).collect();
        let tokens = tokens(text);
        let mut i = 0;
        while i < tokens.len() {
            match &*tokens[i] {
                "use" => {
                    let end =
                        tokens[i..].iter().position(|t| t == ";").map_or(tokens.len(), |n| i + n);
                    tree(&tokens[i + 1..end], &mut Vec::new(), &mut names.uses);
                    i = end;
                }
                "mod" if tokens.get(i + 2).is_some_and(|t| t == ";") => {
                    names.modules.push(tokens[i + 1].clone());
                }
                // Not of `pub(in ..)`.
                "crate" | "self" | "super"
                    if tokens.get(i + 1).is_some_and(|t| t == "::")
                        && tokens[..i].last().is_none_or(|t| t != "in") =>
                {
                    let mut path = vec![tokens[i].clone()];
                    while tokens.get(i + 1).is_some_and(|t| t == "::")
                        && tokens.get(i + 2).is_some_and(|t| is_name(t))
                    {
                        path.push(tokens[i + 2].clone());
                        i += 2;
                    }
                    names.paths.push(path);
                }
                _ => {}
            }
            i += 1;
        }
        names
    }

    /// Whether an item of this name is defined here.
    fn defines(&self, name: &str) -> bool {
        const KINDS: [&str; 9] =
            ["fn", "struct", "enum", "trait", "type", "const", "static", "union", "macro_rules!"];
        KINDS.iter().any(|kind| {
            self.text.match_indices(&format!("{kind} {name}")).any(|(at, found)| {
                let next = self.text[at + found.len()..].chars().next();
                !next.is_some_and(|c| c.is_alphanumeric() || c == '_')
            })
        })
    }
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Names, `::`, and every other character but spaces.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let len = match c {
            c if c.is_alphanumeric() || c == '_' => {
                rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len())
            }
            ':' if rest.starts_with("::") => 2,
            c => c.len_utf8(),
        };
        if !c.is_whitespace() {
            tokens.push(rest[..len].to_owned());
        }
        rest = &rest[len..];
    }
    tokens
}

/// The paths of a tree of `use` behind a prefix; gives the number of tokens that it took.
fn tree(
    tokens: &[String],
    prefix: &mut Vec<String>,
    uses: &mut Vec<(Vec<String>, String)>,
) -> usize {
    let (len, mut i) = (prefix.len(), 0);
    while i < tokens.len() {
        match &*tokens[i] {
            "{" => {
                i += 1;
                while i < tokens.len() && tokens[i] != "}" {
                    i += tree(&tokens[i..], prefix, uses);
                    if tokens.get(i).is_some_and(|t| t == ",") {
                        i += 1;
                    }
                }
                prefix.truncate(len);
                return i + 1;
            }
            "," | "}" => break,
            "as" => {
                uses.push((prefix.clone(), tokens[i + 1].clone()));
                prefix.truncate(len);
                return i + 2;
            }
            "::" => {}
            // `a::{self}` is a.
            "self" if !prefix.is_empty() => {}
            name => prefix.push(name.to_owned()),
        }
        i += 1;
    }
    if let Some(name) = prefix.last().cloned() {
        uses.push((prefix.clone(), name));
    }
    prefix.truncate(len);
    i
}

/// A path from the crate's root; `None` if it leads into another crate.
fn absolute(module: &Module, names: &Names, path: &[String]) -> Option<Vec<String>> {
    match &**path.first()? {
        "crate" => Some(path[1..].to_vec()),
        "self" => Some([&module[..], &path[1..]].concat()),
        "super" => {
            let ups = path.iter().take_while(|part| *part == "super").count();
            let base = module.len().checked_sub(ups)?;
            Some([&module[..base], &path[ups..]].concat())
        }
        first if names.modules.iter().any(|own| own == first) => Some([&module[..], path].concat()),
        _ => None,
    }
}

/// The module that defines what a path from the root names, through re-exports; `None` for what is of another crate.
fn defined(files: &HashMap<Module, Names>, path: &[String], depth: usize) -> Option<Module> {
    const DEEPEST: usize = 8;
    let mut at = Module::new();
    for (i, part) in path.iter().enumerate() {
        let inner = [&at[..], std::slice::from_ref(part)].concat();
        if files.contains_key(&inner) {
            at = inner;
            continue;
        }
        let names = files.get(&at)?;
        if names.defines(part) || depth == DEEPEST {
            return Some(at);
        }
        for (target, _) in names.uses.iter().filter(|(_, name)| name == part) {
            let target = absolute(&at, names, target)?;
            if target != path[..=i] {
                return defined(files, &[&target[..], &path[i + 1..]].concat(), depth + 1);
            }
        }
        let globs = names.uses.iter().filter(|(_, name)| name == "*");
        let all = globs.filter_map(|(target, _)| absolute(&at, names, &target[..target.len() - 1]));
        let mut all =
            all.filter(|target| files.get(target).is_some_and(|names| names.defines(part)));
        return Some(all.next().unwrap_or(at));
    }
    Some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(path: &str) -> Module {
        path.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect()
    }

    /// A folder that is removed at the end.
    struct Sources(std::path::PathBuf);

    impl Sources {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let folder = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = folder.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Sources(folder)
        }
    }

    impl Drop for Sources {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn imports_lead_to_the_module_that_defines() {
        let sources = Sources::new(
            "windrow-imports",
            &[
                ("lib.rs", "mod a;\nmod b;\npub use a::Thing;\npub use half::f16;"),
                ("a/mod.rs", "mod inner;\npub use inner::{Thing as Thing, Other};"),
                ("a/inner.rs", "pub struct Thing;\npub struct Other;\n// use crate::b::f;\n"),
                (
                    "b.rs",
                    "use crate::{Thing, f16};\nuse crate::a::{self, Other};\npub fn f() {}\n\
                     #[cfg(test)]\nmod tests {\n    use crate::a::inner::None;\n}\n",
                ),
            ],
        );
        let imports = Imports::of(&sources.0).unwrap().0;
        let of = |from: &str, to: &str| imports.get(&(module(from), module(to)));
        assert_eq!(of("b", "a/inner").unwrap().iter().collect::<Vec<_>>(), ["Other", "Thing"]);
        assert!(of("b", "").is_none(), "what another crate defines is no import of the root");
        assert!(of("a/inner", "b").is_none(), "a comment");
        assert!(of("b", "a").is_some());
    }

    #[test]
    fn circles_are_found() {
        let sources = Sources::new(
            "windrow-circles",
            &[
                ("lib.rs", "mod a;\nmod b;\nmod c;"),
                ("a.rs", "use crate::b::f;\npub fn g() {}"),
                ("b.rs", "pub fn f() { crate::c::h() }"),
                ("c/mod.rs", "mod part;\npub fn h() {}"),
                ("c/part.rs", "use super::h;\nuse crate::a::g;"),
            ],
        );
        let circles = Imports::of(&sources.0).unwrap().circles();
        assert_eq!(circles, [(module(""), ["a", "b", "c"].map(str::to_owned).to_vec())]);
    }
}
