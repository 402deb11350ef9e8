"""The pass that makes modules of what stands between convolutions, for graphs whose operators run one by one. Then it
is part of the call of these convolutions."""

import itertools
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from windrow.torch._image_step import ImageStep
from windrow.torch._library import OPERATORS
from windrow.torch.backend._concat import SPLITS, empty, is_cat, is_of_channels
from windrow.torch.backend._constants import value
from windrow.torch.backend._convolutions import called
from windrow.torch.backend._report import Report, name_of

_aten = torch.ops.aten
_GATES = {_aten.sigmoid.default: "sigmoid", _aten.hardsigmoid.default: "hardsigmoid"}


@dataclass(frozen=True)
class _Step:
    module: ImageStep
    x: fx.Node
    second: fx.Node | None = None
    # The node before it that is part of it.
    inner: fx.Node | None = None
    # The channels to which it writes.
    place: fx.Node | None = None

    @property
    def given(self) -> tuple[fx.Node | None, ...]:
        given = self.x, self.second, self.place
        return given[: 3 if self.place is not None else 2 if self.second is not None else 1]

    @property
    def read(self) -> list[fx.Node]:
        return [node for node in (self.x, self.second) if node is not None]


def steps(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that may become modules, which can write their results to channels of another image."""
    return {node for node in graph.nodes if _step(node) is not None}


def image_steps_to_modules(module: fx.GraphModule, report: Report | None) -> None:
    """Replaces operations of results of convolutions, or of such operations, by modules of the graph."""
    graph, made = module.graph, set[fx.Node]()
    fused = {node for node in graph.nodes if node.target is OPERATORS.conv2d_fused.default}
    written = {node for node in graph.nodes if node.target is OPERATORS.conv2d_into.default}
    if fused | written:
        _slice_splits(graph)
        _copy_parts(graph)
    named, done = {name_of(node) for node in fused}, dict[str, list[str]]()
    is_ours = lambda x: x in fused | made or x.target is _aten.slice.Tensor
    for node in [*graph.nodes]:
        step = _copy(node, fused | written) or _to_place(node) or _step(node)
        if step is None or not (step.module.operation in ("channels_last", "copy") or any(map(is_ours, step.read))):
            continue
        target, given, operation = f"step_{len(made)}", step.given, step.module.operation
        before: Any = step.x
        is_before = operation == "copy" and before in made and len(before.users) == 1
        if is_before:
            # What computes the image writes it to its place.
            target, given = str(before.target), (*before.args, None)[:2] + given[2:]
        else:
            module.add_module(target, step.module)
        with graph.inserting_before(node):
            new = graph.call_module(target, given)
        new.meta["val"] = value(node)
        made.add(new)
        if value(node).dim() == 4:
            node.replace_all_uses_with(new)
        else:
            # In front of who reads it, so that it is not between the convolutions.
            first = next(user for user in graph.nodes if user in node.users)
            with graph.inserting_before(first):
                node.replace_all_uses_with(graph.call_function(_aten.squeeze.dims, (new, [2, 3])))
        for gone in (node, step.inner, before if is_before else None):
            if gone is not None:
                graph.erase_node(gone)
        if operation not in ("channels_last", "copy"):
            told = f"product with {operation}" if operation in _GATES.values() else operation
            done.setdefault(name_of(node), []).append(told)
    for name, what in done.items():
        if report is not None and name and name not in named:
            report.fused(name, ", ".join(what))


def _slice_splits(graph: fx.Graph) -> None:
    """Replaces the parts of splits of channels by slices."""
    for node in [*graph.nodes]:
        if node.target not in SPLITS or not _is_image(node.args[0]) or not is_of_channels(node, 2):
            continue
        image: Any = node.args[0]
        starts = [*itertools.accumulate((part.shape[1] for part in value(node)), initial=0)]
        for part in [*node.users]:
            i: Any = part.args[1]
            new = called(graph, part, _aten.slice.Tensor, image, 1, starts[i], starts[i + 1])
            part.replace_all_uses_with(new)
            graph.erase_node(part)
        graph.erase_node(node)


def _copy_parts(graph: fx.Graph) -> None:
    """Replaces concatenations of channels by memory to which their parts are copied."""
    for node in [*graph.nodes]:
        if not is_cat(node) or not _is_dense(node) or not all(_is_image(part) for part in node.args[0]):
            continue
        memory, first = empty(graph, node, node), 0
        parts: Any = node.args[0]
        for part in parts:
            last = first + value(part).shape[1]
            place = called(graph, node, _aten.slice.Tensor, memory, 1, first, last)
            called(graph, node, _aten.copy_.default, place, part)
            first = last
        node.replace_all_uses_with(memory)
        graph.erase_node(node)


def _to_place(node: fx.Node) -> _Step | None:
    """The step that copies an image to channels of another one."""
    if node.target is not _aten.copy_.default:
        return None
    place, image = node.args[0], node.args[1]
    if not _is_image(place) or not _is_image(image) or value(place).shape != value(image).shape:
        return None
    return _Step(ImageStep("copy"), image, place=place)  # type: ignore[arg-type]


def _step(node: fx.Node) -> _Step | None:
    """The step that computes a node, if there is one."""
    args: Any = node.args
    if node.kwargs or not node.users:
        return None
    if node.target is _aten.mean.dim:
        is_of_image = _is_image(args[0]) and sorted(d % 4 for d in args[1] or ()) == [2, 3]
        return _Step(ImageStep("mean"), args[0]) if is_of_image else None
    if node.target is _aten.mul.Tensor:
        return _gated(args[0], args[1]) or _gated(args[1], args[0])
    if node.target is _aten.add.Tensor:
        are_alike = _is_dense(node) and all(_is_image(n) and value(n).shape == value(node).shape for n in args)
        return _Step(ImageStep("add"), *args) if are_alike else None
    if node.target is _aten.upsample_nearest2d.default:
        return _repeated(node, *args)
    if node.target is _aten.avg_pool2d.default:
        return _average(*args)
    if node.target is operator.getitem and args[1] == 0 and args[0].target is _aten.max_pool2d_with_indices.default:
        step = _largest(*args[0].args) if len(args[0].users) == 1 else None
        return None if step is None else replace(step, inner=args[0])
    return None


# The library has loops for images of at most so many channels.
_MOST_COPIED = 4


def _copy(node: fx.Node, fused: set[fx.Node]) -> _Step | None:
    """The step that copies the image of convolutions to channels-last."""
    if node.target is not _aten.clone.default or not node.users or not fused.issuperset(node.users):
        return None
    x = value(node.args[0])
    is_ours = (
        node.kwargs.get("memory_format") is torch.channels_last
        and x.dim() == 4
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.is_contiguous()
        and isinstance(x.shape[1], int)
        and x.shape[1] <= _MOST_COPIED
    )
    return _Step(ImageStep("channels_last"), node.args[0]) if is_ours else None  # type: ignore[arg-type]


def _gated(gate: Any, x: Any) -> _Step | None:
    if not isinstance(gate, fx.Node) or gate.target not in _GATES or len(gate.users) != 1:
        return None
    second: Any = gate.args[0]
    if not _is_image(x) or not _is_image(second) or x is gate or [*value(second).shape[2:]] != [1, 1]:
        return None
    same = value(second).shape[:2] == value(x).shape[:2]
    return _Step(ImageStep(_GATES[gate.target]), x, second, gate) if same else None


def _largest(
    x: Any, size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> _Step | None:
    """The step of `max_pool2d` with these arguments."""
    if ceil_mode or _pair(dilation) != (1, 1):
        return None
    return _pooled("max_pool2d", x, size, stride, padding)


def _average(
    x: Any, size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False, _: Any = True, divisor: Any = None
) -> _Step | None:
    """The step of `avg_pool2d` with these arguments."""
    if ceil_mode or divisor is not None or _pair(padding) != (0, 0):
        return None
    return _pooled("avg_pool2d", x, size, stride, padding)


def _pooled(operation: str, x: Any, size: Any, stride: Any, padding: Any) -> _Step | None:
    window = *_pair(size), *_pair(stride or size), *_pair(padding)
    return _Step(ImageStep(operation, window), x) if _is_image(x) else None


def _repeated(node: fx.Node, x: Any, _: Any, *scales: float | None) -> _Step | None:
    """The step of an upsampling. PyTorch multiplies positions by an inverse, which is exact for powers of two."""
    if not _is_image(x) or not _is_dense(node):
        return None
    before, after = value(x).shape[2:], value(node).shape[2:]
    if not all(isinstance(n, int) for n in before):
        return None
    times = [large // small for large, small in zip(after, before, strict=True)]
    are_whole = [n * small for n, small in zip(times, before, strict=True)] == [*after]
    are_meant = all(scale in (None, n) for scale, n in zip(scales, times, strict=False))
    if not are_whole or not are_meant or any(n not in (1, 2, 4, 8) for n in times):
        return None
    return _Step(ImageStep("upsample", (*times, 1, 1, 0, 0)), x)


def _is_dense(node: fx.Node) -> bool:
    """True for an image of fixed sizes in channels-last without gaps, whose strides can be those of no other layout."""
    if not _is_image(node) or not all(isinstance(n, int) for n in value(node).shape):
        return False
    _, channels, height, width = value(node).shape
    is_dense: bool = value(node).is_contiguous(memory_format=torch.channels_last)
    return is_dense and channels > 1 and height * width > 1


def _pair(of: Any) -> tuple[int, int]:
    first, *more = [of] if isinstance(of, int) else of
    return (first, *(more or [first]))


def _is_image(node: Any) -> bool:
    """True for a result in f32 on the CPU whose channels follow each other."""
    x = value(node)
    if not isinstance(node, fx.Node) or not isinstance(x, Tensor) or x.dim() != 4:
        return False
    stride = x.stride()[1]
    return x.device.type == "cpu" and x.dtype == torch.float32 and isinstance(stride, int) and stride == 1
