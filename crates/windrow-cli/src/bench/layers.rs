//! Layer files: one 3x3 convolution a line, `name,n,c,h,w,k`.

use crate::failure::Failure;
use crate::files;
use serde::Deserialize;
use std::path::Path;

/// The 18 layers that ship with the command.
const CNN18: &str = include_str!("../../assets/cnn18.csv");

/// A 3x3 convolution, stride 1, no padding.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Layer {
    pub name: String,
    pub n: usize,
    pub c: usize,
    pub h: usize,
    pub w: usize,
    pub k: usize,
}

impl Layer {
    /// The same layer with a sixteenth of the batch, for a benchmark that ends soon.
    pub(crate) fn reduced(self) -> Self {
        Layer { n: self.n.div_ceil(16), ..self }
    }
}

/// The layers that ship with the command.
pub(crate) fn cnn18() -> Vec<Layer> {
    parse(CNN18).expect("the layers that ship with the command are valid")
}

/// The layers of a file.
pub(crate) fn read(path: &Path) -> Result<Vec<Layer>, Failure> {
    let input = |e: &str| Failure::Input(format!("{}: {e}", files::shown(path)));
    let layers = parse(&files::read_text(path)?).map_err(|e| input(&e))?;
    if layers.is_empty() { Err(input("no layers in it")) } else { Ok(layers) }
}

fn parse(text: &str) -> Result<Vec<Layer>, String> {
    let mut reader = csv::ReaderBuilder::new()
        .has_headers(false)
        .comment(Some(b'#'))
        .trim(csv::Trim::All)
        .from_reader(text.as_bytes());
    let layers = reader.records().map(|record| {
        let record = record.map_err(|e| e.to_string())?;
        match record.len() {
            // Names go to terminals, tables and plots.
            6 if files::escaped(&record[0]) != record[0] => {
                Err(format!("a name with control characters: {}", files::escaped(&record[0])))
            }
            6 => record.deserialize(None).map_err(|e| e.to_string()),
            n => Err(format!("a line of {n}: {}", record.iter().collect::<Vec<_>>().join(","))),
        }
    });
    let layers: Result<Vec<Layer>, String> = layers.collect();
    layers.map_err(|e| format!("expected lines of name,n,c,h,w,k: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_layers() {
        let layers = cnn18();
        assert_eq!(layers.len(), 18);
        let first = Layer { name: "layer_0".into(), n: 64, c: 3, h: 112, w: 112, k: 64 };
        assert_eq!(layers[0], first);
        assert_eq!(layers[0].clone().reduced(), Layer { n: 4, ..first });
    }

    #[test]
    fn bad_lines_are_named() {
        for bad in [
            "a\u{1b}[31m,1,2,3,4,5",
            "\"a\nb\",1,2,3,4,5",
            "a,1,2,3,4",
            "a,1,2,3,4,-5",
            "a,1,2,3,4,x",
            "a,1,2,3,4,5,6",
        ] {
            let message = parse(&format!("# comment\n{bad}\n")).unwrap_err();
            assert!(message.contains("name,n,c,h,w,k"), "{message}");
        }
        assert_eq!(parse(" # none\n# a\n").map(|l| l.len()).unwrap_or(0), 0);
    }
}
