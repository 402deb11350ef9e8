"""Causal convolutions that divide q and k by the L2 norm of their heads, beside a norm behind them, on one GPU.

    python benchmarks/head_norm.py [--record DIRECTORY]

q, k and v of bf16 are apart (`split_outputs.py` measures this); width 4, SiLU, bias, heads of 128 channels. `inside` is
one call of Windrow with `norm_head`; `behind` is its call without it, and a Triton kernel of the norm for q and one for
k, as gated delta nets have it; `without` has no norm. `copy` moves the bytes that a prompt reads and writes. `fn` is
`windrow.torch.causal_conv1d_fn` for one prompt; `prompt` and `decode` are `windrow.sglang`'s functions, with a pool of
states. Times are medians of graph replays in turns, over tensors that rotate through more memory than the L2 cache
holds. With --record the figures are written as head_norm.json and .md.
"""

import argparse
import pathlib
import statistics

import provenance
import torch
import triton
import triton.language as tl
import windrow.sglang
from h200 import median_us, rotating
from serving import WIDTH, decode, index, pool
from windrow.torch import causal_conv1d_fn

DIM, SPLIT, HEAD, EPS = 8192, [2048, 2048, 4096], 128, 1e-6
TOKENS = [2048, 8192, 32768]
BATCHES = [1, 16, 64, 256]
ROUNDS = 3
LIKE = {"dtype": torch.bfloat16, "device": "cuda"}
NORM = {"norm_head": HEAD, "norm_eps": EPS}


@triton.jit
def norm_kernel(x, y, rows, eps, HEAD: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * HEAD + tl.arange(0, HEAD)[None, :]
    inside = (row < rows)[:, None]
    head = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(head * head, 1) + eps)
    tl.store(y + at, (head * factor[:, None]).to(y.dtype.element_ty), mask=inside)


def divided(y):
    """The result of the norm behind the convolution, of tensors whose channels are neighbours."""
    rows, out = y.numel() // HEAD, torch.empty_like(y)
    norm_kernel[(triton.cdiv(rows, 16),)](y, out, rows, EPS, HEAD, 16, num_warps=4)
    return out


def behind(ys):
    return [divided(ys[0]), divided(ys[1]), ys[2]]


def three(call):
    """The contestants of a call that takes options."""
    return {
        "inside": lambda i: call(i, **NORM),
        "behind": lambda i: behind(call(i)),
        "without": call,
    }


def whole(tokens):
    traffic = 2 * 2 * DIM * tokens
    xs = rotating((1, tokens, DIM), torch.bfloat16, traffic)
    weight, bias, out = torch.randn(DIM, WIDTH, **LIKE), torch.randn(DIM, **LIKE), torch.empty_like(xs[0])
    options = {"activation": "silu", "split": SPLIT}
    call = lambda i, **more: causal_conv1d_fn(xs[i].transpose(1, 2), weight, bias, **options, **more)
    return three(call) | {"copy": lambda i: out.copy_(xs[i])}, len(xs), traffic


def prompt(tokens):
    traffic = 2 * 2 * DIM * tokens
    xs = rotating((tokens, DIM), torch.bfloat16, traffic)
    weight, bias, out = torch.randn(DIM, WIDTH, **LIKE), torch.randn(DIM, **LIKE), torch.empty_like(xs[0])
    states = pool(2, DIM, WIDTH - 1, LIKE)
    options = {"query_start_loc": index([0, tokens], "cuda"), "cache_indices": index([1], "cuda"), "split": SPLIT}
    # Without a state each call gives the same.
    options["has_initial_state"] = torch.zeros(1, dtype=torch.bool, device="cuda")
    call = lambda i, **more: windrow.sglang.causal_conv1d_fn(xs[i].T, weight, bias, states, **options, **more)
    return three(call) | {"copy": lambda i: out.copy_(xs[i])}, len(xs), traffic


def steps(batch):
    make, turns, traffic, _ = decode(DIM, batch, 0, LIKE, "sglang")

    def ours(**norm):
        class Module:
            causal_conv1d_update = staticmethod(
                lambda *args, **more: windrow.sglang.causal_conv1d_update(*args, **more, split=SPLIT, **norm)
            )

        return make(Module)

    without = ours()
    return {"inside": ours(**NORM), "behind": lambda i: behind(without(i)), "without": without}, turns, traffic


def measure(case, count, made):
    calls, turns, traffic = made
    if case != "decode":  # A step moves its state on, so that the second call has another.
        for ours, theirs in zip(calls["inside"](0), calls["behind"](0), strict=True):
            # Both round once to bf16, from a factor with other roundings of f32.
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6)
    times = {who: [] for who in calls}
    for _ in range(ROUNDS):
        for who, call in calls.items():
            times[who].append(median_us(call, turns))
    row = {"case": case, "dim": DIM, "count": count, "bytes": traffic}
    row |= {f"{who}_us": statistics.median(t) for who, t in times.items()}
    torch.cuda.empty_cache()
    return row


def table(rows):
    lines = [
        "| case | channels | tokens or sequences | inside us | of a copy | behind us | x | without us |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        us, behind_us = r["inside_us"], r["behind_us"]
        share = f"{r['copy_us'] / us:.1%}" if "copy_us" in r else "-"
        times = f"{us:.2f} | {share} | {behind_us:.2f} | {behind_us / us:.2f} | {r['without_us']:.2f}"
        lines.append(f"| {r['case']} | {r['dim']} | {r['count']} | {times} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=pathlib.Path, help="write head_norm.json and .md there")
    args = parser.parse_args()
    rows = [measure(case.__name__.replace("whole", "fn"), n, case(n)) for n in TOKENS for case in (whole, prompt)]
    rows += [measure("decode", n, steps(n)) for n in BATCHES]
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    text = f"# {machine}\n\n{provenance.sentence()}\n\n" + table(rows)
    print(text)
    if args.record:
        args.record.mkdir(parents=True, exist_ok=True)
        provenance.write(args.record / "head_norm.json", provenance.commit() | {"machine": machine, "rows": rows})
        (args.record / "head_norm.md").write_text(text)


if __name__ == "__main__":
    main()
