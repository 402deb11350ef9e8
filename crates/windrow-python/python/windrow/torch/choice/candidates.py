"""The candidates that may compute a convolution with everything fused to it: PyTorch, cuDNN in one call, Windrow."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windrow import _native
from windrow.torch._activations import activation_of
from windrow.torch._filters import Filters, unkept
from windrow.torch.choice import budget
from windrow.torch.choice.decider import Candidate
from windrow.torch.choice.policy import KEPT, MUCH_KEPT, PACKED
from windrow.torch.choice.problem import (
    Options,
    as_image,
    as_line,
    aten,
    in_layout,
    is_laid_out_last,
    is_video,
    result_bytes,
)

# A function of image, filter, bias and residual; it returns None for tensors that it was not made for.
Call = Callable[..., Tensor | None]


@dataclass(slots=True)
class Conv:
    """The computation `activation(conv2d(x, weight) + bias + residual)`, and what is known of its filter."""

    # The filter; with two dimensions that of a linear layer over the channels, which PyTorch computes as one.
    weight: Tensor
    bias: Tensor | None
    options: Options
    activation: str | None
    accuracy: str | None
    # Finds what is kept with the filter, on each call anew: its memory may be another then.
    filters: Callable[[], Filters]
    # True for a convolution of an optimized model.
    is_fused: bool = False

    @property
    def filter(self) -> Tensor:
        return self.weight[:, :, None, None] if self.weight.dim() == 2 else self.weight

    def finish(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """Adds the residual and applies the activation, in the memory of y if possible."""
        if residual is not None:
            is_alike = residual.shape == y.shape and residual.dtype == y.dtype
            y = y.add_(residual) if is_alike else y + residual
        return activation_of(self.activation, in_place=True)(y)


@dataclass(slots=True)
class PyTorch:
    """The candidate that calls PyTorch's operators one after the other."""

    conv: Conv
    layout: torch.memory_format

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        conv = self.conv
        if conv.weight.dim() == 2:
            y = F.linear(x.permute(0, 2, 3, 1), conv.weight, conv.bias).permute(0, 3, 1, 2)
        else:
            y = aten(x, conv.weight, conv.bias, conv.options)
        return conv.finish(y.contiguous(memory_format=self.layout), residual)


@dataclass(slots=True)
class CudnnFused:
    """The candidate that computes convolution, addition and ReLU in one call of cuDNN."""

    conv: Conv
    layout: torch.memory_format

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        conv, image = self.conv, in_layout(x, self.layout)
        if residual is None:
            y = torch.cudnn_convolution_relu(image, conv.weight, conv.bias, *conv.options[:4])
        else:
            beside = residual.contiguous(memory_format=self.layout)
            rest = (beside, 1.0, conv.bias, *conv.options[:4])
            y = torch.cudnn_convolution_add_relu(image, conv.weight, *rest)
        return y.contiguous(memory_format=self.layout)


@dataclass(slots=True)
class Windrow:
    """The candidate that calls Windrow's convolution."""

    conv: Conv
    layout: torch.memory_format
    filters: Callable[[], Filters]
    # True if the kernel adds a residual in the result's layout before the activation.
    adds: bool = False
    # True if a residual is added after the kernel, and then the activation applied.
    is_followed: bool = False
    # The limit in bytes on packed filter and scratch memory; the work is then done in pieces.
    memory: int | None = None
    # The algorithm; None lets the cost model choose.
    algorithm: str | None = None
    # The keyword arguments of the native functions.
    named: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        conv = self.conv
        activation = None if self.is_followed else conv.activation
        options = zip(Options._fields[:4], conv.options[:4], strict=True)
        self.named = {**dict(options), "activation": activation, "accuracy": conv.accuracy, "memory": self.memory}

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None, **frames: Any
    ) -> Tensor:
        """The result, written to `out` if that is given, which lies like the residual. `frames`: those before a video, as
        `windrow.conv3d` takes them."""
        weight, bias = self.conv.filter, self.conv.bias
        image = as_image(in_layout(x, self.layout), x)
        more: dict[str, Any] = {"residual": residual if self.adds else None, "algorithm": self.algorithm}
        more["filters"] = self.filters()
        convolve = _native.conv3d if is_video(x) else _native.conv2d
        y = as_line(convolve(image, as_image(weight, x), bias, **self.named, **more, **frames, out=out), x)
        y = y if out is not None else y.contiguous(memory_format=self.layout)
        return self.conv.finish(y, residual) if self.is_followed else y

    def like(self, x: Tensor) -> Call:
        """A call for images like x: the convolution without the operations that follow it."""
        image, strides = as_image(in_layout(x, self.layout), x), x.stride()
        if self.algorithm is not None or is_video(x):
            return self._by_function(x)
        weight = as_image(self.conv.filter, x)
        call = _native.Conv2dCall(image, weight, self.conv.bias, self.named, self.filters(), self.adds)
        if image is x and is_laid_out_last(image) == (self.layout is torch.channels_last):
            return call

        def copied(
            x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None
        ) -> Tensor | None:
            if x.stride() != strides:
                return None
            image = as_image(in_layout(x, self.layout), x)
            y = as_line(call(image, as_image(weight, x), bias, residual), x)
            return None if y is None else y.contiguous(memory_format=self.layout)

        return copied

    def into(self, x: Tensor, out: Tensor) -> Call | None:
        """A call for images like x that writes to tensors like `out`; None if there is none."""
        if self.is_followed or self.algorithm is not None or is_video(x) or in_layout(x, self.layout) is not x:
            return None
        args = (x, self.conv.filter, self.conv.bias, self.named, self.filters(), self.adds, out)
        return _native.Conv2dCall(*args)

    def _by_function(self, like: Tensor) -> Call:
        """A call of videos, or with the algorithm that the user named. Native calls are of images, and always take the
        cost model's."""
        alone = replace(self, is_followed=False)
        kind, filter, its_bias = (like.shape, like.stride(), like.dtype, like.device), self.conv.filter, self.conv.bias

        def call(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor | None:
            is_like = (x.shape, x.stride(), x.dtype, x.device) == kind and bias is its_bias
            is_ours = is_like and weight.data_ptr() == filter.data_ptr() and _native.is_plain(x, weight, bias, residual)
            return alone(x, residual) if is_ours else None

        return call

    def straight(self, x: Tensor, residual: Tensor | None = None) -> Callable[[], Tensor]:
        """The call for x that a module makes once this candidate is chosen."""
        call, weight, bias = self.like(x), self.conv.filter, self.conv.bias
        added = residual if self.adds else None

        def run() -> Tensor:
            y = call(x, weight, bias, added)
            if y is None:
                return self(x, residual)
            return self.conv.finish(y, residual) if self.is_followed else y

        return run

    def within(self, x: Tensor, is_kept: bool) -> "Windrow":
        """The candidate with a limit on its memory, if there is not enough room for all that it would take."""
        always, scratch = self.bytes(x, is_kept)
        if not x.is_cuda or any(
            budget.is_there_room(x.device, always, scratch, in_graph) for in_graph in (False, True)
        ):
            return self
        beside = self._beside(x, in_layout(x, self.layout))
        return replace(self, memory=max(0, budget.most(x.device) - beside))

    def bytes(self, x: Tensor, is_kept: bool) -> tuple[int, int]:
        """The memory that it needs: bytes for good, for the packed filter; and bytes during a run, including its
        result."""
        given = in_layout(x, self.layout)
        if is_video(x) and x.is_cpu:
            # Only blocks of the video are copied.
            return 0, self._beside(x, given)
        image, weight = as_image(given, x), as_image(self.conv.filter, x)
        count = _native.conv3d_bytes if is_video(x) else _native.conv2d_bytes
        kept, rest = count(image, weight, self.conv.bias, self.named, self.adds, is_kept)
        return kept, rest + self._beside(x, given)

    def _beside(self, x: Tensor, given: Tensor) -> int:
        return _bytes_beside(x, given, self.conv)

    def candidates(self, x: Tensor, residual: Tensor | None) -> Iterator[Candidate]:
        """Two candidates: one keeps the packed filter, if that is allowed; one packs it on each call."""
        now = self.filters()
        if now is not None:
            kept, cache = self.within(x, True), now[0]
            always, scratch = kept.bytes(x, True)
            more = {} if cache.bytes > 0 else {"forget": cache.clear}
            promise = lambda: cache.promise(always)
            run = kept.straight(x, residual)
            yield Candidate(KEPT, run, always, scratch, promise=promise, memory=kept.memory, **more)
        packed = replace(self, filters=unkept).within(x, False)
        always, scratch = packed.bytes(x, False)
        yield Candidate(PACKED, packed.straight(x, residual), 0, always + scratch, memory=packed.memory)

    def is_cudnns(self, x: Tensor) -> bool:
        """True if Windrow would call cuDNN just as PyTorch does, so there is nothing to compare."""
        if is_video(x):
            return False
        is_kept, weight = self.filters() is not None, self.conv.filter
        image = as_image(in_layout(x, self.layout), x)
        algorithm = _native.conv2d_algorithm(image, as_image(weight, x), self.conv.bias, self.named, is_kept)
        return algorithm in self._like_cudnns(x, is_kept)

    def _like_cudnns(self, x: Tensor, is_kept: bool) -> list[str]:
        """The algorithms that are no faster than PyTorch's call of cuDNN."""
        weight = self.conv.filter
        is_row_major = self.layout is torch.contiguous_format
        if x.is_cuda and is_row_major and x.element_size() < 4 and (weight.shape[1] * x.element_size()) % 16 == 0:
            # Alone, cuDNN turns images and filter to channels-last on each call, but for 1x1 filters. Windrow does so faster, and
            # keeps the filter; for one that changes, in training, the interpreter would wait longer than the device gains.
            if not is_kept:
                return ["cudnn", "implicit_gemm"]
            is_pointwise = weight.shape[2:].numel() == 1 and max(self.conv.options.stride) == 1
            return ["cudnn"] if is_pointwise else []
        return ["cudnn"]

    def described(self, x: Tensor, is_kept: bool, is_wanted: bool) -> dict[str, Any]:
        """The convolution of images like x for `conv2d_prepare`. `is_wanted`: it was decided that Windrow computes it, so
        there is nothing to compare."""
        image, conv = as_image(in_layout(x, self.layout), x), self.conv
        of = lambda t: ([*t.shape], [*t.stride()])
        given = {"device": str(x.device), "dtype": str(x.dtype).removeprefix("torch."), "named": self.named}
        given |= {"x": of(image), "weight": of(as_image(conv.filter, x)), "has_bias": conv.bias is not None}
        is_alike = conv.is_fused or conv.activation is None
        unless = self._like_cudnns(x, is_kept) if is_alike and not is_wanted else []
        much = MUCH_KEPT if is_kept and not is_wanted else None
        return given | {"residual": self.adds, "is_kept": is_kept, "unless": unless, "much": much}


@dataclass(slots=True)
class Transposed:
    """The candidate for transposed convolutions: the data gradient of a convolution, then bias and activation."""

    conv: Conv
    layout: torch.memory_format

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        image, bias = as_image(x.contiguous(memory_format=self.layout), x), self.conv.bias
        y = _native.conv_transpose2d(image, *self._rest(x))
        if bias is not None:
            if bias.shape != (y.shape[1],):
                raise ValueError(f"`bias` has shape {[*bias.shape]}, expected [{y.shape[1]}]")
            y += bias[:, None, None]
        return self.conv.finish(as_line(y, x).contiguous(memory_format=self.layout), residual)

    def _rest(self, x: Tensor) -> tuple[Any, ...]:
        options = self.conv.options
        return as_image(self.conv.weight, x), options[:4], options.output_padding, self.conv.accuracy

    def candidates(self, x: Tensor, residual: Tensor | None) -> Iterator[Candidate]:
        given = x.contiguous(memory_format=self.layout)
        rest = _native.conv_transpose2d_bytes(as_image(given, x), *self._rest(x))
        yield Candidate(KEPT, lambda: self(x, residual), scratch=rest + _bytes_beside(x, given, self.conv))


def _bytes_beside(x: Tensor, given: Tensor, conv: Conv) -> int:
    """The bytes of the result, and of a copy of x if one is made."""
    copied = 0 if given is x else x.nbytes
    return copied + result_bytes(x, conv.filter, conv.options)
