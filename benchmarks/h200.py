"""GELU and causal conv1d on a CUDA device: Windrow beside PyTorch and, where it is installed, causal-conv1d.

    cargo build --release --example cuda_bench
    python benchmarks/h200.py [--binary target/release/examples/cuda_bench] [--record DIRECTORY]

Both sides are timed as medians of graph replays over inputs that rotate through more memory than the L2 cache
holds, in one run; PyTorch's gradients, which cannot be captured, in a queue of ten. With --record the figures are written as gelu-causal_conv1d.json and .md.
"""

import argparse
import json
import pathlib
import statistics
import subprocess

import provenance
import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ROTATE = 300 << 20
REPLAYS = 20


def rotating(desc, dtype, traffic):
    """As many tensors as keep each turn's bytes out of the cache."""
    return [torch.randn(desc, device="cuda").to(dtype) for _ in range(min(48, max(1, ROTATE // traffic)) + 1)]


def median_us(call, turns):
    """Median microseconds of call(turn) over replays of a graph."""
    calls = max(turns, 8)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(calls):
            call(i % turns)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(i % turns)
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times[2:])


def eager_us(call):
    """Microseconds of call() in a queue of ten: for what cannot be captured."""
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 100


def torch_gelu(row):
    dtype = DTYPES[row["dtype"]]
    form = row["variant"].split()[0]
    traffic = 2 * dtype.itemsize * row["shape"][0] * row["shape"][1]
    xs = rotating(row["shape"], dtype, traffic)
    ys = [torch.empty_like(x) for x in xs]
    return median_us(lambda i: torch.ops.aten.gelu.out(xs[i], approximate=form, out=ys[i]), len(xs))


def width(row):
    return int(row["variant"].partition("width ")[2] or 4)


def torch_conv(row, backward):
    dtype, taps = DTYPES[row["dtype"]], width(row)
    b, d, l = row["shape"]
    xs = rotating(row["shape"], dtype, 2 * dtype.itemsize * b * d * l)
    if row["layout"] == "channel_last":
        xs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in xs]
    weight = torch.randn(d, 1, taps, device="cuda").to(dtype).requires_grad_(backward)
    bias = torch.randn(d, device="cuda").to(dtype).requires_grad_(backward)
    if not backward:
        return median_us(lambda i: F.silu(F.conv1d(xs[i], weight, bias, padding=taps - 1, groups=d)[..., :l]), len(xs))
    x = xs[0].requires_grad_(True)
    y = F.silu(F.conv1d(x, weight, bias, padding=taps - 1, groups=d)[..., :l])
    dy = torch.randn_like(y)
    inputs = (x, weight, bias)
    return eager_us(lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True))


def torch_im2col(row):
    """Separate kernels and a matrix product: transposed im2col, product with the expanded weight, bias, SiLU."""
    b, d, l = row["shape"]
    xs = rotating(row["shape"], torch.float16, 4 * b * d * l)
    weight, bias = torch.randn(d, 4, device="cuda").half(), torch.randn(d, device="cuda").half()
    expanded = torch.zeros(4, d, d, device="cuda", dtype=torch.float16)
    expanded[:, torch.arange(d), torch.arange(d)] = weight.T
    expanded = expanded.reshape(4 * d, d)

    def run(i):
        matrix = F.pad(xs[i], (3, 0)).unfold(2, 4, 1).permute(0, 2, 3, 1).reshape(b * l, 4 * d)
        return F.silu(torch.addmm(bias, matrix, expanded)).reshape(b, l, d).transpose(1, 2).contiguous()

    return median_us(run, len(xs))


def peer_conv(row, backward):
    """causal-conv1d on the same case, if it is installed."""
    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError:
        return None
    if width(row) > 4:
        return None
    dtype = DTYPES[row["dtype"]]
    b, d, l = row["shape"]
    xs = rotating(row["shape"], dtype, 2 * dtype.itemsize * b * d * l)
    if row["layout"] == "channel_last":
        xs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in xs]
    weight, bias = (torch.randn(s, device="cuda").to(dtype) for s in ((d, 4), (d,)))
    if not backward:
        return median_us(lambda i: causal_conv1d_fn(xs[i], weight, bias, activation="silu"), len(xs))
    from causal_conv1d.cpp_functions import causal_conv1d_bwd_function

    dxs = [torch.empty_like(x) for x in xs]
    none = (None, None, None)
    return median_us(
        lambda i: causal_conv1d_bwd_function(xs[i], weight, bias, xs[(i + 1) % len(xs)], *none, dxs[i], False, True),
        len(xs),
    )


def peer_update(row):
    """causal-conv1d's decoding step, if it is installed."""
    try:
        from causal_conv1d import causal_conv1d_update
    except ImportError:
        return None
    dtype = DTYPES[row["dtype"]]
    b, d, _ = row["shape"]
    states = rotating((b, d, 3), dtype, 8 * dtype.itemsize * b * d)
    xs = [torch.randn(b, d, device="cuda").to(dtype) for _ in states]
    weight, bias = (torch.randn(s, device="cuda").to(dtype) for s in ((d, 4), (d,)))
    return median_us(lambda i: causal_conv1d_update(xs[i], states[i], weight, bias, activation="silu"), len(xs))


def add_peers(row):
    if row["op"] == "gelu":
        row["torch_us"] = torch_gelu(row)
    elif row["op"] == "causal_conv1d_update":
        row["causal_conv1d_us"] = peer_update(row)
    elif row["variant"].startswith("im2col_gemm"):
        row["torch_us"] = torch_im2col(row)
    elif row["op"] == "causal_conv1d":
        backward = row["variant"].startswith("backward")
        row["torch_us"] = torch_conv(row, backward)
        row["causal_conv1d_us"] = peer_conv(row, backward)
    torch.cuda.empty_cache()


def table(rows):
    copies = {(tuple(r["shape"]), r["dtype"]): r["gbps"] for r in rows if r["op"] == "copy"}
    lines = ["| op | shape | type | layout, form | us | GB/s | of copy | torch us | speed-up | causal-conv1d us | speed-up |", "|" + "---|" * 11]
    for r in rows:
        if r["op"] == "copy":
            continue
        copy = None if r["variant"].startswith("backward") else copies.get((tuple(r["shape"]), r["dtype"]))
        share = f"{r['gbps'] / copy:.1%}" if copy else ""
        peers = ""
        for peer in (r.get("torch_us"), r.get("causal_conv1d_us")):
            peers += f" {peer:.2f} | {peer / r['us']:.2f} |" if peer else " | |"
        lines.append(
            f"| {r['op']} | {' x '.join(map(str, r['shape']))} | {r['dtype']} | {r['layout']}, {r['variant']} | {r['us']:.2f} "
            f"| {r['gbps']:.0f} | {share} |{peers}"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/examples/cuda_bench")
    parser.add_argument("--record", type=pathlib.Path, help="write gelu-causal_conv1d.json and .md there")
    args = parser.parse_args()
    lines = subprocess.run([args.binary], check=True, capture_output=True, text=True).stdout.splitlines()
    machine, *rows = map(json.loads, lines)
    machine["torch"] = torch.__version__
    peers = {}
    for row in rows:
        key = (row["op"], row["variant"].split()[0], width(row), row["dtype"], row["layout"], tuple(row["shape"]))
        if key not in peers:
            add_peers(row)
            peers[key] = {k: v for k, v in row.items() if k.endswith("_us")}
        row.update(peers[key])
    text = f"# {machine['device']}, driver CUDA {machine['driver']}, torch {machine['torch']}\n\n{provenance.sentence()}\n\n" + table(rows)
    print(text)
    if args.record:
        args.record.mkdir(parents=True, exist_ok=True)
        record = provenance.commit() | {"machine": machine, "rows": rows}
        provenance.write(args.record / "gelu-causal_conv1d.json", record)
        (args.record / "gelu-causal_conv1d.md").write_text(text)


if __name__ == "__main__":
    main()
