"""Causal conv1d of sequences whose tokens are divided among the ranks of a process group (context parallel).

An output needs the `(width - 1) * dilation` inputs before it (the *reach*). So a rank needs the last inputs of its left
neighbour for its first outputs only, and computes all others while these travel. The gradient of an input needs the
outputs behind it. So in the backward pass the first inputs and output gradients of the right neighbour travel. When
they have arrived, a rank computes the gradients of its last inputs again. Each sum has the order that it has on one
device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The convolution on one device: (x, weight, bias, initial states, activation, batch_invariant, dilation) -> y.
Forward = Callable[..., Tensor]
# Its gradients: (dy, gradient of the final states, x, weight, bias, initial states, activation, dilation, wanted) ->
# those of x, weight, bias and initial states, where wanted.
Gradients = Callable[..., Sequence[Tensor | None]]


def is_divided(cp_group: Any, reach: int, initial_states: Tensor | None, **not_taken: object) -> bool:
    """False if a rank needs nothing of others. An error if the group or an argument beside it cannot be used."""
    if not (dist.is_available() and isinstance(cp_group, dist.ProcessGroup)):
        raise TypeError(f"`cp_group` is {cp_group!r}, expected a torch.distributed.ProcessGroup with this process")
    rank = dist.get_rank(cp_group)
    if rank < 0:
        raise ValueError("`cp_group` is a group without this process, expected one with it")
    for name, value in not_taken.items():
        if value is not None:
            raise ValueError(f"`{name}` is given, expected None with `cp_group`")
    if rank > 0 and initial_states is not None:
        raise ValueError(f"`initial_states` is given on rank {rank} of `cp_group`, expected on rank 0 only")
    return reach > 0 and dist.get_world_size(cp_group) > 1


class Divided(torch.autograd.Function):
    """y and final states of this rank's tokens. `before` is the initial states on the first rank, None on others;
    `forward` and `gradients` compute on one device."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        before: Tensor | None,
        activation: str | None,
        batch_invariant: bool,
        dilation: int,
        group: "dist.ProcessGroup",
        forward: Forward,
        gradients: Gradients,
    ) -> tuple[Tensor, Tensor]:
        def run(x: Tensor, states: Tensor | None) -> Tensor:
            return forward(x, weight, bias, states, activation, batch_invariant, dilation)

        # No tokens: this checks the arguments before anything is sent.
        run(x[:, :, :0], before)
        left, right = _neighbours(group)
        length, reach = x.shape[2], (weight.shape[-1] - 1) * dilation
        if left is not None:
            before = _message(x, x.shape[1], reach)
        if length >= reach:
            after = _as_message(x[:, :, length - reach :])
            works = _start(group, (after, right), (before, left))
            y = run(x, before if left is None else None)
            _wait(works)
            if left is not None:
                y[:, :, :reach] = run(x[:, :, :reach], before)
        else:
            # The states for the right neighbour hold some of those that arrive.
            _wait(_start(group, (None, None), (before, left)))
            after = _as_message(_joined(_or_zeros(before, x, reach), x, x)[:, :, length:])
            works = _start(group, (after, right), (None, None))
            y = run(x, before)
            _wait(works)
        ctx.group, ctx.gradients, ctx.activation, ctx.dilation = group, gradients, activation, dilation
        ctx.save_for_backward(x, weight, bias, before)
        ctx.set_materialize_grads(False)
        return y, after

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dafter: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, before = ctx.saved_tensors

        def run(dy: Tensor, dafter: Tensor | None, x: Tensor, states: Tensor | None, wanted: Sequence[bool]) -> Any:
            options = (ctx.activation, ctx.dilation)
            return ctx.gradients(dy, dafter, x, weight, bias, states, *options, wanted)

        wanted = ctx.needs_input_grad[:4]
        left, right = _neighbours(ctx.group)
        channels, length, reach = x.shape[1], x.shape[2], (weight.shape[-1] - 1) * ctx.dilation
        if dy is None:
            dy = x.new_zeros(x.shape[0], weight.shape[0], length)
        # What travels: x and dy of the tokens behind a rank's own, and the gradient that its last inputs get as states
        # of later ranks. The last is zero, unless a later rank has fewer tokens than the reach.
        behind = _message(x, channels + dy.shape[1] + channels, reach)
        if right is None:
            behind.zero_()
        x_behind, dy_behind, dafter_behind = behind.split([channels, dy.shape[1], channels], 1)
        own = min(length, reach)
        sent = torch.zeros_like(behind)
        sent[:, :, :own] = torch.cat([x[:, :, :own], dy[:, :, :own], torch.zeros_like(x[:, :, :own])], 1)
        works = _start(ctx.group, (sent, left if length >= reach else None), (behind, right))
        if length < reach:
            _wait(works)
            if dafter is not None:
                dafter_behind += dafter
            sent[:, :, length:] = behind[:, :, : reach - length]
            works = _start(ctx.group, (sent, left), (None, None))
        of_all = run(dy, dafter if right is None else None, x, before, wanted)
        _wait(works)
        if right is None:
            return *of_all, *[None] * 6

        if length >= reach and dafter is not None:
            dafter_behind += dafter
        # The gradients of the last inputs again, now with the tokens behind them.
        first = length - own
        states = before
        if first > 0:
            states = _joined(_or_zeros(before, x, reach), x[:, :, max(first - reach, 0) : first], x)[:, :, -reach:]
        dx, dweight, dbias, dbefore = of_all
        wanted = (wanted[0], False, False, wanted[3] and length < reach)
        # In the layouts of x and dy: on CUDA the order of the sums depends on them.
        x_last, dy_last = _joined(x[:, :, first:], x_behind, x), _joined(dy[:, :, first:], dy_behind, dy)
        dx_last, _, _, dstates = run(dy_last, None, x_last, states, wanted)
        if dx is not None and dx_last is not None:
            dx[:, :, first:] = dx_last[:, :, :own] + dafter_behind[:, :, reach - own :]
        if dstates is not None:
            dbefore = dstates
            dbefore[:, :, length:] += dafter_behind[:, :, : reach - length]
        return dx, dweight, dbias, dbefore, *[None] * 6


def _neighbours(group: "dist.ProcessGroup") -> tuple[int | None, int | None]:
    """The ranks in the default group of those before and after this process, None at the ends."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    left, right = (dist.get_global_rank(group, r) if 0 <= r < size else None for r in (rank - 1, rank + 1))
    return left, right


def _message(x: Tensor, channels: int, tokens: int) -> Tensor:
    """Memory for a message, [batch, channels, tokens] in channels-last."""
    return x.new_empty(x.shape[0], tokens, channels).transpose(1, 2)


def _as_message(x: Tensor) -> Tensor:
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _joined(x: Tensor, behind: Tensor, like: Tensor) -> Tensor:
    """Tokens and those behind them, in channels-last if `like` is."""
    if like.stride(1) < like.stride(2):
        return torch.cat([x.transpose(1, 2), behind.transpose(1, 2)], 1).transpose(1, 2)
    return torch.cat([x, behind], 2)


def _or_zeros(states: Tensor | None, x: Tensor, reach: int) -> Tensor:
    return x.new_zeros(x.shape[0], x.shape[1], reach) if states is None else states


Message = tuple[Tensor | None, int | None]


def _start(group: "dist.ProcessGroup", send: Message, receive: Message) -> "list[dist.Work]":
    """Starts to send and receive messages, each where it has a peer."""
    operations = [
        dist.P2POp(operation, tensor.transpose(1, 2), peer, group)
        for operation, (tensor, peer) in ((dist.isend, send), (dist.irecv, receive))
        if tensor is not None and peer is not None
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def _wait(works: "list[dist.Work]") -> None:
    """Waits on the CPU for messages of the CPU, and lets the GPU's current stream wait for those of the GPU."""
    for work in works:
        work.wait()
