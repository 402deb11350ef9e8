"""Classes that somebody derived from a convolution of PyTorch, with Windrow's convolution in the place of PyTorch's.

Causal convolutions of video models are an example: their `forward` puts frames before a video and calls
`super().forward`. In the class that `inserted` makes, this is Windrow's `forward`.
"""

import copyreg
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

# Names that every class has, or that only PyTorch's constructor and TorchScript read.
_KEPT = {"forward", "__module__", "__doc__", "__dict__", "__weakref__", "__init__", "__constants__", "__annotations__"}


class Subclass:
    """The first base of such a class. Copies and pickles name the class that somebody wrote."""

    _windrow_inserted: tuple[type[nn.Module], type[nn.Module], type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        function, arguments, *rest = super().__reduce_ex__(protocol)
        if function is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return function, arguments, *rest
        return _made, self._windrow_inserted, *rest


@functools.cache
def inserted(original: type[nn.Module], theirs: type[nn.Module], ours: type[nn.Module]) -> Any:
    """The class `original`, under its name, whose next class is `ours`, which derives from PyTorch's class `theirs`. If
    that would change more than the convolution, the result is the reason, in words."""
    own: dict[str, Any] = {}
    for kind in reversed(original.__mro__[: original.__mro__.index(theirs)]):
        own |= vars(kind)
    at = inspect.getattr_static
    clash = [name for name in own if name not in _KEPT and at(ours, name, None) is not at(theirs, name, None)]
    if clash:
        return f"has a `{clash[0]}` of its own"
    code = getattr(own.get("forward", ours.forward), "__code__", None)
    if code is None or not {"forward", "_conv_forward"} & {*_names(code)}:
        return "has a forward that does not call PyTorch's"
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    names |= {"_windrow_inserted": (original, theirs, ours)}
    try:
        return types.new_class(original.__name__, (Subclass, original, ours), exec_body=lambda body: body.update(names))
    except Exception as error:  # noqa: BLE001: whatever its metaclass or its `__init_subclass__` raises
        return f"cannot be derived from: {error}"


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of attributes and functions in a function, also within those that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _made(*parts: type[nn.Module]) -> Any:
    return object.__new__(inserted(*parts))


def original_of(kind: type) -> type | None:
    """The class that somebody wrote, of a class that `inserted` made."""
    parts = vars(kind).get("_windrow_inserted")
    return parts[0] if parts else None
