"""Convolutions and transposed convolutions, of images and of lines; a line is an image of one row."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from windrow import _native
from windrow.torch._activations import activation_of
from windrow.torch._batch_invariant import accuracy_with
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
from windrow.torch._precision import may_use_tf32
from windrow.torch.choice.candidates import Conv, Transposed, Windrow
from windrow.torch.choice.convolution import Way, is_pytorchs, way
from windrow.torch.choice.gradients import Backward, Three
from windrow.torch.choice.problem import Options, aten, memory_format, output_shape

# The `algorithm` that uses Windrow or PyTorch's own operator, whichever is faster.
FASTEST = "fastest"

# The values of `accuracy`; None is that of PyTorch's own convolutions.
ACCURACIES = (None, "exact", "fp32", "tf32", "half")

# The treatment of a filter. Kept: packed forms are kept, and compared with the filter on each call. Frozen: they are
# kept and not compared. Changing: the filter is packed on each call, as in training.
KEPT, FROZEN, CHANGING = "kept", "frozen", "changing"


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    *of, activation, accuracy, algorithm, filter = how
    options = Options(*of)
    filters = unkept if filter == CHANGING else kept_with(weight, filter == FROZEN)
    conv = Conv(weight, bias, options, activation, accuracy, filters)
    if algorithm == FASTEST:
        return way(conv, x).run(x)
    layout = memory_format(x, x)
    try:
        if options.output_padding is not None:
            return Transposed(conv, layout)(x)
        return Windrow(conv, layout, filters, algorithm=algorithm)(x)
    except (ValueError, TypeError) as error:
        # The `x` of a transposed convolution's error is the result of a convolution.
        raise with_input(error, "x" if options.output_padding is None else "out") from None


def _aten(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    return activation_of(how[5])(aten(x, weight, bias, Options(*how[:5])))


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    *of, _activation, _accuracy, algorithm, _filter = how
    layout = memory_format(x, weight if algorithm == FASTEST else x)
    shape = output_shape(x, weight, Options(*of))
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


def _backward_kernel(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> tuple[Tensor, ...]:
    *of, accuracy, algorithm, needs = how
    options, wanted = Options(*of), tuple(needs)
    backward = Backward(_dense(dy), x, weight, bias, options, accuracy)
    grads = backward.decided(wanted) if algorithm == FASTEST else backward.computed(wanted, mine=wanted)
    return or_empty(dy, grads)


def _dense(dy: Tensor) -> Tensor:
    """The gradient with memory for each element, as plans need it. That of a sum, for example, is broadcast."""
    return dy.contiguous() if 0 in dy.stride() else dy


CONV2D = define(
    "conv2d(Tensor x, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, SymInt groups, SymInt[]? output_padding, str? activation, str? accuracy,"
    " str? algorithm, str filter) -> Tensor",
    _kernel,
    _fake,
)
_conv2d_backward = define(
    "conv2d_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, SymInt[] stride,"
    " SymInt[] padding, SymInt[] dilation, SymInt groups, SymInt[]? output_padding, str? accuracy,"
    " str? algorithm, bool[] needs) -> (Tensor, Tensor, Tensor)",
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
    # The same tensors as PyTorch's operator saves: a checkpoint counts them, and the other implementation may
    # recompute them.
    ctx.save_for_backward(x, weight)
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    options = (*ctx.options, ctx.accuracy, ctx.algorithm)
    # Only the bias's size and type matter.
    bias = None if ctx.bias is None else dy.new_empty(ctx.bias[0], dtype=ctx.bias[1])
    tensors = (dy, *ctx.saved_tensors, bias)
    grads = call(_conv2d_backward, _backward_kernel, tensors, *options, needs)
    return *or_none(grads, needs), *[None] * 9


differentiable(CONV2D, _kernel, _setup_context, _backward)


def _keep_packed(args: tuple[Any, ...], cast: list[Any]) -> None:
    """Keeps the packed form with the original filter, because autocast makes a new tensor of the filter on each call.
    """
    # Tensors without memory, such as fake ones, are left out.
    if args[-1] != CHANGING and cast[1] is not args[1] and type(cast[1]) is Tensor:
        adopt(cast[1], args[1])


autocast(CONV2D, lower_precision=[0, 1, 2], after=_keep_packed)


def _each(name: str, value: int | Sequence[int], directions: int = 2) -> list[int]:
    if isinstance(value, int):
        numbers = [value] * directions
    else:
        try:
            each = value if isinstance(value, Sequence) else (value,) * directions
            numbers = [operator.index(n) for n in each]
        except TypeError:
            raise TypeError(f"`{name}` is {value!r}, expected an int, or one for each direction") from None
        if len(numbers) != directions:
            raise ValueError(f"`{name}` is {value!r}, expected an int, or one for each direction")
    if min(numbers) < 0:
        raise ValueError(f"`{name}` is {value!r}, expected no negative number")
    return numbers


def _named_padding(
    name: str, x: Tensor, weight: Tensor, stride: list[int], dilation: list[int]
) -> tuple[Tensor, list[int]]:
    """The image and the numbers for padding "valid" or "same", as in PyTorch. An odd total of "same" pads one more at
    the end."""
    if name == "valid":
        return x, [0] * len(stride)
    if name != "same":
        raise ValueError(f"`padding` is {name!r}, expected numbers, 'valid' or 'same'")
    if max(stride) != 1:
        raise ValueError("`padding` is 'same', expected stride 1")
    # The tracer of TorchScript has tensors here, which no list of padding can be made of.
    filter_size = [int(n) for n in weight.shape[2:]]
    total = [d * (r - 1) for d, r in zip(dilation, filter_size, strict=True)]
    if any(n % 2 for n in total):
        # The last direction comes first, before and behind.
        x = F.pad(x, [end for n in reversed(total) for end in (0, n % 2)])
    return x, [n // 2 for n in total]


def accuracy_of(accuracy: str | None, input: Tensor, is_linear: bool = False) -> str | None:
    """The accuracy to use. If none is asked for, it is that of PyTorch's own convolutions or linear layers, which sum
    f16 and bf16 in f32."""
    if (
        accuracy is None
        and input.is_cuda
        and input.dtype is torch.float32
        # PyTorch's build for ROCm has the flag too, and computes in f32 whatever it says.
        and torch.version.hip is None
        and may_use_tf32(is_linear)
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
    batch_invariant: bool = False,
    frozen: bool = False,
) -> Tensor:
    """`torch.nn.functional.conv2d`, computed by Windrow.

    input: [n, c, h, w] or [c, h, w], f32, f16 or bf16, any strides; weight: [k, c / groups, r, s].
    activation: None, "relu", "relu6", "leaky_relu" (with another slope than 0.01: "leaky_relu(0.2)"),
    "hardswish", "silu", "gelu" or "gelu_tanh", applied to the result.
    accuracy: "exact" (no Winograd), "fp32", "tf32" or "half". None means "fp32", or for f32 on CUDA "tf32" if PyTorch
    allows it for its own convolutions (`torch.backends.cudnn.conv.fp32_precision`, or `cudnn.allow_tf32`).
    algorithm: one of `windrow.Conv2dPlan.algorithms`. None lets the cost model choose. "fastest" measures Windrow's and
    PyTorch's operator at the first call of a problem, and later calls use the faster one.

    batch_invariant: if true, the bits of an image do not depend on the other images, on the number of threads, or on what
    was measured. Then Windrow computes the convolution and its gradients.

    The packed form of a filter is kept as long as the filter's memory exists, except if a gradient of the filter is
    wanted. Each call checks if the filter still has the values that were packed. With `frozen` you promise that it has,
    and nothing is checked.
    """
    tensors = (input, weight, bias)
    accuracy = _accuracy(accuracy, algorithm, batch_invariant)
    how = {"activation": activation, "accuracy": accuracy, "algorithm": algorithm, "frozen": frozen}
    if has_torch_function(tensors):
        # The tracer of torch.fx comes here too, and makes one node of the call.
        return handle_torch_function(conv2d, tensors, *tensors, stride, padding, dilation, groups, **how)
    if input.dim() == 3:
        args = (weight, bias, stride, padding, dilation, groups)
        return conv2d(input.unsqueeze(0), *args, **how).squeeze(0)
    stride, dilation = _each("stride", stride), _each("dilation", dilation)
    if isinstance(padding, str):
        input, padding = _named_padding(padding, input, weight, stride, dilation)
    else:
        padding = _each("padding", padding)
    return _convolved(input, weight, bias, Options(stride, padding, dilation, groups), **how)


def conv1d(
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
    batch_invariant: bool = False,
    frozen: bool = False,
) -> Tensor:
    """`torch.nn.functional.conv1d`, as `conv2d` of images of one row.

    input: [n, c, l] or [c, l], f32, f16 or bf16, any strides; weight: [k, c / groups, width]; the result is contiguous.
    The options are those of `conv2d`.
    """
    tensors = (input, weight, bias)
    accuracy = _accuracy(accuracy, algorithm, batch_invariant)
    how = {"activation": activation, "accuracy": accuracy, "algorithm": algorithm, "frozen": frozen}
    if has_torch_function(tensors):
        return handle_torch_function(conv1d, tensors, *tensors, stride, padding, dilation, groups, **how)
    if input.dim() == 2:
        args = (weight, bias, stride, padding, dilation, groups)
        return conv1d(input.unsqueeze(0), *args, **how).squeeze(0)
    _expect_lines(input, weight)
    stride, dilation = _each("stride", stride, 1), _each("dilation", dilation, 1)
    if isinstance(padding, str):
        input, padding = _named_padding(padding, input, weight, stride, dilation)
    else:
        padding = _each("padding", padding, 1)
    options = Options([1, *stride], [0, *padding], [1, *dilation], groups)
    return _convolved(input, weight, bias, options, **how)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    activation: str | None = None,
    accuracy: str | None = None,
    algorithm: str | None = None,
    batch_invariant: bool = False,
    frozen: bool = False,
) -> Tensor:
    """`torch.nn.functional.conv_transpose2d`, as the data gradient of a convolution.

    input: [n, c, h, w] or [c, h, w], f32, f16 or bf16, any strides; weight: [c, k / groups, r, s].
    algorithm: None, or "fastest"; the other options are those of `conv2d`. Bias and activation are separate passes. The
    packed form of the filter is not kept.
    """
    tensors = (input, weight, bias)
    accuracy = _accuracy(accuracy, algorithm, batch_invariant)
    how = {"activation": activation, "accuracy": accuracy, "algorithm": algorithm, "frozen": frozen}
    if has_torch_function(tensors):
        args = (*tensors, stride, padding, output_padding, groups, dilation)
        return handle_torch_function(conv_transpose2d, tensors, *args, **how)
    if input.dim() == 3:
        args = (weight, bias, stride, padding, output_padding, groups, dilation)
        return conv_transpose2d(input.unsqueeze(0), *args, **how).squeeze(0)
    stride, padding, dilation = _each("stride", stride), _each("padding", padding), _each("dilation", dilation)
    options = Options(stride, padding, dilation, groups, _each("output_padding", output_padding))
    return _transposed(input, weight, bias, options, **how)


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    activation: str | None = None,
    accuracy: str | None = None,
    algorithm: str | None = None,
    batch_invariant: bool = False,
    frozen: bool = False,
) -> Tensor:
    """`torch.nn.functional.conv_transpose1d`, as `conv_transpose2d` of images of one row.

    input: [n, c, l] or [c, l], f32, f16 or bf16, any strides; weight: [c, k / groups, width]; the result is contiguous.
    """
    tensors = (input, weight, bias)
    accuracy = _accuracy(accuracy, algorithm, batch_invariant)
    how = {"activation": activation, "accuracy": accuracy, "algorithm": algorithm, "frozen": frozen}
    if has_torch_function(tensors):
        args = (*tensors, stride, padding, output_padding, groups, dilation)
        return handle_torch_function(conv_transpose1d, tensors, *args, **how)
    if input.dim() == 2:
        args = (weight, bias, stride, padding, output_padding, groups, dilation)
        return conv_transpose1d(input.unsqueeze(0), *args, **how).squeeze(0)
    _expect_lines(input, weight)
    stride, padding, dilation = (
        _each("stride", stride, 1),
        _each("padding", padding, 1),
        _each("dilation", dilation, 1),
    )
    more = _each("output_padding", output_padding, 1)
    options = Options([1, *stride], [0, *padding], [1, *dilation], groups, [0, *more])
    return _transposed(input, weight, bias, options, **how)


def _accuracy(accuracy: str | None, algorithm: str | None, batch_invariant: bool) -> str | None:
    if batch_invariant and algorithm == FASTEST:
        raise ValueError(f"`algorithm` is {FASTEST!r}, expected another with `batch_invariant`")
    return accuracy_with(accuracy, batch_invariant)


def _transposed(input: Tensor, weight: Tensor, bias: Tensor | None, options: Options, **how: Any) -> Tensor:
    if how["algorithm"] not in (None, FASTEST):
        raise ValueError(f"`algorithm` is {how['algorithm']!r}, expected None or {FASTEST!r}")
    stride, _, dilation, _, output_padding = options
    assert output_padding is not None
    for more, s, d in zip(output_padding, stride, dilation, strict=True):
        if more >= max(s, d):
            raise ValueError(f"`output_padding` is {output_padding}, expected less than stride or dilation")
    beyond = [more // max(s, 1) for more, s in zip(output_padding, stride, strict=True)]
    if any(beyond):
        # Rows and columns of the result that depend only on zeros appended to the input.
        input = F.pad(input, (0, beyond[1], 0, beyond[0]) if input.dim() == 4 else (0, beyond[1]))
        rest = [more % s for more, s in zip(output_padding, stride, strict=True)]
        options = options._replace(output_padding=rest)
    return _convolved(input, weight, bias, options, **how)


def _expect_lines(input: Tensor, weight: Tensor) -> None:
    if input.dim() != 3 or weight.dim() != 3:
        dims = f"{input.dim()} and {weight.dim()}"
        raise ValueError(f"`input` and `weight` have {dims} dimensions, expected 3 (or 2 of `input`)")


def _convolved(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    *,
    activation: str | None,
    accuracy: str | None,
    algorithm: str | None,
    frozen: bool,
) -> Tensor:
    accuracy = accuracy_of(accuracy, input)
    activated = activation_of(activation)
    of_filter = torch.is_grad_enabled() and weight.requires_grad
    after = None
    if activation is not None and torch.is_grad_enabled():
        if of_filter or input.requires_grad or (bias is not None and bias.requires_grad):
            after, activation = activated, None
    if algorithm == FASTEST and not torch.compiler.is_dynamo_compiling():
        # Otherwise the kernel, which decides itself, is reached by a short way.
        has_way = torch.is_grad_enabled() or torch._C._is_any_autocast_enabled()
        if (
            has_way
            and activation is None
            and is_pytorchs(input, weight, bias, options, accuracy, frozen)
        ):
            y = aten(input, weight, bias, options)
            return y if after is None else after(y)
    # A traced graph serves with and without gradients: its filters are kept, and compared.
    changing = of_filter and torch._C._get_tracing_state() is None
    filter = CHANGING if changing else FROZEN if frozen else KEPT
    rest = (*options, activation, accuracy, algorithm, filter)
    y = call(CONV2D, _kernel, (input, weight, bias), *rest, aten=_aten)
    return y if after is None else after(y)


class Training:
    """A convolution with gradients, for images like x, whose implementations are all decided."""

    def __init__(self, x: Tensor, run: Way, conv: Conv, mine: Callable[[Three], Three]) -> None:
        self.run, self.options, self.accuracy, self.mine = run.run, conv.options, conv.accuracy, mine
        self.ours = run.run.like(x) if type(run.run) is Windrow else None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _Trained.apply(x, weight, bias, self)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = None if self.ours is None else self.ours(x, weight, bias)
        return self.run(x) if y is None else y

    def gradients(self, tensors: Sequence[Tensor | None], needs: tuple[bool, ...]) -> Sequence[Tensor | None]:
        """The gradients from dy, x, filter and bias."""
        if not _native.is_plain(*tensors) or torch._C._is_any_autocast_enabled():
            rest = (*self.options, self.accuracy, FASTEST, needs)
            return or_none(_conv2d_backward(*tensors, *rest), needs)
        dy, x, weight, bias = tensors
        backward = Backward(_dense(dy), x, weight, bias, self.options, self.accuracy)
        return backward.computed(needs, self.mine(needs))


class _Trained(torch.autograd.Function):
    """The autograd function of a `Training`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by: Training) -> Tensor:
        # The same tensors as PyTorch's operator saves: a checkpoint counts them, and the other implementation may
        # recompute them.
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.by = bias, by
        return by.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.by.gradients((dy, *ctx.saved_tensors, ctx.bias), ctx.needs_input_grad[:3]), None
