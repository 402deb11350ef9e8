"""What a graph says of itself to whoever asked for it: which convolutions became what, and what was left."""

import re
from typing import Protocol

from torch import fx

# On a node that stands for a module's: the module's name, and what was folded into it.
NAME, FOLDED = "windrow_name", "windrow_folded"


class Report(Protocol):
    """Names are those of modules, from that on which was compiled; "" where none is known."""

    def fused(self, name: str, what: str) -> None:
        """A convolution is one operation with what stood around it."""

    def left(self, name: str, why: str) -> None:
        """A module stays as PyTorch has it."""


def name_of(node: fx.Node) -> str:
    """Of the module that called an operator."""
    if NAME in node.meta:
        return str(node.meta[NAME])
    stack = node.meta.get("nn_module_stack")
    return _path([*stack.values()][-1][0]) if stack else ""


def _path(source: str) -> str:
    """`encoder.0` of `L['self'].encoder[0]`, of `L['fn'].__self__.encoder.0` and of `L['self']._modules['encoder']...`."""
    source = re.sub(r"\._modules\['([^']*)'\]|\[(\d+)\]", r".\1\2", source)
    return re.sub(r"^\w\['\w+'\](\.__self__)?\.?", "", source)


def folded_name(node: fx.Node) -> str:
    """Of what was folded: the module if it is a normalisation, else the operator."""
    stack = node.meta.get("nn_module_stack")
    kind = str([*stack.values()][-1][1]) if stack else ""
    return name_of(node) if "Norm" in kind else str(getattr(node.target, "_opname", node.target))
