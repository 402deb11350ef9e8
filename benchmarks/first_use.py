"""What a user of `windrow.torch` waits for beside kernels: calls, the first forward of a process, images of many sizes.

    python benchmarks/first_use.py --device cuda:0|cpu [--models a,b] [--sizes N] OUT.json

calls: what a small convolution of 1x64x8x8 keeps the interpreter, as PyTorch's module, patched, and as a module of
Windrow's own that is frozen; medians, in turns, nothing else in the queue of the device.
first: the first forward of a new process, f32, batch 1, from the model's `patch` or `optimize` to its result, with the
model on the device and a product of matrices behind it; kernels were compiled by a process before, and lie on the disk.
sizes: N image sizes one after the other through one model, and all of them again, three times; PyTorch's and the patched one.

Processes are what takes time: on a machine that needs ten seconds to start PyTorch, those of two models take three
minutes. --parts leaves parts out. Each result is told when it is there, and written to OUT.json at once; OUT.md is
written at the end. Needs `windrow` on PYTHONPATH, and torchvision.
"""

import argparse
import copy
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import networks
import provenance
import torch
import windrow.torch
from torch import Tensor, nn

PARTS = ["calls", "sizes", "first"]
SIDES = ["pytorch", "patched", "optimized"]
SIDE_LENGTHS = (64, 256)
CALLS, ROUNDS = 20, 31


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--device", type=torch.device, default=torch.device("cpu"), help="cpu or cuda:N")
    add("--models", default="resnet18,resnet50")
    add("--sizes", type=int, default=200)
    add("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    add("--processes", type=int, default=3, help="of each side, for the first forward")
    # In a process of its own: whose first forward is measured.
    add("--side", choices=SIDES, help=argparse.SUPPRESS)
    add("out", type=Path, metavar="OUT.json")
    return parser.parse_args()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def calls(device: torch.device) -> dict[str, float]:
    """Microseconds of the interpreter."""
    plain = nn.Conv2d(64, 64, 1).to(device).eval().requires_grad_(False)
    patched = windrow.torch.patch(nn.Sequential(copy.deepcopy(plain))).model[0]
    own = windrow.torch.Conv2d(64, 64, 1).to(device).eval().requires_grad_(False)
    own.load_state_dict(plain.state_dict())
    windrow.torch.freeze(own)
    image = torch.randn(1, 64, 8, 8, device=device)
    samples: dict[str, list[float]] = {"pytorch": [], "patched": [], "own, frozen": []}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for (_, of), module in zip(samples.items(), (plain, patched, own), strict=True):
                module(image)
                synchronize(device)
                start = time.perf_counter()
                for _ in range(CALLS):
                    module(image)
                of.append((time.perf_counter() - start) / CALLS)
                synchronize(device)
    return {side: 1e6 * statistics.median(of) for side, of in samples.items()}


def first(name: str, side: str, device: torch.device) -> float:
    """Seconds of this process's first forward."""
    network = networks.NETWORKS[name]
    torch.manual_seed(0)
    model = network.build().eval().requires_grad_(False).to(device)
    image = networks.example(network, 1, network.size[device.type]).to(device)
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    synchronize(device)
    start = time.perf_counter()
    if side == "patched":
        windrow.torch.patch(model)
    if side == "optimized":
        model = windrow.torch.optimize(model)
    with torch.inference_mode():
        model(image)
    synchronize(device)
    return time.perf_counter() - start


def in_processes(name: str, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Medians of the processes so far."""
    command = [sys.executable, __file__, "--device", str(options.device), "--models", name, str(options.out)]
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(1 + options.processes):
        for side, of in seconds.items():
            run = subprocess.run([*command, "--side", side], check=True, capture_output=True, text=True)
            # The first of each compiles kernels.
            if turn > 0:
                of.append(float(run.stdout.split()[-1]))
        if turn > 0:
            yield {side: statistics.median(of) for side, of in seconds.items()}


def sizes(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """With the first walk, and with all."""
    device, network = options.device, networks.NETWORKS[name]
    draw = random.Random(1)
    chosen = [(draw.randint(*SIDE_LENGTHS), draw.randint(*SIDE_LENGTHS)) for _ in range(options.sizes)]
    plain = copy.deepcopy(networks.built(network)).to(device)
    patched = windrow.torch.patch(copy.deepcopy(plain)).model

    def walk(model: Callable[[Tensor], Tensor]) -> float:
        synchronize(device)
        start = time.perf_counter()
        with torch.inference_mode():
            for height, width in chosen:
                model(torch.zeros(1, network.channels, height, width, device=device))
        synchronize(device)
        return time.perf_counter() - start

    found: dict[str, Any] = {}
    for side, model in (("pytorch", plain), ("patched", patched)):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        found[side] = {"first": walk(model)}
        if device.type == "cuda":
            found[side]["peak"] = torch.cuda.max_memory_allocated(device)
    yield found
    again: dict[str, list[float]] = {"pytorch": [], "patched": []}
    for _ in range(3):
        for side, model in (("pytorch", plain), ("patched", patched)):
            again[side].append(walk(model))
    for side, of in again.items():
        found[side]["again"] = statistics.median(of)
    yield found


def table(record: dict[str, Any]) -> str:
    lines = [f"# {record['device']}", "", provenance.sentence(record)]
    if record["calls"]:
        lines += ["", "## Calls, us of the interpreter", ""]
        lines += [f"| {' | '.join(record['calls'])} |", "|" + "--:|" * len(record["calls"])]
        lines += ["| " + " | ".join(f"{us:.1f}" for us in record["calls"].values()) + " |"]
    if record["first"]:
        lines += ["", "## First forward of a process, ms", ""]
        lines += ["| network | pytorch | patched | optimized |", "|---|--:|--:|--:|"]
    for name, of in record["first"].items():
        more = [f"{1e3 * of[side]:.0f} ({of[side] / of['pytorch']:.2f}x)" for side in SIDES[1:]]
        lines.append(f"| {name} | {1e3 * of['pytorch']:.0f} | {' | '.join(more)} |")
    for name, of in record["sizes"].items():
        lines += ["", f"## {record['of']} image sizes through {name}, s", "", "| | first | again |", "|---|--:|--:|"]
        lines += [f"| {side} | {times['first']:.2f} | {times['again']:.2f} |" for side, times in of.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    options = arguments()
    names = models.chosen(options.models, list(networks.NETWORKS))
    if options.side:
        print(first(names[0], options.side, options.device))
        return 0
    parts = models.chosen(options.parts, PARTS)
    record = models.header(options.device, []) | provenance.commit() | {"of": options.sizes}
    record |= {part: {} for part in PARTS}

    def keep(part: str, name: str, found: Any) -> None:
        record[part][name] = found
        print(part, name, found, file=sys.stderr, flush=True)
        provenance.write(options.out, record)

    for side, us in calls(options.device).items() if "calls" in parts else ():
        keep("calls", side, us)
    for part, measure in (("sizes", sizes), ("first", in_processes)):
        for name in names[: None if part == "first" else 1] if part in parts else ():
            for found in measure(name, options):
                keep(part, name, found)
    options.out.with_suffix(".md").write_text(table(record))
    print(table(record), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
