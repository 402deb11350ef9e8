"""The choice whether a convolution is left to Inductor, which fuses the operators behind PyTorch's own convolution.

It is left if PyTorch's operators were measured to be faster than Windrow's, because then Windrow gains nothing and the
fusion would be lost. The measurement takes place when the graph is compiled, with random tensors of the same shape and
layout.
"""

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from windrow.torch._filters import kept_with
from windrow.torch.backend._constants import value
from windrow.torch.backend._convolutions import Convolution
from windrow.torch.choice.candidates import Conv
from windrow.torch.choice.convolution import way
from windrow.torch.choice.problem import Options


def is_pytorchs(
    conv: Convolution,
    accuracy: str | None,
    in_graphs: bool,
    after: tuple[fx.Node | None, str | None] | None = None,
) -> bool:
    """True if PyTorch computes this convolution faster. False for sizes that may change.

    `accuracy`: the one that the user asks for. `in_graphs`: Inductor captures the compiled code into CUDA graphs.
    `after`: the residual and the activation that `windrow::conv2d_fused` would add; None if `windrow::conv2d` would compute
    the convolution.
    """
    residual, activation = after or (None, None)
    given = [value(node) for node in (conv.x, conv.weight, conv.bias, residual)]
    options = Options(*conv.options, conv.output_padding)
    sizes = [n for t in given if t is not None for n in (*t.shape, *t.stride())]
    if not all(isinstance(n, int) for n in [*sizes, *tree_leaves(options[:3])]):
        return False
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        # The user's random numbers stay the same.
        generator = torch.Generator(given[0].device).manual_seed(0)
        image, filter, bias, beside = (None if t is None else _like(t, generator) for t in given)
        assert image is not None and filter is not None
        kept = kept_with(filter, is_frozen=after is not None, lasts=True)
        asked = conv.accuracy(accuracy)
        like = Conv(filter, bias, options, activation, asked, kept, is_fused=after is not None)
        return way(like, image, beside).is_pytorchs(in_graphs)


def _like(t: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.empty_strided([*t.shape], [*t.stride()], dtype=t.dtype, device=t.device)
    return made.normal_(generator=generator)
