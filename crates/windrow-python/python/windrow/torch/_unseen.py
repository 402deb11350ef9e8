"""State that PyTorch's compiler does not see. Dynamo takes what a module's `__dict__` gives while it traces for constants,
and makes no guard (findings/torch-compile-state-in-dict.sh)."""

import dis
import functools
import inspect
import operator
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# PyTorch's, ours, and what PyTorch looks up of classes when an attribute is set.
_TOOLS = (*(str(Path(file).parent) for file in (torch.__file__, __file__)), inspect.__file__)
_OF_MODULES = {*nn.Module().__dict__}
# What cannot change, or is compared by identity as Dynamo has it.
_LEAVES = (
    int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format,
    type, Tensor, nn.Module, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial,
)  # fmt: skip


class UnseenError(Exception):
    """Code that must not be compiled, named."""


class Unseen:
    """The attributes of the modules whose methods read their own `__dict__`."""

    def __init__(self, codes: Iterable[types.CodeType], module: nn.Module | None) -> None:
        """`codes`: what the compiler went through. Raises UnseenError if it does more than to read."""
        self.name, self._modules = "", list[nn.Module]()
        found = [code for code in codes if _is_told(code) and not code.co_filename.startswith(_TOOLS)]
        for code in found:
            self.name = f"`{code.co_name}` at {Path(code.co_filename).name}:{code.co_firstlineno}"
            own = [m for m in (module.modules() if module is not None else ()) if _is_method(code, type(m))]
            if not own or not _only_reads_its_own(code):
                raise UnseenError(self.name)
            self._modules += [m for m in own if m not in self._modules]
        self._before = self._now()

    def is_same(self) -> bool:
        try:
            now = self._now()
        except UnseenError:
            return False
        return len(now) == len(self._before) and all(map(operator.is_, now, self._before))

    def _now(self) -> list[Any]:
        try:
            return [leaf for module in self._modules for leaf in _leaves(module)]
        except UnseenError:
            raise UnseenError(self.name) from None


def _leaves(module: nn.Module) -> Iterator[Any]:
    for name, value in module.__dict__.items():
        if name not in _OF_MODULES and "windrow_" not in name:
            yield name
            yield from flat(value)


def flat(value: Any) -> Iterator[Any]:
    """A value, and all values in it. Raises UnseenError for one that may change in a way that these do not show."""
    yield value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from flat(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from flat(inner)
    elif not isinstance(value, _LEAVES):
        raise UnseenError


def _is_told(code: types.CodeType) -> bool:
    return not {"__dict__", "vars"}.isdisjoint((*code.co_names, *(c for c in code.co_consts if isinstance(c, str))))


def _is_method(code: types.CodeType, kind: type) -> bool:
    return any(getattr(what, "__code__", None) == code for of in kind.__mro__ for what in vars(of).values())


def _only_reads_its_own(code: types.CodeType) -> bool:
    """Whether each `__dict__` is `self`'s, and is asked for one name at once."""
    if "vars" in code.co_names or "__dict__" in code.co_consts or not code.co_argcount:
        return False
    steps = [*dis.get_instructions(code)]
    for i, step in enumerate(steps):
        if step.argval != "__dict__":
            continue
        before, *after = steps[i - 1], *steps[i + 1 : i + 3]
        is_own = before.opname.startswith("LOAD_FAST") and before.argval == code.co_varnames[0]
        is_asked = after[0].opname == "CONTAINS_OP" or after[0].argval == "get"
        is_read = after[0].opname.startswith(("LOAD_CONST", "LOAD_FAST")) and (
            after[1].opname == "BINARY_SUBSCR" or (after[1].opname == "BINARY_OP" and after[1].argrepr == "[]")
        )
        if not (is_own and (is_asked or is_read)):
            return False
    return True
