"""The activations that operators fuse, as PyTorch's functions. Their names are those of Rust's `Activation`."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from windrow._activation_names import NAMES, SYNONYMS, Names, slope_of
from windrow.torch._gelu import gelu_of_any

Function = Callable[[Tensor], Tensor]


def _identity(y: Tensor) -> Tensor:
    return y


def _pytorchs(names: Names) -> Function:
    function: Any = getattr(F, names.function)
    known: Function = function if names.approximate is None else partial(function, approximate=names.approximate)
    return known


PYTORCHS: dict[str, Function] = {name: _pytorchs(names) for name, names in NAMES.items()}

_OURS: dict[str, Function] = {"gelu": gelu_of_any, "gelu_tanh": partial(gelu_of_any, approximate="tanh")}
ACTIVATIONS: dict[str | None, Function] = {None: _identity, "identity": _identity}
ACTIVATIONS |= {name: _OURS.get(name, function) for name, function in PYTORCHS.items()}
ACTIVATIONS |= {name: ACTIVATIONS[known] for name, known in SYNONYMS.items()}
# Of those that PyTorch computes in place.
_IN_PLACE: dict[str | None, Function] = {
    name: partial(function, inplace=True)
    for name, function in ACTIVATIONS.items()
    if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters
}


def activation_of(name: str | None, in_place: bool = False) -> Function:
    """The function with this name; with `in_place` it may overwrite its argument. Raises ValueError for an unknown
    name."""
    function = ACTIVATIONS.get(name)
    if function is not None:
        return _IN_PLACE.get(name, function) if in_place else function
    slope = slope_of(name)
    if slope is None:
        known = [*ACTIVATIONS, "leaky_relu(0.2) or with another slope"]
        raise ValueError(f"`activation` is {name!r}, expected one of {known}")
    return partial(F.leaky_relu, negative_slope=slope, inplace=in_place)
