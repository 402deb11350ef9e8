"""The price of `batch_invariant`: the 18 layers with 1, 8 and 64 images, with the option and without, and six networks.

    python benchmarks/batch_invariance.py [--device cpu|cuda:N] [--batches 1 8 64] [--dtypes float32] [--only layers]
        [--budget SECONDS] [--record DIRECTORY]

The networks are torchvision's: `windrow.torch.patch(model)` beside `patch(model, batch_invariant=True)`. On CUDA calls are
in CUDA graphs. Nothing is started after the budget.

On the CPU both plans of a layer have packed filters and write to memory that exists. Layers are channels-last if Windrow
is faster so without the option, else NCHW. Calls take turns; a time is the median. Where both plans are the same, nothing
is measured and the ratio is 1. With --record the figures are written as batch_invariance.json and .md.
"""

import argparse
import math
import statistics
import time
from pathlib import Path

import batch_invariance_torch as through
import numpy as np
import provenance
import torch
import windrow

LAYERS = Path(__file__).parent / "layers/cnn18.csv"
# Seconds of calls of each plan, and the fewest of them.
SECONDS, ROUNDS = 0.3, 5


class Layer:
    """A layer in one layout, with a plan that has the option and one that has not."""

    def __init__(self, shape, k, dtype, order):
        n, c, h, w = shape
        random = np.random.default_rng(0)
        lay = lambda a: np.ascontiguousarray(a.transpose(order)).transpose(np.argsort(order))
        self.x = lay(random.uniform(-1, 1, shape).astype(dtype))
        self.w = random.uniform(-1, 1, (k, c, 3, 3)).astype(dtype)
        self.y = lay(np.empty((n, k, h - 2, w - 2), dtype))
        plans = [windrow.Conv2dPlan(self.x, self.w, batch_invariant=option) for option in (False, True)]
        self.explained = [plan.explain() for plan in plans]
        self.calls = [(plan, plan.pack(self.w)) for plan in plans]

    def seconds(self, which):
        plan, packed = self.calls[which]
        start = time.perf_counter()
        plan(self.x, packed, out=self.y)
        return time.perf_counter() - start

    def medians(self, kinds):
        """The median time of each kind, which take turns."""
        first = sum(self.seconds(kind) for kind in kinds) / len(kinds)
        rounds = max(ROUNDS, int(SECONDS / max(first, 1e-6)))
        times = [[self.seconds(kind) for kind in kinds] for _ in range(rounds)]
        return [statistics.median(of) for of in zip(*times, strict=True)]


def measured(name, shape, k, dtype):
    layouts = {"NCHW": (0, 1, 2, 3), "channels-last": (0, 2, 3, 1)}
    layers = {layout: Layer(shape, k, dtype, order) for layout, order in layouts.items()}
    layout = min(layers, key=lambda layout: layers[layout].medians([0])[0])
    layer = layers[layout]
    is_same = layer.explained[0] == layer.explained[1]
    without, with_it = layer.medians([0, 0] if is_same else [0, 1])
    algorithms = [text.split()[2] for text in layer.explained]
    return {
        "layer": name,
        "shape": [*shape, k],
        "layout": layout,
        "dtype": dtype,
        "ms": without * 1e3,
        "ms_batch_invariant": (without if is_same else with_it) * 1e3,
        "ratio": 1.0 if is_same else with_it / without,
        "algorithms": algorithms,
    }


def table(rows):
    lines = ["| dtype | batch | mean | largest | layers with another plan |", "|---|--:|--:|--:|--:|"]
    for dtype, batch in dict.fromkeys((row["dtype"], row["shape"][0]) for row in rows):
        found = [row for row in rows if (row["dtype"], row["shape"][0]) == (dtype, batch)]
        ratios = [row["ratio"] for row in found]
        changed = sum(ratio != 1.0 for ratio in ratios)
        mean = statistics.geometric_mean(ratios)
        lines.append(f"| {dtype} | {batch} | {mean:.3f} | {max(ratios):.3f} | {changed} of {len(ratios)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--only", choices=["layers", "networks"])
    parser.add_argument("--budget", type=float, default=math.inf)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    stop = time.perf_counter() + options.budget
    device = torch.device(options.device)
    machine = provenance.cpu()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        machine = torch.cuda.get_device_name(device)
    rows, networks = [], []
    for dtype, name, shape, k in layers(options):
        if options.only != "networks" and time.perf_counter() < stop:
            on_cuda = device.type == "cuda"
            row = through.layer(name, shape, k, dtype, device) if on_cuda else measured(name, shape, k, dtype)
            rows.append(row)
            show(row)
    if options.only != "layers":
        for row in through.networks_of(options.dtypes, options.batches, device):
            networks.append(row)
            print({key: value for key, value in row.items() if key != "not_promised"}, flush=True)
            if time.perf_counter() >= stop:
                break
    tables = [table(rows)] * bool(rows) + [through.network_table(networks)] * bool(networks)
    print("\n\n".join(tables))
    threads = {"threads": torch.get_num_threads()} if device.type == "cpu" else {}
    head = {"machine": machine, **threads, "torch": torch.__version__}
    write(options, {**head, "rows": rows, "networks": networks}, tables)
    return 0


def layers(options):
    """Type, name, shape of the input and output channels of each layer."""
    lines = [line.split(",") for line in LAYERS.read_text().splitlines() if not line.startswith("#")]
    for dtype in options.dtypes:
        for n in options.batches:
            for name, _, *sizes in lines:
                c, h, w, k = map(int, sizes)
                yield dtype, name, (n, c, h, w), k


def show(row):
    what = [row[key] for key in ("dtype", "layer", "shape", "layout", "algorithms")]
    print(f"{row['ratio']:.3f} ", *what, flush=True)


def write(options, record, tables):
    if not options.record:
        return
    options.record.mkdir(parents=True, exist_ok=True)
    provenance.write(options.record / "batch_invariance.json", {**provenance.commit(), **record})
    about = f"Time with `batch_invariant` divided by the time without. {provenance.sentence()}"
    (options.record / "batch_invariance.md").write_text("\n\n".join([about, *tables]) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
