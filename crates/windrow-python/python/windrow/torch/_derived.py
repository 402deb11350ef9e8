"""A module whose class derives from the class that it had. In every other respect, also copied and saved, it stays what
it is."""

import copy
import copyreg
import functools
from typing import Any

import torch
from torch import nn

# The attribute with what calls have found out: neither copied nor saved.
RUN = "_windrow_run"


class Derived(nn.Module):
    """The class that comes before the one that a module had: `derived`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        function, arguments, *rest = super().__reduce_ex__(protocol)
        if function is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return function, arguments, *rest
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != RUN}
        return made, parts_of(type(self)), *rest

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        result = made(*parts_of(type(self)))
        memo[id(self)] = result
        state = {name: value for name, value in self.__dict__.items() if name != RUN}
        result.__dict__.update(copy.deepcopy(state, memo))
        return result

    def _replicate_for_data_parallel(self) -> Any:
        # Replicas live for one call.
        replica: Any = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        undo(replica)
        return replica

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """What a call does, unless it is compiled as a part of another."""
        raise NotImplementedError


@functools.cache
def derived(original: type[nn.Module], kind: type[Derived]) -> Any:
    """The class `original`, under its name, with `kind` put before it."""
    own: Any = original.forward
    called: Any = kind._called

    # PyTorch's tools, and people, ask for the signature. Dynamo goes through this function for each module.
    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (own if torch.compiler.is_compiling() else called)(self, *args, **kwargs)

    # What Dynamo compiles is kept, and counted, by code.
    forward.__code__ = forward.__code__.replace()
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original.__name__, (kind, original), names | {"forward": forward, "_windrow_parts": (original, kind)})


def parts_of(kind: type) -> tuple[Any, ...]:
    """The class that a module had, and what was put before it."""
    parts: tuple[Any, ...] = getattr(kind, "_windrow_parts", (kind,))
    return parts


def made(original: type[nn.Module], *kind: type[Derived]) -> Any:
    return object.__new__(derived(original, *kind) if kind else original)


def undo(module: nn.Module) -> None:
    """Gives a module its own class back."""
    if issubclass(type(module), Derived):
        module.__class__ = parts_of(type(module))[0]
        for name in [name for name in module.__dict__ if name.startswith("_windrow_")]:
            del module.__dict__[name]
