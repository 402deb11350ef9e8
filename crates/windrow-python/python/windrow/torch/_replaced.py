"""The check whether somebody has replaced a method of one of PyTorch's classes.

Programs replace `nn.Conv2d.forward` for all modules of a process, before or after `patch`; image generators load LoRA
networks this way. A patched module has a `forward` of its own, so it looks at PyTorch's class and calls its method if
that is not PyTorch's original.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch import nn


def own_method(kind: type[nn.Module], name: str) -> Callable[..., Any] | None:
    """PyTorch's own method of a class; None if it was replaced before Windrow was imported."""
    method = getattr(kind, name)
    module = sys.modules[kind.__module__]
    return method if getattr(method, "__globals__", None) is vars(module) else None
