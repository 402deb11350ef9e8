//! Dictionaries as Python writes them: strings, words, tuples and lists.

/// A value of a dictionary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value<'a> {
    /// A text between quotation marks, without a prefix as in `u'..'`.
    Text(&'a str),
    /// A number, `True`, `False`, `None`.
    Word(&'a str),
    /// A tuple: parentheses with a comma in them, or with nothing.
    Tuple(Vec<Value<'a>>),
    /// A list, or a dictionary in the dictionary.
    Other,
}

impl Value<'_> {
    /// The numbers of a tuple.
    pub(super) fn sizes(&self) -> Option<Vec<usize>> {
        let Value::Tuple(values) = self else { return None };
        // Python 2 wrote long integers with an L.
        let size = |value: &Value<'_>| match value {
            Value::Word(word) => word.strip_suffix('L').unwrap_or(word).parse().ok(),
            _ => None,
        };
        values.iter().map(size).collect()
    }

    pub(super) fn word(&self) -> &str {
        match self {
            Value::Word(word) | Value::Text(word) => word,
            Value::Tuple(_) => "a tuple",
            Value::Other => "a list",
        }
    }
}

/// The entries of a dictionary, in their order; `None` if the text is none.
pub(super) fn dictionary(text: &str) -> Option<Vec<(&str, Value<'_>)>> {
    let mut reader = Reader(text);
    let entries = reader.entries(0)?;
    reader.skip_blanks();
    reader.0.is_empty().then_some(entries)
}

/// The deepest nesting: a description of a structure is as deep as its structures are nested.
const DEPTH: usize = 32;

/// The remaining text.
struct Reader<'a>(&'a str);

impl<'a> Reader<'a> {
    fn skip_blanks(&mut self) {
        self.0 = self.0.trim_start_matches([' ', '\t', '\n', '\r', '\x0c']);
    }

    /// Goes on behind this character if it is the next.
    fn take(&mut self, c: char) -> bool {
        self.skip_blanks();
        let rest = self.0.strip_prefix(c);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn entries(&mut self, depth: usize) -> Option<Vec<(&'a str, Value<'a>)>> {
        let mut entries = Vec::new();
        if depth > DEPTH || !self.take('{') {
            return None;
        }
        while !self.take('}') {
            self.skip_blanks();
            let key = self.text()?;
            if !self.take(':') {
                return None;
            }
            entries.push((key, self.value(depth)?));
            if !self.take(',') {
                return self.take('}').then_some(entries);
            }
        }
        Some(entries)
    }

    fn value(&mut self, depth: usize) -> Option<Value<'a>> {
        self.skip_blanks();
        match self.0.chars().next()? {
            '(' => self.between('(', ')', depth + 1),
            '[' => self.between('[', ']', depth + 1).map(|_| Value::Other),
            '{' => self.entries(depth + 1).map(|_| Value::Other),
            _ => self.text().map(Value::Text).or_else(|| self.word()),
        }
    }

    /// A tuple, or what is in parentheses alone.
    fn between(&mut self, open: char, close: char, depth: usize) -> Option<Value<'a>> {
        if depth > DEPTH || !self.take(open) {
            return None;
        }
        let (mut values, mut has_comma) = (Vec::new(), false);
        while !self.take(close) {
            values.push(self.value(depth)?);
            if !self.take(',') {
                if !self.take(close) {
                    return None;
                }
                break;
            }
            has_comma = true;
        }
        match values.pop() {
            Some(only) if values.is_empty() && !has_comma => Some(only),
            last => {
                values.extend(last);
                Some(Value::Tuple(values))
            }
        }
    }

    /// A string without escapes, which no name of a type has.
    fn text(&mut self) -> Option<&'a str> {
        let inside = self.0.strip_prefix(['u', 'U', 'r', 'R', 'b', 'B']).unwrap_or(self.0);
        let quote = inside.chars().next().filter(|c| ['\'', '"'].contains(c))?;
        let (text, rest) = inside[1..].split_once(quote)?;
        if text.contains(['\\', '\n']) {
            return None;
        }
        self.0 = rest;
        Some(text)
    }

    fn word(&mut self) -> Option<Value<'a>> {
        let start = self.0.strip_prefix(['+', '-']).unwrap_or(self.0);
        let len = start.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '.');
        let end = self.0.len() - start.len() + len.unwrap_or(start.len());
        let (word, rest) = self.0.split_at(end);
        self.0 = rest;
        (!word.trim_start_matches(['+', '-']).is_empty()).then_some(Value::Word(word))
    }
}
