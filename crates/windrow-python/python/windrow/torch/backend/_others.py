"""The pass for graphs whose operators run one by one: GELU and large groups by Windrow, as `patch` has them."""

from typing import Any

import torch
from torch import Tensor, fx

from windrow.torch._gelu import gelu_of_any
from windrow.torch._group_norm import group_norm, pays
from windrow.torch.backend._constants import value
from windrow.torch.backend._convolutions import TYPES, VALUE
from windrow.torch.backend._report import Report, name_of

_aten = torch.ops.aten


def others_to_windrows(graph: fx.Graph, report: Report | None) -> None:
    """Replaces calls of PyTorch's operators by ones of functions that compute the same, laid out alike."""
    for node in [*graph.nodes]:
        if node.target is _aten.gelu.default:
            if value(node).dtype in TYPES and value(node).device.type in ("cpu", "cuda"):
                _replace(graph, node, gelu_of_any, (node.args[0], node.kwargs.get("approximate", "none")), node)
                if report is not None:
                    report.fused(name_of(node), "gelu")
        elif node.target is _aten.native_group_norm.default and _is_large(node):
            x, weight, bias, *_, groups, eps = node.args
            (result,) = node.users
            _replace(graph, result, group_norm, (x, groups, weight, bias, eps), node)
            graph.erase_node(node)
            if report is not None:
                report.fused(name_of(node), "group_norm")


def _is_large(node: fx.Node) -> bool:
    x, weight, bias, *sizes, groups, _ = node.args
    image = value(x)
    if len(node.users) != 1 or not all(isinstance(n, int) for n in (*sizes, *image.shape)):
        return False
    (result,) = node.users
    likes: list[Any] = [value(t) for t in (weight, bias) if t is not None]
    is_of_types = all(like.dtype in (image.dtype, torch.float32) for like in likes)
    return result.args[1] == 0 and is_of_types and value(result).is_contiguous() and pays(image, groups)  # type: ignore[arg-type]


def _replace(graph: fx.Graph, node: fx.Node, function: Any, args: tuple[Any, ...], named: fx.Node) -> None:
    with graph.inserting_before(node):
        new = graph.call_function(function, args)
    new.meta = {name: named.meta[name] for name in ("nn_module_stack",) if name in named.meta}
    new.meta["val"], new.meta[VALUE] = value(node), node.meta.get(VALUE)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
