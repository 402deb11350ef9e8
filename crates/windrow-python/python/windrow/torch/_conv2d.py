"""Two-dimensional convolution."""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from windrow import _native
from windrow.torch._gelu import gelu
from windrow.torch._library import (
    autocast,
    call,
    define,
    differentiable,
    fake_gradients,
    or_empty,
    or_none,
)

# Packed filters of parameters, for as long as these live. Keyed by the parameter and not held by a
# module, so that they serve compiled graphs too, which call the operator without the module.
_filters = WeakIdKeyDictionary()


def _cached_filters(weight: Tensor) -> tuple[_native.FilterCache, int] | None:
    """Where filters packed from `weight` are kept, and its version; None if it is no long-lived
    tensor or does not count its changes."""
    if not isinstance(weight, nn.Parameter) or weight.is_inference() or _some_model_is_sharded():
        return None
    cache = _filters.get(weight)
    if cache is None:
        cache = _filters[weight] = _native.FilterCache()
    # In-place changes count in `_version`; assigning to `.data` changes the address instead.
    return cache, hash((weight._version, weight.data_ptr()))


def _some_model_is_sharded() -> bool:
    """True once `fully_shard` was used in this process. It gathers weights into parameters without
    counting that as a change, often to the address that they had before."""
    # It makes a subclass for every class of modules that it shards.
    module = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return module is not None and bool(module.__subclasses__())


def _kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str | None,
    accuracy: str | None,
    algorithm: str | None,
) -> Tensor:
    return _native.conv2d(
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
        filters=_cached_filters(weight),
    )


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str | None,
    accuracy: str | None,
    algorithm: str | None,
) -> Tensor:
    size = [
        (n + 2 * p - d * (r - 1) - 1) // s + 1
        for n, p, d, r, s in zip(
            x.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True
        )
    ]
    channels_last = x.shape[1] > 1 and x.stride(1) < x.stride(3)
    return torch.empty(
        [x.shape[0], weight.shape[0], *size],
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )


def _backward_kernel(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    accuracy: str | None,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    if 0 in dy.stride():
        # A broadcast gradient, as that of a sum: plans want an element of memory for each.
        dy = dy.contiguous()
    grads = _native.conv2d_backward(
        dy, x, weight, bias, stride, padding, dilation, groups, accuracy, tuple(needs)
    )
    return or_empty(dy, grads)


_conv2d = define(
    "conv2d(Tensor x, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, SymInt groups, str? activation, str? accuracy, str? algorithm) -> Tensor",
    _kernel,
    _fake,
)
_conv2d_backward = define(
    "conv2d_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, SymInt[] stride,"
    " SymInt[] padding, SymInt[] dilation, SymInt groups, str? accuracy, bool[] needs)"
    " -> (Tensor, Tensor, Tensor)",
    _backward_kernel,
    lambda dy, x, weight, bias, stride, padding, dilation, groups, accuracy, needs: fake_gradients(
        [x, weight, bias], needs, dy
    ),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.options, activation, ctx.accuracy, _algorithm = inputs
    # PyTorch before 2.5 comes here even where nothing requires a gradient.
    if activation is not None and any(ctx.needs_input_grad):
        raise NotImplementedError(
            "windrow::conv2d has no gradient through a fused activation; windrow.torch.conv2d "
            "applies it on its own where a gradient is needed"
        )
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    grads = _conv2d_backward(dy, *ctx.saved_tensors, *ctx.options, ctx.accuracy, needs)
    return *or_none(grads, needs), *[None] * 7


differentiable("conv2d", _setup_context, _backward)
autocast(_conv2d, lower_precision=[0, 1, 2])

_ACTIVATIONS = {
    "identity": lambda y: y,
    "none": lambda y: y,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": gelu,
    "gelu_tanh": lambda y: gelu(y, "tanh"),
}


def _pair(value: int | tuple[int, int] | list[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _named_padding(
    name: str, x: Tensor, weight: Tensor, stride: list[int], dilation: list[int]
) -> tuple[Tensor, list[int]]:
    """"valid" and "same" as PyTorch has them; "same" pads one more at the end if it must."""
    if name == "valid":
        return x, [0, 0]
    if name != "same":
        raise ValueError(f"`padding` is {name!r}, expected numbers, 'valid' or 'same'")
    if stride != [1, 1]:
        raise ValueError("`padding` is 'same', expected stride 1")
    total = [d * (r - 1) for d, r in zip(dilation, weight.shape[2:], strict=True)]
    if total[0] % 2 or total[1] % 2:
        x = F.pad(x, (0, total[1] % 2, 0, total[0] % 2))
    return x, [n // 2 for n in total]


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    accuracy: str | None = None,
    algorithm: str | None = None,
) -> Tensor:
    """`torch.nn.functional.conv2d`, by Winograd where filter and stride allow.

    input: [n, c, h, w] or [c, h, w], f32, f16 or bf16, any strides; weight: [k, c / groups, r, s].
    activation: None, "relu", "silu", "gelu" or "gelu_tanh", applied to the result.
    accuracy: "exact" (no Winograd), "fp32", "tf32" or "half"; None is "fp32", or "tf32" on CUDA
    where PyTorch's own convolutions may use it (`torch.backends.cudnn.allow_tf32`).
    algorithm: one of `windrow.Conv2dPlan.algorithms`; None lets the planner choose.

    The packed form of an `nn.Parameter` is kept until the parameter changes; changes through
    `weight.data` in place are not seen.
    """
    if input.dim() == 3:
        options = {"activation": activation, "accuracy": accuracy, "algorithm": algorithm}
        x = input.unsqueeze(0)
        return conv2d(x, weight, bias, stride, padding, dilation, groups, **options).squeeze(0)
    stride, dilation = _pair(stride), _pair(dilation)
    if isinstance(padding, str):
        input, padding = _named_padding(padding, input, weight, stride, dilation)
    else:
        padding = _pair(padding)
    if accuracy is None and input.is_cuda and torch.backends.cudnn.allow_tf32:
        accuracy = "tf32"
    after = None
    if activation is not None and torch.is_grad_enabled():
        if input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad):
            after, activation = _ACTIVATIONS.get(activation), None
            if after is None:
                raise ValueError(f"`activation` is {activation!r}, expected one of {[*_ACTIVATIONS]}")
    args = (stride, padding, dilation, groups, activation, accuracy, algorithm)
    y = call(_conv2d, _kernel, (input, weight, bias), *args)
    return y if after is None else after(y)


class Conv2d(nn.Conv2d):
    """`torch.nn.Conv2d`, computed by Windrow. Options of `conv2d` that are no options of
    `torch.nn.Conv2d` are attributes: `activation`, `accuracy`, `algorithm`."""

    activation: str | None = None
    accuracy: str | None = None
    algorithm: str | None = None

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        return conv2d(
            input,
            weight,
            bias,
            self.stride,
            padding,
            self.dilation,
            self.groups,
            activation=self.activation,
            accuracy=self.accuracy,
            algorithm=self.algorithm,
        )
