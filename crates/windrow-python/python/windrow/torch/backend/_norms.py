"""The pass that makes depthwise convolutions of batch normalisations, for graphs whose operators run one by one.

A normalisation in front of a convolution, as in DenseNet, cannot be folded if an activation stands between. As a
convolution with one weight for each channel it takes the activation along, in one pass over the image, and is one call
with the convolutions behind it.
"""

import torch
from torch import fx

from windrow.torch._conv2d import accuracy_of
from windrow.torch._library import OPERATORS
from windrow.torch.backend._constants import Constants, value
from windrow.torch.backend._convolutions import called, replaced
from windrow.torch.backend._fold import NORMS, Affine, normalised
from windrow.torch.backend._report import NAME, name_of

_aten, _prims = torch.ops.aten, torch.ops.prims


def norms_to_convolutions(graph: fx.Graph, constants: Constants, accuracy: str | None) -> int:
    """Changes the graph. Returns the number of normalisations that became convolutions."""
    done = 0
    for node in [*graph.nodes]:
        if node.target in NORMS and _is_of_images(node):
            done += _convert(graph, node, constants, accuracy)
    graph.eliminate_dead_code()
    return done


def _is_of_images(node: fx.Node) -> bool:
    """In f32 only: other types would round the weights."""
    x = value(node.args[0])
    is_known = x.dim() == 4 and all(isinstance(n, int) for n in x.shape)
    return is_known and x.device.type == "cpu" and x.dtype == torch.float32


def _convert(graph: fx.Graph, node: fx.Node, constants: Constants, accuracy: str | None) -> bool:
    x: fx.Node = node.args[0]  # type: ignore[assignment]
    channels, device = value(x).shape[1], value(x).device
    affine = Affine(constants, channels, device)
    result = normalised(node, x, affine)
    if result is None:
        return False
    with value(x).fake_mode:
        bias = torch.empty(channels, device=device)
        weight = bias.view(-1, 1, 1, 1)
    rounded = lambda n: constants.call(_prims.convert_element_type.default, n, torch.float32)
    scale = constants.call(_aten.reshape.default, affine.scale, [-1, 1, 1, 1])
    tensors = (x, constants.add(rounded(scale), weight), constants.add(rounded(affine.shift), bias), None)
    how = ([1, 1], [0, 0], [1, 1], channels, None, accuracy_of(accuracy, value(x)))
    new = called(graph, result, OPERATORS.conv2d_fused.default, *tensors, *how)
    new.meta[NAME] = name_of(node)
    return replaced(result, new, new)
