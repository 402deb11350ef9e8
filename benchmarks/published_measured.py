"""What is measured of one network of `published.py`, in a process of its own."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import windrow.torch
from published import ALLOWED, WHOLE
from published_compiled import Told, by_module, by_pytorch, graphs
from published_networks import NETWORKS
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from windrow.torch._modules import Convolution
from windrow.torch.backend import windrow as backend
from windrow.torch.choice import measure, store
from windrow.torch.choice.policy import PYTORCH, Seconds

# Where PyTorch's own error is less, this counts for it: half of what one layer by Winograd's algorithm in f32 is off.
LEAST = 1e-6
# A function that finds the errors of one way to run a network, and what Windrow computed.
Find = Callable[[], dict[str, Any]]


def measured(name: str, ways: list[str]) -> dict[str, Any]:
    """The case of a network in the record."""
    beside = Beside(name)
    case: dict[str, Any] = {"network": name, "parameters": sum(p.numel() for p in beside.model.parameters())}
    case["convolutions"] = sum(isinstance(m, nn.modules.conv._ConvNd) for m in beside.model.modules())
    case["error"] = float(f"{max(e for es in beside.eager for e in es):.2e}")
    finds = [WAYS[way](beside, case) for way in ways]
    for how in ALLOWED:
        if how == "forced":
            measure.times_of = lambda _, runs: {name: Seconds(1.0 if name == PYTORCH else 0.5) for name in runs}
        case[how] = {}
        for find in finds:
            windrow.torch.forget()
            case[how] |= {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in find().items()}
    return case


class Beside:
    """A network, and how far PyTorch's results are from those in f64."""

    def __init__(self, name: str) -> None:
        network = NETWORKS[name]
        torch.manual_seed(0)
        self.model = network.build().eval().requires_grad_(False)
        calibrated(self.model, network.given(network.sizes[0]))
        self.double = copy.deepcopy(self.model).double()
        self.inputs = [network.given(size) for size in dict.fromkeys(network.sizes)]
        # What the network gave each of its children, and the child's result.
        self.children: dict[str, Any] = {}

        def keep(at: str) -> Any:
            def hook(_: Any, args: Any, kwargs: Any, y: Any) -> None:
                if len(args) == 1 and not kwargs and at not in self.children:
                    self.children[at] = copy.deepcopy(args), copy.deepcopy(y)

            return hook

        handles = [m.register_forward_hook(keep(n), with_kwargs=True) for n, m in self.model.named_children()]
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        self.wants = self.results(self.double, wide(self.inputs))
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(1)
        self.eager = [errors(y, want) for y, want in zip(self.results(self.model), self.wants, strict=True)]
        for handle in handles:
            handle.remove()

    def results(self, candidate: Any, inputs: Any = None) -> list[Any]:
        """The results of a call with each size."""
        with torch.inference_mode():
            return [called(candidate, given) for given in inputs or self.inputs]

    def of_calls(self, candidate: Any) -> float:
        """How many times PyTorch's own error the results have, the most of all calls."""
        worst = 0.0
        for _ in range(2):
            torch.manual_seed(1)
            for y, want, theirs in zip(self.results(candidate), self.wants, self.eager, strict=True):
                worst = max(worst, times(errors(y, want), theirs))
        return worst

    def of_children(self, candidate: Any) -> float:
        """The same of the children, each called alone."""
        worst = 0.0
        with torch.inference_mode():
            for at, (args, y) in self.children.items():
                want = self.double.get_submodule(at)(*wide(args))
                ours = candidate.get_submodule(at)(*copy.deepcopy(args))
                worst = max(worst, times(errors(ours, want), errors(y, want)))
        return worst


def patched(beside: Beside, case: dict[str, Any]) -> Find:
    def find() -> dict[str, Any]:
        model = copy.deepcopy(beside.model)
        report = windrow.torch.patch(model)
        found = {"patched": beside.of_calls(model), "patched_children": beside.of_children(model)}
        return found | {"patched_by_windrow": by_windrow(model, report)}

    return find


def optimized(beside: Beside, case: dict[str, Any]) -> Find:
    def find() -> dict[str, Any]:
        model = windrow.torch.optimize(beside.model)
        found: dict[str, Any] = {"optimized": beside.of_calls(model)}
        report = model.windrow_report
        found["fused"] = sum("FusedConv2d(" in what for what in report.fused.values())
        found["optimized_children"] = beside.of_children(model)
        found["problems_by_windrow"] = sum(d.choice.startswith("Windrow") for d in store.every())
        found["problems"] = len(store.every())
        found["left"] = {n: why[:160] for n, why in report.left.items() if n.endswith("check") or n.startswith(WHOLE)}
        return found

    return find


def compiled(beside: Beside, case: dict[str, Any]) -> Find:
    told, model = Told(), beside.model
    first = beside.inputs[:1]
    theirs = graphs(lambda: beside.results(torch.compile(model, backend="eager"), first))
    fast = torch.compile(model, backend=backend, options={"rest": "eager", "report": told})
    ours = graphs(lambda: beside.results(fast, first))
    passes = told.shares(by_module(lambda: called(model, beside.inputs[0])))
    whole = by_pytorch(lambda: beside.results(model))
    case["graphs"] = {"windrow": ours, "eager": theirs, "passes": passes, "gflop": round(whole / 1e9, 3), "check": told.check}

    def find() -> dict[str, Any]:
        error = beside.of_calls(fast)
        # A call may still measure.
        left = min(by_pytorch(lambda: beside.results(fast)) for _ in range(3))
        return {"compiled": error, "compiled_by_windrow": 1 - left / max(1, whole)}

    return find


WAYS = {"patched": patched, "optimized": optimized, "compiled": compiled}


def wide(given: Any) -> Any:
    return tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, given)


def tensors(result: Any, depth: int = 6) -> list[Any]:
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    inside = result if isinstance(result, dict) else getattr(result, "__dict__", {})
    parts = result if isinstance(result, list | tuple) else inside.values()
    return [t for part in parts if depth for t in tensors(part, depth - 1)]


def errors(result: Any, want: Any) -> list[float]:
    pairs = zip(tensors(result), tensors(want), strict=True)
    return [float((g.double() - w).norm() / w.norm().clamp(min=1e-30)) for g, w in pairs]


def times(ours: list[float], theirs: list[float]) -> float:
    return max((o / max(t, LEAST) for o, t in zip(ours, theirs, strict=True)), default=0.0)


def called(model: Any, given: Any) -> Any:
    return model(**given) if isinstance(given, dict) else model(*given)


def calibrated(model: Any, given: Any) -> None:
    """Statistics of one batch, so that activations keep their size as in a trained network, and factors that show."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d) and m.track_running_stats]
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("layer_scale", "gamma")) and parameter.abs().max() < 1e-2:
            nn.init.constant_(parameter, 0.1)
    training = {m: (m.momentum, m.training) for m in norms}
    for norm in norms:
        norm.momentum, norm.training = 1.0, True
    if norms:
        with torch.no_grad():
            try:
                called(model, given)
            except ValueError:
                # One value in each channel.
                pass
    for norm, (momentum, was_training) in training.items():
        norm.momentum, norm.training = momentum, was_training


def by_windrow(model: Any, report: Any) -> int:
    """Convolutions of which a call was decided to be Windrow's."""
    layers = {d.key.layer for d in store.every() if d.choice.startswith("Windrow")}
    modules = dict(model.named_modules())
    return sum(isinstance(modules[n], Convolution) and modules[n].layer() in layers for n in report.swapped)
