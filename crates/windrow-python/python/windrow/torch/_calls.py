"""What PyTorch does with a call beside computing it: graphs, tracers, modes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

# The current stream. PyTorch's builds for the CPU have no such function, and no tensors with an index.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)

is_traced = torch.compiler.is_dynamo_compiling
# What is found in the place of a parameter for which there is a property.
MISSING: Any = object()


def is_captured(device: torch.device) -> bool:
    """Whether calls on this device go into a graph now."""
    return device.type == "cuda" and _raw_stream(device.index) != 0 and torch.cuda.is_current_stream_capturing()


def goes_into_a_graph(tensor: Tensor) -> bool | None:
    """The same for the device of a tensor, found sooner. None on the default stream, of number 0: that cannot be captured,
    so that the driver need not be asked, and calls before a capture are on another."""
    index = tensor.get_device()
    if index < 0 or _raw_stream(index) == 0:
        return None
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_ordinary(tensor: Any) -> bool:
    """False for the stand-ins of tracers and exporters. Sizes of these are not to be compared: that would fix them."""
    return type(tensor) is Tensor or type(tensor) is torch.nn.Parameter


def is_plainly_called(tensor: Any) -> bool:
    """Whether PyTorch's operator can be called past its function in Python: nobody looks at what functions are called."""
    return type(tensor) is Tensor and not is_traced() and torch._C._len_torch_function_stack() == 0


def is_direct(*tensors: Tensor | None) -> bool:
    """False for stand-ins, and if somebody wants to see what is called."""
    return (
        is_ordinary(tensors[0])
        and not is_traced()
        and not torch._C._are_functorch_transforms_active()
        and not has_torch_function(tensors)
    )
