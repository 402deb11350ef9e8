"""The replacement of an engine's functions, when the engine imports them and not before."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import Parameter, signature
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]


def when_imported(name: str, change: Change) -> None:
    """Calls `change` with the module of this name: now if it is imported already, otherwise when it is imported."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.changes[name] = change


def has_parameters_of(function: Callable[..., Any], original: Callable[..., Any]) -> bool:
    """True if `function` has every parameter that `original` names."""
    ours, theirs = signature(function).parameters, signature(original).parameters
    return all(name in ours for name, p in theirs.items() if p.kind is not Parameter.VAR_KEYWORD)


def replace(module: ModuleType, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Replaces those of the functions that the module has, in this module and in every module that holds them under any
    name."""
    for name, function in functions.items():
        original = getattr(module, name, None)
        if original is None or original is function:
            continue
        setattr(module, name, function)
        for other in list(sys.modules.values()):
            names = getattr(other, "__dict__", None)
            if isinstance(names, dict):
                held = [key for key, value in names.items() if value is original]
                names.update(dict.fromkeys(held, function))


class _Finder(MetaPathFinder):
    """An import finder that finds what later finders find, with a loader that makes the change."""

    def __init__(self) -> None:
        self.changes: dict[str, Change] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self.changes.get(name)
        if change is None:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, change)
                return spec
        return None


class _Loader(Loader):
    """A loader that changes the module after executing it."""

    def __init__(self, loader: Loader, change: Change) -> None:
        self.loader, self.change = loader, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Triton and inspect read a module's source by its own loader.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.change(module)
