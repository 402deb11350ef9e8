"""Causal conv1d, Winograd conv2d and GELU, fast on CPU and GPU, with known accuracy.

The functions here take arrays of any library that speaks DLPack (NumPy, PyTorch, JAX, CuPy, ...) in
place, by their strides, and return the caller's kind of array. They record no gradients: for that,
modules and torch.compile see `windrow.torch`.
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
    "gelu",
]
