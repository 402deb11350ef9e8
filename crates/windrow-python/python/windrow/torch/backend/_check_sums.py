"""The comparison of each convolution of a compiled graph with the original graph's result for the same image."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from windrow._activation_names import steepest_slope
from windrow.torch._check_bound import PIECE, beyond, largest_nearby, tier_of
from windrow.torch._conv2d import CONV2D
from windrow.torch._fused import CONV2D_FUSED, CONV2D_INTO
from windrow.torch.backend._constants import value
from windrow.torch.backend._convolutions import SUM, VALUE, Sum, Value
from windrow.torch.choice.problem import channels_last

_aten = torch.ops.aten
_FUSED = (CONV2D_FUSED, CONV2D_INTO)
_OPERATORS = (*_FUSED, CONV2D, _aten.convolution.default)
# The steepest slope of most activations.
_SLOPE = 1.13
# Units of the result's type: five roundings of at most two units (of bf16 and f16). Of the sum, the normalisation, the addition
# and the activation in the graph as it was; and of ours.
_UNITS = 10
Values = dict[str, Any]


@dataclass(frozen=True)
class _Constant:
    """A tensor that was computed from parameters, by its index."""

    number: int


@dataclass
class Compared:
    """A convolution to compare."""

    target: Any
    # Tensors of the graph as it was, or of those computed of parameters.
    args: tuple[Any, ...]
    result: Value
    sum: Sum
    # Layout of the image; None for whatever it has, strides for a range of channels.
    layout: torch.memory_format | list[int] | None
    # The strides of the place that the result is written to, if it is.
    place: list[int] | None
    # The module that computes it, where one does.
    module: str | None = None

    def reads(self) -> list[str]:
        found = [*self.args, self.result, self.sum.value, self.sum.weight, self.sum.bias]
        return [part.name for part in found if isinstance(part, Value)]

    def differs(self, values: Values, constants: Sequence[Tensor], modules: Any, accuracy: str | None) -> str | None:
        """The fault of its result, in words; None if it is right."""
        args = [_of(part, values, constants) for part in self.args]
        want = _of(self.result, values, constants)
        if isinstance(self.layout, list):
            args[0] = _laid(args[0], self.layout)
        elif self.layout is not None:
            args[0] = args[0].contiguous(memory_format=self.layout)
        out = None
        if self.place is not None:
            out = _laid(want, self.place).zero_()
            args = [*args[:3], None if args[3] is None else _laid(args[3], self.place), *args[4:], out]
        x, weight, bias, *rest = args
        residual = rest[0] if self.target in _FUSED else None
        try:
            if self.module is None:
                y = self.target(*args)
            else:
                y = modules.get_submodule(self.module)(x, residual, *args[10:])
            y = y if out is None else out
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            return raised(error)
        if y.shape != want.shape:
            return f"its result is {[*y.shape]} instead of {[*want.shape]}"
        if y.numel() == 0:
            return None
        wide = torch.float64 if y.dtype == torch.float64 else torch.float32
        sums = self.sum
        was, own, before = _of(sums.weight, values, constants).to(wide), weight.to(wide), None
        if sums.bias is not None:
            before = _of(sums.bias, values, constants).to(wide).abs()
        scale = None
        if was.shape == own.shape and was.data_ptr() != own.data_ptr():
            # The factor by which the operations after the sum scale it.
            scale = self._by_channel(own).norm(dim=1) / self._by_channel(was).norm(dim=1)
            scale = scale.nan_to_num_(nan=0.0, posinf=0.0)
        tier = tier_of(y.dtype, y.device, accuracy)
        of_sums = tier.of_sums(self._terms(own), is_folded=was.shape != own.shape or not torch.equal(was, own))
        of = lambda part, some: part[some].view(1, -1, *[1] * (y.dim() - 2))
        products = _of(sums.value, values, constants)
        activation = self.args[8] if self.target in (*_FUSED, CONV2D) else None
        steepest = max(_SLOPE, steepest_slope(activation))
        for some, size in self._sizes(x, own, y, wide):
            inner = products[:, some].to(wide).abs()
            if before is not None:
                inner += of(before, some)
            if scale is not None:
                inner *= of(scale, some)
            if bias is not None:
                inner += of(bias, some).to(wide).abs()
            if residual is not None:
                inner += residual[:, some].to(wide).abs()
            bound = size.mul_(of_sums).add_(inner, alpha=_UNITS * tier.out + 2.0**-20).mul_(steepest)
            why = beyond(y[:, some].to(wide), want[:, some].to(wide), bound)
            if why is not None:
                return why if bound.shape == y.shape else f"of channels {some.start} to {some.stop - 1} {why}"
        return None

    def _sizes(self, x: Tensor, weight: Tensor, y: Tensor, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """The root of the sum of squares of the products, for each element: the size on which the rounding error of a
        sum depends. Large results come in several ranges of channels, so that little memory is taken."""
        *options, groups = self._options()
        is_transposed = options[3]
        is_lines = x.dim() == 3
        if is_lines:
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        elif weight.dim() == 2:
            weight = weight[:, :, None, None]
        weight = weight.square()
        channels, few = y.shape[1], max(1, y.shape[1] * PIECE // y.numel())
        whole = x.to(wide, copy=True).square_() if groups == 1 else None
        step = few if groups == 1 else max(1, few * groups // channels)
        for first in range(0, channels if groups == 1 else groups, step):
            if whole is not None:
                last = min(first + step, channels)
                some, image, number = slice(first, last), whole, 1
                part = weight[:, some] if is_transposed else weight[some]
            else:
                last = min(first + step, groups)
                number = last - first
                each, inner = channels // groups, x.shape[1] // groups
                some = slice(first * each, last * each)
                image = x[:, first * inner : last * inner].to(wide, copy=True).square_()
                part = weight[first * inner : last * inner] if is_transposed else weight[some]
            squares = _aten.convolution.default(image, part, None, *options, number).clamp_(min=0)
            if weight.shape[-1] > 1 or weight.shape[-2] > 1:
                squares = largest_nearby(squares)
            yield some, squares.squeeze(2).sqrt_() if is_lines else squares.sqrt_()

    def _by_channel(self, weight: Tensor) -> Tensor:
        """The filter as a matrix with a row for each channel of the result."""
        *_, is_transposed, _, groups = self._options()
        if is_transposed:
            weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        return weight.flatten(1)

    def _terms(self, weight: Tensor) -> int:
        """The number of terms of each sum."""
        *_, is_transposed, _, groups = self._options()
        return weight[:, 0].numel() // groups if is_transposed else weight[0].numel()

    def _options(self) -> tuple[Any, ...]:
        """The options as PyTorch's operator for images takes them."""
        if self.target is _aten.convolution.default:
            stride, padding, dilation, is_transposed, output_padding, groups = self.args[3:9]
            image = lambda given, more: [more] * (2 - len(given)) + [*given]
            return image(stride, 1), image(padding, 0), image(dilation, 1), is_transposed, image(output_padding, 0), groups
        if self.target in _FUSED:
            return *self.args[4:7], False, [0] * len(self.args[4]), self.args[7]
        stride, padding, dilation, groups, output_padding = self.args[3:8]
        return stride, padding, dilation, output_padding is not None, output_padding or [0] * len(stride), groups


def raised(error: Exception) -> str:
    """The error in one line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def _of(part: Any, values: Values, constants: Sequence[Tensor]) -> Any:
    if isinstance(part, _Constant):
        return constants[part.number]
    if not isinstance(part, Value):
        return part
    found = values[part.name]
    return found if part.order is None else found.permute(part.order)


def compared(graph: fx.Graph, constants: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, Compared]]:
    """The convolutions that Windrow computes, or whose filters were computed from parameters, with their nodes."""
    numbers = {node: i for i, node in enumerate(constants)}

    def part(given: Any) -> Any:
        if not isinstance(given, fx.Node):
            return given
        return _Constant(numbers[given]) if given in numbers else given.meta.get(VALUE, given)

    for node in graph.nodes:
        if node.target not in _OPERATORS:
            continue
        place = [*value(node.args[10]).stride()] if node.target is CONV2D_INTO else None
        args, result, sums = (*map(part, node.args[: 10 if place else None]),), node.meta.get(VALUE), node.meta.get(SUM)
        is_ours = node.target is not _aten.convolution.default or any(isinstance(a, _Constant) for a in args)
        # If a pass does not say where a value comes from, or the graph computes a size, only the results are
        # compared.
        is_known = all(isinstance(what, Value | Sum) for what in (result, sums))
        if is_ours and is_known and not any(isinstance(n, fx.Node) for a in args for n in _flat(a)):
            yield node, Compared(node.target, args, result, sums, _layout(node.args[0]), place)


def _laid(t: Tensor, strides: list[int]) -> Tensor:
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def _flat(given: Any) -> list[Any]:
    return [*given] if isinstance(given, list | tuple) else [given]


def _layout(node: fx.Node) -> torch.memory_format | list[int] | None:
    x = value(node)
    if not all(isinstance(n, int) for n in (*x.shape, *x.stride())):
        return None
    for layout in (torch.contiguous_format, *[channels_last(x)] * (x.dim() > 3)):
        if x.is_contiguous(memory_format=layout):
            return layout
    return [*x.stride()] if node.target is _aten.slice.Tensor else None
