"""conv2d split over the GPUs of a machine: Windrow's bench, and NCCL's all_gather through torch beside it.

    cargo build --release -p windrow-cli
    python benchmarks/parallel.py target/release/windrow benchmarks/layers/cnn18.csv OUT

writes OUT/parallel.json, every time and rate, and OUT/parallel.md, the same as tables. The gather of a layer's output is
compared with torch's all_gather_into_tensor of the same bytes, in place; that of a batch that the GPUs cannot divide,
with a gather of shards padded to one size and the copy that takes the padding out.
Times are medians of samples of about 5 ms, of the slowest rank.
"""

import csv
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import provenance
import torch
import torch.distributed as dist

SAMPLES = 11
SAMPLE_MS = 5


def layers(path):
    for row in csv.reader(pathlib.Path(path).read_text().splitlines()):
        if row and not row[0].startswith("#"):
            yield row[0], [int(v) for v in row[1:]]


def milliseconds(run):
    """Median time of a run, of the slowest rank."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(runs):
        dist.barrier()
        start.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / runs

    def slowest(ms):
        ms = torch.tensor(ms, device="cuda")
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        return ms.item()

    runs = min(200, max(2, int(SAMPLE_MS / slowest(sample(3)))))
    return slowest(statistics.median(sample(runs) for _ in range(SAMPLES)))


def rank(layer_file):
    """What torch needs for the gathers of the layers; printed by rank 0."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    world, index = dist.get_world_size(), dist.get_rank()
    times = {}
    for name, (n, _, h, w, k) in layers(layer_file):
        shard = -(-n // world)
        row = k * (h - 2) * (w - 2)
        out = torch.empty(world * shard, row, device="cuda")
        own = out[index * shard : (index + 1) * shard]
        if n % world == 0:
            times[name] = milliseconds(lambda: dist.all_gather_into_tensor(out, own))
        else:
            y = torch.empty(n, row, device="cuda")
            rows = [len(part) for part in torch.arange(n).tensor_split(world)]
            parts = [out[i * shard : i * shard + r] for i, r in enumerate(rows)]

            def padded():
                dist.all_gather_into_tensor(out, own)
                torch.cat(parts, out=y)

            times[name] = milliseconds(padded)
    if index == 0:
        print(json.dumps({"nccl": ".".join(map(str, torch.cuda.nccl.version())), "ms": times}))
    dist.destroy_process_group()


def torch_gathers(layer_file, world):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), __file__, "rank", layer_file]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


def windrow(binary, layer_file, world):
    devices = ",".join(map(str, range(world)))
    command = [binary, "bench", "conv2d", "--devices", devices, "--gather", "--json", "--layers", layer_file]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def compare(binary, layer_file, world):
    """Windrow's report, with torch's gather in every row."""
    report, peer = windrow(binary, layer_file, world), torch_gathers(layer_file, world)
    for row in report["rows"]:
        row["gather"]["torch_ms"] = peer["ms"][row["case"]]
    report |= {"torch": torch.__version__, "torch_nccl": peer["nccl"]}
    return report


def main(binary, layer_file, out):
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    world = torch.cuda.device_count()
    even = compare(binary, layer_file, world)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as odd_file:
        for name, (n, *sizes) in list(layers(layer_file))[::4]:
            odd_file.write(",".join(map(str, [name, n - 1, *sizes])) + "\n")
        odd_file.flush()
        odd = compare(binary, odd_file.name, world)
    provenance.write(out / "parallel.json", provenance.commit() | {"even": even, "odd": odd})
    (out / "parallel.md").write_text(text(even, odd))


def text(even, odd):
    lines = [f"{even['ranks']} x {even['gpu']}, NCCL {even['nccl']}, torch {even['torch']}; conv2d f32, 3x3, NCHW. "
             f"{provenance.sentence()}", ""]
    lines += [f"Batch split over the GPUs, against one of them: sharded {even['sharded_speedup']:.2f} times, gathered "
              f"{even['gathered_speedup']:.2f} times the throughput (geometric means of layers of at least 0.2 ms). From the "
              f"host through pinned memory: {even['upload_gbps']:.1f} GB/s.", ""]
    lines += table(even, "all_gather")
    lines += ["", "A batch that the GPUs cannot divide, beside a padded gather and copy in torch.", ""]
    lines += table(odd, "padded")
    return "\n".join(lines) + "\n"


def table(report, peer):
    head = ["layer", "x, k", "1 GPU ms", "sharded ms", "speed-up", "gathered ms", "speed-up", "gather ms", f"torch {peer} ms",
            "gather GB/s", "of torch's", "hidden", "bits"]
    lines = ["| " + " | ".join(head) + " |", "|---" * 2 + "|---:" * (len(head) - 3) + "|---|"]
    for r in report["rows"]:
        g = r["gather"]
        cells = [r["case"], r["shape"], f"{r['one_ms']:.3f}", f"{r['sharded_ms']:.3f}", f"{r['speedup']:.2f}",
                 f"{g['gathered_ms']:.3f}", f"{g['speedup']:.2f}", f"{g['ms']:.3f}", f"{g['torch_ms']:.3f}", f"{g['gbps']:.0f}",
                 f"{g['torch_ms'] / g['ms']:.0%}", f"{g['hidden']:.0%}", "equal" if r["identical"] else "DIFFER"]
        lines.append("| " + " | ".join(cells) + " |")
    share = statistics.geometric_mean(r["gather"]["torch_ms"] / r["gather"]["ms"] for r in report["rows"])
    return [*lines, "", f"Gathers: {share:.0%} of torch's rate in geometric mean."]


if __name__ == "__main__":
    rank(sys.argv[2]) if sys.argv[1] == "rank" else main(*sys.argv[1:])
