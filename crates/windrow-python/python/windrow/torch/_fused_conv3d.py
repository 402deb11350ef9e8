"""The convolution of a video with the frames before it, in an optimized model.

Windrow reads these frames where they lie. PyTorch's operator needs one tensor of all frames, so the problem to decide is
the convolution of that tensor.
"""

from typing import Any

import torch
from torch import Tensor

from windrow.torch._calls import goes_into_a_graph
from windrow.torch._fused import _conv, _fake, _Found, _layer
from windrow.torch._library import autocast, define, not_differentiable
from windrow.torch._precision import flags
from windrow.torch.choice.candidates import Windrow
from windrow.torch.choice.convolution import look_ahead, way
from windrow.torch.choice.problem import Options, is_laid_out_last, memory_format, output_shape


def _whole(x: Tensor, weight: Tensor, initial: Tensor | None, time_padding: str, dilation: Any) -> Tensor:
    """All frames in one tensor, which lies as x does."""
    frames = (weight.shape[2] - 1) * dilation[0]
    n, c, t, h, w = x.shape
    how: Any = {"dtype": x.dtype, "device": x.device, "memory_format": memory_format(x, x)}
    whole = torch.empty((n, c, t + frames, h, w), **how)
    whole[:, :, frames:] = x
    whole[:, :, :frames] = initial if initial is not None else x[:, :, :1] if time_padding == "causal_repeat" else 0
    return whole


def _kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, initial: Tensor | None, *how: Any
) -> Tensor:
    time_padding, *of, activation, accuracy, is_row_major = how
    options = Options(*of)
    if is_row_major and residual is not None:
        residual = residual.contiguous()

    def whole() -> Tensor:
        video = _whole(x, weight, initial, time_padding, options.dilation)
        return video.contiguous() if is_row_major else video

    layer = _layer(weight, bias, *of, activation, accuracy)

    def find() -> _Found:
        video = whole()
        look_ahead(video, layer.weight, options)
        decided = way(_conv(layer.weight, layer.bias, options, activation, accuracy), video, residual)
        return _Found(decided.run, decided.is_final)

    before = None if initial is None else (initial.shape, initial.stride())
    beside = None if residual is None else (residual.shape, residual.stride(), residual.dtype)
    of_video = x.shape, x.stride(), x.dtype, x.device, flags(x), goes_into_a_graph(x)
    seen = *of_video, beside, before, time_padding, is_row_major
    run: Any = layer._recall(seen, layer.weight, layer.bias, find).run
    if isinstance(run, Windrow):
        out = None
        if is_row_major:
            n, k, _, *size = output_shape(x, weight, options)
            out = x.new_empty((n, k, x.shape[2], *size))
        elif is_laid_out_last(x) and memory_format(x, x) is torch.contiguous_format:
            # The decision is about a row-major video, and the residual's layout.
            x = x.contiguous()
        return run(x, residual, out, time_padding=time_padding, initial_frames=initial)
    result: Tensor = run(whole(), residual)
    return result.contiguous() if is_row_major else result


def _fake_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, initial: Tensor | None, *how: Any
) -> Tensor:
    time_padding, *of, is_row_major = how
    y = _fake(_whole(x, weight, initial, time_padding, of[2]), weight, bias, residual, *of)
    return y.contiguous() if is_row_major else y


# `is_row_major`: x is in channels-last, but residual and result are row-major.
CONV3D_FUSED = define(
    "conv3d_fused(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? initial_frames, str time_padding,"
    " SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, str? activation, str? accuracy,"
    " bool is_row_major) -> Tensor",
    _kernel,
    _fake_kernel,
)
not_differentiable("conv3d_fused", instead="conv3d")
autocast(CONV3D_FUSED, lower_precision=[0, 1, 2, 3, 4])
