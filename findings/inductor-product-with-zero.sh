#!/usr/bin/env bash
# A compiled product with the number 0 is 0 for NaN and for infinities, where PyTorch itself gives NaN.
#
# Before it compiles a graph, Inductor replaces operators whose results are all the same number. It takes `x * 0` for one
# of them, so compiled code hides a NaN or an infinity that a model has computed. A product with a tensor of zeros is
# computed. torch 2.15.0 gives NaN.
#
# Seen: torch 2.11.0 on a CPU. Uncompiled and with the backend "aot_eager": nan, nan, -0.0. With "inductor": 0.0, 0.0, 0.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --disable-pip-version-check torch==2.11.0 numpy
cat > "$folder/example.py" <<'PYTHON'
import torch

x = torch.tensor([float("nan"), float("inf"), -1.0])


def product(x):
    return x * 0


said = ["uncompiled", product(x).tolist()]
for backend in ("aot_eager", "inductor"):
    torch._dynamo.reset()
    said += [backend, torch.compile(product, backend=backend)(x).tolist()]
said += ["by a tensor", torch.compile(lambda x, y: x * y)(x, torch.zeros(3)).tolist()]
print(*said)
PYTHON
got=$("$folder/environment/bin/python" "$folder/example.py" 2> "$folder/errors") || { cat "$folder/errors"; exit 1; }
echo "$got"
want="uncompiled [nan, nan, -0.0] aot_eager [nan, nan, -0.0] inductor [0.0, 0.0, 0.0] by a tensor [nan, nan, -0.0]"
test "$got" = "$want"
