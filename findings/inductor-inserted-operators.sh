#!/usr/bin/env bash
# A custom operator that a pass puts into Inductor's graph gets its input in another layout than the graph says.
#
# In the graph the operator's input is a copy in channels-last. Inductor treats the copy as pointwise, makes it row-major, and gives
# that to the operator: the default constraint on custom operators, "needs exact strides", holds only for nodes with
# `meta["eager_input_vals"]`, which a node made by `graph.call_function` lacks. An operator whose result is laid out as its
# input then fails on the check of its strides, and one that lays its result out by itself copies its input on each call.
#
# Seen: torch 2.14.1 and 2.15.0, on the CPU. Strides of a [1, 4, 3, 5] tensor: the graph says (60, 1, 20, 4), the operator gets
# (60, 15, 5, 1). With the entry in `meta` it gets (60, 1, 20, 4). Needs a C++ compiler.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --disable-pip-version-check torch==2.14.1 numpy
cat > "$folder/example.py" <<'PYTHON'
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

library = torch.library.Library("demo", "DEF")
library.define("look(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
said, given = [], []


def look(x):
    given.append(x.stride())
    return x.clone(memory_format=torch.contiguous_format)


library.impl("look", look, "CPU")
torch.library.register_fake("demo::look", lambda x: x.new_empty(x.shape), lib=library)


class Insert(CustomGraphPass):
    """Puts the operator in front of each negation."""

    def __init__(self, tells):
        self.tells = tells

    def __call__(self, graph):
        for node in [*graph.nodes]:
            if node.target is torch.ops.aten.neg.default:
                image = node.args[0]
                with graph.inserting_before(node):
                    new = graph.call_function(torch.ops.demo.look.default, (image,))
                new.meta["val"] = torch.ops.demo.look.default(image.meta["val"])
                if self.tells:
                    new.meta["eager_input_vals"] = (image.meta["val"],), {}
                node.replace_input_with(image, new)
                said.append(image.meta["val"].stride())

    def uuid(self):
        return None


def function(x):
    return -(x + 1).clone(memory_format=torch.channels_last)


for tells in (False, True):
    torch.compiler.reset()
    with config.patch(post_grad_custom_post_pass=Insert(tells), fx_graph_cache=False):
        torch.compile(function)(torch.randn(1, 4, 3, 5))
    how = "with" if tells else "without"
    print(f"torch {torch.__version__}, {how} eager_input_vals: the graph says {said[-1]}, the operator gets {given[-1]}")
last, row_major = (60, 1, 20, 4), (60, 15, 5, 1)
raise SystemExit((said, given) != ([last, last], [row_major, last]))
PYTHON
"$folder/environment/bin/python" "$folder/example.py" || { echo "changed: see above"; exit 1; }
