"""What `cpu.py` runs for each number of threads: all libraries in one process, in turns.

Prints JSON: suite -> case -> call -> seconds (median, min, max), and tells on stderr how far it is.
"""

import argparse
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import torch
from engines import candle_engine

# A sample repeats a short call for about this long.
SAMPLE_SECONDS = 4e-3
# All rounds of a case take about this long at most.
CASE_SECONDS = 3.0
# A call that takes this long, and this many times as long as the fastest, is not repeated.
HOPELESS_SECONDS, HOPELESS = 0.5, 10


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--threads", type=int, required=True)
    add("--suite", nargs="*", default=[])
    add("--rounds", type=int, required=True)
    add("--candle", type=Path)
    add("--without", nargs="*", default=[])
    return parser.parse_args()


def load_engines(without: list[str]) -> tuple[list, dict[str, str], dict[str, str]]:
    """Engines that can be imported, their versions, and why others cannot."""
    engines, versions, missing = [], {}, {}
    for name in ["windrow", "torch", "onnxruntime", "ncnn"]:
        if name in without:
            missing[name] = "left out"
            continue
        try:
            engine = importlib.import_module(f"engines.{name}_engine")
        except ImportError as e:
            missing[name] = str(e)
            continue
        engines.append(engine)
        versions |= engine.versions()
    return engines, versions, missing


def check(results: dict[str, Any]) -> None:
    """Stops if two results that should be equal are not, to the accuracy of half precision."""
    tensors = {}
    for name, result in results.items():
        if hasattr(result, "numpy"):
            # ONNX Runtime's values are no tensors.
            tensor = result if isinstance(result, torch.Tensor) else torch.tensor(result.numpy())
            tensors[name] = tensor.float()
    first, *others = tensors.items()
    for name, tensor in others:
        difference = (tensor.reshape(first[1].shape) - first[1]).abs().max()
        if not difference <= 0.03 * first[1].abs().max():
            raise SystemExit(f"{name} and {first[0]} computed different things")


def measure(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds a call: every round takes a sample of each, in an order that rotates.

    Rounds end early where they take long, but not before the second. A call that is hopeless takes
    part in the first only.
    """
    once = {}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        once[name] = time.perf_counter() - start
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    begin = time.perf_counter()
    for i in range(rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            if once[name] > HOPELESS_SECONDS and once[name] > HOPELESS * min(once.values()):
                samples[name] = [once[name]]
                continue
            call, n = calls[name], max(1, math.ceil(SAMPLE_SECONDS / once[name]))
            start = time.perf_counter()
            for _ in range(n):
                call()
            samples[name].append((time.perf_counter() - start) / n)
        if i > 0 and time.perf_counter() - begin > CASE_SECONDS:
            break
    return {
        name: {"median": statistics.median(s), "min": min(s), "max": max(s), "samples": len(s)}
        for name, s in samples.items()
    }


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    engines, versions, missing = load_engines(options.without)
    candle = candle_engine.Engine(options.candle) if options.candle else None
    if candle:
        versions["candle"] = "of its benchmark program"
    else:
        missing["candle"] = "no --candle"
    suites = cases.suites()
    results: dict[str, Any] = {}
    start = time.perf_counter()
    for suite in options.suite or suites:
        results[suite] = {}
        for case in suites[suite]:
            calls = {n: c for engine in engines for n, c in engine.calls(case).items()}
            # The first call makes plans and packs filters as well.
            computed = {name: call() for name, call in calls.items()}
            if suite != "overhead":
                check(computed)
            del computed
            times = measure(calls, options.rounds)
            if candle:
                times |= candle.times(case)
            results[suite][str(case)] = times
            elapsed = time.perf_counter() - start
            print(f"{elapsed:5.0f} s, {options.threads} threads: {case}", file=sys.stderr)
    print(json.dumps({"versions": versions, "not_measured": missing, "suites": results}))


if __name__ == "__main__":
    main()
