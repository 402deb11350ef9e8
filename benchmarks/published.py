"""Published networks through `windrow.torch.patch` and `optimize`, against the same networks in f64.

    python benchmarks/published.py [--networks 'a;b'] [--seconds N] OUT.json

Random weights, small images, one forward in a process of its own for each network, so that a crash is seen. Errors are those of
a result relative to its norm, in the worst of a network's results; `x` is how many times PyTorch's own error that is. Each
network is also called with a second size, and each of its children alone with what the network gave it. A second pass takes
Windrow's kernels wherever they compute a problem, whatever is fastest. `convolutions` counts the modules of the network, those
that `optimize` fused, and those that Windrow computed.

OUT.md is the table. Networks that OUT.json has already are left out, unless they are named. `--part 1/2` is every second of
them, and `--join` puts parts together. Needs `windrow` on PYTHONPATH, and
torchvision, timm, segmentation_models_pytorch, monai and diffusers.
"""

import argparse
import copy
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import provenance

# Times PyTorch's own error, by what computes: what is fastest, and Windrow wherever it can.
ALLOWED = {"fastest": 2.0, "forced": 4.0}
# What the report calls the whole of a model.
WHOLE = "the model"
# Where PyTorch's own error is less, this counts for it: half of what one layer by Winograd's algorithm in f32 is off.
LEAST = 1e-6
LIBRARIES = ("torch", "torchvision", "timm", "segmentation_models_pytorch", "monai", "diffusers")


def measured(name: str) -> dict[str, Any]:
    """What this process finds of a network."""
    import torch
    import windrow.torch
    from published_networks import NETWORKS
    from torch import nn
    from torch.utils._pytree import tree_map
    from windrow.torch.choice import measure, store
    from windrow.torch.choice.policy import PYTORCH, Seconds

    network = NETWORKS[name]
    torch.manual_seed(0)
    model = network.build().eval().requires_grad_(False)
    calibrated(model, network.given(network.sizes[0]))
    double = copy.deepcopy(model).double()
    wide = lambda given: tree_map(lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, given)

    def tensors(result: Any, depth: int = 6) -> list[Any]:
        if isinstance(result, torch.Tensor):
            return [result] if result.is_floating_point() else []
        inside = result if isinstance(result, dict) else getattr(result, "__dict__", {})
        parts = result if isinstance(result, list | tuple) else inside.values()
        return [t for part in parts if depth for t in tensors(part, depth - 1)]

    def errors(result: Any, want: Any) -> list[float]:
        pairs = zip(tensors(result), tensors(want), strict=True)
        return [float((g.double() - w).norm() / w.norm().clamp(min=1e-30)) for g, w in pairs]

    inputs = [network.given(size) for size in dict.fromkeys(network.sizes)]
    children: dict[str, Any] = {}

    def keep(at: str) -> Any:
        def hook(_: Any, args: Any, kwargs: Any, y: Any) -> None:
            if len(args) == 1 and not kwargs and at not in children:
                children[at] = copy.deepcopy(args), copy.deepcopy(y)

        return hook

    handles = [m.register_forward_hook(keep(n), with_kwargs=True) for n, m in model.named_children()]
    case: dict[str, Any] = {"network": name, "parameters": sum(p.numel() for p in model.parameters())}
    with torch.inference_mode():
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        wants = [called(double, wide(given)) for given in inputs]
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(1)
        eager = [errors(called(model, given), want) for given, want in zip(inputs, wants, strict=True)]
    for handle in handles:
        handle.remove()
    case["error"] = max(e for es in eager for e in es)

    def against(candidate: nn.Module) -> tuple[float, float]:
        """Times PyTorch's own error, the most of all calls; and the largest error of a child called alone."""
        worst = alone = 0.0
        with torch.inference_mode():
            for _ in range(2):
                torch.manual_seed(1)
                for given, want, theirs in zip(inputs, wants, eager, strict=True):
                    ours = errors(called(candidate, given), want)
                    worst = max([worst, *(o / max(t, LEAST) for o, t in zip(ours, theirs, strict=True))])
            for at, (args, y) in children.items():
                theirs = double.get_submodule(at)(*wide(args))
                pairs = zip(errors(candidate.get_submodule(at)(*copy.deepcopy(args)), theirs), errors(y, theirs), strict=True)
                alone = max([alone, *(o / max(t, LEAST) for o, t in pairs)])
        return worst, alone

    convolutions = [m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)]
    case["convolutions"] = len(convolutions)
    for how in ALLOWED:
        store.clear()
        if how == "forced":
            measure.times_of = lambda _, runs: {name: Seconds(1.0 if name == PYTORCH else 0.5) for name in runs}
        patched = copy.deepcopy(model)
        report = windrow.torch.patch(patched)
        found: dict[str, Any] = {}
        found["patched"], found["patched_children"] = against(patched)
        found["patched_by_windrow"] = by_windrow(patched, report)
        store.clear()
        start = time.perf_counter()
        optimized = windrow.torch.optimize(model)
        with torch.inference_mode():
            called(optimized, inputs[0])
        found["first_call_s"] = round(time.perf_counter() - start, 2)
        # It fills as graphs are compiled.
        found["fused"] = sum("FusedConv2d(" in what for what in optimized.windrow_report.fused.values())
        found["optimized"], found["optimized_children"] = against(optimized)
        decided = {d.problem for d in store.every() if d.choice.startswith("Windrow")}
        found["problems_by_windrow"] = len(decided)
        found["problems"] = len(store.every())
        left = optimized.windrow_report.left
        found["left"] = {n: why[:160] for n, why in left.items() if n.endswith("check") or n.startswith(WHOLE)}
        case[how] = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in found.items()}
    case["error"] = float(f"{case['error']:.2e}")
    return case


def called(model: Any, given: Any) -> Any:
    return model(**given) if isinstance(given, dict) else model(*given)


def calibrated(model: Any, given: Any) -> None:
    """Statistics of one batch, so that activations keep their size as in a trained network, and factors that show."""
    import torch
    from torch import nn

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
    from windrow.torch._modules import Convolution
    from windrow.torch.choice import store

    layers = {d.key.layer for d in store.every() if d.choice.startswith("Windrow")}
    modules = dict(model.named_modules())
    return sum(isinstance(modules[n], Convolution) and modules[n].layer() in layers for n in report.swapped)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--networks", help="some of them, by name or by library, with semicolons between")
    add("--one", help=argparse.SUPPRESS)
    add("--seconds", type=float, default=300.0, help="after which a network counts as hanging")
    add("--table", action="store_true", help="write the table alone")
    add("--part", default="0/1", help="this part of all networks, as I/N")
    add("--join", type=Path, nargs="*", default=[], help="records whose cases are taken over")
    add("out", type=Path, metavar="OUT.json")
    options = parser.parse_args()
    if options.one is not None:
        print("\n" + json.dumps(measured(options.one)))
        return 0
    from published_networks import NETWORKS

    record = json.loads(options.out.read_text()) if options.out.exists() else None
    if record is None:
        versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
        record = {"date": f"{datetime.date.today()}", **provenance.commit(), "cpu": provenance.cpu(), **versions, "cases": []}
        if extension := os.environ.get("WINDROW_EXTENSION_COMMIT"):
            # Where it was built of another commit than the rest.
            record["extension"] = extension
    cases = {case["network"]: case for case in record["cases"]}
    for other in options.join:
        cases |= {case["network"]: case for case in json.loads(other.read_text())["cases"]}
    record["cases"] = [cases[n] for n in NETWORKS if n in cases]
    part, parts = map(int, options.part.split("/"))
    named = options.networks.split(";") if options.networks else []
    for name in [] if options.table else [*NETWORKS][part::parts]:
        if name in named or name.partition("/")[0] in named or (not named and name not in cases):
            cases[name] = in_a_process(name, options)
            record["cases"] = [cases[n] for n in NETWORKS if n in cases]
            write(record, options.out)
            print(name, verdict(cases[name]), flush=True)
    write(record, options.out)
    return int(any(verdict(case) != "right" for case in record["cases"]))


def in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name, str(options.out)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds, env=os.environ, check=False)
    except subprocess.TimeoutExpired:
        return {"network": name, "crash": f"more than {options.seconds:.0f} s"}
    if run.returncode:
        said = run.stderr.strip().splitlines()
        return {"network": name, "crash": f"exit {run.returncode}: {said[-1] if said else ''}"}
    case: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return case


def verdict(case: dict[str, Any]) -> str:
    if "crash" in case:
        return case["crash"]
    sides = ("patched", "optimized", "patched_children", "optimized_children")
    worst = {f"{how} {of}": case[how][of] for how in ALLOWED for of in sides}
    wrong = [f"{name} {value}" for name, value in worst.items() if not value <= ALLOWED[name.partition(" ")[0]]]
    wrong += [f"{how}: {why}" for how in ALLOWED for n, why in case[how]["left"].items() if n.endswith("check")]
    return "; ".join(wrong) or "right"


def write(record: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    provenance.write(out, record)
    out.with_suffix(".md").write_text("\n".join(table(record)) + "\n")


def table(record: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {record[name]}" for name in LIBRARIES)
    versions += f", extension {record['extension']}" if "extension" in record else ""
    right = sum(verdict(case) == "right" for case in record["cases"])
    lines = [
        "# Published networks",
        "",
        f"{record['date']}, {record['cpu']}. {provenance.sentence(record)} {versions}.",
        "",
        f"{right} of {len(record['cases'])} networks are right: errors are at most {ALLOWED['fastest']:.0f} times PyTorch's own"
        f" (`x`), and {ALLOWED['forced']:.0f} times with Windrow's kernels wherever they compute a problem (`forced`).",
        f"{sum('crash' in case for case in record['cases'])} crashed, and the check of `optimize` called"
        f" {sum('because the compiled one differs' in verdict(case) for case in record['cases'])} wrong.",
        "`convolutions`: in the network, fused by `optimize`, computed by Windrow patched, and forced.",
        "",
        "| network | error | patched x | optimized x | forced, patched x | forced, optimized x | convolutions | |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for case in record["cases"]:
        said = verdict(case)
        if "crash" in case:
            lines.append(f"| {case['network']} | | | | | | | {said} |")
            continue
        fastest, forced = case["fastest"], case["forced"]
        values = [f"{side[of]:.2f}" for side in (fastest, forced) for of in ("patched", "optimized")]
        counts = [case["convolutions"], fastest["fused"], fastest["patched_by_windrow"], forced["patched_by_windrow"]]
        cells = [case["network"], f"{case['error']:.1e}", *values, " ".join(map(str, counts)), "" if said == "right" else said]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
