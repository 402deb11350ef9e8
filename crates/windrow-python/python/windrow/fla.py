"""Windrow's causal convolution as a backend of flash-linear-attention.

    import windrow.fla
    windrow.fla.register()

After that, Windrow computes fla's short convolutions (`ShortConvolution`, `causal_conv1d` and what uses them): forward
passes, backward passes and decoding, on CUDA devices and, if fla runs there, on the CPU. With `FLA_WINDROW=0` fla
computes them itself. fla's layout is [batch, time, channels]. Its states are [sequences, channels, width]: the last
inputs, oldest first. A residual is added after the activation.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from windrow import _native
from windrow.torch import causal_conv1d_update as _update
from windrow.torch._causal_conv1d import as_computed, as_given

_Activation = Literal["silu", "swish"] | None


def register() -> None:
    """Adds Windrow to the backends of fla's modules, before fla's own kernels. Needs flash-linear-attention."""
    from fla.modules.backends import modules_registry  # type: ignore[import-not-found]
    from fla.ops.backends import BaseBackend  # type: ignore[import-not-found]

    class WindrowBackend(_Functions, BaseBackend):  # type: ignore[misc]
        backend_type = "windrow"
        package_name = "windrow"
        env_var = "FLA_WINDROW"
        priority = 1

    modules_registry.register(WindrowBackend())


class _Functions:
    """The functions that fla dispatches, with its signatures; a `_verifier` says which calls are left to fla."""

    def causal_conv1d_fwd_verifier(
        self, x: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[bool, str | None]:
        if weight is None:
            return False, "a convolution without a weight"
        return True, None

    def causal_conv1d_fwd(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        activation: _Activation = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        shape = x.shape
        x = _three(x, weight, cu_seqlens)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _native.causal_conv1d(
            x.transpose(1, 2),
            *as_computed(x, weight, bias),
            activation=activation,
            cu_seqlens=cu_seqlens,
            initial_states=_before(initial_state, x),
            out=y.transpose(1, 2),
        )
        y = y.view(shape)
        if residual is not None:
            y += residual.reshape(shape)
        final_state = None
        if output_final_state:
            final_state = self.causal_conv1d_update_states(
                x, weight.shape[1], initial_state, cu_seqlens
            )
        return y, final_state

    causal_conv1d_bwd_verifier = causal_conv1d_fwd_verifier

    def causal_conv1d_bwd(
        self,
        x: Tensor,
        dy: Tensor,
        dht: Tensor | None,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        initial_state: Tensor | None = None,
        activation: _Activation = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        shape = x.shape
        x, width = _three(x, weight, cu_seqlens), weight.shape[1]
        needs = (True, True, bias is not None, initial_state is not None)
        dx, dw, db, dinitial = _native.causal_conv1d_backward(
            _three(dy, weight, cu_seqlens).transpose(1, 2),
            _before(dht, x),
            x.transpose(1, 2),
            *as_computed(x, weight, bias),
            activation,
            None,
            cu_seqlens,
            _before(initial_state, x),
            needs,
        )
        dw, db, dinitial = as_given((dw, db, dinitial), (weight, bias, initial_state))
        assert dx is not None
        dx = dx.transpose(1, 2).contiguous()
        dh0 = None
        if dinitial is not None:
            # No tap of the filter reads the oldest column.
            dh0 = torch.cat([dinitial.new_zeros(*dinitial.shape[:2], 1), dinitial], -1)
        if dht is not None:
            _add_oldest(dht[..., 0], dx, dh0, width, cu_seqlens)
        return dx.reshape(shape), dw, db, dy if residual is not None else None, dh0

    def causal_conv1d_update_states(
        self,
        x: Tensor,
        state_len: int,
        initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """The last `state_len` inputs of each sequence, after those of its initial state."""
        x = x.reshape(-1, x.shape[-1]) if cu_seqlens is not None else x
        rows, inside = _last(x, state_len, cu_seqlens)
        sequences = torch.arange(rows.shape[0], device=x.device)[:, None]
        if cu_seqlens is not None:
            state = x[rows.clamp(min=0)]
        else:
            state = x[sequences, rows.clamp(min=0)]
        if initial_state is None:
            state = state.masked_fill(~inside[..., None], 0)
        else:
            # What is before the first token by i is column `state_len - i` of the initial state.
            first = 0 if cu_seqlens is None else cu_seqlens[:-1, None].long()
            column = (rows - first + state_len).clamp(0, state_len - 1)
            earlier = initial_state.transpose(1, 2)[sequences, column]
            state = torch.where(inside[..., None], state, earlier)
        return state.transpose(1, 2).contiguous().to(x.dtype)

    causal_conv1d_update_verifier = causal_conv1d_fwd_verifier

    def causal_conv1d_update(
        self,
        x: Tensor,
        cache: Tensor,
        residual: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        activation: _Activation = None,
    ) -> tuple[Tensor, Tensor]:
        assert weight is not None
        shape = x.shape
        y = _update(x.reshape(-1, weight.shape[0]), cache, weight, bias, activation)
        if residual is not None:
            y += residual.reshape(y.shape)
        return y.view(shape), cache


def _three(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The tensor x as [batch, time, channels]: fla allows channels of several dimensions, and sequences packed over a
    batch."""
    x = x if x.shape[-1] == weight.shape[0] else x.flatten(2)
    return x if cu_seqlens is None else x.reshape(1, -1, x.shape[-1])


def _before(state: Tensor | None, x: Tensor) -> Tensor | None:
    """The part of a state that the filter reads: all but its oldest column, in the type of x."""
    return None if state is None else state[..., 1:].to(x.dtype)


def _last(x: Tensor, length: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows of the last `length` tokens of each sequence [sequences, length], and which of them exist."""
    back = torch.arange(-length, 0, device=x.device)
    if cu_seqlens is None:
        rows = (back + x.shape[1]).expand(x.shape[0], -1)
        return rows, rows >= 0
    rows = cu_seqlens[1:, None].long() + back
    return rows, rows >= cu_seqlens[:-1, None]


def _add_oldest(
    dstate: Tensor, dx: Tensor, dh0: Tensor | None, width: int, cu_seqlens: Tensor | None
) -> None:
    """Adds the gradient of the final states' oldest column to the token, or to the initial state, from which the column
    comes."""
    flat = dx.view(-1, dx.shape[-1])
    rows, inside = _last(dx, width, cu_seqlens)
    rows, inside = rows[:, 0], inside[:, 0]
    if cu_seqlens is None:
        lengths = torch.full_like(rows, dx.shape[1])
        rows = rows + torch.arange(len(rows), device=dx.device) * dx.shape[1]
    else:
        lengths = cu_seqlens.diff().long()
    given = torch.where(inside[:, None], dstate, 0).to(dx.dtype)
    flat.index_add_(0, rows.clamp(min=0), given)
    if dh0 is not None:
        column = lengths.clamp(max=width - 1)
        kept = torch.where(inside[:, None], 0, dstate).to(dh0.dtype)
        dh0[torch.arange(len(column), device=dx.device), :, column] += kept
