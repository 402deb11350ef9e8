"""The choice whether a convolution is left to Inductor, which fuses the operators behind PyTorch's own convolution.

It is left if PyTorch's operators were measured to be faster than Windrow's, because then Windrow gains nothing and the
fusion would be lost. The measurement takes place when the graph is compiled, with random tensors of the same shape and
layout.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from windrow.torch._batch_invariant import is_batch_invariant
from windrow.torch._conv2d import accuracy_of
from windrow.torch._filters import kept_with, unkept
from windrow.torch.backend._constants import value
from windrow.torch.backend._convolutions import Convolution, step_of
from windrow.torch.backend._memory import Memory
from windrow.torch.choice import budget, convolution
from windrow.torch.choice.candidates import Conv
from windrow.torch.choice.convolution import is_decided_for_pytorch, way
from windrow.torch.choice.gradients import Backward
from windrow.torch.choice.problem import Options, can_be_ours, dense

# The residual, which is a node or its stand-in, and the activation that `windrow::conv2d_fused` adds to a convolution;
# None if `windrow::conv2d` computes it.
After = tuple[Any, str | None] | None


def is_pytorchs(
    conv: Convolution, accuracy: str | None, in_graphs: bool, memory: Memory, after: After = None
) -> bool:
    """True if PyTorch computes this convolution faster. False for sizes that may change, and if bits must not depend on
    the batch.

    `accuracy`: the one that the user asks for. `in_graphs`: Inductor captures the compiled code into CUDA graphs.
    `memory`: of the graph.
    """
    given = _given(conv, accuracy, after)
    if given is None or is_batch_invariant(accuracy):
        return False
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        decided = is_decided_for_pytorch(*given, in_graphs)
        if decided is not None:
            return decided
        of, x, residual = given
        # The user's random numbers stay the same.
        generator = torch.Generator(x.device).manual_seed(0)
        image, filter, bias, beside = (_like(t, generator) for t in (x, of.weight, of.bias, residual))
        assert image is not None and filter is not None
        kept = kept_with(filter, is_frozen=of.is_fused, lasts=True)
        like = Conv(filter, bias, of.options, of.activation, of.accuracy, kept, of.is_fused)
        with budget.beside(memory.beside(conv.node, conv.x, *(after or ()))):
            return way(like, image, beside).is_pytorchs(in_graphs)


def is_step_pytorchs(node: fx.Node, accuracy: str | None) -> bool:
    """True if a convolution of a training graph, or the node of its gradients, is left to PyTorch: PyTorch computes the
    convolution and its gradients faster, or Windrow gains too little. Both nodes get the same answer, because it is one
    about the whole step. The first of them measures it.

    False for sizes that may change, if bits must not depend on the batch, and for strict f32. There Windrow is faster
    in most layers, and each call decides, when it is known how much memory there is.
    """
    of, (x, weight, bias, dy), needs = step_of(node)
    options, accuracy = Options(*of), accuracy_of(accuracy, x)
    is_strict = x.dtype == torch.float32 and accuracy != "tf32"
    is_ours = is_strict or is_batch_invariant(accuracy)
    if is_ours or not _is_known(x, weight, bias, dy, *options[:3]) or not can_be_ours(x, weight, bias):
        return False
    with _disable_current_modes(), torch.inference_mode(False), torch.autocast(x.device.type, enabled=False):
        generator = torch.Generator(x.device).manual_seed(0)
        image, filter, added = (_like(t, generator) for t in (x, weight, bias))
        assert image is not None and filter is not None
        for t, is_needed in zip((image, filter, added), needs, strict=True):
            if t is not None:
                t.requires_grad_(is_needed)
        decided = lambda: convolution.is_pytorchs(image, filter, added, options, accuracy, is_frozen=False)
        with torch.enable_grad():
            is_left = decided()
        if is_left is None:
            gradient = _like(dy, generator)
            assert gradient is not None
            with torch.no_grad():
                way(Conv(filter, added, options, None, accuracy, unkept), image)
                Backward(gradient, image, filter, added, options, accuracy).decided(needs)
            with torch.enable_grad():
                is_left = decided()
        return bool(is_left)


def _is_known(*of: Any) -> bool:
    """True if no size or stride of these tensors and lists of numbers may change."""
    sizes = [(*t.shape, *t.stride()) if isinstance(t, Tensor) else tree_leaves(t) for t in of if t is not None]
    return all(isinstance(n, int) for part in sizes for n in part)


def prepare(convs: Iterable[tuple[Convolution, After]], accuracy: str | None) -> None:
    """Compiles the kernels that decisions of these convolutions need, several at the same time."""
    given = [_given(conv, accuracy, after) for conv, after in convs]
    with _disable_current_modes(), torch.no_grad():
        convolution.prepare(of for of in given if of is not None)


def _given(conv: Convolution, accuracy: str | None, after: After) -> tuple[Conv, Tensor, Tensor | None] | None:
    """The convolution with its image and residual, of stand-ins; None for sizes that may change."""
    residual, activation = after or (None, None)
    x, weight, bias, beside = (value(node) for node in (conv.x, conv.weight, conv.bias, residual))
    options = Options(*conv.options, conv.output_padding)
    if not _is_known(x, weight, bias, beside, *options[:3]):
        return None
    # If it does not lie as the result, it is copied, or the result is written where it lies alike: see `_concat`.
    beside = None if beside is None else dense(beside)
    return Conv(weight, bias, options, activation, conv.accuracy(accuracy), unkept, after is not None), x, beside


def _like(t: Tensor | None, generator: torch.Generator) -> Tensor | None:
    if t is None:
        return None
    made = torch.empty_strided([*t.shape], [*t.stride()], dtype=t.dtype, device=t.device)
    return made.normal_(generator=generator)
