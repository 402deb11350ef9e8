"""The counterpart of causal-conv1d's module of this name, which mamba_ssm's own autograd functions call."""

import torch
from torch import Tensor

from windrow.torch import causal_conv1d_fn, causal_conv1d_update


def _activation(silu_activation: bool) -> str | None:
    return "silu" if silu_activation else None


def causal_conv1d_fwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> Tensor:
    """Forward pass; writes `final_states_out` if given."""
    result = causal_conv1d_fn(
        x,
        weight,
        bias,
        seq_idx,
        initial_states,
        return_final_states=final_states_out is not None,
        final_states_out=final_states_out,
        activation=_activation(silu_activation),
    )
    return result if final_states_out is None else result[0]


def causal_conv1d_bwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and initial_states; the first is written to `dx` if given."""
    needs = [True, True, bias is not None, return_dinitial_states]
    new_dx, dweight, dbias, dinitial_states = torch.ops.windrow.causal_conv1d_backward(
        dout,
        dfinal_states,
        x,
        weight,
        bias,
        initial_states,
        seq_idx,
        None,
        _activation(silu_activation),
        needs,
    )
    return (
        new_dx if dx is None else dx.copy_(new_dx),
        dweight,
        dbias if needs[2] else None,
        dinitial_states if needs[3] else None,
    )


def causal_conv1d_update_function(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    """One or more decode steps."""
    return causal_conv1d_update(
        x,
        conv_state,
        weight,
        bias,
        _activation(silu_activation),
        cache_seqlens,
        conv_state_indices,
    )
