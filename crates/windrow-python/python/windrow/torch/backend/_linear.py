"""The pass that turns linear layers of images into convolutions with 1x1 filters.

Blocks like ConvNeXt's move the channels last, normalise, multiply by matrices with an activation in between, and move
the channels back. In channels-last memory this is a convolution of the same numbers. The activation, the factors of the
channels and the addition behind it can then be fused.

The last layers of classifiers multiply one row: the mean of an image, or all of its numbers. They are convolutions of an
image of one pixel, which read the filter at the rate of the memory. Behind a mean they are part of the call of the
convolutions before it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from windrow.torch._batch_invariant import is_batch_invariant
from windrow.torch._conv2d import accuracy_of
from windrow.torch._library import OPERATORS
from windrow.torch.backend._activated import activated, copied, pattern_of
from windrow.torch.backend._constants import Constants, value
from windrow.torch.backend._convolutions import SUM, VALUE, VIEWS, Sum, Value, called, is_ours
from windrow.torch.backend._report import NAME, name_of

_aten = torch.ops.aten
_BACK = [0, 3, 1, 2]


@dataclass(frozen=True)
class _Linear:
    """A linear layer over the last of four dimensions."""

    image: fx.Node
    product: fx.Node
    weight: fx.Node
    bias: fx.Node | None


@dataclass(frozen=True)
class _Activation:
    """An activation of a linear layer's result."""

    image: fx.Node
    pattern: fx.Graph


_Links = dict[fx.Node, _Linear | _Activation]


def linear_to_convolutions(graph: fx.Graph, constants: Constants, accuracy: str | None, decompositions: Any) -> None:
    """Converts each chain of linear layers and activations that ends by moving the channels back. With `decompositions`
    Inductor compiles the graph. Then only products in strict f32 are converted, because others gain nothing."""
    links: _Links = {}
    for node in graph.nodes:
        linear = _linear(node, constants)
        if linear is None or (decompositions is not None and not _is_strict(linear.image, accuracy)):
            continue
        links[node] = linear
        dtype = value(node).dtype
        if (found := activated(node, dtype, decompositions)) is not None:
            name, last = found
            links[last] = _Activation(node, pattern_of(name, dtype, decompositions))
    for back in [node for node in graph.nodes if _permutes(node, _BACK)]:
        chain: list[fx.Node] = []
        source: Any = back.args[0]
        while source in links and len(source.users) == 1:
            chain.append(source)
            link = links[source]
            if isinstance(link, _Activation):
                # Nobody else reads it: the pattern has said so.
                chain.append(link.image)
            source = links[chain[-1]].image
        if chain:
            _convert(graph, [(node, links[node]) for node in chain[::-1]], back, accuracy)
    graph.eliminate_dead_code()


def _is_strict(image: fx.Node, accuracy: str | None) -> bool:
    x = value(image)
    return x.dtype == torch.float32 and accuracy_of(accuracy, x, is_linear=True) != "tf32"


def rows_to_convolutions(graph: fx.Graph, constants: Constants, accuracy: str | None) -> None:
    """Converts linear layers of one row, and the activations behind them, unless bits must not depend on the number of
    rows."""
    if is_batch_invariant(accuracy):
        return
    for product in [*graph.nodes]:
        found = _of_row(product, constants)
        if found is None:
            continue
        row, weight, bias = found
        pixel = [*value(row).shape, 1, 1]
        before: Any = row.args[0] if row.target in VIEWS else None
        is_pixel = before is not None and [*value(before).shape] == pixel
        image = before if is_pixel else called(graph, product, _aten.view.default, row, pixel)
        how = ([1, 1], [0, 0], [1, 1], 1, None, accuracy_of(accuracy, value(image), is_linear=True))
        image = called(graph, product, OPERATORS.conv2d_fused.default, image, weight, bias, None, *how)
        image.meta[NAME] = name_of(product)
        last = product
        if (behind := activated(product, torch.float32, None)) is not None:
            name, last = behind
            image = copied(graph, last, pattern_of(name, torch.float32, None), image)
        result = called(graph, last, _aten.view.default, image, [*value(product).shape])
        result.meta[VALUE] = last.meta.get(VALUE)
        last.replace_all_uses_with(result)
    graph.eliminate_dead_code()


def _of_row(product: fx.Node, constants: Constants) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Row, filter and bias if the node is a linear layer of one row, in f32 on the CPU."""
    args = _product(product)
    if args is None or not _is_transposed(args[1]):
        return None
    row, transposed, bias = args
    weight: Any = transposed.args[0]
    if weight not in constants or (bias is not None and (bias not in constants or value(bias).dim() != 1)):
        return None
    given = [value(n) for n in (row, weight, bias) if n is not None]
    is_step = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in given)
    return (row, weight, bias) if is_step and value(row).shape[0] == 1 else None


def _product(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Rows, columns and what is added if the node is a product of matrices."""
    if node.target is _aten.addmm.default and not node.kwargs:
        bias, rows, columns = node.args
    elif node.target is _aten.mm.default:
        bias, (rows, columns) = None, node.args
    else:
        return None
    return rows, columns, bias  # type: ignore[return-value]


def _linear(node: fx.Node, constants: Constants) -> _Linear | None:
    """The linear layer over the last of four dimensions whose result the node is; None if there is none."""
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
    return _Linear(image, product, weight, bias) if is_ours(image, None, bias) else None


def _is_transposed(node: Any) -> bool:
    if node.target is _aten.t.default:
        return True
    return bool(node.target is _aten.permute.default and [*node.args[1]] == [1, 0])


def _permutes(node: fx.Node, order: list[int]) -> bool:
    return node.target is _aten.permute.default and [d % 4 for d in node.args[1]] == order  # type: ignore[union-attr]


def _convert(
    graph: fx.Graph, chain: list[tuple[fx.Node, _Linear | _Activation]], back: fx.Node, accuracy: str | None
) -> None:
    before = chain[0][1].image
    image = called(graph, back, _aten.permute.default, before, _BACK)
    _stands_for(image, before)
    for node, link in chain:
        if isinstance(link, _Linear):
            how = ([1, 1], [0, 0], [1, 1], 1, None, accuracy_of(accuracy, value(image), is_linear=True))
            image = called(graph, back, OPERATORS.conv2d_fused.default, image, link.weight, link.bias, None, *how)
            image.meta[NAME] = name_of(link.product)
        else:
            image = copied(graph, back, link.pattern, image)
        _stands_for(image, node)
        if isinstance(link, _Linear) and VALUE in node.meta:
            of = lambda n: None if n is None else n.meta.get(VALUE)
            image.meta[SUM] = Sum(image.meta[VALUE], of(link.weight), of(link.bias))
    back.replace_all_uses_with(image)
    graph.erase_node(back)


def _stands_for(new: fx.Node, node: fx.Node) -> None:
    """Records for the check that `new` has the value of `node` with the channels moved back."""
    known: Value | None = node.meta.get(VALUE)
    new.meta[VALUE] = None if known is None else Value(known.name, _BACK)
