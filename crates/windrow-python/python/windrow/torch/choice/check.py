"""The comparison of a candidate's result with PyTorch's, element by element within the bound of its accuracy tier.

PyTorch's operator computes the reference in f32. The scale of an element is the sum of its absolute terms, computed by
the same operator from absolute values. The rounding error of a sum is a fraction of this scale, and pixels outside an
output's window do not enter it. Winograd's transforms mix the pixels of a tile, so a pixel of -9999 leaves its error in
outputs whose window does not contain it: these exceed their bound.

In an area of zeros the scale is zero, and at its border no transform gives exact zeros. The scale there is the usual
one of the image: the lower quartile of the scales that are not zero.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windrow.torch._precision import operand_rounding
from windrow.torch.choice.problem import Options, aten, is_video, output_shape

# Units of f32 of the scale, in sums by any algorithm and in PyTorch's own: so many, and for the root of the number of
# terms so many more. In networks of torchvision up to a third of both was seen, by Winograd's largest tiles.
_UNITS, _UNITS_OF_TERMS = 256.0, 16.0
# Roundings of operands in lower precision are independent, so they grow as the root of the number of terms. Winograd's
# transforms raise them by up to 40, and the largest of a million is five deviations from zero.
_OPERANDS = 128.0
# Roundings of a result in half precision: the convolution's, that after an addition and that after an activation.
_RESULTS = 4.0
# The largest product of bf16 that counts as zero, for each term.
_TINY = 2.0**-100
# Elements that are compared at a time: the memory for that is needed by nothing else.
_AT_A_TIME = {"cpu": 1 << 20, "cuda": 1 << 22}
# Elements of a filter that are read at a time. PyTorch also copies what it reads into another layout.
_OF_A_FILTER = 1 << 22
# Size of the sample whose scale is the usual one.
_SAMPLE = 4096

# A range of images, or of frames as an index of videos.
Range = slice | tuple[slice, slice, slice]
# A function from a range to PyTorch's results in f32, each with the sums of its absolute terms.
Part = Callable[[Range], Sequence[tuple[Tensor, Tensor]]]


@contextmanager
def without_trials() -> Iterator[None]:
    """A context in which cuDNN takes algorithms by its own rules. With `torch.backends.cudnn.benchmark` it would try all of
    them for each size that a comparison asks for once, which took most of the first call."""
    was = torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_benchmark(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_benchmark(was)


@dataclass(frozen=True)
class Check:
    """The reference of a comparison, and the allowed error."""

    # The number of images or frames, which may be compared in parts; None if not every tensor has an axis of them.
    images: int | None
    # The type in which a result is rounded.
    dtype: torch.dtype
    of: Part
    # Number of terms of an element's sum.
    terms: float
    # Unit roundoff of operands, where some are rounded.
    operand: float = 0.0
    # True for gradients of filters, which are sums over images.
    is_summed: bool = False
    # The residual, which is added to a convolution and rounds it once more.
    residual: Tensor | None = None
    # True if a part is a range of frames.
    is_video: bool = False
    # The steepest slope of the activation behind the sums.
    steepest: float = 1.0

    @torch.no_grad()
    @without_trials()
    def fault(self, result: Any) -> str | None:
        """The fault of a result, in words; None if it is right."""
        results = [t for t in (result if isinstance(result, list | tuple) else [result]) if t is not None]
        if self.is_summed:
            return self._first_fault(results, self._sums(), None)
        most = _AT_A_TIME.get(results[0].device.type, 1 << 20)
        images = self.images or 1
        for part in self._parts(max(1, most * images // max(1, results[0].numel()))):
            residual = None if self.residual is None else self.residual[part]
            if fault := self._first_fault([t[part] for t in results], self.of(part), residual):
                return fault
        return None

    def _sums(self) -> Sequence[tuple[Tensor, Tensor]]:
        first, *rest = (self.of(part) for part in self._parts(max(1, (self.images or 1) // 4)))
        for more in rest:
            first = [(v + w, s + t) for (v, s), (w, t) in zip(first, more, strict=True)]
        return first

    def _parts(self, size: int) -> Sequence[Range]:
        if self.images is None:
            return [slice(None)]
        ranges = [slice(first, min(first + size, self.images)) for first in range(0, self.images, size)]
        return [(slice(None), slice(None), frames) for frames in ranges] if self.is_video else ranges

    def _first_fault(
        self, results: Sequence[Tensor], wanted: Sequence[tuple[Tensor, Tensor]], residual: Tensor | None
    ) -> str | None:
        faults = (self._fault(got, *of, residual) for got, of in zip(results, wanted, strict=True))
        return next((fault for fault in faults if fault is not None), None)

    def _fault(self, got: Tensor, want: Tensor, scale: Tensor, residual: Tensor | None) -> str | None:
        if got.shape != want.shape:
            return f"has shape {[*got.shape]} where PyTorch's has {[*want.shape]}"
        if got.numel() == 0:
            return None
        scale = torch.maximum(scale, _usual(scale, is_by_image=not self.is_summed)) * self.steepest
        root = math.sqrt(self.terms)
        usual, units = scale / root, _UNITS + _UNITS_OF_TERMS * root
        allowed = (scale * (units * 2.0**-24)).add_(usual, alpha=_OPERANDS * self.operand).add_(_TINY * self.terms)
        if self.dtype is not torch.float32:
            values = want.abs().add_(usual)
            values = values if residual is None else values.add_(residual.abs(), alpha=self.steepest)
            allowed.add_(values, alpha=_RESULTS * torch.finfo(self.dtype).eps / 2)
        error = (got.float() - want).abs_()
        right = error <= allowed
        if right.all():
            return None
        # Infinities, also of values beyond those of half precision, and NaN.
        right |= (got == want.to(self.dtype)) | (got.isnan() & want.isnan())
        if right.all():
            return None
        excess = torch.where(right, 0.0, error / allowed).nan_to_num(nan=math.inf)
        worst = int(excess.argmax())
        at = lambda t: t.flatten()[worst].item()
        if not math.isfinite(at(error)):
            return f"gives {at(got):.3g} where PyTorch gives {at(want):.3g}"
        return f"differs from PyTorch by {at(error):.1e} where {at(allowed):.1e} is allowed"


def _usual(scale: Tensor, is_by_image: bool) -> Tensor:
    """The lower quartile of the non-zero scales of each image; zero if all are zero."""
    flat = scale.flatten(1) if is_by_image else scale.flatten()[None]
    # An odd step meets other rows and columns of each channel.
    sample = flat[:, :: (flat.shape[1] // _SAMPLE) | 1]
    sample = torch.where((sample > 0) & sample.isfinite(), sample, math.nan)
    usual = sample.nanquantile(0.25, dim=1).nan_to_num(nan=0.0)
    return usual.reshape([-1, *[1] * (scale.dim() - 1)]) if is_by_image else usual[0]


def check_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    accuracy: str | None,
    finish: Callable[[Tensor, Range], Tensor],
    residual: Tensor | None = None,
    is_linear: bool = False,
    steepest: float = 1.0,
) -> Check:
    """The check of a convolution. `finish` turns sums in f32 into results, for these images or frames. `steepest`: the
    steepest slope of the activation in it."""

    def of(part: Range) -> list[tuple[Tensor, Tensor]]:
        given, how = _read(x, weight, options, part[2]) if isinstance(part, tuple) else (x[part], options)
        image = given.float()
        sums = [_sums_of(image, weight[some], None if bias is None else bias[some], how) for some in channels]
        value, scale = (torch.cat(parts, 1) for parts in zip(*sums, strict=True))
        value = finish(value, part)
        return [(value, scale if residual is None else scale + residual[part].abs())]

    channels = _channels(weight, options)
    terms = terms_of(weight, options, of_result=options.output_padding is None)
    operand = operand_rounding(x, accuracy, is_linear)
    shape = output_shape(x, weight, options)
    is_whole = residual is not None and [*residual.shape] != shape
    images = None if is_whole else shape[2] if is_video(x) else shape[0]
    return Check(images, x.dtype, of, terms, operand, residual=residual, is_video=is_video(x), steepest=steepest)


def _channels(weight: Tensor, options: Options) -> list[slice]:
    """The output channels whose filters are read at a time."""
    if options.groups != 1 or options.output_padding is not None:
        return [slice(None)]
    size = max(1, _OF_A_FILTER // max(1, weight[:1].numel()))
    return [slice(first, first + size) for first in range(0, max(1, weight.shape[0]), size)]


def _sums_of(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """The sums in f32, and those of their absolute terms."""
    w, b = weight.float(), None if bias is None else bias.float()
    return aten(x, w, b, options), aten(x.abs(), w.abs(), None if b is None else b.abs(), options)


def _read(x: Tensor, weight: Tensor, options: Options, frames: slice) -> tuple[Tensor, Options]:
    """The frames of a video that these frames of the result read, with zeros for those outside; and the options that
    compute the result from them."""
    stride, padding, dilation = (of[0] for of in options[:3])
    first = frames.start * stride - padding
    last = (frames.stop - 1) * stride - padding + (weight.shape[2] - 1) * dilation + 1
    before = min(max(0, -first), last - first)
    read = x[:, :, max(0, first) : max(0, last)]
    behind = last - first - before - read.shape[2]
    return F.pad(read, (0, 0, 0, 0, before, behind)), options._replace(padding=[0, *options.padding[1:]])


def terms_of(weight: Tensor, options: Options, of_result: bool) -> float:
    """The number of terms of a sum: of the convolution's result, or of its input's gradient, where a stride leaves taps
    out."""
    if of_result:
        return max(1, weight.shape[1:].numel())
    channels = weight.shape[0] / options.groups
    return max(1.0, channels * weight.shape[2:].numel() / math.prod(options.stride))
