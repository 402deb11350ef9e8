"""Two-dimensional convolution."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from windrow import _native
from windrow.torch import _conv2d_fastest
from windrow.torch._conv2d_fastest import ACTIVATIONS, memory_format, output_shape
from windrow.torch._fastest import is_captured
from windrow.torch._filters import adopt, kept_with, unkept
from windrow.torch._library import (
    autocast,
    call,
    define,
    differentiable,
    fake_gradients,
    or_empty,
    or_none,
    with_input,
)

# As `algorithm`: Windrow or PyTorch's own operator, whichever is faster.
FASTEST = "fastest"

# As `accuracy`; None is that of PyTorch's own convolutions.
ACCURACIES = (None, "exact", "fp32", "tf32", "half")

# What is done with a filter. Kept: packed forms are kept, and compared with it on each call. Frozen:
# they are not compared. Changing: it is packed on each call, as in training.
KEPT, FROZEN, CHANGING = "kept", "frozen", "changing"


def _kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str | None,
    accuracy: str | None,
    algorithm: str | None,
    filter: str,
) -> Tensor:
    filters = unkept if filter == CHANGING else kept_with(weight, filter == FROZEN)
    if algorithm == FASTEST:
        options = (stride, padding, dilation, groups)
        run, _ = _conv2d_fastest.way(x, weight, bias, options, activation, accuracy, filters)
        return run(x)
    try:
        return _native.conv2d(
            x,
            weight,
            bias,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            activation=activation,
            accuracy=accuracy,
            algorithm=algorithm,
            filters=filters(),
        )
    except (ValueError, TypeError) as error:
        raise with_input(error) from None


def _aten(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str | None,
    *_: Any,
) -> Tensor:
    return ACTIVATIONS[activation](torch.conv2d(x, weight, bias, stride, padding, dilation, groups))


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str | None,
    accuracy: str | None,
    algorithm: str | None,
    filter: str,
) -> Tensor:
    layout = memory_format(x, weight if algorithm == FASTEST else x)
    return torch.empty(
        output_shape(x, weight, (stride, padding, dilation, groups)),
        dtype=x.dtype,
        device=x.device,
        memory_format=layout,
    )


def _backward_kernel(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    accuracy: str | None,
    algorithm: str | None,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    dy = _dense(dy)
    options, wanted = (stride, padding, dilation, groups), tuple(needs)
    if algorithm == FASTEST:
        grads = _conv2d_fastest.gradients(dy, x, weight, bias, options, accuracy, wanted)
    else:
        grads = _native.conv2d_backward(dy, x, weight, bias, options, accuracy, wanted)
    return or_empty(dy, grads)


def _dense(dy: Tensor) -> Tensor:
    """A broadcast gradient, as that of a sum, with an element of memory for each, which plans want."""
    return dy.contiguous() if 0 in dy.stride() else dy


_conv2d = define(
    "conv2d(Tensor x, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, SymInt groups, str? activation, str? accuracy, str? algorithm, str filter) -> Tensor",
    _kernel,
    _fake,
)
_conv2d_backward = define(
    "conv2d_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, SymInt[] stride,"
    " SymInt[] padding, SymInt[] dilation, SymInt groups, str? accuracy, str? algorithm,"
    " bool[] needs) -> (Tensor, Tensor, Tensor)",
    _backward_kernel,
    lambda dy, x, weight, bias, *rest: fake_gradients([x, weight, bias], rest[-1], dy),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.options, activation, ctx.accuracy, ctx.algorithm, _filter = inputs
    # PyTorch before 2.5 comes here even where nothing requires a gradient.
    if activation is not None and any(ctx.needs_input_grad):
        raise NotImplementedError(
            "windrow::conv2d has no gradient through a fused activation; windrow.torch.conv2d "
            "applies it on its own where a gradient is needed"
        )
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    options = (*ctx.options, ctx.accuracy, ctx.algorithm)
    grads = call(_conv2d_backward, _backward_kernel, (dy, *ctx.saved_tensors), *options, needs)
    return *or_none(grads, needs), *[None] * 8


differentiable(_conv2d, _kernel, _setup_context, _backward)


def _keep_packed(args: tuple[Any, ...], cast: list[Any]) -> None:
    """Autocast makes a new tensor of the filter on each call: what is packed stays with the filter."""
    # Not for those without memory, like fake ones.
    if args[-1] != CHANGING and cast[1] is not args[1] and type(cast[1]) is Tensor:
        adopt(cast[1], args[1])


autocast(_conv2d, lower_precision=[0, 1, 2], after=_keep_packed)


def _pair(name: str, value: int | Sequence[int]) -> list[int]:
    if isinstance(value, int):
        pair = [value, value]
    else:
        try:
            pair = [operator.index(n) for n in (value if isinstance(value, Sequence) else (value,) * 2)]
        except TypeError:
            raise TypeError(f"`{name}` is {value!r}, expected an int, or one for each direction") from None
        if len(pair) != 2:
            raise ValueError(f"`{name}` is {value!r}, expected an int, or one for each direction")
    if pair[0] < 0 or pair[1] < 0:
        raise ValueError(f"`{name}` is {value!r}, expected no negative number")
    return pair


def _named_padding(
    name: str, x: Tensor, weight: Tensor, stride: list[int], dilation: list[int]
) -> tuple[Tensor, list[int]]:
    """"valid" and "same" as PyTorch has them; "same" pads one more at the end if it must."""
    if name == "valid":
        return x, [0, 0]
    if name != "same":
        raise ValueError(f"`padding` is {name!r}, expected numbers, 'valid' or 'same'")
    if stride != [1, 1]:
        raise ValueError("`padding` is 'same', expected stride 1")
    # The tracer of TorchScript has tensors here, which no list of padding can be made of.
    filter_size = [int(n) for n in weight.shape[2:]]
    total = [d * (r - 1) for d, r in zip(dilation, filter_size, strict=True)]
    if total[0] % 2 or total[1] % 2:
        x = F.pad(x, (0, total[1] % 2, 0, total[0] % 2))
    return x, [n // 2 for n in total]


def accuracy_of(accuracy: str | None, input: Tensor) -> str | None:
    """Where none is asked for, that of PyTorch's own convolutions, which sum halves in f32."""
    if (
        accuracy is None
        and input.is_cuda
        and input.dtype is torch.float32
        and torch.backends.cudnn.allow_tf32
        and not torch.is_autocast_enabled("cuda")
    ):
        return "tf32"
    return accuracy


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    accuracy: str | None = None,
    algorithm: str | None = None,
    frozen: bool = False,
) -> Tensor:
    """`torch.nn.functional.conv2d`, by Winograd where filter and stride allow.

    input: [n, c, h, w] or [c, h, w], f32, f16 or bf16, any strides; weight: [k, c / groups, r, s].
    activation: None, "relu", "silu", "gelu" or "gelu_tanh", applied to the result.
    accuracy: "exact" (no Winograd), "fp32", "tf32" or "half"; None is "fp32", or "tf32" for f32 on CUDA
    where PyTorch's own convolutions may use it (`torch.backends.cudnn.allow_tf32`).
    algorithm: one of `windrow.Conv2dPlan.algorithms`; None lets the planner choose; "fastest"
    measures PyTorch's own operator beside it, and takes the faster one from then on.

    The packed form of a filter is kept as long as the filter's memory lives, but where a gradient of
    it is wanted. Each call looks whether the filter's values are still those that were packed, unless
    `frozen` promises that they are.
    """
    tensors = (input, weight, bias)
    if has_torch_function(tensors):
        # Also the tracer of torch.fx, which makes one node of the call.
        args = (*tensors, stride, padding, dilation, groups)
        how = {"activation": activation, "accuracy": accuracy, "algorithm": algorithm, "frozen": frozen}
        return handle_torch_function(conv2d, tensors, *args, **how)
    if input.dim() == 3:
        args = (weight, bias, stride, padding, dilation, groups)
        how = {"activation": activation, "accuracy": accuracy, "algorithm": algorithm, "frozen": frozen}
        return conv2d(input.unsqueeze(0), *args, **how).squeeze(0)
    stride, dilation = _pair("stride", stride), _pair("dilation", dilation)
    if isinstance(padding, str):
        input, padding = _named_padding(padding, input, weight, stride, dilation)
    else:
        padding = _pair("padding", padding)
    accuracy = accuracy_of(accuracy, input)
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` is {activation!r}, expected one of {[*ACTIVATIONS]}")
    of_filter = torch.is_grad_enabled() and weight.requires_grad
    after = None
    if activation is not None and torch.is_grad_enabled():
        if of_filter or input.requires_grad or (bias is not None and bias.requires_grad):
            after, activation = ACTIVATIONS[activation], None
    options = (stride, padding, dilation, groups)
    if algorithm == FASTEST and not torch.compiler.is_dynamo_compiling():
        # Elsewhere the way to the kernel, which finds out, is short.
        has_way = torch.is_grad_enabled() or torch._C._is_any_autocast_enabled()
        if (
            has_way
            and activation is None
            and _conv2d_fastest.is_pytorchs(input, weight, bias, options, accuracy, frozen)
        ):
            y = torch.conv2d(input, weight, bias, *options)
            return y if after is None else after(y)
    # A traced graph serves with and without gradients: its filters are kept, and compared.
    changing = of_filter and torch._C._get_tracing_state() is None
    filter = CHANGING if changing else FROZEN if frozen else KEPT
    rest = (*options, activation, accuracy, algorithm, filter)
    y = call(_conv2d, _kernel, (input, weight, bias), *rest, aten=_aten)
    return y if after is None else after(y)


class _Training:
    """A convolution and its gradients, for images like x, of which it is decided who computes them."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        run: Callable[[Tensor], Tensor],
        options: _conv2d_fastest.Options,
        accuracy: str | None,
        mine: Callable[[Sequence[bool]], tuple[bool, ...]],
    ) -> None:
        self.weight, self.bias = weight, bias
        self.run, self.options, self.accuracy, self.mine = run, options, accuracy, mine
        self.ours = run.like(x) if type(run) is _conv2d_fastest.Ours else None

    def __call__(self, x: Tensor) -> Tensor:
        return _Trained.apply(x, self.weight, self.bias, self)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = None if self.ours is None else self.ours(x, weight, bias)
        return self.run(x) if y is None else y

    def gradients(
        self, tensors: Sequence[Tensor | None], needs: tuple[bool, ...]
    ) -> Sequence[Tensor | None]:
        """Of dy, x, filter and bias."""
        if not _native.is_plain(*tensors) or torch._C._is_any_autocast_enabled():
            rest = (*self.options, self.accuracy, FASTEST, needs)
            return or_none(_conv2d_backward(*tensors, *rest), needs)
        dy, *others = tensors
        rest = (self.options, self.accuracy, needs, self.mine(needs))
        return _conv2d_fastest.computed(_dense(dy), *others, *rest)


class _Trained(torch.autograd.Function):
    """A `_Training` as PyTorch records it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by: _Training) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.by = by
        return by.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.by.gradients((dy, *ctx.saved_tensors), ctx.needs_input_grad[:3]), None


_NOTHING = (None, None, None, None)
_NO_CALL = (None, None)
# Attributes of a module that its calls set.
FOUND_OUT = ("_last", "_pytorchs", "_ours", "_is_anothers_in_graphs")


def _flags() -> tuple[bool, bool]:
    return torch._C._is_any_autocast_enabled(), torch._C._get_cudnn_allow_tf32()


def PYTORCHS(input: Tensor) -> Tensor:
    """Stands for PyTorch's own forward of a module."""
    raise NotImplementedError


class Conv2d(nn.Conv2d):
    """`torch.nn.Conv2d`, computed by Windrow; by PyTorch in TorchScript and in ONNX.

    Options of `conv2d` that are no options of `torch.nn.Conv2d` are attributes: `activation`,
    `accuracy`, `algorithm`. Of a `frozen` one nobody looks whether the filter has changed.
    """

    __constants__ = [*nn.Conv2d.__constants__, "activation"]
    activation: str | None = None
    accuracy: str | None = None
    algorithm: str | None = None
    frozen: bool = False
    # What was found out by earlier calls; an attribute that is set takes it back.
    # Of the last call: what it was told by, its filter and bias, and what computes it. See `_straight`.
    _last: tuple[Any, ...] = _NOTHING

    # Shape, type and whether gradients are wanted, of images that PyTorch computes, and the options.
    _pytorchs: tuple[Any, ...] | None = None

    # Whether somebody else computes these images where calls are captured in a graph.
    _is_anothers_in_graphs: bool = False

    # Where the last two calls were ours and alike: what computes more of these, and PyTorch's flags.
    _ours: tuple[Any, ...] = _NO_CALL

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return self._conv_forward(input, self.weight, self.bias)
        if not torch.compiler.is_dynamo_compiling():
            known, (run, flags), parameters = self._pytorchs, self._ours, self._parameters
            weight = parameters.get("weight")
            if self._is_anothers_in_graphs and is_captured(input.device):
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
                return torch.conv2d(input, weight, parameters["bias"], *known[3])
        return self._conv_forward(input, self.weight, self.bias)

    def __setattr__(self, name: str, value: Any) -> None:
        self._forget()
        super().__setattr__(name, value)

    def _forget(self) -> None:
        for name in FOUND_OUT:
            self.__dict__.pop(name, None)

    def layer(self) -> tuple[Any, ...]:
        """What decisions for the algorithm "fastest" know of this module."""
        padding: Any = self.padding if self.padding_mode == "zeros" else (0, 0)
        if isinstance(padding, str):
            same = [d * (r - 1) // 2 for d, r in zip(self.dilation, self.kernel_size, strict=True)]
            padding = same if padding == "same" else (0, 0)
        options = (self.stride, padding, self.dilation, self.groups)
        return _conv2d_fastest.layer(self.weight, self.bias, options)

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
        if seen != last or its_weight is not weight or its_bias is not bias:
            self._forget()
            run = self._found(input, weight, bias)
            if run is not None:
                self.__dict__["_last"] = (seen, weight, bias, run)
        elif type(run) is _conv2d_fastest.Ours and not is_in_graph:
            self.__dict__["_ours"] = (run.like(input), flags)
        if run is None or run is PYTORCHS:
            return run
        is_straight = _native.is_only_recorded if type(run) is _Training else _native.is_plain
        return run if is_straight(input, weight, bias) else None

    def _found(
        self, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Callable[[Tensor], Tensor] | None:
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            return None
        options = (self.stride, self.padding, self.dilation, self.groups)
        accuracy = accuracy_of(self.accuracy, input)
        problem = (input, weight, bias, options, accuracy, self.frozen)
        is_pytorchs = _conv2d_fastest.is_pytorchs(*problem)
        if is_pytorchs is None:
            return None
        self.__dict__["_is_anothers_in_graphs"] = _conv2d_fastest.is_anothers_in_graphs(*problem)
        if is_pytorchs and not is_captured(input.device):
            self.__dict__["_pytorchs"] = (input.shape, input.dtype, torch.is_grad_enabled(), options)
        if is_pytorchs:
            return PYTORCHS
        if torch._C._is_any_autocast_enabled():
            return None
        is_plain = _native.is_plain(input, weight, bias)
        if not (is_plain or _native.is_only_recorded(input, weight, bias)):
            return None
        changes = not is_plain and weight.requires_grad
        filters = unkept if changes else kept_with(weight, self.frozen)
        run, is_final = _conv2d_fastest.way(input, weight, bias, options, None, accuracy, filters)
        if is_plain or not is_final:
            return run if is_final else None
        mine = _conv2d_fastest.gradients_of(input, weight, bias, options, accuracy)
        return None if mine is None else _Training(input, weight, bias, run, options, accuracy, mine)

    def _apply(self, *args: Any, **how: Any) -> "Conv2d":
        self._forget()
        return super()._apply(*args, **how)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in FOUND_OUT}

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if torch.jit.is_scripting():
            return self._scripted(input, weight, bias)
        # A tracer's stand-ins have no shapes to compare.
        if (
            self.algorithm == FASTEST
            and self.activation is None
            and not torch.compiler.is_dynamo_compiling()
            and not has_torch_function((input, weight, bias))
        ):
            run = self._straight(input, weight, bias)
            if run is PYTORCHS:
                return super()._conv_forward(input, weight, bias)
            if run is not None:
                return run(input)
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        return conv2d(
            input,
            weight,
            bias,
            self.stride,
            padding,
            self.dilation,
            self.groups,
            activation=self.activation,
            accuracy=self.accuracy,
            algorithm=self.algorithm,
            frozen=self.frozen,
        )

    def _scripted(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What TorchScript compiles, which knows no operators of ours."""
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            y = F.conv2d(input, weight, bias, self.stride, (0, 0), self.dilation, self.groups)
        else:
            y = F.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
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
