"""The pass that folds scales and shifts of channels behind a convolution into its filter and bias.

Batch normalisation in evaluation is such arithmetic, as one operator or as several; so are layer scales and other
factors of channels. Their operands depend on parameters alone, so the new filter is computed in f64 and rounded once.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from windrow.torch.backend._constants import CONVERSIONS, Constants, is_floating, value
from windrow.torch.backend._convolutions import VALUE, Convolution, called, convolutions, stands_for
from windrow.torch.backend._report import FOLDED, NAME, folded_name, name_of

_aten, _prims = torch.ops.aten, torch.ops.prims
_SUMS = (_aten.add.Tensor, _aten.add.Scalar)
_DIFFERENCES = (_aten.sub.Tensor, _aten.sub.Scalar)
_PRODUCTS = (_aten.mul.Tensor, _aten.mul.Scalar)
_QUOTIENTS = (_aten.div.Tensor, _aten.div.Scalar)
# Batch normalisations as one operator: where weight, bias, mean, variance and eps are, and a flag that has to be false.
NORMS: dict[Any, tuple[tuple[int, int, int, int, int], int | None]] = {
    _aten._native_batch_norm_legit_no_training.default: ((1, 2, 3, 4, 6), None),
    _aten.native_batch_norm.default: ((1, 2, 3, 4, 7), 5),
    _aten.cudnn_batch_norm.default: ((1, 2, 3, 4, 7), 5),
}


@dataclass
class Affine:
    """The scale and shift of a convolution's channels, as nodes of the prologue in f64."""

    constants: Constants
    channels: int
    device: torch.device
    scale: fx.Node | None = None
    shift: fx.Node | None = None
    steps: list[str] = field(default_factory=list)
    # Modules that they were, or operators.
    names: dict[str, None] = field(default_factory=dict)

    def _each(self, operand: Any) -> Any:
        """An operand as a vector with an element for each channel; a number stays a number."""
        if not isinstance(operand, fx.Node):
            return operand
        return self.constants.call(_aten.reshape.default, self.constants.widened(operand), [-1])

    def _full(self, number: float) -> fx.Node:
        how = {"dtype": torch.float64, "device": self.device}
        return self.constants.call(_aten.full.default, [self.channels], number, **how)

    def times(self, factor: Any, target: Any = _aten.mul.Tensor) -> None:
        self.scale = self.constants.call(target, self.scale or self._full(1.0), factor)
        if self.shift is not None:
            self.shift = self.constants.call(target, self.shift, factor)

    def plus(self, term: Any, target: Any = _aten.add.Tensor) -> None:
        self.shift = self.constants.call(target, self.shift or self._full(0.0), term)


def fold(graph: fx.Graph, constants: Constants) -> list[str]:
    """Changes the graph. Returns what was folded into each convolution, in words."""
    done = []
    for conv in convolutions(graph):
        if conv.output_padding is None and conv.weight in constants and (conv.bias is None or conv.bias in constants):
            what = _fold(graph, conv, constants)
            done += [what] if what else []
    graph.eliminate_dead_code()
    return done


def _fold(graph: fx.Graph, conv: Convolution, constants: Constants) -> str | None:
    weight = value(conv.weight)
    if any(not isinstance(n, int) for n in weight.shape):
        return None
    channels = weight.shape[0]
    affine = Affine(constants, channels, weight.device)
    if conv.bias is not None:
        affine.shift = constants.widened(conv.bias)
    last, node = conv.node, conv.node
    while (after := _only_user(node)) is not None and (found := _step(after, node, affine, channels)) is not None:
        if after.target not in CONVERSIONS:
            affine.names[folded_name(after)] = None
        last = node = found
    if not affine.steps:
        # Without arithmetic only a computation of the filter is moved to the prologue, such as autocast's conversion.
        is_input = all(n is None or n.op == "placeholder" for n in (conv.weight, conv.bias))
        if not is_input:
            args = [constants.moved(conv.weight), None if conv.bias is None else constants.moved(conv.bias)]
            conv.node.args = (conv.x, *args, *conv.node.args[3:])
        return None
    scaled = constants.widened(conv.weight)
    if affine.scale is not None:
        by = constants.call(_aten.reshape.default, affine.scale, [-1, *[1] * (weight.dim() - 1)])
        scaled = constants.call(_aten.mul.Tensor, scaled, by)
    rounded = lambda n: constants.call(_prims.convert_element_type.default, n, weight.dtype)
    with weight.fake_mode:
        like = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
        if weight.is_cuda and weight.dim() == 4 and value(conv.x).is_contiguous(memory_format=torch.channels_last):
            # cuDNN's kernels for such images read such filters.
            like = like.contiguous(memory_format=torch.channels_last)
        like_bias = torch.empty(channels, dtype=weight.dtype, device=weight.device)
    bias = None if affine.shift is None else constants.add(rounded(affine.shift), like_bias)
    new = called(
        graph, last, conv.node.target, conv.x, constants.add(rounded(scaled), like), bias, *conv.node.args[3:]
    )
    stands_for(new, last, conv.node)
    new.meta |= {NAME: name_of(conv.node), FOLDED: [*affine.names]}
    if value(last).dtype != value(new).dtype:
        new = called(graph, last, _prims.convert_element_type.default, new, value(last).dtype)
        new.meta[VALUE] = last.meta.get(VALUE)
    last.replace_all_uses_with(new)
    return ", ".join(affine.steps)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _step(node: fx.Node, one: fx.Node, affine: Affine, channels: int) -> fx.Node | None:
    """Adds a node's arithmetic to `affine`. Returns the node with the result, or None if the node cannot be folded."""
    if node.target in NORMS:
        return normalised(node, one, affine)
    if not is_floating(node) or value(node).dtype == torch.float64:
        return None
    if node.target in CONVERSIONS and {*node.kwargs} <= {"dtype"}:
        return node
    if node.target is _aten.neg.default:
        affine.times(-1.0)
        affine.steps.append("neg")
        return node
    kinds = _SUMS + _DIFFERENCES + _PRODUCTS + _QUOTIENTS
    if node.target not in kinds or node.kwargs or len(node.args) != 2 or value(node).shape != value(one).shape:
        return None
    first, second = node.args
    other = second if first is one else first
    if other is one or not _is_of_channels(other, affine.constants, channels, affine.device, value(one).dim()):
        return None
    is_first = first is one
    if node.target in _QUOTIENTS and not is_first:
        return None
    operand = affine._each(other)
    if node.target in _SUMS:
        affine.plus(operand)
    elif node.target in _DIFFERENCES:
        if not is_first:
            affine.times(-1.0)
        affine.plus(operand, _aten.sub.Tensor if is_first else _aten.add.Tensor)
    else:
        affine.times(operand, _aten.mul.Tensor if node.target in _PRODUCTS else _aten.div.Tensor)
    affine.steps.append(node.target._opname)
    return node


def _is_of_channels(operand: Any, constants: Constants, channels: int, device: torch.device, dims: int) -> bool:
    """True for a number, and for a tensor that depends on parameters alone and has one value for each channel."""
    if isinstance(operand, int | float):
        return True
    if operand not in constants or not is_floating(operand) or value(operand).device != device:
        return False
    shape = value(operand).shape
    if len(shape) > dims:
        return False
    shape = [1] * (dims - len(shape)) + [*shape]
    return all(n == 1 for i, n in enumerate(shape) if i != 1) and shape[1] in (1, channels)


def normalised(node: fx.Node, one: fx.Node, affine: Affine) -> fx.Node | None:
    """Adds the arithmetic of a batch normalisation of `one` to `affine`. Returns the node with the result, or None."""
    places, flag = NORMS[node.target]
    if node.args[0] is not one or (flag is not None and node.args[flag] is not False):
        return None
    results = [*node.users]
    if len(results) != 1 or results[0].args[1] != 0:
        return None
    weight, bias, mean, var, eps = (node.args[i] for i in places)
    constants = affine.constants
    if any(t is not None and t not in constants for t in (weight, bias, mean, var)) or mean is None or var is None:
        return None
    affine.plus(affine._each(mean), _aten.sub.Tensor)
    invstd = constants.call(_aten.rsqrt.default, constants.call(_aten.add.Tensor, affine._each(var), eps))
    affine.times(invstd)
    if weight is not None:
        affine.times(affine._each(weight))
    if bias is not None:
        affine.plus(affine._each(bias))
    affine.steps.append("batch_norm")
    return results[0]
