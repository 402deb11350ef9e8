"""Registration with PyTorch's dispatcher.

Operators are defined on a `torch.library.Library`: the `custom_op` decorator would add 5 to 25 us to
each call. Each operator comes with its kernel, a fake kernel for torch.compile, its gradient and what
autocast does; the gradient is an operator of its own, whose gradient says that there is none.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from windrow import _native

# The package's own name: `windrow`, or what a copy of its modules is imported as.
NAMESPACE = __name__.partition(".")[0]
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
OPERATORS = getattr(torch.ops, NAMESPACE)


# Each operator's kernel, which computes it from plain tensors, and the number of tensors that its arguments begin with.
_kernels: dict[str, tuple[Callable[..., Any], int]] = {}


def define(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], layers: _native.Layers | None = None
) -> Any:
    """Defines `windrow::name` and returns the operator. `layers`: those of fused convolutions."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    operator = getattr(OPERATORS, name).default
    is_tensor = [str(a.type) in ("Tensor", "Optional[Tensor]") for a in operator._schema.arguments]
    tensors = (*is_tensor, False).index(False)
    straight = None if operator._schema.is_mutable else kernel
    if straight is not None:
        _kernels[name] = kernel, tensors
    if straight is not None or layers is not None:
        # Called past the dispatcher, which takes 6 us, if that would do nothing else.
        operator._op = _native.ShortOperator(operator._op, straight, tensors, layers)
    # `vmap` itself takes operators apart that write to an argument; PyTorch before 2.5 does so with all.
    if not operator._schema.is_mutable and hasattr(torch.library, "register_vmap"):
        torch.library.register_vmap(f"{NAMESPACE}::{name}", _one_by_one(operator), lib=_LIBRARY)
    return operator


def _one_by_one(operator: Any) -> Callable[..., Any]:
    """Calls the operator for each element of a batch under `torch.vmap`, as PyTorch does by default, but without its
    warning."""

    def batched(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        count = info.batch_size
        moved = [a.movedim(d, 0) if isinstance(a, Tensor) and d is not None else None for a, d in zip(args, in_dims)]
        # For an empty batch, the result of one element tells the shape.
        some = [m if m is None or count else m.new_zeros(1, *m.shape[1:]) for m in moved]
        of = lambda i: [a if m is None else m[i] for a, m in zip(args, some)]
        results = [operator(*of(i)) for i in range(max(count, 1))]
        if isinstance(results[0], Tensor):
            return torch.stack(results)[:count], 0
        stacked = tuple(torch.stack(parts)[:count] for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return batched


# The autograd functions that record an operator without the dispatcher, which takes several times as long.
_recorders: dict[Any, type[torch.autograd.Function]] = {}


def differentiable(
    operator: Any,
    kernel: Callable[..., Any],
    setup_context: Callable[..., None],
    gradient: Callable[..., Any],
    has_own_gradient: bool = True,
) -> None:
    """Gives `windrow::name`, which `kernel` computes, a gradient: the operator `windrow::name_backward`, unless
    `gradient` calls that of another operator."""
    name = operator._opname

    def twice(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"double backward: windrow.torch.{name} has a first derivative only; PyTorch's operator, which "
            "`windrow.torch.unpatch(model)` puts back into a patched model, has a second one"
        )

    class Recorder(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            result = kernel(*args)
            setup_context(ctx, args, result)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return gradient(ctx, *grads)

    _recorders[operator] = Recorder
    _autograd(name, name, setup_context, gradient)
    if has_own_gradient:
        _autograd(f"{name}_backward", name, _nothing, twice)


def not_differentiable(name: str, instead: str) -> None:
    """Makes a gradient through `windrow::name` an error that names the operator to use instead."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"windrow.torch.{name} has no gradient; {instead} has one")

    _autograd(name, name, _nothing, backward)


def _nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _autograd(
    operator: str,
    name: str,
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> None:
    """Registers a gradient as `torch.library.register_autograd` does, for transforms of `torch.func` too. A tensor with a
    forward-mode derivative is an error here; there the derivative is dropped without a word."""
    overload = getattr(OPERATORS, operator).default
    implementation = make_autograd_impl(overload, Info(backward, setup_context))
    transformed = _under_transforms(overload, setup_context, backward)
    kernel, tensors = _kernels.get(operator, (None, 0))

    def checked(keyset: Any, *args: Any) -> Any:
        if kernel is not None and _native.is_plain(*args[:tensors]):
            # The dispatcher would only call the kernel, through another layer of Python. Graphs of compiled models
            # come this way at each call.
            try:
                return kernel(*args)
            except _native.NotInPlace:
                pass  # The dispatcher may have a way to make it a plain tensor.
        if forward_ad._current_level >= 0 and any(_is_dual(arg) for arg in args):
            raise NotImplementedError(
                f"forward-mode derivatives (torch.func.jvp, jacfwd, dual tensors): windrow.torch."
                f"{name} has none; PyTorch's operator, which `windrow.torch.unpatch(model)` puts back into a "
                "patched model, has one"
            )
        if torch._C._get_tracing_state() is not None:
            # A recorded gradient would stand in the graph as a Python object. Without one the graph
            # has the operator, which finds its gradient when the graph is run.
            with torch.no_grad():
                return implementation(keyset, *args)
        if torch._C._are_functorch_transforms_active():
            return transformed(keyset, *args)
        return implementation(keyset, *args)

    _LIBRARY.impl(operator, checked, "Autograd", with_keyset=True)


def _under_transforms(
    operator: Any, setup_context: Callable[..., None], gradient: Callable[..., Any]
) -> Callable[..., Any]:
    """Records an operator for the innermost transform of `torch.func`, as PyTorch's own operators do. What PyTorch makes
    for a custom operator is an error under transforms."""

    class Level(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *given, keyset = args
            # The transforms outside record the operator, too.
            with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
                result = operator.redispatch(keyset & torch._C._after_autograd_keyset, *given)
            setup_context(ctx, (*given,), result)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return *gradient(ctx, *grads), None

    def recorded(keyset: Any, *args: Any) -> Any:
        with enable_single_level_autograd_function():
            return Level.apply(*args, keyset)

    return recorded


def _is_dual(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None


def _is_cast(value: Any, device: str, dtype: torch.dtype) -> bool:
    """True if PyTorch's autocast casts this argument of a convolution."""
    return (
        isinstance(value, Tensor)
        and value.device.type == device
        and value.is_floating_point()
        and value.dtype not in (dtype, torch.float64)
    )


def as_autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors of a convolution as autocast casts them where it is on. The first one tells the device."""
    assert tensors[0] is not None
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t is not None and _is_cast(t, device, dtype) else t for t in tensors]


def autocast(
    operator: Any,
    lower_precision: Sequence[int],
    after: Callable[[tuple[Any, ...], list[Any]], None] = lambda args, cast: None,
) -> None:
    """Makes autocast cast the arguments at these positions to its lower precision. `after` receives the arguments
    before and after the cast."""

    def on(device: str) -> None:
        key = getattr(torch._C.DispatchKey, f"Autocast{device}")
        keys = torch._C.DispatchKeySet(key)

        def cast(*args: Any) -> Any:
            dtype = torch.get_autocast_dtype(device.lower())
            cast_args = list(args)
            for i in lower_precision:
                if _is_cast(args[i], device.lower(), dtype):
                    cast_args[i] = args[i].to(dtype)
            after(args, cast_args)
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return operator(*cast_args)

        _LIBRARY.impl(operator.name().partition("::")[2].partition(".")[0], cast, f"Autocast{device}")

    on("CPU")
    on("CUDA")


def call(
    operator: Any,
    kernel: Callable[..., Any],
    tensors: tuple[Any, ...],
    *rest: Any,
    aten: Callable[..., Any] | None = None,
) -> Any:
    """The result of `operator(*tensors, *rest)`. The kernel is called directly if the dispatcher would only call it and
    record it. `aten` computes the same with PyTorch's operators, for an export to ONNX, which knows no others."""
    if not (torch.compiler.is_dynamo_compiling() or torch._C._is_any_autocast_enabled()):
        try:
            if _native.is_plain(*tensors):
                return kernel(*tensors, *rest)
            recorder = _recorders.get(operator)
            if recorder is not None and _native.is_only_recorded(*tensors):
                return recorder.apply(*tensors, *rest)
        except _native.NotInPlace:
            pass  # The dispatcher may have a way to make it a plain tensor.
    if aten is not None and torch.onnx.is_in_onnx_export():
        return aten(*tensors, *rest)
    return operator(*tensors, *rest)


def with_input(error: Exception, name: str = "x") -> Exception:
    """The kernel's error with `input` in the place of `name`, as the caller wrote it."""
    return type(error)(str(error).replace(f"`{name}`", "`input`"))


def or_empty(like: Tensor, results: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The results with an empty tensor for each None, which operators cannot return."""
    return tuple(like.new_empty(0) if r is None else r for r in results)


def or_none(results: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The inverse of `or_empty`."""
    return tuple(r if w else None for r, w in zip(results, wanted, strict=True))


def fake_gradients(
    tensors: Sequence[Tensor | None], wanted: Sequence[bool], like: Tensor
) -> tuple[Tensor, ...]:
    """The results of a backward kernel, without values."""
    return tuple(
        torch.empty_like(t) if w and t is not None else like.new_empty(0)
        for t, w in zip(tensors, wanted, strict=True)
    )
