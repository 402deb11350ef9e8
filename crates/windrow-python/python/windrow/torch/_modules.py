"""Convolutions as modules, in the place of PyTorch's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_scripting
from torch.overrides import has_torch_function

from windrow import _native
from windrow.torch import _conv2d_fastest
from windrow.torch._activations import ACTIVATIONS, activation_of
from windrow.torch._conv2d import FASTEST, Training, accuracy_of, conv1d, conv2d, conv_transpose1d, conv_transpose2d
from windrow.torch._conv2d_fastest import Options, Ours, as_named, memory_format
from windrow.torch._fastest import MISSING, goes_into_a_graph, is_ordinary, is_traced
from windrow.torch._filters import kept_with, unkept
from windrow.torch._precision import Flags
from windrow.torch._precision import flags as flags_of
from windrow.torch._remembering import REMEMBERED, Remembering
from windrow.torch._replaced import own_method

# Shape, type and whether gradients may be wanted.
Key = tuple[torch.Size, torch.dtype, bool]
# What computes images; the flags under which it does, None for PyTorch's operator, and what that is given behind the bias;
# whether it is another in graphs.
Found = tuple[Callable[..., Any], Flags | None, tuple[Any, ...], bool]
# The class of PyTorch's in whose place a module stands, and its own `forward` and `_conv_forward`; see `_replaced`.
Theirs = tuple[type[nn.Module], Callable[..., Any] | None, Callable[..., Any] | None]
Known = tuple[torch.Size, torch.dtype, bool, Callable[..., Any], Flags | None, tuple[Any, ...], bool, *Theirs]


def _methods(kind: type[nn.Module]) -> Theirs:
    return kind, own_method(kind, "forward"), own_method(kind, "_conv_forward")


def PYTORCHS(input: Tensor) -> Tensor:
    """Stands for PyTorch's own forward of a module."""
    raise NotImplementedError


class Convolution(Remembering):
    """What these modules have in common: options that PyTorch's have not, and what earlier calls found out."""

    activation: str | None = None
    accuracy: str | None = None
    algorithm: str | None = None
    frozen: bool = False
    # Whether the filter was laid out for the kernels that compute row-major images: the result is laid out as the image.
    is_turned: bool = False

    # For each key; and what the last call took.
    _known: dict[Key, Known] = {}
    _last: Known | None = None

    FOUND_OUT = (*Remembering.FOUND_OUT, "_known", "_last")

    # TorchScript compiles modules that have been called, too.
    __jit_ignored_attributes__ = [*FOUND_OUT]

    # PyTorch's operator, and its class.
    _operator: Callable[..., Tensor]
    _theirs: Theirs

    def _rest(self) -> tuple[Any, ...]:
        """What that is given behind the bias."""
        return self.stride, self.padding, self.dilation, self.groups

    def _options(self, padding: Sequence[int]) -> Options:
        raise NotImplementedError

    def _called(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """By our function."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        if is_scripting():
            return self._scripted(input, self.weight, self.bias)
        if not isinstance(self, Convolution):
            # `unpatch` has taken it back, and somebody has kept this method.
            return type(self).forward(self, input)
        if type(input) is Tensor and not is_traced():
            # Sooner than without Windrow, since parameters are not looked up as attributes. That too little is compared here
            # to tell problems apart does no harm: PyTorch's operator computes all of them, and ours looks itself. The last
            # call's is compared first, which takes half as long as to look up a key.
            known = self._last
            if known is None or not (
                input.shape == known[0] and input.dtype is known[1] and torch.is_grad_enabled() is known[2]
            ):
                known = self._known.get((input.shape, input.dtype, torch.is_grad_enabled()))
                self.__dict__["_last"] = known
            parameters = self._parameters
            weight, bias = parameters.get("weight"), parameters.get("bias", MISSING)
            # Else `nn.utils` has put properties there.
            if weight is not None and bias is not MISSING:
                if known is not None:
                    _, _, _, run, flags, rest, is_another_in_graphs, theirs, its_forward, its_conv_forward = known
                    if theirs.forward is not its_forward or theirs._conv_forward is not its_conv_forward:
                        pass
                    elif is_another_in_graphs and goes_into_a_graph(input):
                        pass
                    elif flags is None:
                        return run(input, weight, bias, *rest)
                    elif flags == flags_of(input):
                        y = run(input, weight, bias)
                        if y is not None:
                            return y
                if not self._is_replaced():
                    return self._conv_forward(input, weight, bias)
        if self._is_replaced():
            return self._theirs[0].forward(self, input)
        return self._conv_forward(input, self.weight, self.bias)

    def _is_replaced(self) -> bool:
        """Whether somebody has put another `forward` into PyTorch's class."""
        theirs, its_forward, _ = self._theirs
        return theirs.forward is not its_forward

    def layer(self) -> tuple[Any, ...]:
        """What decisions for the algorithm "fastest" know of this module."""
        none = [0] * len(self.stride)
        padding: Any = self.padding if self.padding_mode == "zeros" else none
        if isinstance(padding, str):
            same = [d * (r - 1) // 2 for d, r in zip(self.dilation, self.kernel_size, strict=True)]
            padding = same if padding == "same" else none
        return _conv2d_fastest.layer(self.weight, self.bias, self._options(padding))

    def _straight(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor | None] | None:
        """What computes this of input, filter and bias, where that is known for good: PyTorch's operator, nearly as soon as
        without Windrow, or ours past all checks. None where the long way has to be gone."""
        is_grad, flags, is_in_graph = torch.is_grad_enabled(), flags_of(input), bool(goes_into_a_graph(input))
        wants = is_grad and (input.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
        seen = (input.shape, input.stride(), input.dtype, input.device, is_grad, wants, flags, is_in_graph)
        find = lambda: self._found(input, weight, bias, flags, is_in_graph)
        is_own = self._parameters.get("weight") is weight and self._parameters.get("bias") is bias
        # A filter that was made for this call is not kept: it is another next time, and nobody could copy the module.
        run, found = self._recall(seen, weight, bias, find) if is_own else find()[0]
        # A class derived from this may do more with images and filters than to compute.
        if found is not None and is_own and type(self)._conv_forward is Convolution._conv_forward:
            all_known = self.__dict__.setdefault("_known", {})
            if len(all_known) >= REMEMBERED:
                all_known.clear()
            key = input.shape, input.dtype, is_grad
            all_known[key] = (*key, *found, *self._theirs)
        if run is None or run is PYTORCHS:
            return run
        is_straight = _native.is_only_recorded if type(run) is Training else _native.is_plain
        return run if is_straight(input, weight, bias) else None

    def _found(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, flags: Flags, is_in_graph: bool
    ) -> tuple[tuple[Callable[..., Tensor | None] | None, Found | None], bool]:
        """What computes images like this one, and what more calls may know of that; whether it is found for good."""
        nothing = (None, None), False
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            return nothing
        options, accuracy = self._options(self.padding), accuracy_of(self.accuracy, input)
        if self.algorithm is None:
            run = None if is_in_graph or flags[0] else self._planned(input, weight, bias, options, accuracy)
            return ((run, (run, flags, (), False)), True) if run is not None else nothing
        problem = (input, weight, bias, options, accuracy, self.frozen)
        # PyTorch's result would be laid out as a turned filter.
        is_pytorchs = False if self.is_turned else _conv2d_fastest.is_pytorchs(*problem)
        if is_pytorchs is None:
            return nothing
        is_another = _conv2d_fastest.is_anothers_in_graphs(*problem, self.is_turned)
        if is_pytorchs:
            found = self._operator, None, self._rest(), is_another
            return (PYTORCHS, None if is_in_graph else found), True
        is_plain = _native.is_plain(input, weight, bias)
        if flags[0] or not (is_plain or _native.is_only_recorded(input, weight, bias)):
            return nothing
        changes = not is_plain and weight.requires_grad
        filters = unkept if changes else kept_with(weight, self.frozen)
        _conv2d_fastest.look_ahead(input, weight, options)
        rest = (options, None, accuracy, filters, self.is_turned)
        way, is_final = _conv2d_fastest.way(input, weight, bias, *rest)
        if not is_final:
            return ((lambda x, *_: way(x), None), False) if is_plain and self.is_turned else nothing
        if not is_plain:
            mine = _conv2d_fastest.gradients_of(input, weight, bias, options, accuracy)
            return nothing if mine is None else ((Training(input, way, options, accuracy, mine), None), True)
        if type(way) is not Ours or is_in_graph:
            return (lambda x, *_: way(x), None), True
        run = way.like(input)
        return (run, (run, flags, (), is_another)), True

    def _planned(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options, accuracy: str | None
    ) -> Callable[..., Tensor | None] | None:
        """Ours, as the planner chooses it. None for what is no convolution of Windrow's, and where the long way has the words
        to refuse it."""
        is_usual = input.dim() == weight.dim() and input.device.type in ("cpu", "cuda") and input.numel() > 0
        if not is_usual or self.activation not in ACTIVATIONS or not _native.is_plain(input, weight, bias):
            return None
        named = as_named(options, activation=self.activation, accuracy=accuracy)
        ours = Ours(weight, bias, named, memory_format(input, input), kept_with(weight, self.frozen))
        try:
            return ours.like(input)
        except (TypeError, ValueError, RuntimeError):
            return None

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        theirs, _, its_conv_forward = self._theirs
        if theirs._conv_forward is not its_conv_forward:
            return activation_of(self.activation)(theirs._conv_forward(self, input, weight, bias))
        is_fastest = self.algorithm == FASTEST
        if (
            (self.activation is None if is_fastest else self.algorithm is None)
            and is_ordinary(input)
            and not torch.compiler.is_dynamo_compiling()
            and not has_torch_function((input, weight, bias))
        ):
            if not torch._C._are_functorch_transforms_active():
                run = self._straight(input, weight, bias)
                if run is PYTORCHS:
                    return self._operator(input, weight, bias, *self._rest())
                if run is not None:
                    y = run(input, weight, bias)
                    if y is not None:
                        return y
                    # The filter's memory is another.
                    self._forget()
            elif is_fastest:
                # PyTorch's operator has all derivatives, and takes the batches of `vmap` whole.
                padded, padding = self._padded(input)
                y = self._operator(padded, weight, bias, self.stride, padding, *self._rest()[2:])
                return self._laid_out(y, input)
        return self._laid_out(self._called(input, weight, bias), input)

    def _laid_out(self, y: Tensor, input: Tensor) -> Tensor:
        return y.contiguous() if self.is_turned and input.is_contiguous() else y

    def _how(self) -> dict[str, Any]:
        """What our functions take by name."""
        return {
            "activation": self.activation,
            "accuracy": self.accuracy,
            "algorithm": self.algorithm,
            "frozen": self.frozen,
        }

    def _padded(self, input: Tensor) -> tuple[Tensor, Any]:
        """With what is no padding by zeros, and the padding that is left to do."""
        if self.padding_mode == "zeros":
            return input, self.padding
        return F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0

    def _activated(self, y: Tensor) -> Tensor:
        """As `activation_of`, for TorchScript, which knows neither functions in a dictionary nor operators of ours."""
        if self.activation is not None:
            if self.activation == "relu":
                return F.relu(y)
            if self.activation == "relu6":
                return F.relu6(y)
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
    """`torch.nn.Conv1d`, as `Conv2d` of images of one row; its options are attributes like those of `Conv2d`."""

    __constants__ = [*nn.Conv1d.__constants__, "activation"]
    _operator = torch.conv1d
    _theirs = _methods(nn.Conv1d)

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
    """`torch.nn.Conv2d`, computed by Windrow; by PyTorch in TorchScript and in ONNX.

    Options of `conv2d` that are no options of `torch.nn.Conv2d` are attributes: `activation`,
    `accuracy`, `algorithm`. Of a `frozen` one nobody looks whether the filter has changed.
    """

    __constants__ = [*nn.Conv2d.__constants__, "activation"]
    _operator = torch.conv2d
    _theirs = _methods(nn.Conv2d)

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


class _Transposed(Convolution):
    """What `ConvTranspose1d` and `ConvTranspose2d` have in common."""

    # Ours, of the same name as PyTorch's.
    _function: Callable[..., Tensor]

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if is_scripting():
            return self._scripted(input, output_size)
        sizes = () if output_size is None else (output_size,)
        if not isinstance(self, Convolution):
            return type(self).forward(self, input, *sizes)
        if self._is_replaced():
            return activation_of(self.activation)(self._theirs[0].forward(self, input, *sizes))
        if output_size is None:
            return super().forward(input)
        shape = (self.stride, self.padding, self.kernel_size, len(self.kernel_size), self.dilation)
        output_padding = self._output_padding(input, output_size, *shape)
        return self._by_function(input, self.weight, self.bias, output_padding)

    def _rest(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.output_padding, self.groups, self.dilation

    def _found(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, flags: Flags, is_in_graph: bool
    ) -> tuple[tuple[Callable[..., Tensor | None] | None, Found | None], bool]:
        # The function pads the input where more of the result lies behind it than a step.
        if any(more >= s for more, s in zip(self.output_padding, self.stride, strict=True)):
            return (None, None), False
        return super()._found(input, weight, bias, flags, is_in_graph)

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
    """`torch.nn.ConvTranspose1d`, as `ConvTranspose2d` of images of one row; its options are attributes like those of
    `Conv2d`."""

    __constants__ = [*nn.ConvTranspose1d.__constants__, "activation"]
    _operator = torch.conv_transpose1d
    _function = staticmethod(conv_transpose1d)
    _theirs = _methods(nn.ConvTranspose1d)

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
    """`torch.nn.ConvTranspose2d`, as `conv_transpose2d`; its options are attributes like those of `Conv2d`."""

    __constants__ = [*nn.ConvTranspose2d.__constants__, "activation"]
    _operator = torch.conv_transpose2d
    _function = staticmethod(conv_transpose2d)
    _theirs = _methods(nn.ConvTranspose2d)

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
