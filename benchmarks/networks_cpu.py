"""Networks on the CPU beside ONNX Runtime and OpenVINO: f32, one image, alone or under load.

    python benchmarks/networks_cpu.py [--networks a,b] [--threads N] [--load PROGRAMS] [--rounds 9] OUT.json

Eager PyTorch, torch.compile with frozen weights, ONNX Runtime and OpenVINO take turns with `patch`, `optimize` and
`backend="windrow"`, in a process for each network. Everybody's result is compared with that in f64 before it is timed.
Before its turn everybody pauses until the threads of the one before have stopped waiting in a loop. A turn is one call
that is not timed and some that are timed one by one; the record has their median and the shortest. ONNX Runtime and
OpenVINO each come with two settings, named in the record. The table has the better one.

The first call and the memory are those of a process for each contestant. It imports everything, loads the weights (from
PyTorch's file, or the network exported to ONNX), and makes and calls what is timed. The seconds are those from the
loaded weights on, of ONNX Runtime and OpenVINO from the file on; the memory is the peak above that after the imports.

With `--load` times are taken beside so many programs that do nothing but take processor time, which start when
everything is decided and warm; cases are named so. Networks that OUT.json has already are replaced if they are measured
again and else kept, so a record can be made in parts, on one machine. OUT.md is its table. Needs `windrow` on
PYTHONPATH.
"""

import argparse
import datetime
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import contestants
import load
import memory
import models
import networks
import provenance
import torch
from contestants import BACKEND, COMPILED, MODES, OPTIMIZED, PATCHED, PYTORCH, Case

NAMES = [
    "mobilenet_v2",
    "efficientnet_b0",
    "resnet18",
    "resnet50",
    "densenet121",
    "regnet_y_1_6gf",
    "detector",
    "segmentation",
    "esrgan",
    "vgg16_bn",
    "vae_decoder",
]
ONNXRUNTIME = ["onnxruntime", "onnxruntime-sleeping"]
OPENVINO = ["openvino", "openvino-unpinned"]
OURS = [PATCHED, OPTIMIZED, BACKEND]
SIDES = [PYTORCH, COMPILED, *ONNXRUNTIME, *OPENVINO, *OURS]
# What the peers are set to, beside the number of threads.
SETTINGS = {
    COMPILED: "freezing",
    "onnxruntime": "all graph optimizations; with spinning (default) and without",
    "openvino": "INFERENCE_PRECISION_HINT f32, latency hint, one stream; with pinning as default and without",
}
# OpenMP's threads wait in a loop for up to 20 ms, those of the others for less.
PAUSE_SECONDS = 0.1
# Of a turn, in calls.
TURN_SECONDS, TURN_CALLS = 0.3, range(2, 11)
# Relative to the result in f64. Winograd's algorithms have the largest error, in deep networks a few 1e-6.
MOST_ERROR = 1e-4
# What comes of an exporter or a session that cannot do it, and of PyTorch's compiler.
FAILURES = (RuntimeError, ValueError, TypeError, MemoryError, OSError, ImportError)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--networks", help=f"of {','.join(NAMES)}")
    add("--sides", help=f"of {','.join(SIDES)}")
    add("--threads", type=int, help="of everybody; default PyTorch's number")
    add("--load", type=int, default=0, metavar="PROGRAMS", help="busy programs beside the calls")
    add("--rounds", type=int, default=9, help="turns of each")
    add("--only-times", action="store_true", help="without the first call and the memory")
    add("--child", help=argparse.SUPPRESS)
    add("out", type=Path, metavar="OUT.json")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def case_of(name: str) -> Case:
    return Case(networks.NETWORKS[name], name, MODES["f32"], 1, "infer", torch.device("cpu"))


def image_of(case: Case) -> torch.Tensor:
    return case.input(1, case.network.size["cpu"])


def export(case: Case, file: Path) -> None:
    torch.onnx.export(case.model(PYTORCH), (image_of(case),), file, dynamo=True, verbose=False, external_data=False)


def call_of_onnxruntime(file: Path, image: torch.Tensor, spins: bool) -> Callable[[], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: image.numpy()}
    return lambda: session.run(None, inputs)


def call_of_openvino(file: Path, image: torch.Tensor, pins: bool) -> Callable[[], Any]:
    import openvino

    settings: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    if not pins:
        settings["ENABLE_CPU_PINNING"] = False
    request = openvino.Core().compile_model(file, "CPU", settings).create_infer_request()
    array = image.numpy()
    return lambda: [*request.infer([array], share_inputs=True, share_outputs=True).values()]


def call_of_module(case: Case, model: torch.nn.Module, side: str, image: torch.Tensor) -> Callable[[], Any]:
    """PyTorch's module, or what is made of it."""
    model = torch.compile(model, options={"freezing": True}) if side == COMPILED else case.made(model, side)

    def call() -> Any:
        with torch.inference_mode():
            return model(image)

    return call


def start(side: str, case: Case, model: torch.nn.Module | None, file: Path, image: torch.Tensor) -> Callable[[], Any]:
    if side in ONNXRUNTIME:
        return call_of_onnxruntime(file, image, side == ONNXRUNTIME[0])
    if side in OPENVINO:
        return call_of_openvino(file, image, side == OPENVINO[0])
    assert model is not None
    return call_of_module(case, model, side, image)


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of calls."""
    samples: dict[str, list[float]] = {side: [] for side in calls}

    def timed(call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3

    names = [*calls]
    for i in range(rounds):
        turn = i % len(names)
        for side in names[turn:] + names[:turn]:
            time.sleep(PAUSE_SECONDS)
            once = timed(calls[side])
            count = min(max(TURN_CALLS.start, round(TURN_SECONDS * 1e3 / once)), TURN_CALLS.stop - 1)
            samples[side] += [timed(calls[side]) for _ in range(count)]
    return {
        side: {"median": round(statistics.median(s), 3), "min": round(min(s), 3), "samples": len(s)}
        for side, s in samples.items()
    }


def times(name: str, sides: list[str], rounds: int, programs: int) -> dict[str, Any]:
    """Times and errors of a network, and what failed, in this process."""
    case = case_of(name)
    exact, image = case.result_in_f64(), image_of(case)
    found: dict[str, Any] = {"failed": {}, "error": {}}
    calls: dict[str, Callable[[], Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.onnx"
        export(case, file)
        for side in sides:
            try:
                call = start(side, case, case.model(PYTORCH), file, image)
                result = contestants.whole(contestants.tensors(call()))
            except FAILURES as e:
                found["failed"][side] = f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0][:100]}"
                continue
            error = found["error"][side] = float(f"{((result - exact).norm() / exact.norm()).item():.2e}")
            if not error < MOST_ERROR:
                found["failed"][side] = f"the result differs by {error:.1e}"
                continue
            calls[side] = call
    gc.collect()
    for call in calls.values():
        for _ in range(models.WARM_UP):
            call()
        time.sleep(PAUSE_SECONDS)
    with ExitStack() as stack:
        if programs:
            stack.enter_context(load.beside(programs))
        found["ms"] = in_turns(calls, rounds)
    return found


def first_call(name: str, side: str, weights: Path, file: Path) -> dict[str, float]:
    """Seconds and bytes of the first call, in this process."""
    import onnxruntime  # noqa: F401
    import openvino  # noqa: F401
    import torchvision  # noqa: F401

    case = case_of(name)
    image = image_of(case)
    torch.randn(64, 64) @ torch.randn(64, 64)
    gc.collect()
    # Resets the peak.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory.resident("VmRSS")
    model = None if side in (*ONNXRUNTIME, *OPENVINO) else torch.load(weights, weights_only=False)
    begin = time.perf_counter()
    call = start(side, case, model, file, image)
    del model
    call()
    return {"seconds": round(time.perf_counter() - begin, 3), "bytes": memory.resident("VmHWM") - before}


def child(options: argparse.Namespace, *what: str) -> Any:
    command = [sys.executable, __file__, "--child", json.dumps(what), "--load", str(options.load)]
    command += ["--rounds", str(options.rounds), "--threads", str(torch.get_num_threads()), "-"]
    # Libraries write to the output, too: the result is the last line.
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def measured(name: str, sides: list[str], options: argparse.Namespace) -> dict[str, Any]:
    found = child(options, "times", name, *sides)
    if options.load or options.only_times:
        return found
    found["first"] = {}
    with tempfile.TemporaryDirectory() as folder:
        weights, file = Path(folder) / "network.pt", Path(folder) / "network.onnx"
        case = case_of(name)
        torch.save(case.model(PYTORCH), weights)
        export(case, file)
        for side in found["ms"]:
            found["first"][side] = child(options, "first_call", name, side, str(weights), str(file))
    return found


def best(values: dict[str, Any], sides: list[str], key: str) -> float | None:
    return min((values[side][key] for side in sides if side in values), default=None)


def aligned(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    pad = lambda i, cell: cell.rjust(widths[i]) if i else cell.ljust(widths[i])
    line = lambda cells: " | ".join(pad(i, cell) for i, cell in enumerate(cells))
    return [f"| {line(head)} |", "|---|" + "--:|" * (len(head) - 1), *(f"| {line(row)} |" for row in rows)]


PEERS = {"eager": [PYTORCH], "compiled": [COMPILED], "ORT": ONNXRUNTIME, "OpenVINO": OPENVINO}


def of_times(cases: dict[str, Any], key: str) -> list[str]:
    """The table of the medians or the shortest, and what the ratios are in the mean."""
    rows, ratios = [], {peer: [] for peer in [*PEERS, "faster"]}
    for name, case in cases.items():
        ours = {side: case["ms"].get(side, {}).get(key) for side in OURS}
        least = best(case["ms"], OURS, key)
        theirs = {peer: best(case["ms"], sides, key) for peer, sides in PEERS.items()}
        theirs["faster"] = min((t for peer in ("ORT", "OpenVINO") if (t := theirs[peer])), default=None)
        beside = {peer: t / least for peer, t in theirs.items() if t and least}
        for peer, ratio in beside.items():
            ratios[peer].append(ratio)
        shown = [f"{t:.4g}" if t else "-" for t in ours.values()]
        rows.append((name, *shown, *(f"{beside[peer]:.2f}" if peer in beside else "-" for peer in ratios)))
    for title, of in (("geometric mean", statistics.geometric_mean), ("least", min)):
        rows.append((title, "", "", "", *(f"{of(r):.2f}" if r else "-" for r in ratios.values())))
    return aligned(("network", "patch", "optimize", "backend", *ratios), rows)


def of_first_calls(cases: dict[str, Any], key: str, unit: float) -> list[str]:
    columns = {**{peer: sides[:1] for peer, sides in PEERS.items()}, **{side: [side] for side in OURS}}
    cell = lambda case, sides: "-" if (v := best(case["first"], sides, key)) is None else f"{v / unit:.3g}"
    rows = [(name, *(cell(case, sides) for sides in columns.values())) for name, case in cases.items()]
    return aligned(("network", "eager", "compiled", "ORT", "OpenVINO", "patch", "optimize", "backend"), rows)


def table(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in record["versions"].items() if v)
    commits = {provenance.sentence(case) for case in record["cases"].values()}
    lines = [f"# {record['device']}, {record['threads']} threads", "", f"{versions}.", *sorted(commits), ""]
    lines += [f"- {peer}: {how}." for peer, how in record["settings"].items()]
    lines += ["", "Times in ms of calls in turns with pauses. Under a peer's name: its time over the least of our three."]
    lines += ["`faster`: the faster of ONNX Runtime (ORT) and OpenVINO.", ""]
    for name, case in record["cases"].items():
        lines += [f"- {name}: {side} failed: {why}" for side, why in case["failed"].items()]
    loads = sorted({case["programs"] for case in record["cases"].values()})
    for programs in loads:
        cases = {n.partition(",")[0]: c for n, c in record["cases"].items() if c["programs"] == programs}
        beside = f", beside {programs} busy programs" if programs else ""
        for key, title in {"median": "Medians", "min": "Shortest"}.items():
            lines += ["", f"## {title}{beside}", "", *of_times(cases, key)]
        firsts = {name: case for name, case in cases.items() if "first" in case}
        if firsts:
            lines += ["", "## First call, in seconds", "", *of_first_calls(firsts, "seconds", 1)]
            lines += ["", "## Peak memory of it above that after the imports, in MiB", ""]
            lines += of_first_calls(firsts, "bytes", 2**20)
    return "\n".join(lines) + "\n"


def main() -> None:
    options = arguments()
    if options.child:
        function, name, *rest = json.loads(options.child)
        if function == "times":
            found = times(name, rest, options.rounds, options.load)
        else:
            found = first_call(name, rest[0], Path(rest[1]), Path(rest[2]))
        print(json.dumps(found))
        return
    head = models.header(torch.device("cpu"), ["onnxruntime", "openvino"])
    record = models.load(options.out, head | {"settings": SETTINGS})
    sides = models.chosen(options.sides, SIDES)
    for name in models.chosen(options.networks, NAMES):
        if why := networks.missing(networks.NETWORKS[name]):
            record["left"][name] = why
            continue
        begin = time.perf_counter()
        found = measured(name, sides, options)
        title = f"{name}, {options.load} busy" if options.load else name
        measured_at = provenance.commit() | {"date": str(datetime.date.today())}
        record["cases"][title] = {"programs": options.load} | found | measured_at
        # Of the newest part; each case names its own.
        record |= measured_at
        provenance.write(options.out, record)
        options.out.with_suffix(".md").write_text(table(record))
        print(f"{title}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    print(table(record), end="")


if __name__ == "__main__":
    main()
