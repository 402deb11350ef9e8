#!/usr/bin/env bash
# A module that counts its calls through `self.__dict__` counts wrong under torch.compile, from the second call on.
#
# Dynamo takes what `self.__dict__.get` gives while it traces for a constant, and makes no guard for it. Read as an
# attribute (`getattr(self, "calls", 0)`), the same state is right.
#
# Seen: torch 2.14.1 with the backend "eager", so that no compiler is asked. The number of calls in three calls: 1, 2, 3
# uncompiled; 1, 1, 1 compiled.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --disable-pip-version-check torch==2.14.1 numpy
cat > "$folder/example.py" <<'PYTHON'
import torch


class InDict(torch.nn.Module):
    def forward(self, x):
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        return x * self.calls


class AsAttribute(torch.nn.Module):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return x * self.calls


def factors(function):
    return [function(torch.ones(1)).item() for _ in range(3)]


rows = {}
for kind in (InDict, AsAttribute):
    torch.compiler.reset()
    rows[kind.__name__] = factors(kind()), factors(torch.compile(kind(), backend="eager"))
    print(f"torch {torch.__version__} {kind.__name__}: uncompiled {rows[kind.__name__][0]}, compiled {rows[kind.__name__][1]}")
right = [1.0, 2.0, 3.0]
in_dict, as_attribute = rows["InDict"], rows["AsAttribute"]
is_as_seen = in_dict[0] == right and in_dict[1] != right and as_attribute == (right, right)
raise SystemExit(not is_as_seen)
PYTHON
"$folder/environment/bin/python" "$folder/example.py" || { echo "changed: see above"; exit 1; }
