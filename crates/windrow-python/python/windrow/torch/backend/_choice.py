"""The choice whether a convolution is left to Inductor, which fuses the operators behind PyTorch's own convolution.

It is left if PyTorch's operators were measured to be faster than Windrow's, because then Windrow gains nothing and the
fusion would be lost. The measurement takes place when the graph is compiled, with random tensors of the same shape and
layout.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from windrow.torch._filters import kept_with
from windrow.torch.choice.candidates import Conv
from windrow.torch.choice.convolution import way
from windrow.torch.choice.problem import Options


def is_pytorchs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    options: Any,
    activation: str | None,
    accuracy: Any,
    in_graphs: bool,
) -> bool:
    """True if PyTorch computes this convolution faster. False for sizes that may change. `in_graphs`: Inductor captures
    the compiled code into CUDA graphs."""
    given = (x, weight, bias, residual)
    sizes = [n for t in given if t is not None for n in (*t.shape, *t.stride())]
    if not all(isinstance(n, int) for n in [*sizes, *(n for several in options[:3] for n in several)]):
        return False
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        # The user's random numbers stay the same.
        generator = torch.Generator(x.device).manual_seed(0)
        image, filter, *rest = (None if t is None else _like(t, generator) for t in given)
        assert image is not None and filter is not None
        kept = kept_with(filter, is_frozen=True, lasts=True)
        conv = Conv(filter, rest[0], Options(*options), activation, accuracy, kept, is_fused=True)
        return way(conv, image, rest[1]).is_pytorchs(in_graphs)


def _like(t: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.empty_strided([*t.shape], [*t.stride()], dtype=t.dtype, device=t.device)
    return made.normal_(generator=generator)
