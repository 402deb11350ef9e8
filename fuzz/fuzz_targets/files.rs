//! Any bytes as a `.npy`, `.npz` or `.safetensors` file: a tensor or an error.

#![no_main]

use libfuzzer_sys::fuzz_target;
use windrow_cli::files;

fuzz_target!(|data: &[u8]| {
    let Some((&kind, bytes)) = data.split_first() else { return };
    let extension = ["npy", "npz", "safetensors"][usize::from(kind) % 3];
    let path =
        std::env::temp_dir().join(format!("windrow-fuzz-{}.{extension}", std::process::id()));
    std::fs::write(&path, bytes).expect("a temporary file");
    if let Ok(tensor) = files::read(&path) {
        assert_eq!(tensor.as_bytes().len(), tensor.desc().bytes());
    }
    let _ = std::fs::remove_file(&path);
});
