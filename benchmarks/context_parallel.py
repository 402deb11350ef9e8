"""Causal conv1d of one sequence whose tokens are divided among GPUs, beside one GPU with the whole sequence.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py [--eager] [--record DIRECTORY]

x is [1, channels, tokens] of bf16, channels-last; width 4, SiLU, a bias. Contestants take turns:

- `whole`: one GPU, all tokens;
- `parts`: each GPU its tokens, with `windrow.torch.causal_conv1d_fn(cp_group=..)`;
- `apart`: each GPU its tokens without the exchange, which gives wrong values where parts meet;
- `first`: each GPU its tokens, with an exchange before the convolution in place of beside it; in the backward pass the
  gradient of the states travels behind it.

Times are medians of samples, each of the slowest GPU: `graph` from replays of CUDA graphs, `eager` from calls in a
queue (with --eager only these). The bits of y and dx of `parts` are compared with those of `whole`. With --record the
figures are written as context_parallel.json and .md.
"""

import argparse
import os
import pathlib
import statistics

import provenance
import torch
import torch.distributed as dist
from windrow.torch import causal_conv1d_fn

CASES = [(tokens, channels) for tokens in (32768, 131072) for channels in (4096, 8192)]
WIDTH = 4
CONTESTANTS = ["whole", "parts", "apart", "first"]
# Calls of a sample, and samples.
CALLS, SAMPLES = 10, 9


class First(torch.autograd.Function):
    """x, and the left neighbour's last inputs as initial states. The backward pass returns their gradient to it."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x), passed(x[:, :, 1 - WIDTH :], 1)

    @staticmethod
    def backward(ctx, dx, dstates):
        dx[:, :, 1 - WIDTH :] += passed(dstates, -1)
        return dx


def passed(inputs, step):
    """What the rank `step` before sends, or zeros; each sends to the rank `step` behind."""
    sent = inputs.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    rank, received = dist.get_rank(), torch.zeros_like(sent)
    pairs = ((dist.isend, sent, rank + step), (dist.irecv, received, rank - step))
    works = [dist.P2POp(f, tensor, peer) for f, tensor, peer in pairs if 0 <= peer < dist.get_world_size()]
    for work in dist.batch_isend_irecv(works):
        work.wait()
    return received.transpose(1, 2)


def contestants(x, weight, bias, dy):
    """Calls that compute y, and those that compute y and all gradients, by name; and the tokens of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    each = x.shape[2] // world
    mine = slice(rank * each, (rank + 1) * each)
    part, dy_part = x.detach()[:, :, mine].requires_grad_(), dy[:, :, mine]
    conv = lambda x, **more: causal_conv1d_fn(x, weight, bias, activation="silu", **more)

    def first():
        x, states = First.apply(part)
        return conv(x, initial_states=states)

    forward = {
        "whole": lambda: conv(x),
        "parts": lambda: conv(part, cp_group=dist.group.WORLD),
        "apart": lambda: conv(part),
        "first": first,
    }

    def step(who):
        inputs, cotangent = (x, dy) if who == "whole" else (part, dy_part)
        return lambda: torch.autograd.grad(forward[who](), [inputs, weight, bias], cotangent)

    return {"forward": forward, "forward and backward": {who: step(who) for who in CONTESTANTS}}, mine


def slowest(ms):
    ms = torch.tensor(ms, device="cuda")
    dist.all_reduce(ms, dist.ReduceOp.MAX)
    return ms.item()


def sample(call, calls):
    """Milliseconds of a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return slowest(start.elapsed_time(end) / calls)


def captured(call):
    """The call as a CUDA graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    # Threads of NCCL's group ask for events meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        kept = call()
    return lambda: (graph.replay(), kept)


def medians(calls, repeated):
    """Median milliseconds of each, sampled in turns."""
    for call in calls.values():
        sample(call, 2)
    times = {who: [] for who in calls}
    for _ in range(SAMPLES):
        for who, call in calls.items():
            times[who].append(sample(call, repeated))
    return {who: statistics.median(t) for who, t in times.items()}


def measure(tokens, channels, in_graphs):
    like = {"dtype": torch.bfloat16, "device": "cuda"}
    torch.manual_seed(0)
    x, dy = (torch.randn(1, tokens, channels, **like).transpose(1, 2) for _ in range(2))
    weight, bias = torch.randn(channels, WIDTH, **like), torch.randn(channels, **like)
    for t in (x, weight, bias):
        t.requires_grad_()
    kinds, mine = contestants(x, weight, bias, dy)
    results = {who: (kinds["forward"][who](), kinds["forward and backward"][who]()[0]) for who in ("whole", "parts")}
    is_equal = all(torch.equal(w[:, :, mine], p) for w, p in zip(*results.values(), strict=True))
    is_equal = slowest(float(not is_equal)) == 0
    del results
    rows = []
    for kind, calls in kinds.items():
        with torch.set_grad_enabled(kind != "forward"):
            row = {"kind": kind, "tokens": tokens, "channels": channels, "bits": "equal" if is_equal else "DIFFER"}
            row["eager_ms"] = medians(calls, CALLS)
            if in_graphs:
                row["graph_ms"] = medians({who: captured(call) for who, call in calls.items()}, CALLS)
            rows.append(row)
        torch.cuda.empty_cache()
    return rows


def table(rows):
    lines = [
        "| | tokens | channels | | whole ms | parts ms | speed-up | apart ms | exchange | first ms | exchange | bits |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for r in rows:
        for how in ("graph", "eager"):
            if f"{how}_ms" not in r:
                continue
            whole, parts, apart, first = (r[f"{how}_ms"][who] for who in CONTESTANTS)
            lines.append(
                f"| {r['kind']} | {r['tokens']} | {r['channels']} | {how} | {whole:.3f} | {parts:.3f} "
                f"| {whole / parts:.2f} | {apart:.3f} | {parts / apart - 1:.1%} | {first:.3f} "
                f"| {first / apart - 1:.1%} | {r['bits']} |"
            )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--record", type=pathlib.Path, help="write context_parallel.json and .md there")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rows = [row for case in CASES for row in measure(*case, not args.eager)]
    if dist.get_rank() == 0:
        machine = {
            "device": torch.cuda.get_device_name(),
            "gpus": dist.get_world_size(),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
        text = f"# {machine}\n\n{provenance.sentence()}\n\n" + table(rows)
        print(text)
        if args.record:
            args.record.mkdir(parents=True, exist_ok=True)
            record = provenance.commit() | {"machine": machine, "rows": rows}
            provenance.write(args.record / "context_parallel.json", record)
            (args.record / "context_parallel.md").write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
