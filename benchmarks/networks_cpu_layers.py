"""Where the time of a network on the CPU goes, beside ONNX Runtime and OpenVINO: f32, one image, one thread.

    python benchmarks/networks_cpu_layers.py [--networks a,b] [--calls 25] [--layers] OUT.json

The optimized network's graph is called node by node, and convolutions that are one call are called one by one. ONNX
Runtime and OpenVINO tell the time of each node by their own profiles. A node's time is its shortest call: processor time
of ours, and what the peer's clock says. Nodes are added up by kind: convolutions by filter and groups (`dw`:
depthwise, `g`: other groups), with the activations that are fused with them, and everything else by operator.
`whole` is the whole network's call, for us with all that Python does between nodes. `--layers` prints each of our nodes.
OUT.md is the table. Needs `windrow` on PYTHONPATH.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import networks_cpu
import provenance
import torch
from contestants import OPTIMIZED, PYTORCH, Case
from torch import Tensor, fx
from windrow.torch._fused import FusedConv2d
from windrow.torch._image_step import ImageStep
from windrow.torch._sequence import Sequence
from windrow.torch.backend import _compile

# What is not a convolution, by the names that libraries have for it.
KINDS = {
    "concatenation": ("cat", "Concat"),
    "pooling": ("max_pool2d", "avg_pool2d", "MaxPool", "AveragePool", "AvgPool", "mean", "ReduceMean"),
    "matrix": ("addmm", "Gemm", "FullyConnected", "MatMul"),
    "layout": ("clone", "reshape", "Reshape", "Reorder", "ReorderInput", "ReorderOutput", "Transpose"),
}
# A kind and the milliseconds of one call.
Node = tuple[str, float]


def kind_of(operator: str) -> str:
    name = operator.removeprefix("aten.").partition(".")[0]
    return next((kind for kind, names in KINDS.items() if name.startswith(names)), "elementwise and others")


def kind_of_filter(channels: int, filter: list[int], groups: int) -> str:
    """`filter`: output channels, channels of a group, height and width."""
    size = "x".join(map(str, filter[2:]))
    return ("" if groups == 1 else "dw " if filter[1] == 1 and channels > 1 else "g ") + size


class _Timed(fx.Interpreter):
    """Calls a graph node by node."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.nodes: dict[str, tuple[str, str, list[float]]] = {}

    def _call(self, name: str, what: Callable[[], Any], kind: str, told: Callable[[Any], str]) -> Any:
        begin = time.thread_time()
        result = what()
        took = (time.thread_time() - begin) * 1e3
        self.nodes.setdefault(name, (kind, told(result), []))[2].append(took)
        return result

    def _module(
        self, name: str, module: Any, x: Tensor, second: Tensor | None = None, place: Tensor | None = None
    ) -> Any:
        if isinstance(module, FusedConv2d):
            weight, groups = [*module.weight.shape, 1, 1][:4], module.options[3]
            kind = kind_of_filter(weight[1] * groups, weight, groups)
            told = lambda y: f"{kind} {weight[1] * groups} -> {weight[0]}, {[*y.shape[2:]]}, {module.activation}"
        else:
            assert isinstance(module, ImageStep)
            kind = kind_of(module.operation)
            told = lambda y: f"{module.operation} {y.shape[1]}, {[*x.shape[2:]]}"
        return self._call(name, lambda: module(x, second, place), kind, told)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module: Any = self.submodules[target]
        if not isinstance(module, Sequence):
            return self._module(target, module, *args)
        values = [*args]
        for by, *numbers in module.steps:
            given = [None if number is None else values[number] for number in numbers]
            is_view = not isinstance(by, str)
            values.append(by.of(given[0]) if is_view else self._module(f"{target}.{by}", module._modules[by], *given))
        results = [values[i].flatten(1) if i in module.flat else values[i] for i in module.results]
        return results[0] if len(results) == 1 else (*results,)

    def run_node(self, node: fx.Node) -> Any:
        if node.op != "call_function":
            return super().run_node(node)
        run = super().run_node
        return self._call(node.name, lambda: run(node), kind_of(str(node.target)), lambda _: str(node.target))


def ours(case: Case, calls: int, prints: bool) -> tuple[float, list[Node]]:
    graphs: list[tuple[fx.GraphModule, Any]] = []
    called_alone = _compile.called_alone

    def kept(graph: fx.GraphModule) -> Callable[..., Any]:
        call = called_alone(graph)
        # With the arguments of the last call.
        return lambda *given: (graphs.append((graph, given)), call(*given))[1]

    _compile.called_alone = kept
    model, x, whole = case.made(case.model(PYTORCH), OPTIMIZED), networks_cpu.image_of(case), []
    with torch.inference_mode():
        for i in range(models.WARM_UP + calls):
            begin = time.thread_time()
            model(x)
            whole.append((time.thread_time() - begin) * 1e3)
        graph, given = graphs[-1]
        timed = _Timed(graph)
        for i in range(models.WARM_UP + calls):
            if i == models.WARM_UP:
                timed.nodes.clear()
            timed.run(*given)
    _compile.called_alone = called_alone
    for kind, told, times in timed.nodes.values() if prints else ():
        print(f"{min(times):8.3f} ms  {told}", file=sys.stderr)
    return min(whole), [(kind, min(times)) for kind, _, times in timed.nodes.values()]


def of_onnxruntime(file: Path, x: Tensor, calls: int) -> tuple[float, list[Node]]:
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.enable_profiling = 1, True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        whole, inputs = [], {session.get_inputs()[0].name: x.numpy()}
        for _ in range(calls):
            begin = time.thread_time()
            session.run(None, inputs)
            whole.append((time.thread_time() - begin) * 1e3)
        events = json.loads(Path(session.end_profiling()).read_text())
    nodes: dict[str, tuple[str, list[float]]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("kernel_time"):
            name, args = event["args"]["op_name"], event["args"]
            kind = kind_of(name)
            if "Conv" in name:
                image, filter, *_ = [[*shape.values()][0] for shape in args["input_type_shape"]]
                kind = kind_of_filter(image[1], filter, image[1] // filter[1])
            nodes.setdefault(event["name"], (kind, []))[1].append(event["dur"] / 1e3)
    return min(whole), [(kind, min(times)) for kind, times in nodes.values()]


def of_openvino(file: Path, x: Tensor, calls: int) -> tuple[float, list[Node]]:
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    settings |= {"INFERENCE_NUM_THREADS": 1, "ENABLE_CPU_PINNING": False, "PERF_COUNT": True}
    core = openvino.Core()
    shapes = {}
    for op in core.read_model(file).get_ordered_ops():
        if op.get_type_name() in ("Convolution", "GroupConvolution"):
            filter = [*op.input_value(1).shape]
            groups = filter[0] if op.get_type_name() == "GroupConvolution" else 1
            channels = op.input_value(0).shape[1]
            shapes[op.get_friendly_name()] = kind_of_filter(channels, filter[-4:], groups)
    request = core.compile_model(file, "CPU", settings).create_infer_request()
    nodes: dict[str, tuple[str, list[float]]] = {}
    whole = []
    for _ in range(calls):
        begin = time.thread_time()
        request.infer([x.numpy()])
        whole.append((time.thread_time() - begin) * 1e3)
        for node in request.profiling_info:
            if node.status == node.Status.EXECUTED:
                is_conv = "Convolution" in node.node_type
                kind = shapes.get(node.node_name, "convolution") if is_conv else kind_of(node.node_type)
                nodes.setdefault(node.node_name, (kind, []))[1].append(node.real_time.total_seconds() * 1e3)
    return min(whole), [(kind, min(times)) for kind, times in nodes.values()]


def measured(name: str, calls: int, prints: bool) -> dict[str, Any]:
    case = networks_cpu.case_of(name)
    x = networks_cpu.image_of(case)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.onnx"
        networks_cpu.export(case, file)
        found = {
            "windrow": ours(case, calls, prints),
            "onnxruntime": of_onnxruntime(file, x, calls),
            "openvino": of_openvino(file, x, calls),
        }
    case_ms: dict[str, Any] = {}
    for side, (whole, nodes) in found.items():
        sums = case_ms[side] = {"whole": round(whole, 3)}
        for kind, ms in nodes:
            sums[kind] = round(sums.get(kind, 0.0) + ms, 3)
    return {"ms": case_ms}


def table(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in record["versions"].items() if v)
    commits = {provenance.sentence(case) for case in record["cases"].values()}
    lines = [f"# {record['device']}, one thread", "", f"{versions}.", *sorted(commits), ""]
    lines += ["Milliseconds by kind of node, the shortest of each node. `whole`: of the network's call."]
    for name, case in record["cases"].items():
        sides = case["ms"]
        kinds = {kind: max(of.get(kind, 0.0) for of in sides.values()) for side in sides.values() for kind in side}
        cell = lambda side, kind: f"{sides[side][kind]:.2f}" if kind in sides[side] else "-"
        rows = [(kind, *(cell(side, kind) for side in sides)) for kind in sorted(kinds, key=lambda k: -kinds[k])]
        lines += ["", f"## {name}", "", *networks_cpu.aligned(("kind", *sides), rows)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--networks", help=f"of {','.join(networks_cpu.NAMES)}")
    add("--calls", type=int, default=25)
    add("--layers", action="store_true", help="print each of our nodes")
    add("out", type=Path, metavar="OUT.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head = models.header(torch.device("cpu"), ["onnxruntime", "openvino"])
    record = models.load(options.out, head)
    for name in models.chosen(options.networks, networks_cpu.NAMES):
        measured_at = provenance.commit()
        record["cases"][name] = measured(name, options.calls, options.layers) | measured_at
        provenance.write(options.out, record)
        options.out.with_suffix(".md").write_text(table(record))
    print(table(record), end="")


if __name__ == "__main__":
    main()
