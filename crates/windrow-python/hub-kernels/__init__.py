"""Causal conv1d, Winograd conv2d and GELU by Windrow, as `kernels` loads them."""

from . import _flops, _threads, layers
from ._causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
)
from ._conv2d import conv1d, conv2d, conv_transpose2d
from ._gelu import gelu

_flops.register()
_threads.share()

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "conv1d",
    "conv2d",
    "conv_transpose2d",
    "gelu",
    "layers",
]
