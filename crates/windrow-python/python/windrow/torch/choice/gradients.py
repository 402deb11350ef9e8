"""The gradients of a convolution, each computed by Windrow or by PyTorch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windrow import _native
from windrow.torch._batch_invariant import is_batch_invariant
from windrow.torch._filters import filter_cache
from windrow.torch._precision import operand_rounding
from windrow.torch.choice import problem, store
from windrow.torch.choice.check import Check, terms_of
from windrow.torch.choice.decider import Candidate, Question, decide
from windrow.torch.choice.policy import KEPT
from windrow.torch.choice.problem import (
    OF_BOTH,
    OF_FILTER,
    OF_INPUT,
    Options,
    as_image,
    as_line,
    dense,
    is_video,
    key_of,
)

# Which of the gradients: of the input, the filter and the bias.
Three = Sequence[bool]
_NONE = (False, False, False)


@dataclass(slots=True)
class Backward:
    """The tensors and options that gradients are computed from."""

    dy: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    options: Options
    accuracy: str | None

    def decided(self, needs: Three) -> list[Tensor | None]:
        """The gradients, each computed by the faster implementation."""
        if is_video(self.x) or not problem.can_be_ours(self.x, self.weight, self.bias):
            return self.computed(needs, _NONE)
        if is_batch_invariant(self.accuracy):
            return self.computed(needs, needs)
        key = key_of(self.x, self.weight, self.bias, self.options, self.accuracy)

        def is_ours(what: str, *needs: bool) -> bool:
            decision = store.final(what, key) or decide(self._question(what, key, needs))
            return decision.now() == KEPT

        of_bias = needs[2]
        of_input = needs[0] and is_ours(OF_INPUT, True, False, False)
        of_filter = needs[1] and is_ours(OF_BOTH if of_bias else OF_FILTER, False, True, of_bias)
        return self.computed(needs, _mine(needs, of_input, of_filter))

    def computed(self, needs: Three, mine: Three) -> list[Tensor | None]:
        """The needed gradients: those in `mine` by Windrow, the others by PyTorch."""
        mine = _NONE if is_video(self.x) else mine
        grads = self._by_windrow(mine) if any(mine) else [None, None, None]
        others = [n and not m for n, m in zip(needs, mine, strict=True)]
        if not any(others):
            return grads
        theirs = self._by_pytorch(others)
        like = (self.x, self.weight, self.bias)
        return [
            laid_out_like(t, g) if other else m for m, g, t, other in zip(grads, theirs, like, others, strict=True)
        ]

    def _by_pytorch(self, needs: list[bool]) -> Sequence[Any]:
        options, sizes = self.options, None if self.bias is None else list(self.bias.shape)
        is_transposed, first = options.output_padding is not None, max(0, 4 - self.weight.dim())
        pairs = (options.stride, options.padding, options.dilation, options.output_padding or [0] * len(options.stride))
        stride, padding, dilation, output_padding = (pair[first:] for pair in pairs)
        rest = (sizes, stride, padding, dilation, is_transposed, output_padding, options.groups, needs)
        tensors = (self.dy, self.x, self.weight)
        is_widened = is_video(self.x) and self.x.is_cpu and self.x.dtype in (torch.float16, torch.bfloat16)
        if is_widened:
            # PyTorch sums a filter's gradient over videos in the type itself where oneDNN does not compute it.
            tensors = tuple(t.float() for t in tensors)  # type: ignore[assignment]
        grads: Sequence[Any] = torch.ops.aten.convolution_backward.default(*tensors, *rest)
        if is_widened:
            of = zip(grads, (self.x, self.weight, self.bias), strict=True)
            return [None if g is None or t is None else g.to(t.dtype) for g, t in of]
        return grads

    def _by_windrow(self, needs: Three) -> list[Tensor | None]:
        dy, x, bias, options = self.dy, self.x, self.bias, self.options
        if options.output_padding is None:
            images = (as_image(t, x) for t in (dy, x, self.weight))
            dx, dweight, dbias = _native.conv2d_backward(*images, bias, options[:4], self.accuracy, needs)
            return [as_line(dx, x), as_line(dweight, x), dbias]
        images = (as_image(t, x) for t in (dy, dense(x), self.weight))
        dx, dweight = _native.conv_transpose2d_backward(*images, options[:4], self.accuracy, needs[:2])
        over = [d for d in range(dy.dim()) if d != 1]
        dbias = dy.sum(over, dtype=bias.dtype) if needs[2] and bias is not None else None
        dx, dweight = as_line(dx, x), as_line(dweight, x)
        return [None if dx is None else laid_out_like(x, dx), dweight, dbias]

    def _question(self, what: str, key: problem.Key, needs: Three) -> Question:
        def ours(_: Any) -> Iterator[Candidate]:
            scratch = self._bytes(needs) + self.x.nbytes * needs[0] + self.weight.nbytes * needs[1]
            yield Candidate(KEPT, lambda: self.computed(needs, needs), scratch=scratch)

        cache = filter_cache(self.weight)
        return Question(what, key, lambda: self.computed(needs, _NONE), ours, cache=cache, check=self.check(needs))

    def check(self, needs: Three) -> Check:
        """The check of the needed gradients: of the input's alone, or of the others."""

        def of(part: slice) -> list[tuple[Tensor, Tensor]]:
            dy, x, weight = (t.float() for t in (self.dy[part], self.x[part], self.weight))
            bias = None if self.bias is None else self.bias.float()
            values = Backward(dy, x, weight, bias, self.options, None).computed(needs, _NONE)
            absolute = [t.abs() for t in (dy, x, weight)]
            scales = Backward(*absolute, bias, self.options, None).computed(needs, _NONE)
            return [(v, s) for v, s in zip(values, scales, strict=True) if v is not None and s is not None]

        is_transposed = self.options.output_padding is not None
        images = self.x if is_transposed else self.dy
        if needs[0]:
            terms = terms_of(self.weight, self.options, of_result=is_transposed)
        else:
            terms = images.numel() / max(1, images.shape[1])
        operand = operand_rounding(self.x, self.accuracy)
        return Check(self.x.shape[0], self.x.dtype, of, terms, operand, is_summed=not needs[0])

    def _bytes(self, needs: Three) -> int:
        dy, x, options = self.dy, self.x, self.options
        if options.output_padding is None:
            images = (as_image(t, x) for t in (dy, x, self.weight))
            return _native.conv2d_backward_bytes(*images, options[:4], self.accuracy)
        image = dense(x)
        copied = 0 if image is x else x.nbytes
        images = (as_image(t, x) for t in (dy, image, self.weight))
        return copied + _native.conv_transpose2d_backward_bytes(*images, options[:4], self.accuracy, needs[:2])


def decided_for(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, accuracy: str | None
) -> Callable[[Three], Three] | None:
    """A function that says which of the needed gradients Windrow computes, for images like x. None: not decided yet."""
    if is_batch_invariant(accuracy):
        return lambda needs: needs
    key = key_of(x, weight, bias, options, accuracy)
    if is_video(x):
        return lambda needs: _NONE
    of_both = bias is not None and bias.requires_grad
    decided = [store.final(what, key) for what in (OF_INPUT, OF_BOTH if of_both else OF_FILTER)]
    if (x.requires_grad and decided[0] is None) or (weight.requires_grad and decided[1] is None):
        return None
    of_input, of_filter = (d is not None and d.now() == KEPT for d in decided)
    return lambda needs: _mine(needs, of_input, of_filter)


def _mine(needs: Three, of_input: bool, of_filter: bool) -> Three:
    """The gradients that Windrow computes of those that are needed, given its share: of the input, of the filter."""
    # The gradient of a bias alone is a sum, for which PyTorch has nothing better.
    rest = of_filter or not needs[1]
    return needs[0] and of_input, needs[1] and rest, needs[2] and rest


def laid_out_like(t: Tensor | None, gradient: Tensor) -> Tensor:
    """The gradient with the strides of `empty_like(t)`."""
    if t is None or gradient.stride() == t.stride():
        return gradient
    like = torch.empty_like(t)
    return gradient if like.stride() == gradient.stride() else like.copy_(gradient)
