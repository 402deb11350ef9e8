"""As the peer's module of this name."""

from windrow.torch import causal_conv1d_varlen_states

__all__ = ["causal_conv1d_varlen_states"]
