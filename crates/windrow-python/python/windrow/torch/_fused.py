"""The convolution of an optimized model: `activation(conv2d(x, weight) + bias + residual)`. A weight with two
dimensions belongs to a linear layer over the channels, and PyTorch computes it as one.

The first call of a problem times three implementations: PyTorch's operators one after the other, cuDNN's fused
convolution, and Windrow's convolution. For inference only.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from windrow import _native
from windrow.torch._activations import activation_of
from windrow.torch._calls import goes_into_a_graph, is_direct
from windrow.torch._conv2d import FASTEST, FROZEN, accuracy_of
from windrow.torch._conv2d import _fake as _fake_conv2d
from windrow.torch._filters import forget, kept_with
from windrow.torch._library import autocast, call, define, not_differentiable
from windrow.torch._precision import may_use_tf32
from windrow.torch._remembering import Remembering
from windrow.torch.choice.candidates import Conv, Windrow
from windrow.torch.choice.convolution import look_ahead, way
from windrow.torch.choice.problem import Options, aten, dense


def _as_filter(weight: Tensor) -> Tensor:
    return weight[:, :, None, None] if weight.dim() == 2 else weight


def _accuracy(accuracy: str | None, weight: Tensor, x: Tensor) -> str | None:
    return accuracy_of(accuracy, x, is_linear=weight.dim() == 2)


def _conv(weight: Tensor, bias: Tensor | None, options: Options, activation: str | None, accuracy: str | None) -> Conv:
    filters = kept_with(_as_filter(weight), is_frozen=True, lasts=True)
    return Conv(weight, bias, options, activation, accuracy, filters, is_fused=True)


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *how: Any) -> Tensor:
    y = _layer(weight, bias, *how).computed(x, residual)
    if y is not None:
        return y
    *of, activation, accuracy = how
    return way(_conv(weight, bias, Options(*of), activation, accuracy), x, residual).run(x, residual)


# The modules of compiled graphs, which call the operator without a module.
_LAYERS = _native.Layers()


def _layer(weight: Tensor, bias: Tensor | None, *how: Any) -> "FusedConv2d":
    """The module that remembers who computes calls of the operator with this filter, as long as the filter lives."""
    layer: FusedConv2d | None = _LAYERS.find(weight, bias, how)
    if layer is None:
        weakref.finalize(weight, _LAYERS.drop, id(weight)).atexit = False
        *options, activation, accuracy = how
        layer = FusedConv2d(weight.detach(), None if bias is None else bias.detach(), options, activation, accuracy)
        _LAYERS.keep(weight, bias, how, layer, layer.calls())
    return layer


# A function of an image, the residual, and for some the tensor to write to.
Way = Callable[..., Tensor | None]


@dataclass(frozen=True)
class _Followed:
    """A native call, followed by the residual and the activation that it does not fuse."""

    called: _native.BoundCall
    conv: Conv

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        y = self.called(x)
        return None if y is None else self.conv.finish(y, residual)


@dataclass(frozen=True)
class _Written:
    """An implementation that writes to a place, to which the result of others than Windrow's is copied."""

    run: Way

    def __call__(self, x: Tensor, residual: Tensor | None, out: Tensor) -> Tensor | None:
        if isinstance(self.run, Windrow) and not self.run.is_followed:
            return self.run(x, residual, out)
        return out.copy_(self.run(x, residual))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Found:
    """The function that computes calls like an earlier one. None: the operator, which decides itself."""

    run: Way | None = None
    is_final: bool = True


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *how: Any) -> Tensor:
    *of, activation, accuracy = how
    y = _fake_conv2d(x, _as_filter(weight), bias, *of, None, activation, accuracy, FASTEST, FROZEN)
    if residual is None or (residual.shape == y.shape and residual.dtype == y.dtype):
        return y
    return y + residual


CONV2D_FUSED = define(
    "conv2d_fused(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, SymInt groups, str? activation, str? accuracy) -> Tensor",
    _kernel,
    _fake,
    _LAYERS,
)
not_differentiable("conv2d_fused", instead="conv2d")


def _into(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *how: Any) -> None:
    *of, activation, accuracy, out = how
    if _layer(weight, bias, *of, activation, accuracy).computed(x, residual, out) is None:
        conv = _conv(weight, bias, Options(*of), activation, accuracy)
        _Written(way(conv, x, None if residual is None else dense(residual)).run)(x, residual, out)


# The same, written to `out`: a range of the channels of an image, of which the residual has the strides. Who computes
# it is decided as if result and residual were images of their own. For graphs of the backend alone.
CONV2D_INTO = define(
    "conv2d_into(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, SymInt groups, str? activation, str? accuracy, Tensor(a!) out) -> ()",
    _into,
    lambda *_: None,
    _LAYERS,
)
autocast(CONV2D_FUSED, lower_precision=[0, 1, 2, 3])


def _aten(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *how: Any) -> Tensor:
    *of, activation, _accuracy = how
    y = aten(x, _as_filter(weight), bias, Options(*of))
    return activation_of(activation)(y if residual is None else y + residual)


def _fused(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    options: Sequence[Any],
    activation: str | None,
    accuracy: str | None,
) -> Tensor:
    """The result of the operator. Its kernel is called directly if the dispatcher would do nothing else."""
    tensors = (input, weight, bias, residual)
    if has_torch_function(tensors):
        args = (input, residual, weight, bias, options, activation, accuracy)
        return handle_torch_function(_fused, tensors, *args)
    if input.dim() == max(4, weight.dim()) - 1:
        beside = None if residual is None else residual.unsqueeze(0)
        y = _fused(input.unsqueeze(0), beside, weight, bias, options, activation, accuracy)
        return y.squeeze(0)
    rest = (*options, activation, _accuracy(accuracy, weight, input))
    return call(CONV2D_FUSED, _kernel, tensors, *rest, aten=_aten)


def told(shape: Sequence[Any], options: Sequence[Any], has_bias: bool, activation: str | None) -> str:
    """A convolution in words, as PyTorch's modules print themselves."""
    k, c, *size = (*shape, 1, 1)[: max(4, len(shape))]
    stride, padding, dilation, groups = options
    parts = [f"{c * groups}, {k}, kernel_size={(*size,)}, stride={(*stride,)}"]
    parts += [f"padding={(*padding,)}"] * any(n != 0 for n in padding)
    parts += [f"dilation={(*dilation,)}"] * any(n != 1 for n in dilation)
    parts += [f"groups={groups}"] * (groups != 1) + ["bias=False"] * (not has_bias)
    parts += [f"activation={activation!r}"] * (activation is not None)
    return ", ".join(parts)


class FusedConv2d(Remembering):
    """The module by which `optimize` replaces a convolution and the operations after it.

    Filter and bias are buffers: they are saved and moved like parameters, but not trained."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        options: Sequence[Any],
        activation: str | None = None,
        accuracy: str | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        stride, padding, dilation, groups = options
        self.options = ([*stride], [*padding], [*dilation], int(groups))
        self.activation, self.accuracy = activation, accuracy
        self.eval()

    def forward(self, input: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """The convolution of `input`; `residual` is added before the activation. `out`: where it is written, see
        `CONV2D_INTO`."""
        y = self.computed(input, residual, out) if is_direct(input, residual) else None
        if y is not None:
            return y
        if out is None:
            return _fused(input, residual, self.weight, self.bias, self.options, self.activation, self.accuracy)
        accuracy = _accuracy(self.accuracy, self.weight, input)
        CONV2D_INTO(input, self.weight, self.bias, residual, *self.options, self.activation, accuracy, out)
        return out

    def computed(self, input: Tensor, residual: Tensor | None, out: Tensor | None = None) -> Tensor | None:
        """The convolution, if it is known who computes it, or if this can be decided. PyTorch's dispatcher is not asked."""
        calls, buffers = self.__dict__.get("_calls"), self._buffers
        if calls is not None:
            y: Tensor | None = calls(input, buffers["weight"], buffers["bias"], residual, out)
            if y is not None:
                return y
        found = self._found(input, residual, goes_into_a_graph(input), out)
        if found.run is None:
            return None
        if found.is_final:
            self.calls().keep(found.run, input, residual, out)
        return found.run(input, residual) if out is None else found.run(input, residual, out)

    def calls(self) -> _native.KnownCalls:
        """What computes the calls with this filter and bias."""
        weight, bias = self.weight, self.bias
        calls: _native.KnownCalls | None = self.__dict__.get("_calls")
        if calls is None or not calls.are_of(weight, bias):
            is_linear = weight.dim() == 2
            calls = _native.KnownCalls(weight, bias, lambda: may_use_tf32(is_linear))
            self._keep("_calls", calls)
        return calls

    def known(self, input: Tensor, residual: Tensor | None, out: Tensor | None = None) -> Way | None:
        """The function for tensors like these, if an earlier call found one for good."""
        known: Way | None = self.calls().find(input, residual, out)
        return known

    def _forget(self) -> None:
        super()._forget()
        if (calls := self.__dict__.get("_calls")) is not None:
            # They stay, because `_LAYERS` has them too.
            calls.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_calls"}

    def _found(
        self, input: Tensor, residual: Tensor | None, is_in_graph: bool | None, out: Tensor | None = None
    ) -> _Found:
        weight, bias = self.weight, self.bias
        is_plain = input.dim() == max(4, weight.dim()) and _native.is_plain(input, weight, residual)
        if not is_plain or torch._C._is_any_autocast_enabled():
            return _Found(is_final=False)
        options, accuracy = Options(*self.options), _accuracy(self.accuracy, weight, input)
        conv = _conv(weight, bias, options, self.activation, accuracy)
        look_ahead(input, conv.filter, options)
        decided = way(conv, input, residual if residual is None or out is None else dense(residual))
        if out is not None:
            call = None
            if isinstance(decided.run, Windrow) and decided.is_final and not is_in_graph:
                call = decided.run.into(input, out)
            run = _Written(decided.run) if call is None else _native.BoundCall(call, conv.filter, bias)
            return _Found(run, decided.is_final)
        if not decided.is_final or is_in_graph or not isinstance(decided.run, Windrow):
            return _Found(decided.run, decided.is_final)
        called = _native.BoundCall(decided.run.like(input), conv.filter, bias)
        return _Found(_Followed(called, conv) if decided.run.is_followed else called)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        forget(self.weight)

    def extra_repr(self) -> str:
        return told(self.weight.shape, self.options, self.bias is not None, self.activation)
