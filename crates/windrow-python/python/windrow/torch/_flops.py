"""The operation counts of Windrow's operators for PyTorch's counter (`torch.utils.flop_counter`): two operations for
each product of the direct sum, whatever the algorithm, as for PyTorch's own operators. GELU counts as zero there."""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch.utils.flop_counter import flop_registry, register_flop_formula

from windrow.torch._library import OPERATORS as ops

Shape = Sequence[int]


def register() -> None:
    """Registers the operators with the counter."""
    formulas = {
        ops.conv2d: _conv2d,
        ops.conv2d_backward: _conv2d_backward,
        ops.causal_conv1d: _causal_conv1d,
        ops.causal_conv1d_split: _causal_conv1d,
        ops.causal_conv1d_backward: _causal_conv1d_backward,
        ops.causal_conv1d_update: _causal_conv1d_update,
    }
    for packet, formula in formulas.items():
        register_flop_formula(packet)(formula)
        # PyTorch 2.4 keeps the packet's operators, and looks for the packet.
        flop_registry.setdefault(packet, flop_registry.get(packet.default))


def _conv2d(x: Shape, weight: Shape, *rest: Any, out_shape: Shape, **_: Any) -> int:
    # A transposed convolution meets the filter at each position of x.
    _bias, _stride, _padding, _dilation, _groups, output_padding, *_more = rest
    n, _c, *positions = out_shape if output_padding is None else x
    return 2 * n * prod(positions) * prod(weight)


def _conv2d_backward(
    dy: Shape, x: Shape, weight: Shape, *rest: Any, out_shape: Any, **_: Any
) -> int:
    of_input, of_filter, _of_bias = rest[-1]
    forward = _conv2d(x, weight, *rest, out_shape=dy)
    return forward * (bool(of_input) + bool(of_filter))


def _causal_conv1d(x: Shape, weight: Shape, *_: Any, out_shape: Any, **__: Any) -> int:
    b, _d, l = x
    return 2 * b * l * prod(weight)


def _causal_conv1d_backward(
    dy: Shape, dfinal_states: Any, x: Shape, weight: Shape, *rest: Any, out_shape: Any, **_: Any
) -> int:
    of_input, of_filter, *_others = rest[-1]
    return _causal_conv1d(x, weight, out_shape=dy) * (bool(of_input) + bool(of_filter))


def _causal_conv1d_update(x: Shape, state: Shape, weight: Shape, *_: Any, out_shape: Any, **__: Any) -> int:
    b, *l = x[0], *x[2:]
    return 2 * b * prod(l) * prod(weight)
