"""SGLang's causal convolutions by Windrow.

    import windrow.sglang
    windrow.sglang.install()      # before the server starts

SGLang's Triton functions are replaced when SGLang imports them. They compute prompts, decoding steps, drafts with the
window after each, and trees of drafts.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from windrow import _native
from windrow._replace import has_parameters_of, replace, when_imported
from windrow._split import new_outputs, norm_of
from windrow.vllm import _activation, _beside, _first, _flags

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "install"]

# Where SGLang 0.5.6 and 0.5.23 have them.
_MODULES = (
    "sglang.srt.layers.attention.mamba.causal_conv1d_triton",
    "sglang.kernels.ops.mamba.causal_conv1d_triton",
)


def install() -> None:
    """Replaces SGLang's functions by these when it imports them, also in modules that have imported them already.

    A function is not replaced if it has parameters that are not known here.
    """
    for name in _MODULES:
        when_imported(name, _change)


def _change(module: ModuleType) -> None:
    functions: dict[str, Callable[..., Tensor]] = {
        "causal_conv1d_fn": causal_conv1d_fn,
        "causal_conv1d_update": causal_conv1d_update,
    }
    held = {name: f for name, f in functions.items() if hasattr(module, name)}
    replace(module, {name: f for name, f in held.items() if has_parameters_of(f, getattr(module, name))})


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
    block_table: Tensor | None = None,
    split: Sequence[int] | None = None,
    norm_head: int | None = None,
    norm_eps: float = 1e-6,
    **kwargs: Any,
) -> Any:
    """Packed prompts, or parts of prompts: `x` [dim, tokens] with states of a pool, updated in place.

    The arguments are SGLang's. Without `has_initial_state` sequences begin with zeros. A negative index is padding.
    Padding sequences and tokens behind the last sequence give zeros. There may be more indices than sequences.
    `block_table` is for Triton's programs and ignored.

    split: one to three numbers of channels whose sum is dim. The result is then a tuple of tensors [channels, tokens]
    with these channels, in place of one that is split behind the call.
    norm_head: with `split`, the number of channels of a head. Each head of the first two outputs is divided by
    sqrt(sum of squares + norm_eps), in place of a kernel of this L2 norm behind the call.
    """
    sequences = query_start_loc.shape[0] - 1
    if weight.dtype != x.dtype or bias is not None and bias.dtype != x.dtype:
        weight, bias = _beside(x, weight, bias)
    outputs = () if split is None else new_outputs(x, "dl", split)
    y = _native.causal_conv1d_serving(
        x,
        "dl",
        conv_states,
        weight,
        bias,
        _activation(activation),
        query_start_loc,
        _first(cache_indices, sequences),
        pad_slot_id,
        _flags(_first(has_initial_state, sequences), x, sequences),
        None,
        None,
        None,
        None,
        None,
        0,
        None,
        None,
        None,
        None,
        None,
        None if norm_head is None else norm_of(norm_head, norm_eps, split),
        *outputs,
    )
    return outputs or y


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: None = None,
    conv_state_indices: Tensor | None = None,
    *,
    num_accept_tokens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int | None = -1,
    metadata: Any = None,
    validate_data: bool = False,
    split: Sequence[int] | None = None,
    norm_head: int | None = None,
    norm_eps: float = 1e-6,
) -> Any:
    """A step of decoding: `x` [batch, dim] or [batch, dim, tokens].

    The arguments are SGLang's. `num_accepted_tokens` is the older name of `num_accept_tokens`. A negative index is
    padding, whose result is zeros. `cache_seqlens` must be None, because SGLang's own function ignores it. The result
    is a new tensor; with `split` a tuple of them, as of `causal_conv1d_fn`.

    intermediate_conv_window: [slots, tokens, dim, width - 1]; the window after each token is written to it, in the slot
    that intermediate_state_indices [batch] names. By default these are conv_state_indices.
    retrieve_next_token, retrieve_next_sibling: [batch, tokens]; for each token of a tree its first child, and the next
    child of its parent; -1 for none. retrieve_parent_token: [batch, tokens]; the parent of each token is written to it.
    """
    if cache_seqlens is not None:
        raise ValueError("`cache_seqlens` is given, expected None: states are not ring buffers here")
    if weight.dtype != x.dtype or bias is not None and bias.dtype != x.dtype:
        weight, bias = _beside(x, weight, bias)
    # `len` of a tensor is a function in Python.
    batch = x.shape[0]
    slots = intermediate_state_indices
    if intermediate_conv_window is not None and slots is None:
        slots = conv_state_indices
    tree = (retrieve_next_token, retrieve_next_sibling, retrieve_parent_token)
    if tree != (None, None, None):
        tree = tuple(_first(links, batch) for links in tree)
    order = "bd" if x.dim() == 2 else "bdl"
    # PyTorch's own function costs a small step less than what the library does without one.
    outputs: tuple[Tensor | None, ...] = (torch.empty_like(x) if x.is_cuda else None,)
    if split is not None:
        outputs = new_outputs(x, order, split)
    # What a small step does here takes as long as what it does below: nothing is called for what is not given.
    y = _native.causal_conv1d_serving(
        x,
        order,
        conv_state,
        weight,
        bias,
        activation if activation == "silu" else _activation(activation),
        None,
        _first(conv_state_indices, batch),
        pad_slot_id,
        None,
        num_accepted_tokens if num_accept_tokens is None else num_accept_tokens,
        None,
        None,
        None,
        None,
        0,
        intermediate_conv_window,
        None if slots is None else _first(slots, batch),
        *tree,
        None if norm_head is None else norm_of(norm_head, norm_eps, split),
        *outputs,
    )
    return y if split is None else outputs
