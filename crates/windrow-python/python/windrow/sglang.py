"""SGLang's causal convolutions by Windrow.

    import windrow.sglang
    windrow.sglang.install()      # before the server starts

Its Triton functions are replaced when SGLang imports them. Calls with windows of drafts of their own
(`intermediate_conv_window`, `last_steps`) or trees of drafts (`retrieve_next_token`) still go to SGLang's.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from windrow import _native
from windrow._replace import replace, when_imported
from windrow.vllm import _activation, _flags

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "install"]

_MODULE = "sglang.srt.layers.attention.mamba.causal_conv1d_triton"

# SGLang's own, for what is not computed here.
_original_update: Callable[..., Tensor] | None = None


def install() -> None:
    """Puts the functions in place of SGLang's, once it imports them; what has imported them already gets these."""
    when_imported(_MODULE, _change)


def _change(module: ModuleType) -> None:
    global _original_update
    original = module.causal_conv1d_update
    functions: dict[str, Callable[..., Tensor]] = {
        "causal_conv1d_fn": causal_conv1d_fn,
        "causal_conv1d_update": causal_conv1d_update,
    }
    replace(module, functions)
    if original is not causal_conv1d_update:
        _original_update = original


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Sequence[int] | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int | None = -1,
    validate_data: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Packed prompts, or parts of prompts: `x` [dim, tokens] with states of a pool, walked on in place.

    The arguments are SGLang's. Without `has_initial_state` sequences begin with zeros. A negative index is padding,
    too; sequences that are padding and tokens behind the last sequence give zeros.
    """
    return _native.causal_conv1d_serving(
        x,
        "dl",
        conv_states,
        weight,
        bias,
        _activation(activation),
        query_start_loc,
        cache_indices,
        pad_slot_id,
        _flags(has_initial_state, x, query_start_loc.shape[0] - 1),
    )


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    *args: Any,
    pad_slot_id: int | None = -1,
    metadata: Any = None,
    validate_data: bool = False,
    **kwargs: Any,
) -> Tensor:
    """A step of decoding: `x` [batch, dim] or [batch, dim, tokens].

    The arguments are SGLang's; a negative index is padding, too. The result is a new tensor.
    """
    if cache_seqlens is not None or args or any(value is not None for value in kwargs.values()):
        if _original_update is None:
            raise NotImplementedError(
                "windows and trees of drafts are computed by SGLang's own causal_conv1d_update, which is not there"
            )
        return _original_update(
            x,
            conv_state,
            weight,
            bias,
            activation,
            cache_seqlens,
            conv_state_indices,
            *args,
            pad_slot_id=pad_slot_id,
            metadata=metadata,
            validate_data=validate_data,
            **kwargs,
        )
    return _native.causal_conv1d_serving(
        x,
        "bd" if x.dim() == 2 else "bdl",
        conv_state,
        weight,
        bias,
        _activation(activation),
        None,
        conv_state_indices,
        pad_slot_id,
    )
