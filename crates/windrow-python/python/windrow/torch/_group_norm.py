"""Group normalisation on CUDA for few large groups and for images in channels-last, in inference.

PyTorch sums each group in one block of threads, so the 32 groups of an image leave three quarters of a device idle.
That takes half of the time of an autoencoder's decoder. Here parts of the groups are summed and normalised by PyTorch's
operators for batch normalisation.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windrow import _native
from windrow.torch._calls import MISSING, is_direct, is_plainly_called
from windrow.torch._replaced import own_method

# A group of so many elements takes PyTorch twice as long as its parts here, on an H100, where multiprocessors have no more than
# two groups each.
_LARGE = 3 << 15
_GROUPS = 2
# Elements of a part are so many at least, and a power of two: PyTorch puts the means of a block's threads together by the
# reciprocal of how many elements they have, which is exact for those only (else up to 6e-7 for 2e-7 in f32, of means of ten
# times the deviation).
_PART = 1 << 12
# The fewest elements of an image in channels-last that is normalised without a copy. It is an estimate of when copies take
# longer than the launches for each image; no record measures it.
_LARGE_IMAGE = 1 << 20
# The parts for each multiprocessor: those that a block sums, and those that it normalises.
_SUMMED, _NORMALISED = 16, 16
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_two(elements: int, most: int) -> int:
    """The largest power of two that divides `elements` and is at most `most`; at least 1."""
    return min(elements & -elements, 1 << max(0, most.bit_length() - 1))


def pays(x: Tensor, groups: int) -> bool:
    if not x.is_cuda or x.dtype not in _TYPES or x.dim() < 3 or x.shape[1] % groups:
        return False
    rows = x.shape[0] * groups
    if not 0 < rows <= _GROUPS * multiprocessors(x.device):
        return False
    elements = x.numel() // rows
    return elements >= _LARGE and elements % _PART == 0


def group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    images, channels = x.shape[:2]
    x = x.contiguous()
    rows, pixels = images * groups, x.numel() // (images * channels)
    device = multiprocessors(x.device)
    part = _power_of_two(x.numel() // rows, max(_PART, x.numel() // (_SUMMED * device)))
    mean, scale = torch.batch_norm_stats(x.view(1, -1, part), eps)
    between, mean = torch.var_mean(mean.view(rows, -1), 1, correction=0)
    # Statistics of parts of one size; each has `eps` in its variance.
    scale = scale.view(rows, -1).pow(-2).mean(1).add_(between).rsqrt_()
    pieces = _power_of_two(pixels, _NORMALISED * device // (images * channels))

    def of_groups(t: Tensor) -> Tensor:
        return t.view(images, groups, 1).expand(-1, -1, channels // groups * pieces).reshape(-1)

    def of_channels(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.view(1, channels, 1).expand(images, -1, pieces).reshape(-1)

    by_pieces = x.view(1, images * channels * pieces, -1)
    rest = of_channels(weight), of_channels(bias), of_groups(mean), of_groups(scale)
    return torch.batch_norm_elemt(by_pieces, *rest, 0.0).view_as(x)


def is_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def pays_in_channels_last(x: Tensor, groups: int) -> bool:
    return (
        x.is_cuda and x.dtype in _TYPES and is_channels_last(x) and x.shape[1] % groups == 0
        and x.numel() >= _LARGE_IMAGE * x.shape[0]
    )  # fmt: skip


def group_norm_in_channels_last(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """The normalisation of images in channels-last, with a result in channels-last. PyTorch's operator copies them into
    row-major order. Here each channel is summed over the pixels, and the sums of a group's channels are combined.
    PyTorch's operator computes other images."""
    if not pays_in_channels_last(x, groups):
        return torch.group_norm(x, groups, weight, bias, eps)
    images, channels = x.shape[:2]
    y = torch.empty_like(x)
    pixels, results = (t.permute(0, 2, 3, 1).view(images, -1, channels) for t in (x, y))
    of_channels = [torch.batch_norm_stats(image, eps) for image in pixels]
    means, scales = (torch.stack(each).view(images * groups, -1) for each in zip(*of_channels, strict=True))
    between, means = torch.var_mean(means, 1, correction=0)
    # Each channel has `eps` in its variance.
    scales = scales.pow_(-2).mean(1).add_(between).rsqrt_()
    means, scales = (t.repeat_interleave(channels // groups).view(images, channels) for t in (means, scales))
    for image, result, mean, scale in zip(pixels, results, means, scales, strict=True):
        torch.batch_norm_elemt(image, weight, bias, mean, scale, 0.0, out=result)
    return y


_FORWARD = own_method(nn.GroupNorm, "forward")


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm`. If no gradient is recorded and an image on CUDA has few large groups, PyTorch's operators
    compute the groups in parts."""

    # Shape, type and device of the last image that was left to PyTorch's operator, which the next one is given sooner.
    _left: tuple[Any, ...] = ()

    __jit_ignored_attributes__ = ["_left"]

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        if nn.GroupNorm.forward is not _FORWARD or not isinstance(self, GroupNorm):
            # Somebody has replaced PyTorch's method, or `unpatch` has restored the class and somebody still holds this
            # one.
            return nn.GroupNorm.forward(self, input)
        return self._called(input)

    @torch.jit.unused
    def _called(self, input: Tensor) -> Tensor:
        # Otherwise there are properties in their place.
        parameters = self._parameters
        weight, bias = parameters.get("weight", MISSING), parameters.get("bias", MISSING)
        is_plain = weight is not MISSING and bias is not MISSING and is_plainly_called(input)
        if is_plain and (input.shape, input.dtype, input.device) == self._left:
            # Past what `F.group_norm` looks at.
            rest = self.num_groups, weight, bias, self.eps
            return torch.group_norm(input, *rest, torch._C._get_cudnn_enabled())
        if self._is_ours(input):
            return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        y = F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        if is_plain and not pays(input, self.num_groups):
            self.__dict__["_left"] = input.shape, input.dtype, input.device
        return y

    @torch.jit.unused
    def _is_ours(self, input: Tensor) -> bool:
        return (
            is_direct(input)
            and pays(input, self.num_groups)
            and torch._C._get_tracing_state() is None
            and not torch._C._is_any_autocast_enabled()
            and all(t is None or t.dtype in (input.dtype, torch.float32) for t in (self.weight, self.bias))
            and _native.is_plain(input, self.weight, self.bias)
        )
