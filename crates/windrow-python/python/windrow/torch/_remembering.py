"""The memory of a module: what its calls found out for later ones."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

# The most keys of a module, for images of different sizes in turns.
REMEMBERED = 256


# The modules that remember something.
_all: "weakref.WeakSet[Remembering]" = weakref.WeakSet()
_lock = threading.RLock()


class Remembering(nn.Module):
    """A module that remembers what computes its calls. Setting any attribute makes it forget."""

    # Filter and bias, and what was found for calls with them, by what tells these apart.
    _remembered: tuple[Any, ...] = (None, None, None)

    # Attributes that calls set.
    FOUND_OUT: tuple[str, ...] = ("_remembered",)

    def _recall(self, seen: Any, weight: Any, bias: Any, find: Callable[[], Any]) -> Any:
        """The remembered result for the key `seen`; if there is none, that of `find()`, which is remembered if its
        `is_final` is set."""
        its_weight, its_bias, remembered = self._remembered
        if remembered is None or its_weight is not weight or its_bias is not bias:
            self._forget()
            remembered = {}
            self._keep("_remembered", (weight, bias, remembered))
        found = remembered.get(seen)
        if found is None:
            found = find()
            if found.is_final:
                while len(remembered) >= REMEMBERED:
                    remembered.pop(next(iter(remembered)), None)
                remembered[seen] = found
        return found

    def _keep(self, name: str, found: Any) -> Any:
        """Sets an attribute that is found out, until `forget_all`."""
        self.__dict__[name] = found
        with _lock:
            _all.add(self)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        self._forget()
        super().__setattr__(name, value)

    def _forget(self) -> None:
        for name in self.FOUND_OUT:
            self.__dict__.pop(name, None)

    def _apply(self, *args: Any, **how: Any) -> "Remembering":
        self._forget()
        return super()._apply(*args, **how)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self.FOUND_OUT}


def forget_all() -> None:
    """Makes every module forget."""
    with _lock:
        modules = list(_all)
    for module in modules:
        module._forget()
