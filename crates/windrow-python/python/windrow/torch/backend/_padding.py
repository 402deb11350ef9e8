"""The pass that turns zeros around an image, in front of a convolution, into padding of the convolution."""

from typing import Any

import torch
from torch import fx

from windrow.torch.backend._constants import value
from windrow.torch.backend._convolutions import called, replaced

_aten = torch.ops.aten


def fold_padding(graph: fx.Graph) -> None:
    """Folds paddings that are equal on both sides, the only kind that a convolution has."""
    for node in [*graph.nodes]:
        if node.target is not _aten.convolution.default or node.args[6]:
            continue
        around = _zeros(node.args[0])
        if around is None:
            continue
        x, weight, bias, stride, padding, *rest = node.args
        more = [own + n for own, n in zip(padding, around, strict=True)]
        new = called(graph, node, node.target, x.args[0], weight, bias, stride, more, *rest)
        replaced(node, new, node)
    graph.eliminate_dead_code()


def _zeros(node: Any) -> list[int] | None:
    """The number of zeros on each side of each direction, if the node only puts zeros around an image."""
    if not isinstance(node, fx.Node) or node.target is not _aten.constant_pad_nd.default or node.kwargs:
        return None
    _, pads, *number = node.args
    if any(n != 0 for n in number) or any(not isinstance(n, int) or n < 0 for n in pads):
        return None
    pairs = [*zip(pads[::2], pads[1::2], strict=True)]
    directions = value(node).dim() - 2
    if len(pairs) > directions or any(before != behind for before, behind in pairs):
        return None
    # The last direction comes first.
    around = [before for before, _ in pairs] + [0] * (directions - len(pairs))
    return around[::-1]
