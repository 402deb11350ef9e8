//! Pictures as SVG text: a card with its own ground, whose colours follow the reader's light or dark mode.

use std::fmt::Write;

/// Colours by role: ground, text, faint text, lines, and three for data.
const STYLE: &str = "<style>
  svg { font: 12px system-ui, 'DejaVu Sans', sans-serif }
  .ground { fill: #ffffff; stroke: #d1d9e0 } .text { fill: #1f2328 } .faint { fill: #59636e }
  .line { stroke: #d1d9e0 } .base { stroke: #59636e } .head { font-weight: 600 }
  .a { fill: #1f6feb; stroke: #1f6feb } .b { fill: #bc4c00; stroke: #bc4c00 } .c { fill: #1a7f37; stroke: #1a7f37 }
  .open { fill: none; stroke-width: 1.8 } .dash { stroke-dasharray: 3 3 } .end { text-anchor: end } .mid { text-anchor: middle }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; stroke: #3d444d } .text { fill: #f0f6fc } .faint { fill: #9198a1 }
    .line { stroke: #3d444d } .base { stroke: #9198a1 }
    .a { fill: #4493f8; stroke: #4493f8 } .b { fill: #f0883e; stroke: #f0883e } .c { fill: #3fb950; stroke: #3fb950 }
    .open { fill: none }
  }
</style>
";

/// A picture that is being drawn.
pub(crate) struct Picture {
    body: String,
    width: f64,
}

impl Picture {
    pub(crate) fn new(width: f64) -> Self {
        Self { body: String::new(), width }
    }

    pub(crate) fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        let _ =
            writeln!(self.body, "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{text}</text>");
    }

    pub(crate) fn line(&mut self, from: (f64, f64), to: (f64, f64), class: &str) {
        let (x1, y1) = from;
        let (x2, y2) = to;
        let _ = writeln!(
            self.body,
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" class=\"{class}\"/>"
        );
    }

    /// A bar between two places, whichever is to the left.
    pub(crate) fn bar(&mut self, from: f64, to: f64, y: f64, height: f64, class: &str) {
        let (x, width) = (from.min(to), (to - from).abs());
        let _ = writeln!(
            self.body,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" class=\"{class}\"/>"
        );
    }

    pub(crate) fn dot(&mut self, x: f64, y: f64, class: &str) {
        let _ =
            writeln!(self.body, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" class=\"{class}\"/>");
    }

    /// The whole file, with a title for those who do not see it.
    pub(crate) fn finish(self, height: f64, title: &str) -> String {
        let width = self.width;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" role=\"img\">\n<title>{title}</title>\n{STYLE}\
             <rect x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"6\" class=\"ground\"/>\n{}</svg>\n",
            width - 1.0,
            height - 1.0,
            self.body
        )
    }
}

/// A logarithmic axis: where a value lies between two places.
#[derive(Clone, Copy)]
pub(crate) struct Axis {
    pub(crate) least: f64,
    pub(crate) most: f64,
    pub(crate) left: f64,
    pub(crate) right: f64,
}

impl Axis {
    pub(crate) fn at(&self, value: f64) -> f64 {
        let share = (value / self.least).ln() / (self.most / self.least).ln();
        self.left + share.clamp(0.0, 1.0) * (self.right - self.left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_logarithmic_and_hold_what_lies_outside() {
        let axis = Axis { least: 1.0, most: 100.0, left: 0.0, right: 10.0 };
        assert_eq!(axis.at(10.0), 5.0);
        assert_eq!((axis.at(0.1), axis.at(1e9)), (0.0, 10.0));
    }

    #[test]
    fn text_is_escaped() {
        let mut picture = Picture::new(10.0);
        picture.text(0.0, 0.0, "text", "a < b & c");
        assert!(picture.finish(10.0, "t").contains("a &lt; b &amp; c</text>"));
    }
}
