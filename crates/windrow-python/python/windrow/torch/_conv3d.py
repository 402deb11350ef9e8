"""Convolutions of videos and volumes, on the CPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from windrow import _native
from windrow.torch._activations import activation_of
from windrow.torch._conv2d import CHANGING, FROZEN, KEPT, _each, _named_padding
from windrow.torch._filters import kept_with
from windrow.torch._library import (
    autocast,
    call,
    define,
    differentiable,
    fake_gradients,
    or_empty,
    or_none,
    with_input,
)
from windrow.torch.choice.gradients import laid_out_like


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    stride, padding, dilation, groups, activation, accuracy, algorithm, filter = how
    filters = None if filter == CHANGING else kept_with(weight, filter == FROZEN)()
    try:
        return _native.conv3d(
            x,
            weight,
            bias,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            activation=activation,
            accuracy=accuracy,
            algorithm=algorithm,
            filters=filters,
        )
    except (ValueError, TypeError) as error:
        raise with_input(error) from None


def _aten(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    stride, padding, dilation, groups, activation = how[:5]
    return activation_of(activation)(torch.conv3d(x, weight, bias, stride, padding, dilation, groups))


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    shape = _aten(x, weight, bias, *how[:4], None).shape
    is_last = x.shape[1] > 1 and x.stride(1) < x.stride(-1)
    layout = torch.channels_last_3d if is_last else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


def _backward_kernel(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> tuple[Tensor, ...]:
    stride, padding, dilation, groups, needs = how
    tensors = (dy, x, weight)
    if dy.dtype in (torch.float16, torch.bfloat16):
        # PyTorch sums a filter's gradient over videos in the type itself where oneDNN does not compute it.
        tensors = tuple(tensor.float() for tensor in tensors)
    sizes = None if bias is None else list(bias.shape)
    options = (stride, padding, dilation, False, [0, 0, 0], groups)
    grads = torch.ops.aten.convolution_backward(*tensors, sizes, *options, list(needs))
    of = (x, weight, bias)
    given = zip(grads, of, needs, strict=True)
    return or_empty(dy, [laid_out_like(t, g.to(t.dtype)) if t is not None and needed else None for g, t, needed in given])


_CONV3D = define(
    "conv3d(Tensor x, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, SymInt groups, str? activation, str? accuracy, str? algorithm, str filter)"
    " -> Tensor",
    _kernel,
    _fake,
)
_conv3d_backward = define(
    "conv3d_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, SymInt[] stride,"
    " SymInt[] padding, SymInt[] dilation, SymInt groups, bool[] needs) -> (Tensor, Tensor, Tensor)",
    _backward_kernel,
    lambda dy, x, weight, bias, *rest: fake_gradients([x, weight, bias], rest[-1], dy),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.options, activation, _accuracy, _algorithm, _filter = inputs
    # PyTorch before 2.5 comes here even where nothing requires a gradient.
    if activation is not None and any(ctx.needs_input_grad):
        raise NotImplementedError(
            "windrow::conv3d has no gradient through a fused activation; windrow.torch.conv3d "
            "applies it on its own where a gradient is needed"
        )
    ctx.save_for_backward(x, weight)
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    # Only the bias's size and type matter.
    bias = None if ctx.bias is None else dy.new_empty(ctx.bias[0], dtype=ctx.bias[1])
    grads = call(_conv3d_backward, _backward_kernel, (dy, *ctx.saved_tensors, bias), *ctx.options, needs)
    return *or_none(grads, needs), *[None] * 8


differentiable(_CONV3D, _kernel, _setup_context, _backward)
autocast(_CONV3D, lower_precision=[0, 1, 2])


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    accuracy: str | None = None,
    algorithm: str | None = None,
    frozen: bool = False,
) -> Tensor:
    """`torch.nn.functional.conv3d`, computed by Windrow on the CPU. Gradients are PyTorch's.

    input: [n, c, t, h, w] or [c, t, h, w], f32, f16 or bf16, any strides; weight: [k, c / groups, kt, r, s].
    activation: None, "relu", "relu6", "silu", "gelu" or "gelu_tanh", applied to the result.
    accuracy: "exact" (no Winograd), "fp32", "tf32" or "half"; None means "fp32".
    algorithm: the name of an algorithm; None lets the cost model choose.

    The packed form of a filter is kept as `windrow.torch.conv2d` keeps it; for `frozen` see there too. Tensors on a GPU
    are refused with NotImplementedError.
    """
    tensors = (input, weight, bias)
    how = {"activation": activation, "accuracy": accuracy, "algorithm": algorithm, "frozen": frozen}
    if has_torch_function(tensors):
        return handle_torch_function(conv3d, tensors, *tensors, stride, padding, dilation, groups, **how)
    if input.dim() == 4:
        args = (weight, bias, stride, padding, dilation, groups)
        return conv3d(input.unsqueeze(0), *args, **how).squeeze(0)
    stride, dilation = _each("stride", stride, 3), _each("dilation", dilation, 3)
    if isinstance(padding, str):
        input, padding = _named_padding(padding, input, weight, stride, dilation)
    else:
        padding = _each("padding", padding, 3)
    of_filter = torch.is_grad_enabled() and weight.requires_grad
    after = None
    if activation is not None and torch.is_grad_enabled():
        if of_filter or input.requires_grad or (bias is not None and bias.requires_grad):
            after, activation = activation_of(activation), None
    changing = of_filter and torch._C._get_tracing_state() is None
    filter = CHANGING if changing else FROZEN if frozen else KEPT
    rest = (stride, padding, dilation, groups, activation, accuracy, algorithm, filter)
    y = call(_CONV3D, _kernel, (input, weight, bias), *rest, aten=_aten)
    return y if after is None else after(y)
