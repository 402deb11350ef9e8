#!/usr/bin/env bash
# Enlarging an image takes several times as long in a graph of AOTAutograd whose operators run one by one.
#
# AOTAutograd is given no table of decompositions there, as in `torch.compile(backend="aot_eager")`. Still `F.interpolate` does not
# arrive as `upsample_nearest2d`: operators that have an implementation in Python for the dispatch key CompositeImplicitAutograd are
# replaced by it while the graph is traced. It makes an index for each pixel, which a compiler turns into a simple loop, but which
# takes much longer than PyTorch's own kernel if `_unsafe_index` itself runs. Other modes, such as bilinear, become dozens of
# operators.
#
# Seen: torch 2.14.1, one thread of a Xeon with AVX-512, [1, 128, 80, 80] in channels-last by 2: `upsample_nearest2d` 0.7 ms,
# `_unsafe_index` 20 ms. The script fails if the operator arrives whole, or if the graph takes less than three times as long.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --disable-pip-version-check torch==2.14.1 numpy
cat > "$folder/example.py" <<'PYTHON'
import time

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile


def enlarge(x):
    return F.interpolate(x, scale_factor=2, mode="nearest")


def names(call, x):
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call(x)
    of = {"aten::upsample_nearest2d", "aten::_unsafe_index"}
    return sorted(of & {event.key for event in profiled.key_averages()})


def milliseconds(call, x):
    times = []
    for _ in range(20):
        start = time.perf_counter()
        call(x)
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


torch.set_num_threads(1)
image = torch.randn(1, 128, 80, 80).contiguous(memory_format=torch.channels_last)
with torch.inference_mode():
    graph = torch.compile(enlarge, backend="aot_eager")
    assert torch.equal(graph(image), enlarge(image))
    found = {"eager": enlarge, "aot_eager": graph}
    called = {name: names(call, image) for name, call in found.items()}
    times = {name: milliseconds(call, image) for name, call in found.items()}
for name in found:
    print(f"torch {torch.__version__}, {name}: {', '.join(called[name])}: {times[name]:.2f} ms")
is_as_seen = called == {"eager": ["aten::upsample_nearest2d"], "aot_eager": ["aten::_unsafe_index"]}
raise SystemExit(not (is_as_seen and times["aot_eager"] > 3 * times["eager"]))
PYTHON
"$folder/environment/bin/python" "$folder/example.py" || { echo "changed: see above"; exit 1; }
