//! JSON with one case a line: short enough to keep, and a changed case shows as one changed line.
//!
//! `cargo xtask` shares this file; `benchmarks/provenance.py` writes the same form.

use std::fmt::Write;

/// Characters that a value may take on one line.
const WIDTH: usize = 2_000;

/// Valid JSON, laid out again. Numbers and strings stay as they are written.
///
/// A value has one element a line if it is the outermost one, a list of lists or objects, or longer than [`WIDTH`].
pub(crate) fn lines(json: &str) -> String {
    let mut out = String::new();
    Node::read(&mut json.trim_start()).write(&mut out, 0);
    out + "\n"
}

/// A value of JSON, as text.
enum Node<'a> {
    Scalar(&'a str),
    /// The brackets, and each element behind its name and a colon if it has one.
    Many([char; 2], Vec<(&'a str, Node<'a>)>),
}

impl<'a> Node<'a> {
    /// The value at the start of `rest`, which moves past it and past the spaces behind it.
    fn read(rest: &mut &'a str) -> Self {
        let brackets = match rest.as_bytes().first() {
            Some(b'{') => ['{', '}'],
            Some(b'[') => ['[', ']'],
            _ => return Self::Scalar(scalar(rest)),
        };
        let mut elements = Vec::new();
        skip(rest, 1);
        while !rest.is_empty() && !rest.starts_with(brackets[1]) {
            let name = if brackets[0] == '{' { scalar(rest) } else { "" };
            *rest = rest.trim_start_matches(':').trim_start();
            elements.push((name, Self::read(rest)));
            *rest = rest.trim_start_matches(',').trim_start();
        }
        skip(rest, 1);
        Self::Many(brackets, elements)
    }

    fn write(&self, out: &mut String, depth: usize) {
        let Self::Many([open, close], elements) = self else { return self.flat(out) };
        let has_scalars = elements.iter().any(|(_, node)| matches!(node, Self::Scalar(_)));
        if elements.is_empty() || depth > 0 && (*open == '{' || has_scalars) {
            let start = out.len();
            self.flat(out);
            if out[start..].chars().count() <= WIDTH {
                return;
            }
            out.truncate(start);
        }
        out.push(*open);
        for (i, (name, node)) in elements.iter().enumerate() {
            let _ = write!(out, "{}\n{}", if i > 0 { "," } else { "" }, " ".repeat(depth + 1));
            out.push_str(name);
            out.push_str(if name.is_empty() { "" } else { ": " });
            node.write(out, depth + 1);
        }
        let end =
            if elements.is_empty() { String::new() } else { "\n".to_owned() + &" ".repeat(depth) };
        let _ = write!(out, "{end}{close}");
    }

    fn flat(&self, out: &mut String) {
        match self {
            Self::Scalar(text) => out.push_str(text),
            Self::Many([open, close], elements) => {
                out.push(*open);
                for (i, (name, node)) in elements.iter().enumerate() {
                    out.push_str(if i > 0 { ", " } else { "" });
                    out.push_str(name);
                    out.push_str(if name.is_empty() { "" } else { ": " });
                    node.flat(out);
                }
                out.push(*close);
            }
        }
    }
}

/// The string, number or word at the start of `rest`, which moves past it and past the spaces behind it.
fn scalar<'a>(rest: &mut &'a str) -> &'a str {
    let bytes = rest.as_bytes();
    let end = if bytes.first() == Some(&b'"') {
        let mut at = 1;
        while at < bytes.len() && bytes[at] != b'"' {
            at += if bytes[at] == b'\\' { 2 } else { 1 };
        }
        at + 1
    } else {
        let ends = |c: char| c.is_whitespace() || ",:]}".contains(c);
        // At least one byte, so that reading ends whatever the text is.
        rest.find(ends).unwrap_or(rest.len()).max(1)
    };
    let text = rest.get(..end).unwrap_or(rest);
    skip(rest, end);
    text
}

fn skip(rest: &mut &str, bytes: usize) {
    *rest = rest.get(bytes..).unwrap_or("").trim_start();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_has_a_line() {
        let text = r#"{"machine":{"cpu":"a, \"b\": c"},"left":[],"rows":[{"op":"gelu","shape":[2, 3],"ms":1e-07},
            {"op":"ü"}],"none":{}}"#;
        let expected = r#"{
 "machine": {"cpu": "a, \"b\": c"},
 "left": [],
 "rows": [
  {"op": "gelu", "shape": [2, 3], "ms": 1e-07},
  {"op": "ü"}
 ],
 "none": {}
}
"#;
        assert_eq!(lines(text), expected);
        assert_eq!(lines(expected), expected);
        assert_eq!(lines("[]"), "[]\n");
        assert_eq!(lines("3"), "3\n");
    }

    #[test]
    fn a_long_value_is_divided() {
        let cases: Vec<String> =
            (0..200).map(|i| format!("\"case {i}\": {{\"ms\": {i}}}")).collect();
        let text = format!("{{\"threads\": {{\"2\": {{{}}}}}}}", cases.join(", "));
        let laid_out = lines(&text);
        assert!(laid_out.contains("\n   \"case 7\": {\"ms\": 7},\n"), "{laid_out}");
        assert_eq!(laid_out.lines().count(), 200 + 6);
        let same: serde_json::Value = serde_json::from_str(&laid_out).unwrap();
        assert_eq!(same, serde_json::from_str::<serde_json::Value>(&text).unwrap());
    }
}
