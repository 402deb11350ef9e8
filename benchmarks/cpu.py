"""Measures Windrow beside PyTorch, ONNX Runtime and ncnn on the CPU, interleaved in one run.

    python benchmarks/cpu.py [--threads N] [--suite NAME ...] [--rounds N] [--record]

Installs nothing: it needs `windrow` and torch, and takes onnxruntime (with onnx) and ncnn where they
can be imported. Prints for each case what each call reaches and the ratio of Windrow's best form to the
fastest peer. With --record the figures go to benchmarks/record/DATE-MACHINE/cpu.json, suites of a
later run beside those of earlier ones.
"""

import argparse
import datetime
import importlib
import json
import math
import os
import platform
import re
import statistics
import sys
import time
from pathlib import Path

RECORDS = Path(__file__).parent / "record"
# A sample repeats a short call for about this long.
SAMPLE_SECONDS = 4e-3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--suite", action="append", help="default: all; may be repeated")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each call, default 9")
    parser.add_argument("--record", action="store_true", help="write the record")
    return parser.parse_args()


def load_engines() -> tuple[list, dict[str, str], dict[str, str]]:
    """Engines that can be imported, their versions, and why others cannot."""
    engines, versions, missing = [], {}, {}
    for name in ["windrow", "torch", "onnxruntime", "ncnn"]:
        try:
            engine = importlib.import_module(f"engines.{name}_engine")
        except ImportError as e:
            missing[name] = str(e)
            continue
        engines.append(engine)
        versions |= engine.versions()
    missing["candle"] = "has no Python package"
    return engines, versions, missing


def check(results: dict) -> None:
    """Stops if two tensors that should be equal are not, to the accuracy of half precision."""
    import torch

    tensors = {n: r.float() for n, r in results.items() if isinstance(r, torch.Tensor)}
    if tensors:
        first, *others = tensors.items()
        for name, tensor in others:
            scale = first[1].abs().max()
            if not ((tensor - first[1]).abs().max() <= 0.03 * scale):
                raise SystemExit(f"{name} and {first[0]} computed different things")


def measure(calls: dict, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds a call: every round takes a sample of each, in an order that rotates."""
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, math.ceil(SAMPLE_SECONDS / (time.perf_counter() - start)))
    samples = {name: [] for name in calls}
    names = list(calls)
    for i in range(rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            call, n = calls[name], repeats[name]
            start = time.perf_counter()
            for _ in range(n):
                call()
            samples[name].append((time.perf_counter() - start) / n)
    return {
        name: {"median": statistics.median(s), "min": min(s), "max": max(s)}
        for name, s in samples.items()
    }


def ratio(times: dict[str, dict[str, float]]) -> tuple[float, str]:
    """How many times faster Windrow's best form is than the fastest peer, and which that is."""
    ours = min(t["median"] for name, t in times.items() if name.startswith("windrow"))
    peers = {n: t["median"] for n, t in times.items() if not n.startswith("windrow")}
    fastest = min(peers, key=peers.get)
    return peers[fastest] / ours, fastest


def report(case, times: dict[str, dict[str, float]]) -> None:
    work, unit = case.work
    reached = ", ".join(f"{name} {work / t['median']:.3g}" for name, t in times.items())
    factor, fastest = ratio(times)
    print(f"{case!s:42} {factor:5.2f}x {fastest:20} {unit}: {reached}", flush=True)


def machine() -> str:
    """The folder of this machine, as `cargo xtask record` names it."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text())
        name = found[1] if found else name
    words = re.findall("[a-z0-9]+", name.lower())
    return f"{'-'.join(words)}-{os.cpu_count()}-threads"


def write_record(threads: int, suites: dict, versions: dict, missing: dict) -> Path:
    folder = RECORDS / f"{datetime.date.today()}-{machine()}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cpu.json"
    record = json.loads(path.read_text()) if path.exists() else {"suites": {}}
    record |= {"machine": machine(), "versions": versions, "not_measured": missing}
    for name, results in suites.items():
        record["suites"].setdefault(name, {})[f"{threads} threads"] = results
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def main() -> None:
    options = arguments()
    # Before the libraries are loaded, which read it then.
    os.environ["WINDROW_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(options.threads)
    sys.path.insert(0, str(Path(__file__).parent))
    import cases
    import torch

    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    engines, versions, missing = load_engines()
    for name, why in missing.items():
        print(f"not measured: {name} ({why})")
    results = {}
    suites = cases.suites()
    for suite in options.suite or suites:
        print(f"{suite}, {options.threads} threads")
        factors, results[suite] = [], {}
        for case in suites[suite]:
            calls = {n: c for engine in engines for n, c in engine.calls(case).items()}
            if suite != "overhead":
                check({name: call() for name, call in calls.items()})
            times = measure(calls, options.rounds)
            report(case, times)
            factors.append(ratio(times)[0])
            results[suite][str(case)] = times
        print(f"{'geometric mean':42} {statistics.geometric_mean(factors):5.2f}x")
    if options.record:
        print(f"written to {write_record(options.threads, results, versions, missing)}")


if __name__ == "__main__":
    main()
