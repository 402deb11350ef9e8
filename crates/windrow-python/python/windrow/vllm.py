"""vLLM's causal convolutions by Windrow.

If this package is installed beside vLLM, it is a plugin of vLLM (entry point `vllm.general_plugins`). vLLM calls
`register` in each of its processes. Its models then use these functions instead of the Triton kernels, and on the CPU
instead of vLLM's own functions. If VLLM_PLUGINS is set, its list must contain `windrow`.

    from windrow.vllm import causal_conv1d_fn, causal_conv1d_update
"""

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from windrow import _native, _threads
from windrow._replace import has_parameters_of, replace, when_imported
from windrow._split import new_outputs, norm_of

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_fn_cpu",
    "causal_conv1d_update",
    "causal_conv1d_update_cpu",
    "register",
]

_threads.share()

_MODULES = (
    "vllm.model_executor.layers.mamba.ops.causal_conv1d",
    "vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d",
)


def register() -> None:
    """Replaces vLLM's functions by these when vLLM imports them, also in modules that have imported them already.

    A function is not replaced if it has parameters that are not known here. Nor is it in older versions of vLLM, in
    which block 0 is an ordinary block instead of the null block.
    """
    for name in _MODULES:
        when_imported(name, _change)
    when_imported("vllm._custom_ops", _change_operators)


def _change(module: ModuleType) -> None:
    replacements: dict[str, Callable[..., Tensor]] = {}
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        # On the CPU vLLM gives its functions for the CPU both names.
        for held in (name, f"{name}_cpu"):
            original = getattr(module, held, None)
            if original is None:
                continue
            ours = globals()[f"{name}_cpu" if _takes_any(original) else name]
            if _is_known(original, ours):
                replacements[held] = ours
    replace(module, replacements)


def _change_operators(module: ModuleType) -> None:
    """Replaces the operators for the CPU, all or none: one of them makes the weight that the others take."""
    theirs = {name: getattr(module, name, None) for name in _OPERATORS}
    if all(f and [*signature(f).parameters] == [*signature(_OPERATORS[n]).parameters] for n, f in theirs.items()):
        replace(module, _OPERATORS)


def _takes_any(function: Callable[..., Tensor]) -> bool:
    """True if the function takes keyword arguments that it does not name, as vLLM's functions for the CPU do."""
    return any(p.kind is Parameter.VAR_KEYWORD for p in signature(function).parameters.values())


def _is_known(original: Callable[..., Tensor], function: Callable[..., Tensor]) -> bool:
    """True if every call of the engine's function means the same to Windrow's function."""
    has_null_block = _takes_any(original) or "null_block_id" in signature(original).parameters
    return has_null_block and has_parameters_of(function, original)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = -1,
    null_block_id: int | None = 0,
    *,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,
    block_size_to_align: int = 0,
    metadata: Any = None,
    validate_data: bool = False,
    split: Sequence[int] | None = None,
    norm_head: int | None = None,
    norm_eps: float = 1e-6,
) -> Any:
    """Packed prompts, or parts of prompts: `x` [dim, tokens] with states of a pool, updated in place.

    The arguments are vLLM's. A negative index is padding, whatever `pad_slot_id` is. `metadata` and `validate_data` are
    ignored: the first is for Triton's programs, and the arguments are always checked. Padding sequences and tokens
    behind the last sequence give zeros.

    conv_states: [pool, dim, at least width - 1]; only the first width - 1 columns are used. cache_indices: [sequences],
    or [sequences, blocks] with prefix caching. has_initial_state: [sequences], bool; by default no state is read.
    split: one to three numbers of channels whose sum is dim. The result is then a tuple of tensors [channels, tokens]
    with these channels, in place of one that is split behind the call.
    norm_head: with `split`, the number of channels of a head. Each head of the first two outputs is divided by
    sqrt(sum of squares + norm_eps), in place of a kernel of this L2 norm behind the call.
    """
    prefix_caching = block_idx_last_scheduled_token is not None
    sequences = query_start_loc.shape[0] - 1
    tokens = x if x.dtype == conv_states.dtype else x.to(conv_states.dtype)
    if weight.dtype != tokens.dtype or bias is not None and bias.dtype != tokens.dtype:
        weight, bias = _beside(tokens, weight, bias)
    outputs = () if split is None else new_outputs(tokens, "dl", split)
    y = _native.causal_conv1d_serving(
        tokens,
        "dl",
        conv_states,
        weight,
        bias,
        _activation(activation),
        query_start_loc,
        _first(cache_indices, sequences),
        null_block_id,
        _flags(_first(has_initial_state, sequences), x, sequences),
        None,
        _first(initial_state_idx, sequences) if prefix_caching else None,
        _first(block_idx_last_scheduled_token, sequences),
        _first(block_idx_first_scheduled_token, sequences) if prefix_caching else None,
        _first(num_computed_tokens, sequences) if prefix_caching else None,
        block_size_to_align if prefix_caching else 0,
        None,
        None,
        None,
        None,
        None,
        None if norm_head is None else norm_of(norm_head, norm_eps, split),
        *outputs,
    )
    if outputs:
        return tuple(y.to(x.dtype) for y in outputs)
    return y if y.dtype == x.dtype else y.to(x.dtype)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = 0,
    *,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    pad_slot_id: int | None = None,
    validate_data: bool = False,
    out: Tensor | None = None,
    split: Sequence[int] | None = None,
    norm_head: int | None = None,
    norm_eps: float = 1e-6,
) -> Any:
    """A step of decoding: `x` [batch, dim], [batch, dim, tokens], or with `query_start_loc` [tokens, dim].

    The arguments are vLLM's. The result is written to `out`, or over `x` if `out` is None. `max_query_len` and
    `validate_data` are ignored. `pad_slot_id` is another name of `null_block_id`. With `num_accepted_tokens` a state
    keeps all drafts, so that the next step can continue after those that were accepted. A negative index is padding.
    With `split` the result is a tuple of new tensors, as of `causal_conv1d_fn`, and `out` must be None.
    """
    tokens, target = x, x if out is None else out
    if x.dtype != conv_state.dtype:
        tokens = x.to(conv_state.dtype)
        target = tokens
    elif out is not None and (out.shape != x.shape or out.dtype != x.dtype):
        raise ValueError(
            f"`out` is {out.dtype} of shape {tuple(out.shape)}, expected {x.dtype} of shape {tuple(x.shape)}"
        )
    if weight.dtype != tokens.dtype or bias is not None and bias.dtype != tokens.dtype:
        weight, bias = _beside(tokens, weight, bias)
    # What a small step does here takes as long as what it does below: nothing is called for what is not given.
    has_blocks = block_idx_last_scheduled_token is not None
    sequences = 0
    if query_start_loc is not None:
        order = "ld"
        if conv_state_indices is None:
            raise ValueError("`query_start_loc` needs `conv_state_indices`")
        sequences = conv_state_indices.shape[0]
        query_start_loc = _first(query_start_loc, sequences + 1)
    else:
        order = "bd" if x.dim() == 2 else "bdl"
        if has_blocks or num_accepted_tokens is not None:
            # `len` of a tensor is a function in Python.
            sequences = x.shape[0]
    outputs: tuple[Tensor, ...] = (target,)
    if split is not None:
        if out is not None:
            raise ValueError("`out` is given, expected None with `split`")
        outputs = new_outputs(tokens, order, split)
    y = _native.causal_conv1d_serving(
        tokens,
        order,
        conv_state,
        weight,
        bias,
        activation if activation == "silu" else _activation(activation),
        query_start_loc,
        conv_state_indices,
        null_block_id if pad_slot_id is None else pad_slot_id,
        None,
        None if num_accepted_tokens is None else _first(num_accepted_tokens, sequences),
        _first(initial_state_idx, sequences) if has_blocks else None,
        _first(block_idx_last_scheduled_token, sequences) if has_blocks else None,
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
    if split is not None:
        return outputs if tokens is x else tuple(y.to(x.dtype) for y in outputs)
    if tokens is x:
        return y
    return y.to(x.dtype) if out is None else out.copy_(y)


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = -1,
    null_block_id: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """`causal_conv1d_fn` as vLLM's function for the CPU: index `pad_slot_id` is padding, and index 0 is a state."""
    return causal_conv1d_fn(
        x,
        weight,
        bias,
        conv_states,
        query_start_loc,
        cache_indices,
        has_initial_state,
        activation,
        null_block_id=pad_slot_id,
        **kwargs,
    )


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    pad_slot_id: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """`causal_conv1d_update` with the arguments of vLLM's function for the CPU in their order."""
    return causal_conv1d_update(
        x,
        conv_state,
        weight,
        bias,
        activation,
        conv_state_indices,
        query_start_loc=query_start_loc,
        pad_slot_id=pad_slot_id,
        **kwargs,
    )


def _weight_pack(weight: Tensor) -> Tensor:
    """The weight as it is: it needs no packing."""
    return weight


def _fwd_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None,
    has_initial_state: Tensor | None,
    silu_activation: bool,
    is_weight_packed: bool,
) -> Tensor:
    return causal_conv1d_fn_cpu(
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, silu_activation
    )


def _update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: bool,
    conv_state_indices: Tensor | None,
    is_weight_packed: bool,
    num_accepted_tokens: Tensor | None = None,
) -> Tensor:
    """`x` is [batch, dim] or [batch, tokens, dim]; the result is a new tensor."""
    tokens = x if x.dim() == 2 else x.transpose(1, 2)
    y = causal_conv1d_update(
        tokens,
        conv_states,
        weight,
        bias,
        silu_activation,
        conv_state_indices,
        num_accepted_tokens,
        null_block_id=-1,
        out=torch.empty_like(tokens),
    )
    return y if x.dim() == 2 else y.transpose(1, 2)


# In place of those of `vllm._custom_ops` of the same names.
_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "causal_conv1d_weight_pack": _weight_pack,
    "causal_conv1d_fwd_cpu": _fwd_cpu,
    "causal_conv1d_update_cpu": _update_cpu,
}


def _activation(given: bool | str | None) -> str | None:
    """The activation for vLLM's argument."""
    if given is True:
        return "silu"
    if given is None or given is False:
        return None
    if given not in ("silu", "swish"):
        raise ValueError(f"`activation` is {given!r}, expected None, 'silu' or 'swish'")
    return "silu"


def _beside(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Filter and bias; in f32 if they are neither in f32 nor in the type of x."""
    types = (x.dtype, torch.float32)
    weight = weight if weight.dtype in types else weight.float()
    return weight, bias if bias is None or bias.dtype in types else bias.float()


def _first(given: Tensor | None, count: int) -> Tensor | None:
    """The first entries of a tensor that may be longer than the batch."""
    return given if given is None or given.shape[0] == count else given[:count]


def _flags(given: Tensor | None, x: Tensor, sequences: int) -> Tensor:
    """A byte for each sequence that says if its state is used."""
    if given is None:
        return torch.zeros(sequences, dtype=torch.uint8, device=x.device)
    return given.view(torch.uint8) if given.dtype == torch.bool else given
