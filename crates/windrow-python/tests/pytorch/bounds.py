"""How far roundings can move results and gradients of `act(linear(tensors))` from f64.

`linear` is linear in each of its tensors, so with absolute values for all of them it gives the sum of
the absolute terms of each element, and its gradients for absolute cotangents give those of the
gradients. `U` is half a unit of f32.
"""

from collections.abc import Callable

import torch
from common import ACTIVATIONS
from problems import U
from torch import Tensor

# The steepest slope of SiLU and GELU, those of others, and the steepest slope of derivatives, rounded up.
SLOPE, SLOPES, CURVATURE = 1.13, {"hardswish": 1.5}, 1.0
# Where derivatives jump.
KINKS = {"relu": [0], "relu6": [0, 6], "leaky_relu": [0], "leaky_relu(0.2)": [0], "hardswish": [-3, 3]}
# An activation's own roundings, and what its shorter polynomials for f16 and bf16 add: docs/gelu.md and
# docs/causal-conv1d.md.
ACTIVATION_ROUNDINGS, HALF_POLYNOMIALS = 16, 6.5e-5


def absolute(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {n: None if t is None else t.detach().abs() for n, t in tensors.items()}


def derivative(activation: str | None, v: Tensor) -> Tensor:
    v = v.detach().requires_grad_()
    return torch.autograd.grad(ACTIVATIONS[activation](v).sum(), v)[0]


def activated(activation: str | None, v: Tensor, error: Tensor, scale: Tensor, half: bool) -> Tensor:
    """Error of `act(v)` for an error of v; `scale`: the sum of the absolute terms of v."""
    if activation in (None, "relu", "relu6"):
        return error
    own = ACTIVATION_ROUNDINGS * U + HALF_POLYNOMIALS * half
    return SLOPES.get(activation, SLOPE) * error + own * scale


def before_activation(
    activation: str | None, v: Tensor, error: Tensor, dy: Tensor, half: bool
) -> tuple[Tensor, Tensor]:
    """`dy act'(v)`, and its error for an error of v."""
    slope = derivative(activation, v)
    if activation is None:
        return dy, torch.zeros_like(dy)
    # Beside a kink either slope is right.
    jump = sum((v - kink).abs() <= error for kink in KINKS.get(activation, ()))
    if activation in ("relu", "relu6"):
        return dy * slope, dy.abs() * jump
    own = ACTIVATION_ROUNDINGS * U + HALF_POLYNOMIALS * half
    return dy * slope, dy.abs() * (jump + CURVATURE * error + own * SLOPES.get(activation, SLOPE))


def through(
    linear: Callable[..., Tensor], tensors: dict[str, Tensor | None], name: str, cotangent: Tensor
) -> Tensor:
    """The gradient of `linear` for absolute tensors with respect to one of them."""
    tensors = absolute(tensors)
    tensors[name] = tensors[name].requires_grad_()
    (gradient,) = torch.autograd.grad(
        linear(**tensors), tensors[name], cotangent, allow_unused=True, materialize_grads=True
    )
    return gradient
