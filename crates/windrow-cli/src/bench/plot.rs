//! Rates as horizontal bars, one panel for each operator, to SVG, or with the feature `png` to PNG.

use super::row::Row;
use crate::failure::Failure;
use crate::files::shown;
use crate::machine::Machine;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
#[cfg(feature = "png")]
use plotters::style::{FontStyle, register_font};
use std::path::Path;

const WIDTH: u32 = 1000;
const BAR: u32 = 16;
const HEADING: u32 = 34;
const LABELS: i32 = 390;
const FONT: &str = "sans-serif";
/// Bitmaps need a font, and a bare machine has none.
#[cfg(feature = "png")]
const FONT_FILE: &[u8] = include_bytes!("../../assets/DejaVuSans-ascii.ttf");

const FAST: RGBColor = RGBColor(38, 102, 178);
const DIRECT: RGBColor = RGBColor(200, 90, 20);
const GRID: RGBColor = RGBColor(215, 215, 215);
const TEXT: RGBColor = RGBColor(30, 30, 30);

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Refuses a name of another format, before anything is measured.
pub(super) fn check_name(path: &Path) -> std::result::Result<(), Failure> {
    let detail = match path.extension().and_then(|e| e.to_str()) {
        Some("svg") => return Ok(()),
        Some("png") if cfg!(feature = "png") => return Ok(()),
        Some("png") => "this build draws .svg only; .png needs the feature `png` of windrow-cli",
        _ if cfg!(feature = "png") => "expected a name in .svg or .png",
        _ => "expected a name in .svg",
    };
    Err(Failure::Input(format!("{}: {detail}", shown(path))))
}

/// Draws the rows for a file of this name.
pub(super) fn draw(
    path: &Path,
    machine: &Machine,
    rows: &[Row],
) -> std::result::Result<Vec<u8>, Failure> {
    let bytes = match path.extension().and_then(|e| e.to_str()) {
        #[cfg(feature = "png")]
        Some("png") => png(machine, rows),
        _ => svg(machine, rows).map(String::into_bytes),
    };
    bytes.map_err(|e| Failure::Input(format!("{}: {e}", shown(path))))
}

fn svg(machine: &Machine, rows: &[Row]) -> Result<String> {
    let mut text = String::new();
    panels(&SVGBackend::with_string(&mut text, size(rows)).into_drawing_area(), machine, rows)?;
    Ok(text)
}

#[cfg(feature = "png")]
fn png(machine: &Machine, rows: &[Row]) -> Result<Vec<u8>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("plot.png"); // the backend writes to files only
    panels(&BitMapBackend::new(&path, size(rows)).into_drawing_area(), machine, rows)?;
    Ok(std::fs::read(path)?)
}

fn groups(rows: &[Row]) -> impl Iterator<Item = &[Row]> {
    rows.chunk_by(|a, b| a.op == b.op)
}

fn panel_height(rows: &[Row]) -> u32 {
    HEADING + BAR * rows.len() as u32 + 44
}

fn size(rows: &[Row]) -> (u32, u32) {
    (WIDTH, HEADING + groups(rows).map(panel_height).sum::<u32>())
}

fn panels<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    machine: &Machine,
    rows: &[Row],
) -> Result<()>
where
    B::ErrorType: 'static,
{
    #[cfg(feature = "png")]
    register_font(FONT, FontStyle::Normal, FONT_FILE).map_err(|_| "the font is damaged")?;
    area.fill(&WHITE)?;
    let (title, mut rest) = area.split_vertically(HEADING);
    title.draw(&Text::new(
        format!("{}, {}", machine.summary(), machine.ceilings()),
        (12, 10),
        style(14),
    ))?;
    for group in groups(rows) {
        let (panel, below) = rest.split_vertically(panel_height(group));
        draw_panel(&panel, group)?;
        rest = below;
    }
    area.present()?;
    Ok(())
}

fn draw_panel<B: DrawingBackend>(panel: &DrawingArea<B, Shift>, rows: &[Row]) -> Result<()>
where
    B::ErrorType: 'static,
{
    let (_, unit) = rows[0].rate();
    let highest = rows.iter().map(|r| r.rate().0.max(direct_rate(r))).fold(0.0, f64::max);
    let scale = f64::from(WIDTH as i32 - LABELS - 60) / highest.max(f64::MIN_POSITIVE);
    let x = |rate: f64| LABELS + (rate * scale) as i32;
    let (top, bottom) = (HEADING as i32, (HEADING + BAR * rows.len() as u32) as i32);

    let title = format!("{}, {unit}; whiskers from P25 to P75", rows[0].op);
    panel.draw(&Text::new(title, (12, 10), style(15)))?;
    let legend = format!("line: {}", rows[0].direct);
    let right = style(12).pos(Pos::new(HPos::Right, VPos::Top)).color(&DIRECT);
    panel.draw(&Text::new(legend, (WIDTH as i32 - 20, 12), right))?;

    let step = tick_step(highest);
    for i in 0..=(highest / step) as usize {
        let tick = step * i as f64;
        panel.draw(&PathElement::new([(x(tick), top), (x(tick), bottom)], GRID))?;
        let below = style(11).pos(Pos::new(HPos::Center, VPos::Top));
        panel.draw(&Text::new(format!("{tick}"), (x(tick), bottom + 5), below))?;
    }
    for (i, row) in rows.iter().enumerate() {
        let (y0, y1) = (top + BAR as i32 * i as i32 + 2, top + BAR as i32 * (i as i32 + 1) - 2);
        let middle = (y0 + y1) / 2;
        let (rate, _) = row.rate();
        let label = format!("{} {} {} {}", row.case, row.shape, row.dtype, row.algorithm);
        let left = style(12).pos(Pos::new(HPos::Right, VPos::Center));
        panel.draw(&Text::new(label, (LABELS - 8, middle), left))?;
        panel.draw(&Rectangle::new([(LABELS, y0), (x(rate), y1)], FAST.filled()))?;
        let (low, high) = (rate * row.ms_median / row.ms_p75, rate * row.ms_median / row.ms_p25);
        panel.draw(&PathElement::new([(x(low), middle), (x(high), middle)], BLACK))?;
        let direct = x(direct_rate(row));
        panel.draw(&PathElement::new([(direct, y0), (direct, y1)], DIRECT.stroke_width(2)))?;
        let value = style(11).pos(Pos::new(HPos::Left, VPos::Center));
        let end = x(high).max(x(rate)).max(direct) + 5;
        panel.draw(&Text::new(crate::table::digits(rate), (end, middle), value))?;
    }
    Ok(())
}

fn direct_rate(row: &Row) -> f64 {
    row.rate().0 * row.ms_median / row.direct_ms_median
}

/// 1, 2 or 5 times a power of ten, for four to ten ticks.
fn tick_step(highest: f64) -> f64 {
    let magnitude = 10f64.powf((highest.max(f64::MIN_POSITIVE) / 4.0).log10().floor());
    let steps = [5.0, 2.0, 1.0].map(|s| s * magnitude);
    steps.into_iter().find(|s| highest / s >= 4.0).unwrap_or(magnitude)
}

fn style(size: u32) -> TextStyle<'static> {
    (FONT, size).into_font().color(&TEXT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        for (highest, step) in [(100.0, 20.0), (39.0, 5.0), (4.0, 1.0), (0.9, 0.2), (850.0, 200.0)]
        {
            assert!((tick_step(highest) / step - 1.0).abs() < 1e-9, "{highest}");
        }
    }
}
