"""The pass that turns linear layers of images into convolutions with 1x1 filters.

Blocks like ConvNeXt's move the channels last, normalise, multiply by matrices with an activation in between, and move
the channels back. In channels-last memory this is a convolution of the same numbers. The activation, the factors of the
channels and the addition behind it can then be fused.

The last layer of most classifiers multiplies the mean of an image. As a convolution of an image of one pixel it is part
of the call of the convolutions before it.
"""

from typing import Any

import torch
from torch import Tensor, fx

from windrow._activation_names import NAMES
from windrow.torch._batch_invariant import is_batch_invariant
from windrow.torch._conv2d import accuracy_of
from windrow.torch._library import OPERATORS
from windrow.torch.backend._constants import Constants, value
from windrow.torch.backend._convolutions import SUM, VALUE, VIEWS, Sum, Value, called, is_ours
from windrow.torch.backend._report import NAME, name_of

_aten = torch.ops.aten
_TO_LAST, _BACK = [0, 2, 3, 1], [0, 3, 1, 2]
# PyTorch's tracer makes a hardtanh of ReLU6.
_ELEMENTWISE = {getattr(_aten, names.function).default for names in NAMES.values()} | {_aten.hardtanh.default}


def linear_to_convolutions(graph: fx.Graph, constants: Constants, accuracy: str | None) -> None:
    """Converts each chain that ends by moving the channels back, from its first linear layer on."""
    for back in [node for node in graph.nodes if _permutes(node, _BACK)]:
        chain = [back]
        while (before := _before(chain[-1], constants)) is not None:
            chain.append(before)
        # The operators before the first linear layer, such as a normalisation, do not change.
        while len(chain) > 1 and chain[-1].target in _ELEMENTWISE:
            chain.pop()
        if len(chain) > 1:
            _convert(graph, chain[::-1], accuracy)
    graph.eliminate_dead_code()


def means_to_convolutions(graph: fx.Graph, constants: Constants, accuracy: str | None) -> None:
    """Converts linear layers of the mean of one image, unless bits must not depend on the number of images."""
    if is_batch_invariant(accuracy):
        return
    for product in [*graph.nodes]:
        found = _of_mean(product, constants)
        if found is None:
            continue
        mean, weight, bias = found
        how = ([1, 1], [0, 0], [1, 1], 1, None, accuracy_of(accuracy, value(mean), is_linear=True))
        image = called(graph, product, OPERATORS.conv2d_fused.default, mean, weight, bias, None, *how)
        image.meta[NAME] = name_of(product)
        result = called(graph, product, _aten.view.default, image, [*value(product).shape])
        result.meta[VALUE] = product.meta.get(VALUE)
        product.replace_all_uses_with(result)
    graph.eliminate_dead_code()


def _of_mean(product: fx.Node, constants: Constants) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Mean, filter and bias if the node is a linear layer of the mean of one image, in f32 on the CPU."""
    args = _product(product)
    if args is None:
        return None
    rows, transposed, bias = args
    if rows.target not in VIEWS or not _is_transposed(transposed):
        return None
    mean: Any = rows.args[0]
    weight: Any = transposed.args[0]
    if mean.target is not _aten.mean.dim or [*value(mean).shape] != [1, value(weight).shape[1], 1, 1]:
        return None
    if weight not in constants or (bias is not None and (bias not in constants or value(bias).dim() != 1)):
        return None
    is_step = value(mean).device.type == "cpu" and value(mean).dtype == torch.float32
    return (mean, weight, bias) if is_step and is_ours(mean, None, bias) else None


def _product(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Rows, columns and what is added if the node is a product of matrices."""
    if node.target is _aten.addmm.default and not node.kwargs:
        bias, rows, columns = node.args
    elif node.target is _aten.mm.default:
        bias, (rows, columns) = None, node.args
    else:
        return None
    return rows, columns, bias  # type: ignore[return-value]


def _before(node: fx.Node, constants: Constants) -> fx.Node | None:
    """The previous link of a chain: a linear layer or an elementwise operator whose result only this link reads. None
    if there is none."""
    linear = _linear(node, constants)
    source: Any = node.args[0] if linear is None else linear[0]
    if len(source.users) != 1:
        return None
    return source if source.target in _ELEMENTWISE or _linear(source, constants) is not None else None


def _linear(node: fx.Node, constants: Constants) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Image, filter and bias if the node is the result of a linear layer over the last of four dimensions."""
    if node.target not in VIEWS or not isinstance(value(node), Tensor) or value(node).dim() != 4:
        return None
    product: Any = node.args[0]
    args = _product(product)
    if args is None:
        return None
    rows, transposed, bias = args
    if len(product.users) != 1 or rows.target not in VIEWS or not _is_transposed(transposed):
        return None
    image: Any = rows.args[0]
    weight: Any = transposed.args[0]
    shape = value(node).shape
    if value(image).dim() != 4 or value(image).shape[:3] != shape[:3] or value(image).shape[3] != value(weight).shape[1]:
        return None
    if value(weight).shape[0] != shape[3] or weight not in constants or (bias is not None and bias not in constants):
        return None
    if bias is not None and value(bias).shape != shape[3:]:
        return None
    return (image, weight, bias) if is_ours(image, None, bias) else None


def _is_transposed(node: Any) -> bool:
    if node.target is _aten.t.default:
        return True
    return bool(node.target is _aten.permute.default and [*node.args[1]] == [1, 0])


def _permutes(node: fx.Node, order: list[int]) -> bool:
    return node.target is _aten.permute.default and [d % 4 for d in node.args[1]] == order  # type: ignore[union-attr]


def _convert(graph: fx.Graph, chain: list[fx.Node], accuracy: str | None) -> None:
    *links, back = chain
    image: fx.Node | None = None
    for link in links:
        if link.target in _ELEMENTWISE:
            image = called(graph, back, link.target, image, *link.args[1:], **link.kwargs)
            _stands_for(image, link)
            continue
        product: Any = link.args[0]
        bias = product.args[0] if product.target is _aten.addmm.default else None
        rows, transposed = product.args[-2:]
        if image is None:
            image = called(graph, back, _aten.permute.default, rows.args[0], _BACK)
            _stands_for(image, rows.args[0])
        how = ([1, 1], [0, 0], [1, 1], 1, None, accuracy_of(accuracy, value(image), is_linear=True))
        image = called(graph, back, OPERATORS.conv2d_fused.default, image, transposed.args[0], bias, None, *how)
        _stands_for(image, link)
        if VALUE in link.meta:
            of = lambda n: None if n is None else n.meta.get(VALUE)
            image.meta[SUM] = Sum(image.meta[VALUE], of(transposed.args[0]), of(bias))
        image.meta[NAME] = name_of(product)
    assert image is not None
    back.replace_all_uses_with(image)
    graph.erase_node(back)


def _stands_for(new: fx.Node, node: fx.Node) -> None:
    """Records for the check that `new` has the value of `node` with the channels moved back."""
    known: Value | None = node.meta.get(VALUE)
    new.meta[VALUE] = None if known is None else Value(known.name, _BACK)
