#!/usr/bin/env bash
# A compiled module whose first call is inside of a TorchDispatchMode is never compiled afterwards.
#
# Such modes count operations, log operators or measure memory. While one is active, torch.compile runs a function
# uncompiled, as expected. But it then remembers the function as one to leave alone: later calls outside of the mode are
# uncompiled, too, without a warning. So a model whose FLOPs are counted before its first ordinary call stays slow
# until `torch.compiler.reset()`. PyTorch 2.15.0 compiles the later call.
#
# Seen: torch 2.11.0 on a CPU. Graphs compiled: 0 after a call in a mode and one outside, 1 after a reset and a call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --disable-pip-version-check torch==2.11.0 numpy
cat > "$folder/example.py" <<'PYTHON'
import torch
from torch.utils.flop_counter import FlopCounterMode

graphs = []


def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward


model, x = torch.nn.Linear(3, 3), torch.randn(2, 3)
compiled = torch.compile(model, backend=backend)
with torch.no_grad():
    with FlopCounterMode(display=False):
        compiled(x)
    compiled(x)
    before = len(graphs)
    torch.compiler.reset()
    compiled(x)
print(f"torch {torch.__version__}: {before} graphs after a mode, {len(graphs)} after a reset")
raise SystemExit((before, len(graphs)) != (0, 1))
PYTHON
"$folder/environment/bin/python" "$folder/example.py" || { echo "changed: see above"; exit 1; }
