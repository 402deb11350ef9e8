"""Layers whose `forward` takes the place of that of a layer or function of transformers.

Their names are those by which transformers asks for them. Such a layer has nothing of its own but `forward`, and the
two flags that `kernels` knows.
"""

from typing import Any

from torch import Tensor, nn

from . import _causal_conv1d
from ._gelu import gelu_of_any

__all__ = ["GeLU", "GeluTanh", "causal_conv1d_fn", "causal_conv1d_update"]

# What a caller may hand on beside the arguments that every model gives.
_OPTIONS = ("seq_idx", "initial_states", "return_final_states", "final_states_out")


class causal_conv1d_fn(nn.Module):
    """Whole sequences; packed ones are told apart by `seq_idx`."""

    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
        return _causal_conv1d.causal_conv1d_fn(hidden_states, weight, bias, activation=activation, **options)


class causal_conv1d_update(nn.Module):
    """The next token; `conv_state` is updated in place."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        return _causal_conv1d.causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)


class GeLU(nn.Module):
    """As `nn.GELU()`."""

    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu_of_any(input)


class GeluTanh(nn.Module):
    """As `nn.GELU("tanh")`, of which transformers has other forms too."""

    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu_of_any(input, "tanh")
