//! Tables that fit 100 columns.

use comfy_table::{Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};

/// The widest a table gets.
const WIDTH: u16 = 100;
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─'));

/// A table with a heading for each column; those whose heading begins with `>` are right-aligned.
pub(crate) struct Columns {
    table: Table,
    right: Vec<bool>,
}

impl Columns {
    pub(crate) fn new(headings: &[&str]) -> Self {
        let mut table = Table::new();
        table.load_style(STYLE).set_content_arrangement(ContentArrangement::Dynamic);
        table.set_width(width());
        let right: Vec<bool> = headings.iter().map(|h| h.starts_with('>')).collect();
        let mut columns = Columns { table, right };
        let cells = headings.iter().map(|h| h.trim_start_matches('>').to_owned()).collect();
        let header = columns.cells(cells);
        columns.table.set_header(header);
        for i in 0..headings.len() {
            if let Some(column) = columns.table.column_mut(i) {
                column.set_padding((0, if i + 1 < headings.len() { 2 } else { 0 }));
            }
        }
        columns
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        let cells = self.cells(cells);
        self.table.add_row(cells);
    }

    fn cells(&self, cells: Vec<String>) -> Vec<Cell> {
        let align = |&right: &bool| if right { CellAlignment::Right } else { CellAlignment::Left };
        cells
            .into_iter()
            .zip(&self.right)
            .map(|(c, r)| Cell::new(c).set_alignment(align(r)))
            .collect()
    }
}

impl std::fmt::Display for Columns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for line in self.table.lines() {
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
}
