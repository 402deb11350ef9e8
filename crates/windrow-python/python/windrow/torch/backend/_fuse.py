"""The pass that fuses a convolution with the addition and the activation behind it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from windrow.torch._activations import PYTORCHS
from windrow.torch._fused import told
from windrow.torch._library import OPERATORS
from windrow.torch.backend._choice import After, is_pytorchs, prepare
from windrow.torch.backend._constants import Constants, value
from windrow.torch.backend._convolutions import FASTER, LEFT, Convolution, called, convolutions, replaced
from windrow.torch.backend._layout import laid_out
from windrow.torch.backend._memory import Memory
from windrow.torch.backend._padding import frames_before
from windrow.torch.backend._report import FOLDED, NAME, Report, name_of
from windrow.torch.choice.convolution import compiles

_aten = torch.ops.aten
_COMMUTATIVE = (_aten.add.Tensor, _aten.mul.Tensor)


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
            new = called(graph, last, operator, before.x, weight, bias, residual, *of_frames, *how)
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
    if (found := _activated(last, value(node).dtype, decompositions)) is not None:
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


def _activated(node: fx.Node, dtype: torch.dtype, decompositions: Any) -> tuple[str, fx.Node] | None:
    """The name of the activation behind a node, and the node with its result."""
    for name in PYTORCHS:
        pattern = _pattern(name, dtype, decompositions)
        if (last := _last_of(pattern, node)) is not None:
            return name, last
    return None


_patterns: dict[Any, tuple[Any, dict[str, fx.Graph]]] = {}


def _pattern(name: str, dtype: torch.dtype, decompositions: Any) -> fx.Graph:
    """The nodes that PyTorch's tracer makes for an activation with these decompositions."""
    key = dtype, id(decompositions)
    # The table is kept, so that another one does not get its address.
    if key not in _patterns:
        _patterns[key] = decompositions, _traced(PYTORCHS, dtype, decompositions)
    return _patterns[key][1][name]


def _traced(
    functions: Mapping[str, Callable[[Tensor], Tensor]], dtype: torch.dtype, decompositions: Any
) -> dict[str, fx.Graph]:
    """The graph of each function. They are traced together, because starting the tracer takes longest."""
    every = lambda x: tuple(function(x) for function in functions.values())
    with torch.no_grad(), torch._C._DisableAutocast():
        whole = make_fx(every, decomposition_table=decompositions)(torch.zeros(2, dtype=dtype)).graph
    (output,) = (node for node in whole.nodes if node.op == "output")
    return {name: _graph_of(whole, result) for name, result in zip(functions, output.args[0], strict=True)}  # type: ignore[arg-type]


def _graph_of(whole: fx.Graph, result: fx.Node) -> fx.Graph:
    """The part of a graph that computes this node."""
    needed = {result}
    for node in reversed(whole.nodes):
        needed |= {*node.all_input_nodes} if node in needed else set()
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in whole.nodes:
        if node in needed:
            copied[node] = graph.node_copy(node, copied.__getitem__)
            # The metadata holds all tensors that the tracer has seen, parameters of the compiled model too.
            copied[node].meta = {}
    graph.output(copied[result])
    return graph


def _last_of(pattern: fx.Graph, first: fx.Node) -> fx.Node | None:
    """The node with the pattern's result for the input `first`, if no other node reads the values in between."""
    *inner, output = pattern.nodes
    (wanted,) = output.all_input_nodes
    for candidate in _behind(first, len(inner)):
        matched = {next(n for n in inner if n.op == "placeholder"): first}
        if candidate.target is wanted.target and _matches(wanted, candidate, matched):
            between = {*matched.values()} - {candidate}
            inside = {*matched.values()}
            if all(user in inside for node in between for user in node.users):
                return candidate
    return None


def _behind(first: fx.Node, steps: int) -> Iterator[fx.Node]:
    reached, seen = [first], {first}
    for _ in range(steps):
        reached = [user for node in reached for user in node.users if user.op == "call_function" and user not in seen]
        seen |= {*reached}
        yield from reached


def _matches(wanted: Any, node: Any, matched: dict[fx.Node, fx.Node]) -> bool:
    """True if a node computes the same as the pattern's node `wanted`. Adds the matching nodes to `matched`."""
    if not isinstance(wanted, fx.Node):
        if isinstance(wanted, list | tuple):
            return (
                isinstance(node, list | tuple)
                and len(wanted) == len(node)
                and all(_matches(w, n, matched) for w, n in zip(wanted, node, strict=True))
            )
        # 6 and 6.0 are the same limit.
        is_number = isinstance(wanted, int | float) and isinstance(node, int | float)
        return (is_number or type(wanted) is type(node)) and bool(wanted == node)
    if wanted in matched:
        return matched[wanted] is node
    if not isinstance(node, fx.Node) or wanted.op != node.op or wanted.target is not node.target:
        return False
    if dict(wanted.kwargs) != dict(node.kwargs) or len(wanted.args) != len(node.args):
        return False
    orders = [node.args]
    if wanted.target in _COMMUTATIVE and len(node.args) == 2:
        orders.append(node.args[::-1])
    for args in orders:
        tried = dict(matched)
        if all(_matches(w, n, tried) for w, n in zip(wanted.args, args, strict=True)):
            matched |= tried | {wanted: node}
            return True
    return False
