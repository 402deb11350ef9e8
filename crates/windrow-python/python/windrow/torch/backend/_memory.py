"""The memory that a graph's values take at its convolutions, whoever computes them.

A decision is made when the graph is compiled, before any of these values exist. Without them it would look as if a model
needed little memory, and as if nothing else stood beside the convolution.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from windrow.torch.backend._constants import value
from windrow.torch.backend._convolutions import convolutions
from windrow.torch.choice import budget


class Memory:
    """What stands beside each convolution of a graph. Inputs do not count: they exist already. Nor do values of sizes that
    may change."""

    def __init__(self, graph: fx.Graph) -> None:
        nodes = [*graph.nodes]
        read = {storage: i for i, node in enumerate(nodes) for of in node.all_input_nodes for storage in _storages(of)}
        inputs = {storage for node in nodes if node.op == "placeholder" for storage in _storages(node)}
        convs = {conv.node: conv for conv in convolutions(graph)}
        self._at: dict[fx.Node, dict[Any, int]] = {}
        self.device: torch.device | None = None
        self.peak = 0
        live: dict[Any, int] = {}
        for i, node in enumerate(nodes):
            made = {storage: n for storage, n in _storages(node).items() if storage not in inputs}
            if node in convs:
                self.device = value(node).device
                self._at[node] = {**live}
                self.peak = max(self.peak, sum({**live, **made}.values()))
            live = {storage: n for storage, n in {**live, **made}.items() if read.get(storage, -1) > i}

    def expect(self) -> None:
        """Tells the budget what the graph is going to need."""
        if self.device is not None:
            budget.expect(self.device, self.peak)

    def beside(self, node: fx.Node, *own: Any) -> int:
        """The bytes of values that exist while a convolution runs, without those of its own tensors."""
        without = {storage for of in own if isinstance(of, fx.Node) for storage in _storages(of)}
        return sum(n for storage, n in self._at.get(node, {}).items() if storage not in without)


def _storages(node: fx.Node) -> dict[Any, int]:
    """The memory of a node's values, which views share, with its bytes."""
    found = {}
    for t in tree_leaves(node.meta.get("val")):
        if isinstance(t, Tensor) and t.layout is torch.strided:
            size = t.untyped_storage().nbytes()
            found[t.untyped_storage()._cdata] = size if isinstance(size, int) else 0
    return found
