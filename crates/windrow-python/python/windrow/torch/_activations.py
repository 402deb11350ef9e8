"""The activations that operators fuse, as PyTorch's functions. Their names are those of Rust's `Activation`."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from windrow.torch._gelu import gelu_of_any

Function = Callable[[Tensor], Tensor]


def _identity(y: Tensor) -> Tensor:
    return y


_gelu_tanh = partial(gelu_of_any, approximate="tanh")

ACTIVATIONS: dict[str | None, Function] = {
    None: _identity,
    "identity": _identity,
    "none": _identity,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": gelu_of_any,
    "gelu_tanh": _gelu_tanh,
}
# The same functions, in place, for those that PyTorch can compute in place.
_IN_PLACE: dict[str | None, Function] = {
    name: partial(function, inplace=True)
    for name, function in ACTIVATIONS.items()
    if function in (F.relu, F.relu6, F.silu)
}


def activation_of(name: str | None, in_place: bool = False) -> Function:
    """The function with this name; with `in_place` it may overwrite its argument. Raises ValueError for an unknown
    name."""
    function = ACTIVATIONS.get(name)
    if function is None:
        raise ValueError(f"`activation` is {name!r}, expected one of {[*ACTIVATIONS]}")
    return _IN_PLACE.get(name, function) if in_place else function
