#!/usr/bin/env bash
# Inside of torch.compile, a GroupNorm of a channels-last image on the CPU is said to be row-major. It is channels-last.
#
# The kernel of `aten.native_group_norm` keeps the layout of its input. Its meta function, which says what traced code
# sees, gives contiguous strides. So code that asks for strides in a compiled function takes another branch than it does
# uncompiled, and a pass that trusts the traced strides changes the layout of the model's result.
#
# Seen: torch 2.14.1 on a CPU. Compiled: False. Uncompiled: True.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --disable-pip-version-check torch==2.14.1 numpy
cat > "$folder/example.py" <<'PYTHON'
import torch

norm = torch.nn.GroupNorm(4, 16)
image = torch.randn(2, 16, 8, 8).contiguous(memory_format=torch.channels_last)


def is_channels_last(x):
    y = norm(x)
    return y.is_contiguous(memory_format=torch.channels_last), y


compiled = torch.compile(is_channels_last, backend="aot_eager")
said, result = compiled(image)
truth = result.is_contiguous(memory_format=torch.channels_last)
uncompiled, _ = is_channels_last(image)
print(f"torch {torch.__version__}: compiled code says {said}, its result is {truth}, uncompiled code says {uncompiled}")
raise SystemExit((said, truth, uncompiled) != (False, True, True))
PYTHON
"$folder/environment/bin/python" "$folder/example.py" || { echo "changed: see above"; exit 1; }
