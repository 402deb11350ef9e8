"""The names of modules that PyTorch's compiler sees by themselves, where code behind a graph break calls them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

_TENSOR = re.compile(r"(L\['\w+'\])((?:\._modules\['[^']*'\])*)\._(?:parameters|buffers)\['(\w+)'\]")


@dataclass
class Names:
    """The names in one graph. A graph may compute several modules of the same kind; each is found by its tensors."""

    # The names of the model's tensors, by identity.
    of: dict[int, str]
    # The names behind a local variable, by the index of the graph's input.
    inside: dict[int, tuple[str, str]] = field(default_factory=dict)
    # What the report was told of the graph's modules.
    told: dict[str, str] = field(default_factory=dict)
    # The part of the names that the graph's other modules do not have.
    own: str = ""

    @staticmethod
    def given_to(graph: fx.GraphModule, inputs: Sequence[Any], module: nn.Module | None) -> "Names":
        """Makes the graph's nodes name their modules from the model on."""
        tensors = () if module is None else (*module.named_parameters(), *module.named_buffers())
        names = Names({id(t): name for name, t in tensors})
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for i, node in enumerate(nodes):
            source = getattr(node.meta.get("grapharg"), "source", None)
            name = getattr(source, "name", "")
            found = _TENSOR.fullmatch(name() if callable(name) else name)
            if found is not None:
                names.inside[i] = found[1], ".".join([*re.findall(r"\['([^']*)'\]", found[2]), found[3]])
        before = names._before(inputs)
        names.own = before.get("L['self']", "")
        for node in graph.graph.nodes:
            stack = node.meta.get("nn_module_stack")
            if stack:
                node.meta["nn_module_stack"] = {key: (_renamed(n, before), kind) for key, (n, kind) in stack.items()}
            elif names.own and node.op == "call_function":
                node.meta["nn_module_stack"] = {"": (f"L['self'].{names.own.rstrip('.')}", nn.Module)}
        return names

    def _before(self, inputs: Sequence[Any]) -> dict[str, str]:
        """What the names of a local variable's modules begin with."""
        before: dict[str, str] = {}
        for i, (variable, inside) in self.inside.items():
            name = self.of.get(id(inputs[i])) if i < len(inputs) else None
            if name is not None and f".{name}".endswith(f".{inside}"):
                before.setdefault(variable, name.removesuffix(inside))
        return before

    def others(self, inputs: Sequence[Any]) -> dict[str, str]:
        """What the report is to be told of the modules that have these tensors, if these are not the graph's first."""
        own, other = self.own, self._before(inputs).get("L['self']", self.own)
        if other == own:
            return {}
        told = ((name.removeprefix(own), what) for name, what in self.told.items())
        return {other + name: what.replace(f"folded {own}", f"folded {other}") for name, what in told}


def _renamed(source: str, before: dict[str, str]) -> str:
    variable = source.partition("]")[0] + "]"
    if not before.get(variable):
        return source
    return f"L['self'].{before[variable]}{source[len(variable) :].lstrip('.')}".rstrip(".")
