"""A module of an optimized model: it stays what it is, with all that it consists of, and only a call of it is a graph's.

Another module may read its attributes and call its methods or the modules in it, one by one: these compute what they did.
"""

import copyreg
import functools
import itertools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from windrow.torch._filters import forget
from windrow.torch._fused import FusedConv2d
from windrow.torch._graph import attribute

_WATCHED = "_windrow_watched"


@dataclass(frozen=True)
class Fold:
    """What became one convolution of a graph, by names: the modules of before stay beside it."""

    fused: str
    conv: str
    norm: str | None = None
    factor: str | None = None
    activation: str | None = None
    is_added: bool = False

    def filter(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Filter and bias of today, computed in f64 and rounded once. Without a normalisation and a factor it is the
        convolution's own memory."""
        conv: Any = module.get_submodule(self.conv)
        weight, bias = conv.weight.detach(), None if conv.bias is None else conv.bias.detach()
        if self.norm is not None:
            norm: Any = module.get_submodule(self.norm)
            scale = (norm.running_var.double() + norm.eps).rsqrt()
            shift = -norm.running_mean.double() if bias is None else bias.double() - norm.running_mean.double()
            if norm.weight is not None:
                scale = scale * norm.weight.double()
            shift = shift * scale
            if norm.bias is not None:
                shift = shift + norm.bias.double()
            # `to` keeps the strides: a channels-last filter stays one.
            weight = (weight.double() * scale.view(-1, *[1] * (weight.dim() - 1))).to(weight.dtype).detach()
            bias = shift.to(weight.dtype).detach()
        if self.factor is not None:
            by = attribute(module, self.factor).detach().double().flatten()
            weight = (weight.double() * by.view(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)
            bias = None if bias is None else (bias.double() * by).to(bias.dtype)
        return weight, bias


class Derived(nn.Module):
    """Comes before the class that a module had: `derived`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        function, arguments, *rest = super().__reduce_ex__(protocol)
        if function is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return function, arguments, *rest
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != _WATCHED}
        return made, parts_of(type(self)), *rest

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        result = made(*parts_of(type(self)))
        memo[id(self)] = result
        state = {name: value for name, value in self.__dict__.items() if name != _WATCHED}
        result.__dict__.update(copy.deepcopy(state, memo))
        return result

    def _replicate_for_data_parallel(self) -> Any:
        # Replicas have filters of other devices.
        replica: Any = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        undo(replica)
        return replica


@functools.cache
def derived(original: type[nn.Module], *kinds: type[Derived]) -> Any:
    """The class `original`, under its name, with what `kinds` put before it."""
    first: Any = kinds[0].forward

    # PyTorch's tools, and people, ask for the signature.
    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return first(self, *args, **kwargs)

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original.__name__, (*kinds, original), names | {"forward": forward, "_windrow_parts": (original, *kinds)})


def parts_of(kind: type) -> tuple[Any, ...]:
    """The class that a module had, and what was put before it."""
    parts: tuple[Any, ...] = getattr(kind, "_windrow_parts", (kind,))
    return parts


def made(original: type[nn.Module], *kinds: type[Derived]) -> Any:
    return object.__new__(derived(original, *kinds) if kinds else original)


def put_before(module: nn.Module, kind: type[Derived]) -> None:
    """Raises TypeError where the class of a module cannot be another."""
    original, *kinds = parts_of(type(module))
    module.__class__ = derived(original, kind, *kinds)


def undo(module: nn.Module) -> None:
    """Makes a module what it was."""
    if issubclass(type(module), Derived):
        module.__class__ = parts_of(type(module))[0]
        for name in [name for name in module.__dict__ if name.startswith("_windrow_")]:
            del module.__dict__[name]


@dataclass(frozen=True)
class _Watched:
    """What each call looks at, so that nothing that was set since is passed over."""

    # Of the modules that the graph does not call: hooks, and what holds a `forward` of an instance.
    hooks: list[Any]
    instances: list[dict[str, Any]]
    # Where modules are, their names, and the modules.
    parents: list[dict[str, Any]]
    places: list[str]
    modules: list[nn.Module]
    # Where the tensors are that filters were made of, their names, and the tensors.
    holders: list[dict[str, Any]]
    names: list[str]
    tensors: list[Any]
    # Filters, and what tells that one was written to.
    filters: list[Tensor]
    versions: list[int]

    def is_wrapped(self) -> bool:
        if any(self.hooks) or any(map(operator.contains, self.instances, itertools.repeat("forward"))):
            return True
        return not all(map(operator.is_, map(dict.get, self.parents, self.places), self.modules))

    def is_same(self) -> bool:
        is_held = map(operator.is_, map(dict.get, self.holders, self.names), self.tensors)
        return all(is_held) and [t._version for t in self.filters] == self.versions


class ByGraph(Derived):
    """A module whose calls are those of a graph, unless hooks or a `forward` of an instance in it want to be called."""

    # None of what a class makes of itself, as `nn.Sequential` makes slices.
    _windrow_graph: fx.GraphModule | None = None
    _windrow_folds: list[Fold] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        graph = self._windrow_graph
        if graph is not None and (torch.compiler.is_compiling() or self._is_as_it_was()):
            return graph(*args, **kwargs)
        return super().forward(*args, **kwargs)

    def _is_as_it_was(self) -> bool:
        """False where the modules are to be called. Filters that have changed are made anew."""
        watched = self.__dict__.get(_WATCHED)
        if watched is None:
            return self._fold()
        return not watched.is_wrapped() and (watched.is_same() or self._fold())

    def _watch(self) -> _Watched:
        graph: Any = self._windrow_graph
        called = {id(m) for m in graph.modules()}
        others = [m for m in self.modules() if id(m) not in called and m is not self]
        holders: list[dict[str, Any]] = []
        names: list[str] = []
        filters: list[Tensor] = []
        for fold in self._windrow_folds:
            parts = [(fold.conv, ("weight", "bias"))]
            if fold.norm is not None:
                parts.append((fold.norm, ("weight", "bias", "running_mean", "running_var")))
            if fold.factor is not None:
                holder, _, name = fold.factor.rpartition(".")
                parts.append((holder, (name,)))
            for path, own in parts:
                module = self.get_submodule(path)
                for name in own:
                    holder_of = next((d for d in (module._parameters, module._buffers) if name in d), module.__dict__)
                    holders.append(holder_of)
                    names.append(name)
            filters.append(self.get_submodule(fold.conv).weight)  # type: ignore[arg-type]
        tensors = [held.get(name) for held, name in zip(holders, names, strict=True)]
        filters = [t for t in filters if not t.is_inference()]
        hooks = [h for m in others for h in (m._forward_hooks, m._forward_pre_hooks)]
        instances = [m.__dict__ for m in others]
        children = [(m._modules, name, child) for m in self.modules() for name, child in m._modules.items()]
        parents, places, modules = ([*column] for column in zip(*children, strict=True))
        versions = [t._version for t in filters]
        watched = _Watched(hooks, instances, parents, places, modules, holders, names, tensors, filters, versions)
        self.__dict__[_WATCHED] = watched
        return watched

    def _fold(self) -> bool:
        """Makes the filters anew. False where tensors of PyTorch's tools stand for them, such as those of torch.func."""
        if torch._C._are_functorch_transforms_active():
            return False
        for fold in self._windrow_folds:
            conv: Any = self.get_submodule(fold.conv)
            if type(conv.weight) not in (Tensor, nn.Parameter):
                return False
        graph: Any = self._windrow_graph
        for fold in self._windrow_folds:
            fused = graph.get_submodule(fold.fused)
            with torch.no_grad():
                weight, bias = fold.filter(self)
            if isinstance(fused, FusedConv2d):
                fused.weight, fused.bias = weight, bias
                forget(weight)
        self._watch()
        return True

    def _apply(self, fn: Any, *args: Any, **how: Any) -> Any:
        super()._apply(fn, *args, **how)  # type: ignore[no-untyped-call]
        graph: Any = self._windrow_graph
        if graph is None:
            return self
        for name, holder in graph.named_modules():
            # Containers that torch.fx has made: what else is in a graph is in this module, too.
            if type(holder) is nn.Module or holder is graph:
                for own in (holder._parameters, holder._buffers):
                    for key, tensor in own.items():
                        path = f"{name}.{key}".lstrip(".")
                        if tensor is not None:
                            own[key] = fn(tensor) if (mine := _tensor(self, path)) is None else mine
        self._fold()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)  # type: ignore[no-untyped-call]
        # What is loaded into the modules in this one comes later, and the next call makes the filters anew.
        self.__dict__.pop(_WATCHED, None)


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    """A parameter or a buffer, if the name is that of one."""
    *path, last = name.split(".")
    try:
        holder = module.get_submodule(".".join(path))
    except AttributeError:
        return None
    return holder._parameters.get(last, holder._buffers.get(last))
