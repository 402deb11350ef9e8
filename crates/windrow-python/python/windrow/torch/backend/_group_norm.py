"""The pass that sums the statistics of a group normalisation channel by channel, for images in channels-last.

PyTorch's decomposition reduces over the channels of a group and all pixels at once. In channels-last a group's numbers lie
apart, and Inductor's kernel does not read them in the order of memory. Here each channel is reduced over the pixels, which
reads whole lines, and the groups are put together from the channels: the mean is the mean of the channels' means, and the
variance the mean of their variances plus the variance of their means.
"""

import operator

import torch
from torch import Tensor, fx

from windrow.torch._group_norm import is_channels_last
from windrow.torch.backend._constants import value
from windrow.torch.backend._convolutions import VIEWS, called

_aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default


def by_channels(graph: fx.Graph) -> int:
    """Changes the graph. Returns the number of normalisations."""
    changed = 0
    for node in [*graph.nodes]:
        image = _grouped_image(node)
        if image is None:
            continue
        grouped = value(node.args[0])
        n, groups, channels, _ = grouped.shape
        if value(image).dtype != grouped.dtype:
            image = called(graph, node, _convert, image, grouped.dtype)
        each = called(graph, node, _aten.var_mean.correction, image, [2, 3], correction=0, keepdim=True)
        parts = [called(graph, node, operator.getitem, each, i) for i in (0, 1)]
        var, mean = (called(graph, node, _aten.view.default, part, [n, groups, channels, 1]) for part in parts)
        over_all = called(graph, node, _aten.mean.dim, mean, [2], True)
        apart = called(graph, node, _aten.sub.Tensor, mean, over_all)
        squared = called(graph, node, _aten.mul.Tensor, apart, apart)
        whole = called(graph, node, _aten.mean.dim, called(graph, node, _aten.add.Tensor, var, squared), [2], True)
        for user in [*node.users]:
            user.replace_all_uses_with((whole, over_all)[user.args[1]])
        changed += 1
    if changed:
        graph.eliminate_dead_code()
    return changed


def _grouped_image(node: fx.Node) -> fx.Node | None:
    """The image in channels-last whose groups of channels this node reduces, if it does; in the image's own type."""
    if node.target is not _aten.var_mean.correction or node.kwargs != {"correction": 0, "keepdim": True}:
        return None
    grouped, dims = node.args
    if list(dims) != [2, 3] or grouped.target not in VIEWS:  # type: ignore[union-attr, arg-type]
        return None
    image: fx.Node = grouped.args[0]  # type: ignore[union-attr, assignment]
    # f16 and bf16 are converted to f32: on CUDA behind the copy into row-major order, on the CPU in front of it.
    for target in (_convert, _aten.clone.default):
        if image.target is target:
            image = image.args[0]  # type: ignore[assignment]
    given, of = value(image), value(grouped)
    if not (isinstance(given, Tensor) and given.dim() == of.dim() == 4):
        return None
    if not all(isinstance(size, int) for size in (*given.shape, *of.shape)):
        return None
    n, c, h, w = given.shape
    if [*of.shape[::3]] != [n, h * w] or of.shape[1] * of.shape[2] != c or of.shape[2] == 1 or h * w == 1:
        return None
    reads = all(user.target is operator.getitem for user in node.users)
    return image if is_channels_last(given) and reads else None
