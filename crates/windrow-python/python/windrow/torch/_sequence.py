"""Consecutive convolutions of an optimized model, and image steps between them, as one call, for the CPU, where calling
a small convolution can cost as much as computing it."""

import itertools
import operator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.nn.modules import module as modules_of_torch

from windrow import _native
from windrow.torch._calls import is_direct
from windrow.torch._fused import Called, FusedConv2d, Way
from windrow.torch._image_step import ImageStep
from windrow.torch._precision import flags
from windrow.torch._remembering import REMEMBERED, Remembering

# The image that a module reads, and what a convolution adds or the gate.
Step = tuple[int, int | None]


def in_sequences(traced: fx.GraphModule) -> None:
    """Replaces consecutive convolutions and image steps by one node, whose module holds theirs."""
    graph, modules = traced.graph, dict(traced.named_modules())
    kinds: tuple[Any, ...] = (FusedConv2d, ImageStep)
    # Convolutions that write to a buffer have a third argument.
    is_ours = lambda n: n.op == "call_module" and type(modules.get(n.target)) in kinds and len(n.args) < 3
    groups = [[*nodes] for ours, nodes in itertools.groupby(graph.nodes, is_ours) if ours]
    for number, nodes in enumerate(nodes for nodes in groups if len(nodes) > 1):
        images = [*dict.fromkeys(a for node in nodes for a in node.args if a not in nodes)]
        results = [node for node in nodes if any(user not in nodes for user in node.users)]
        value = {node: i for i, node in enumerate([*images, *nodes])}
        steps = [(value[n.args[0]], value[n.args[1]] if len(n.args) > 1 else None) for n in nodes]
        name, held = f"convolutions_{number}", {node.target: traced._modules.pop(node.target) for node in nodes}
        traced.add_module(name, Sequence(held, len(images), steps, [value[node] for node in results]))
        with graph.inserting_before(nodes[0]):
            call = graph.call_module(name, (*images,))
            for i, node in enumerate(results):
                result = call if len(results) == 1 else graph.call_function(operator.getitem, (call, i))
                node.replace_all_uses_with(result)
        for node in reversed(nodes):
            graph.erase_node(node)
    graph.lint()
    traced.recompile()


@dataclass(frozen=True)
class _Stage:
    """A range of a sequence's modules, from `first` to before `last`."""

    first: int
    last: int
    # The function that computes each. Without one, its module is called.
    ways: Several[Way] = ()
    # Windrow's call, with the values that it takes and returns; None if modules are called one by one.
    call: _native.Conv2dSequence | None = None
    images: Several[int] = ()
    results: Several[int] = ()


class Sequence(Remembering):
    """A module that computes consecutive convolutions and image steps, whose modules are its own. Its values are
    numbered: first the images, then the results in order."""

    # The stages of a call, by the key of the images.
    _stages: dict[Any, list[_Stage]] = {}

    FOUND_OUT = ("_stages",)

    def __init__(self, modules: dict[str, Any], images: int, steps: list[Step], results: list[int]) -> None:
        super().__init__()
        self._modules.update(modules)
        self.images, self.steps, self.results = images, steps, results
        last = {value: i for i, step in enumerate(steps) for value in step}
        gone = lambda i: [v for v in steps[i] if v is not None and last[v] == i and v not in results]
        # For each module, the values that no later one reads.
        self.last_read = [gone(i) for i in range(len(steps))]
        self.eval()

    def of(self, modules: dict[str, Any]) -> "Sequence":
        """The same sequence of other convolutions."""
        held = {name: modules.get(name, own) for name, own in self._modules.items()}
        return Sequence(held, self.images, self.steps, self.results)

    def forward(self, *images: Tensor) -> Any:
        stages, seen = [_Stage(0, len(self.steps))], None
        ways: list[Way | None] | None = None
        if is_direct(*images) and not _is_seen_by_hooks():
            seen = tuple((i.shape, i.stride(), i.dtype, i.device, flags(i)) for i in images)
            known = self._stages.get(seen)
            if known is None:
                ways = []
            else:
                stages = known
                if len(stages) == 1 and (call := stages[0].call) is not None:
                    results = call(images)
                    if results is not None:
                        return results[0] if len(results) == 1 else (*results,)
        values: list[Any] = [*images, *[None] * len(self.steps)]
        for stage in stages:
            if not self._called(stage, values):
                self._call(stage, values, ways)
                if stage.call is not None:
                    # The memory of a filter is another.
                    self._forget()
        if ways is not None and None not in ways:
            self._remember(seen, ways)
        results = [values[i] for i in self.results]
        return results[0] if len(results) == 1 else (*results,)

    def _call(self, stage: _Stage, values: list[Any], found: list[Way | None] | None) -> None:
        """Calls modules one by one. `found` collects the function that each has found for good."""
        modules: list[Any] = [*self._modules.values()]
        for i in range(stage.first, stage.last):
            image, added = self.steps[i]
            x, residual = values[image], None if added is None else values[added]
            y = None
            if stage.ways and _native.is_plain(x, residual):
                y = stage.ways[i - stage.first](x, residual)
            values[self.images + i] = modules[i](x, residual) if y is None else y
            if found is not None:
                found.append(modules[i].known(x, residual))
            for value in self.last_read[i]:
                values[value] = None

    def _called(self, stage: _Stage, values: list[Any]) -> bool:
        """Computes a stage in one native call. Returns False if that is not possible."""
        if stage.call is None:
            return False
        results = stage.call([values[i] for i in stage.images])
        if results is None:
            return False
        for value, result in zip(stage.results, results, strict=True):
            values[value] = result
        for i in range(stage.first, stage.last):
            for value in self.last_read[i]:
                values[value] = None
        return True

    def _remember(self, seen: Any, ways: list[Any]) -> None:
        is_conv = lambda way: type(way) is Called and type(way.call) is _native.Conv2dCall and way.weight.is_cpu
        is_call = lambda way: type(way) is _native.ImageStep or is_conv(way)
        # On CUDA another function may compute a call that goes into a CUDA graph.
        is_on_cpu = all(device.type == "cpu" for _, _, _, device, _ in seen)
        stages = []
        for is_ours, group in itertools.groupby(range(len(ways)), lambda i: is_call(ways[i])):
            first, *rest = group
            last = first + len(rest) + 1
            known = ways[first:last] if is_on_cpu else ()
            stages.append(self._stage(ways, first, last) if is_ours else _Stage(first, last, known))
        all_stages = self._keep("_stages", {}) if "_stages" not in self.__dict__ else self._stages
        if len(all_stages) >= REMEMBERED:
            all_stages.clear()
        all_stages[seen] = stages

    def _stage(self, ways: list[Any], first: int, last: int) -> _Stage:
        steps, inside = self.steps[first:last], range(self.images + first, self.images + last)
        images = [*dict.fromkeys(v for step in steps for v in step if v is not None and v not in inside)]
        read = {*self.results, *(v for step in self.steps[last:] for v in step)}
        results = [value for value in inside if value in read]
        number = {value: i for i, value in enumerate([*images, *inside])}
        calls: list[Any] = [way.call if type(way) is Called else way for way in ways[first:last]]
        numbered = [(number[image], None if second is None else number[second]) for image, second in steps]
        read_by = [(call, *values) for call, values in zip(calls, numbered, strict=True)]
        filters = [(way.weight, way.bias) for way in ways[first:last] if type(way) is Called]
        call = _native.Conv2dSequence(len(images), read_by, [number[value] for value in results], filters)
        return _Stage(first, last, (), call, images, results)

    def extra_repr(self) -> str:
        return f"{len(self.steps)} of the convolutions and image steps"


def _is_seen_by_hooks() -> bool:
    """True if a global hook observes all modules."""
    return bool(modules_of_torch._global_forward_hooks or modules_of_torch._global_forward_pre_hooks)
