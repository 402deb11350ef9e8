"""Whether a convolution is left to Inductor, which fuses what follows PyTorch's own.

It is if PyTorch's operators are found to be faster than Windrow's: then nothing is gained, and the fusion is lost. Tensors of
the same shape and layout are measured when a graph is compiled, as they would be at its first call.
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
    """False also for sizes that change. `in_graphs`: Inductor captures what it compiles into CUDA graphs."""
    given = (x, weight, bias, residual)
    sizes = [n for t in given if t is not None for n in (*t.shape, *t.stride())]
    if not all(isinstance(n, int) for n in [*sizes, *(n for several in options[:3] for n in several)]):
        return False
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        # What the user draws stays the same.
        generator = torch.Generator(x.device).manual_seed(0)
        image, filter, *rest = (None if t is None else _like(t, generator) for t in given)
        assert image is not None and filter is not None
        kept = kept_with(filter, is_frozen=True, lasts=True)
        conv = Conv(filter, rest[0], Options(*options), activation, accuracy, kept, is_fused=True)
        return way(conv, image, rest[1]).is_pytorchs(in_graphs)


def _like(t: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.empty_strided([*t.shape], [*t.stride()], dtype=t.dtype, device=t.device)
    return made.normal_(generator=generator)
