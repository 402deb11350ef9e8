"""The convolution modules that take the place of PyTorch's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_scripting
from torch.overrides import has_torch_function

from windrow import _native
from windrow.torch._activations import ACTIVATIONS, activation_of
from windrow.torch._calls import MISSING, goes_into_a_graph, is_ordinary, is_traced
from windrow.torch._conv2d import FASTEST, Training, accuracy_of, conv1d, conv2d, conv_transpose1d, conv_transpose2d
from windrow.torch._conv3d import conv3d
from windrow.torch._filters import kept_with, unkept
from windrow.torch._precision import Flags
from windrow.torch._precision import flags as flags_of
from windrow.torch._remembering import REMEMBERED, Remembering
from windrow.torch._replaced import own_method
from windrow.torch.choice import problem
from windrow.torch.choice.candidates import Conv, PyTorch, Windrow
from windrow.torch.choice.convolution import is_pytorchs, look_ahead, way
from windrow.torch.choice.gradients import decided_for
from windrow.torch.choice.problem import Options, memory_format

Run = Callable[..., Tensor | None]
# Shape, type and whether gradients may be wanted.
Key = tuple[torch.Size, torch.dtype, bool]


class PyTorchClass(NamedTuple):
    """The PyTorch class that a module replaces, with that class's own methods; see `_replaced`."""

    kind: type[nn.Module]
    forward: Callable[..., Any] | None
    conv_forward: Callable[..., Any] | None


def _methods(kind: type[nn.Module]) -> PyTorchClass:
    return PyTorchClass(kind, own_method(kind, "forward"), own_method(kind, "_conv_forward"))


_CONV1D = _methods(nn.Conv1d)
_CONV2D = _methods(nn.Conv2d)
_CONV3D = _methods(nn.Conv3d)
_CONV_TRANSPOSE1D = _methods(nn.ConvTranspose1d)
_CONV_TRANSPOSE2D = _methods(nn.ConvTranspose2d)


@dataclass(frozen=True, slots=True)
class Found:
    """The function that computes calls like an earlier one of a module."""

    # A function of image, filter and bias; it returns None for tensors that it was not made for. None: Windrow's
    # function, which decides itself.
    run: Run | None = None
    is_pytorchs: bool = False
    # True if it computes images of this shape and type, whatever their strides.
    is_for_shape: bool = False
    # True if another implementation computes them in CUDA graphs.
    is_another_in_graphs: bool = False
    is_final: bool = True


@dataclass(frozen=True, slots=True)
class Known:
    """The function for all later calls with the same `Key`."""

    shape: torch.Size
    dtype: torch.dtype
    is_grad: bool
    run: Run
    # The flags under which it is valid; None for PyTorch's operator, which is valid under all.
    flags: Flags | None
    # The arguments of PyTorch's operator behind the bias.
    rest: tuple[Any, ...]
    is_another_in_graphs: bool


class Convolution(Remembering):
    """The common base of these modules: the options that PyTorch's modules do not have, and what earlier calls found.
    """

    activation: str | None = None
    accuracy: str | None = None
    algorithm: str | None = None
    frozen: bool = False

    # The known functions for each key, and the one of the last call.
    _known: dict[Key, Known] = {}
    _last: Known | None = None

    FOUND_OUT = (*Remembering.FOUND_OUT, "_known", "_last")

    # TorchScript compiles modules that have been called, too.
    __jit_ignored_attributes__ = [*FOUND_OUT]

    # PyTorch's operator, and its class.
    _operator: Callable[..., Tensor]
    _theirs: PyTorchClass

    @staticmethod
    def _pytorchs() -> PyTorchClass:
        """The value of `_theirs`, as a function: PyTorch 2.4 traces functions and named tuples, but no attributes of a
        class."""
        raise NotImplementedError

    def _rest(self) -> tuple[Any, ...]:
        """The arguments of PyTorch's operator behind the bias."""
        return self.stride, self.padding, self.dilation, self.groups

    def _options(self, padding: Sequence[int]) -> Options:
        raise NotImplementedError

    def _called(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The result of Windrow's function."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        if is_scripting():
            return self._scripted(input, self.weight, self.bias)
        if not isinstance(self, Convolution):
            # `unpatch` has restored the class, but somebody still holds this method.
            return type(self).forward(self, input)
        if type(input) is Tensor and not is_traced():
            # This takes less time than PyTorch's own module, because parameters are not looked up as attributes. Two
            # problems may agree in all that is compared here. That does no harm: PyTorch's operator computes both, and
            # ours checks its arguments itself. The last call's key is compared first, which takes half as long as to
            # look one up.
            known = self._last
            if known is None or not (
                input.shape == known.shape and input.dtype is known.dtype and torch.is_grad_enabled() is known.is_grad
            ):
                known = self._known.get((input.shape, input.dtype, torch.is_grad_enabled()))
                self.__dict__["_last"] = known
            parameters = self._parameters
            weight, bias = parameters.get("weight"), parameters.get("bias", MISSING)
            # Otherwise `nn.utils` has put properties there.
            if weight is not None and bias is not MISSING:
                if known is not None:
                    theirs = self._theirs
                    kind = theirs.kind
                    if kind.forward is not theirs.forward or kind._conv_forward is not theirs.conv_forward:
                        pass
                    elif known.is_another_in_graphs and goes_into_a_graph(input):
                        pass
                    elif known.flags is None:
                        return known.run(input, weight, bias, *known.rest)
                    elif known.flags == flags_of(input):
                        y = known.run(input, weight, bias)
                        if y is not None:
                            return y
                if not self._is_replaced():
                    return self._conv_forward(input, weight, bias)
        if self._is_replaced():
            return self._pytorchs().kind.forward(self, input)
        return self._conv_forward(input, self.weight, self.bias)

    def _is_replaced(self) -> bool:
        """True if somebody has put another `forward` into PyTorch's class."""
        theirs = self._pytorchs()
        return theirs.kind.forward is not theirs.forward

    def layer(self) -> tuple[Any, ...]:
        """The part of a `Problem` that describes this module."""
        none = [0] * len(self.stride)
        padding: Any = self.padding if self.padding_mode == "zeros" else none
        if isinstance(padding, str):
            same = [d * (r - 1) // 2 for d, r in zip(self.dilation, self.kernel_size, strict=True)]
            padding = same if padding == "same" else none
        return problem.layer(self.weight, self.bias, self._options(padding))

    def _found(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Found:
        """The function that computes images like this one. If it is final, later calls find it by their `Key`."""
        is_grad, flags, is_in_graph = torch.is_grad_enabled(), flags_of(input), bool(goes_into_a_graph(input))
        wants = is_grad and (input.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
        seen = (input.shape, input.stride(), input.dtype, input.device, is_grad, wants, flags, is_in_graph)
        find = lambda: self._find(input, weight, bias, flags, is_in_graph)
        if self._parameters.get("weight") is not weight or self._parameters.get("bias") is not bias:
            # A filter that was made for this call is not kept: it is another next time, and nobody could copy the module.
            return find()
        found = self._recall(seen, weight, bias, find)
        # A class derived from this may do more with images and filters than to compute.
        is_own = type(self)._conv_forward is Convolution._conv_forward
        if found.is_final and found.is_for_shape and found.run is not None and is_own:
            all_known = self.__dict__.setdefault("_known", {})
            if len(all_known) >= REMEMBERED:
                all_known.clear()
            key = input.shape, input.dtype, is_grad
            under = (None, self._rest()) if found.is_pytorchs else (flags, ())
            all_known[key] = Known(*key, found.run, *under, found.is_another_in_graphs)
        return found

    def _find(self, input: Tensor, weight: Tensor, bias: Tensor | None, flags: Flags, is_in_graph: bool) -> Found:
        nothing = Found(is_final=False)
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            return nothing
        options, accuracy = self._options(self.padding), accuracy_of(self.accuracy, input)
        is_plain, is_autocast = _native.is_plain(input, weight, bias), flags[0]
        conv = Conv(weight, bias, options, None, accuracy, kept_with(weight, self.frozen))
        if self.algorithm is None:
            run = None if is_in_graph or is_autocast or not is_plain else self._planned(input, conv)
            return nothing if run is None else Found(run, is_for_shape=True)
        pytorchs = Found(self._operator, is_pytorchs=True, is_for_shape=not is_in_graph)
        if is_autocast or not is_plain:
            is_theirs = is_pytorchs(input, weight, bias, options, accuracy, self.frozen)
            if is_theirs:
                return pytorchs
            if is_theirs is None or is_autocast or not _native.is_only_recorded(input, weight, bias):
                return nothing
            conv.filters = unkept if weight.requires_grad else conv.filters
        if not problem.can_be_ours(input, weight, bias):
            return nothing
        if is_plain and conv.filters() is None:
            # The next call keeps it.
            return nothing
        look_ahead(input, weight, options)
        decided = way(conv, input)
        if not is_plain:
            mine = decided_for(input, weight, bias, options, accuracy)
            is_known = decided.is_final and mine is not None
            return Found(Training(input, decided, conv, mine)) if is_known else nothing
        if decided.is_final and isinstance(decided.run, PyTorch):
            return replace(pytorchs, is_another_in_graphs=decided.is_another_in_graphs)
        if not decided.is_final or is_in_graph or not isinstance(decided.run, Windrow):
            return Found(lambda x, *_: decided.run(x), is_final=decided.is_final)
        return Found(decided.run.like(input), is_for_shape=True, is_another_in_graphs=decided.is_another_in_graphs)

    def _planned(self, input: Tensor, conv: Conv) -> Run | None:
        """Windrow's convolution as the cost model chooses it. None if Windrow has no such convolution; `_called` then
        raises the error."""
        is_usual = input.dim() == conv.weight.dim() and input.device.type in ("cpu", "cuda") and input.numel() > 0
        is_usual = is_usual and not problem.is_video(input)
        if not is_usual or self.activation not in ACTIVATIONS:
            return None
        conv.activation = self.activation
        try:
            return Windrow(conv, memory_format(input, input), conv.filters).like(input)
        except (TypeError, ValueError, RuntimeError):
            return None

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        theirs = self._pytorchs()
        kind = theirs.kind
        if kind._conv_forward is not theirs.conv_forward:
            return activation_of(self.activation)(kind._conv_forward(self, input, weight, bias))
        is_fastest = self.algorithm == FASTEST
        if (
            (self.activation is None if is_fastest else self.algorithm is None)
            and is_ordinary(input)
            and not torch.compiler.is_dynamo_compiling()
            and not has_torch_function((input, weight, bias))
        ):
            if not torch._C._are_functorch_transforms_active():
                found = self._found(input, weight, bias)
                if found.is_pytorchs:
                    return self._operator(input, weight, bias, *self._rest())
                is_training = type(found.run) is Training
                is_straight = _native.is_only_recorded if is_training else _native.is_plain
                if found.run is not None and is_straight(input, weight, bias):
                    y = found.run(input, weight, bias)
                    if y is not None:
                        return y
                    # The filter's memory is another.
                    self._forget()
            elif is_fastest:
                # PyTorch's operator has all derivatives, and takes the batches of `vmap` whole.
                padded, padding = self._padded(input)
                return self._operator(padded, weight, bias, self.stride, padding, *self._rest()[2:])
        return self._called(input, weight, bias)

    def _how(self) -> dict[str, Any]:
        """The keyword arguments of Windrow's functions."""
        return {
            "activation": self.activation,
            "accuracy": self.accuracy,
            "algorithm": self.algorithm,
            "frozen": self.frozen,
        }

    def _padded(self, input: Tensor) -> tuple[Tensor, Any]:
        """The input after padding that is not by zeros, and the padding that is left for the convolution."""
        if self.padding_mode == "zeros":
            return input, self.padding
        return F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0

    def _activated(self, y: Tensor) -> Tensor:
        """The activation for TorchScript, which can use neither the dictionary of `activation_of` nor Windrow's
        operators."""
        if self.activation is not None:
            if self.activation == "relu":
                return F.relu(y)
            if self.activation == "relu6":
                return F.relu6(y)
            if self.activation == "leaky_relu":
                return F.leaky_relu(y)
            if self.activation.startswith("leaky_relu("):
                return F.leaky_relu(y, float(self.activation[11:-1]))
            if self.activation == "hardswish":
                return F.hardswish(y)
            if self.activation == "silu" or self.activation == "swish":
                return F.silu(y)
            if self.activation == "gelu":
                return F.gelu(y)
            if self.activation == "gelu_tanh":
                return F.gelu(y, approximate="tanh")
            if self.activation != "none" and self.activation != "identity":
                raise ValueError(f"`activation` is {self.activation}, which is none of Windrow's")
        return y


class Conv1d(Convolution, nn.Conv1d):
    """`torch.nn.Conv1d`, computed by Windrow as a `Conv2d` of images of one row, with the same options as
    attributes."""

    __constants__ = [*nn.Conv1d.__constants__, "activation"]
    _operator = torch.conv1d
    _theirs = _CONV1D

    @staticmethod
    def _pytorchs() -> PyTorchClass:
        return _CONV1D

    def _options(self, padding: Sequence[int]) -> Options:
        return Options((1, *self.stride), (0, *padding), (1, *self.dilation), self.groups)

    def _called(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input, padding = self._padded(input)
        return conv1d(input, weight, bias, self.stride, padding, self.dilation, self.groups, **self._how())

    def _scripted(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            y = F.conv1d(input, weight, bias, self.stride, (0,), self.dilation, self.groups)
        else:
            y = F.conv1d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return self._activated(y)


class Conv2d(Convolution, nn.Conv2d):
    """`torch.nn.Conv2d`, computed by Windrow; in TorchScript and in ONNX by PyTorch.

    The options of the function `conv2d` that `torch.nn.Conv2d` does not have are attributes of the module:
    `activation`, `accuracy`, `algorithm` and `frozen`. The filter of a `frozen` module is not checked for changes.
    """

    __constants__ = [*nn.Conv2d.__constants__, "activation"]
    _operator = torch.conv2d
    _theirs = _CONV2D

    @staticmethod
    def _pytorchs() -> PyTorchClass:
        return _CONV2D

    def _options(self, padding: Sequence[int]) -> Options:
        return Options(self.stride, padding, self.dilation, self.groups)

    def _called(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input, padding = self._padded(input)
        return conv2d(input, weight, bias, self.stride, padding, self.dilation, self.groups, **self._how())

    def _scripted(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            y = F.conv2d(input, weight, bias, self.stride, (0, 0), self.dilation, self.groups)
        else:
            y = F.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return self._activated(y)


class Conv3d(Convolution, nn.Conv3d):
    """`torch.nn.Conv3d`, computed by `conv3d`. Its options are attributes, as those of `Conv2d` are."""

    __constants__ = [*nn.Conv3d.__constants__, "activation"]
    _operator = torch.conv3d
    _theirs = _CONV3D

    @staticmethod
    def _pytorchs() -> PyTorchClass:
        return _CONV3D

    def _options(self, padding: Sequence[int]) -> Options:
        return Options(self.stride, padding, self.dilation, self.groups)

    def _called(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input, padding = self._padded(input)
        return conv3d(input, weight, bias, self.stride, padding, self.dilation, self.groups, **self._how())

    def _scripted(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            y = F.conv3d(input, weight, bias, self.stride, (0, 0, 0), self.dilation, self.groups)
        else:
            y = F.conv3d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return self._activated(y)


class _Transposed(Convolution):
    """The common base of `ConvTranspose1d` and `ConvTranspose2d`."""

    # Ours, of the same name as PyTorch's.
    _function: Callable[..., Tensor]

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if is_scripting():
            return self._scripted(input, output_size)
        sizes = () if output_size is None else (output_size,)
        if not isinstance(self, Convolution):
            return type(self).forward(self, input, *sizes)
        if self._is_replaced():
            return activation_of(self.activation)(self._pytorchs().kind.forward(self, input, *sizes))
        if output_size is None:
            return super().forward(input)
        shape = (self.stride, self.padding, self.kernel_size, len(self.kernel_size), self.dilation)
        output_padding = self._output_padding(input, output_size, *shape)
        return self._by_function(input, self.weight, self.bias, output_padding)

    def _rest(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.output_padding, self.groups, self.dilation

    def _find(self, input: Tensor, weight: Tensor, bias: Tensor | None, flags: Flags, is_in_graph: bool) -> Found:
        # If the output padding is at least the stride, the function appends zeros to the input.
        if any(more >= s for more, s in zip(self.output_padding, self.stride, strict=True)):
            return Found(is_final=False)
        return super()._find(input, weight, bias, flags, is_in_graph)

    def _planned(self, *_: Any) -> None:
        return None

    def _called(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._by_function(input, weight, bias, self.output_padding)

    def _by_function(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, output_padding: Sequence[int]
    ) -> Tensor:
        rest = (self.stride, self.padding, output_padding, self.groups, self.dilation)
        return self._function(input, weight, bias, *rest, **self._how())


class ConvTranspose1d(_Transposed, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d`, computed by Windrow as a `ConvTranspose2d` of images of one row. Its options are
    attributes, as those of `Conv2d` are."""

    __constants__ = [*nn.ConvTranspose1d.__constants__, "activation"]
    _operator = torch.conv_transpose1d
    _function = staticmethod(conv_transpose1d)
    _theirs = _CONV_TRANSPOSE1D

    @staticmethod
    def _pytorchs() -> PyTorchClass:
        return _CONV_TRANSPOSE1D

    def _options(self, padding: Sequence[int]) -> Options:
        output_padding = (0, *self.output_padding)
        return Options((1, *self.stride), (0, *padding), (1, *self.dilation), self.groups, output_padding)

    def _scripted(self, input: Tensor, output_size: list[int] | None) -> Tensor:
        output_padding = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, 1, self.dilation
        )
        stride, padding, groups, dilation = self.stride, self.padding, self.groups, self.dilation
        y = F.conv_transpose1d(
            input, self.weight, self.bias, stride, padding, output_padding, groups, dilation
        )
        return self._activated(y)


class ConvTranspose2d(_Transposed, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d`, computed by `conv_transpose2d`. Its options are attributes, as those of `Conv2d`
    are."""

    __constants__ = [*nn.ConvTranspose2d.__constants__, "activation"]
    _operator = torch.conv_transpose2d
    _function = staticmethod(conv_transpose2d)
    _theirs = _CONV_TRANSPOSE2D

    @staticmethod
    def _pytorchs() -> PyTorchClass:
        return _CONV_TRANSPOSE2D

    def _options(self, padding: Sequence[int]) -> Options:
        return Options(self.stride, padding, self.dilation, self.groups, self.output_padding)

    def _scripted(self, input: Tensor, output_size: list[int] | None) -> Tensor:
        output_padding = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, 2, self.dilation
        )
        stride, padding, groups, dilation = self.stride, self.padding, self.groups, self.dilation
        y = F.conv_transpose2d(
            input, self.weight, self.bias, stride, padding, output_padding, groups, dilation
        )
        return self._activated(y)
