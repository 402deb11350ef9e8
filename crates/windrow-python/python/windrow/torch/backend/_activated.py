"""The activations in graphs of PyTorch's operators, whole or decomposed."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from windrow._activation_names import leaky_relu
from windrow.torch._activations import PYTORCHS, activation_of
from windrow.torch.backend._convolutions import called

_aten = torch.ops.aten
_COMMUTATIVE = (_aten.add.Tensor, _aten.mul.Tensor)


def activated(node: fx.Node, dtype: torch.dtype, decompositions: Any) -> tuple[str, fx.Node] | None:
    """The name of the activation behind a node, and the node with its result."""
    for name in (*PYTORCHS, *_leaky_relus(node)):
        pattern = pattern_of(name, dtype, decompositions)
        if (last := _last_of(pattern, node)) is not None:
            return name, last
    return None


def _leaky_relus(node: fx.Node) -> Iterator[str]:
    """The names of leaky ReLU with the slopes that operators behind a node have."""
    for user in _behind(node, 3):
        is_product = user.target is _aten.mul.Tensor and any(other.target is _aten.where.self for other in user.users)
        if (is_product or user.target is _aten.leaky_relu.default) and isinstance(user.args[-1], int | float):
            name = leaky_relu(user.args[-1])
            if name is not None and name not in PYTORCHS:
                yield name


_patterns: dict[Any, tuple[Any, dict[str, fx.Graph]]] = {}


def pattern_of(name: str, dtype: torch.dtype, decompositions: Any) -> fx.Graph:
    """The nodes that PyTorch's tracer makes for an activation with these decompositions."""
    key = dtype, id(decompositions)
    # The table is kept, so that another one does not get its address.
    if key not in _patterns:
        _patterns[key] = decompositions, _traced(PYTORCHS, dtype, decompositions)
    graphs = _patterns[key][1]
    if name not in graphs:
        graphs |= _traced({name: activation_of(name)}, dtype, decompositions)
    return graphs[name]


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


def copied(graph: fx.Graph, before: fx.Node, pattern: fx.Graph, x: fx.Node) -> fx.Node:
    """The node with the result of new nodes in front of `before`, which compute the pattern of `x`."""
    made = dict[fx.Node, fx.Node]()
    for node in pattern.nodes:
        if node.op == "placeholder":
            made[node] = x
        elif node.op == "output":
            return made[node.args[0]]
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
            made[node] = called(graph, before, node.target, *args, **kwargs)
    raise AssertionError("a graph without an output")
