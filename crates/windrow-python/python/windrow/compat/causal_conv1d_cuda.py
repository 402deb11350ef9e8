"""A drop-in replacement of `causal_conv1d_cuda`, causal-conv1d's extension, which mamba_ssm up to 2.2.4 calls.

In causal-conv1d 1.5.1 and later, its functions write to a result that the caller passes. In earlier versions they
return the result. The functions here do both.
"""

from typing import Any

from torch import Tensor

from windrow.compat.causal_conv1d.cpp_functions import (
    causal_conv1d_bwd_function,
    causal_conv1d_fwd_function,
    causal_conv1d_update_function,
)

__all__ = ["causal_conv1d_bwd", "causal_conv1d_fwd", "causal_conv1d_update"]


def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    *rest: Any,
) -> Tensor | None:
    """The forward pass. `rest`: in the newer form the result to write to; then `final_states_out`, which is written if
    it is not None; then whether SiLU follows."""
    *out, final_states_out, silu = rest
    y = causal_conv1d_fwd_function(x, weight, bias, seq_idx, initial_states, final_states_out, silu)
    return _returned(y, *out)


def causal_conv1d_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor | None,
    *rest: Any,
) -> tuple[Tensor | None, ...] | None:
    """The backward pass. `rest`: in the older form whether the gradient of `initial_states` is wanted, in the newer
    form the gradients of weight, bias and initial states to write to; then whether SiLU follows."""
    *wanted, silu = rest
    of_states = wanted[-1] if len(wanted) == 1 else wanted[-1] is not None
    tensors = (x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx)
    grads = causal_conv1d_bwd_function(*tensors, of_states, silu)
    if len(wanted) == 1:
        return grads
    for grad, out in zip(grads[1:], wanted, strict=True):
        _returned(grad, out)
    return None


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> Tensor | None:
    """One or more steps of decoding. `rest`: in the newer form the result to write to; then whether SiLU follows,
    `cache_seqlens` and `conv_state_indices`."""
    *out, silu, cache_seqlens, indices = rest
    y = causal_conv1d_update_function(x, conv_state, weight, bias, silu, cache_seqlens, indices)
    return _returned(y, *out)


def _returned(result: Tensor | None, out: Tensor | None = None) -> Tensor | None:
    """The result, or None if it is written to `out`."""
    if out is None:
        return result
    if result is not None:
        out.copy_(result)
    return None
