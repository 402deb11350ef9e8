"""The backend of `torch.compile(model, backend="windrow")`: Windrow computes convolutions, Inductor or PyTorch's
operators the rest.

Dynamo and AOTAutograd capture the graph soundly: with guards, in functional form, with side effects kept. Each file of
this folder has one pass over the graph; a pass leaves operators that it does not know as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from windrow.torch.backend._compile import by_eager, by_inductor
from windrow.torch.backend._options import (
    OptionError,
    Options,
    Ran,
    VersionError,
    can_inductor,
    device_types,
    is_one_call,
    rest_of,
)

__all__ = ["OptionError", "VersionError", "windrow"]


def windrow(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The function that Dynamo calls with each graph.

    mode: as in `torch.compile`. options: all options of Inductor, and these:
    accuracy: "exact", "fp32", "tf32" or "half"; None means the accuracy of PyTorch's own convolutions.
    batch_invariant: True if the bits of an image must not depend on the other images in its batch, as in `patch`. The
    report then names each other operator whose bits may depend on it.
    check: False skips the comparison at a graph's first call.
    freeze: False computes what depends on parameters alone again on each call.
    mode: as the argument.
    report: an object with the methods `fused(name, what)` and `left(name, why)`, which are called for each convolution.
    rest: "inductor", or "eager" for PyTorch's operators one by one. By default "inductor", but "eager" for networks of
    convolutions on the CPU that become one call: f32, in inference, and without an option of Inductor's.

    Raises OptionError for other options, and VersionError if PyTorch is too old.
    """
    return _compiled(graph, inputs, Options.of(mode, options))


def compiled_with(
    graph: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], ran: Ran
) -> Callable[..., Any]:
    """The same function for an optimized model. It calls `ran` after each run."""
    rest = options.get("rest") or rest_of(graph, inputs)
    return _compiled(graph, inputs, replace(Options.of(None, {**options, "rest": rest}), ran=ran))


def _compiled(graph: fx.GraphModule, inputs: Sequence[Any], asked: Options) -> Callable[..., Any]:
    is_eager = is_one_call(graph, inputs) if asked.rest is None else asked.rest == "eager"
    if is_eager or not can_inductor(device_types(inputs)):
        return by_eager(graph, inputs, asked)
    return by_inductor(graph, inputs, asked)
