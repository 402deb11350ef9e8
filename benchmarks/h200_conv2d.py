"""conv2d over the layers of a file: Windrow beside cuDNN through torch, in one run on one GPU.

    cargo build --release --example conv2d_layers
    python benchmarks/h200_conv2d.py target/release/examples/conv2d_layers benchmarks/layers/cnn18.csv OUT

writes OUT/conv2d.json, every time and rate, and OUT/conv2d.md, the rates as a table. Rates count the
operations of the direct algorithm. cuDNN chooses among its algorithms by measuring (benchmark=True);
times are medians of graph replays that take turns between two sets of tensors, as Windrow's.
"""

import csv
import io
import math
import pathlib
import statistics
import subprocess
import sys

import provenance
import torch
import torch.nn.functional as F

MODES = {
    "f32 NCHW": (torch.float32, False, torch.contiguous_format),
    "f32 channels-last": (torch.float32, False, torch.channels_last),
    "TF32 NCHW": (torch.float32, True, torch.contiguous_format),
    "TF32 channels-last": (torch.float32, True, torch.channels_last),
    "f16 NCHW": (torch.float16, True, torch.contiguous_format),
    "f16 channels-last": (torch.float16, True, torch.channels_last),
    "bf16 NCHW": (torch.bfloat16, True, torch.contiguous_format),
    "bf16 channels-last": (torch.bfloat16, True, torch.channels_last),
}
REPLAYS = 11
# Where a plan takes cuDNN the same kernel runs on both sides, and two timings differ by about so much.
LEVEL = 0.98


def layers(path):
    for row in csv.reader(path.read_text().splitlines()):
        if row and not row[0].startswith("#"):
            yield row[0], [int(v) for v in row[1:]]


def cudnn(n, c, h, w, k, dtype, tf32, memory_format):
    """Milliseconds of one convolution."""
    torch.backends.cudnn.allow_tf32 = tf32
    xs = [torch.randn(n, c, h, w, device="cuda").to(dtype, memory_format=memory_format) for _ in range(2)]
    filter = torch.randn(k, c, 3, 3, device="cuda").to(dtype, memory_format=memory_format)
    for x in xs:
        F.conv2d(x, filter)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for x in xs:
        F.conv2d(x, filter)
    end.record()
    end.synchronize()
    runs = min(40, max(2, int(4 / (start.elapsed_time(end) / 2))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(runs):
            F.conv2d(xs[i % 2], filter)
    times = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / runs)
    return statistics.median(times)


def geometric_mean(values):
    return math.exp(statistics.fmean(map(math.log, values)))


def main(binary, layer_file, out):
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = True
    printed = subprocess.run([binary, layer_file], capture_output=True, text=True, check=True).stdout
    ours = {(r["layer"], r["mode"]): r for r in csv.DictReader(io.StringIO(printed))}
    rows = []
    for name, (n, c, h, w, k) in layers(pathlib.Path(layer_file)):
        flops = 2 * n * k * c * 9 * (h - 2) * (w - 2)
        for mode, options in MODES.items():
            mine = ours[name, mode]
            theirs = cudnn(n, c, h, w, k, *options)
            rows.append({
                "layer": name, "n": n, "c": c, "h": h, "w": w, "k": k, "mode": mode,
                "windrow_ms": float(mine["ms"]), "windrow_tflops": flops / float(mine["ms"]) * 1e-9,
                "cudnn_ms": theirs, "cudnn_tflops": flops / theirs * 1e-9, "plan": mine["plan"],
            })
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda,
    }
    provenance.write(out / "conv2d.json", provenance.commit() | {"machine": machine, "rows": rows})
    (out / "conv2d.md").write_text(table(machine, rows))


def table(machine, rows):
    text = [", ".join(f"{k} {v}" for k, v in machine.items()) + f". {provenance.sentence()}", "",
            f"TFLOP/s counted as direct convolution: Windrow / cuDNN. Level: at least {LEVEL} of cuDNN's rate.", "",
            "| C,H,W,K,N | " + " | ".join(MODES) + " |", "|---|" + "---|" * len(MODES)]
    by_layer = {}
    for row in rows:
        by_layer.setdefault(row["layer"], {})[row["mode"]] = row
    for modes in by_layer.values():
        r = next(iter(modes.values()))
        cells = [f"{modes[m]['windrow_tflops']:.0f} / {modes[m]['cudnn_tflops']:.0f}" for m in MODES]
        text.append(f"| {r['c']},{r['h']},{r['w']},{r['k']},{r['n']} | " + " | ".join(cells) + " |")
    means = []
    for m in MODES:
        of = [geometric_mean([r[key] for r in rows if r["mode"] == m]) for key in ("windrow_tflops", "cudnn_tflops")]
        ratios = [r["cudnn_ms"] / r["windrow_ms"] for r in rows if r["mode"] == m]
        ahead, level = sum(r >= 1 for r in ratios), sum(r >= LEVEL for r in ratios)
        means.append(f"**{of[0]:.0f} / {of[1]:.0f}**, ahead on {ahead}, at least level on {level}")
    text.append("| **geometric mean** | " + " | ".join(means) + " |")
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    main(*sys.argv[1:])
