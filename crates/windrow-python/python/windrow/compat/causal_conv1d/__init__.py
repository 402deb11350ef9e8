"""A drop-in replacement of Dao-AILab's `causal_conv1d` 1.7, for any device that Windrow supports.

The distribution windrow-causal-conv1d makes `import causal_conv1d` find this package. Without the distribution, call
`install()` before your program, or a library that it uses, first imports causal_conv1d:

    import windrow.compat.causal_conv1d
    windrow.compat.causal_conv1d.install()
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

from windrow.compat.causal_conv1d.causal_conv1d_interface import (
    causal_conv1d_fn,
    causal_conv1d_update,
)

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "install"]

# The version whose interface this is.
__version__ = "1.7.0"

_SUBMODULES = ("causal_conv1d_interface", "causal_conv1d_varlen", "cpp_functions")


def install() -> None:
    """Makes `import causal_conv1d`, its submodules and `causal_conv1d_cuda` find the modules here.

    Raises RuntimeError if another `causal_conv1d` is imported already.
    """
    present = sys.modules.setdefault("causal_conv1d", sys.modules[__name__])
    if getattr(present, "__file__", None) != __file__:
        raise RuntimeError("another causal_conv1d is imported already")
    for name in _SUBMODULES:
        sys.modules[f"causal_conv1d.{name}"] = import_module(f"{__name__}.{name}")
    # The extension of causal-conv1d, a module of its own.
    sys.modules["causal_conv1d_cuda"] = import_module("windrow.compat.causal_conv1d_cuda")
    # Libraries look for optional packages with importlib.util.find_spec, which compares the name of the spec.
    present.__spec__ = ModuleSpec("causal_conv1d", None, is_package=True)
