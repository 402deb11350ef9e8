"""Convolutions of videos and volumes."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from windrow.torch._conv2d import _accuracy, _convolved, _each, _named_padding
from windrow.torch.choice.problem import Options


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
    batch_invariant: bool = False,
    frozen: bool = False,
) -> Tensor:
    """`torch.nn.functional.conv3d`, computed by Windrow. Gradients are PyTorch's.

    input: [n, c, t, h, w] or [c, t, h, w], f32, f16 or bf16, any strides; weight: [k, c / groups, kt, r, s].
    The options are those of `conv2d`.
    """
    tensors = (input, weight, bias)
    accuracy = _accuracy(accuracy, algorithm, batch_invariant)
    how: dict[str, Any] = {"activation": activation, "accuracy": accuracy, "algorithm": algorithm, "frozen": frozen}
    if has_torch_function(tensors):
        return handle_torch_function(conv3d, tensors, *tensors, stride, padding, dilation, groups, **how)
    if input.dim() == 4:
        args = (weight, bias, stride, padding, dilation, groups)
        return conv3d(input.unsqueeze(0), *args, **how).squeeze(0)
    if input.dim() != 5 or weight.dim() != 5:
        dims = f"{input.dim()} and {weight.dim()}"
        raise ValueError(f"`input` and `weight` have {dims} dimensions, expected 5 (or 4 of `input`)")
    stride, dilation = _each("stride", stride, 3), _each("dilation", dilation, 3)
    if isinstance(padding, str):
        input, padding = _named_padding(padding, input, weight, stride, dilation)
    else:
        padding = _each("padding", padding, 3)
    return _convolved(input, weight, bias, Options(stride, padding, dilation, groups), **how)
