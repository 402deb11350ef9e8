"""The counterpart of causal-conv1d's module of this name, with reference functions by PyTorch's operators alone."""

import torch
import torch.nn.functional as F
from torch import Tensor

from windrow.torch import causal_conv1d_fn, causal_conv1d_update

__all__ = ["causal_conv1d_fn", "causal_conv1d_ref", "causal_conv1d_update", "causal_conv1d_update_ref"]


def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`causal_conv1d_fn` by PyTorch's convolution, in the type of the weight."""
    before = weight.shape[1] - 1
    if initial_states is None:
        initial_states = x.new_zeros(*x.shape[:2], before)
    inputs = torch.cat([initial_states.to(x.dtype), x], -1)
    y = _convolved(inputs, weight, bias, activation)
    if not return_final_states:
        return y
    final_states = inputs[..., inputs.shape[-1] - before :]
    return y, final_states if final_states_out is None else final_states_out.copy_(final_states)


def causal_conv1d_update_ref(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """`causal_conv1d_update` by PyTorch's convolution, in the type of the weight. Changes `conv_state`."""
    steps = x.unsqueeze(-1) if x.dim() == 2 else x
    before, length = weight.shape[1] - 1, conv_state.shape[-1]
    if cache_seqlens is None:
        inputs = torch.cat([conv_state, steps.to(conv_state.dtype)], -1)
        conv_state.copy_(inputs[..., inputs.shape[-1] - length :])
        inputs = inputs[..., length - before :]
    else:
        # A ring buffer. Input number n is at position n % length.
        def places(first: int, last: int) -> Tensor:
            columns = cache_seqlens.long()[:, None] + torch.arange(first, last, device=x.device)
            return columns.remainder(length)[:, None].expand(-1, steps.shape[1], -1)

        inputs = torch.cat([conv_state.gather(2, places(-before, 0)), steps.to(conv_state.dtype)], -1)
        conv_state.scatter_(2, places(0, steps.shape[-1]), steps.to(conv_state.dtype))
    y = _convolved(inputs, weight, bias, activation).to(x.dtype)
    return y.squeeze(-1) if x.dim() == 2 else y


def _convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The convolution in the type of `inputs`, which include those before the first output."""
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"`activation` is {activation!r}, expected None, 'silu' or 'swish'")
    y = F.conv1d(inputs.to(weight.dtype), weight.unsqueeze(1), bias, groups=weight.shape[0])
    return (y if activation is None else F.silu(y)).to(inputs.dtype)
