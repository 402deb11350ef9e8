"""Linear layers of an optimized model's images as convolutions by 1x1 filters.

Blocks like ConvNeXt's put the channels last, normalise, multiply by matrices with an activation between them, and put the
channels back. In channels-last memory that is a convolution of the same numbers, with which the activation, the factors of
the channels and the addition behind are one operation.
"""

from collections import Counter

import torch
import torch.nn.functional as F
from torch import fx, nn

from windrow._activation_names import NAMES
from windrow.torch._graph import is_wrapped, replace_module

_TO_LAST, _BACK = (0, 2, 3, 1), (0, 3, 1, 2)
_ELEMENTWISE = {getattr(nn, names.module) for names in NAMES.values()}


def linear_to_convolutions(traced: fx.GraphModule) -> None:
    """Changes the module in place: of each chain from channels last and back, the part from the first linear layer on."""
    graph = traced.graph
    modules = dict(traced.named_modules())
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    for first in list(graph.nodes):
        chain = _chain(first, modules) if _permutes(first, _TO_LAST) else None
        if chain is None:
            continue
        *before, last = chain
        begin = next((i for i, n in enumerate(before) if type(_module(n, modules)) is nn.Linear), None)
        if begin is None or not all(_is_pointwise(n, modules) and calls[n.target] == 1 for n in before[begin:]):
            continue
        source = before[begin - 1] if begin else first
        with graph.inserting_after(source):
            image = graph.call_function(torch.permute, (source, _BACK))
        before[begin].args = (image,)
        for node in before[begin:]:
            if type(linear := _module(node, modules)) is nn.Linear:
                replace_module(traced, node.target, _convolution(linear))
        last.replace_all_uses_with(before[-1])
        graph.erase_node(last)
    graph.lint()
    traced.recompile()


def _chain(node: fx.Node, modules: dict[str, nn.Module]) -> list[fx.Node] | None:
    """What follows up to the permutation back, if each has one user and leaves all but the last dimension alone."""
    chain: list[fx.Node] = []
    while len(node.users) == 1:
        (node,) = node.users
        chain.append(node)
        if _permutes(node, _BACK):
            return chain
        if not _keeps_places(node, modules):
            return None
    return None


def _keeps_places(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_function" and node.target is F.layer_norm:
        shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
        return isinstance(shape, list | tuple) and len(shape) == 1
    module = _module(node, modules)
    if type(module) is nn.LayerNorm:
        return len(module.normalized_shape) == 1 and len(node.args) == 1 and not node.kwargs
    return _is_pointwise(node, modules)


def _is_pointwise(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """A linear layer, or what treats each element alike, so that the order of the dimensions is nothing to it."""
    module = _module(node, modules)
    is_known = type(module) is nn.Linear or type(module) in _ELEMENTWISE
    return is_known and len(node.args) == 1 and not node.kwargs and not is_wrapped(module)


def _module(node: fx.Node, modules: dict[str, nn.Module]) -> nn.Module | None:
    return modules.get(node.target) if node.op == "call_module" else None


def _permutes(node: fx.Node, order: tuple[int, ...]) -> bool:
    if node.op not in ("call_function", "call_method") or node.target not in (torch.permute, "permute"):
        return False
    _, *dims = node.args
    dims = dims or [node.kwargs.get("dims")]
    dims = dims[0] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
    return all(isinstance(d, int) for d in dims) and tuple(d % 4 for d in dims) == order


class Pointwise(nn.Conv2d):
    """A linear layer as a convolution, until it is fused."""


def _convolution(linear: nn.Linear) -> Pointwise:
    k, c = linear.weight.shape
    conv = Pointwise(c, k, 1, bias=linear.bias is not None, device="meta")
    conv.weight = nn.Parameter(linear.weight[:, :, None, None], requires_grad=False)
    conv.bias = linear.bias
    return conv.eval()
