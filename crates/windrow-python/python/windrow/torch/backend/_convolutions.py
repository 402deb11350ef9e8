"""The convolutions in graphs of PyTorch's operators."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from windrow.torch._conv2d import CHANGING, FASTEST, KEPT, accuracy_of
from windrow.torch._library import OPERATORS
from windrow.torch.backend._constants import value
from windrow.torch.backend._report import Report, name_of
from windrow.torch.choice.problem import TYPES, is_video

_aten = torch.ops.aten
# The mark of a node that is left to Inductor.
LEFT = "windrow_left"
# Why, in the report.
FASTER = "PyTorch's operator was measured to be faster"
# The marks that say which `Value` and which `Sum` of the original graph a node stands for. The check compares them.
VALUE, SUM = "windrow_value", "windrow_sum"
# PyTorch's name for the inputs of a custom operator, in the layouts that Inductor gives them.
INPUTS = "eager_input_vals"
_OF_OTHERS = ("tensor_meta", INPUTS, VALUE, SUM)
# The operators that give a tensor's elements another shape.
VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)


@dataclass(frozen=True)
class Value:
    """The result of a node of the original graph, by name; `order` permutes its dimensions."""

    name: str
    order: list[int] | None = None


@dataclass(frozen=True)
class Sum:
    """The sum of products inside a value, with its filter and bias."""

    value: Value
    weight: Value
    bias: Value | None


@dataclass(frozen=True)
class Convolution:
    """A convolution node: of lines, images or videos, or made from a linear layer."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    # The options as Windrow's operators take them: for images, also if the node has lines; or for videos.
    stride: list[Any]
    padding: list[Any]
    dilation: list[Any]
    groups: int
    output_padding: list[Any] | None

    @property
    def options(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.groups

    @property
    def is_of_images(self) -> bool:
        return value(self.x).dim() == 4 and self.output_padding is None

    @property
    def is_of_videos(self) -> bool:
        return is_video(value(self.x))

    def accuracy(self, asked: str | None) -> str | None:
        return accuracy_of(asked, value(self.x), is_linear=value(self.weight).dim() == 2)


def convolutions(graph: fx.Graph) -> Iterator[Convolution]:
    """The convolutions that Windrow can compute and to which nothing is fused yet."""
    for node in [*graph.nodes]:
        if node.target is _aten.convolution.default:
            x, weight, bias, *options = node.args
            if is_ours(x, weight, bias) and not (options[3] and is_video(value(x))):
                yield Convolution(node, x, weight, bias, *_options(value(x).dim(), *options))
        elif node.target is OPERATORS.conv2d_fused.default and node.args[3] is None and node.args[8] is None:
            x, weight, bias, _, *options, _, _ = node.args
            yield Convolution(node, x, weight, bias, *options, None)


def is_ours(x: Any, weight: Any, bias: Any) -> bool:
    """True if Windrow can compute a convolution of these tensors. `weight` is None for a linear layer."""
    x, weight, bias = value(x), value(weight), value(bias)
    return (
        isinstance(x, Tensor)
        and x.dim() in ((3, 4) if weight is None else (3, 4, 5))
        and (weight is None or weight.dim() == x.dim())
        and x.device.type in ("cpu", "cuda")
        and x.dtype in TYPES
        and all(t.dtype == x.dtype and t.device == x.device for t in (weight, bias) if t is not None)
    )


def _options(dims: int, stride: Any, padding: Any, dilation: Any, transposed: bool, more: Any, groups: int) -> Any:
    image = lambda given, before: [before] * (4 - dims) + [*given] * (1 if len(given) == dims - 2 else dims - 2)
    output_padding = image(more, 0) if transposed else None
    return image(stride, 1), image(padding, 0), image(dilation, 1), groups, output_padding


def to_windrows(
    graph: fx.Graph,
    accuracy: str | None,
    is_training: bool,
    report: Report | None = None,
    is_left: Callable[[Convolution], bool] = lambda conv: False,
    are_left: Callable[[fx.Node], bool] = lambda gradients: False,
) -> int:
    """Replaces the remaining convolutions and their gradients by Windrow's operators, but for those that `is_left` and
    `are_left` leave. Returns their number."""
    changed = 0
    for conv in convolutions(graph):
        if conv.node.target is not _aten.convolution.default or LEFT in conv.node.meta:
            continue
        asked, how = conv.accuracy(accuracy), CHANGING if is_training else KEPT
        if is_left(conv):
            conv.node.meta[LEFT] = True
            if report is not None:
                report.left(name_of(conv.node), FASTER)
            continue
        rest = (*conv.options, conv.output_padding, None, asked, FASTEST, how)
        new = called(graph, conv.node, OPERATORS.conv2d.default, conv.x, conv.weight, conv.bias, *rest)
        name, is_new = name_of(conv.node), replaced(conv.node, new, conv.node)
        changed += is_new
        if report is not None and is_new:
            what = "conv3d" if conv.is_of_videos else "conv2d"
            report.fused(name, what if conv.output_padding is None else "conv_transpose2d")
    for node in [*graph.nodes]:
        if node.target is not _aten.convolution_backward.default or not is_ours(node.args[1], node.args[2], None):
            continue
        if not (node.args[7] and is_video(value(node.args[1]))):
            changed += not are_left(node) and _gradients(graph, node, accuracy)
    graph.eliminate_dead_code()
    if report is not None:
        for node in graph.nodes:
            if node.target is _aten.convolution.default and LEFT not in node.meta:
                like = value(node.args[0])
                report.left(name_of(node), f"PyTorch's operator: a convolution of {like.dtype}, {like.dim()} dimensions")
    return changed


def _gradients(graph: fx.Graph, node: fx.Node, accuracy: str | None) -> bool:
    dy, x, weight, bias_sizes, *options, mask = node.args
    bias = None
    if mask[2]:
        like = value(dy)
        with graph.inserting_before(node):
            how = {"dtype": like.dtype, "device": like.device}
            bias = graph.call_function(_aten.empty.memory_format, (bias_sizes,), how)
        with like.fake_mode:
            bias.meta["val"] = torch.empty(bias_sizes, **how)
    stride, padding, dilation, groups, output_padding = _options(value(x).dim(), *options)
    rest = (stride, padding, dilation, groups, output_padding, accuracy_of(accuracy, value(x)), FASTEST, [*mask])
    new = called(graph, node, OPERATORS.conv2d_backward.default, dy, x, weight, bias, *rest)
    return replaced(node, new)


def step_of(node: fx.Node) -> tuple[Any, tuple[Any, ...], list[bool]]:
    """What a step of training computes of a convolution, given its node or that of its gradients: the options as Windrow's
    operators take them; stand-ins for image, filter, bias and the result's gradient; and which gradients of the first
    three are needed. A convolution is taken to need all, but that of an input of the graph."""
    if node.target is _aten.convolution.default:
        x, weight, bias, *options = node.args
        given = value(x), value(weight), value(bias), value(node)
        needs = [x.op != "placeholder", True, bias is not None]  # type: ignore[union-attr]
    else:
        dy, x, weight, sizes, *options, mask = node.args
        given = value(x), value(weight), value(dy).new_empty(sizes) if mask[2] else None, value(dy)  # type: ignore[index]
        needs = [*mask]  # type: ignore[misc]
    return _options(value(x).dim(), *options), given, needs


def called(graph: fx.Graph, before: fx.Node, operator: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node in front of `before`, with the metadata of `before`."""
    with graph.inserting_before(before):
        node = graph.call_function(operator, args, kwargs)
    node.meta = {name: what for name, what in before.meta.items() if name not in _OF_OTHERS}
    values = fx.map_arg(args, value)
    fake_mode = next(v.fake_mode for v in tree_leaves(values) if isinstance(v, Tensor))
    with fake_mode:
        node.meta["val"] = operator(*values, **kwargs)
    if getattr(operator, "namespace", None) == "windrow":
        # Without these Inductor gives the operator its inputs in whatever layout, and the operator would copy them.
        node.meta[INPUTS] = values, kwargs
    return node


def stands_for(new: fx.Node, node: fx.Node, sums: fx.Node) -> None:
    """Records for the check that `new` has the value of `node`, and contains the sum of products of `sums`."""
    new.meta[VALUE], new.meta[SUM] = node.meta.get(VALUE), sums.meta.get(SUM)


def replaced(node: fx.Node, new: fx.Node, sums: fx.Node | None = None) -> bool:
    """Replaces a node by `new`. Returns False, and does nothing, if the results have different shapes, strides or
    types. `sums`: the convolution inside."""
    of = lambda n: [(t.shape, t.stride(), t.dtype) for t in _tensors(value(n)) if t is not None]
    before, after = of(node), of(new)
    if isinstance(value(node), Tensor) and before != after:
        new.graph.erase_node(new)
        return False
    if sums is not None:
        stands_for(new, node, sums)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return True


def _tensors(values: Any) -> list[Any]:
    return [values] if isinstance(values, Tensor) else [*values]
