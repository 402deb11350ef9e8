"""Causal convolutions as an engine calls them on a CUDA device: Windrow beside vLLM's Triton kernels.

    python benchmarks/serving.py [--vllm FILE] [--record DIRECTORY]

FILE is vLLM's vllm/model_executor/layers/mamba/ops/causal_conv1d.py, of which the kernels are taken as they are, with
stand-ins for what the file imports from vLLM; without it Windrow is measured alone. Both are called with the same
arguments, in turns; times are medians of graph replays over tensors that rotate through more memory than the L2 cache
holds. `host` is what a call of a decoding step costs in Python, without a graph. With --record the figures are
written as serving.json and .md.
"""

import argparse
import importlib.util
import json
import pathlib
import statistics
import sys
import time
from types import ModuleType, SimpleNamespace

import provenance
import torch
import windrow.vllm
from h200 import median_us, rotating

WIDTH, DTYPE = 4, torch.bfloat16
DIMS = [4096, 6144, 10240]
TOKENS, SEQUENCES = 8192, [1, 8, 64]
BATCHES, DRAFTS = [1, 64, 256], 4
ROUNDS = 3
# Tokens of a program of vLLM's kernel.
BLOCK_M = 8


def triton_functions(file):
    """vLLM's functions from that file alone."""
    import triton
    import triton.language as tl

    major, _ = torch.cuda.get_device_capability()
    platform = SimpleNamespace(is_cpu=lambda: False, is_arch_support_pdl=lambda: major >= 9)
    contents = {
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
    }
    for name, content in contents.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            package = sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
            package.__path__ = []
        sys.modules[name].__dict__.update(content)
    spec = importlib.util.spec_from_file_location("vllm_causal_conv1d", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def lengths_of(sequences):
    """Mixed lengths, the same in every run."""
    weights = torch.rand(sequences, generator=torch.Generator().manual_seed(0)) + 0.1
    ends = (weights.cumsum(0) / weights.sum() * TOKENS).round().int()
    ends[-1] = TOKENS
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


def metadata_of(lengths):
    """What vLLM makes on the host before a step: which program has which piece of which sequence."""
    pieces = [-(-n // BLOCK_M) for n in lengths]
    batch = [i for i, n in enumerate(pieces) for _ in range(n)]
    offsets = [k for n in pieces for k in range(n)]
    pointers = [torch.tensor(v, dtype=torch.int32, device="cuda") for v in (batch, offsets)]
    numbers = {
        "tot": len(batch),
        "mlist": pointers[0],
        "mlist_len": len(batch),
        "offsetlist": pointers[1],
        "batch_ptr": pointers[0],
        "token_chunk_offset_ptr": pointers[1],
    }
    return SimpleNamespace(
        nums_dict={BLOCK_M: numbers}, batch_ptr=pointers[0], token_chunk_offset_ptr=pointers[1]
    )


def pool(states, dim, columns):
    return torch.randn(states, columns, dim, device="cuda").to(DTYPE).transpose(1, 2)


def index(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def prefill(dim, sequences):
    """For each contestant a call of one of so many turns."""
    lengths = lengths_of(sequences)
    traffic = 2 * DTYPE.itemsize * dim * TOKENS
    xs = rotating((TOKENS, dim), DTYPE, traffic)
    weight, bias = torch.randn(dim, WIDTH, device="cuda").to(DTYPE), torch.randn(dim, device="cuda").to(DTYPE)
    states = pool(sequences + 1, dim, WIDTH - 1)
    more = {
        "query_start_loc": index([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        "cache_indices": index(range(1, sequences + 1)),
        "has_initial_state": torch.arange(sequences, device="cuda") % 2 == 0,
        "activation": "silu",
        "metadata": metadata_of(lengths),
    }
    call = lambda module: lambda i: module.causal_conv1d_fn(xs[i].T, weight, bias, conv_states=states, **more)
    out = torch.empty_like(xs[0])
    return call, len(xs), traffic, lambda i: out.copy_(xs[i])


def decode(dim, batch, drafts):
    columns = WIDTH - 1 + max(drafts - 1, 0)
    traffic = DTYPE.itemsize * dim * batch * (2 * columns + 2 * max(drafts, 1))
    turns = min(48, max(1, (300 << 20) // traffic)) + 1
    states = pool(batch * turns + 1, dim, columns)
    weight, bias = torch.randn(dim, WIDTH, device="cuda").to(DTYPE), torch.randn(dim, device="cuda").to(DTYPE)
    tokens = batch * max(drafts, 1)
    xs = [torch.randn(tokens, dim, device="cuda").to(DTYPE) for _ in range(turns)]
    order = torch.randperm(batch * turns, device="cuda", dtype=torch.int32) + 1
    indices = list(order.split(batch))
    more = {"activation": "silu"}
    if drafts:
        more["num_accepted_tokens"] = torch.randint(1, drafts + 1, (batch,), dtype=torch.int32, device="cuda")
        more["query_start_loc"] = index(range(0, tokens + 1, drafts))
        more["max_query_len"] = drafts
    call = lambda module: lambda i: module.causal_conv1d_update(
        xs[i], states, weight, bias, conv_state_indices=indices[i], **more
    )
    return call, turns, traffic, None


def host_us(call):
    """Wall time of a call that is only queued."""
    for _ in range(20):
        call(0)
    torch.cuda.synchronize()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(50):
            call(0)
        times.append((time.perf_counter() - start) * 1e6 / 50)
        torch.cuda.synchronize()
    return statistics.median(times)


def measure(name, dim, count, case, contestants, host):
    make, turns, traffic, copy = case
    calls = {who: make(module) for who, module in contestants.items()}
    if copy:
        calls["copy"] = copy
    times = {who: [] for who in calls}
    for _ in range(ROUNDS):
        for who, call in calls.items():
            times[who].append(median_us(call, turns))
    row = {"case": name, "dim": dim, "count": count, "bytes": traffic}
    row |= {f"{who}_us": statistics.median(t) for who, t in times.items()}
    if host:
        row |= {f"{who}_host_us": host_us(calls[who]) for who in contestants}
    torch.cuda.empty_cache()
    return row


def table(rows):
    lines = [
        "| case | dim | sequences | us | GB/s | of a copy | vLLM us | speed-up | host us | vLLM host us |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        us, copy, vllm = r["windrow_us"], r.get("copy_us"), r.get("vllm_us")
        number = lambda key: f"{r[key]:.1f}" if key in r else "-"
        lines.append(
            f"| {r['case']} | {r['dim']} | {r['count']} | {us:.2f} | {r['bytes'] / us / 1000:.0f} "
            f"| {f'{copy / us:.1%}' if copy else '-'} | {f'{vllm:.2f}' if vllm else '-'} "
            f"| {f'{vllm / us:.2f}' if vllm else '-'} | {number('windrow_host_us')} | {number('vllm_host_us')} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=pathlib.Path, help="vLLM's causal_conv1d.py")
    parser.add_argument("--record", type=pathlib.Path, help="write serving.json and .md there")
    args = parser.parse_args()
    contestants = {"windrow": windrow.vllm}
    if args.vllm:
        contestants["vllm"] = triton_functions(args.vllm)
    rows = []
    for dim in DIMS:
        for sequences in SEQUENCES:
            rows.append(measure("prefill", dim, sequences, prefill(dim, sequences), contestants, False))
        for batch in BATCHES:
            rows.append(measure("decode", dim, batch, decode(dim, batch, 0), contestants, dim == DIMS[0]))
            rows.append(measure("drafts", dim, batch, decode(dim, batch, DRAFTS), contestants, False))
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if args.vllm:
        import triton

        machine["triton"] = triton.__version__
    text = f"# {machine}\n\n{provenance.sentence()}\n\n" + table(rows)
    print(text)
    if args.record:
        args.record.mkdir(parents=True, exist_ok=True)
        whole = provenance.commit() | {"machine": machine, "rows": rows}
        (args.record / "serving.json").write_text(json.dumps(whole, indent=1) + "\n")
        (args.record / "serving.md").write_text(text)


if __name__ == "__main__":
    main()
