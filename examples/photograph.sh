#!/usr/bin/env bash
# The photograph of photograph.rs through `windrow run`: the same pictures from the command.
# Usage: examples/photograph.sh [FOLDER]
set -euo pipefail
out=$(realpath -m "${1:-target/photograph}")
cd "$(dirname "$0")/.."
mkdir -p "$out"

windrow() { cargo run --release --quiet --bin windrow -- "$@"; }
example() { cargo run --release --quiet --example "$@"; }

example photograph -- "$out"
windrow run conv2d --input "$out/image.npy" --channels-last --weight "$out/laplace.npy" \
    --padding 1 --activation relu --verify --output "$out/edges.npy"
windrow run causal-conv1d --input "$out/rows.npy" --channels-last --weight "$out/decay.npy" \
    --verify --output "$out/trails.npy"
example to_png -- "$out/edges.npy" "$out/edges-run.png"
example to_png -- "$out/trails.npy" "$out/trails-run.png"
cmp "$out/edges.png" "$out/edges-run.png"
cmp "$out/trails.png" "$out/trails-run.png"
echo "the pictures of the library and of the command are the same: $out"
