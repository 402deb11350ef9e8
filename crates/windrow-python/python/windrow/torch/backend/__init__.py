"""`torch.compile(model, backend="windrow")`: convolutions by Windrow, the rest by Inductor or by PyTorch's operators.

Dynamo and AOTAutograd take the graph, soundly: with guards, in functional form, with side effects kept. Passes, one in each
file of this folder, change it; what a pass does not know goes through unchanged.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from windrow.torch.backend._compile import by_eager, by_inductor
from windrow.torch.backend._options import OptionError, Options, VersionError, can_inductor, device_types

__all__ = ["OptionError", "VersionError", "windrow"]


def windrow(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """What Dynamo calls with each graph.

    mode: as `torch.compile` has it. options: `accuracy` ("exact", "fp32", "tf32", "half"; None is that of PyTorch's own
    convolutions), `check` (False does without a comparison at a graph's first call), `freeze` (False leaves what depends on
    parameters alone in the graph), `mode`, `report` (an object that is told what each convolution became: `fused(name, what)`,
    `left(name, why)`), `rest` ("inductor", or "eager" for PyTorch's operators one by one), and all that Inductor knows. Raises
    OptionError for others.
    """
    asked = Options.of(mode, options)
    if asked.rest == "inductor" and can_inductor(device_types(inputs)):
        return by_inductor(graph, inputs, asked)
    return by_eager(graph, inputs, asked)
