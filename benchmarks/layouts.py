"""Networks on the CPU in both layouts, all of which take turns: PyTorch's better one beside Windrow's.

    python benchmarks/layouts.py [--models a,b] [--dtypes f32,bf16] [--train] [--seconds S] OUT.json

Of the batch that `models.py` measures first: one image, or with --train a step with four. There layout by layout is
measured, here all in the same turns, since the speed of a shared machine changes from one minute to the next. OUT.json
keeps cases of other calls, as the records of `models.py` do; OUT.md is its table. Needs `windrow` on PYTHONPATH.
"""

import argparse
import datetime
import gc
import sys
from pathlib import Path
from typing import Any

import contestants
import models
import networks
import provenance
import torch
from contestants import MODES, Case
from networks import Network

DEVICE = torch.device("cpu")
HEAD = "| network | PyTorch | last | patched | last | x | optimized | last | x |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--models", help=f"of {','.join(networks.NETWORKS)}")
    add("--dtypes", default="f32,bf16", help="of f32,f16,bf16")
    add("--train", action="store_true", help="steps of training")
    add("--seconds", type=float, default=3.0, help="timing of a network, at least")
    add("out", type=Path, metavar="OUT.json")
    return parser.parse_args()


def measured(name: str, network: Network, dtype: str, kind: str, seconds: float) -> dict[str, dict[str, float]]:
    """Times by side and mode, of the network's first batch."""
    calls = {}
    for mode in (dtype, f"{dtype}_cl"):
        case = Case(network, name, MODES[mode], network.batches["cpu"][0], kind, DEVICE)
        for side in contestants.sides(kind):
            calls[f"{side} {mode}"] = case.start(side)
    for call in calls.values():
        for _ in range(models.WARM_UP):
            call()
    return models.in_turns(calls, seconds, DEVICE)


def row(name: str, ms: dict[str, dict[str, float]]) -> str:
    of = {
        side: [times["median"] for call, times in ms.items() if call.startswith(f"{side} ")]
        for side in contestants.sides("infer")
    }
    theirs = min(of[contestants.PYTORCH])
    cells = [name, *(f"{t:.4g}" for t in of[contestants.PYTORCH])]
    for side in (contestants.PATCHED, contestants.OPTIMIZED):
        cells += [*(f"{t:.4g}" for t in of[side]), f"{theirs / min(of[side]):.2f}"] if of[side] else ["-"] * 3
    return f"| {' | '.join(cells)} |"


def table(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in record["versions"].items() if v)
    commits = {provenance.sentence(case) for case in record["cases"].values()}
    lines = [f"# {record['device']}", "", f"{versions}.", *sorted(commits)]
    lines += [f"Not measured: {name} ({why})." for name, why in record["left"].items()]
    lines += [""]
    lines += ["ms of PyTorch, patched and optimized networks, each row-major and channels-last (`last`), in turns; `x`: the"]
    lines += ["better of PyTorch's beside the better of Windrow's.", "", HEAD, "|---|" + "--:|" * 8]
    lines += [row(name, case["ms"]) for name, case in record["cases"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    options = arguments()
    kind, known = ("train", networks.TRAINED) if options.train else ("infer", networks.NETWORKS)
    names = models.chosen(options.models, [n for n, of in known.items() if of.batches["cpu"]])
    record = models.load(options.out, models.header(DEVICE))
    measured_at = provenance.commit() | {"date": str(datetime.date.today())}
    for dtype in options.dtypes.split(","):
        for name in names:
            if why := networks.missing(known[name]):
                record["left"][name] = why
                continue
            case = {"ms": measured(name, known[name], dtype, kind, options.seconds)} | measured_at
            title = " ".join([name, dtype, *(["train"] if options.train else [])])
            record["cases"][title] = case
            record |= measured_at
            print(row(title, case["ms"]), file=sys.stderr, flush=True)
            provenance.write(options.out, record)
            options.out.with_suffix(".md").write_text(table(record))
            gc.collect()
    print(table(record), end="")


if __name__ == "__main__":
    main()
