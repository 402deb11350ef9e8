"""Consecutive convolutions of an optimized model as one call, for the CPU, where calling a small convolution can cost
as much as computing it."""

import itertools
import operator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules import module as modules_of_torch

from windrow import _native
from windrow.torch._calls import is_direct
from windrow.torch._fused import Called, FusedConv2d
from windrow.torch._graph import is_wrapped
from windrow.torch._precision import flags
from windrow.torch._remembering import REMEMBERED, Remembering

# The value that a convolution reads, and the one that it adds.
Step = tuple[int, int | None]
# The place of a module: the index of the root's child, and the names from there.
Path = tuple[int, list[str]]


def in_sequences(traced: fx.GraphModule) -> None:
    """Replaces consecutive convolutions by one node. The modules stay where they are."""
    graph, modules = traced.graph, dict(traced.named_modules())
    is_fused = lambda node: node.op == "call_module" and type(modules.get(node.target)) is FusedConv2d
    groups = [[*nodes] for fused, nodes in itertools.groupby(graph.nodes, is_fused) if fused]
    for number, nodes in enumerate(nodes for nodes in groups if len(nodes) > 1):
        images = [*dict.fromkeys(a for node in nodes for a in node.args if a not in nodes)]
        results = [node for node in nodes if any(user not in nodes for user in node.users)]
        value = {node: i for i, node in enumerate([*images, *nodes])}
        steps = [(value[n.args[0]], value[n.args[1]] if len(n.args) > 1 else None) for n in nodes]
        names = [node.target.split(".") for node in nodes]
        holders = [*dict.fromkeys(first for first, *_ in names)]
        paths = [(holders.index(first), rest) for first, *rest in names]
        name = f"_convolutions_{number}"
        traced.add_module(name, Sequence(paths, len(images), steps, [value[node] for node in results]))
        with graph.inserting_before(nodes[0]):
            call = graph.call_module(name, (tuple(map(graph.get_attr, holders)), *images))
            for i, node in enumerate(results):
                result = call if len(results) == 1 else graph.call_function(operator.getitem, (call, i))
                node.replace_all_uses_with(result)
        for node in reversed(nodes):
            graph.erase_node(node)
    graph.lint()
    traced.recompile()


@dataclass(frozen=True)
class _Stage:
    """A range of a sequence's convolutions, from `first` to before `last`."""

    first: int
    last: int
    # Windrow's call, with the values that it takes and returns; None if modules are called.
    call: _native.Conv2dSequence | None = None
    images: Several[int] = ()
    results: Several[int] = ()
    filters: Several[tuple[Tensor, Tensor | None]] = ()


# A module's filter and bias, and what its calls have found with them.
_Found = tuple[Tensor, Tensor | None, Any]


class Sequence(Remembering):
    """A module that computes consecutive convolutions. Its values are numbered: first the images, then the results in
    order."""

    # By the key of the images: the stages of a call, and for each convolution what they depend on.
    _stages: dict[Any, tuple[list[_Stage], dict[int, _Found]]] = {}

    FOUND_OUT = ("_stages",)

    def __init__(self, paths: list[Path], images: int, steps: list[Step], results: list[int]) -> None:
        super().__init__()
        self.paths, self.images, self.steps, self.results = paths, images, steps, results
        last = {value: i for i, step in enumerate(steps) for value in step}
        gone = lambda i: [v for v in steps[i] if v is not None and last[v] == i and v not in results]
        # For each convolution, the values that no later one reads.
        self.last_read = [gone(i) for i in range(len(steps))]
        self.eval()

    def forward(self, holders: tuple[nn.Module, ...], *images: Tensor) -> Any:
        convolutions: list[Any] = []
        for holder, names in self.paths:
            module: Any = holders[holder]
            for name in names:
                module = module._modules[name]
            convolutions.append(module)
        ways: list[Any] | None = None
        stages = [_Stage(0, len(self.steps))]
        seen = None
        if is_direct(*images) and not _is_seen_by_hooks():
            seen = tuple((i.shape, i.stride(), i.dtype, i.device, flags(i)) for i in images)
            known = self._stages.get(seen)
            if known is None or not _is_unchanged(convolutions, known[1]):
                ways = []
            else:
                stages = known[0]
                if len(stages) == 1 and (call := stages[0].call) is not None:
                    results = call(images, stages[0].filters)
                    if results is not None:
                        return results[0] if len(results) == 1 else (*results,)
        values: list[Any] = [*images, *[None] * len(self.steps)]
        for stage in stages:
            if not self._called(stage, values):
                self._call(convolutions, values, stage.first, stage.last, ways)
                if stage.call is not None:
                    # The memory of a filter is another.
                    self._forget()
        if ways is not None and all(way is not None for way in ways):
            self._remember(seen, convolutions, ways)
        results = [values[i] for i in self.results]
        return results[0] if len(results) == 1 else (*results,)

    def _call(
        self, convolutions: list[Any], values: list[Any], first: int, last: int, ways: list[Any] | None = None
    ) -> None:
        """Calls modules one by one. `ways` collects the function that each has found for good, or the module itself if
        only it can decide."""
        for i in range(first, last):
            (image, added), module = self.steps[i], convolutions[i]
            x, residual = values[image], None if added is None else values[added]
            values[self.images + i] = module(x) if added is None else module(x, residual)
            if ways is not None:
                is_known = type(module) is FusedConv2d and not is_wrapped(module)
                ways.append(module.known(x, residual) if is_known else module)
            for value in self.last_read[i]:
                values[value] = None

    def _called(self, stage: _Stage, values: list[Any]) -> bool:
        """Computes a stage in one native call. Returns False if that is not possible."""
        if stage.call is None:
            return False
        results = stage.call([values[i] for i in stage.images], stage.filters)
        if results is None:
            return False
        for value, result in zip(stage.results, results, strict=True):
            values[value] = result
        for i in range(stage.first, stage.last):
            for value in self.last_read[i]:
                values[value] = None
        return True

    def _remember(self, seen: Any, convolutions: list[Any], ways: list[Any]) -> None:
        is_call = lambda way: type(way) is Called and type(way.call) is _native.Conv2dCall and way.weight.is_cpu
        is_ours = lambda i: is_call(ways[i])
        stages, found = [], {}
        for ours, group in itertools.groupby(range(len(ways)), is_ours):
            first, *rest = group
            last = first + len(rest) + 1
            stages.append(self._stage(ways, first, last) if ours else _Stage(first, last))
            if ours:
                found |= {i: (ways[i].weight, ways[i].bias, convolutions[i]._remembered) for i in range(first, last)}
        all_stages = self.__dict__.setdefault("_stages", {})
        if len(all_stages) >= REMEMBERED:
            all_stages.clear()
        all_stages[seen] = stages, found

    def _stage(self, ways: list[Any], first: int, last: int) -> _Stage:
        steps, inside = self.steps[first:last], range(self.images + first, self.images + last)
        images = [*dict.fromkeys(v for step in steps for v in step if v is not None and v not in inside)]
        read = {*self.results, *(v for step in self.steps[last:] for v in step)}
        results = [value for value in inside if value in read]
        number = {value: i for i, value in enumerate([*images, *inside])}
        added = [None if residual is None else number[residual] for _, residual in steps]
        read_by = zip(ways[first:last], steps, added, strict=True)
        calls = [(way.call, number[image], residual) for way, (image, _), residual in read_by]
        call = _native.Conv2dSequence(len(images), calls, [number[value] for value in results])
        return _Stage(first, last, call, images, results, [(way.weight, way.bias) for way in ways[first:last]])

    def extra_repr(self) -> str:
        return f"{len(self.steps)} of the convolutions"


def _is_seen_by_hooks() -> bool:
    """True if a global hook observes all modules."""
    return bool(modules_of_torch._global_forward_hooks or modules_of_torch._global_forward_pre_hooks)


def _is_unchanged(convolutions: list[Any], found: dict[int, _Found]) -> bool:
    """True if the modules are still those for which this was found, and no hook observes their calls."""
    for i, (weight, bias, remembered) in found.items():
        module = convolutions[i]
        if module.__dict__.get("_remembered") is not remembered or module._forward_hooks or module._forward_pre_hooks:
            return False
        buffers = module._buffers
        if buffers["weight"] is not weight or buffers["bias"] is not bias:
            return False
    return True
