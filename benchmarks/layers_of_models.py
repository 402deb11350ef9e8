"""Every distinct convolution of the networks of `models.py` through `windrow.torch.patch`, beside PyTorch.

    python benchmarks/layers_of_models.py --device cuda:0|cpu [--models a,b] [--modes m,n] [--batches 1,8,64] OUT.json
    python benchmarks/layers_of_models.py --device cuda:0|cpu --layers benchmarks/layers/cnn18.csv [--modes m,n] OUT.json

Each is a module of its own, for inference, with the sizes that it has in the network. PyTorch's and the patched one take
turns in one process, on CUDA in graphs; times are medians. What the networks have in common is measured once.

With --layers they are those of a file: 3x3, without bias and padding, a batch each.

Results are written on the way, and records are made in parts, as by `models.py`; OUT.md has by mode and batch the
geometric mean of PyTorch's time beside the patched module's, both rates, how many of them Windrow's operator computes
(the others PyTorch's, found to be the faster one or the only one with room), and the convolutions that gain least. Rates
count the operations of the direct algorithm. Needs `windrow` on PYTHONPATH.
"""

import argparse
import copy
import datetime
import gc
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h200_conv2d
import models
import networks
import provenance
import torch
import windrow.torch
from contestants import MODES, MODES_OF, Mode
from torch import Tensor, nn

KINDS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)
SAMPLE_SECONDS = 5e-3
# Between two times that the record is written.
WRITE_SECONDS = 10.0
SLOWEST = 10


@dataclass
class Layer:
    """A convolution, and the image that it is given."""

    module: nn.Module
    image: tuple[int, ...]
    models: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.image[1:]))
        return f"{type(self.module).__name__}({self.module.extra_repr()}) of {sizes}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--device", type=torch.device, default=torch.device("cpu"), help="cpu or cuda:N")
    add("--models", help=f"of {','.join(networks.NETWORKS)}")
    add("--modes", help="of " + "; ".join(f"{','.join(MODES_OF['infer', d])} on {d}" for d in ("cuda", "cpu")))
    add("--batches", default="1,8,64")
    add("--layers", type=Path, help="a file with a name, n, c, h, w and k in each line, in the place of networks")
    add("--accuracy", help="of patch")
    add("--seconds", type=float, default=0.03, help="timing of a case, at least")
    add("--budget", type=float, default=math.inf, help="start no case after so many seconds")
    add("out", type=Path, metavar="OUT.json")
    options = parser.parse_args()
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)
        options.device = torch.device("cuda", torch.cuda.current_device())
    return options


def layers(names: list[str], device: str) -> dict[str, Layer]:
    """By what they are called in the record."""
    found: dict[str, Layer] = {}
    for name in names:
        network = networks.NETWORKS[name]
        # Sizes are all that is asked for.
        with torch.device("meta"), torch.no_grad():
            model = network.build().eval()
            image = torch.empty(1, network.channels, network.size[device], network.size[device])

            def note(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                layer = Layer(module, tuple(args[0].shape))
                models_of = found.setdefault(str(layer), layer).models
                if name not in models_of:
                    models_of.append(name)

            for module in model.modules():
                if isinstance(module, KINDS):
                    module.register_forward_pre_hook(note)
            model(image)
    return found


def of_file(path: Path) -> dict[str, Layer]:
    return {
        name: Layer(nn.Conv2d(c, k, 3, bias=False, device="meta"), (n, c, h, w), [path.stem])
        for name, (n, c, h, w, k) in h200_conv2d.layers(path)
    }


def case(layer: Layer, mode: Mode, batch: int, device: torch.device) -> tuple[nn.Module, Tensor]:
    """The convolution with numbers in it, and an image."""
    torch.manual_seed(0)
    module = copy.deepcopy(layer.module)
    module._forward_pre_hooks.clear()
    module = module.to_empty(device=device).requires_grad_(False)
    module.reset_parameters()
    module = module.to(mode.dtype).eval()
    image = torch.randn(batch, *layer.image[1:], device=device).to(mode.dtype)
    if mode.channels_last and image.dim() == 4:
        image = image.contiguous(memory_format=torch.channels_last)
        module = module.to(memory_format=torch.channels_last)
    return module, image


def measured(layer: Layer, mode: Mode, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = mode.tf32
    plain, image = case(layer, mode, batch, options.device)
    report = windrow.torch.patch(nn.Sequential(copy.deepcopy(plain)), options.accuracy)
    before = len(decisions(report))
    calls: dict[str, Any] = {}
    with torch.inference_mode():
        for side, module in (("pytorch", plain), ("windrow", report.model[0])):
            calls[side] = lambda module=module: module(image)
            for _ in range(models.WARM_UP):
                calls[side]()
            if options.device.type == "cuda":
                calls[side] = models.captured(calls[side])
        times = models.in_turns(calls, options.seconds, options.device, SAMPLE_SECONDS)
        positions = plain(image)[0, 0].numel() if not isinstance(plain, nn.ConvTranspose2d) else image[0, 0].numel()
    decided = decisions(report)
    # None is new where one problem is that of two cases, as in both layouts of an image of one pixel.
    last = (decided[before:] or decided or [": not decided"])[-1]
    by = last.partition(": ")[2].partition(" (")[0]
    flop = 2 * batch * positions * plain.weight.numel()
    return {"ms": times, "models": layer.models, "decided": decided, "by": by, "flop": flop}


def decisions(report: windrow.torch.PatchReport) -> list[str]:
    return [line.strip() for line in str(report).split("\n") if line.startswith("    ")]


def gain(result: dict[str, Any]) -> float:
    return result["ms"]["pytorch"]["median"] / result["ms"]["windrow"]["median"]


def rate(result: dict[str, Any], side: str) -> float:
    """TFLOP/s."""
    return result["flop"] / result["ms"][side]["median"] / 1e9


def table(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in record["versions"].items() if v)
    commits = {provenance.sentence(result) for result in record["cases"].values()}
    lines = [f"# {record['device']}", "", f"{versions}.", *sorted(commits)]
    lines += [f"Not measured: {name} ({why})." for name, why in record["left"].items()]
    lines += [f"Failed: {n}: {r['failed']}" for n, r in record["cases"].items() if "failed" in r]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in record["cases"].values():
        if "ms" in result:
            groups.setdefault((result["mode"], result["of"]), []).append(result)
    lines += ["", "PyTorch's time beside the patched module's, and rates of both in TFLOP/s: geometric means.", ""]
    lines += ["| mode | of | convolutions | by Windrow | x | least | PyTorch | patched |"]
    lines += ["|---|---|--:|--:|--:|--:|--:|--:|"]
    for (mode, of), results in groups.items():
        mean = statistics.geometric_mean(map(gain, results))
        rates = [statistics.geometric_mean(rate(r, side) for r in results) for side in ("pytorch", "windrow")]
        least = min(map(gain, results))
        mine = sum(r.get("by", "").startswith("Windrow") for r in results)
        numbers = f"{len(results)} | {mine} | {mean:.2f} | {least:.2f} | {rates[0]:.3g} | {rates[1]:.3g}"
        lines.append(f"| {mode} | {of} | {numbers} |")
    for (mode, of), results in groups.items():
        lines += ["", f"## {mode}, {of}: those that gain least", "", "| convolution | by | x |", "|---|---|--:|"]
        lines += [f"| {r['layer']} | {r.get('by', '-')} | {gain(r):.2f} |" for r in sorted(results, key=gain)[:SLOWEST]]
    return "\n".join(lines) + "\n"


def main() -> int:
    options = arguments()
    start, broken = time.perf_counter(), 0
    record = models.load(options.out, models.header(options.device, []))
    modes = models.chosen(options.modes, MODES_OF["infer", options.device.type])
    if options.layers:
        found = of_file(options.layers)
        cases = [(m, layer.image[0], n, options.layers.stem) for m in modes for n, layer in found.items()]
    else:
        names = models.chosen(options.models, list(networks.NETWORKS))
        record["left"] = {n: why for n in names if (why := networks.missing(networks.NETWORKS[n]))}
        found = layers([n for n in names if n not in record["left"]], options.device.type)
        batches = options.batches.split(",")
        cases = [(m, int(b), n, f"batch {b}") for m in modes for b in batches for n in found]
    measured_at = provenance.commit() | {"date": str(datetime.date.today())}
    written = start

    def write() -> None:
        provenance.write(options.out, record)
        options.out.with_suffix(".md").write_text(table(record))

    for mode, batch, name, of in cases:
        if time.perf_counter() - start > options.budget:
            print(f"the budget is used up before {name}, {mode}, batch {batch}", file=sys.stderr)
            break
        try:
            result = measured(found[name], MODES[mode], batch, options)
            said = f"{gain(result):.2f}x"
        except (RuntimeError, ValueError, TypeError, MemoryError) as e:
            result = {"failed": f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"}
            said, broken = f"failed: {result['failed']}", broken + 1
        about = {"layer": name, "mode": mode, "batch": batch, "of": of}
        how = [options.accuracy] if options.accuracy else []
        record["cases"][", ".join([name, mode, *how, str(batch)])] = about | result | measured_at
        record |= measured_at
        print(f"{time.perf_counter() - start:5.0f} s: {name}, {mode}, batch {batch}: {said}", file=sys.stderr, flush=True)
        gc.collect()
        if time.perf_counter() - written > WRITE_SECONDS:
            write()
            written = time.perf_counter()
    write()
    print(table(record), end="")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
