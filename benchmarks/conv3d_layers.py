"""Convolutions of videos by Windrow beside cuDNN (through PyTorch), layer by layer, on one GPU.

    python benchmarks/conv3d_layers.py [--only WORD ...] [--types f32 tf32 bf16 bf16-half] [--record DIRECTORY]

The layers are those of video decoders, with zeros around all directions, and some with filters of frames alone and with
strides. Types: `f32` is strict, with TF32 off in cuDNN; `tf32` allows it in both; `bf16` is Windrow's default accuracy,
and `bf16-half` its accuracy `half`, which allows Winograd's transforms. cuDNN is measured in both layouts and its
better one counts. Windrow is measured in both as well, by the algorithm that it chooses and by each of its own that it
has for the layer. Times are medians of replays of CUDA graphs, in turns. Each result is compared in f64 on a corner of
the images. A row with `initial` puts two frames before the video: Windrow reads them where they lie, PyTorch
concatenates them. TFLOP/s are those of the definition. With --record the figures are written as conv3d_layers.json and
.md.
"""

import argparse
import pathlib
import statistics

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
# Type of the elements, Windrow's accuracy, and whether cuDNN may round to TF32.
TYPES = {
    "f32": (torch.float32, "fp32", False),
    "tf32": (torch.float32, "tf32", True),
    "bf16": (torch.bfloat16, "fp32", True),
    "bf16-half": (torch.bfloat16, "half", True),
}
LAYOUTS = {"ncthw": torch.contiguous_format, "channels_last": torch.channels_last_3d}
ALGORITHMS = ["winograd_row", "implicit_gemm"]
CORNER, ROUNDS, LEAST_MS = 12, 5, 6.0


class Layer:
    def __init__(self, layer, dtype, accuracy):
        self.name, c, k, t, h, w, taps, self.stride, self.padding = layer
        generator = torch.Generator("cuda").manual_seed(1)
        draw = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")
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

    def cudnns(self, layout):
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


def graph_of(call):
    """A graph of so many calls that it takes a few milliseconds, and their number."""
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
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def measure(layer, kind):
    dtype, accuracy, tf32 = TYPES[kind]
    torch.backends.cudnn.allow_tf32 = tf32
    case = Layer(layer, dtype, accuracy)
    calls = {("cudnn", layout): case.cudnns(layout) for layout in LAYOUTS}
    calls |= {(name, layout): case.ours(layout, name) for layout in LAYOUTS for name in [None, *ALGORITHMS]}
    graphs, results, row = {}, {}, {"layer": case.name, "type": kind, "flops": case.flops, "errors": {}, "ms": {}}
    for (who, layout), call in calls.items():
        try:
            results[who, layout] = y = call()
            row["errors"][f"{who or 'chosen'} {layout}"] = case.error(y)
            graphs[who, layout] = graph_of(call)
        except (NotImplementedError, ValueError, torch.OutOfMemoryError) as error:
            if who is None or who == "cudnn":
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
        same = [a for a in ALGORITHMS if (a, layout) in results and torch.equal(results[a, layout], chosen)]
        row[f"chosen {layout}"] = same[0] if same else "another"
    del graphs, results, calls
    torch.cuda.empty_cache()
    return row


def line(row):
    ms = row["ms"]
    rate = lambda name: row["flops"] / ms[name] / 1e9
    cudnn = min(ms[f"cudnn {layout}"] for layout in LAYOUTS)
    cells = [f"{rate(f'cudnn {layout}'):.0f}" for layout in LAYOUTS]
    for layout in LAYOUTS:
        name = f"chosen {layout}"
        others = [f"{a} {rate(f'{a} {layout}'):.0f}" for a in ALGORITHMS if f"{a} {layout}" in ms]
        cells += [f"{row[name]} {rate(name):.0f}", f"{cudnn / ms[name]:.2f}", ", ".join(others) or "-"]
    worst = max((e, name) for name, e in row["errors"].items() if not name.startswith("cudnn"))
    theirs = max(e for name, e in row["errors"].items() if name.startswith("cudnn"))
    return f"| {row['layer']} | {row['type']} | {' | '.join(cells)} | {worst[0]:.1e} | {theirs:.1e} |"


HEAD = (
    "| layer | type | cuDNN NCTHW | cuDNN channels-last | NCTHW: chosen, TFLOP/s | x | each | channels-last: chosen "
    "| x | each | largest error | cuDNN's |\n|---|---|--:|--:|---|--:|---|---|--:|---|--:|--:|"
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="words that the names of layers begin with")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--record", type=pathlib.Path, help="write conv3d_layers.json and .md there")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    machine["cudnn"] = torch.backends.cudnn.version()
    lines, rows = [f"# {machine}\n\n{provenance.sentence()}\n", HEAD], []
    print("\n".join(lines), flush=True)
    for layer in LAYERS:
        if args.only and not any(layer[0].startswith(word) for word in args.only):
            continue
        for kind in args.types:
            rows.append(measure(layer, kind))
            lines.append(line(rows[-1]))
            print(lines[-1], flush=True)
    if args.record:
        args.record.mkdir(parents=True, exist_ok=True)
        record = provenance.commit() | {"machine": machine, "rows": rows}
        provenance.write(args.record / "conv3d_layers.json", record)
        (args.record / "conv3d_layers.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
