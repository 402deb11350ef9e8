"""The report of a graph: what its convolutions became, and which ones PyTorch computes."""

import re
from typing import Protocol

from torch import fx

# On a node that stands for a module's: the module's name, and what was folded into it.
NAME, FOLDED = "windrow_name", "windrow_folded"


class Report(Protocol):
    """An object that receives the report. A name is a module's, relative to the compiled module, or "" if it is
    unknown."""

    def fused(self, name: str, what: str) -> None:
        """Called for a convolution that became one operation with the operators around it."""

    def left(self, name: str, why: str) -> None:
        """Called for a module that PyTorch computes."""


def name_of(node: fx.Node) -> str:
    """The name of the module that called an operator."""
    if NAME in node.meta:
        return str(node.meta[NAME])
    stack = node.meta.get("nn_module_stack")
    return _path([*stack.values()][-1][0]) if stack else ""


def _path(source: str) -> str:
    """The module's name in the tracer's expression: `encoder.0` for `L['self'].encoder[0]`, for
    `L['fn'].__self__.encoder.0`, for `L['self']._modules['encoder']...` and, where a class looks attributes up by itself,
    for `L['self'].__dict__['_modules']['encoder']...`."""
    source = re.sub(r"\.(?:_modules|__dict__\['_modules'\])\['([^']*)'\]|\[(\d+)\]", r".\1\2", source)
    return re.sub(r"^\w\['\w+'\](\.__self__)?\.?", "", source)


def folded_name(node: fx.Node) -> str:
    """The name of a folded node: the module's for a normalisation, otherwise the operator's."""
    stack = node.meta.get("nn_module_stack")
    kind = str([*stack.values()][-1][1]) if stack else ""
    return name_of(node) if "Norm" in kind else str(getattr(node.target, "_opname", node.target))
