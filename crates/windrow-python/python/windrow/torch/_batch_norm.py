"""Batch normalisation: faster training on CUDA for few long channels, and a call of PyTorch's operator with less
overhead in inference.

PyTorch sums each channel of a row-major batch in one block, so 64 channels leave half of a device idle. That takes a
tenth of a training step of VGG-11 or ResNet-18. Here a reduction over many blocks computes the statistics. The backward
pass sums each image's part of a channel by itself, with PyTorch's operators for batches on several devices.
"""

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn

from windrow.torch._calls import MISSING, is_direct, is_ordinary, is_plainly_called
from windrow.torch._replaced import own_method
from windrow.torch._group_norm import multiprocessors

# A channel of so many bytes takes PyTorch twice as long as its parts, on an H100. Of shorter ones the device gains less than
# the interpreter, which calls more operators, loses.
_LONG = 3 << 19


def _pays(x: Tensor) -> bool:
    if not x.is_cuda or x.dim() != 4 or not x.is_contiguous():
        return False
    channels, device = x.shape[1], multiprocessors(x.device)
    return 0 < channels <= device and x.nbytes >= _LONG * channels and x.shape[0] * channels >= 2 * device


class _InParts(torch.autograd.Function):
    """The function y = (x - mean) / sqrt(var + eps) * weight + bias with the mean and variance of the batch, for x [n,
    c, h, w]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
    ) -> Tensor:
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        invstd = var.add(eps).rsqrt_()
        running_mean, running_var = running
        if running_mean is not None and running_var is not None:
            count = x.numel() // x.shape[1]
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(var.mul_(count / (count - 1)), momentum)
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.eps = eps
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        needs, dy = ctx.needs_input_grad[:3], grads[0].contiguous()
        if torch.is_grad_enabled():
            # Gradients of these gradients are wanted.
            saved = None, None, mean, invstd, True, ctx.eps, needs
            return *torch.ops.aten.native_batch_norm_backward(dy, x, weight, *saved), None, None, None
        parts = x.shape[:2]
        dy_parts, x_parts = (t.view(1, parts.numel(), -1) for t in (dy, x))
        of_parts = (t.expand(parts).reshape(-1) for t in (mean, invstd))
        sums = torch.batch_norm_backward_reduce(dy_parts, x_parts, *of_parts, None, True, False, False)
        sum_dy, sum_dy_xmu = (t.view(parts).sum(0) for t in sums[:2])
        dx = dweight = None
        if needs[0]:
            count = torch.full((1,), x.numel() // x.shape[1], dtype=torch.int32, device=x.device)
            dx = torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count)
        if needs[1]:
            dweight = sum_dy_xmu * invstd
        return dx, dweight, sum_dy if needs[2] else None, None, None, None


_FORWARD = own_method(nn.BatchNorm2d, "forward")


class BatchNorm2d(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, faster in two cases; PyTorch's operators compute both.

    In training, a contiguous NCHW batch on CUDA with few long channels is computed in parts. In inference the operator
    is called with less overhead.
    """

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return self._scripted(input)
        if nn.BatchNorm2d.forward is not _FORWARD or not isinstance(self, BatchNorm2d):
            # Somebody has replaced PyTorch's method, or `unpatch` has restored the class and somebody still holds this
            # one.
            return nn.BatchNorm2d.forward(self, input)
        return self._called(input)

    @torch.jit.unused
    def _called(self, input: Tensor) -> Tensor:
        if self.training:
            return self._in_parts(input) if self._is_ours(input) else super().forward(input)
        if is_plainly_called(input) and input.dim() == 4:
            # This takes less time than PyTorch's own module, because nothing is looked up as an attribute.
            parameters, buffers = self._parameters, self._buffers
            weight, bias = parameters.get("weight", MISSING), parameters.get("bias", MISSING)
            mean, var = buffers.get("running_mean"), buffers.get("running_var")
            if weight is not MISSING and bias is not MISSING and mean is not None and var is not None and self.eps >= 0:
                own = weight, bias, mean, var
                return torch.batch_norm(input, *own, False, 0.0, self.eps, torch._C._get_cudnn_enabled())
        return super().forward(input)

    def _scripted(self, input: Tensor) -> Tensor:
        """PyTorch's `forward`, repeated because TorchScript does not find it in a base class."""
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        is_tracked = not self.training or self.track_running_stats
        mean, var = self.running_mean if is_tracked else None, self.running_var if is_tracked else None
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        return F.batch_norm(input, mean, var, self.weight, self.bias, of_batch, factor, self.eps)

    @torch.jit.unused
    def _in_parts(self, input: Tensor) -> Tensor:
        running = None, None
        if self.track_running_stats:
            running = self.running_mean, self.running_var
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        y: Tensor = _InParts.apply(input, self.weight, self.bias, running, self.momentum, self.eps)
        return y

    @torch.jit.unused
    def _is_ours(self, input: Tensor) -> bool:
        # The most frequent reason for False comes first.
        if not self.training or input.dtype is not torch.float32 or self.momentum is None:
            return False
        if not is_direct(input) or not _pays(input):
            return False
        own = (self.weight, self.bias, self.running_mean, self.running_var)
        return (
            all(t is None or is_ordinary(t) and t.dtype is torch.float32 and t.device == input.device for t in own)
            and torch._C._len_torch_dispatch_stack() == 0
            and torch._C._get_tracing_state() is None
            and forward_ad._current_level < 0
        )
