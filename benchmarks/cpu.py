"""Measures Windrow beside PyTorch, ONNX Runtime, ncnn and candle on the CPU.

    python benchmarks/cpu.py [--threads N ...] [--suite NAME ...] [--rounds N] [--candle PATH]
        [--without NAME ...] [--record]

Installs nothing: it needs `windrow` and torch, and takes onnxruntime (with onnx) and ncnn where they can
be imported, but for those that --without names: on 16 threads calls of all libraries took up to 30 times
as long with ONNX Runtime in the process. candle has no Python package: PATH is its benchmark,
`cargo build --release -p windrow-candle --example beside_candle`. Each number of threads has a process
of its own, in which all Python libraries take turns. Prints milliseconds a call (medians) and how many
times faster Windrow is than the fastest peer, for both of its forms: results written into `out=`, and
allocated by the call; convolutions in the better of its layouts, as for its peers. With --record the
figures go to benchmarks/record/DATE-MACHINE/, cpu.json and cpu.md.
"""

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import provenance

HERE = Path(__file__).parent
Times = dict[str, dict[str, float]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    add("--suite", nargs="+", default=[], help="default: all")
    add("--rounds", type=int, default=5, help="samples of each call, default 5")
    add("--candle", type=Path, help="the program beside_candle of windrow-candle")
    add("--without", nargs="+", default=[], metavar="NAME", help="libraries to leave out")
    add("--record", action="store_true", help="write the record")
    return parser.parse_args()


def run(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """What `interleave.py` measured with this many threads."""
    command = [sys.executable, str(HERE / "interleave.py"), "--rounds", str(options.rounds)]
    command += ["--threads", str(threads), "--suite", *options.suite]
    command += ["--without", *options.without]
    if options.candle:
        command += ["--candle", str(options.candle)]
    # The libraries read them when they are loaded.
    names = ["WINDROW_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS"]
    environment = os.environ | dict.fromkeys(names, str(threads))
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output)


def peers(times: Times) -> Times:
    return {name: t for name, t in times.items() if not name.startswith("windrow")}


def windrow(times: Times) -> dict[str, float]:
    """Seconds of each form of Windrow, in its better layout."""
    seconds: dict[str, float] = {}
    for name, t in times.items():
        if name.startswith("windrow"):
            form = name.removesuffix(" channels_last")
            seconds[form] = min(t["median"], seconds.get(form, math.inf))
    return seconds


def ratios(times: Times) -> dict[str, float]:
    """How many times faster each form of Windrow is than the fastest peer."""
    fastest = min(t["median"] for t in peers(times).values())
    return {form: fastest / seconds for form, seconds in windrow(times).items()}


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def number(value: float | None) -> str:
    """At most seven characters."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value < 1 else f"{value:.2f}" if value < 1000 else f"{value:.0f}"


ROW = "| {:<36} | {:>7} | {:>7} | {:>7} {:<12} | {:>5} | {:>5} |"


def table(cases: dict[str, Times]) -> list[str]:
    """A Markdown table of one suite."""
    lines = [
        ROW.format("case, ms", "out=", "new", "peer", "", "out=", "new"),
        "|---|--:|--:|---|--:|--:|",
    ]
    for case, times in cases.items():
        fastest = min(peers(times), key=lambda name: times[name]["median"])
        ours = windrow(times)
        milliseconds = [
            number(ours[form] * 1e3) if form in ours else "-" for form in ["windrow out=", "windrow"]
        ]
        milliseconds.append(number(times[fastest]["median"] * 1e3))
        factors = ratios(times)
        cells = [f"{factors[n]:.2f}" if n in factors else "-" for n in ["windrow out=", "windrow"]]
        name = fastest.replace("channels_last", "nhwc")
        lines.append(ROW.format(case, *milliseconds, name, *cells))
    return lines


def summary(cases: dict[str, Times]) -> list[str]:
    """Geometric means over a suite, beside the fastest peer and beside each library."""
    best = [max(ratios(times).values()) for times in cases.values()]
    worst = min(cases, key=lambda case: max(ratios(cases[case]).values()))
    lines = [
        f"Beside the fastest peer of each case: {mean(best):.2f}x in geometric mean, at least"
        f" {min(best):.2f}x ({worst})."
    ]
    for library in ["torch", "onnxruntime", "ncnn", "candle"]:
        factors = []
        for times in cases.values():
            theirs = [t["median"] for n, t in times.items() if n.split()[0] == library]
            ours = [t["median"] for n, t in times.items() if n.split()[0] == "windrow"]
            if theirs:
                factors.append(min(theirs) / min(ours))
        if factors:
            lines.append(
                f"Beside {library}: {mean(factors):.2f}x in geometric mean over {len(factors)} cases, at"
                f" least {min(factors):.2f}x."
            )
    return lines


def write_record(record: dict[str, Any], report: list[str]) -> Path:
    folder = HERE / "record" / f"{datetime.date.today()}-{provenance.machine()}"
    folder.mkdir(parents=True, exist_ok=True)
    provenance.write(folder / "cpu.json", record)
    versions = ", ".join(f"{n} {v}" for n, v in record["versions"].items())
    missing = "".join(f"Not measured: {n} ({why}).\n" for n, why in record["not_measured"].items())
    title = f"# CPU: {provenance.machine()}\n\n{versions}. {provenance.sentence()}\n{missing}\n"
    (folder / "cpu.md").write_text(title + "\n".join(report) + "\n")
    return folder


def main() -> None:
    options = arguments()
    record: dict[str, Any] = provenance.commit() | {"machine": provenance.machine()}
    record |= {"rounds": options.rounds, "threads": {}}
    report = []
    for threads in options.threads:
        measured = run(options, threads)
        record |= {key: measured[key] for key in ["versions", "not_measured"]}
        record["threads"][threads] = measured["suites"]
        for suite, cases in measured["suites"].items():
            title = f"## {suite}, {threads} thread{'s' * (threads > 1)}"
            lines = [title, "", *table(cases), "", *summary(cases), ""]
            print("\n".join(lines), flush=True)
            report += lines
    for name, why in record["not_measured"].items():
        print(f"not measured: {name} ({why})")
    if options.record:
        print(f"written to {write_record(record, report)}")


if __name__ == "__main__":
    main()
