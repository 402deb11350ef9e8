//! The tensors of an archive by name.

use super::{Reason, escaped, shown};
use std::path::Path;

/// The most names of an archive that are listed.
const LISTED: usize = 8;

/// Picks the tensor of an archive.
pub(super) fn choose<'a>(
    path: &Path,
    names: &'a [String],
    name: Option<&str>,
) -> Result<&'a str, Reason> {
    let Some(name) = name else {
        return match names {
            [only] => Ok(only),
            _ => Err(Reason::NoName {
                example: format!("{}:NAME", shown(path)),
                available: list(names.iter().map(String::as_str), names.len()),
            }),
        };
    };
    if let Some(found) = names.iter().find(|n| *n == name) {
        return Ok(found);
    }
    let mut near: Vec<(usize, &str)> = names.iter().map(|n| (distance(name, n), &**n)).collect();
    if names.len() > LISTED {
        near.sort();
    }
    let available = list(near.into_iter().map(|(_, n)| n), names.len());
    Err(Reason::UnknownName { name: escaped(name).into(), available })
}

fn list<'a>(names: impl Iterator<Item = &'a str>, count: usize) -> String {
    let shown: Vec<_> = names.take(LISTED).map(escaped).collect();
    match count {
        0 => "none".into(),
        _ if count > LISTED => format!("{} and {} more", shown.join(", "), count - LISTED),
        _ => shown.join(", "),
    }
}

/// Levenshtein's distance: characters to be inserted, removed or replaced.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, n) in [("", "", 0), ("ab", "", 2), ("kitten", "sitting", 3), ("ä", "a", 1)] {
            assert_eq!((distance(a, b), distance(b, a)), (n, n), "{a} {b}");
        }
    }

    #[test]
    fn long_lists_are_short_and_begin_with_the_nearest() {
        let names: Vec<String> = (0..1000).map(|i| format!("layers.{i}.conv.weight")).collect();
        let of = |name| choose(Path::new("m"), &names, name).unwrap_err().to_string();
        let message = of(Some("layers.777.conv.weigth"));
        assert!(message.contains("has layers.777.conv.weight,"), "{message}");
        assert!(message.contains("and 992 more") && message.len() < 400, "{message}");
        let message = of(None);
        assert!(message.contains("m:NAME") && message.contains("and 992 more"), "{message}");
        assert_eq!(choose(Path::new("m"), &names, Some("layers.3.conv.weight")).unwrap(), names[3]);
    }

    #[test]
    fn short_lists_are_whole() {
        let names = ["b\u{1b}", "a"].map(String::from);
        let message = choose(Path::new("m"), &names, Some("a\n")).unwrap_err().to_string();
        assert_eq!(message, "no tensor `a\\n`; the file has b\\u{1b}, a");
        assert!(choose(Path::new("m"), &[], None).unwrap_err().to_string().ends_with("none"));
        assert_eq!(choose(Path::new("m"), &names[1..], None).unwrap(), "a");
    }
}
