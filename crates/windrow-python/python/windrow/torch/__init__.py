"""Windrow's operators for PyTorch: functions and modules with gradients, autocast and torch.compile.

The package does not link to PyTorch, so one build works with PyTorch 2.4 and every later version.
"""

from windrow import _threads
from windrow.torch import _flops, _fused, _fused_conv3d  # noqa: F401  (which define operators of compiled graphs)
from windrow.torch._causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
)
from windrow.torch._conv2d import conv1d, conv2d, conv_transpose1d, conv_transpose2d
from windrow.torch._conv3d import conv3d
from windrow.torch._gelu import GELU, gelu
from windrow.torch._modules import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d
from windrow.torch._optimize import OptimizeReport, optimize
from windrow.torch._patch import PatchReport, freeze, patch, patched, unfreeze, unpatch
from windrow.torch.choice import (
    Decision,
    Decisions,
    DecisionsWarning,
    UnknownAlgorithmError,
    UnknownProblemError,
    UnsupportedAlgorithmError,
    decide,
    decisions,
    forget,
)

_flops.register()
_threads.share()

__all__ = [
    "GELU",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "Decision",
    "Decisions",
    "DecisionsWarning",
    "OptimizeReport",
    "PatchReport",
    "UnknownAlgorithmError",
    "UnknownProblemError",
    "UnsupportedAlgorithmError",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "decide",
    "decisions",
    "forget",
    "freeze",
    "gelu",
    "optimize",
    "patch",
    "patched",
    "unfreeze",
    "unpatch",
]
