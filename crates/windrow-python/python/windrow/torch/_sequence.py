"""Consecutive convolutions of an optimized model, and image steps between them, as one call, for the CPU, where calling
a small convolution can cost as much as computing it."""

import itertools
import operator
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn.modules import module as modules_of_torch

from windrow import _native
from windrow.torch._calls import is_direct
from windrow.torch._fused import FusedConv2d, Way
from windrow.torch._image_step import ImageStep
from windrow.torch._precision import flags
from windrow.torch._remembering import REMEMBERED, Remembering
from windrow.torch.choice.problem import TYPES

_aten = torch.ops.aten


class Channels(NamedTuple):
    """Some channels of a value."""

    first: int
    size: int

    def of(self, x: Tensor) -> Tensor:
        return x.narrow(1, *self)

    def known(self, x: Tensor) -> Any:
        return _native.ImageView.channels(x, *self) if _native.is_plain(x) else None


class Memory(NamedTuple):
    """Memory to which several steps write: its sizes, strides and type."""

    sizes: Several[int]
    strides: Several[int]
    dtype: torch.dtype

    def of(self, _: None) -> Tensor:
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype)

    def known(self, _: None) -> Any:
        return _native.ImageView.memory(self.of(None))


class Step(NamedTuple):
    """What computes a value, or where it lies; the numbers of the values that it reads and writes to."""

    # The name of a module.
    by: str | Channels | Memory
    image: int | None
    # What a convolution adds, a gate, or the second image of a sum.
    second: int | None = None
    place: int | None = None

    @property
    def values(self) -> list[int]:
        return [value for value in self[1:] if value is not None]


class _Place(NamedTuple):
    """Where a value lies: in the memory of another one, or all of its own."""

    value: int
    channels: Channels | None = None


def _places(images: int, steps: Several[Step]) -> list[_Place]:
    places = [_Place(value) for value in range(images)]
    for step in steps:
        place = _Place(len(places))
        if isinstance(step.by, Channels):
            value, of = places[step.values[0]]
            place = _Place(value, step.by if of is None else Channels(of.first + step.by.first, step.by.size))
        elif step.place is not None:
            place = places[step.place]
        places.append(place)
    return places


def in_sequences(traced: fx.GraphModule) -> None:
    """Replaces consecutive convolutions and image steps by one node, whose module holds theirs."""
    graph, modules = traced.graph, dict(traced.named_modules())
    is_ours = lambda n: _view(n) is not None or _is_computed(n, modules)
    groups = [[*nodes] for ours, nodes in itertools.groupby(graph.nodes, is_ours) if ours]
    groups = [nodes for nodes in groups if len(nodes) > 1 and any(_is_computed(n, modules) for n in nodes)]
    for number, nodes in enumerate(groups):
        images = [*dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in nodes)]
        order = [*images, *nodes]
        value = {node: i for i, node in enumerate(order)}
        steps = [Step(_view(n) or str(n.target), *(value.get(a) for a in _values(n))) for n in nodes]
        places = _places(len(images), steps)
        read = [node for node in nodes if any(user not in nodes for user in node.users)]
        # Whoever reads channels reads them in the memory that they are in.
        results = sorted({own for node in read if (own := places[value[node]].value) >= len(images)})
        flat = {value[node]: views for node in read if (views := _flattened(node)) and value[node] in results}
        name = f"convolutions_{number}"
        held = {n.target: traced._modules.pop(n.target) for n in nodes if n.op == "call_module"}
        traced.add_module(name, Sequence(held, len(images), steps, results, [*flat]))
        with graph.inserting_before(nodes[0]):
            call = graph.call_module(name, (*images,))
            returned = dict(enumerate(images))
            for i, own in enumerate(results):
                returned[own] = call if len(results) == 1 else graph.call_function(operator.getitem, (call, i))
            for node in read:
                own, channels = places[value[node]]
                new = returned[own]
                for view in flat.get(own, ()):
                    view.replace_all_uses_with(new)
                    graph.erase_node(view)
                if channels is not None:
                    first, size = channels
                    new = graph.call_function(_aten.slice.Tensor, (new, 1, first, first + size))
                node.replace_all_uses_with(new, lambda user, nodes=nodes: user not in nodes)
        for node in reversed(nodes):
            graph.erase_node(node)
    graph.lint()
    traced.recompile()


def _is_computed(node: fx.Node, modules: dict[str, Any]) -> bool:
    return node.op == "call_module" and type(modules.get(str(node.target))) in (FusedConv2d, ImageStep)


def _values(node: fx.Node) -> Iterable[Any]:
    """The values that a node reads and writes to, as those of a step."""
    if node.op == "call_module":
        return node.args
    return node.args[:1] if node.target is _aten.slice.Tensor else (None,)


def _view(node: fx.Node) -> Channels | Memory | None:
    """Where a value lies that a node does not compute."""
    made = node.meta.get("val")
    if not isinstance(made, Tensor) or made.dim() != 4 or made.device.type != "cpu" or made.dtype not in TYPES:
        return None
    if not all(isinstance(n, int) for n in (*made.shape, *made.stride())):
        return None
    if node.target is _aten.empty_strided.default:
        return Memory((*made.shape,), (*made.stride(),), made.dtype)
    if node.target is _aten.slice.Tensor and node.args[1:2] == (1,) and len(node.args) < 5 and not node.kwargs:
        first = node.args[2] if len(node.args) > 2 else 0
        if isinstance(first, int) and first >= 0 and made.shape[1] > 0 and made.stride()[1] == 1:
            return Channels(first, made.shape[1])
    return None


def _flattened(node: fx.Node) -> list[fx.Node]:
    """The nodes that read the channels of a value with one pixel as a matrix, if nothing else reads it."""
    made = node.meta.get("val")
    if not isinstance(made, Tensor) or made.shape[2:] != (1, 1):
        return []
    users = [*node.users]
    is_view = lambda n: n.target is _aten.view.default and n.meta["val"].shape == made.shape[:2]
    return users if all(map(is_view, users)) else []


def called_alone(module: fx.GraphModule) -> Callable[..., Any]:
    """The function of a graph. One of a graph that is nothing but a sequence calls it without PyTorch's way to call
    modules, which looks for hooks that the graph's own modules have not."""
    *given, last, output = module.graph.nodes
    by = dict(module.named_children()).get(str(last.target))
    is_alone = all(node.op == "placeholder" for node in given) and [*last.args] == given and not last.kwargs
    if not isinstance(by, Sequence) or not is_alone or output.args != ((last,),):
        return module.forward
    forward = by.forward
    return lambda *images: (forward(*images),)


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
    # The values that are channels of these, and are read later.
    parts: Several[int] = ()


class Sequence(Remembering):
    """A module that computes consecutive convolutions and image steps, whose modules are its own. Its values are
    numbered: first the images, then the results in order."""

    # The stages of a call, by the key of the images.
    _stages: dict[Any, list[_Stage]] = {}

    FOUND_OUT = ("_stages",)

    def __init__(
        self, modules: dict[str, Any], images: int, steps: Several[Step], results: Several[int], flat: Several[int]
    ) -> None:
        """`flat` are results with one pixel that are given as matrices."""
        super().__init__()
        self._modules.update(modules)
        self.images, self.steps, self.results, self.flat = images, steps, results, flat
        self.places = _places(images, steps)
        own = lambda value: self.places[value].value
        last = {own(value): i for i, step in enumerate(steps) for value in step.values}
        # For each step, the values whose memory no later one reads.
        gone = lambda i: [v for v, (at, _) in enumerate(self.places) if last.get(at) == i and at not in results]
        self.last_read = [gone(i) for i in range(len(steps))]
        self.eval()

    def of(self, modules: dict[str, Any]) -> "Sequence":
        """The same sequence of other convolutions."""
        held = {name: modules.get(name, own) for name, own in self._modules.items()}
        return Sequence(held, self.images, self.steps, self.results, self.flat)

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
        results = [values[i].flatten(1) if i in self.flat else values[i] for i in self.results]
        return results[0] if len(results) == 1 else (*results,)

    def _call(self, stage: _Stage, values: list[Any], found: list[Way | None] | None) -> None:
        """Calls modules one by one. `found` collects the function that each has found for good."""
        for i in range(stage.first, stage.last):
            by, *numbers = self.steps[i]
            x, second, place = (None if number is None else values[number] for number in numbers)
            more: tuple[Any, ...] = (second,) if place is None else (second, place)
            module: Any = by if not isinstance(by, str) else self._modules[by]
            y = None
            if not isinstance(by, str):
                y, more = by.of(x), ()
            elif stage.ways and _native.is_plain(x, *more):
                y = stage.ways[i - stage.first](x, *more)
            values[self.images + i] = module(x, *more) if y is None else y
            if found is not None:
                found.append(module.known(x, *more))
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
        for value in stage.parts:
            own, channels = self.places[value]
            values[value] = values[own] if channels is None else channels.of(values[own])
        for i in range(stage.first, stage.last):
            for value in self.last_read[i]:
                values[value] = None
        return True

    def _remember(self, seen: Any, ways: list[Any]) -> None:
        is_conv = lambda way: (
            type(way) is _native.BoundCall and type(way.call) is _native.Conv2dCall and way.weight.is_cpu
        )
        is_call = lambda way: type(way) in (_native.ImageStep, _native.ImageView) or is_conv(way)
        # On CUDA another function may compute a call that goes into a CUDA graph.
        is_on_cpu = all(device.type == "cpu" for _, _, _, device, _ in seen)
        stages = []
        for is_ours, group in itertools.groupby(range(len(ways)), lambda i: is_call(ways[i])):
            first, *rest = group
            last = first + len(rest) + 1
            known = ways[first:last] if is_on_cpu else ()
            computes = any(isinstance(step.by, str) for step in self.steps[first:last])
            stages.append(self._stage(ways, first, last) if is_ours and computes else _Stage(first, last, known))
        all_stages = self._keep("_stages", {}) if "_stages" not in self.__dict__ else self._stages
        if len(all_stages) >= REMEMBERED:
            all_stages.clear()
        all_stages[seen] = stages

    def _stage(self, ways: list[Any], first: int, last: int) -> _Stage:
        steps, inside = self.steps[first:last], range(self.images + first, self.images + last)
        images = [*dict.fromkeys(v for step in steps for v in step.values if v not in inside)]
        read = {*self.results, *(v for step in self.steps[last:] for v in step.values)} & {*inside}
        results = sorted({own for value in read if (own := self.places[value].value) in inside})
        parts = [value for value in sorted(read) if self.places[value].value != value]
        number = {value: i for i, value in enumerate([*images, *inside])}
        calls: list[Any] = [way.call if type(way) is _native.BoundCall else way for way in ways[first:last]]
        read_by = [(call, *map(number.get, step[1:])) for call, step in zip(calls, steps, strict=True)]
        filters = [(way.weight, way.bias) for way in ways[first:last] if type(way) is _native.BoundCall]
        flat = [number[value] for value in self.flat] if len(steps) == len(self.steps) else []
        call = _native.Conv2dSequence(len(images), read_by, [number[value] for value in results], filters, flat)
        return _Stage(first, last, (), call, images, results, parts)

    def extra_repr(self) -> str:
        return f"{len(self._modules)} of the convolutions and image steps"


def _is_seen_by_hooks() -> bool:
    """True if a global hook observes all modules."""
    return bool(modules_of_torch._global_forward_hooks or modules_of_torch._global_forward_pre_hooks)
