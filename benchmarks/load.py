"""Networks on the CPU beside busy programs: what is left of the lead of `windrow.torch.patch(model)`.

    python benchmarks/load.py [--models a,b] [--programs 4] [--calls 30] OUT.json

PyTorch's network, the patched and the optimized one take turns, one call at a time, first alone and then beside so many
programs that do nothing but take processor time. Each network has two processes of its own: in `alone` it is decided
before the programs start who computes a layer, in `busy` while they run. OUT.json keeps cases of other calls, as the
records of `models.py` do; OUT.md is its table. GOMP_SPINCOUNT, which says how long OpenMP's threads wait in a loop, is
part of a case's name. Needs `windrow` on PYTHONPATH.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import contestants
import models
import networks
import provenance
import torch
from contestants import MODES, Case

DEVICE = torch.device("cpu")
NETWORKS = {name: networks._images(name) for name in ("resnet18", "mobilenet_v2", "densenet121")}
DECIDED = ("alone", "busy")
# Calls of one after the other before the next has its turn: the threads of the one before have stopped waiting by then.
IN_A_ROW = 2
OF_OURS = ["busy", "x", "busy", "slowest"]
OF_ALL = ["PyTorch", "busy", "slowest", "patched", *OF_OURS, "optimized", *OF_OURS]
HEAD = f"| {' | '.join(['network, decided', *OF_ALL])} |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--models", help=f"of {','.join(NETWORKS)}")
    add("--programs", type=int, default=4, help="busy ones")
    add("--calls", type=int, default=30, help="of each side, alone and beside the programs")
    add("--only", help=argparse.SUPPRESS)
    add("out", type=Path, nargs="?", metavar="OUT.json")
    options = parser.parse_args()
    if options.out is None and options.only is None:
        parser.error("OUT.json is missing")
    return options


@contextmanager
def beside(programs: int) -> Iterator[None]:
    """Busy programs as long as the block runs."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield
    finally:
        for program in started:
            program.kill()
        for program in started:
            program.wait()


def sampled(calls: dict[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Milliseconds of each call, in turns."""
    samples: dict[str, list[float]] = {side: [] for side in calls}
    names = [*calls]
    for i in range(count // IN_A_ROW):
        turn = i % len(names)
        for side in names[turn:] + names[:turn]:
            for _ in range(IN_A_ROW):
                start = time.perf_counter()
                calls[side]()
                samples[side].append((time.perf_counter() - start) * 1e3)
    return samples


def measured(name: str, decided: str, programs: int, calls: int) -> dict[str, Any]:
    """Times alone and beside the programs, in this process."""
    case = Case(NETWORKS[name], name, MODES["f32"], 1, "infer", DEVICE)
    sides = {side: case.start(side) for side in contestants.sides("infer")}

    def warm() -> None:
        for call in sides.values():
            for _ in range(models.WARM_UP):
                call()

    found = {}
    if decided == "alone":
        warm()
        found["alone"] = sampled(sides, calls)
    with beside(programs):
        warm()
        found["busy"] = sampled(sides, calls)
    if decided == "busy":
        found["alone"] = sampled(sides, calls)
    return {when: {side: summary(of) for side, of in times.items()} for when, times in found.items()}


def summary(samples: list[float]) -> dict[str, float]:
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "samples": len(samples)}


def row(title: str, ms: dict[str, dict[str, dict[str, float]]]) -> str:
    median = lambda side, when: ms[when][side]["median"]
    theirs = [median(contestants.PYTORCH, when) for when in DECIDED]
    slowest = lambda side: f"{ms['busy'][side]['max'] / median(side, 'busy'):.1f}"
    cells = [title, *(f"{t:.4g}" for t in theirs), slowest(contestants.PYTORCH)]
    for side in (contestants.PATCHED, contestants.OPTIMIZED):
        ours = [median(side, when) for when in DECIDED]
        cells += [*(f"{t:.4g}" for t in ours), *(f"{t / o:.2f}" for t, o in zip(theirs, ours, strict=True))]
        cells += [slowest(side)]
    return f"| {' | '.join(cells)} |"


def table(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in record["versions"].items() if v)
    commits = {provenance.sentence(case) for case in record["cases"].values()}
    lines = [f"# {record['device']}", "", f"{versions}.", *sorted(commits), ""]
    lines += ["Medians in ms of calls alone, and beside busy programs (`busy`). `x`: PyTorch's time beside Windrow's."]
    lines += ["`slowest`: the slowest call beside the programs, in medians. `decided`: when layers were decided.", ""]
    lines += [HEAD, "|---|" + "--:|" * len(OF_ALL)]
    lines += [row(title, case["ms"]) for title, case in record["cases"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    options = arguments()
    if options.only:
        print(json.dumps(measured(*options.only.split(), options.programs, options.calls)))
        return
    record = models.load(options.out, models.header(DEVICE))
    measured_at = provenance.commit() | {"date": str(datetime.date.today())}
    for name in models.chosen(options.models, [*NETWORKS]):
        if why := networks.missing(NETWORKS[name]):
            record["left"][name] = why
            continue
        for decided in DECIDED:
            how = [f"--programs={options.programs}", f"--calls={options.calls}", f"--only={name} {decided}"]
            output = subprocess.run([sys.executable, __file__, *how], check=True, stdout=subprocess.PIPE, text=True)
            spins = os.environ.get("GOMP_SPINCOUNT")
            title = f"{name} {decided}" + (f", GOMP_SPINCOUNT={spins}" if spins else "")
            ms = json.loads(output.stdout)
            record["cases"][title] = {"ms": ms, "programs": options.programs} | measured_at
            record |= measured_at
            print(row(title, ms), file=sys.stderr, flush=True)
            provenance.write(options.out, record)
            options.out.with_suffix(".md").write_text(table(record))
    print(table(record), end="")


if __name__ == "__main__":
    main()
