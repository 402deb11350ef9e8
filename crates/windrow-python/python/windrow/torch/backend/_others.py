"""The pass for graphs whose operators run one by one: GELU and group normalisations of large images by Windrow."""

from typing import Any

import torch
from torch import fx

from windrow.torch._fused import CONV2D_FUSED
from windrow.torch._gelu import gelu_of_any
from windrow.torch._group_norm import group_norm, group_norm_in_channels_last, pays, pays_in_channels_last
from windrow.torch.backend._constants import value
from windrow.torch.backend._convolutions import TYPES, VALUE
from windrow.torch.backend._layout import keep_results
from windrow.torch.backend._report import Report, name_of

_aten = torch.ops.aten


def others_to_windrows(graph: fx.Graph, report: Report | None) -> None:
    """Replaces calls of PyTorch's operators by calls of functions that compute the same."""
    norms = {node for node in graph.nodes if node.target is _aten.native_group_norm.default and _may_be_ours(node)}
    in_last = {node for node in norms if pays_in_channels_last(value(_uncopied(node.args[0])), node.args[-2])}
    if in_last and not keep_results(graph):
        in_last.clear()
    _read_any_layout(graph, in_last)
    for node in [*graph.nodes]:
        if node.target is _aten.gelu.default:
            if value(node).dtype in TYPES and value(node).device.type in ("cpu", "cuda"):
                _replace(graph, node, gelu_of_any, (node.args[0], node.kwargs.get("approximate", "none")), node)
                if report is not None:
                    report.fused(name_of(node), "gelu")
        elif node in norms:
            x, weight, bias, *_, groups, eps = node.args
            (result,) = node.users
            is_last = node in in_last
            if not is_last and not (value(result).is_contiguous() and pays(value(x), groups)):
                continue
            norm = group_norm_in_channels_last if is_last else group_norm
            _replace(graph, result, norm, (x, groups, weight, bias, eps), node)
            graph.erase_node(node)
            if report is not None:
                report.fused(name_of(node), "group_norm")


def read_without_copies(graph: fx.Graph) -> None:
    """Lets operators read what is copied for nothing, as by dropout in inference up to PyTorch 2.11."""
    for node in graph.nodes:
        for read in node.all_input_nodes if _is_new(node) else ():
            if read.target is _aten.clone.default and "memory_format" not in read.kwargs:
                copied = read.args[0]
                if value(copied).stride() == value(read).stride():
                    node.replace_input_with(read, copied)
    graph.eliminate_dead_code()


def _read_any_layout(graph: fx.Graph, norms: set[fx.Node]) -> None:
    """If there are normalisations in channels-last, lets these and Windrow's convolutions read images of any layout."""
    for node in graph.nodes if norms else ():
        for read in node.all_input_nodes if node in norms or node.target is CONV2D_FUSED else ():
            node.replace_input_with(read, _uncopied(read))
    graph.eliminate_dead_code()


def _is_new(node: fx.Node) -> bool:
    """True if the result shares no memory with what is read, and nothing is written to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return not any(part.alias_info for part in (*schema.arguments, *schema.returns))


def _uncopied(node: fx.Node) -> fx.Node:
    """The image that a node copies, or the node itself. On CUDA PyTorch copies the image of a group normalisation into
    row-major order."""
    is_copy = node.target is _aten.clone.default and node.kwargs.get("memory_format") is not torch.channels_last
    return node.args[0] if is_copy else node  # type: ignore[return-value]


def _may_be_ours(node: fx.Node) -> bool:
    """True for a group normalisation of known sizes whose statistics nobody reads."""
    x, weight, bias, *sizes, _, _ = node.args
    image = value(x)
    if len(node.users) != 1 or not all(isinstance(n, int) for n in (*sizes, *image.shape)):
        return False
    (result,) = node.users
    likes: list[Any] = [value(t) for t in (weight, bias) if t is not None]
    return result.args[1] == 0 and all(like.dtype in (image.dtype, torch.float32) for like in likes)


def _replace(graph: fx.Graph, node: fx.Node, function: Any, args: tuple[Any, ...], named: fx.Node) -> None:
    with graph.inserting_before(node):
        new = graph.call_function(function, args)
    new.meta = {name: named.meta[name] for name in ("nn_module_stack",) if name in named.meta}
    new.meta["val"], new.meta[VALUE] = value(node), node.meta.get(VALUE)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
