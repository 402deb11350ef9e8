"""Whole networks through `windrow.torch.patch(model)` and `optimize(model)` with their defaults, beside PyTorch.

    python benchmarks/models.py --device cuda:0|cpu [--models a,b] [--modes m,n] [--train] OUT.json

Networks of torchvision, and of diffusers where it is installed, with random weights. PyTorch, the patched and the optimized
network take turns in one process, with `--compile` also what torch.compile makes of PyTorch's, by Inductor and with
`backend="windrow"` (with `rest="eager"` too); times are medians. On CUDA inference is timed in a graph and without; `--train`
times a step with SGD instead. Memory is the peak of the weights, the input and one call; errors are relative, those of the
results that were timed, or of gradients, against the same network in f64. OUT.json says who computed the convolutions: Windrow, cuDNN or PyTorch.
`--accuracy half` is given to patch and optimize.

Results are written after each case. Cases that OUT.json has already are replaced if they are measured again and else kept,
so a record can be made in parts, on one machine; OUT.md is its table. Memory comes last, on CUDA with several processes
at a time. Needs `windrow` on PYTHONPATH.
"""

import argparse
import datetime
import gc
import importlib.metadata
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import contestants
import memory
import networks
import provenance
import torch
import windrow.torch
from contestants import MODES, MODES_OF, Case

# A sample repeats a short call for about this long.
SAMPLE_SECONDS = 5e-2
ROUNDS = range(2, 25)
# Calls in which it may still be decided who computes a layer.
WARM_UP = 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--device", type=torch.device, default=torch.device("cpu"), help="cpu or cuda:N")
    add("--models", help=f"of {','.join(networks.NETWORKS)}")
    add("--modes", help="of " + "; ".join(f"{k} on {d}: {','.join(m)}" for (k, d), m in MODES_OF.items()))
    add("--train", action="store_true", help="a step of training instead of inference")
    add("--compile", action="store_true", help="torch.compile and backend windrow, each network's first batch")
    add("--accuracy", help="of patch and optimize")
    add("--batches", help="instead of each network's own")
    add("--seconds", type=float, help="timing of a case; default 1 on CUDA, 8 on the CPU")
    add("--budget", type=float, default=math.inf, help="start nothing after so many seconds")
    add("out", type=Path, metavar="OUT.json")
    options = parser.parse_args()
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)
        options.device = torch.device("cuda", torch.cuda.current_device())
    options.seconds = options.seconds or {"cuda": 1.0, "cpu": 8.0}[options.device.type]
    return options


def chosen(text: str | None, known: list[str]) -> list[str]:
    names = text.split(",") if text else known
    if unknown := [n for n in names if n not in known]:
        raise SystemExit(f"{', '.join(unknown)}: expected of {', '.join(known)}")
    return names


def cases(options: argparse.Namespace, left: dict[str, str]) -> Iterator[tuple[str, Case]]:
    """All cases with their names, large batches of all models first; fills in what is left out."""
    kind = "train" if options.train else "infer"
    available = networks.TRAINED if options.train else networks.NETWORKS
    names = chosen(options.models, list(available))
    modes = chosen(options.modes, MODES_OF[kind, options.device.type])
    given = [int(b) for b in options.batches.split(",")] if options.batches else None
    for name in list(names):
        if why := networks.missing(available[name]):
            left[name] = why
            names.remove(name)
    batches = {n: given or available[n].batches[options.device.type] for n in names}
    for turn in range(max(map(len, batches.values()), default=0)):
        for mode in modes:
            for name in names:
                if turn < len(batches[name]):
                    batch = batches[name][turn]
                    how = [options.accuracy] if options.accuracy else []
                    title = " ".join([name, mode, *how, str(batch)])
                    yield title, Case(
                        available[name],
                        name,
                        MODES[mode],
                        batch,
                        kind,
                        options.device,
                        turn == 0,
                        options.accuracy,
                    )


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph, run before as often as capturing needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    # The result keeps its memory as long as the graph is called.
    return lambda: (graph.replay(), result)


def in_turns(
    calls: dict[str, Callable], seconds: float, device: torch.device, of_a_sample: float = SAMPLE_SECONDS
) -> dict[str, dict]:
    """Milliseconds a call of each, sampled in turns for about so long."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def sample(call: Callable, runs: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(runs):
            call()
        wait()
        return (time.perf_counter() - start) / runs

    for call in calls.values():
        call()
    once = {name: sample(call, 1) for name, call in calls.items()}
    runs = {n: max(1, math.ceil(of_a_sample / s)) for n, s in once.items()}
    samples = {name: [s * 1e3] for name, s in once.items()}
    names, begin = list(calls), time.perf_counter()
    for i in range(ROUNDS.stop):
        # Where one call takes all of the time it is not repeated.
        spent = time.perf_counter() - begin
        if max(once.values()) > seconds or (i >= ROUNDS.start and spent > seconds):
            break
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name].append(sample(calls[name], runs[name]) * 1e3)
    return {
        name: {"median": statistics.median(s), "min": min(s), "max": max(s), "samples": len(s)}
        for name, s in samples.items()
    }


Results = dict[str, torch.Tensor]


def timed(case: Case, seconds: float, others: list[str]) -> tuple[dict[str, dict], Results]:
    """Times by kind of call, and of inference the results of the calls that were timed."""
    calls = {side: case.start(side) for side in contestants.sides(case.kind, others)}
    if case.kind == "train":
        return {"train": in_turns(calls, seconds, case.device)}, {}
    result = lambda y: contestants.whole(contestants.tensors(y)).cpu()
    if case.device.type == "cpu":
        times = {"eager": in_turns(calls, seconds, case.device)}
        return times, {side: result(call()) for side, call in calls.items()}
    graphs = {side: captured(call) for side, call in calls.items()}
    times = {
        "graph": in_turns(graphs, seconds / 2, case.device),
        "eager": in_turns(calls, seconds / 2, case.device),
    }
    return times, {side: result(graph()[1]) for side, graph in graphs.items()}


def computed_by(device: torch.device, before: set[str]) -> dict[str, dict[str, int]]:
    """Who computes convolutions, as decided for problems that are not among those of `before`: the number of problems by
    what was asked and by who was chosen, on CUDA for captured calls."""
    found: dict[str, dict[str, int]] = {}
    for decision in windrow.torch.decisions():
        if decision.problem in before:
            continue
        who = found.setdefault(decision.what, {})
        choice = decision.in_graph if device.type == "cuda" else decision.choice
        who[choice] = who.get(choice, 0) + 1
    return found


def measured(name: str, case: Case, options: argparse.Namespace, exact: dict) -> dict[str, Any]:
    """Times, who computed convolutions, and of a network's first batch errors."""
    others = contestants.COMPILERS if options.compile and case.first else []
    before = {decision.problem for decision in windrow.torch.decisions()}
    times, results = timed(case, options.seconds, others)
    found = {"ms": times, "computed_by": computed_by(case.device, before)}
    if not case.first:
        return found
    return found | {"error": case.gradient_errors(exact) if case.kind == "train" else case.result_errors(results, exact)}


def peaks(measured: dict[str, Case], others: Iterable[str], deadline: float) -> dict[str, dict[str, int]]:
    """Peak memory of the sides of each network's first batch, each in a process of its own; none begins after the deadline."""
    others = [*others]
    jobs = [(t, c, side) for t, c in measured.items() if c.first for side in contestants.sides(c.kind, others)]
    on_cuda = any(case.device.type == "cuda" for case in measured.values())
    found: dict[str, dict[str, int]] = {}

    def peak(title: str, case: Case, side: str) -> int | None:
        if time.perf_counter() > deadline:
            return None
        try:
            return memory.peak(case.device, title, side, case.kind)
        except subprocess.CalledProcessError:
            return None

    def look(jobs: list[tuple[str, Case, str]], processes: int) -> list[tuple[str, Case, str]]:
        """The jobs without a result."""
        with ThreadPoolExecutor(processes) as pool:
            for (title, _, side), size in zip(jobs, pool.map(lambda job: peak(*job), jobs), strict=True):
                if size is not None:
                    found.setdefault(title, {})[side] = size
        return [job for job in jobs if job[2] not in found.get(job[0], {})]

    # Trials of cuDNN's algorithms may take a device's whole memory. Then each process runs alone.
    look(look(jobs, max(1, (os.cpu_count() or 1) // 4) if on_cuda else 1), 1)
    return found


def header(device: torch.device, more: Iterable[str] = ()) -> dict[str, Any]:
    """With the versions of PyTorch, Windrow, what networks are from, and `more` packages."""
    versions = {"torch": torch.__version__}
    for package in ["torchvision", "diffusers", "windrow", *more]:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    if device.type == "cuda":
        versions["cudnn"] = torch.backends.cudnn.version()
        return {"device": torch.cuda.get_device_name(device), "versions": versions}
    return {"device": provenance.machine(), "threads": torch.get_num_threads(), "versions": versions}


def load(path: Path, head: dict[str, Any]) -> dict[str, Any]:
    """The record so far; cases of other devices or versions do not belong into it."""
    if not path.exists():
        return head | {"left": {}, "cases": {}}
    record = json.loads(path.read_text())
    for key, value in head.items():
        if record.get(key) != value:
            raise SystemExit(f"{path} is a record of {key} {record.get(key)}, here it is {value}")
    return record


def key_of(name: str, case: Case) -> str:
    return f"{name} train" if case.kind == "train" else name


TITLES = {
    "graph": "Inference, in CUDA graphs",
    "eager": "Inference",
    "train": "A step of training",
}
HEAD = (
    "network, mode, batch",
    *("PyTorch", "patched", "x", "optimized", "x", "compiled", "backend", "its eager", "memory", "error", "err. x"),
)


def table(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in record["versions"].items() if v)
    commits = {provenance.sentence(case) for case in record["cases"].values()}
    lines = [f"# {record['device']}", "", f"{versions}.", *sorted(commits)]
    lines += [f"Not measured: {name} ({why})." for name, why in record["left"].items()]
    failed = {name: case["failed"] for name, case in record["cases"].items() if "failed" in case}
    lines += [f"Failed: {name}: {why}" for name, why in failed.items()]
    lines += ["", "Times in ms; `x`: PyTorch's time beside it, as of `compiled` by torch.compile."]
    lines += ["`backend`: by torch.compile with `backend=\"windrow\"`; `its eager`: with `rest=\"eager\"`, too."]
    lines += ["`error`: PyTorch's and that of the patched network; `memory`, `err. x`: of the patched and the optimized"]
    lines += ["network, and of the backend and torch.compile if these were measured, beside PyTorch's."]
    for kind, title in TITLES.items():
        rows = {n: c for n, c in record["cases"].items() if kind in c.get("ms", {})}
        if rows:
            lines += ["", f"## {title}", "", *aligned([row(n, c, kind) for n, c in rows.items()])]
    return "\n".join(lines) + "\n"


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of the table, without columns of what was not measured in any row."""
    columns = [(head, *of) for head, of in zip(HEAD, zip(*rows, strict=True), strict=True) if {*of} != {"-"}]
    widths = [max(map(len, column)) for column in columns]
    pad = lambda i, cell: cell.ljust(widths[i]) if i == 0 else cell.rjust(widths[i])
    first, *lines = ([pad(i, cell) for i, cell in enumerate(line)] for line in zip(*columns, strict=True))
    rule = "|---|" + "--:|" * (len(columns) - 1)
    return [f"| {' | '.join(first)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)]


def row(name: str, case: dict[str, Any], kind: str) -> tuple[str, ...]:
    ms = {side: times["median"] for side, times in case["ms"][kind].items()}
    digits = lambda side: f"{ms[side]:.{3 if ms[side] < 100 else 1}f}" if side in ms else "-"
    times_as_fast = lambda side: f"{ms['pytorch'] / ms[side]:.2f}" if side in ms else "-"

    def beside(values: dict[str, float] | None) -> str:
        if not values or not values.get("pytorch"):
            return "-"
        others = [side for side in ("windrow", "optimized", "backend", "compiled") if side in values]
        return ", ".join(f"{values[side] / values['pytorch']:.2f}" for side in others)

    error = case.get("error")
    return (
        name,
        digits("pytorch"),
        digits("windrow"),
        times_as_fast("windrow"),
        digits("optimized"),
        times_as_fast("optimized"),
        times_as_fast("compiled"),
        times_as_fast("backend"),
        times_as_fast("backend, eager"),
        beside(case.get("peak_bytes")),
        f"{error['pytorch']:.1e} {error['windrow']:.1e}" if error else "-",
        beside(error),
    )


def main() -> int:
    options = arguments()
    start, broken = time.perf_counter(), 0
    record = load(options.out, header(options.device))
    record["left"] = {}
    exact: dict[tuple, torch.Tensor] = {}
    measured_at = provenance.commit() | {"date": str(datetime.date.today())}
    done: dict[str, Case] = {}

    def write() -> None:
        provenance.write(options.out, record)
        options.out.with_suffix(".md").write_text(table(record))

    for name, case in cases(options, record["left"]):
        elapsed = time.perf_counter() - start
        if elapsed > options.budget:
            print(f"{elapsed:5.0f} s: the budget is used up before {name}", file=sys.stderr)
            break
        try:
            result = measured(name, case, options, exact)
            first = next(iter(result["ms"].values()))
            said = f"{first['pytorch']['median'] / first['windrow']['median']:.2f}x"
            done[name] = case
        except (RuntimeError, ValueError, TypeError, MemoryError, OSError) as e:
            result = {"failed": f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"}
            said, broken = f"failed: {result['failed']}", broken + 1
        record["cases"][key_of(name, case)] = result | measured_at
        # Of the newest part; each case names its own.
        record |= measured_at
        print(f"{time.perf_counter() - start:5.0f} s: {name} {said}", file=sys.stderr, flush=True)
        write()
        gc.collect()
    torch.cuda.empty_cache()
    others = contestants.COMPILERS if options.compile else []
    for name, sizes in peaks(done, others, start + options.budget).items():
        record["cases"][key_of(name, done[name])]["peak_bytes"] = sizes
    write()
    print(table(record), end="")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
