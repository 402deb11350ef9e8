"""GELU."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from windrow import _native
from windrow.torch._library import (
    call,
    define,
    differentiable,
    fake_gradients,
    or_empty,
    or_none,
    with_input,
)
from windrow.torch._replaced import own_method


def _kernel(
    x: Tensor, bias: Tensor | None, gate: Tensor | None, approximate: str, batch_invariant: bool = False
) -> Tensor:
    try:
        return _native.gelu(x, bias, gate, approximate=approximate, batch_invariant=batch_invariant)
    except (ValueError, TypeError) as error:
        raise with_input(error) from None


def _aten(x: Tensor, bias: Tensor | None, gate: Tensor | None, approximate: str, _: bool) -> Tensor:
    y = F.gelu(x if bias is None else x + bias, approximate=approximate)
    return y if gate is None else y * gate


def _backward_kernel(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    approximate: str,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    grads = _native.gelu_backward(dy, x, bias, gate, approximate, tuple(needs))
    return or_empty(dy, grads)


_gelu = define(
    "gelu(Tensor x, Tensor? bias, Tensor? gate, str approximate, bool batch_invariant=False) -> Tensor",
    _kernel,
    lambda x, bias, gate, approximate, batch_invariant=False: torch.empty_like(x),
)
_gelu_backward = define(
    "gelu_backward(Tensor dy, Tensor x, Tensor? bias, Tensor? gate, str approximate, bool[] needs)"
    " -> (Tensor, Tensor, Tensor)",
    _backward_kernel,
    lambda dy, x, bias, gate, approximate, needs: fake_gradients([x, bias, gate], needs, dy),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # The dispatcher leaves out arguments with their default.
    x, bias, gate, ctx.approximate, *_ = inputs
    ctx.save_for_backward(x, bias, gate)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    tensors = (dy, *ctx.saved_tensors)
    grads = call(_gelu_backward, _backward_kernel, tensors, ctx.approximate, needs)
    return *or_none(grads, needs), None, None


differentiable(_gelu, _kernel, _setup_context, _backward)


def gelu(
    input: Tensor,
    approximate: Literal["none", "tanh"] = "none",
    *,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """`gelu(input + bias) * gate`. If bias and gate are None, it is `torch.nn.functional.gelu`.

    input, gate: f32, f16 or bf16, of the same shape, any strides. bias: [last dimension], f32 or of input's type.
    batch_invariant: if true, the bits of an element do not depend on its place or on other elements.
    """
    tensors = (input, bias, gate)
    if has_torch_function(tensors):
        how = {"bias": bias, "gate": gate, "batch_invariant": batch_invariant}
        return handle_torch_function(gelu, tensors, input, approximate, **how)
    return call(_gelu, _kernel, tensors, approximate, batch_invariant, aten=_aten)


def gelu_of_any(input: Tensor, approximate: str = "none", batch_invariant: bool = False) -> Tensor:
    """GELU of any tensor. PyTorch's operator computes types and devices that Windrow does not support, and calls under
    transforms of `torch.func`, because it has all derivatives."""
    if isinstance(input, Tensor) and (
        input.dtype not in (torch.float32, torch.float16, torch.bfloat16)
        or input.device.type not in ("cpu", "cuda", "meta")
        or (not torch.compiler.is_dynamo_compiling() and torch._C._are_functorch_transforms_active())
    ):
        return F.gelu(input, approximate=approximate)
    return gelu(input, approximate, batch_invariant=batch_invariant)


_FORWARD = own_method(nn.GELU, "forward")


class GELU(nn.GELU):
    """`torch.nn.GELU`, computed by Windrow.

    PyTorch computes it in TorchScript, in ONNX, under transforms of `torch.func`, and for types and devices that
    Windrow does not support. With `batch_invariant` the bits of an element do not depend on other elements."""

    batch_invariant = False

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.gelu(input, approximate=self.approximate)
        if nn.GELU.forward is not _FORWARD or not isinstance(self, GELU):
            # Somebody has replaced PyTorch's method, or `unpatch` has restored the class and somebody still holds this
            # one.
            return nn.GELU.forward(self, input)
        return gelu_of_any(input, self.approximate, self.batch_invariant)
