"""Registration with PyTorch's dispatcher.

Operators are defined on a `torch.library.Library`: the `custom_op` decorator would add 5 to 25 us to
each call. Each operator comes with its kernel, a fake kernel for torch.compile, its gradient and what
autocast does; the gradient is an operator of its own, whose gradient says that there is none.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from windrow import _native

_LIBRARY = torch.library.Library("windrow", "DEF")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines `windrow::name` and returns the operator."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"windrow::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.windrow, name).default


def differentiable(
    name: str, setup_context: Callable[..., None], backward: Callable[..., Any]
) -> None:
    """Gives `windrow::name` a gradient, computed by the operator `windrow::name_backward`."""
    torch.library.register_autograd(
        f"windrow::{name}", backward, setup_context=setup_context, lib=_LIBRARY
    )

    def twice(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"double backward: windrow.torch.{name} has a first derivative only; for a second "
            "one use PyTorch's own operator"
        )

    torch.library.register_autograd(
        f"windrow::{name}_backward",
        twice,
        setup_context=lambda ctx, inputs, output: None,
        lib=_LIBRARY,
    )


def autocast(operator: Any, lower_precision: Sequence[int]) -> None:
    """Under autocast the f32 arguments at these positions are cast to the lower precision."""

    def on(device: str) -> None:
        key = getattr(torch._C.DispatchKey, f"Autocast{device}")
        keys = torch._C.DispatchKeySet(key)

        def cast(*args: Any) -> Any:
            dtype = torch.get_autocast_dtype(device.lower())
            cast_args = list(args)
            for i in lower_precision:
                if i < len(args) and isinstance(args[i], Tensor) and args[i].dtype == torch.float32:
                    cast_args[i] = args[i].to(dtype)
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return operator(*cast_args)

        _LIBRARY.impl(operator.name().partition("::")[2].partition(".")[0], cast, f"Autocast{device}")

    on("CPU")
    on("CUDA")


def call(operator: Any, kernel: Callable[..., Any], tensors: tuple[Any, ...], *rest: Any) -> Any:
    """`operator(*tensors, *rest)`, past the dispatcher where that would only call the kernel."""
    if (
        not torch.compiler.is_dynamo_compiling()
        and _native.is_plain(*tensors)
        and not torch._C._is_any_autocast_enabled()
    ):
        try:
            return kernel(*tensors, *rest)
        except _native.NotInPlace:
            pass  # The dispatcher may have a way to make it a plain tensor.
    return operator(*tensors, *rest)


def or_empty(like: Tensor, results: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Operators cannot return None: an empty tensor stands for it."""
    return tuple(like.new_empty(0) if r is None else r for r in results)


def or_none(results: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The inverse of `or_empty`."""
    return tuple(r if w else None for r, w in zip(results, wanted, strict=True))


def fake_gradients(
    tensors: Sequence[Tensor | None], wanted: Sequence[bool], like: Tensor
) -> tuple[Tensor, ...]:
    """What a backward kernel returns, without values."""
    return tuple(
        torch.empty_like(t) if w and t is not None else like.new_empty(0)
        for t, w in zip(tensors, wanted, strict=True)
    )
