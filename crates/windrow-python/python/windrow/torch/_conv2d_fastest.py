"""Convolutions and their gradients by Windrow or by PyTorch, whichever is faster; see `_fastest`."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windrow import _native
from windrow.torch._fastest import (
    PYTORCH,
    Contestant,
    Problem,
    chosen,
    decide,
    differs_in_graphs,
    is_worth_it,
)
from windrow.torch._filters import Filters, unkept
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
KEPT, PACKED, _OURS = "Windrow", "Windrow, packing on each call", "Windrow"
NOTHING_FASTER = "Windrow has nothing faster than cuDNN"
_FORWARD, _FORWARD_FROZEN = "forward", "forward with a frozen filter"
_FORWARD_CHANGING = "forward with a changing filter"
_OF_INPUT, _OF_FILTER = "gradient of the input", "gradient of the filter"
_OF_BOTH = "gradient of filter and bias"
# Whether the gradient of a bias alone is ours: it is a sum, for which PyTorch has nothing better.
_OF_BIAS_ALONE = True

_OPTIONS = ("stride", "padding", "dilation", "groups")
Options = tuple[Sequence[int], Sequence[int], Sequence[int], int]


@dataclass(frozen=True)
class Ours:
    """Windrow's convolution with a filter and bias."""

    weight: Tensor
    bias: Tensor | None
    named: dict[str, Any]
    layout: torch.memory_format
    filters: Callable[[], Filters]

    def __call__(self, x: Tensor) -> Tensor:
        image = in_layout(x, self.layout)
        return _native.conv2d(image, self.weight, self.bias, **self.named, filters=self.filters())

    def like(self, x: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor | None]:
        """The same for images like x; None comes of others."""
        image, strides = in_layout(x, self.layout), x.stride()
        call = _native.Conv2dCall(image, self.weight, self.bias, self.named, self.filters())
        if image is x:
            return call

        def copied(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
            return call(in_layout(x, self.layout), weight, bias) if x.stride() == strides else None

        return copied

    def straight(self, x: Tensor) -> Callable[[], Tensor]:
        """The call that a module comes to make for x."""
        call = self.like(x)

        def run() -> Tensor:
            y = call(x, self.weight, self.bias)
            return self(x) if y is None else y

        return run

    def bytes(self, x: Tensor, is_kept: bool) -> tuple[int, int]:
        """Memory that it needs: for good, for the packed filter, and while it runs, with its result."""
        image = in_layout(x, self.layout)
        kept, rest = _native.conv2d_bytes(image, self.weight, self.bias, self.named, is_kept)
        shape = output_shape(x, self.weight, tuple(self.named[name] for name in _OPTIONS))
        copied = 0 if image is x else x.nbytes
        return kept, rest + copied + math.prod(shape) * x.element_size()


def way(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    activation: str | None,
    accuracy: str | None,
    filters: Callable[[], Filters],
) -> tuple[Callable[[Tensor], Tensor], bool]:
    """What computes this, for images like x, and whether that is decided for good."""
    layout = memory_format(x, weight)

    def pytorch(x: Tensor) -> Tensor:
        y = ACTIVATIONS[activation](torch.conv2d(x, weight, bias, *options))
        return y.contiguous(memory_format=layout)

    if not can_be_ours(x, weight, bias):
        return pytorch, False
    named = as_named(options, activation=activation, accuracy=accuracy)
    kept = Ours(weight, bias, named, layout, filters)
    packed = Ours(weight, bias, named, layout, unkept)
    now = filters()
    mode = _mode_of(now is None, now is not None and now[1])
    problem = problem_of(x, weight, bias, options, activation, accuracy)
    choice, is_final = chosen(mode, problem), True
    if choice is None:

        def contestants() -> Iterable[Contestant] | str:
            if activation is None and is_cudnns(x, weight, bias, named, layout, now is not None):
                return NOTHING_FASTER
            return by_windrow(x, kept, packed, now)

        choice = decide(mode, problem, x.device, lambda: pytorch(x), contestants)
        is_final = chosen(mode, problem) is not None
    return {PYTORCH: pytorch, KEPT: kept}.get(choice, packed), is_final


def is_cudnns(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    named: dict[str, Any],
    layout: torch.memory_format,
    is_kept: bool,
) -> bool:
    """True if Windrow would take cuDNN too."""
    image = in_layout(x, layout)
    return _native.conv2d_algorithm(image, weight, bias, named, is_kept) == "cudnn"


def by_windrow(
    x: Tensor,
    kept: Ours,
    packed: Ours,
    filters: Filters,
    rest: Callable[[Tensor], Tensor] = lambda y: y,
) -> Iterator[Contestant]:
    """Ours, with the filter kept if it may be, and packed on each call; and what follows it."""
    if filters is not None:
        always, scratch = kept.bytes(x, True)
        cache = filters[0]
        more = {} if cache.bytes > 0 else {"forget": cache.clear}
        with_kept = kept.straight(x)
        promise = lambda: cache.promise(always)
        yield Contestant(KEPT, lambda: rest(with_kept()), always, scratch, promise=promise, **more)
    always, scratch = packed.bytes(x, False)
    with_packed = packed.straight(x)
    yield Contestant(PACKED, lambda: rest(with_packed()), 0, always + scratch)


def in_layout(x: Tensor, layout: torch.memory_format) -> Tensor:
    """As PyTorch does where the filter alone is channels-last."""
    return x.contiguous(memory_format=layout) if layout is torch.channels_last else x


def gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    accuracy: str | None,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    if not can_be_ours(x, weight, bias):
        return computed(dy, x, weight, bias, options, accuracy, needs, (False, False, False))
    problem = problem_of(x, weight, bias, options, None, accuracy)

    def is_ours(mode: str, *needs: bool) -> bool:
        def by(who: bool) -> Callable[[], list[Tensor | None]]:
            mine = tuple(n and who for n in needs)
            return lambda: computed(dy, x, weight, bias, options, accuracy, needs, mine)

        def contestants() -> Iterator[Contestant]:
            scratch = _native.conv2d_backward_bytes(dy, x, weight, options, accuracy)
            scratch += x.nbytes * needs[0] + weight.nbytes * needs[1]
            yield Contestant(_OURS, by(True), scratch=scratch)

        choice = chosen(mode, problem)
        if choice is None:
            choice = decide(mode, problem, x.device, by(False), contestants)
        return choice == _OURS

    of_bias = needs[2]
    of_input = needs[0] and is_ours(_OF_INPUT, True, False, False)
    of_filter = needs[1] and is_ours(_mode_of_filter(of_bias), False, True, of_bias)
    mine = _mine(needs, of_input, of_filter)
    return computed(dy, x, weight, bias, options, accuracy, needs, mine)


def gradients_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, accuracy: str | None
) -> Callable[[Sequence[bool]], tuple[bool, ...]] | None:
    """Which of the gradients that are needed Windrow computes, for images like x. None as long as that is not decided."""
    problem = problem_of(x, weight, bias, options, None, accuracy)
    of_both = bias is not None and bias.requires_grad
    decided = [chosen(mode, problem) for mode in (_OF_INPUT, _mode_of_filter(of_both))]
    if (x.requires_grad and decided[0] is None) or (weight.requires_grad and decided[1] is None):
        return None
    of_input, of_filter = (choice == _OURS for choice in decided)
    return lambda needs: _mine(needs, of_input, of_filter)


def _mine(needs: Sequence[bool], of_input: bool, of_filter: bool) -> tuple[bool, ...]:
    """Of the gradients that are needed, those that are ours if that of the input and that of the filter are."""
    rest = of_filter if needs[1] else _OF_BIAS_ALONE
    return needs[0] and of_input, needs[1] and rest, needs[2] and rest


def computed(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    accuracy: str | None,
    needs: Sequence[bool],
    mine: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients that are needed, of these `mine` by Windrow and the others by PyTorch."""
    if any(mine):
        grads = _native.conv2d_backward(dy, x, weight, bias, options, accuracy, mine)
        if mine == needs:
            return grads
    else:
        grads = [None, None, None]
    others = [n and not m for n, m in zip(needs, mine, strict=True)]
    sizes = None if bias is None else list(bias.shape)
    stride, padding, dilation, groups = options
    rest = (sizes, stride, padding, dilation, False, [0, 0], groups, others)
    theirs = torch.ops.aten.convolution_backward.default(dy, x, weight, *rest)
    return [
        _laid_out_like(t, g) if other else m
        for m, g, t, other in zip(grads, theirs, (x, weight, bias), others, strict=True)
    ]


def is_pytorchs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    accuracy: str | None,
    is_frozen: bool,
) -> bool | None:
    """True if PyTorch computes this and all gradients that are wanted, because it is faster at each of them
    or because ours would gain too little in all: then the whole call can be PyTorch's own. None as long as
    that is not decided."""
    if type(x) is not Tensor or type(weight) not in (nn.Parameter, Tensor) or x.dim() != 4:
        return None
    if torch._C._len_torch_dispatch_stack() > 0:
        return None
    grad, kind = torch.is_grad_enabled(), "cuda" if x.is_cuda else "cpu"
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    of_filter, of_input = grad and weight.requires_grad, grad and x.requires_grad
    problem = problem_of(x, weight, bias, options, None, accuracy, autocast)
    modes = [_mode_of(of_filter, is_frozen)]
    if of_input:
        modes.append(_OF_INPUT)
    if of_filter:
        modes.append(_mode_of_filter(bias is not None and bias.requires_grad))
    worth = is_worth_it(modes, problem, x.device)
    return None if worth is None else not worth


def is_anothers_in_graphs(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, accuracy: str | None, is_frozen: bool
) -> bool:
    """Whether somebody else computes this, without gradients, where it is captured in a graph."""
    problem = problem_of(x, weight, bias, options, None, accuracy)
    return differs_in_graphs(_mode_of(False, is_frozen), problem)


def layer(
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
) -> tuple[Any, ...]:
    """What a problem has of a module: the last part of a `Problem`."""
    stride, padding, dilation, groups = options
    return (weight.shape, bias is None, *stride, *padding, *dilation, groups)


def output_shape(x: Tensor, weight: Tensor, options: Options) -> list[Any]:
    """That of the convolution's result."""
    stride, padding, dilation, _groups = options
    sizes = zip(x.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True)
    size = [(n + 2 * p - d * (r - 1) - 1) // s + 1 for n, p, d, r, s in sizes]
    return [x.shape[0], weight.shape[0], *size]


def memory_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """That of the result: as PyTorch's own convolution chooses it."""
    is_last = _is_channels_last(x) or _is_channels_last(weight)
    return torch.channels_last if is_last else torch.contiguous_format


def _is_channels_last(t: Tensor) -> bool:
    return t.shape[1] > 1 and t.stride(1) < t.stride(3)


def problem_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    activation: Any,
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


def as_named(options: Options, **more: Any) -> dict[str, Any]:
    return {**dict(zip(_OPTIONS, options, strict=True)), **more}


def can_be_ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """False for what only PyTorch computes, or has the better words to refuse."""
    return (
        x.dim() == 4
        and x.device.type in ("cpu", "cuda")
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and weight.dtype == x.dtype
        and (bias is None or bias.dtype == x.dtype)
        and x.numel() > 0
    )


def _mode_of(is_changing: bool, is_frozen: bool) -> str:
    return _FORWARD_CHANGING if is_changing else _FORWARD_FROZEN if is_frozen else _FORWARD


def _mode_of_filter(of_bias: bool) -> str:
    return _OF_BOTH if of_bias else _OF_FILTER


def _laid_out_like(t: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the strides of `empty_like(t)`."""
    if gradient.stride() == t.stride():
        return gradient
    like = torch.empty_like(t)
    return gradient if like.stride() == gradient.stride() else like.copy_(gradient)
