"""Whether somebody has put another method into one of PyTorch's classes.

Programs replace `nn.Conv2d.forward` for all modules of a process, before `patch` or after it: image generators load
LoRA networks so. A patched module has a `forward` of its own, so it looks what PyTorch's class has, and calls that if
it is not PyTorch's.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch import nn


def own_method(kind: type[nn.Module], name: str) -> Callable[..., Any] | None:
    """PyTorch's own method of a class. None if another was there before Windrow was imported."""
    method = getattr(kind, name)
    module = sys.modules[kind.__module__]
    return method if getattr(method, "__globals__", None) is vars(module) else None
