"""A convolution of an optimized model: `activation(conv2d(x, weight) + bias + residual)`. A weight of two dimensions is that
of a linear layer over the channels, which PyTorch computes as such.

Three ways are measured when a problem first comes: PyTorch's operators one after the other, what cuDNN has in
one, and Windrow's convolution. For inference only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from windrow import _native
from windrow.torch._activations import activation_of
from windrow.torch._conv2d import FASTEST, FROZEN, accuracy_of
from windrow.torch._conv2d import _fake as _fake_conv2d
from windrow.torch._conv2d_fastest import (
    KEPT,
    NOTHING_FASTER,
    LikeOurs,
    Options,
    Ours,
    PACKED,
    as_named,
    aten,
    by_windrow,
    can_be_ours,
    check_of,
    in_layout,
    is_cudnns,
    is_laid_out,
    is_room_for,
    look_ahead,
    memory_format,
    output_shape,
    problem_of,
)
from windrow.torch._fastest import (
    BESIDE_FUSED,
    PYTORCH,
    TRIES,
    Contestant,
    chosen,
    chosen_in_graphs,
    decide,
    goes_into_a_graph,
    is_ordinary,
    limits,
)
from windrow.torch._filters import filter_cache, forget, kept_with, unkept
from windrow.torch._library import autocast, call, define, not_differentiable
from windrow.torch._precision import flags
from windrow.torch._remembering import Remembering

_MODE = "forward of an optimized model"
_MODE_UNKEPT = "forward of an optimized model without room for its filter"
_CUDNN = "cuDNN, fused"


def _add_(y: Tensor, residual: Tensor | None) -> Tensor:
    """In place unless the sum has another shape or type."""
    if residual is None:
        return y
    if residual.shape == y.shape and residual.dtype == y.dtype:
        return y.add_(residual)
    return y + residual


def _as_filter(weight: Tensor) -> Tensor:
    return weight[:, :, None, None] if weight.dim() == 2 else weight


def _accuracy(accuracy: str | None, weight: Tensor, x: Tensor) -> str | None:
    return accuracy_of(accuracy, x, is_linear=weight.dim() == 2)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.permute(0, 2, 3, 1), weight, bias).permute(0, 3, 1, 2)


def _kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str | None,
    accuracy: str | None,
) -> Tensor:
    options = Options(stride, padding, dilation, groups)
    run, _ = _way(x, weight, bias, residual, options, activation, accuracy)
    return run(x, residual)


def _with_residual(y: Tensor, residual: Tensor | None, activation: str | None) -> Tensor:
    """What is left to do after our convolution where it does not add, and has applied the activation only if nothing is."""
    return y if residual is None else activation_of(activation, in_place=True)(_add_(y, residual))


@dataclass(frozen=True)
class _Ours:
    conv2d: Ours
    activation: str | None

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if self.conv2d.adds:
            return self.conv2d(x, residual)
        return _with_residual(self.conv2d(x), residual, self.activation)

    def like(self, x: Tensor, residual: Tensor | None) -> "Way":
        """The same for images and residuals like these; None comes of others."""
        called = Called(self.conv2d.like(x), self.conv2d.weight, self.conv2d.bias)
        if self.conv2d.adds or residual is None:
            return called

        def run(x: Tensor, residual: Tensor | None) -> Tensor | None:
            y = called(x, None)
            return None if y is None else _with_residual(y, residual, self.activation)

        return run


@dataclass(frozen=True)
class Called:
    """Windrow's convolution as a call like one before, of whose filter and bias it is."""

    call: LikeOurs
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        return self.call(x, self.weight, self.bias, residual)


# Of an image and what is added.
Way = Callable[[Tensor, Tensor | None], Tensor | None]


def _way(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    options: Options,
    activation: str | None,
    accuracy: str | None,
    is_room: bool = True,
) -> tuple[Way, bool]:
    """What computes this, for tensors like these, and whether that is decided for good. `is_room`: for a packed filter."""
    given, weight = weight, _as_filter(weight)
    layout, is_linear = memory_format(x, weight), given.dim() == 2

    def pytorch(x: Tensor, residual: Tensor | None) -> Tensor:
        y = _linear(x, given, bias) if is_linear else aten(x, weight, bias, options)
        return activation_of(activation, in_place=True)(_add_(y.contiguous(memory_format=layout), residual))

    if not can_be_ours(x, weight, bias):
        return pytorch, False
    # What is broadcast, or of another type, is nothing that a convolution adds.
    fits, beside, adds = True, None, False
    if residual is not None:
        fits = [*residual.shape] == output_shape(x, weight, options) and residual.dtype == x.dtype
        adds = fits and is_laid_out(residual, x, layout)
        beside = (fits, residual.dtype, residual.is_contiguous(memory_format=layout), adds)
    inside = activation if residual is None or adds else None
    named = as_named(options, activation=inside, accuracy=accuracy)
    filters = kept_with(weight, is_frozen=True, lasts=True) if is_room else unkept
    mode = _MODE if is_room else _MODE_UNKEPT
    kept = _Ours(Ours(weight, bias, named, layout, filters, adds), activation)
    packed = _Ours(Ours(weight, bias, named, layout, unkept, adds), activation)

    def by_cudnn(x: Tensor, residual: Tensor | None) -> Tensor:
        image = in_layout(x, layout)
        if residual is None:
            y = torch.cudnn_convolution_relu(image, weight, bias, *options[:4])
        else:
            beside = residual.contiguous(memory_format=layout)
            y = torch.cudnn_convolution_add_relu(image, weight, beside, 1.0, bias, *options[:4])
        return y.contiguous(memory_format=layout)

    problem = problem_of(x, weight, bias, options, (activation, beside, is_linear), accuracy)
    choice, is_final = chosen(mode, problem), True
    if choice is None:

        def contestants() -> Iterable[Contestant] | str:
            now = filters()
            if is_cudnns(x, weight, bias, named, layout, now is not None):
                return NOTHING_FASTER
            if adds:
                return by_windrow(x, kept.conv2d, packed.conv2d, now, residual=residual)
            rest = lambda y: _with_residual(y, residual, activation)
            return by_windrow(x, kept.conv2d, packed.conv2d, now, rest)

        is_known = x.is_cuda and activation == "relu" and fits and not is_linear
        others = [Contestant(_CUDNN, lambda: by_cudnn(x, residual))] if is_known else []
        by = filter_cache(weight, lasts=True)
        ask = (lambda: pytorch(x, residual), contestants, others)
        rest_of = lambda y, part: activation_of(activation)(y if residual is None else y + residual[part])
        check = check_of(x, weight, bias, options, accuracy, rest_of, residual, is_linear)
        how = {"layer": by, "image": x.nbytes, "around": BESIDE_FUSED, "check": check}
        choice = decide(mode, problem, x.device, *ask, **how)
        is_final = chosen(mode, problem) is not None
    held = limits(mode, problem)
    kept = replace(kept, conv2d=kept.conv2d.held(held.get(KEPT)))
    packed = replace(packed, conv2d=packed.conv2d.held(held.get(PACKED)))
    if choice == KEPT and KEPT in held and not is_final:
        # Nothing is packed for good by an algorithm that may not stay.
        return replace(packed, conv2d=packed.conv2d.held(held[KEPT])), False
    now = filters()
    if now is not None and not is_room_for(kept.conv2d, x, now[0], mode, problem):
        run, is_decided = _way(x, given, bias, residual, options, activation, accuracy, is_room=False)
        return run, is_decided and now[0].refused(KEPT) >= TRIES
    is_before_a_graph = now is not None and not now[0].bytes and goes_into_a_graph(x) is False
    if is_before_a_graph and chosen_in_graphs(mode, problem) == KEPT:
        # In the graph every replay would look at what was packed in it.
        kept(x, residual)
    return {PYTORCH: pytorch, _CUDNN: by_cudnn, KEPT: kept}.get(choice, packed), is_final


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str | None,
    accuracy: str | None,
) -> Tensor:
    options = (stride, padding, dilation, groups, None)
    y = _fake_conv2d(x, _as_filter(weight), bias, *options, activation, accuracy, FASTEST, FROZEN)
    return _add_(y, residual)


_conv2d_fused = define(
    "conv2d_fused(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, SymInt groups, str? activation, str? accuracy) -> Tensor",
    _kernel,
    _fake,
)
not_differentiable("conv2d_fused", instead="conv2d")
autocast(_conv2d_fused, lower_precision=[0, 1, 2, 3])


def _aten(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str | None,
    *_: Any,
) -> Tensor:
    y = torch.conv2d(x, _as_filter(weight), bias, stride, padding, dilation, groups)
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
    """By the operator, or past the dispatcher where that would only call the kernel."""
    tensors = (input, weight, bias, residual)
    if has_torch_function(tensors):
        args = (input, residual, weight, bias, options, activation, accuracy)
        return handle_torch_function(_fused, tensors, *args)
    if input.dim() == 3:
        beside = None if residual is None else residual.unsqueeze(0)
        y = _fused(input.unsqueeze(0), beside, weight, bias, options, activation, accuracy)
        return y.squeeze(0)
    rest = (*options, activation, _accuracy(accuracy, weight, input))
    return call(_conv2d_fused, _kernel, tensors, *rest, aten=_aten)


def is_direct(*tensors: Tensor | None) -> bool:
    """False for stand-ins, and where somebody wants to see what is called."""
    return (
        is_ordinary(tensors[0])
        and not torch.compiler.is_dynamo_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not has_torch_function(tensors)
    )


def _seen(input: Tensor, residual: Tensor | None, is_linear: bool) -> tuple[Any, ...]:
    """What tells calls of a module apart; at last whether they go into a graph, or may before a capture."""
    beside = None if residual is None else (residual.shape, residual.stride(), residual.dtype)
    of_image = input.shape, input.stride(), input.dtype, input.device
    return *of_image, beside, flags(input, is_linear), goes_into_a_graph(input)


class FusedConv2d(Remembering):
    """What `optimize` puts in the place of a convolution and what follows it. Filter and bias are buffers: they are
    saved and moved like parameters, but nobody trains them."""

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

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """`residual` is added before the activation."""
        if is_direct(input, residual):
            buffers = self._buffers
            weight, bias = buffers["weight"], buffers["bias"]
            seen = _seen(input, residual, weight.dim() == 2)
            run = self._recall(seen, weight, bias, lambda: self._found(input, residual, seen[-1]))
            if run is not None and _native.is_plain(input, weight, residual):
                y = run(input, residual)
                if y is not None:
                    return y
                # The filter's memory is another.
                self._forget()
        return _fused(input, residual, self.weight, self.bias, self.options, self.activation, self.accuracy)

    def known(self, input: Tensor, residual: Tensor | None) -> Way | None:
        """What computes tensors like these, if a call has found that for good."""
        _, _, remembered = self._remembered
        return None if remembered is None else remembered.get(_seen(input, residual, self.weight.dim() == 2))

    def _found(self, input: Tensor, residual: Tensor | None, is_in_graph: bool | None) -> tuple[Way | None, bool]:
        """What computes tensors like these, and whether that is found for good."""
        weight, bias = self.weight, self.bias
        is_plain = input.dim() == 4 and _native.is_plain(input, weight, residual)
        if not is_plain or torch._C._is_any_autocast_enabled():
            return None, False
        options, accuracy = Options(*self.options), _accuracy(self.accuracy, weight, input)
        look_ahead(input, _as_filter(weight), options)
        run, is_final = _way(input, weight, bias, residual, options, self.activation, accuracy)
        if is_final and type(run) is _Ours and not is_in_graph:
            run = run.like(input, residual)
        return run, is_final

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        forget(self.weight)

    def extra_repr(self) -> str:
        k, c, *size = _as_filter(self.weight).shape
        stride, padding, dilation, groups = self.options
        parts = [f"{c * groups}, {k}, kernel_size={tuple(size)}, stride={tuple(stride)}"]
        parts += [f"padding={tuple(padding)}"] * (padding != [0, 0])
        parts += [f"dilation={tuple(dilation)}"] * (dilation != [1, 1])
        parts += [f"groups={groups}"] * (groups != 1) + ["bias=False"] * (self.bias is None)
        parts += [f"activation={self.activation!r}"] * (self.activation is not None)
        return ", ".join(parts)
