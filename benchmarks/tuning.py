"""What tuning gains: the model's choice, the search's, and the best of all configurations.

    cargo build --release -p windrow-cli
    python benchmarks/tuning.py run target/release/windrow OUT [--device cuda:0] [-- MORE OF windrow tune conv2d]
    python benchmarks/tuning.py report OUT

`run` runs `windrow tune conv2d --exhaustive` over the 18 layers and the 20 random ones, with a cache of its own, and writes OUT/tuning-SET.json, all that
was measured, and OUT/tuning-table.json, what the searches found, in the form of `windrow tune --export`. `report` makes OUT/tuning.md of every
OUT/tuning-*.json with rows: the model's, the tuned and the best configuration of each problem.
"""

import argparse
import json
import math
import os
import pathlib
import subprocess
import tempfile

import provenance

LAYERS = pathlib.Path(__file__).parent / "layers"


def windrow(binary, arguments, cache):
    """What the command prints."""
    environment = {**os.environ, "WINDROW_TUNE_CACHE": cache}
    run = subprocess.run([binary, "tune", *arguments], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return run.stdout


def mean(values):
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def table(rows):
    rows = [r for r in rows if r["model"]["ms"]]
    lines = [
        f"{len(rows)} problems. In geometric mean the model's choice takes {mean(ratio(r, 'model', 'best') for r in rows):.3f} times as"
        f" long as the best of all, the tuned one {mean(ratio(r, 'tuned', 'best') for r in rows):.3f} times; tuning gains"
        f" {mean(ratio(r, 'model', 'tuned') for r in rows):.3f}x. The worst model's choice takes"
        f" {max(ratio(r, 'model', 'best') for r in rows):.2f} times as long as the best.",
        "",
        "| problem | shape | model | ms | tuned | ms | best | ms | model / best | tuned / best |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = [r["case"], r["shape"]]
        for who in ("model", "tuned", "best"):
            cells += [f"`{r[who]['configuration']}`", f"{r[who]['ms']:.4g}"]
        cells += [f"{ratio(r, 'model', 'best'):.2f}", f"{ratio(r, 'tuned', 'best'):.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def ratio(row, slow, fast):
    return row[slow]["ms"] / row[fast]["ms"]


def run(args):
    args.out.mkdir(parents=True, exist_ok=True)
    sets = {"cnn18": [], "random20": ["--layers", str(LAYERS / "random20.csv")]}
    device = ["--device", args.device]
    with tempfile.TemporaryDirectory() as cache:
        for name, layers in sets.items():
            record = windrow(args.windrow, ["conv2d", "--exhaustive", "--json", *device, *layers, *args.more], cache)
            measured = provenance.commit() | json.loads(record)
            provenance.write(args.out / f"tuning-{name}.json", measured)
        windrow(args.windrow, ["--export", str(args.out / "tuning-table.json"), *device], cache)


def report(args):
    text = "# Tuning\n\nTimes are medians of interleaved runs; model, tuned and best of a problem are from the same run"
    text += " (`windrow tune --exhaustive`).\n"
    for path in sorted(args.out.glob("tuning-*.json")):
        record = json.loads(path.read_text())
        if isinstance(record, dict) and "rows" in record:
            device = " ".join(v for v in record["device"].values() if v)
            text += f"\n## {path.stem.removeprefix('tuning-')} on {device}\n\n"
            if "commit" in record:
                text += provenance.sentence(record) + "\n\n"
            text += table(record["rows"])
    (args.out / "tuning.md").write_text(text)
    print(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(required=True)
    runs = actions.add_parser("run")
    runs.add_argument("windrow")
    runs.add_argument("out", type=pathlib.Path)
    runs.add_argument("--device", default="cpu")
    runs.add_argument("more", nargs="*", help="further arguments of windrow tune, after --")
    runs.set_defaults(action=run)
    reports = actions.add_parser("report")
    reports.add_argument("out", type=pathlib.Path)
    reports.set_defaults(action=report)
    args = parser.parse_args()
    args.action(args)


if __name__ == "__main__":
    main()
