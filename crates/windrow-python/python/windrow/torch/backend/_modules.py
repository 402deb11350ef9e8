"""The pass that makes modules of convolutions, for graphs whose operators run one by one. A module remembers who
computes it, and convolutions that follow each other become one call."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from windrow.torch._fused import FusedConv2d
from windrow.torch._image_step import ImageStep
from windrow.torch._library import OPERATORS
from windrow.torch._sequence import Sequence as Convolutions
from windrow.torch._sequence import in_sequences
from windrow.torch.backend._constants import Constants, value


def to_modules(
    module: fx.GraphModule, constants: Constants
) -> tuple[Callable[..., fx.GraphModule], dict[fx.Node, str]]:
    """Changes the graph. Returns a function that makes a module of it and of constants, and the name of the module for
    each convolution node."""
    graph = module.graph
    made = {node: i for i, node in enumerate(constants.inputs)}
    names: dict[fx.Node, str] = {}
    bound: dict[str, tuple[int, int | None, tuple[Any, ...]]] = {}
    for node in [*graph.nodes]:
        if node.target not in (OPERATORS.conv2d_fused.default, OPERATORS.conv2d_into.default):
            continue
        x, weight, bias, residual, *options, activation, accuracy = node.args[:10]
        given = (x, residual, *node.args[10:])
        if any(not isinstance(n, int) for sizes in options[:3] for n in sizes):
            continue
        name = names[node] = f"convolution_{len(bound)}"
        bound[name] = made[weight], None if bias is None else made[bias], (options, activation, accuracy)
        module.add_module(name, FusedConv2d(None, None, options, activation, accuracy))  # type: ignore[arg-type]
        with graph.inserting_before(node):
            call = graph.call_module(name, (x,) if given[1:] == (None,) else given)
        call.meta["val"] = value(node)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
    in_sequences(module)
    for node, name in names.items():
        names[node] = next((f"{n}.{name}" for n, part in module._modules.items() if name in part._modules), name)  # type: ignore[union-attr]

    def bind(results: Sequence[Tensor]) -> fx.GraphModule:
        of: Any = lambda i: None if i is None else results[i]
        parts: dict[str, Any] = {name: FusedConv2d(of(weight), of(bias), *how) for name, (weight, bias, how) in bound.items()}
        parts |= {name: part for name, part in module._modules.items() if isinstance(part, ImageStep)}
        parts |= {name: part.of(parts) for name, part in module._modules.items() if isinstance(part, Convolutions)}
        held = {str(n.target): getattr(module, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
        whole = fx.GraphModule(held | parts, graph)
        # The graph would hold what it was bound to last.
        graph.owning_module = module
        return whole

    return bind, names
