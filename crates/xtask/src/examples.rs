//! The examples of README.md and docs/ are run as they stand there.
//!
//! A block of `sh` or `python` is a program of its own; those of one page share a folder that is empty at first. A
//! block of `text` that comes next is what the program prints, where `...` stands for anything. `ignore` behind the
//! language leaves a block out: what needs a GPU, the network or much time. Blocks of Rust are tests of the crate
//! `pages`.

use crate::pages::{self, Block, Page, blocks};
use crate::steps::{COMMANDS, Result, cargo, target};
use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// A program of a page, and what it prints if the page says so.
struct Example<'a> {
    block: Block<'a>,
    output: Option<String>,
}

/// Runs the blocks of `sh` with the command `windrow` and the programs of a Python environment on the path.
pub(crate) fn shell(environment: &Path) -> Result {
    let built = cargo(&COMMANDS).status()?;
    if !built.success() {
        return Err(format!("the command does not build: {built}").into());
    }
    let mut path = vec![target().join("debug"), environment.join("bin")];
    path.extend(env::var_os("PATH").iter().flat_map(env::split_paths));
    let path = env::join_paths(path)?;
    run_all(
        "sh",
        |_| true,
        |file| {
            let mut command = Command::new("bash");
            command.args(["-euo", "pipefail"]).arg(file).env("PATH", &path);
            command
        },
    )
}

/// Runs the blocks of Python that import PyTorch, or those that do not, with this interpreter.
pub(crate) fn python(torch: bool, interpreter: impl Fn() -> Command) -> Result {
    run_all(
        "python",
        |code| code.contains("torch") == torch,
        |file| {
            let mut command = interpreter();
            command.arg(file);
            command
        },
    )
}

/// Runs every block of a language that is wanted.
fn run_all(
    language: &str,
    wanted: impl Fn(&str) -> bool,
    command: impl Fn(&Path) -> Command,
) -> Result {
    let mut ran = 0;
    for page in pages::all()?.into_iter().filter(Page::is_guide) {
        let folder = env::temp_dir().join(format!("windrow-examples-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        for example in examples(&page.text, language) {
            if wanted(&example.block.code) {
                let place = format!("{}:{}", page.name, example.block.line);
                run(&example, &folder, &command).map_err(|e| format!("{place}: {e}"))?;
                ran += 1;
            }
        }
        fs::remove_dir_all(&folder)?;
    }
    eprintln!("{ran} examples of {language} in the pages");
    Ok(())
}

fn run(example: &Example<'_>, folder: &Path, command: impl Fn(&Path) -> Command) -> Result {
    let file = folder.join("example");
    fs::write(&file, &example.block.code)?;
    let output = command(&file).current_dir(folder).output()?;
    let printed = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}\n{printed}{errors}", output.status).into());
    }
    match &example.output {
        Some(expected) if !matches(expected, &printed) => {
            Err(format!("printed\n{printed}where the page says\n{expected}").into())
        }
        _ => Ok(()),
    }
}

/// The programs of a page in one language.
fn examples<'a>(text: &'a str, language: &str) -> Vec<Example<'a>> {
    let mut found: Vec<Example<'a>> = Vec::new();
    let mut last = false;
    for block in blocks(text) {
        if let ("text", true, Some(example)) = (block.info, last, found.last_mut()) {
            example.output = Some(block.code);
            last = false;
        } else {
            last = block.info == language;
            if last {
                found.push(Example { block, output: None });
            }
        }
    }
    found
}

/// True if the text is the expected one, in which `...` stands for anything. Blanks at the ends of lines do not count.
fn matches(expected: &str, printed: &str) -> bool {
    let trim = |text: &str| {
        let lines: Vec<_> = text.trim_end().lines().map(str::trim_end).collect();
        lines.join("\n")
    };
    let (expected, printed) = (trim(expected), trim(printed));
    let mut parts = expected.split("...");
    let Some(mut rest) = printed.strip_prefix(parts.next().unwrap_or_default()) else {
        return false;
    };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.split_once(part) {
            Some((_, after)) => rest = after,
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_stand_for_anything() {
        for (expected, printed, same) in [
            ("a\nb\n", "a  \nb\n\n", true),
            ("a\n", "a\nb\n", false),
            ("a ... c\n", "a b\nb c\n", true),
            ("a ... c\n", "a b d\n", false),
            ("... b ... d ...", "a b c d e", true),
            ("... b ... b", "a b", false),
        ] {
            assert_eq!(matches(expected, printed), same, "{expected:?} {printed:?}");
        }
    }

    #[test]
    fn text_belongs_to_the_program_before_it() {
        let text =
            "```sh\na\n```\nprints\n```text\nb\n```\n```text\nc\n```\n```sh ignore\nd\n```\n";
        let found = examples(text, "sh");
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].output.as_deref(), Some("b\n"));
    }

    #[test]
    fn a_program_that_prints_something_else_fails() {
        let folder = env::temp_dir().join(format!("windrow-examples-test-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let cases =
            [("echo 1", "1\n", true), ("echo 2", "1\n", false), ("echo 1; exit 3", "1\n", false)];
        for (code, expected, good) in cases {
            let block = Block { info: "sh", line: 1, code: code.into() };
            let example = Example { block, output: Some(expected.into()) };
            let run = run(&example, &folder, |file| {
                let mut command = Command::new("bash");
                command.arg(file);
                command
            });
            assert_eq!(run.is_ok(), good, "{code}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
