"""The pass that fuses a convolution with the addition and the activation behind it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from windrow.torch._fused import told
from windrow.torch._library import OPERATORS
from windrow.torch.backend._activated import activated
from windrow.torch.backend._choice import After, is_pytorchs, prepare
from windrow.torch.backend._constants import Constants, value
from windrow.torch.backend._convolutions import FASTER, LEFT, Convolution, called, convolutions, replaced
from windrow.torch.backend._layout import laid_out
from windrow.torch.backend._memory import Memory
from windrow.torch.backend._padding import frames_before
from windrow.torch.backend._report import FOLDED, NAME, Report, name_of
from windrow.torch.choice.convolution import compiles

_aten = torch.ops.aten


def fuse(
    graph: fx.Graph,
    constants: Constants,
    accuracy: str | None,
    decompositions: Any,
    memory: Memory,
    report: Report | None = None,
) -> list[str]:
    """Replaces convolutions whose filters depend on parameters alone by `windrow::conv2d_fused`. Returns what each
    became, in words."""
    held = lambda: _held(graph, constants)
    prepare(_ahead(held(), decompositions), accuracy)
    done = [_fuse(graph, conv, constants, accuracy, decompositions, memory, report) for conv in held()]
    graph.eliminate_dead_code()
    return [what for what in done if what is not None]


def results(graph: fx.Graph, constants: Constants, decompositions: Any) -> set[fx.Node]:
    """The nodes that `fuse` would replace: the last ones of each convolution and of what it fuses to it."""
    return {_following(conv.node, decompositions)[0] for conv in _held(graph, constants)}


def _held(graph: fx.Graph, constants: Constants) -> Iterator[Convolution]:
    """The convolutions of images and videos whose filters depend on parameters alone."""
    are_of_images = (conv for conv in convolutions(graph) if conv.is_of_images or conv.is_of_videos)
    return (conv for conv in are_of_images if _is_held(conv, constants))


def _is_held(conv: Convolution, constants: Constants) -> bool:
    return all(n is None or (n.op == "placeholder" and n in constants) for n in (conv.weight, conv.bias))


def _ahead(held: Iterator[Convolution], decompositions: Any) -> Iterator[tuple[Convolution, After]]:
    """The convolutions for which kernels may be compiled, and what is going to be fused with each if none is left to
    PyTorch."""
    fused: set[fx.Node] = set()
    for conv in held:
        if not compiles(value(conv.x).device):
            continue
        last, residual, activation = _following(conv.node, decompositions)
        if last in fused:
            last, residual, activation = conv.node, None, None
        fused.add(last)
        yield conv, (residual, activation)


def _fuse(
    graph: fx.Graph,
    conv: Convolution,
    constants: Constants,
    accuracy: str | None,
    decompositions: Any,
    memory: Memory,
    report: Report | None,
) -> str | None:
    name, what = name_of(conv.node), list[str]()
    folded = [f"folded {name}" for name in conv.node.meta.get(FOLDED, ())]
    last, residual, activation = _following(conv.node, decompositions)
    if residual is not None:
        if decompositions is not None:
            residual = laid_out(graph, last, residual, conv.node)
        what.append("added")
    if activation is not None:
        what.append(activation)
    # Inductor fuses more with PyTorch's own.
    after = residual, activation
    if decompositions is not None and is_pytorchs(conv, accuracy, constants.in_graphs, memory, after):
        conv.node.meta[LEFT] = True
        if report is not None:
            report.left(name, ", ".join([FASTER, *folded]))
        return None
    weight, bias = constants.moved(conv.weight), None if conv.bias is None else constants.moved(conv.bias)
    how = (*conv.options, activation, conv.accuracy(accuracy))
    result = ", ".join(["conv3d" if conv.is_of_videos else "conv2d", *what])
    if last is conv.node and last.target is OPERATORS.conv2d_fused.default:
        last.args = (conv.x, weight, bias, *last.args[3:])
        result = "linear"
    else:
        before = frames_before(graph, conv)
        if before is None:
            new = called(graph, last, OPERATORS.conv2d_fused.default, conv.x, weight, bias, residual, *how)
        else:
            operator, of_frames = OPERATORS.conv3d_fused.default, (before.initial, before.time_padding)
            new = called(graph, last, operator, before.x, weight, bias, residual, *of_frames, *how, False)
            what.append(before.time_padding)
        new.meta[NAME] = name
        if not replaced(last, new, conv.node):
            return None
    if report is not None:
        module = told(value(weight).shape, conv.options, bias is not None, activation)
        report.fused(name, ": ".join([f"FusedConv2d({module})", ", ".join([*folded, *what])]).removesuffix(": "))
    return result


def _following(node: fx.Node, decompositions: Any) -> tuple[fx.Node, fx.Node | None, str | None]:
    """The node with the result of a convolution, the addition and the activation behind it; with the tensor that is
    added and the activation's name, if there are such."""
    last, residual, activation = node, None, None
    if (added := _added(last)) is not None:
        last, residual = added
    if (found := activated(last, value(node).dtype, decompositions)) is not None:
        activation, last = found
    return last, residual, activation


def _added(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The addition behind a node, and the tensor that it adds; None unless both have the same shape and type."""
    if len(node.users) != 1:
        return None
    (total,) = node.users
    if total.target is not _aten.add.Tensor or total.kwargs or not all(isinstance(a, fx.Node) for a in total.args):
        return None
    first, second = total.args
    other: Any = second if first is node else first
    if other is node or not isinstance(value(other), Tensor):
        return None
    ours, theirs = value(node), value(other)
    return (total, other) if ours.shape == theirs.shape and ours.dtype == theirs.dtype else None
