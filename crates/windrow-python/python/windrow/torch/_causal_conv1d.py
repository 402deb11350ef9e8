"""Causal conv1d with the signatures of Dao-AILab's causal-conv1d."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from windrow import _native
from windrow._split import expect, norm_of
from windrow.torch._context_parallel import Divided, is_divided
from windrow.torch._library import (
    as_autocast,
    autocast,
    call,
    define,
    differentiable,
    fake_gradients,
    not_differentiable,
    or_empty,
    or_none,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def as_computed(x: Tensor, *filters: Tensor | None) -> list[Tensor | None]:
    """Filter and bias in a type that Windrow takes: f32 or the type of x. f16 and bf16 beside an x of another type
    become f32, which loses nothing."""
    types = (x.dtype, torch.float32)
    is_other = lambda t: t is not None and t.dtype not in types and t.dtype in (torch.float16, torch.bfloat16)
    return [t.float() if is_other(t) else t for t in filters]


def as_given(gradients: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients, each in the type of its tensor."""
    return [g if g is None or t is None else g.to(t.dtype) for g, t in zip(gradients, tensors, strict=True)]


# PyTorch's dispatcher leaves out the last argument of an operator if it has its default.
def _kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str | None,
    return_final_states: bool,
    batch_invariant: bool = False,
    dilation: int = 1,
) -> tuple[Tensor, ...]:
    y = _native.causal_conv1d(
        x,
        *as_computed(x, weight, bias),
        activation=activation,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        initial_states=initial_states,
        return_final_states=return_final_states,
        batch_invariant=batch_invariant,
        dilation=dilation,
    )
    return y if return_final_states else or_empty(x, (y, None))


def _fake(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _bias, _initial_states, _seq_idx, cu_seqlens, _activation, return_final_states = rest[:6]
    dilation = _dilation(rest[6:])
    y = _fake_output(x, weight.shape[0])
    if not return_final_states:
        return y, x.new_empty(0)
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = x.new_empty(sequences, (weight.shape[-1] - 1) * dilation, x.shape[1])
    return y, states.transpose(1, 2)


def _dilation(last: Sequence[Any]) -> int:
    """The dilation in an operator's last arguments, `batch_invariant` and `dilation`. Those with their defaults may be
    missing."""
    return last[1] if len(last) > 1 else 1


def _fake_output(x: Tensor, channels: int) -> Tensor:
    b, d, l = x.shape
    if d > 1 and x.stride(1) < x.stride(2):
        return x.new_empty(b, l, channels).transpose(1, 2)
    return x.new_empty(b, channels, l)


def _backward_kernel(
    dy: Tensor, dfinal_states: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    initial_states, seq_idx, cu_seqlens, activation, needs, *dilation = rest
    of = (activation, seq_idx, cu_seqlens, initial_states, tuple(needs), *(dilation or [1]))
    grads = _native.causal_conv1d_backward(dy, dfinal_states, x, *as_computed(x, weight, bias), *of)
    return or_empty(dy, as_given(grads, (x, weight, bias, initial_states)))


_causal_conv1d = define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_states, Tensor? seq_idx,"
    " Tensor? cu_seqlens, str? activation, bool return_final_states, bool batch_invariant=False, int dilation=1)"
    " -> (Tensor, Tensor)",
    _kernel,
    _fake,
)
_causal_conv1d_backward = define(
    "causal_conv1d_backward(Tensor dy, Tensor? dfinal_states, Tensor x, Tensor weight, Tensor? bias,"
    " Tensor? initial_states, Tensor? seq_idx, Tensor? cu_seqlens, str? activation, bool[] needs, int dilation=1)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    lambda dy, dfinal_states, x, weight, bias, initial_states, seq_idx, cu_seqlens, activation, needs, dilation=1: (
        fake_gradients([x, weight, bias, initial_states], needs, dy)
    ),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.activation, ctx.return_final_states = inputs[6:8]
    ctx.dilation = _dilation(inputs[8:])
    # The number of arguments that have no gradient.
    ctx.others = len(inputs) - 4
    ctx.save_for_backward(*inputs[:6])


def _backward(ctx: Any, dy: Tensor, dfinal_states: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:4]
    tensors = (dy, dfinal_states if ctx.return_final_states else None, *ctx.saved_tensors)
    grads = call(_causal_conv1d_backward, _backward_kernel, tensors, ctx.activation, needs, ctx.dilation)
    return *or_none(grads, needs), *[None] * ctx.others


differentiable(_causal_conv1d, _kernel, _setup_context, _backward)
autocast(_causal_conv1d, lower_precision=[0, 1, 2, 3])


def _split_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    split: list[int],
    activation: str | None,
    return_final_states: bool,
    batch_invariant: bool = False,
    dilation: int = 1,
    norm_head: int = 0,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, ...]:
    results = _native.causal_conv1d_split(
        x,
        *as_computed(x, weight, bias),
        activation,
        seq_idx,
        cu_seqlens,
        initial_states,
        return_final_states,
        split,
        batch_invariant,
        dilation,
        (norm_head, norm_eps) if norm_head else None,
    )
    states = results.pop() if return_final_states else None
    return or_empty(x, (*results, *[None] * (3 - len(results)), states))


def _split_fake(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *options, split, activation, return_final_states = rest[:7]
    _, states = _fake(x, weight, *options, activation, return_final_states, *rest[7:])
    ys = [_fake_output(x, n) for n in split]
    return or_empty(x, (*ys, *[None] * (3 - len(ys)), states))


def _split_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    split, ctx.activation, ctx.return_final_states = inputs[6:9]
    ctx.dilation = _dilation(inputs[9:])
    ctx.has_norm = len(inputs) > 11 and inputs[11] != 0
    ctx.parts, ctx.others = len(split), len(inputs) - 4
    ctx.save_for_backward(*inputs[:6])


def _split_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.has_norm:
        raise NotImplementedError(
            "there are no gradients of `causal_conv1d_split` with `norm_head`; call `causal_conv1d_fn`, which computes"
            " the norm by PyTorch where gradients are wanted"
        )
    # One copy: the kernels of gradients read all channels of one tensor.
    dy = torch.cat(grads[: ctx.parts], 1)
    return _backward(ctx, dy, grads[3])


_causal_conv1d_split = define(
    "causal_conv1d_split(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_states, Tensor? seq_idx,"
    " Tensor? cu_seqlens, SymInt[] split, str? activation, bool return_final_states, bool batch_invariant=False,"
    " int dilation=1, int norm_head=0, float norm_eps=1e-6) -> (Tensor, Tensor, Tensor, Tensor)",
    _split_kernel,
    _split_fake,
)
differentiable(
    _causal_conv1d_split, _split_kernel, _split_setup_context, _split_backward, has_own_gradient=False
)
autocast(_causal_conv1d_split, lower_precision=[0, 1, 2, 3])


def _divided(y: Tensor, head: int, eps: float) -> Tensor:
    """The output with its heads divided by their norm, with PyTorch's gradient."""
    heads = y.unflatten(1, (-1, head)).float()
    return (heads * torch.rsqrt(heads.square().sum(2, keepdim=True) + eps)).to(y.dtype).flatten(1, 2)


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: Literal[False] = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    split: None = None,
    batch_invariant: bool = False,
    dilation: int = 1,
    cp_group: "ProcessGroup | None" = None,
) -> Tensor: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    *,
    return_final_states: Literal[True],
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    split: None = None,
    batch_invariant: bool = False,
    dilation: int = 1,
    cp_group: "ProcessGroup | None" = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    split: None = None,
    batch_invariant: bool = False,
    dilation: int = 1,
    cp_group: "ProcessGroup | None" = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: Literal[False] = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    split: Sequence[int],
    norm_head: int | None = None,
    norm_eps: float = 1e-6,
    batch_invariant: bool = False,
    dilation: int = 1,
) -> tuple[Tensor, ...]: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    split: Sequence[int],
    norm_head: int | None = None,
    norm_eps: float = 1e-6,
    batch_invariant: bool = False,
    dilation: int = 1,
) -> tuple[Tensor, ...] | tuple[tuple[Tensor, ...], Tensor]: ...


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    split: Sequence[int] | None = None,
    norm_head: int | None = None,
    norm_eps: float = 1e-6,
    batch_invariant: bool = False,
    dilation: int = 1,
    cp_group: "ProcessGroup | None" = None,
) -> Tensor | tuple[Any, ...]:
    """Causal convolution of whole sequences; a drop-in replacement of causal-conv1d's function of this name.

    x: [batch, dim, seqlen], any strides.
    weight: [dim, width] with any width, or [dim_out, dim, width] for a dense convolution. bias: [dim], or [dim_out] if
    dense. Both are f32, f16 or bf16.
    seq_idx: [batch, seqlen] i32, the number of each token's sequence; a negative number is padding.
    cu_seqlens: [sequences + 1] i32 or i64, the boundaries of the sequences in a batch of 1. Give this or seq_idx, not
    both.
    initial_states, final_states_out: [batch or sequences, dim, (width - 1) * dilation].
    activation: None, "silu", "swish", "gelu", "gelu_tanh", "relu", "relu6", "hardswish" or "leaky_relu" (with another
    slope than 0.01: "leaky_relu(0.2)").
    split: one to three numbers of channels whose sum is dim (dim_out). y is then a tuple of tensors, each of which has
    so many of the channels and no gaps: `torch.split(y, split, dim=1)` without a copy behind it.
    norm_head: with `split`, the number of channels of a head. The first two tensors of y are divided by the L2 norm of
    their heads, sqrt(sum of squares + norm_eps), as queries and keys of gated delta nets are. Where gradients are
    wanted PyTorch computes the norm behind the convolution.
    batch_invariant: if true, the bits of a sequence do not depend on the other sequences of the batch, on the number of
    threads, or on what was measured. Dense weights do not have it on CUDA.
    dilation: the distance of neighbouring taps in tokens, as of `torch.nn.functional.conv1d` of x with
    (width - 1) * dilation zeros before it.
    cp_group: a process group whose ranks hold consecutive tokens of each sequence, any number each (context parallel).
    x, y and their gradients are of this rank's tokens. Gradients of weight and bias are of its outputs: their sum over
    the ranks is that of the whole. `initial_states` is rank 0's; each rank's final states follow its own tokens. All
    ranks call this function, and its backward pass.

    Returns y, or (y, final_states) with `return_final_states`.
    """
    _expect_name(activation)
    tensors = (x, weight, bias, initial_states, seq_idx, cu_seqlens)
    norm = norm_of(norm_head, norm_eps, split)
    y: Any
    reach = (weight.shape[-1] - 1) * dilation
    if cp_group is not None and is_divided(
        cp_group, reach, initial_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens, split=split
    ):
        tensors = as_autocast(x, weight, bias, initial_states)
        options = (activation, batch_invariant, dilation)
        y, final_states = Divided.apply(*tensors, *options, cp_group, _of_part, _gradients_of_part)
    elif split is None:
        rest: tuple[Any, ...] = (activation, return_final_states, batch_invariant, dilation)
        y, final_states = call(_causal_conv1d, _kernel, tensors, *rest)
    else:
        expect(split, weight.shape[0])
        rest = (list(split), activation, return_final_states, batch_invariant, dilation)
        if norm is None or any(t is not None and t.requires_grad for t in tensors[:4]) and torch.is_grad_enabled():
            *y, final_states = call(_causal_conv1d_split, _split_kernel, tensors, *rest)
            if norm is not None:
                divided = min(2, len(split))
                y = [*(_divided(part, *norm) for part in y[:divided]), *y[divided:]]
        else:
            *y, final_states = call(_causal_conv1d_split, _split_kernel, tensors, *rest, *norm)
        y = tuple(y[: len(split)])
    if not return_final_states:
        return y
    if final_states_out is not None:
        final_states = final_states_out.copy_(final_states)
    return y, final_states


def _of_part(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    activation: str | None,
    batch_invariant: bool,
    dilation: int,
) -> Tensor:
    tensors = (x, weight, bias, initial_states, None, None)
    y: Tensor = call(_causal_conv1d, _kernel, tensors, activation, False, batch_invariant, dilation)[0]
    return y


def _gradients_of_part(
    dy: Tensor,
    dfinal_states: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    activation: str | None,
    dilation: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    tensors = (dy, dfinal_states, x, weight, bias, initial_states, None, None)
    grads = call(_causal_conv1d_backward, _backward_kernel, tensors, activation, wanted, dilation)
    return or_none(grads, wanted)


def _expect_name(activation: object) -> None:
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"`activation` is {activation!r}, expected None or a name such as 'silu'")


def _update_kernel(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    filters = as_computed(x, weight, bias)
    return _native.causal_conv1d_update(
        x, conv_state, *filters, activation, cache_seqlens, conv_state_indices
    )


_causal_conv1d_update = define(
    "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias,"
    " str? activation, Tensor? cache_seqlens, Tensor? conv_state_indices) -> Tensor",
    _update_kernel,
    lambda x, *rest: torch.empty_like(x),
)
not_differentiable("causal_conv1d_update", instead="causal_conv1d_fn")


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """The next step or steps of a causal convolution; a drop-in replacement of causal-conv1d's function.

    x: [batch, dim] or [batch, dim, seqlen].
    conv_state: [batch, dim, state_len] with state_len at least width - 1; it is updated in place.
    cache_seqlens: [batch], the number of earlier inputs. With it, conv_state is a ring buffer.
    conv_state_indices: [batch]. With it, conv_state is a pool of states, and each row uses the entry that its index
    names. If the index is negative, the row is padding and gives zeros.

    For inference only: a backward pass through it raises NotImplementedError.
    """
    # The same as `call`, in one native call: a decoder calls this function most.
    if not is_dynamo_compiling():
        try:
            y = _native.causal_conv1d_update_if_plain(
                x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices
            )
        except TypeError:
            _expect_name(activation)
            # The operator computes with a filter of another type than x.
            if all(new is old for new, old in zip(as_computed(x, weight, bias), (weight, bias), strict=True)):
                raise
        else:
            if y is not None:
                return y
    return _causal_conv1d_update(
        x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices
    )


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last `state_len` inputs of each packed sequence. A shorter sequence has zeros before it.

    x: [total tokens, dim]. cu_seqlens: [sequences + 1]. Returns [sequences, dim, state_len]. No gradient flows through
    this function.
    """
    with torch.no_grad():
        end = cu_seqlens[1:, None].long()
        rows = end + torch.arange(-state_len, 0, device=x.device)
        valid = rows >= cu_seqlens[:-1, None]
        if x.shape[0] == 0:
            return x.new_zeros(end.shape[0], x.shape[1], state_len)
        states = x[rows.clamp(min=0)].masked_fill(~valid[..., None], 0)
        return states.transpose(1, 2)
