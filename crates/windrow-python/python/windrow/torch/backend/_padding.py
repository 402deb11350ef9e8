"""The pass that turns zeros around an image, in front of a convolution, into padding of the convolution; and the frames
that a convolution of a video reads before it."""

from typing import Any, NamedTuple

import torch
from torch import fx

from windrow.torch.backend._constants import value
from windrow.torch.backend._convolutions import Convolution, called, replaced

_aten = torch.ops.aten


def fold_padding(graph: fx.Graph) -> None:
    """Folds paddings that are equal on both sides, the only kind that a convolution has. Frames that are put before a
    video alone stay in a node of their own."""
    for node in [*graph.nodes]:
        if node.target is not _aten.convolution.default or node.args[6]:
            continue
        zeros = _zeros(node.args[0])
        x, weight, bias, stride, padding, *rest = node.args
        if zeros is None or (zeros.frames and (padding[0] != 0 or not any(zeros.around))):
            continue
        image = x.args[0]
        if zeros.frames:
            image = called(graph, node, x.target, image, [0, 0, 0, 0, zeros.frames, 0], 0.0)
        more = [own + n for own, n in zip(padding, zeros.around, strict=True)]
        new = called(graph, node, node.target, image, weight, bias, stride, more, *rest)
        replaced(node, new, node)
    graph.eliminate_dead_code()


class _Zeros(NamedTuple):
    """The number of zeros on each side of each direction, and of frames of zeros before a video."""

    around: list[int]
    frames: int


def _zeros(node: Any) -> _Zeros | None:
    """The zeros around an image, if the node only puts zeros there."""
    if not isinstance(node, fx.Node) or node.target is not _aten.constant_pad_nd.default or node.kwargs:
        return None
    _, pads, *number = node.args
    if any(n != 0 for n in number) or any(not isinstance(n, int) or n < 0 for n in pads):
        return None
    directions = value(node).dim() - 2
    # The last direction comes first.
    pairs = [*zip(pads[::2], pads[1::2], strict=True)][::-1]
    pairs = [(0, 0)] * (directions - len(pairs)) + pairs
    frames = 0
    if len(pairs) == 3 and pairs[0][1] == 0:
        frames, pairs[0] = pairs[0][0], (0, 0)
    if len(pairs) > directions or any(before != behind for before, behind in pairs):
        return None
    return _Zeros([before for before, _ in pairs], frames)


class Before(NamedTuple):
    """A video, and the frames before it: a node, or none for zeros and for the first frame repeated."""

    x: fx.Node
    initial: fx.Node | None
    time_padding: str


def frames_before(graph: fx.Graph, conv: Convolution) -> Before | None:
    """The frames that a convolution reads before a video, if nodes put as many there as its filter needs: zeros, the
    first frame repeated, or a concatenation with other frames."""
    first: Any = conv.x
    if not conv.is_of_videos or conv.padding[0] != 0 or conv.stride[0] != 1 or len(first.users) != 1:
        return None
    frames = (value(conv.weight).shape[2] - 1) * conv.dilation[0]
    if frames == 0:
        return None
    if first.target is _aten.replication_pad3d.default and [*first.args[1]] == [0, 0, 0, 0, frames, 0]:
        return Before(first.args[0], None, "causal_repeat")
    zeros, more = _zeros(first), 0
    if zeros is not None:
        if any(zeros.around):
            return None
        more, first = zeros.frames, first.args[0]
        if more == frames:
            return Before(first, None, "causal")
    if first.target is not _aten.cat.default or first.args[1:] not in ((2,), (-3,)) or len(first.users) != 1:
        return None
    *parts, x = first.args[0]
    counts = [value(part).shape[2] for part in parts]
    same = {(value(part).dtype, value(part).device) for part in (*parts, x)}
    if not parts or not all(isinstance(n, int) for n in counts) or sum(counts) + more != frames or len(same) != 1:
        return None
    initial = parts[0] if len(parts) == 1 else called(graph, conv.node, _aten.cat.default, parts, 2)
    if more:
        initial = called(graph, conv.node, _aten.constant_pad_nd.default, initial, [0, 0, 0, 0, more, 0], 0.0)
    return Before(x, initial, "causal")
