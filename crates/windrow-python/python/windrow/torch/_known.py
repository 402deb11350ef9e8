"""The shorter way of a call that is like an earlier one.

Before each call, Dynamo checks all that the call may depend on, module by module, and then collects the parameters. For
small images this takes longer than the convolutions. If the same call was computed by one graph alone, and nothing
that Dynamo guards has changed since, the graph is called without Dynamo. What is compared instead is the content of the
modules' dictionaries, by PyTorch's version numbers of dictionaries. Guards that this does not cover exclude a call from
the shorter way.
"""

import dis
import operator
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch

from windrow import _native
from windrow.torch._calls import MISSING
from windrow.torch._derived import parts_of
from windrow.torch._unseen import flat

_guards = torch._C._dynamo.guards
_dict_version = _guards.dict_version
# What a guard says of a module of the model, and of an argument.
_OF_MODULE = re.compile(r"(?:\._modules\['[^']*'\]|\.__dict__\['_modules'\]\['[^']*'\])*")
_ATTRIBUTE = re.compile(r"\.(\w+)")
_METHOD = re.compile(r"type\((.*?)\)(?:\.__mro__\[\d+\])?\.(\w+)")
_LOOKED_UP = re.compile(r"\.(\w+)|\['([^']*)'\]")
_ARGUMENT = re.compile(r"L\['\w+'\](\[\d+\])?")
# The dictionaries of a module that are compared, and those that must be empty.
_COMPARED = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# The instructions that only put results together.
_HARMLESS = ("LOAD_", "BUILD_", "BINARY_", "UNPACK_", "POP_TOP", "STORE_FAST", "DELETE_FAST", "RETURN_", "SWAP", "COPY",
             "LIST_EXTEND", "NOP", "CACHE", "PUSH_NULL", "ROT_", "DUP_")  # fmt: skip
# The kinds of arguments beside tensors, and what containers have whose content is compared.
_NUMBERS = (type(None), bool, int, float, str)
_PLAIN = (*_NUMBERS, dict, list, tuple, set, frozenset, torch.dtype, torch.device)
_OF_ALL_MODULES = [hooks for name, hooks in vars(modules_of_torch).items() if re.fullmatch("_global_.*_hooks", name)]
# The oldest PyTorch with which this is tested. PyTorch 2.9 names what it guards in another way, and no call is kept.
OLDEST = (2, 11)
# The most changes of a model, beyond the calls that took the shorter way, after which no more calls are kept.
_CHANGES = 8


class Graph:
    """A compiled graph, and what its runs tell."""

    def __init__(self, guards: list[tuple[str, str]], runs: Callable[[], list[Any]]) -> None:
        """`guards`: the sources and kinds of its guards. `runs`: the list of this thread's runs."""
        self.guards, self._runs = guards, runs
        # What calls of the graph depend on beside the modules' dictionaries; None if they cannot be kept.
        self.kept: _Kept | None = None
        # A function that is told the inputs of the first run with other parameters.
        self.new: Callable[[list[Any]], Any] = lambda given: None
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def ran(self, found: Any, given: list[Any], results: Sequence[Any]) -> None:
        self._runs().append((self, found, given, results))
        if found not in self._seen:
            self._seen.add(found)
            self.new(given)


@dataclass
class _Kept:
    """What the guards of a graph say beside the modules' own dictionaries."""

    # Attributes of classes.
    classes: set[tuple[type, str]] = field(default_factory=set)
    # The sources of global objects, and of containers in modules.
    names: set[str] = field(default_factory=set)
    containers: set[str] = field(default_factory=set)


@dataclass
class _Known:
    """A call: the tensors that its graph is given, and all that tells whether it is still the same."""

    state: _guards.GlobalStateGuard
    tensors: _guards.TensorGuards
    # The modules' types and dictionaries, and the tensors that the graph's constants depend on.
    unchanged: _native.Unchanged
    # Classes, names of their attributes, and these.
    classes: list[type]
    names: list[str]
    attributes: list[Any]
    # The dictionaries in which global objects are found, these, and those for which something else is asked.
    scopes: _native.Unchanged
    globals: "_Globals"
    others: "_Globals"
    containers: list[tuple[Any, list[Any]]]
    # The graph's inputs, which of them `tensors` guards, and where arguments of the call stand among them.
    given: list[Any]
    guarded: list[int]
    places: list[tuple[int, int]]
    found: Any
    pick: Callable[[Sequence[Any]], Any]
    is_grad: bool

    def inputs(self, args: Sequence[Any]) -> list[Any] | None:
        """The graph's inputs for these arguments; None if anything has changed."""
        given = [*self.given]
        for i, arg in self.places:
            given[i] = args[arg]
        try:
            is_same = (
                self.state.check()
                and self.unchanged()
                and all(map(operator.is_, map(getattr, self.classes, self.names), self.attributes))
                and (self.scopes() or self.globals.are_same())
                and self.others.are_same()
                and self.tensors.check(*[given[i] for i in self.guarded])
                and all(_is_same(container, leaves) for container, leaves in self.containers)
                and self.found.are_contents_same()
            )
        except (LookupError, AttributeError):
            # What is looked up is gone, as Dynamo's own names are after a reset.
            return None
        return given if is_same else None

    def run(self, given: list[Any]) -> Any:
        if not self.is_grad:
            return self.pick(self.found.run(given))
        with torch.no_grad():
            return self.pick(self.found.run(given))


def _is_same(container: Any, leaves: list[Any]) -> bool:
    now = [*flat(container)]
    return len(now) == len(leaves) and all(map(operator.is_, now, leaves))


class Calls:
    """The known calls of one module."""

    def __init__(self, forward: types.FunctionType) -> None:
        self._forward = forward
        self._known: dict[Any, _Known] = {}
        self._local = threading.local()
        self._changes = self._short = 0

    def graph(self) -> Graph:
        """The graph that Dynamo is giving to its backend."""
        guards = torch._guards.TracingContext.get().guards_context.dynamo_guards
        return Graph([(guard.name, _kind(guard.create_fn)) for guard in guards], self._ran)

    def _ran(self) -> list[Any]:
        """The graphs that ran in this call of this thread."""
        ran: list[Any] = self._local.__dict__.setdefault("ran", [])
        return ran

    def result(self, args: tuple[Any, ...]) -> Any:
        """The result of a call like an earlier one; MISSING if there is none."""
        key = _key(args)
        known = self._known.get(key)
        if known is None:
            return MISSING
        given = known.inputs(args)
        if given is None:
            self._known.pop(key, None)
            self._changes += 1
            return MISSING
        self._short += 1
        return known.run(given)

    def begin(self) -> None:
        self._ran().clear()

    def compiled(self, module: nn.Module, graph: Graph) -> None:
        """Looks, after the call that has compiled it, whether calls of the graph can be kept."""
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(self._forward.__code__)
        # The newest comes first.
        if torch.__version__ >= OLDEST and entries and _only_calls_a_graph(entries[0].code):
            graph.kept = self._guarded(module, graph.guards)

    def end(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        """Keeps a call by Dynamo, if one graph alone computed it."""
        ran = [*self._ran()]
        self._ran().clear()
        key = _key(args)
        if len(ran) != 1 or key is None or any(_OF_ALL_MODULES) or self._changes > self._short + _CHANGES:
            return
        graph, found, given, results = ran[0]
        pick = _picked(result, results)
        # Before anything that looks at all modules: calls that are not kept come here each time.
        if graph.kept is None or pick is None:
            return
        images = {id(t): i for i, t in enumerate(args) if isinstance(t, Tensor)}
        places = [(i, images[id(t)]) for i, t in enumerate(given) if id(t) in images]
        is_plain = len({arg for _, arg in places}) == len(places) and len(images) == sum(map(_is_tensor, args))
        if is_plain and images.keys().isdisjoint(map(id, _tensors(module))):
            known = self._kept(module, graph.kept, found, given, places, pick)
            if known is not None:
                self._known[key] = known

    def _kept(
        self, module: nn.Module, kept: _Kept, found: Any, given: list[Any], places: Any, pick: Any
    ) -> _Known | None:
        modules = [*module.modules()]
        parts = [m.__dict__[name] for m in modules for name in _COMPARED]
        dicts = [m.__dict__ for m in modules] + [part for part in parts if part]
        # Dictionaries that stay empty are faster to look at.
        empty = [m.__dict__[name] for m in modules for name in _HOOKS] + [part for part in parts if not part]
        # A gradient may be wanted only where PyTorch records them.
        watched = {*found.watched} if not torch.is_grad_enabled() else {*()}
        guarded = [i for i, t in enumerate(given) if isinstance(t, Tensor) and i not in watched]
        tensors = [given[i] for i in guarded]
        sizes, strides = [[*t.shape] for t in tensors], [[*t.stride()] for t in tensors]
        how: Any = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
        compared = [given[i] for i in found.watched]
        unchanged = _native.Unchanged(dicts, _dict_version, empty + _OF_ALL_MODULES, modules, compared)
        # Not if somebody has written to a parameter since the constants were computed.
        if not found.is_same(given):
            return None
        # The arguments of a call come in their places, and nobody reads the others.
        read = {*found.passed, *guarded} - {i for i, _ in places}
        given = [t if i in read else None for i, t in enumerate(given)]
        # Dynamo has just found that all this is as the graph expects it.
        types = {*map(type, modules)}
        attributes = {*kept.classes, *((kind, "forward") for of in types for kind in (of, parts_of(of)[0]))}
        classes, names = [kind for kind, _ in attributes], [name for _, name in attributes]
        scope = self._scope(module)
        scopes, others = _scopes(kept.names, scope["G"])
        containers = [eval(source, scope) for source in kept.containers]
        return _Known(
            _guards.GlobalStateGuard(), _guards.TensorGuards(*tensors, **how), unchanged,
            classes, names, [*map(getattr, classes, names)], scopes, _Globals(kept.names, scope), _Globals(others, scope),
            [(c, [*flat(c)]) for c in containers], given, guarded, places, found, pick, torch.is_grad_enabled(),
        )  # fmt: skip

    def _scope(self, module: nn.Module) -> dict[str, Any]:
        return {"L": {self._forward.__code__.co_varnames[0]: module}, "G": self._forward.__globals__}

    def _guarded(self, module: nn.Module, guards: list[tuple[str, str]]) -> _Kept | None:
        """What guards say beside the modules' own dictionaries; None if there is more than is compared here."""
        kept, scope = _Kept(), self._scope(module)
        own = f"L['{self._forward.__code__.co_varnames[0]}']"
        modules = {id(m) for m in module.modules()}
        try:
            for source, check in {*guards}:
                if source == "":
                    continue
                if source.startswith(own):
                    of = _OF_MODULE.match(source, len(own))
                    path = source[: of.end()]  # type: ignore[union-attr]
                    holder = eval(path, scope)
                    if id(holder) not in modules or not _is_kept(kept, holder, path, source[len(path) :]):
                        return None
                elif source.startswith("G["):
                    _expect_constant(eval(source, scope))
                    kept.names.add(source)
                elif source.startswith("dict(type("):
                    # The attribute that is looked up there is compared itself.
                    if check != "DICT_NOT_CONTAINS" and "__closure__" not in source:
                        return None
                elif (method := _METHOD.fullmatch(source)) is not None:
                    kind = type(eval(method[1], scope))
                    _expect_constant(getattr(kind, method[2]))
                    kept.classes.add((kind, method[2]))
                elif not _ARGUMENT.fullmatch(source):
                    return None
        except Exception:  # What a source raises that PyTorch's own helpers belong to is anything.
            return None
        return kept


class _Globals:
    """Global objects, by their sources."""

    def __init__(self, names: Iterable[str], scope: dict[str, Any]) -> None:
        self._look_up = eval(f"lambda: ({''.join(f'{name},' for name in names)})", scope)
        self._objects = self._look_up()

    def are_same(self) -> bool:
        return all(map(operator.is_, self._look_up(), self._objects))


def _scopes(names: Iterable[str], own: dict[str, Any]) -> tuple[_native.Unchanged, list[str]]:
    """The dictionaries in which the sources `names` are looked up one after the other, from a function's globals on, and
    the names for which something else is asked."""
    dicts, modules, others = {id(own): own}, dict[int, Any](), []
    for name in names:
        held: Any = own
        for attribute, key in _LOOKED_UP.findall(name):
            if type(held) is types.ModuleType and attribute:
                modules[id(held)], held = held, vars(held)
            if type(held) is not dict or (attribute or key) not in held:
                others.append(name)
                break
            dicts[id(held)], held = held, held[attribute or key]
    return _native.Unchanged([*dicts.values()], _dict_version, [], [*modules.values()], []), others


def _kind(guard: Any) -> str:
    """The name of a guard's function. PyTorch 2.11 has one function for a name that a dictionary has, or has not."""
    name: str = getattr(guard, "func", guard).__name__
    is_inverted = name == "DICT_CONTAINS" and getattr(guard, "keywords", {}).get("invert") is True
    return "DICT_NOT_CONTAINS" if is_inverted else name


def _is_kept(kept: _Kept, module: nn.Module, path: str, rest: str) -> bool:
    """Whether the value that a guard reads of a module is compared. `rest` is the source behind the module's `path`."""
    found = _ATTRIBUTE.match(rest)
    if found is None or found[1] in ("__dict__", *_COMPARED, *_HOOKS):
        # The module itself, or what its dictionaries have.
        return True
    name, behind = found[1], rest[found.end() :]
    if name.endswith("hooks") or "_hooks_" in name:
        return True
    if name == "__class__":
        of = _ATTRIBUTE.match(behind)
        if of is None or of[1] == "forward":
            # Compared for each class.
            return True
        name, behind = of[1], behind[of.end() :]
    for held in (module.__dict__, *(module.__dict__[own] for own in _COMPARED)):
        if name in held:
            leaves = [*flat(held[name])]
            if any(isinstance(leaf, dict | list | set) for leaf in leaves):
                kept.containers.add(f"{path}.{name}")
            # A guard on what a leaf has is not compared.
            return not behind or all(isinstance(leaf, _PLAIN) for leaf in leaves)
    _expect_constant(getattr(type(module), name))
    kept.classes.add((type(module), name))
    return not behind


class _NotKept(Exception):
    """A guard on something that may change in a way that is not compared."""


def _expect_constant(value: Any) -> None:
    """Raises _NotKept for a value that is not the same as long as it is the same object."""
    is_of_all = any(value is hooks for hooks in _OF_ALL_MODULES)
    if isinstance(value, dict | list | set | bytearray | Tensor | nn.Module) and not is_of_all:
        raise _NotKept


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _picked(result: Any, results: Sequence[Any]) -> Callable[[Sequence[Any]], Any] | None:
    """The function that makes a call's result of the graph's. None if it is no tensor or several, or if AOTAutograd or
    Dynamo has made another of it."""
    at = {id(t): i for i, t in enumerate(results) if isinstance(t, Tensor)}
    if isinstance(result, Tensor):
        return operator.itemgetter(at[id(result)]) if id(result) in at else None
    if type(result) not in (list, tuple) or not result or not all(id(t) in at for t in result):
        return None
    kind, indices = type(result), [at[id(t)] for t in result]
    return lambda results: kind([results[i] for i in indices])


def _key(args: tuple[Any, ...]) -> Any:
    """What tells calls apart; None for arguments that are not compared."""
    if torch._C._is_any_autocast_enabled():
        return None
    key: list[Any] = [torch.is_grad_enabled()]
    for arg in args:
        if type(arg) is Tensor:
            key += arg.shape, arg.stride(), arg.dtype, arg.device, arg.requires_grad
        elif type(arg) in _NUMBERS:
            key += type(arg), arg
        else:
            return None
    return (*key,)


def _only_calls_a_graph(code: types.CodeType) -> bool:
    """Whether the code that Dynamo made returns a graph's results, and has no other effect."""
    steps = [*dis.get_instructions(code)]
    last = max((i for i, step in enumerate(steps) if step.opname.startswith("CALL")), default=None)
    if last is None or not any(s.argval == "graph_out_0" for s in steps[last : last + 4]):
        return False
    compiled = [s for s in steps if s.opname == "LOAD_GLOBAL" and str(s.argval).startswith("__compiled_fn")]
    return len(compiled) == 1 and all(s.opname.startswith(_HARMLESS) for s in steps[last + 1 :])
