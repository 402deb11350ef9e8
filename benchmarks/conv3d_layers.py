"""Convolutions of videos by Windrow beside PyTorch (on a GPU cuDNN), layer by layer.

    python benchmarks/conv3d_layers.py [--only WORD ...] [--types f32 tf32 bf16 bf16-half] [--record DIRECTORY]
    python benchmarks/conv3d_layers.py --device cpu [--threads 2] [--record DIRECTORY]

On one GPU, the layers are those of video decoders, with zeros around all directions, and some with filters of frames alone and with
strides. Types: `f32` is strict, with TF32 off in cuDNN; `tf32` allows it in both; `bf16` is Windrow's default accuracy,
and `bf16-half` its accuracy `half`, which allows Winograd's transforms. cuDNN is measured in both layouts and its
better one counts. Windrow is measured in both as well, by the algorithm that it chooses and by each of its own that it
has for the layer. Times are medians of replays of CUDA graphs, in turns; on the CPU of calls. There the layers are
smaller ones of 3x3x3, in f32. Each result is compared in f64 on a corner of
the images. A row with `initial` puts two frames before the video: Windrow reads them where they lie, PyTorch
concatenates them. TFLOP/s are those of the definition. With --record the figures are written as conv3d_layers.json and
.md.
"""

import argparse
import os
import pathlib
import statistics
import time

import provenance
import torch
import torch.nn.functional as F
import windrow
from windrow._native import FilterCache

# Name, input channels, output channels, frames, rows, columns, filter, stride, padding.
LAYERS = [
    ("384", 384, 384, 6, 120, 208, (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    ("192", 192, 192, 6, 240, 416, (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    ("96", 96, 96, 6, 480, 832, (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    ("512", 512, 512, 7, 64, 64, (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    ("384 frames alone", 384, 384, 6, 120, 208, (3, 1, 1), (1, 1, 1), (1, 0, 0)),
    ("192 half the frames", 192, 192, 8, 120, 208, (3, 1, 1), (2, 1, 1), (1, 0, 0)),
    ("256 half of all", 256, 256, 8, 64, 64, (3, 3, 3), (2, 2, 2), (1, 1, 1)),
    ("96 to 192 pixels", 96, 192, 6, 240, 416, (1, 1, 1), (1, 1, 1), (0, 0, 0)),
    ("384 initial", 384, 384, 4, 120, 208, (3, 3, 3), (1, 1, 1), (0, 1, 1)),
]
CPU_LAYERS = [
    (f"{c}", c, c, *sizes, (3, 3, 3), (1, 1, 1), (1, 1, 1))
    for c, sizes in ((64, (8, 56, 56)), (96, (6, 48, 48)), (128, (6, 32, 40)), (192, (6, 24, 32)), (256, (6, 20, 24)))
]
# Type of the elements, Windrow's accuracy, and whether cuDNN may round to TF32.
TYPES = {
    "f32": (torch.float32, "fp32", False),
    "tf32": (torch.float32, "tf32", True),
    "bf16": (torch.bfloat16, "fp32", True),
    "bf16-half": (torch.bfloat16, "half", True),
    "f16": (torch.float16, "fp32", True),
}
LAYOUTS = {"ncthw": torch.contiguous_format, "channels_last": torch.channels_last_3d}
ALGORITHMS = {
    "cuda": ["winograd_row", "implicit_gemm"],
    "cpu": ["winograd_gemm_f2", "winograd_gemm_f4", "winograd_gemm_f6", "im2col_gemm"],
}
CORNER, ROUNDS, LEAST_MS = 12, 5, 6.0
# Of calls before a sample on the CPU. PyTorch's threads wait in a loop for up to 20 ms behind its calls.
LEAD_SECONDS = 0.05


class Layer:
    def __init__(self, layer, dtype, accuracy, device):
        self.name, c, k, t, h, w, taps, self.stride, self.padding = layer
        generator = torch.Generator(device).manual_seed(1)
        draw = lambda *shape: torch.randn(*shape, generator=generator, device=device)
        self.x = draw(1, c, t, h, w).to(dtype)
        self.weight = (draw(k, c, *taps) * (c * taps[0] * taps[1] * taps[2]) ** -0.5).to(dtype)
        self.bias = draw(k)
        self.before = draw(1, c, 2, h, w).to(dtype) if "initial" in self.name else None
        self.accuracy = accuracy
        span = t + (2 if self.before is not None else 2 * self.padding[0])
        sizes = [span, h + 2 * self.padding[1], w + 2 * self.padding[2]]
        outputs = [(size - tap) // step + 1 for size, tap, step in zip(sizes, taps, self.stride, strict=True)]
        self.flops = 2.0 * k * c * taps[0] * taps[1] * taps[2] * outputs[0] * outputs[1] * outputs[2]

    def ours(self, layout, algorithm):
        """A call of Windrow, with its filter packed."""
        form = LAYOUTS[layout]
        x, cache = self.x.contiguous(memory_format=form), FilterCache()
        more = {"stride": self.stride, "padding": self.padding, "accuracy": self.accuracy, "algorithm": algorithm}
        if self.before is not None:
            more |= {"time_padding": "causal", "initial_frames": self.before.contiguous(memory_format=form)}
        return lambda: windrow.conv3d(x, self.weight, self.bias, filters=(cache, True), **more)

    def pytorchs(self, layout):
        form = LAYOUTS[layout]
        x, weight = (tensor.contiguous(memory_format=form) for tensor in (self.x, self.weight))
        bias, before = self.bias.to(x.dtype), self.before
        if before is None:
            return lambda: F.conv3d(x, weight, bias, self.stride, self.padding)
        before = before.contiguous(memory_format=form)
        return lambda: F.conv3d(torch.cat([before, x], 2), weight, bias, self.stride, self.padding)

    def error(self, y):
        """The largest error of a corner of the images, relative to the largest element there."""
        rows, columns = ((CORNER - 1) * step + 3 for step in self.stride[1:])
        x = self.x if self.before is None else torch.cat([self.before, self.x], 2)
        corner = x[..., :rows, :columns].double()
        want = F.conv3d(corner, self.weight.double(), self.bias.double(), self.stride, self.padding)
        # The last outputs read zeros where the images go on.
        rows, columns = (size - 2 * pad for size, pad in zip(want.shape[3:], self.padding[1:], strict=True))
        want, got = want[..., :rows, :columns], y[..., :rows, :columns].double()
        return ((got - want).abs().max() / want.abs().max()).item()


class Calls:
    """So many calls that they take a few milliseconds, with the interface of a CUDA graph."""

    def __init__(self, call, count):
        self.call, self.count = call, count

    def replay(self):
        for _ in range(self.count):
            self.call()


def graph_of(call, device):
    """A graph of so many calls that it takes a few milliseconds, and their number; on the CPU the calls themselves."""
    if device == "cpu":
        call()
        start = time.perf_counter()
        call()
        count = max(1, round(LEAST_MS / (time.perf_counter() - start) / 1e3))
        return Calls(call, count), count
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    count = max(1, min(50, round(LEAST_MS / max(start.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph, count


def milliseconds(graph, count):
    if isinstance(graph, Calls):
        begin = time.perf_counter()
        while time.perf_counter() < begin + LEAD_SECONDS:
            graph.replay()
        begin = time.perf_counter()
        graph.replay()
        return (time.perf_counter() - begin) * 1e3 / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def measure(layer, kind, device):
    dtype, accuracy, tf32 = TYPES[kind]
    torch.backends.cudnn.allow_tf32 = tf32
    case, algorithms = Layer(layer, dtype, accuracy, device), ALGORITHMS[device]
    calls = {("pytorch", layout): case.pytorchs(layout) for layout in LAYOUTS}
    calls |= {(name, layout): case.ours(layout, name) for layout in LAYOUTS for name in [None, *algorithms]}
    graphs, results, row = {}, {}, {"layer": case.name, "type": kind, "flops": case.flops, "errors": {}, "ms": {}}
    for (who, layout), call in calls.items():
        try:
            results[who, layout] = y = call()
            row["errors"][f"{who or 'chosen'} {layout}"] = case.error(y)
            graphs[who, layout] = graph_of(call, device)
        except (NotImplementedError, ValueError, torch.OutOfMemoryError) as error:
            if who is None or who == "pytorch":
                raise
            row.setdefault("refused", {})[f"{who} {layout}"] = str(error)[:120]
    times = {who: [] for who in graphs}
    for turn in range(ROUNDS + 1):
        for who, graph in graphs.items():
            time = milliseconds(*graph)
            if turn > 0:
                times[who].append(time)
    for (who, layout), found in times.items():
        row["ms"][f"{who or 'chosen'} {layout}"] = statistics.median(found)
    # The algorithm that was chosen has the bits of the one with its name.
    for layout in LAYOUTS:
        chosen = results[None, layout]
        same = [a for a in algorithms if (a, layout) in results and torch.equal(results[a, layout], chosen)]
        row[f"chosen {layout}"] = same[0] if same else "another"
    del graphs, results, calls
    if device == "cuda":
        torch.cuda.empty_cache()
    return row


def line(row, device):
    ms = row["ms"]
    rate = lambda name: row["flops"] / ms[name] / UNITS[device][1]
    pytorch = min(ms[f"pytorch {layout}"] for layout in LAYOUTS)
    cells = [f"{rate(f'pytorch {layout}'):.0f}" for layout in LAYOUTS]
    for layout in LAYOUTS:
        name = f"chosen {layout}"
        others = [f"{a} {rate(f'{a} {layout}'):.0f}" for a in ALGORITHMS[device] if f"{a} {layout}" in ms]
        cells += [f"{row[name]} {rate(name):.0f}", f"{pytorch / ms[name]:.2f}", ", ".join(others) or "-"]
    worst = max((e, name) for name, e in row["errors"].items() if not name.startswith("pytorch"))
    theirs = max(e for name, e in row["errors"].items() if name.startswith("pytorch"))
    return f"| {row['layer']} | {row['type']} | {' | '.join(cells)} | {worst[0]:.1e} | {theirs:.1e} |"


# The peer's name, and operations in a millisecond that are one unit of its rate, and the unit.
UNITS = {"cuda": ("cuDNN", 1e9, "TFLOP/s"), "cpu": ("PyTorch", 1e6, "GFLOP/s")}


def head(device):
    peer, _, unit = UNITS[device]
    return (
        f"| layer | type | {peer} NCTHW | {peer} channels-last | NCTHW: chosen, {unit} | x | each | channels-last: chosen "
        f"| x | each | largest error | {peer}'s |\n|---|---|--:|--:|---|--:|---|---|--:|---|--:|--:|"
    )



def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="words that the names of layers begin with")
    parser.add_argument("--types", nargs="+", choices=TYPES, help="[default: all, on the CPU f32]")
    parser.add_argument("--device", choices=UNITS, default="cuda")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--record", type=pathlib.Path, help="write conv3d_layers.json and .md there")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
        os.environ["WINDROW_NUM_THREADS"] = str(args.threads)  # read at the first call
        machine = {"device": provenance.machine(), "threads": args.threads}
        layers, types = CPU_LAYERS, args.types or ["f32"]
    else:
        torch.backends.cudnn.benchmark = True
        machine = {"device": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version()}
        layers, types = LAYERS, args.types or list(TYPES)
    machine["torch"] = torch.__version__
    lines, rows = [f"# {machine}\n\n{provenance.sentence()}\n", head(args.device)], []
    print("\n".join(lines), flush=True)
    for layer in layers:
        if args.only and not any(layer[0].startswith(word) for word in args.only):
            continue
        for kind in types:
            rows.append(measure(layer, kind, args.device))
            lines.append(line(rows[-1], args.device))
            print(lines[-1], flush=True)
    if args.record:
        args.record.mkdir(parents=True, exist_ok=True)
        record = provenance.commit() | {"machine": machine, "rows": rows}
        provenance.write(args.record / "conv3d_layers.json", record)
        (args.record / "conv3d_layers.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
