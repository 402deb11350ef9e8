"""Published networks through `windrow.torch.patch`, `optimize` and `torch.compile(model, backend="windrow")`, against the
same networks in f64.

    python benchmarks/published.py [--networks 'a;b'] [--ways patched optimized compiled] [--seconds N] OUT.json

Random weights, small images, one forward in a process of its own for each network, so that a crash is seen. Errors are those of
a result relative to its norm, in the worst of a network's results; `x` is how many times PyTorch's own error that is. Each
network is also called with a second size, and for `patch` and `optimize` each of its children alone with what the network gave
it. A second pass takes Windrow's kernels wherever they compute a problem, whatever is fastest. `convolutions` counts the modules
of the network, those that `optimize` fused, and those that Windrow computed.

Of `torch.compile`, which runs what is no convolution by PyTorch's operators (`rest="eager"`), the record has the numbers of graphs
and graph breaks beside those of the backend `eager`; the share of the convolutions' operations that each pass took; and the
share that Windrow computed: what the profiler sees PyTorch's own convolutions compute is not Windrow's.

OUT.md is the table. Networks that OUT.json has already are left out, unless they are named. `--part 1/2` is every second of
them, and `--join` puts parts together; a case names what its part had of another version. Needs `windrow` on PYTHONPATH, and
torchvision, timm, segmentation_models_pytorch, monai and diffusers.
"""

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import provenance

# Times PyTorch's own error, by what computes: what is fastest, and Windrow wherever it can.
ALLOWED = {"fastest": 2.0, "forced": 4.0}
# What the report calls the whole of a model.
WHOLE = "the model"
WAYS = ("patched", "optimized", "compiled")
LIBRARIES = ("torch", "torchvision", "timm", "segmentation_models_pytorch", "monai", "diffusers")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--networks", help="some of them, by name or by library, with semicolons between")
    add("--ways", nargs="+", default=WAYS, choices=WAYS)
    add("--seconds", type=float, default=300.0, help="after which a network counts as hanging")
    add("--table", action="store_true", help="write the table alone")
    add("--part", default="0/1", help="this part of all networks, as I/N")
    add("--join", type=Path, nargs="*", default=[], help="records whose cases are taken over")
    add("out", type=Path, metavar="OUT.json")
    options = parser.parse_args()
    from published_networks import NETWORKS

    record = json.loads(options.out.read_text()) if options.out.exists() else None
    if record is None:
        versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
        record = {"date": f"{datetime.date.today()}", **provenance.commit(), "cpu": provenance.cpu(), **versions, "cases": []}
        if extension := os.environ.get("WINDROW_EXTENSION_COMMIT"):
            # Where it was built of another commit than the rest.
            record["extension"] = extension
    cases = {case["network"]: case for case in record["cases"]}
    for other in options.join:
        part = json.loads(other.read_text())
        differs = {key: part[key] for key in ("commit", *LIBRARIES) if part[key] != record[key]}
        cases |= {case["network"]: {**case, **({"of": differs} if differs else {})} for case in part["cases"]}
    record["cases"] = [cases[n] for n in NETWORKS if n in cases]
    part, parts = map(int, options.part.split("/"))
    named = options.networks.split(";") if options.networks else []
    for name in [] if options.table else [*NETWORKS][part::parts]:
        if name in named or name.partition("/")[0] in named or (not named and name not in cases):
            cases[name] = in_a_process(name, options)
            record["cases"] = [cases[n] for n in NETWORKS if n in cases]
            write(record, options.out)
            print(name, verdict(cases[name]), flush=True)
    write(record, options.out)
    return int(any(verdict(case) != "right" for case in record["cases"]))


def in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The case of a network, or how its process ended. Each process begins as a copy of one that has imported the libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*LIBRARIES, "published_measured"])
    result, sent = context.Pipe(duplex=False)
    process = context.Process(target=send_measured, args=(sent, name, options.ways))
    process.start()
    sent.close()
    if not result.poll(options.seconds):
        process.kill()
        return {"network": name, "crash": f"more than {options.seconds:.0f} s"}
    try:
        return result.recv()
    except EOFError:
        process.join()
        return {"network": name, "crash": f"exit {process.exitcode}"}


def send_measured(result: Any, name: str, ways: list[str]) -> None:
    try:
        from published_measured import measured

        result.send(measured(name, ways))
    except Exception as error:
        result.send({"network": name, "crash": f"{type(error).__name__}: {error}"[:300]})
        raise


def verdict(case: dict[str, Any]) -> str:
    if "crash" in case:
        return " ".join(case["crash"].split())
    sides = ("patched", "optimized", "compiled", "patched_children", "optimized_children")
    worst = {f"{how} {of}": case[how][of] for how in ALLOWED for of in sides if of in case[how]}
    wrong = [f"{name} {value}" for name, value in worst.items() if not value <= ALLOWED[name.partition(" ")[0]]]
    wrong += [f"{how}: {why}" for how in ALLOWED for n, why in case[how].get("left", {}).items() if n.endswith("check")]
    if of := case.get("graphs"):
        (_, ours), (_, theirs) = of["windrow"], of["eager"]
        wrong += [f"{ours} graph breaks instead of {theirs}"] * (ours > theirs) + of["check"]
    return "; ".join(wrong) or "right"


def write(record: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    provenance.write(out, record)
    out.with_suffix(".md").write_text("\n".join(table(record)) + "\n")


def table(record: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {record[name]}" for name in LIBRARIES)
    versions += f", extension {record['extension']}" if "extension" in record else ""
    right = sum(verdict(case) == "right" for case in record["cases"])
    lines = [
        "# Published networks",
        "",
        f"{record['date']}, {record['cpu']}. {provenance.sentence(record)} {versions}.",
        "",
        f"{right} of {len(record['cases'])} networks are right: errors are at most {ALLOWED['fastest']:.0f} times PyTorch's own"
        f" (`x`), and {ALLOWED['forced']:.0f} times with Windrow's kernels wherever they compute a problem (`forced`).",
        f"{sum('crash' in case for case in record['cases'])} crashed, and the check at the first call called"
        f" {sum('because the compiled one differs' in verdict(case) for case in record['cases'])} wrong.",
        "`convolutions`: in the network, fused by `optimize`, computed by Windrow patched, and forced. `graphs`: graphs and graph"
        " breaks of `torch.compile`, and those of the backend `eager` where they differ.",
        "`Windrow's`: the percentage of the convolutions' operations that Windrow computed, and forced. `pass`: the percentage that"
        " each pass took.",
        "",
        "| network | error | patched x | optimized x | compiled x | forced, patched x | forced, optimized x | forced, compiled x"
        " | convolutions | graphs | Windrow's | pass | |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|---|---|---|---|",
    ]
    for case in record["cases"]:
        said = "; ".join([verdict(case), *(f"{key} {value[:12]}" for key, value in case.get("of", {}).items())])
        cells = [case["network"], *[""] * 11, said] if "crash" in case else [*row(case), said.removeprefix("right").removeprefix("; ")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def row(case: dict[str, Any]) -> list[str]:
    fastest, forced = case["fastest"], case["forced"]
    values = [f"{side[of]:.2f}" if of in side else "" for side in (fastest, forced) for of in WAYS]
    counts = [case["convolutions"], fastest.get("fused"), fastest.get("patched_by_windrow"), forced.get("patched_by_windrow")]
    cells = [case["network"], f"{case['error']:.1e}", *values, " ".join("-" if n is None else str(n) for n in counts)]
    if "graphs" not in case:
        return [*cells, "", "", ""]
    ours, theirs = case["graphs"]["windrow"], case["graphs"]["eager"]
    graphs = f"{ours[0]}, {ours[1]}" + f" ({theirs[0]}, {theirs[1]})" * (ours != theirs)
    percent = [f"{100 * side['compiled_by_windrow']:.0f}" for side in (fastest, forced)]
    passes = "; ".join(f"{took} {100 * share:.1f}" for took, share in case["graphs"]["passes"].items())
    return [*cells, graphs, " ".join(percent), passes]


if __name__ == "__main__":
    sys.exit(main())
