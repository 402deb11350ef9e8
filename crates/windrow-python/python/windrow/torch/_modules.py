"""Convolutions as modules, in the place of PyTorch's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function

from windrow import _native
from windrow.torch import _conv2d_fastest
from windrow.torch._conv2d import FASTEST, Training, accuracy_of, conv1d, conv2d, conv_transpose2d
from windrow.torch._conv2d_fastest import Options
from windrow.torch._fastest import is_captured, is_ordinary
from windrow.torch._filters import kept_with, unkept

_NOTHING = (None, None, None, None)
_NO_CALL = (None, None)
# Attributes of a module that its calls set.
FOUND_OUT = ("_last", "_pytorchs", "_ours", "_is_anothers_in_graphs", "_remembered")
# So many images that came by turns are remembered.
_REMEMBERED = 256


def _flags() -> tuple[bool, bool]:
    return torch._C._is_any_autocast_enabled(), torch._C._get_cudnn_allow_tf32()


def PYTORCHS(input: Tensor) -> Tensor:
    """Stands for PyTorch's own forward of a module."""
    raise NotImplementedError


class Convolution(nn.Module):
    """What these modules have in common: options that PyTorch's have not, and what earlier calls found out."""

    activation: str | None = None
    accuracy: str | None = None
    algorithm: str | None = None
    frozen: bool = False
    # What was found out by earlier calls; an attribute that is set takes it back.
    # Of the last call: what it was told by, its filter and bias, and what computes it. See `_straight`.
    _last: tuple[Any, ...] = _NOTHING

    # Filter and bias, and the same of images that came before with them: what computes them, and the next two attributes.
    _remembered: tuple[Any, ...] = _NOTHING[:3]

    # Shape, type and whether gradients are wanted, of images that PyTorch computes, and the options.
    _pytorchs: tuple[Any, ...] | None = None

    # Whether somebody else computes these images where calls are captured in a graph.
    _is_anothers_in_graphs: bool = False

    # Where the last two calls were ours and alike: what computes more of these, and PyTorch's flags.
    _ours: tuple[Any, ...] = _NO_CALL

    # TorchScript compiles modules that have been called, too.
    __jit_ignored_attributes__ = [*FOUND_OUT]

    # PyTorch's operator.
    _operator: Callable[..., Tensor]

    def _rest(self) -> tuple[Any, ...]:
        """What that is given behind the bias."""
        return self.stride, self.padding, self.dilation, self.groups

    def _options(self, padding: Sequence[int]) -> Options:
        raise NotImplementedError

    def _called(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """By our function."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return self._scripted(input, self.weight, self.bias)
        if is_ordinary(input) and not torch.compiler.is_dynamo_compiling():
            known, (run, flags), parameters = self._pytorchs, self._ours, self._parameters
            weight = parameters.get("weight")
            # Only on CUDA: asked for in the shortest way, since each call does.
            if self._is_anothers_in_graphs and torch._C._cuda_isCurrentStreamCapturing():
                pass
            elif run is not None:
                if flags == _flags() and weight is not None:
                    y = run(input, weight, parameters["bias"])
                    if y is not None:
                        return y
            # Sooner than without Windrow, since parameters are not looked up as attributes. That too little is compared
            # here to tell problems apart does no harm: PyTorch's operator computes all of them.
            elif (
                known is not None
                and weight is not None
                and known[0] == input.shape
                and known[1] is input.dtype
                and known[2] is torch.is_grad_enabled()
            ):
                return self._operator(input, weight, parameters["bias"], *known[3])
        return self._conv_forward(input, self.weight, self.bias)

    def __setattr__(self, name: str, value: Any) -> None:
        self._forget()
        super().__setattr__(name, value)

    def _forget(self) -> None:
        for name in FOUND_OUT:
            self.__dict__.pop(name, None)

    def layer(self) -> tuple[Any, ...]:
        """What decisions for the algorithm "fastest" know of this module."""
        none = [0] * len(self.stride)
        padding: Any = self.padding if self.padding_mode == "zeros" else none
        if isinstance(padding, str):
            same = [d * (r - 1) // 2 for d, r in zip(self.dilation, self.kernel_size, strict=True)]
            padding = same if padding == "same" else none
        return _conv2d_fastest.layer(self.weight, self.bias, self._options(padding))

    def _straight(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """What computes this, where that is known for good: PyTorch's operator, nearly as soon as without Windrow, or
        ours past all checks. None where the long way has to be gone."""
        is_grad, flags, is_in_graph = torch.is_grad_enabled(), _flags(), is_captured(input.device)
        seen = (
            input.shape,
            input.stride(),
            input.dtype,
            input.device,
            is_grad,
            is_grad and input.requires_grad,
            is_grad and weight.requires_grad,
            flags,
            is_in_graph,
        )
        last, its_weight, its_bias, run = self._last
        is_known = seen == last and its_weight is weight and its_bias is bias
        if not is_known:
            run = self._again(seen, input, weight, bias)
            if run is not None:
                self.__dict__["_last"] = (seen, weight, bias, run)
        if run is None or run is PYTORCHS:
            return run
        is_straight = _native.is_only_recorded if type(run) is Training else _native.is_plain
        if not is_straight(input, weight, bias):
            return None
        if is_known and type(run) is _conv2d_fastest.Ours and not is_in_graph:
            self.__dict__["_ours"] = (run.like(input), flags)
        return run

    def _again(
        self, seen: Any, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Callable[[Tensor], Tensor] | None:
        """What was found out for such images before, or is now."""
        its_weight, its_bias, remembered = self._remembered
        before = remembered if its_weight is weight and its_bias is bias else {}
        self._forget()
        found = before.get(seen)
        if found is None:
            run = self._found(input, weight, bias)
            found = run, self._pytorchs, self._is_anothers_in_graphs
            if run is not None and type(run) is not Training:
                while len(before) >= _REMEMBERED:
                    before.pop(next(iter(before), None), None)
                before[seen] = found
        run, pytorchs, is_anothers = found
        self.__dict__.update(_remembered=(weight, bias, before), _pytorchs=pytorchs, _is_anothers_in_graphs=is_anothers)
        return run

    def _found(
        self, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Callable[[Tensor], Tensor] | None:
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            return None
        options = self._options(self.padding)
        accuracy = accuracy_of(self.accuracy, input)
        problem = (input, weight, bias, options, accuracy, self.frozen)
        is_pytorchs = _conv2d_fastest.is_pytorchs(*problem)
        if is_pytorchs is None:
            return None
        self.__dict__["_is_anothers_in_graphs"] = _conv2d_fastest.is_anothers_in_graphs(*problem)
        if is_pytorchs and not is_captured(input.device):
            self.__dict__["_pytorchs"] = (input.shape, input.dtype, torch.is_grad_enabled(), self._rest())
        if is_pytorchs:
            return PYTORCHS
        if torch._C._is_any_autocast_enabled():
            return None
        is_plain = _native.is_plain(input, weight, bias)
        if not (is_plain or _native.is_only_recorded(input, weight, bias)):
            return None
        changes = not is_plain and weight.requires_grad
        filters = unkept if changes else kept_with(weight, self.frozen)
        _conv2d_fastest.look_ahead(input, weight, options)
        run, is_final = _conv2d_fastest.way(input, weight, bias, options, None, accuracy, filters)
        if is_plain or not is_final:
            return run if is_final else None
        mine = _conv2d_fastest.gradients_of(input, weight, bias, options, accuracy)
        return None if mine is None else Training(input, weight, bias, run, options, accuracy, mine)

    def _apply(self, *args: Any, **how: Any) -> "Convolution":
        self._forget()
        return super()._apply(*args, **how)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in FOUND_OUT}

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if (
            self.algorithm == FASTEST
            and self.activation is None
            and is_ordinary(input)
            and not torch.compiler.is_dynamo_compiling()
            and not has_torch_function((input, weight, bias))
        ):
            if torch._C._are_functorch_transforms_active():
                # PyTorch's operator has all derivatives, and takes the batches of `vmap` whole.
                input, padding = self._padded(input)
                return self._operator(input, weight, bias, self.stride, padding, *self._rest()[2:])
            run = self._straight(input, weight, bias)
            if run is PYTORCHS:
                return self._operator(input, weight, bias, *self._rest())
            if run is not None:
                return run(input)
        return self._called(input, weight, bias)

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
        """For TorchScript, which knows no operators of ours."""
        if self.activation is not None:
            if self.activation == "relu":
                return F.relu(y)
            if self.activation == "silu" or self.activation == "swish":
                return F.silu(y)
            if self.activation == "gelu":
                return F.gelu(y)
            if self.activation == "gelu_tanh":
                return F.gelu(y, approximate="tanh")
        return y


class Conv1d(Convolution, nn.Conv1d):
    """`torch.nn.Conv1d`, as `Conv2d` of images of one row; its options are attributes like those of `Conv2d`."""

    __constants__ = [*nn.Conv1d.__constants__, "activation"]
    _operator = torch.conv1d

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


class ConvTranspose2d(Convolution, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d`, as `conv_transpose2d`; its options are attributes like those of `Conv2d`."""

    __constants__ = [*nn.ConvTranspose2d.__constants__, "activation"]
    _operator = torch.conv_transpose2d

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if torch.jit.is_scripting():
            return self._scripted(input, output_size)
        if output_size is None:
            return super().forward(input)
        sizes = (self.stride, self.padding, self.kernel_size, 2, self.dilation)
        output_padding = self._output_padding(input, output_size, *sizes)
        return self._by_function(input, self.weight, self.bias, output_padding)

    def _rest(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.output_padding, self.groups, self.dilation

    def _options(self, padding: Sequence[int]) -> Options:
        return Options(self.stride, padding, self.dilation, self.groups, self.output_padding)

    def _found(
        self, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Callable[[Tensor], Tensor] | None:
        # The function pads the input where more of the result lies behind it than a step.
        if any(more >= s for more, s in zip(self.output_padding, self.stride, strict=True)):
            return None
        return super()._found(input, weight, bias)

    def _called(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._by_function(input, weight, bias, self.output_padding)

    def _by_function(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, output_padding: Sequence[int]
    ) -> Tensor:
        rest = (self.stride, self.padding, output_padding, self.groups, self.dilation)
        return conv_transpose2d(input, weight, bias, *rest, **self._how())

    def _scripted(self, input: Tensor, output_size: list[int] | None) -> Tensor:
        output_padding = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, 2, self.dilation
        )
        stride, padding, groups, dilation = self.stride, self.padding, self.groups, self.dilation
        y = F.conv_transpose2d(
            input, self.weight, self.bias, stride, padding, output_padding, groups, dilation
        )
        return self._activated(y)
