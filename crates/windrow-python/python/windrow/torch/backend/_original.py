"""The original graph, as AOTAutograd gave it, kept so that PyTorch's operators can run it once more."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from windrow.torch._check_bound import Tier, moved, tier_of
from windrow.torch.backend._constants import Constants, is_floating, value
from windrow.torch.backend._convolutions import SUM, VALUE, Sum, Value
from windrow.torch.backend._layout import in_format_of
from windrow.torch.backend._report import name_of

_aten = torch.ops.aten
# The operators, by name, that round their operands to the tier.
_MULTIPLY = {"convolution", "mm", "addmm", "bmm", "baddbmm", "conv2d", "conv2d_fused"}
# The operators that only copy numbers of their input.
_COPY = {"clone", "cat", "constant_pad_nd", "reshape", "_unsafe_view", "index", "gather", "repeat", "flip", "roll", "stack"}
# The operators that return memory with arbitrary contents.
_UNSET = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}


def unrepeatable(graph: fx.Graph) -> str | None:
    """The reason why a second run of the graph would have visible effects or other results; None if it can be repeated.
    """
    for node in graph.nodes:
        target = node.target
        if node.op in ("placeholder", "output", "get_attr") or target is _aten.copy_.default:
            continue
        if node.op != "call_function":
            return f"it has a node {node.op}"
        if not isinstance(target, torch._ops.OpOverload):
            if isinstance(target, torch._ops.HigherOrderOperator) and "effects" in str(target):
                return f"{target} has effects"
            continue
        if target._schema.is_mutable:
            return f"{target} writes to what it is given"
        if "c10d" in target.namespace:
            return f"{target} waits for other processes"
    return None


def _name(node: fx.Node) -> str:
    return node.target._opname if isinstance(node.target, torch._ops.OpOverload) else ""


def is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return any(a.alias_info is not None and not a.alias_info.is_write for a in node.target._schema.arguments)


def _is_copy(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    return is_view(node) or _name(node) in _COPY or node.target is in_format_of


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _is_multiplied(node: fx.Node) -> bool:
    """True if an operator that rounds its operands reads the result."""
    return any(_name(user) in _MULTIPLY or (_is_copy(user) and _is_multiplied(user)) for user in node.users)


# A function that is called after each node, with the values that are alive then, by name.
Look = Callable[[str, dict[str, Any]], None]


class Roundings:
    """A source of rounding errors: it moves results by one unit up or down."""

    def __init__(self, seed: int) -> None:
        self.seed, self._generators = seed, dict[torch.device, torch.Generator]()

    def moved(self, x: Tensor, unit: float) -> Tensor:
        generator = self._generators.get(x.device)
        if generator is None:
            generator = self._generators[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        return moved(x, unit, generator)


class Original:
    """A copy of the graph. The constructor marks each node of the graph with its copy.

    `static`: the indices of the inputs that are parameters and buffers. `is_inductors`: true if
    Inductor compiles the nodes that the passes leave.
    """

    def __init__(
        self, module: fx.GraphModule, static: Sequence[int], accuracy: str | None, is_inductors: bool
    ) -> None:
        graph, constants = module.graph, Constants(module, static)
        copied: dict[fx.Node, fx.Node] = {}
        own = fx.Graph()
        own.output(own.graph_copy(graph, copied))
        self.accuracy = accuracy
        # The unit of the rounding that moves each result.
        self._units: dict[fx.Node, float] = {}
        # Nodes whose values a second run does not repeat. Inductor draws other random numbers than PyTorch.
        self._unset: set[fx.Node] = set()
        self._is_random = False
        of_products: list[torch.dtype] = []
        for node, copy in copied.items():
            node.meta[VALUE] = Value(copy.name)
            if node.target is _aten.convolution.default:
                weight, bias = (None if n is None else Value(copied[n].name) for n in node.args[1:3])  # type: ignore[index]
                node.meta[SUM] = Sum(Value(copy.name), weight, bias)  # type: ignore[arg-type]
            copy.meta = {"module": name_of(node)}
            self._is_random |= _is_random(node)
            is_unset = _name(node) in _UNSET or (is_inductors and _is_random(node))
            if is_unset or any(n in self._unset for n in copy.all_input_nodes):
                self._unset.add(copy)
            if not is_floating(node):
                continue
            result = value(node)
            if _name(node) in _MULTIPLY:
                of_products.append(result.dtype)
            if node not in constants and not _is_copy(node):
                rounded = accuracy if _is_multiplied(node) else "exact"
                self._units[copy] = tier_of(result.dtype, result.device, rounded).unit
        # Results of f32 may be computed in a type of fewer bits.
        self._coarsest = max(of_products, key=lambda dtype: torch.finfo(dtype).eps, default=None)
        self.module = fx.GraphModule(module, own)
        self._output = next(node for node in own.nodes if node.op == "output")
        writes = [node for node in own.nodes if node.target is _aten.copy_.default]
        inputs = [node for node in own.nodes if node.op == "placeholder"]
        # The indices of inputs that the graph writes to, and the values that it writes.
        self.written = [inputs.index(node.args[0]) for node in writes]
        results: Any = self._output.args[0]
        self.results: list[Any] = [*results, *writes]
        before = {copy: value(node) for node, copy in copied.items()}
        # The strides of results that the tracer promises; None for written inputs.
        self.strides = [_strides(before.get(node)) for node in results] + [None] * len(writes)
        self.names = {node.name: node for node in copied.values()}

    def module_of(self, name: str) -> str:
        return self.names[name].meta["module"] or name

    def is_unset(self, result: Any) -> bool:
        return result in self._unset

    def tier(self, result: Tensor) -> Tier:
        dtype = result.dtype
        if dtype == torch.float32 and self._coarsest is not None and torch.finfo(self._coarsest).bits < 32:
            dtype = self._coarsest
        return tier_of(dtype, result.device, self.accuracy)

    def run(
        self,
        given: Sequence[Any],
        roundings: Roundings | None = None,
        look: Look | None = None,
        read: dict[str, list[str]] | None = None,
    ) -> list[Any]:
        """The results, and the values that the graph would write to its inputs; nothing is written. `read`: the values
        that `look` reads after a node."""
        inputs, values, graph = iter(given), dict[str, Any](), self.module.graph
        gone = self._gone(read or {})
        with self._same_numbers(given):
            for node in graph.nodes:
                if node.op == "output":
                    break
                if node.op == "placeholder":
                    y = next(inputs)
                elif node.op == "get_attr":
                    y = getattr(self.module, str(node.target))
                else:
                    of = lambda n: values[n.name]
                    args, kwargs = fx.map_arg(node.args, of), fx.map_arg(node.kwargs, of)
                    is_write = node.target is _aten.copy_.default
                    y = args[1].to(args[0].dtype).expand_as(args[0]) if is_write else node.target(*args, **kwargs)
                if roundings is not None and node in self._units:
                    y = roundings.moved(y, self._units[node])
                values[node.name] = y
                if look is not None:
                    look(node.name, values)
                for name in gone[node]:
                    del values[name]
        return [values[r.name] if isinstance(r, fx.Node) else r for r in self.results]

    def _gone(self, read: dict[str, list[str]]) -> dict[fx.Node, list[str]]:
        """The values that no later node reads, for each node."""
        kept, gone = {r.name for r in self.results if isinstance(r, fx.Node)}, {}
        for node in reversed(self.module.graph.nodes):
            names = dict.fromkeys([*(n.name for n in node.all_input_nodes), *read.get(node.name, []), node.name])
            gone[node] = [name for name in names if name not in kept]
            kept |= {*names}
        return gone

    @contextmanager
    def _same_numbers(self, given: Sequence[Any]) -> Iterator[None]:
        """A context that restores the random generators at its end."""
        if not self._is_random:
            yield
            return
        devices = {t.device.index for t in given if isinstance(t, Tensor) and t.is_cuda}
        with torch.random.fork_rng([*devices]):
            yield

    def pytorchs(self, is_of_any_size: bool, inductor: Mapping[str, Any] | None) -> Callable[..., Any]:
        """The graph by PyTorch alone. Inductor compiles it with these options. If they are None, PyTorch's operators
        run one by one."""
        if inductor is None:
            return self.module.forward
        compiled = torch.compile(self.module, dynamic=is_of_any_size, options=dict(inductor) or None)
        return compiled  # type: ignore[no-any-return]


def _strides(t: Any) -> tuple[int, ...] | None:
    if not isinstance(t, Tensor) or not all(isinstance(n, int) for n in t.stride()):
        return None
    return t.stride()
