"""The pass that fixes the layout of values with which results of a graph share memory, for graphs that Inductor compiles.

Inductor computes a part of a concatenation in its place there, if nothing else has fixed where the part lies. It also
removes copies that change nothing, such as `x[:, :, -2:].clone()` of a video of two frames. A result that is a view of
such a part then had the strides of the concatenation, others than Dynamo was promised, and kept all its memory.
"""

from operator import getitem
from typing import Any

import torch
from torch import fx

from windrow.torch.backend._constants import value
from windrow.torch.backend._convolutions import VALUE, called
from windrow.torch.backend._layout import is_dense
from windrow.torch.backend._original import is_view

_aten = torch.ops.aten


def fix_shared_results(graph: fx.Graph) -> None:
    """Fixes the layout of these values."""
    from torch._inductor.inductor_prims import force_stride_order

    (output,) = (node for node in graph.nodes if node.op == "output")
    shown = {base for node in output.all_input_nodes if (base := _base(node)) is not node}
    joined = {_base(part) for node in graph.nodes if node.target is _aten.cat.default for part in node.all_input_nodes}
    both = shown & joined
    for node in [n for n in graph.nodes if n in both and n.op != "placeholder" and is_dense(value(n))]:
        fixed = called(graph, node.next, force_stride_order, node, [*value(node).stride()])
        fixed.meta[VALUE] = node.meta.get(VALUE)
        node.replace_all_uses_with(fixed, lambda user, fixed=fixed: user is not fixed)


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory a node has once Inductor has removed the copies that change nothing."""
    while True:
        source: Any = node.args[0] if node.args else None
        if node.target is getitem and is_view(source):
            source = source.args[0]
        elif not is_view(node) and not (node.target is _aten.clone.default and _lie_alike(node, source)):
            return node
        if not isinstance(source, fx.Node):
            return node
        node = source


def _lie_alike(node: fx.Node, other: fx.Node) -> bool:
    return value(node).shape == value(other).shape and value(node).stride() == value(other).stride()
