"""One benchmark program at two commits, in turns: which rows became slower.

    python benchmarks/in_turns.py BEFORE AFTER OUT.json [--rounds 3] [--names BEFORE AFTER] -- ARGUMENT ...

BEFORE and AFTER are the same program built from two commits: `windrow` (with `-- bench .. --json`), or the examples
`cuda_bench` and `conv2d_layers`. Each round runs both with the same arguments, first one and then the other. A row's ratio
is the time before over the time after, both medians over the rounds; above 1 it became faster. Rows that only one
of them has are counted, not compared. Writes OUT.json, with all rows, and prints the slowest and the mean of each group.
"""

import argparse
import csv
import datetime
import io
import json
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import provenance

# What names a row, and its time, in the output of each program.
NAMES = ("op", "case", "variant", "layer", "mode", "shape", "layout", "dtype", "threads")
TIMES = ("ms_median", "us", "ms")
# What a table of means has a line for.
GROUPS = ("op", "mode", "variant", "dtype")


def rows(output: str) -> list[dict[str, Any]]:
    if output.startswith("layer,"):
        return list(csv.DictReader(io.StringIO(output)))
    try:
        return json.loads(output)["rows"]
    except json.JSONDecodeError:
        lines = [json.loads(line) for line in output.splitlines()]
        return [line for line in lines if any(name in line for name in TIMES)]


def named(row: dict[str, Any], names: tuple[str, ...] = NAMES) -> str:
    # Programs before 29 November 2026 say `channel-last`.
    return " ".join(str(row[name]) for name in names if row.get(name) is not None).replace("channel-", "channels-")


def run(binary: Path, arguments: list[str]) -> dict[str, tuple[str, float]]:
    """The group and time of each row. Where a row comes more than once its best counts."""
    output = subprocess.run([binary, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, tuple[str, float]] = {}
    for row in rows(output):
        time = float(next(row[name] for name in TIMES if name in row))
        name = named(row)
        found[name] = min(found.get(name, (named(row, GROUPS), math.inf)), (named(row, GROUPS), time))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("binaries", type=Path, nargs=2, metavar="BINARY")
    add("out", type=Path, metavar="OUT.json")
    add("--rounds", type=int, default=3)
    add("--names", nargs=2, default=["before", "after"], help="of the two commits")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, arguments = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]

    groups: dict[str, str] = {}
    times: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for _ in range(options.rounds):
        for side, binary in enumerate(options.binaries):
            for name, (group, time) in run(binary, arguments).items():
                groups[name] = group
                times[name][side].append(time)

    both = {name: sides for name, sides in times.items() if all(sides)}
    medians = {name: [statistics.median(side) for side in sides] for name, sides in both.items()}
    ratios = {name: before / after for name, (before, after) in medians.items()}
    of_group: dict[str, list[float]] = defaultdict(list)
    for name, ratio in ratios.items():
        of_group[groups[name]].append(ratio)

    record = {
        **provenance.commit(),
        "before": options.names[0],
        "after": options.names[1],
        "machine": provenance.cpu(),
        "date": datetime.date.today().isoformat(),
        "arguments": arguments,
        "rounds": options.rounds,
        "only_one_has": sum(not all(sides) for sides in times.values()),
        "rows": [{"row": n, "before": b, "after": a, "ratio": ratios[n]} for n, (b, a) in medians.items()],
    }
    provenance.write(options.out, record)

    print(f"{len(ratios)} rows, {record['only_one_has']} of one commit only; time before / after")
    for group, found in sorted(of_group.items()):
        print(f"  {group:<60} {len(found):>4} rows  mean {statistics.geometric_mean(found):.3f}  least {min(found):.3f}")
    for name in sorted(ratios, key=ratios.__getitem__)[:12]:
        print(f"  {ratios[name]:.3f}  {name}")


if __name__ == "__main__":
    main()
