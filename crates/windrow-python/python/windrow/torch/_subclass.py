"""Classes that somebody derived from a convolution of PyTorch, with Windrow's convolution in the place of PyTorch's.

Causal convolutions of video models are an example: their `forward` puts frames before a video and calls
`super().forward`. In the class that `inserted` makes, this is Windrow's `forward`.
"""

import copyreg
import types
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

Kind = type[nn.Module]

# Names that every class has, or that only PyTorch's constructor and TorchScript read.
_KEPT = {"forward", "__module__", "__doc__", "__dict__", "__weakref__", "__init__", "__constants__", "__annotations__"}
# Those that Python 3.13 and 3.14 add.
_KEPT |= {"__firstlineno__", "__static_attributes__", "__annotate__", "__annotate_func__", "__annotations_cache__"}

# The classes that were made, for as long as they have modules.
_known: "WeakValueDictionary[tuple[Kind, Kind, Kind], Kind]" = WeakValueDictionary()


class Subclass:
    """The first base of such a class. Copies and pickles name the class that somebody wrote."""

    _windrow_inserted: tuple[Kind, Kind, Kind]

    def __reduce_ex__(self, protocol: Any) -> Any:
        function, arguments, *rest = super().__reduce_ex__(protocol)
        if function is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return function, arguments, *rest
        return _made, self._windrow_inserted, *rest


def own_name(module: nn.Module, theirs: Kind, ours: Kind, options: Sequence[str]) -> str | None:
    """The first name of Windrow's that a module or its class uses for something else; None if there is none. Windrow's
    are `options` and what its class `ours` adds to PyTorch's class `theirs`."""
    added = {*options}.union(*(vars(kind) for kind in ours.__mro__ if kind not in theirs.__mro__)) - _KEPT
    classes = (vars(kind) for kind in type(module).__mro__ if kind not in theirs.__mro__)
    of_instance = (module.__dict__, module._buffers, module._parameters, module._modules)
    return next((name for names in (*classes, *of_instance) for name in names if name in added), None)


def inserted(original: Kind, theirs: Kind, ours: Kind) -> Kind | str:
    """The class `original`, under its name, whose next class is `ours`, which derives from PyTorch's class `theirs`. If
    there is no use in that, or it cannot be made, the result is the reason, in words."""
    parts = original, theirs, ours
    made = _known.get(parts)
    if made is not None:
        return made
    before = original.__mro__[: original.__mro__.index(theirs)]
    forward = next((vars(kind)["forward"] for kind in before if "forward" in vars(kind)), ours.forward)
    code = getattr(forward, "__code__", None)
    if code is None or not {"forward", "_conv_forward"} & {*_names(code)}:
        return "has a forward in which no call of PyTorch's was found"
    names: dict[str, Any] = {f"__{name}__": getattr(original, f"__{name}__") for name in ("module", "qualname", "doc")}
    names["_windrow_inserted"] = parts
    bases = Subclass, original, ours
    try:
        new: Kind = types.new_class(original.__name__, bases, exec_body=lambda body: body.update(names))
    except Exception as error:  # noqa: BLE001: whatever its metaclass or its `__init_subclass__` raises
        return f"cannot be derived from: {error}"
    _known[parts] = new
    return new


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of attributes and functions in a function, also within those that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _made(*parts: Kind) -> Any:
    return object.__new__(inserted(*parts))  # type: ignore[arg-type]


def original_of(kind: type) -> type | None:
    """The class that somebody wrote, of a class that `inserted` made."""
    parts = vars(kind).get("_windrow_inserted")
    return parts[0] if parts else None
