"""Causal conv1d, Winograd conv2d and GELU, fast on CPU and GPU, with known accuracy.

The functions here take arrays of any library that supports DLPack (NumPy, PyTorch, JAX, CuPy, ...), with any strides
and without copies. They return an array of the caller's library. They record no gradients: `windrow.torch` has
functions and modules for PyTorch that do.
"""

import sysconfig

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise ImportError(
        "windrow is built for Python's stable ABI, which free-threaded Python does not load: use a "
        "Python with the global interpreter lock"
    )

from windrow._native import (  # noqa: E402
    Conv2dPlan,
    PackedWeights,
    Tensor,
    __version__,
    causal_conv1d,
    causal_conv1d_update,
    conv2d,
    conv3d,
    gelu,
)

__all__ = [
    "Conv2dPlan",
    "PackedWeights",
    "Tensor",
    "__version__",
    "causal_conv1d",
    "causal_conv1d_update",
    "conv2d",
    "conv3d",
    "gelu",
]
