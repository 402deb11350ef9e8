"""The counterpart of causal-conv1d's module of this name."""

import torch
from torch import Tensor

from windrow.torch import causal_conv1d_varlen_states

__all__ = ["causal_conv1d_varlen_states", "causal_conv1d_varlen_states_ref"]


def causal_conv1d_varlen_states_ref(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """`causal_conv1d_varlen_states`, sequence by sequence."""
    bounds = cu_seqlens.tolist()
    states = x.new_zeros(len(bounds) - 1, x.shape[1], state_len)
    for state, first, last in zip(states, bounds, bounds[1:], strict=False):
        kept = min(state_len, last - first)
        state[:, state_len - kept :] = x[last - kept : last].T
    return states
