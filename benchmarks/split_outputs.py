"""Causal convolutions that write q, k and v apart, beside a convolution with a split behind it, on one GPU.

    python benchmarks/split_outputs.py [--sglang FILE] [--record DIRECTORY]

Tokens of bf16 lie one behind the other, as engines have them; width 4, SiLU, bias. `split` is one call of Windrow with
`split`; `behind` is Windrow's call without it, and a contiguous copy of each part behind it; `torch` is PyTorch's
convolution and these copies; `sglang` is SGLang's Triton kernel, from the file
sglang/kernels/ops/mamba/causal_conv1d_triton.py as it is, and these copies. `copy` moves the bytes that a prompt reads and writes. `fn` is
`windrow.torch.causal_conv1d_fn` for one prompt; `prompt` and `decode` are `windrow.sglang`'s functions, with a pool of
states. Times are medians of graph replays in turns, over tensors that rotate through more memory than the L2 cache
holds. With --record the figures are written as split_outputs.json and .md.
"""

import argparse
import pathlib
import statistics

import provenance
import torch
import torch.nn.functional as F
import windrow.sglang
from h200 import median_us, rotating
from serving import ROUNDS, WIDTH, decode, index, pool, triton_functions
from windrow.torch import causal_conv1d_fn

# q, k and v of gated delta nets: a quarter, a quarter and a half of the channels, or thirds.
SPLITS = {8192: [2048, 2048, 4096], 12288: [4096, 4096, 4096]}
TOKENS = [2048, 8192, 32768]
BATCHES = [1, 16, 64, 256]
LIKE = {"dtype": torch.bfloat16, "device": "cuda"}


def apart(y, split, dim):
    """The parts of a result, each in memory of its own in which channels are neighbours."""
    return [part.T.contiguous().T if dim == 0 else part.contiguous() for part in y.split(split, dim)]


def whole(dim, tokens):
    """One prompt without a state."""
    split, traffic = SPLITS[dim], 2 * 2 * dim * tokens
    xs = rotating((1, tokens, dim), torch.bfloat16, traffic)
    weight, bias, out = torch.randn(dim, WIDTH, **LIKE), torch.randn(dim, **LIKE), torch.empty_like(xs[0])
    ours = lambda i, **more: causal_conv1d_fn(xs[i].transpose(1, 2), weight, bias, activation="silu", **more)
    parts = lambda y: [part.contiguous().transpose(1, 2) for part in y.transpose(1, 2).split(split, 2)]

    def theirs(i):
        y = F.conv1d(xs[i].transpose(1, 2), weight[:, None], bias, padding=WIDTH - 1, groups=dim)
        return parts(F.silu(y[..., :tokens]))

    calls = {
        "split": lambda i: ours(i, split=split),
        "behind": lambda i: parts(ours(i)),
        "torch": theirs,
        "copy": lambda i: out.copy_(xs[i]),
    }
    return calls, len(xs), traffic


def prompt(dim, tokens, peers):
    """One prompt behind a state of a pool."""
    split, traffic = SPLITS[dim], 2 * 2 * dim * tokens
    xs = rotating((tokens, dim), torch.bfloat16, traffic)
    weight, bias, out = torch.randn(dim, WIDTH, **LIKE), torch.randn(dim, **LIKE), torch.empty_like(xs[0])
    first_states = pool(2, dim, WIDTH - 1, LIKE)
    more = {
        "query_start_loc": index([0, tokens], "cuda"),
        "cache_indices": index([1], "cuda"),
        "has_initial_state": torch.ones(1, dtype=torch.bool, device="cuda"),
        "seq_lens_cpu": [tokens],
    }

    def made(module, **extra):
        """A prompt moves its states on, so that each way has states of its own."""
        states = first_states.clone()
        return lambda i: module.causal_conv1d_fn(xs[i].T, weight, bias, states, **more, **extra)

    behind = lambda module: lambda i, call=made(module): apart(call(i), split, 0)
    calls = {
        "split": made(windrow.sglang, split=split),
        "behind": behind(windrow.sglang),
        "copy": lambda i: out.copy_(xs[i]),
    }
    calls |= {name: behind(module) for name, module in peers.items()}
    return calls, len(xs), traffic


def steps(dim, batch, peers):
    split = SPLITS[dim]
    make, turns, traffic, _ = decode(dim, batch, 0, LIKE, "sglang")

    class Split:
        causal_conv1d_update = staticmethod(
            lambda *args, **more: windrow.sglang.causal_conv1d_update(*args, **more, split=split)
        )

    behind = lambda module: lambda i, call=make(module): apart(call(i), split, 1)
    calls = {"split": make(Split), "behind": behind(windrow.sglang)}
    return calls | {name: behind(module) for name, module in peers.items()}, turns, traffic


def measure(case, dim, count, made):
    calls, turns, traffic = made
    results = {who: call(0) for who, call in calls.items()}
    for ours, theirs in zip(results["split"], results["behind"], strict=True):
        # A step moves its state on, so that the second call has another.
        assert case == "decode" or torch.equal(ours, theirs), "the parts differ"
    times = {who: [] for who in calls}
    for _ in range(ROUNDS):
        for who, call in calls.items():
            times[who].append(median_us(call, turns))
    row = {"case": case, "dim": dim, "count": count, "bytes": traffic}
    row |= {f"{who}_us": statistics.median(t) for who, t in times.items()}
    torch.cuda.empty_cache()
    return row


def table(rows):
    peers = [who for who in ("behind", "sglang", "torch") if any(f"{who}_us" in r for r in rows)]
    beside = " | ".join(f"{p} us | x" for p in peers)
    lines = [
        f"| case | channels | tokens or sequences | split us | GB/s | of a copy | {beside} |",
        "|---|--:|--:|--:|--:|--:|" + "--:|--:|" * len(peers),
    ]
    for r in rows:
        us = r["split_us"]
        share = f"{r['copy_us'] / us:.1%}" if "copy_us" in r else "-"
        of = [f"{r[f'{p}_us']:.2f} | {r[f'{p}_us'] / us:.2f}" if f"{p}_us" in r else "- | -" for p in peers]
        rate = r["bytes"] / us / 1000
        lines.append(
            f"| {r['case']} | {r['dim']} | {r['count']} | {us:.2f} | {rate:.0f} | {share} | {' | '.join(of)} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", type=pathlib.Path, help="its file")
    parser.add_argument("--record", type=pathlib.Path, help="write split_outputs.json and .md there")
    args = parser.parse_args()
    peers = {"sglang": triton_functions("sglang", args.sglang)} if args.sglang else {}
    rows = []
    for dim in SPLITS:
        for tokens in TOKENS:
            rows.append(measure("fn", dim, tokens, whole(dim, tokens)))
            rows.append(measure("prompt", dim, tokens, prompt(dim, tokens, peers)))
        for batch in BATCHES:
            rows.append(measure("decode", dim, batch, steps(dim, batch, peers)))
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if peers:
        import triton

        machine["triton"] = triton.__version__
    text = f"# {machine}\n\n{provenance.sentence()}\n\n" + table(rows)
    print(text)
    if args.record:
        args.record.mkdir(parents=True, exist_ok=True)
        whole_record = provenance.commit() | {"machine": machine, "rows": rows}
        provenance.write(args.record / "split_outputs.json", whole_record)
        (args.record / "split_outputs.md").write_text(text)


if __name__ == "__main__":
    main()
