"""The values of a graph that depend on parameters and buffers alone. They are computed once, and again as soon as a
parameter changes.

A pass moves such values into a second graph, the prologue, whose results become inputs of the first graph.
"""

import operator
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from windrow import _native
from windrow.torch._calls import is_captured
from windrow.torch._filters import forget

_aten, _prims = torch.ops.aten, torch.ops.prims
CONVERSIONS = (_prims.convert_element_type.default, _aten._to_copy.default)
# Exact in f64 as far as matters, whatever the type that the model computes them in.
_WIDENED = {
    _aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.sub.Scalar, _aten.mul.Tensor, _aten.mul.Scalar,
    _aten.div.Tensor, _aten.div.Scalar, _aten.rsqrt.default, _aten.sqrt.default, _aten.reciprocal.default,
    _aten.neg.default, _aten.view.default, _aten.reshape.default, _aten.unsqueeze.default, _aten.squeeze.dim,
    _aten.expand.default, _aten.permute.default,
}  # fmt: skip
# The operators that make a tensor from no input.
_MADE = (_aten.full.default, _aten.arange.default, _aten.arange.start_step, _aten.scalar_tensor.default)


def value(node: Any) -> Any:
    """The tracer's value of a node: a tensor without memory, or a number."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def is_floating(node: Any) -> bool:
    return isinstance(value(node), Tensor) and value(node).is_floating_point()


class Constants:
    """The constants of a graph. `static`: the indices of the inputs that are parameters and buffers. `in_graphs`: CUDA
    graphs capture this graph and hold packed filters. Changed constants then get new memory, so that Inductor captures
    again and older graphs keep their own. `shares`: parameters that nothing is folded into may stay inputs."""

    def __init__(
        self, module: fx.GraphModule, static: Collection[int], in_graphs: bool = False, shares: bool = False
    ) -> None:
        self.in_graphs, self.shares = in_graphs, shares and not in_graphs
        self.module, self.graph = module, module.graph
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        written = {node.args[0] for node in self.graph.nodes if node.target is _aten.copy_.default}
        self.parameters = [inputs[i] for i in static if isinstance(value(inputs[i]), Tensor) and inputs[i] not in written]
        # Which of them a pass has read; and those whose own memory the graph's operators read as constants.
        self.watched: dict[fx.Node, None] = {}
        self.shared: dict[fx.Node, None] = {}
        self._known = {*self.parameters}
        self._prologue = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._wide: dict[fx.Node, fx.Node] = {}
        self._results: list[fx.Node] = []
        # The inputs that stand for results.
        self.inputs: list[fx.Node] = []
        for node in self.graph.nodes:
            if self._depends_on_known(node):
                self._known.add(node)

    def __contains__(self, node: Any) -> bool:
        return node in self._known or node in self.inputs

    def _depends_on_known(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            return isinstance(getattr(self.module, str(node.target), None), Tensor)
        if node.op != "call_function" or not isinstance(value(node), Tensor | tuple | list):
            return False
        if not isinstance(node.target, torch._ops.OpOverload):
            is_plain = node.target is operator.getitem
        else:
            is_plain = not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags
        if not node.all_input_nodes:
            return node.target in _MADE
        return is_plain and all(n in self._known for n in node.all_input_nodes)

    def copied(self, node: fx.Node) -> fx.Node:
        """The node's copy in the prologue."""
        if node not in self._copies:
            if node.op == "placeholder":
                self.watched[node] = None
            self._copies[node] = self._prologue.node_copy(node, self.copied)
        return self._copies[node]

    def widened(self, node: fx.Node) -> fx.Node:
        """The node's value in f64. Its inputs are computed in f64 too, as far back as that changes nothing but
        rounding."""
        if node not in self._wide:
            self._wide[node] = self._widen(node)
        return self._wide[node]

    def _widen(self, node: fx.Node) -> fx.Node:
        if node.op == "call_function" and is_floating(node):
            first: Any = node.args[0] if node.args else None
            if node.target in CONVERSIONS and is_floating(first):
                return self.widened(first)
            if node.target in _WIDENED:
                of = lambda n: self.widened(n) if is_floating(n) else self.copied(n)
                return self.call(node.target, *fx.map_arg(node.args, of), **fx.map_arg(node.kwargs, of))
        return self.call(_prims.convert_element_type.default, self.copied(node), torch.float64)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node of the prologue."""
        return self._prologue.call_function(target, args, kwargs)

    def add(self, result: fx.Node, like: Tensor) -> fx.Node:
        """A new input of the graph that takes a value of the prologue, with the shape, strides and type of `like`."""
        self._results.append(result)
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        with self.graph.inserting_after(last):
            given = self.graph.placeholder(f"windrow_constant_{len(self.inputs)}")
        given.meta["val"] = like
        self.inputs.append(given)
        return given

    def moved(self, node: fx.Node) -> fx.Node:
        """The node as an input of the graph. Parameters stay inputs if `shares`, so that all graphs of a model have one
        filter and one packed form; they are copied otherwise, and the packed form belongs to this graph alone."""
        if node in self.inputs:
            return node
        if self.shares and node in self.parameters:
            self.watched[node] = self.shared[node] = None
            return node
        return self.add(self.copied(node), value(node))

    def prologue(self) -> Callable[..., Sequence[Tensor]]:
        """The function that computes the constants from the parameters in `watched`, in this order."""
        placeholders = {node: self._copies.get(node) for node in self.watched}
        self._prologue.output(tuple(self._results))
        held = {str(n.target): getattr(self.module, str(n.target)) for n in self._prologue.nodes if n.op == "get_attr"}
        module = fx.GraphModule(held, self._prologue, "Prologue")
        for node in self._prologue.nodes:
            # The metadata holds all tensors that the tracer has seen, parameters too.
            node.meta = {}
        # The order of `watched` by name: inputs stand in the order in which they were read.
        read = [node.target for node in self._prologue.nodes if node.op == "placeholder"]
        position = {copy.target: i for i, copy in enumerate(placeholders.values()) if copy is not None}
        order = [position[name] for name in read]
        return lambda *given: module(*(given[i] for i in order))


def _words(first: int, last: int, device: torch.device) -> Tensor:
    """The words of memory with these numbers, without `last`. The view does not own this memory: it may be read only while
    the tensors in it live at the same place."""
    storage = torch._C._construct_storage_from_data_pointer(first * _WORD, device, (last - first) * _WORD)
    return torch.empty(0, dtype=torch.int64, device=device).set_(storage, 0, (last - first,), (1,))


# Shape, strides, type and device of a constant.
_Like = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]


def _owner(result: Tensor, like: _Like, owners: Mapping[int, int]) -> int | None:
    """Which parameter on the CPU the result is, as it lies. None for others. `owners`: the numbers of these parameters by
    the addresses of their memory."""
    if not result.is_cpu or result.is_inference() or result.nbytes == 0:
        return None
    if (result.shape, result.stride(), result.dtype, result.device) != like:
        return None
    return owners.get(result.untyped_storage().data_ptr())


def _copied(result: Tensor, like: _Like, copy: Tensor | None) -> Tensor:
    """A copy of the result, in the memory of an earlier `copy` if there is one."""
    if copy is None:
        shape, strides, dtype, device = like
        copy = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return copy.copy_(result)


def _sample(given: Sequence[Tensor]) -> _native.Words:
    """A few numbers of each filter on the CPU, to notice a write through `data`. Tools that merge low-rank weights write
    so; PyTorch does not count such writes, and they change most numbers. They may be compared while the filters lie at the
    same place."""
    words = set[int]()
    for t in given:
        if t.dim() > 1 and t.is_cpu and t.is_floating_point() and t.numel() > 0 and _is_dense(t):
            step = max(1, t.numel() // _SAMPLED) * t.element_size()
            # A word never reaches into another page than the number in it.
            words.update(place // _WORD * _WORD for place in range(t.data_ptr(), t.data_ptr() + t.nbytes, step))
    return _native.Words([*words])


class _Uncounted:
    """The memory of tensors from inference_mode, which do not count writes, and a copy of it. On a GPU each comparison
    waits for the device, so one comparison is of many tensors."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        # For each comparison: the device, the memory, and the copy.
        self._parts: list[tuple[torch.device, list[Tensor], Tensor]] = []
        views: dict[torch.device, list[Tensor]] = {}
        for t in given:
            if t.is_inference() and t.numel() > 0:
                elements = 1 + sum((n - 1) * by for n, by in zip(t.shape, t.stride(), strict=True))
                last = t.data_ptr() + elements * t.element_size() - 1
                view = _words(t.data_ptr() // _WORD, last // _WORD + 1, t.device)
                views.setdefault(t.device, []).append(view)
        for device, every in views.items():
            part, most = list[Tensor](), _COMPARED[device.type == "cpu"]
            for view in every:
                if part and sum(v.nbytes for v in part) + view.nbytes > most:
                    self._parts.append((device, part, torch.cat(part)))
                    part = []
                part.append(view)
            self._parts.append((device, part, torch.cat(part)))

    def is_same(self) -> bool:
        for device, views, before in self._parts:
            # A capture would fail at a comparison. The captured graph reads these constants anyway.
            if is_captured(device):
                continue
            if not torch.equal(views[0] if len(views) == 1 else torch.cat(views), before):
                return False
        return True


# The number of samples of each filter.
_SAMPLED = 8
# The bytes of a word of memory.
_WORD = 8
# The bytes that are compared at once on a GPU and on the CPU, where a copy of so many stays in the cache.
_COMPARED = 64 << 20, 1 << 18


def _is_dense(t: Tensor) -> bool:
    return t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last))


# A function that computes the graph from the remaining inputs, made from constants.
Run = Callable[[list[Any]], Any]
# A function that makes a `Run`, and the modules that it calls.
Make = Callable[[Sequence[Tensor]], tuple[Run, Any]]


# A function that says if the tensors at these indices still lie at these addresses.
_lie_at = torch._C._tensors_data_ptrs_at_indices_equal
_version = operator.attrgetter("_version")
# PyTorch 2.14 guards the strides of parameters; 2.8 and 2.9 do not.
_GUARDS_STRIDES = torch.__version__ >= (2, 14)


def _strides(given: Sequence[Tensor]) -> list[Any]:
    return [] if _GUARDS_STRIDES else [*map(Tensor.stride, given)]


@dataclass(eq=False)
class _OfParameters:
    """The constants computed from some parameters, and what tells whether the parameters have changed."""

    run: Run
    modules: Any
    constants: list[Tensor]
    # Those that are no parameter's memory, in their places.
    copies: list[Tensor | None]
    watched: Sequence[int]
    passed: Sequence[int]
    # The addresses of the graph's inputs.
    pointers: list[int | None]
    # The version counters and strides of watched inputs; and the memory of those from inference_mode.
    versions: list[int]
    strides: list[Any]
    uncounted: "_Uncounted"
    # The function that gets the watched inputs, and the one that gets those with a version counter.
    all_watched: Callable[[Sequence[Any]], tuple[Any, ...]]
    counted: Callable[[Sequence[Any]], tuple[Any, ...]]
    sample: _native.Words
    references: list[Any]

    def is_same(self, inputs: Sequence[Any]) -> bool:
        return (
            _lie_at(inputs, self.pointers, self.watched)
            and [*map(_version, self.counted(inputs))] == self.versions
            and (_GUARDS_STRIDES or _strides(self.all_watched(inputs)) == self.strides)
            and self.are_contents_same()
        )

    def are_contents_same(self) -> bool:
        """Whether watched inputs that lie as before have the same content, as far as PyTorch does not count writes."""
        return self.sample() and self.uncounted.is_same()


def _getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that gets the inputs with these indices."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda inputs: (*(inputs[i] for i in indices),)


class ConstantsCache:
    """The constants of a compiled graph, which may serve several models of the same structure."""

    def __init__(self, constants: Constants, watched: Sequence[int], passed: Sequence[int], make: Make) -> None:
        """Sets up an empty cache. `watched`: the indices of the inputs that `constants` watches; `passed`: of those that
        the graph reads."""
        self.prologue, self.watched, self.passed, self.make = constants.prologue(), watched, passed, make
        self.shared = [i for i, node in zip(watched, constants.watched, strict=True) if node in constants.shared]
        self.all_watched = _getter(watched)
        like = map(value, constants.inputs)
        self.like = [(t.shape, t.stride(), t.dtype, t.device) for t in like]
        self.in_graphs = constants.in_graphs
        self._captured: list[list[Tensor]] = []
        self._lock = threading.Lock()
        # The results by the identity of the parameters; the last one also under None.
        self._found: dict[tuple[int, ...] | None, _OfParameters] = {}

    def found(self, inputs: list[Any]) -> _OfParameters:
        """The constants and the function for the parameters among these inputs."""
        last = self._found.get(None)
        # Parameters at the same place share memory that lives, because what was computed goes with it.
        if last is not None and last.is_same(inputs):
            return last
        given = self.all_watched(inputs)
        key = (*map(id, given),)
        found = self._found.get(key)
        if found is None or not found.is_same(inputs):
            with self._lock, torch.inference_mode(False), torch.no_grad():
                found = self._computed(key, inputs, given)
        self._found[None] = found
        return found

    def _computed(self, key: tuple[int, ...], inputs: Sequence[Any], given: Sequence[Tensor]) -> _OfParameters:
        # Before anything is computed: a write meanwhile shows at the next call.
        counted = [i for i, t in zip(self.watched, given, strict=True) if not t.is_inference()]
        versions, strides, uncounted = [inputs[i]._version for i in counted], _strides(given), _Uncounted(given)
        before = self._found.get(key)
        copies: list[Tensor | None] = [None] * len(self.like)
        if before is not None and not self.in_graphs:
            copies = [*before.copies]
        elif before is not None:
            self._captured.append(before.constants)
        owners = {t.untyped_storage().data_ptr(): i for i, t in enumerate(given) if t.is_cpu}
        constants, owning = list[Tensor](), set[int]()
        for i, (result, like) in enumerate(zip(self.prologue(*given), self.like, strict=True)):
            owner = _owner(result, like, owners)
            if owner is None:
                constant = copies[i] = _copied(result, like, copies[i])
            else:
                owning.add(owner)
                constant, copies[i] = result.detach(), None
            forget(constant)
            constants.append(constant)
        for i in self.shared:
            forget(inputs[i])
        # If a model is dropped, the memory of its folded filters is freed. The memory that constants share lives as long as
        # they do.
        drop = lambda _, found=self._found: _drop(found, key)
        references = [weakref.ref(t if i in owning else t.untyped_storage(), drop) for i, t in enumerate(given)]
        run, modules = self.make(constants)
        pointers: list[int | None] = [None] * len(inputs)
        for i in self.watched:
            pointers[i] = inputs[i].data_ptr()
        found = _OfParameters(
            run, modules, constants, copies, self.watched, self.passed, pointers, versions, strides, uncounted,
            self.all_watched, _getter(counted), _sample(given), references,
        )  # fmt: skip
        self._found[key] = found
        return found


def _drop(found: dict[tuple[int, ...] | None, _OfParameters], key: tuple[int, ...]) -> None:
    gone = found.pop(key, None)
    if gone is not None and found.get(None) is gone:
        del found[None]
