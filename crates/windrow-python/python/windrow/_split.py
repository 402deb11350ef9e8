"""Outputs of a convolution with some of the channels each."""

from collections.abc import Sequence

import torch
from torch import Tensor


def expect(split: Sequence[int], channels: int) -> None:
    """Raises ValueError if these are not the numbers of channels of one to three outputs."""
    if not 1 <= len(split) <= 3 or any(n < 1 for n in split) or sum(split) != channels:
        raise ValueError(
            f"`split` is {list(split)}, expected one to three numbers of at least one channel whose sum is {channels}"
        )


def norm_of(head: int | None, eps: float, split: Sequence[int] | None) -> tuple[int, float] | None:
    """The norm of the first two outputs. Raises ValueError unless they consist of whole heads of so many channels."""
    if head is None:
        return None
    if split is None or head < 1 or any(n % head for n in split[:2]):
        expected = "None without `split`" if split is None else f"a divisor of the first two of {list(split)}"
        raise ValueError(f"`norm_head` is {head}, expected {expected}")
    return head, eps


def new_outputs(x: Tensor, order: str, split: Sequence[int]) -> tuple[Tensor, ...]:
    """A new tensor for each part of the channels of x, whose dimensions `order` names; channels-last if x is."""
    d, l = order.index("d"), order.find("l")
    shape = list(x.shape)
    expect(split, shape[d])
    turned = d < l and shape[d] > 1 and x.stride(d) < x.stride(l)
    if turned:
        shape[d], shape[l] = shape[l], shape[d]
    outputs = []
    for n in split:
        shape[l if turned else d] = n
        y = torch.empty(shape, dtype=x.dtype, device=x.device)
        outputs.append(y.transpose(d, l) if turned else y)
    return tuple(outputs)
