"""The pass that makes modules of what stands between convolutions, for graphs whose operators run one by one. Then it
is part of the call of these convolutions."""

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from windrow.torch._image_step import ImageStep
from windrow.torch._library import OPERATORS
from windrow.torch.backend._constants import value
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


def image_steps_to_modules(module: fx.GraphModule, report: Report | None) -> None:
    """Replaces operations of results of convolutions, or of such operations, by modules of the graph."""
    graph, made = module.graph, set[fx.Node]()
    fused = {node for node in graph.nodes if node.target is OPERATORS.conv2d_fused.default}
    named, done = {name_of(node) for node in fused}, dict[str, list[str]]()
    for node in [*graph.nodes]:
        step = _copy(node, fused) or _step(node)
        if step is None or (step.x not in fused | made and step.module.operation != "channels_last"):
            continue
        target = f"step_{len(made)}"
        module.add_module(target, step.module)
        with graph.inserting_before(node):
            new = graph.call_module(target, (step.x,) if step.second is None else (step.x, step.second))
        new.meta["val"] = value(node)
        made.add(new)
        if value(node).dim() == 4:
            node.replace_all_uses_with(new)
        else:
            # In front of who reads it, so that it is not between the convolutions.
            first = next(user for user in graph.nodes if user in node.users)
            with graph.inserting_before(first):
                node.replace_all_uses_with(graph.call_function(_aten.squeeze.dims, (new, [2, 3])))
        for gone in (node, step.inner):
            if gone is not None:
                graph.erase_node(gone)
        operation = step.module.operation
        if operation == "channels_last":
            continue
        done.setdefault(name_of(node), []).append(operation if step.second is None else f"product with {operation}")
    for name, what in done.items():
        if report is not None and name and name not in named:
            report.fused(name, ", ".join(what))


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
