"""What `batch_invariance.py` measures through PyTorch: whole networks, and layers on a CUDA device. On CUDA, calls are
in CUDA graphs."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import contestants
import models
import networks
import torch
import windrow
import windrow.torch
from contestants import MODES, PATCHED, Case

# The networks, and the modes and the accuracy of each type.
NETWORKS = ["resnet18", "resnet50", "vgg16_bn", "mobilenet_v2", "convnext_tiny", "densenet121"]
TYPES = {
    "float32": ("f32", torch.float32),
    "float16": ("f16_cl", torch.float16),
    "bfloat16": ("bf16_cl", torch.bfloat16),
}
# Calls of a graph, so that its launch takes a small part of the time; seconds of a sample, and of all samples of a layer
# and of a network.
CALLS, SAMPLE, SECONDS = 20, 5e-3, 0.15
NETWORK_SECONDS = {"cuda": 0.6, "cpu": 6.0}


def times(
    calls: dict[Any, Callable], device: torch.device, repeated: int, seconds: float = SECONDS
) -> dict[Any, float]:
    """Milliseconds of each call, sampled in turns: the medians. `repeated`: the calls of a graph."""

    def timed(call: Callable) -> Callable:
        every = lambda: [call() for _ in range(repeated)]
        return models.captured(every) if device.type == "cuda" else every

    found = models.in_turns({str(name): timed(call) for name, call in calls.items()}, seconds, device, SAMPLE)
    return {name: found[str(name)]["median"] / repeated for name in calls}


class Layer:
    """A layer in one layout."""

    def __init__(self, shape: tuple[int, int, int, int], k: int, dtype: torch.dtype, last: bool, device: torch.device):
        form = torch.channels_last if last else torch.contiguous_format
        lay = lambda t: t.to(device, dtype).contiguous(memory_format=form)
        self.x = lay(torch.randn(shape))
        self.w = lay(torch.randn(k, shape[1], 3, 3))
        self.how = {"accuracy": "fp32"} if dtype == torch.float32 else {}

    def explained(self, option: bool) -> str:
        return windrow.Conv2dPlan(self.x, self.w, batch_invariant=option, **self.how).explain()

    def call(self, option: bool) -> Callable:
        how = {**self.how, "batch_invariant": option, "frozen": True}

        def run() -> torch.Tensor:
            with torch.no_grad():
                return windrow.torch.conv2d(self.x, self.w, **how)

        return run


def layer(name: str, shape: tuple[int, int, int, int], k: int, dtype: str, device: torch.device) -> dict[str, Any]:
    """A row of the record."""
    kinds = {"NCHW": False, "channels-last": True}
    layouts = {layout: Layer(shape, k, TYPES[dtype][1], last, device) for layout, last in kinds.items()}
    without = times({layout: of.call(False) for layout, of in layouts.items()}, device, CALLS)
    layout = min(without, key=without.__getitem__)
    explained = [layouts[layout].explained(option) for option in (False, True)]
    is_same = explained[0] == explained[1]
    found = {False: without[layout]}
    if not is_same:
        found = times({option: layouts[layout].call(option) for option in (False, True)}, device, CALLS)
    return {
        "layer": name,
        "shape": [*shape, k],
        "layout": layout,
        "dtype": dtype,
        "ms": found[False],
        "ms_batch_invariant": found[not is_same],
        "ratio": 1.0 if is_same else found[True] / found[False],
        "algorithms": [text.split()[2] for text in explained],
    }


def network(name: str, batch: int, dtype: str, device: torch.device) -> dict[str, Any]:
    """A row of the record: a network patched with defaults and with the option, in turns, and who computed it."""
    mode = TYPES[dtype][0]
    case = Case(networks.NETWORKS[name], name, MODES[mode], batch, "infer", device)
    before = {decision.problem for decision in windrow.torch.decisions()}
    case.set_flags()
    x = case.input(batch, case.network.size[device.type])
    default = case.model(PATCHED)
    invariant = case.model(contestants.PYTORCH)
    report = windrow.torch.patch(invariant, batch_invariant=True)

    def call(model: torch.nn.Module) -> Callable:
        def infer() -> torch.Tensor:
            with torch.inference_mode():
                return model(x)

        return infer

    calls = {"default": call(default), "batch_invariant": call(invariant)}
    for of in calls.values():
        for _ in range(models.WARM_UP):
            of()
    found = times(calls, device, 1, NETWORK_SECONDS[device.type])
    return {
        "network": name,
        "batch": batch,
        "mode": mode,
        "ms": found["default"],
        "ms_batch_invariant": found["batch_invariant"],
        "ratio": found["batch_invariant"] / found["default"],
        "default_computed_by": models.computed_by(device, before),
        "batch_invariant_by_windrow": len(report.swapped),
        "not_promised": sorted({why.partition(":")[0] for why in report.left.values()}),
    }


def networks_of(dtypes: list[str], batches: list[int], device: torch.device) -> Iterator[dict[str, Any]]:
    known = [name for name in NETWORKS if networks.missing(networks.NETWORKS[name]) is None]
    for dtype in dtypes:
        for batch in batches:
            for name in known:
                yield network(name, batch, dtype, device)
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def network_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| mode | batch | mean | largest | networks |", "|---|--:|--:|--:|--:|"]
    for mode, batch in dict.fromkeys((row["mode"], row["batch"]) for row in rows):
        ratios = [row["ratio"] for row in rows if (row["mode"], row["batch"]) == (mode, batch)]
        mean = statistics.geometric_mean(ratios)
        lines.append(f"| {mode} | {batch} | {mean:.3f} | {max(ratios):.3f} | {len(ratios)} |")
    return "\n".join(lines)
