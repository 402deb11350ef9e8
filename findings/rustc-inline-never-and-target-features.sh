#!/usr/bin/env bash
# rustc drops `#[inline(never)]` from a function that has `#[target_feature]`.
#
# LLVM then gets no `noinline` for it, and inlines it into callers that enable the same features. So the attribute does
# not keep a rare part of a SIMD kernel out of line. A function without features of its own between the two does.
#
# Seen: rustc 1.95.0 (LLVM 22.1.2) on x86-64. Needs rustc alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
rustc --version
cat > "$folder/lib.rs" <<'RUST'
#[inline(never)]
#[target_feature(enable = "avx2")]
#[unsafe(no_mangle)]
pub fn with_features(x: &mut [u32]) {
    x[0] += 1;
}

#[inline(never)]
#[unsafe(no_mangle)]
pub fn without_features(x: &mut [u32]) {
    x[0] += 1;
}
RUST
rustc --edition 2024 --crate-type lib --target x86_64-unknown-linux-gnu --emit=llvm-ir -O -C no-prepopulate-passes \
    -o "$folder/lib.ll" "$folder/lib.rs"
# True if the attributes of a function name `noinline`.
is_kept() {
    group=$(grep -E "^define .*@$1\(" "$folder/lib.ll" | grep -oE '#[0-9]+' | tail -n 1)
    grep -E "^attributes $group = " "$folder/lib.ll" | grep -q noinline
}
is_kept without_features || { echo "changed: noinline is dropped without features too"; exit 1; }
if is_kept with_features; then echo "changed: noinline is kept beside features"; exit 1; fi
echo "noinline: kept without target features, dropped with them"
