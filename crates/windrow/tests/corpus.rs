//! The corpus of the fuzzer: its first inputs and its findings, `fuzz/corpus/OPERATOR/*`.

use std::path::Path;
use windrow::verify::{Choices, try_choices};

#[test]
fn the_corpus_passes() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    // The packaged crate has none.
    if !corpus.exists() {
        return;
    }
    let causal = ["causal_conv1d", "causal_conv1d_update", "causal_conv1d_serving"];
    for operator in ["gelu", "conv2d", "conv3d"].into_iter().chain(causal) {
        let mut count = 0;
        for entry in std::fs::read_dir(corpus.join(operator)).unwrap() {
            let path = entry.unwrap().path();
            println!("{}", path.display());
            try_choices(operator, Choices::from_bytes(&std::fs::read(&path).unwrap()));
            count += 1;
        }
        assert!(count > 0, "{operator}");
    }
}
