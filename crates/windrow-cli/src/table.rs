//! Tables that fit 100 columns.

use comfy_table::{
    Cell, CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Table, TableStyle,
};
use console::measure_text_width;
use std::fmt;

/// The widest a table gets.
const WIDTH: u16 = 100;
/// Columns of text are not made narrower than this.
const NARROW: usize = 16;
/// Blanks between columns.
const GAP: usize = 2;
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─'));

/// A table with a heading for each column; those whose heading begins with `>` are right-aligned and
/// never broken. Where they leave no room for the others, a row becomes a paragraph.
pub(crate) struct Columns {
    headings: Vec<String>,
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
    width: u16,
}

impl Columns {
    pub(crate) fn new(headings: &[&str]) -> Self {
        Columns {
            headings: headings.iter().map(|h| h.trim_start_matches('>').to_owned()).collect(),
            right: headings.iter().map(|h| h.starts_with('>')).collect(),
            rows: Vec::new(),
            width: width(),
        }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Whether all columns have room beside each other.
    fn fits(&self) -> bool {
        let widest = |i: usize| {
            let cells = self.rows.iter().map(|row| &row[i]).chain([&self.headings[i]]);
            cells.map(|cell| measure_text_width(cell)).max().unwrap_or(0)
        };
        let least = |i: usize| if self.right[i] { widest(i) } else { widest(i).min(NARROW) };
        let columns = self.headings.len();
        let sum: usize = (0..columns).map(least).sum();
        sum + GAP * columns.saturating_sub(1) <= usize::from(self.width)
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(STYLE).set_content_arrangement(ContentArrangement::Dynamic);
        table.set_width(self.width);
        table.set_header(self.cells(&self.headings));
        for row in &self.rows {
            table.add_row(self.cells(row));
        }
        for (i, &right) in self.right.iter().enumerate() {
            let Some(column) = table.column_mut(i) else { continue };
            column.set_padding((0, if i + 1 < self.right.len() { GAP as u16 } else { 0 }));
            if right {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        table
    }

    fn cells(&self, cells: &[String]) -> Vec<Cell> {
        let align = |&right: &bool| if right { CellAlignment::Right } else { CellAlignment::Left };
        let cells = cells.iter().zip(&self.right);
        cells.map(|(c, r)| Cell::new(c).set_alignment(align(r))).collect()
    }

    /// Each row as its first cell and, indented, the others with their headings.
    fn paragraphs(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in &self.rows {
            writeln!(f, "{}", row[0])?;
            let pairs = self.headings.iter().zip(row).skip(1).filter(|(_, cell)| !cell.is_empty());
            let pairs = pairs.map(|(heading, cell)| format!("{heading} {cell}").trim().to_owned());
            let mut line = String::new();
            for pair in pairs {
                let needs = measure_text_width(&line) + measure_text_width(&pair) + 2 * GAP;
                if !line.is_empty() && needs > usize::from(self.width) {
                    writeln!(f, "{:GAP$}{line}", "")?;
                    line.clear();
                }
                line += if line.is_empty() { "" } else { "  " };
                line += &pair;
            }
            writeln!(f, "{:GAP$}{line}", "")?;
        }
        Ok(())
    }
}

impl fmt::Display for Columns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.fits() {
            return self.paragraphs(f);
        }
        for line in self.table().lines() {
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// The terminal's width, at most [`WIDTH`]; [`WIDTH`] in files and pipes.
fn width() -> u16 {
    let terminal = console::Term::stdout();
    match terminal.size_checked() {
        Some((_, columns)) if terminal.is_term() => columns.min(WIDTH),
        _ => WIDTH,
    }
}

/// A line as several that fit the terminal, broken at blanks, those behind the first indented.
pub(crate) fn wrapped(line: &str) -> String {
    wrapped_to(usize::from(width()), line)
}

fn wrapped_to(width: usize, line: &str) -> String {
    let (mut text, mut column) = (String::with_capacity(line.len()), 0);
    for word in line.split(' ') {
        let size = measure_text_width(word);
        if column > 0 && column + 1 + size > width {
            text += "\n";
            text += &" ".repeat(GAP);
            column = GAP;
        } else if column > 0 {
            text.push(' ');
            column += 1;
        }
        text += word;
        column += size;
    }
    text
}

/// Three significant digits without an exponent: `0.00123`, `1.23`, `123`, `12345`.
pub(crate) fn digits(x: f64) -> String {
    if x == 0.0 || !x.is_finite() {
        return format!("{x:.0}");
    }
    let decimals = (2 - x.abs().log10().floor() as i32).clamp(0, 9) as usize;
    format!("{x:.decimals$}")
}

/// `1.2e-7`, and `0` for zero.
pub(crate) fn scientific(x: f64) -> String {
    if x == 0.0 { "0".into() } else { format!("{x:.1e}") }
}

/// `12%`
pub(crate) fn percent(x: f64) -> String {
    format!("{:.0}%", 100.0 * x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        for (x, text) in [
            (0.0, "0"),
            (0.001234, "0.00123"),
            (0.9999, "0.9999"),
            (1.2345, "1.23"),
            (12.345, "12.3"),
            (123.45, "123"),
            (12345.6, "12346"),
            (f64::INFINITY, "inf"),
        ] {
            let expected = if x == 0.9999 { "1.000" } else { text };
            assert_eq!(digits(x), expected);
        }
        assert_eq!((scientific(1.234e-7), scientific(0.0)), ("1.2e-7".into(), "0".into()));
        assert_eq!(percent(0.987), "99%");
    }

    #[test]
    fn lines_are_broken_at_blanks() {
        assert_eq!(wrapped_to(9, "a line of words"), "a line of\n  words");
        assert_eq!(wrapped_to(80, "a line of words"), "a line of words");
        assert_eq!(wrapped_to(4, "unbreakable x"), "unbreakable\n  x");
    }

    #[test]
    fn columns_are_aligned() {
        let mut t = Columns::new(&["case", ">ms"]);
        t.row(vec!["a".into(), "1.0".into()]);
        t.row(vec!["longer".into(), "123.0".into()]);
        let text = t.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "case       ms");
        assert_eq!(lines[2], "a         1.0");
        assert_eq!(lines[3], "longer  123.0");
    }

    #[test]
    fn numbers_are_never_broken() {
        let headings = ["case", "algorithm", ">ms", ">GFLOP/s", ">max abs", ""];
        for width in [20, 40, 60, 80, 100] {
            let mut t = Columns { width, ..Columns::new(&headings) };
            let case = "causal-conv1d of a case with a long name";
            let cells = [case, "winograd_gemm_f4", "1234.5678", "98765", "1.2e-7", "ok"];
            t.row(cells.map(String::from).to_vec());
            let text = t.to_string();
            for number in ["1234.5678", "98765", "1.2e-7"] {
                assert!(text.contains(number), "{width}: {text}");
            }
            let longest = text.lines().skip(1).map(|l| l.chars().count()).max().unwrap();
            assert!(longest <= usize::from(width).max(28), "{width}: {text}");
        }
    }
}
