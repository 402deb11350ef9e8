"""The description of a problem: a convolution, or a gradient of one, for tensors of certain sizes, types and strides.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The types of numbers that Windrow computes.
TYPES = (torch.float32, torch.float16, torch.bfloat16)
# The part of a convolution to compute.
FORWARD, FROZEN, CHANGING = "forward", "forward with a frozen filter", "forward with a changing filter"
FUSED = "forward of an optimized model"
FUSED_UNKEPT = "forward of an optimized model without room for its filter"
OF_INPUT, OF_FILTER, OF_BOTH = "gradient of the input", "gradient of the filter", "gradient of filter and bias"
GRADIENTS = (OF_INPUT, OF_FILTER, OF_BOTH)
# The parts for which no packed filter is kept.
UNKEPT = (CHANGING, FUSED_UNKEPT)


class Options(NamedTuple):
    """The options of a convolution; a transposed one has `output_padding`. Windrow treats a line [n, c, l], whose
    filter is [k, c / groups, s], as an image of one row, so its options are pairs too. Those of a video [n, c, t, h, w]
    have three numbers."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    output_padding: Sequence[int] | None = None


class Beside(NamedTuple):
    """The residual: the tensor that an optimized model adds to a convolution's result."""

    # False if it is broadcast, or of another type: no convolution adds that.
    fits: bool
    dtype: torch.dtype
    is_contiguous: bool
    # True if it has the layout of Windrow's result, so that Windrow's kernel adds it.
    is_added: bool


class After(NamedTuple):
    """The operations that an optimized model computes together with a convolution."""

    activation: str | None
    beside: Beside | None
    is_linear: bool


class How(NamedTuple):
    """The part of a problem that is neither sizes nor the layer."""

    device: torch.device
    dtype: torch.dtype
    is_last: bool
    filter_strides: tuple[int, ...]
    after: str | After | None
    accuracy: str | None
    threads: int


class Problem(NamedTuple):
    """A problem with named fields. A call looks up its `Key`, a plain tuple that equals the `Problem` and is built
    faster."""

    sizes: tuple[torch.Size, tuple[int, ...]]
    how: How
    layer: tuple[Any, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes[0])

    @property
    def options(self) -> Options:
        layer = self.layer
        n = max(2, len(layer[0]) - 2)
        stride, padding, dilation = (layer[2 + i * n : 2 + (i + 1) * n] for i in range(3))
        return Options(stride, padding, dilation, layer[2 + 3 * n], layer[3 + 3 * n :] or None)

    def without_sizes(self) -> str:
        """The layer and everything else except the sizes, in words."""
        how, options, filter = self.how, self.options, self.layer[0]
        laid_out = _laid_out(filter, how.filter_strides)
        words = [f"filter {[*filter]}" + (f" {laid_out}" if laid_out else "")]
        words += ["transposed"] * (options.output_padding is not None)
        for name, value, usual in zip(Options._fields, options, (1, 0, 1, 1, 0), strict=True):
            numbers = [*value] if isinstance(value, Sequence) else [value or 0]
            if any(n != usual for n in numbers):
                words.append(f"{name.replace('_', ' ')} {numbers[0] if len({*numbers}) == 1 else numbers}")
        words += ["no bias"] * self.layer[1]
        words += _after(how.after)
        words += [f"accuracy {how.accuracy}"] * (how.accuracy is not None)
        return ", ".join([*words, f"{how.threads} thread" + "s" * (how.threads != 1)])

    def image(self) -> str:
        """The image's type, shape and layout, in words."""
        shape, strides = self.sizes
        laid_out = _laid_out(shape, strides)
        return f"{_name(self.how.dtype)} {[*shape]}" + (f" {laid_out}" if laid_out else "")

    def __str__(self) -> str:
        return f"{self.image()}, {self.without_sizes()}"


# The key of a problem: plain tuples with the fields of a `Problem`, because it is hashed on each call.
Key = tuple[Any, tuple[Any, ...], tuple[Any, ...]]


def named(key: Key) -> Problem:
    sizes, how, layer = key
    return Problem(sizes, How(*how), layer)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _laid_out(shape: Sequence[int], strides: Sequence[int]) -> str:
    """The layout in words; empty for row-major tensors."""
    if _strides(shape, range(len(shape))) == [*strides]:
        return ""
    if len(shape) > 3 and _strides(shape, (0, *range(2, len(shape)), 1)) == [*strides]:
        return "channels-last"
    return f"strides {[*strides]}"


def _strides(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    strides, next = [0] * len(shape), 1
    for d in reversed(order):
        strides[d], next = next, next * max(1, shape[d])
    return strides


def _after(after: str | After | None) -> list[str]:
    if not isinstance(after, After):
        return [] if after is None else [str(after)]
    words = [str(after.activation)] if after.activation is not None else []
    if after.beside is not None:
        fits, dtype, is_contiguous, is_added = after.beside
        laid_out = "" if is_contiguous else ", laid out otherwise"
        how = "in one" if is_added else "afterwards" if fits else "broadcast"
        words.append(f"plus {_name(dtype)} ({how}{laid_out})")
    return words + ["as a linear layer"] * after.is_linear


def layer(weight: Tensor, bias: Tensor | None, options: Options) -> tuple[Any, ...]:
    """The part of a problem that belongs to a module: the last field of a `Problem`."""
    stride, padding, dilation, groups, output_padding = options
    return (weight.shape, bias is None, *stride, *padding, *dilation, groups, *(output_padding or ()))


def key_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    accuracy: str | None,
    after: str | After | None = None,
    dtype: torch.dtype | None = None,
) -> Key:
    """The key of a problem. `dtype` is the type to which x will be cast."""
    strides = x.stride()
    is_last = strides[1] < strides[-1]
    threads = torch.get_num_threads()
    how = (x.device, dtype or x.dtype, is_last, weight.stride(), after, accuracy, threads)
    return (x.shape, strides), how, layer(weight, bias, options)


def is_video(x: Tensor) -> bool:
    """True for videos, and for their filters. Windrow computes no gradients of their convolutions."""
    return x.dim() == 5


def can_be_ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if Windrow can compute this. If it is False, PyTorch computes it, or raises the clearer error."""
    return (
        x.dim() == weight.dim()
        and x.device.type in ("cpu", "cuda")
        and x.dtype in TYPES
        and weight.dtype == x.dtype
        and (bias is None or bias.dtype == x.dtype)
        and x.numel() > 0
    )


def aten(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """The result of PyTorch's own operator."""
    stride, padding, dilation, groups, output_padding = options
    if output_padding is not None:
        if weight.dim() == 3:
            pairs = (stride[1:], padding[1:], output_padding[1:])
            return torch.conv_transpose1d(x, weight, bias, *pairs, groups, dilation[1:])
        return torch.conv_transpose2d(x, weight, bias, stride, padding, output_padding, groups, dilation)
    if weight.dim() == 3:
        return torch.conv1d(x, weight, bias, stride[1:], padding[1:], dilation[1:], groups)
    if is_video(weight):
        return torch.conv3d(x, weight, bias, stride, padding, dilation, groups)
    return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)


def output_shape(x: Tensor, weight: Tensor, options: Options) -> list[Any]:
    """The shape of the convolution's result."""
    stride, padding, dilation, groups, output_padding = options
    first = max(0, 4 - weight.dim())
    sizes = zip(x.shape[2:], weight.shape[2:], stride[first:], padding[first:], dilation[first:], strict=True)
    if output_padding is None:
        size = [(n + 2 * p - d * (r - 1) - 1) // s + 1 for n, r, s, p, d in sizes]
        return [x.shape[0], weight.shape[0], *size]
    size = [(n - 1) * s - 2 * p + d * (r - 1) + 1 for n, r, s, p, d in sizes]
    size = [n + more for n, more in zip(size, output_padding[first:], strict=True)]
    return [x.shape[0], weight.shape[1] * groups, *size]


def result_bytes(x: Tensor, weight: Tensor, options: Options) -> int:
    return math.prod(output_shape(x, weight, options)) * x.element_size()


def as_image(t: Tensor, x: Tensor) -> Tensor:
    """The tensor as the native functions take it: a line becomes an image of one row."""
    return t.unsqueeze(2) if x.dim() == 3 else t


def as_line(t: Tensor | None, x: Tensor) -> Tensor | None:
    """The inverse of `as_image`."""
    return t.squeeze(2) if t is not None and x.dim() == 3 else t


def memory_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """The memory format of the result, chosen as PyTorch's own convolution chooses it."""
    is_last = _is_channels_last(x) or _is_channels_last(weight)
    return channels_last(x) if is_last else torch.contiguous_format


def channels_last(x: Tensor) -> torch.memory_format:
    """The memory format in which the channels of tensors like x come last."""
    return torch.channels_last_3d if is_video(x) else torch.channels_last


def in_layout(x: Tensor, layout: torch.memory_format) -> Tensor:
    """The image in this memory format. It is copied only if it is a line, or if the filter alone is channels-last, as
    in PyTorch."""
    if x.dim() == 3:
        return x.contiguous()
    if layout is torch.contiguous_format or x.is_contiguous(memory_format=layout) or _is_channels_last(x):
        return x
    return x.contiguous(memory_format=layout)


def is_laid_out(residual: Tensor, x: Tensor, layout: torch.memory_format) -> bool:
    """True if the residual has the layout in which Windrow's convolution of x writes its result."""
    is_last = is_laid_out_last(in_layout(x, layout))
    return residual.is_contiguous(memory_format=channels_last(x) if is_last else torch.contiguous_format)


def is_laid_out_last(image: Tensor) -> bool:
    """True if the native functions write the result in channels-last."""
    return image.dim() > 3 and image.shape[1] > 1 and image.stride(1) < image.stride(-1)


def _is_channels_last(t: Tensor) -> bool:
    """True if PyTorch counts the tensor as channels-last: its `suggest_memory_format`, which Python does not have."""
    if t.dim() not in (4, 5) or t.stride(1) == 0:
        return False
    least = 0
    for d in (1, *range(t.dim() - 1, 1, -1), 0):
        size, stride = t.shape[d], t.stride(d)
        if size == 0 or stride < least or (d == 0 and least == t.stride(1)):
            return False
        least = stride * size
    return True


def dense(x: Tensor) -> Tensor:
    """The tensor as a convolution would write it: no two elements share memory."""
    return x.contiguous(memory_format=memory_format(x, x))
