"""The context of a call: CUDA graphs, tracers and modes that see it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

# The current stream. PyTorch's builds for the CPU have no such function, and no tensors with an index.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)

is_traced = torch.compiler.is_dynamo_compiling
# The value that is found in the place of a parameter if it is a property.
MISSING: Any = object()


def is_captured(device: torch.device) -> bool:
    """True if a CUDA graph captures calls on this device now."""
    return device.type == "cuda" and _raw_stream(device.index) != 0 and torch.cuda.is_current_stream_capturing()


def goes_into_a_graph(tensor: Tensor) -> bool | None:
    """True if a CUDA graph captures calls on the tensor's device now; faster than `is_captured`. None on the default
    stream (number 0), which cannot be captured, so the driver need not be asked. The calls that precede a capture run
    on another stream."""
    index = tensor.get_device()
    if index < 0 or _raw_stream(index) == 0:
        return None
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_ordinary(tensor: Any) -> bool:
    """True for real tensors, False for the stand-ins of tracers and exporters. Comparing a stand-in's sizes would fix
    them."""
    return type(tensor) is Tensor or type(tensor) is torch.nn.Parameter


def is_plainly_called(tensor: Any) -> bool:
    """True if PyTorch's operator can be called without its Python function, because nothing observes function calls."""
    return type(tensor) is Tensor and not is_traced() and torch._C._len_torch_function_stack() == 0


def is_direct(*tensors: Tensor | None) -> bool:
    """True if no tensor is a stand-in and nothing observes the call."""
    return (
        is_ordinary(tensors[0])
        and not is_traced()
        and not torch._C._are_functorch_transforms_active()
        and not has_torch_function(tensors)
    )
