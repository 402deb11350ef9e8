//! The corpus of the fuzz target `files`: its first inputs and its findings, `fuzz/corpus/files/*`.

use std::path::Path;
use windrow_cli::files;

#[test]
fn files_of_the_corpus_are_tensors_or_errors() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/files");
    // The packaged crate has none.
    if !corpus.exists() {
        return;
    }
    let mut count = 0;
    for entry in std::fs::read_dir(corpus).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        let Some((&kind, bytes)) = bytes.split_first() else { continue };
        let extension = ["npy", "npz", "safetensors"][usize::from(kind) % 3];
        let name = format!("windrow-corpus-{}.{extension}", std::process::id());
        let copy = std::env::temp_dir().join(name);
        std::fs::write(&copy, bytes).unwrap();
        if let Ok(tensor) = files::read(&copy) {
            assert_eq!(tensor.as_bytes().len(), tensor.desc().bytes(), "{path:?}");
        }
        std::fs::remove_file(&copy).unwrap();
        count += 1;
    }
    assert!(count > 10, "{count}");
}
