"""Convolutions and their gradients by Windrow or by PyTorch, whichever is faster; see `_fastest`."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windrow import _native
from windrow.torch._fastest import PYTORCH, Contestant, Problem, chosen, decide, is_worth_it
from windrow.torch._gelu import gelu

ACTIVATIONS = {
    None: lambda y: y,
    "identity": lambda y: y,
    "none": lambda y: y,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": gelu,
    "gelu_tanh": lambda y: gelu(y, "tanh"),
}

# Where a filter is kept it may still turn out that there is no room for its packed form.
_KEPT, _PACKED, _OURS = "Windrow", "Windrow, packing on each call", "Windrow"
_FORWARD, _FORWARD_CHANGING = "forward", "forward with a changing filter"
_OF_INPUT, _OF_FILTER = "gradient of the input", "gradient of the filter"
_OF_BOTH = "gradient of filter and bias"

# Stride, padding, dilation, groups.
Options = tuple[Sequence[int], Sequence[int], Sequence[int], int]
Filters = tuple[_native.FilterCache, bool]


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    activation: str | None,
    accuracy: str | None,
    filters: Filters | None,
) -> Tensor:
    layout = memory_format(x, weight)

    def pytorch() -> Tensor:
        y = ACTIVATIONS[activation](torch.conv2d(x, weight, bias, *options))
        return y.contiguous(memory_format=layout)

    if not _can_be_ours(x, weight, bias):
        return pytorch()
    # As PyTorch does where the filter alone is channels-last.
    image = x.contiguous(memory_format=layout) if layout is torch.channels_last else x
    named = _named(options, activation=activation, accuracy=accuracy)

    def ours(filters: Filters | None) -> Tensor:
        return _native.conv2d(image, weight, bias, **named, filters=filters)

    def contestants() -> Iterator[Contestant]:
        if filters is not None:
            kept, scratch = _native.conv2d_bytes(image, weight, bias, **named, is_kept=True)
            cache = filters[0]
            forget = cache.clear if cache.bytes == 0 else None
            yield Contestant(_KEPT, lambda: ours(filters), kept, scratch, forget)
        kept, scratch = _native.conv2d_bytes(image, weight, bias, **named, is_kept=False)
        yield Contestant(_PACKED, lambda: ours(None), 0, kept + scratch)

    mode = _FORWARD_CHANGING if filters is None else _FORWARD
    problem = _problem(x, weight, bias, options, activation, accuracy)
    choice = chosen(mode, problem)
    if choice is None:
        choice = decide(mode, problem, x.device, pytorch, contestants)
    if choice == PYTORCH:
        return pytorch()
    return ours(filters if choice == _KEPT else None)


def gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    accuracy: str | None,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    def pytorch(*needs: bool) -> list[Tensor | None]:
        sizes = None if bias is None else list(bias.shape)
        stride, padding, dilation, groups = options
        rest = (sizes, stride, padding, dilation, False, [0, 0], groups, needs)
        grads = torch.ops.aten.convolution_backward(dy, x, weight, *rest)
        of = (x, weight, bias)
        return [_laid_out_like(t, g) if n else None for g, t, n in zip(grads, of, needs, strict=True)]

    def ours(*needs: bool) -> list[Tensor | None]:
        return _native.conv2d_backward(dy, x, weight, bias, *options, accuracy, needs)

    if not _can_be_ours(x, weight, bias):
        return pytorch(*needs)
    problem = _problem(x, weight, bias, options, None, accuracy)

    def is_ours(mode: str, *needs: bool) -> bool:
        def contestants() -> Iterator[Contestant]:
            scratch = _native.conv2d_backward_bytes(dy, x, weight, *options, accuracy)
            yield Contestant(_OURS, lambda: ours(*needs), scratch=scratch)

        choice = chosen(mode, problem)
        if choice is None:
            choice = decide(mode, problem, x.device, lambda: pytorch(*needs), contestants)
        return choice == _OURS

    of_input, of_filter, of_bias = needs
    first = of_input and is_ours(_OF_INPUT, True, False, False)
    if of_filter:
        rest = is_ours(_mode_of_filter(of_bias), False, True, of_bias)
    else:
        rest = of_bias  # A sum, for which PyTorch has nothing better.
    mine = (first, rest and of_filter, rest and of_bias)
    others = tuple(n and not m for n, m in zip(needs, mine, strict=True))
    if not any(mine):
        return pytorch(*others)
    if not any(others):
        return ours(*mine)
    return [m if t is None else t for m, t in zip(ours(*mine), pytorch(*others), strict=True)]


def is_pytorchs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    accuracy: str | None,
) -> bool:
    """True if PyTorch computes this and all gradients that are wanted, because it is faster at each of them
    or because ours would gain too little in all: then the whole call can be PyTorch's own."""
    if type(x) is not Tensor or type(weight) not in (nn.Parameter, Tensor) or x.dim() != 4:
        return False
    if torch._C._len_torch_dispatch_stack() > 0:
        return False
    grad, kind = torch.is_grad_enabled(), "cuda" if x.is_cuda else "cpu"
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    of_filter, of_input = grad and weight.requires_grad, grad and x.requires_grad
    if not (of_filter or of_input or autocast):
        return False  # The way to the kernel, which finds out, is short.
    problem = _problem(x, weight, bias, options, None, accuracy, autocast)
    modes = [_FORWARD_CHANGING if of_filter else _FORWARD]
    if of_input:
        modes.append(_OF_INPUT)
    if of_filter:
        modes.append(_mode_of_filter(bias is not None and bias.requires_grad))
    return not is_worth_it(modes, problem, x.device)


def layer(
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
) -> tuple[Any, ...]:
    """What a problem has of a module: the last part of a `Problem`."""
    stride, padding, dilation, groups = options
    return (weight.shape, bias is None, *stride, *padding, *dilation, groups)


def memory_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """That of the result: as PyTorch's own convolution chooses it."""
    is_last = _is_channels_last(x) or _is_channels_last(weight)
    return torch.channels_last if is_last else torch.contiguous_format


def _is_channels_last(t: Tensor) -> bool:
    return t.shape[1] > 1 and t.stride(1) < t.stride(3)


def _problem(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    activation: str | None,
    accuracy: str | None,
    dtype: torch.dtype | None = None,
) -> Problem:
    """`dtype` is what x is going to be cast to."""
    strides = x.stride()
    is_last = strides[1] < strides[3]
    rest = (
        x.device,
        dtype or x.dtype,
        is_last,
        weight.stride(),
        activation,
        accuracy,
        torch.get_num_threads(),
    )
    return (x.shape, strides), rest, layer(weight, bias, options)


def _named(options: Options, **more: Any) -> dict[str, Any]:
    names = ("stride", "padding", "dilation", "groups")
    return {**dict(zip(names, options, strict=True)), **more}


def _can_be_ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """False for what only PyTorch computes, or has the better words to refuse."""
    return (
        x.dim() == 4
        and x.device.type in ("cpu", "cuda")
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and weight.dtype == x.dtype
        and (bias is None or bias.dtype == x.dtype)
        and x.numel() > 0
    )


def _mode_of_filter(of_bias: bool) -> str:
    return _OF_BOTH if of_bias else _OF_FILTER


def _laid_out_like(t: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the strides of `empty_like(t)`."""
    if gradient.stride() == t.stride():
        return gradient
    like = torch.empty_like(t)
    return gradient if like.stride() == gradient.stride() else like.copy_(gradient)
