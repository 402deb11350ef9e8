"""What `torch.compile(model, backend="windrow")` makes of a network of `published.py`: its graphs, and who computes its
convolutions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.autograd.profiler import profile
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

_aten = torch.ops.aten


@dataclass
class Told:
    """The report of a compilation: by module, the pass that took its convolution, or why PyTorch computes it."""

    passes: dict[str, str] = field(default_factory=dict)
    # What the check of a graph found.
    check: list[str] = field(default_factory=list)

    def fused(self, name: str, what: str) -> None:
        is_fused, is_folded = what.startswith("FusedConv2d("), "folded " in what
        self.passes.setdefault(name, "fold, fuse" if is_folded else "fuse" if is_fused else what)

    def left(self, name: str, why: str) -> None:
        if name == "check":
            self.check.append(why[:160])
        else:
            self.passes.setdefault(name, f"left: {why[:160]}")

    def shares(self, products: dict[str, int]) -> dict[str, float]:
        """The share of the convolutions' operations by pass, the largest first."""
        found: dict[str, int] = {}
        for name, count in products.items():
            took = self.passes.get(name, "not named")
            found[took] = found.get(took, 0) + count
        whole = max(1, sum(products.values()))
        return {took: round(n / whole, 4) for took, n in sorted(found.items(), key=lambda of: -of[1]) if n}


def graphs(call: Callable[[], Any]) -> list[int]:
    """The numbers of graphs and of graph breaks of a compiled model's first call."""
    torch._dynamo.reset()
    counters.clear()
    call()
    return [counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())]


def by_pytorch(call: Callable[[], Any]) -> int:
    """The operations of the convolutions that PyTorch's operators compute in a call: two for each product."""
    with profile(record_shapes=True) as found:
        call()
    total = 0
    for event in found.function_events:
        if event.name == "aten::convolution":
            x, weight = (torch.empty(shape, device="meta") for shape in event.input_shapes[:2])
            _, _, _, *options, is_transposed, output_padding, groups = event.concrete_inputs
            y = _aten.convolution(x, weight, None, *options, is_transposed, output_padding, groups)
            total += conv_flop_count(x.shape, weight.shape, y.shape, is_transposed)
    return total


def by_module(call: Callable[[], Any]) -> dict[str, int]:
    """The operations of a model's convolutions, by the name of the module that calls them."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    of = lambda counts: sum(n for operator, n in counts.items() if "convolution" in str(operator))
    whole = {name.partition(".")[2]: of(counts) for name, counts in counter.get_flop_counts().items() if name != "Global"}
    own = dict(whole)
    for name, count in whole.items():
        above = [other for other in whole if name and (not other or name.startswith(f"{other}."))]
        if above:
            own[max(above, key=len)] -= count
    return own
