"""The setting whether PyTorch's own operators may compute f32 in TF32.

Since PyTorch 2.9 each operator has its own setting (`torch.backends.cudnn.conv.fp32_precision`). The older flags
`allow_tf32` still set these, but reading a flag raises RuntimeError if it cannot express the settings. So the settings
are read if they exist.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# The setting by library and operator, with PyTorch's names: "tf32", or another value.
_setting: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)


def may_use_tf32(is_linear: bool = False) -> bool:
    """True if PyTorch's convolutions on CUDA, or its linear layers, may use TF32."""
    if _setting is not None:
        return _setting("cuda", "matmul" if is_linear else "conv") == "tf32"
    return torch._C._get_cublas_allow_tf32() if is_linear else torch._C._get_cudnn_allow_tf32()


# A compiled graph has what was set when it was traced: `torch.compiler.assume_constant_result`, which would import all of
# torch._dynamo.
may_use_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]
# PyTorch 2.4 keeps the constant in the module whose function is compiled, by this name, over what has it there.
may_use_tf32.__code__ = may_use_tf32.__code__.replace(co_name="constant_of_windrow_may_use_tf32")


# The state that matters: whether autocast is on, and whether TF32 may be used.
Flags = tuple[bool, bool]


def flags(x: Tensor, is_linear: bool = False) -> Flags:
    """The state that a convolution of x, or a linear layer, depends on beside its tensors."""
    in_tf32 = x.is_cuda and x.dtype is torch.float32 and may_use_tf32(is_linear)
    return torch._C._is_any_autocast_enabled(), in_tf32


def operand_rounding(x: Tensor, accuracy: str | None, is_linear: bool = False) -> float:
    """The unit roundoff of the operands of a convolution of x, if Windrow or PyTorch rounds them; otherwise 0."""
    if not x.is_cuda:
        theirs = _setting("mkldnn", "conv") if _setting is not None else ""
        return {"bf16": 2.0**-8, "tf32": 2.0**-11}.get(theirs, 0.0)
    if x.dtype is torch.float32:
        return 2.0**-11 if accuracy in ("tf32", "half") or may_use_tf32(is_linear) else 0.0
    if x.dtype is torch.float16:
        return 2.0**-11 if accuracy in ("tf32", "half") else 0.0
    return 2.0**-8 if accuracy == "half" else 0.0
