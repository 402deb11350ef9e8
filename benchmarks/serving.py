"""Causal convolutions as an engine calls them: Windrow beside engines' Triton kernels, or beside PyTorch on the CPU.

    python benchmarks/serving.py [--vllm FILE] [--sglang FILE] [--record DIRECTORY]
    python benchmarks/serving.py --cpu [--threads 2] [--vllm LIBRARY] [--record DIRECTORY]

The files are vLLM's vllm/model_executor/layers/mamba/ops/causal_conv1d.py and SGLang's
sglang/kernels/ops/mamba/causal_conv1d_triton.py, of which the kernels are taken as they are, with stand-ins for what
they import; without them Windrow is measured alone. Both are called with the same arguments, in turns; times are
medians of graph replays over tensors that rotate through more memory than the L2 cache holds. `host` is what a call of
a decoding step costs in Python, without a graph. The drafts of SGLang are rows of tokens whose windows are kept.

On the CPU the other side is `torch.nn.functional.conv1d`, called for each sequence of a prompt, and once for a step of
decoding, and vLLM's own kernels, which are SGLang's as well, from a library that engines/vllm_cpu.cpp tells how to make;
times are medians of calls. With --record the figures are written as serving.json and .md.
"""

import argparse
import importlib.util
import itertools
import pathlib
import statistics
import sys
import time
from types import ModuleType, SimpleNamespace

import provenance
import torch
import torch.nn.functional as F
import windrow.sglang
import windrow.vllm
from h200 import median_us, rotating

WIDTH = 4
DIMS = [4096, 6144, 10240]
TOKENS, SEQUENCES = 8192, [1, 8, 64]
BATCHES, DRAFTS = [1, 64, 256], 4
ROUNDS = 3
FUNCTIONS = {"vllm": windrow.vllm, "sglang": windrow.sglang}
# Tokens of a program of vLLM's kernel.
BLOCK_M = 8


def stand_ins():
    """What the files import."""
    import triton
    import triton.language as tl

    major, _ = torch.cuda.get_device_capability()
    has_pdl = lambda: major >= 9
    return {
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False, is_arch_support_pdl=has_pdl)},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": has_pdl},
    }


def triton_functions(engine, file):
    """The engine's functions from that file alone."""
    for name, content in stand_ins().items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            package = sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
            package.__path__ = []
        sys.modules[name].__dict__.update(content)
    spec = importlib.util.spec_from_file_location(f"{engine}_causal_conv1d", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class PerSequence:
    """PyTorch's convolution with the arguments that are measured here."""

    @staticmethod
    def causal_conv1d_fn(
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation, metadata
    ):
        y, starts = torch.empty_like(x), query_start_loc.tolist()
        for i, (state, has) in enumerate(zip(cache_indices.tolist(), has_initial_state.tolist())):
            start, end = starts[i : i + 2]
            window = conv_states[state] if has else torch.zeros_like(conv_states[state])
            tokens = torch.cat([window, x[:, start:end]], 1)
            y[:, start:end] = F.silu(F.conv1d(tokens[None], weight[:, None], bias, groups=len(weight))[0])
            conv_states[state] = tokens[:, 1 - WIDTH :]
        return y

    @staticmethod
    def causal_conv1d_update(x, conv_state, weight, bias, activation, conv_state_indices):
        indices = conv_state_indices.long()
        tokens = torch.cat([conv_state[indices], x[:, :, None]], 2)
        conv_state[indices] = tokens[:, :, 1:]
        return F.silu(F.conv1d(tokens, weight[:, None], bias, groups=len(weight)))[:, :, 0]


class Compiled:
    """vLLM's kernels for the CPU: those of halves want a packed weight, which is kept as vLLM keeps it."""

    def __init__(self, library):
        torch.ops.load_library(library)
        self.ops, self.packed = torch.ops.vllm_cpu, {}

    def pack(self, weight):
        if weight not in self.packed:
            self.packed = {weight: self.ops.causal_conv1d_weight_pack(weight)}
        return self.packed[weight]

    def causal_conv1d_fn(
        self, x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation, metadata
    ):
        which = (conv_states, query_start_loc, cache_indices, has_initial_state)
        return self.ops.causal_conv1d_fwd_cpu(x, self.pack(weight), bias, *which, activation == "silu", -1, True)

    def causal_conv1d_update(self, x, conv_state, weight, bias, activation, conv_state_indices):
        if x.dtype is torch.float32:
            where = (conv_state_indices, None, -1)
            return self.ops.causal_conv1d_update_cpu_vec(x, conv_state, weight, bias, activation, *where)
        how = (activation == "silu", None, conv_state_indices, -1, True)
        return self.ops.causal_conv1d_update_cpu(x, conv_state, self.pack(weight), bias, *how)


def cpu_us(call, turns):
    """Median microseconds of call(turn)."""
    times = []
    for i in range(turns):
        start = time.perf_counter()
        call(i % turns)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def lengths_of(sequences):
    """Mixed lengths, the same in every run."""
    weights = torch.rand(sequences, generator=torch.Generator().manual_seed(0)) + 0.1
    ends = (weights.cumsum(0) / weights.sum() * TOKENS).round().int()
    ends[-1] = TOKENS
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


def metadata_of(lengths, device):
    """What vLLM makes on the host before a step: which program has which piece of which sequence."""
    pieces = [-(-n // BLOCK_M) for n in lengths]
    batch = [i for i, n in enumerate(pieces) for _ in range(n)]
    offsets = [k for n in pieces for k in range(n)]
    pointers = [index(v, device) for v in (batch, offsets)]
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


def filled(*shape, dtype, device):
    """Numbers, which on the CPU are made faster where they are all the same."""
    make = torch.ones if device == "cpu" else torch.randn
    return make(*shape, dtype=dtype, device=device)


def pool(states, dim, columns, like):
    return filled(states, columns, dim, **like).transpose(1, 2)


def index(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def prefill(dim, sequences, like, engine):
    """For each contestant a call of one of so many turns."""
    lengths, device = lengths_of(sequences), like["device"]
    traffic = 2 * like["dtype"].itemsize * dim * TOKENS
    on_cpu = device == "cpu"
    # A prompt is larger than the CPU's caches.
    xs = [filled(TOKENS, dim, **like)] if on_cpu else rotating((TOKENS, dim), like["dtype"], traffic)
    weight, bias = torch.randn(dim, WIDTH, **like), torch.randn(dim, **like)
    states = pool(sequences + 1, dim, WIDTH - 1, like)
    more = {
        "query_start_loc": index([0, *torch.tensor(lengths).cumsum(0).tolist()], device),
        "cache_indices": index(range(1, sequences + 1), device),
        "has_initial_state": torch.arange(sequences, device=device) % 2 == 0,
        "activation": "silu",
    }
    more |= {"seq_lens_cpu": lengths} if engine == "sglang" else {"metadata": metadata_of(lengths, device)}
    call = lambda module: lambda i: module.causal_conv1d_fn(xs[i].T, weight, bias, conv_states=states, **more)
    out = torch.empty_like(xs[0])
    return call, len(xs), traffic, lambda i: out.copy_(xs[i])


def decode(dim, batch, drafts, like, engine):
    device, dtype = like["device"], like["dtype"]
    windows = drafts if engine == "sglang" else 0
    # Read and written of a state and the tokens, and windows written.
    columns = WIDTH - 1 + (0 if windows else max(drafts - 1, 0))
    traffic = dtype.itemsize * dim * batch * (2 * columns + 2 * max(drafts, 1) + windows * (WIDTH - 1))
    turns = min(48, max(1, (300 << 20) // traffic)) + 1
    states = pool(batch * turns + 1, dim, columns, like)
    weight, bias = torch.randn(dim, WIDTH, **like), torch.randn(dim, **like)
    tokens = batch * max(drafts, 1)
    xs = [filled(tokens, dim, **like) for _ in range(turns)]
    order = torch.randperm(batch * turns, device=device, dtype=torch.int32) + 1
    indices = list(order.split(batch))
    more = {"activation": "silu"}
    if windows:
        xs = [x.view(batch, drafts, dim).transpose(1, 2) for x in xs]
        more["intermediate_conv_window"] = filled(batch, drafts, dim, WIDTH - 1, **like)
        more["intermediate_state_indices"] = index(range(batch), device)
    elif drafts:
        more["num_accepted_tokens"] = torch.randint(1, drafts + 1, (batch,), dtype=torch.int32, device=device)
        more["query_start_loc"] = index(range(0, tokens + 1, drafts), device)
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


def measure(name, dim, count, like, case, contestants, host=False):
    make, turns, traffic, copy = case
    calls = {who: make(module) for who, module in contestants.items()}
    if copy:
        calls["copy"] = copy
    on_cpu = like["device"] == "cpu"
    for call in calls.values():
        # Plans are made, and memory is touched.
        call(0)
    clock = cpu_us if on_cpu else median_us
    times = {who: [] for who in calls}
    for _ in range(ROUNDS):
        for who, call in calls.items():
            times[who].append(clock(call, turns))
    dtype = str(like["dtype"]).removeprefix("torch.")
    row = {"case": name, "dtype": dtype, "dim": dim, "count": count, "bytes": traffic}
    row |= {f"{who}_us": statistics.median(t) for who, t in times.items()}
    if host:
        row |= {f"{who}_host_us": host_us(calls[who]) for who in contestants}
    if not on_cpu:
        torch.cuda.empty_cache()
    return row


def table(rows):
    lines = [
        "| beside | case | type | dim | sequences | us | GB/s | of a copy | its us | speed-up | host us | its host us |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        other = r["beside"]
        us, copy, theirs = r["windrow_us"], r.get("copy_us"), r.get(f"{other}_us")
        number = lambda key: f"{r[key]:.1f}" if key in r else "-"
        lines.append(
            f"| {other} | {r['case']} | {r['dtype']} | {r['dim']} | {r['count']} | {us:.2f} "
            f"| {r['bytes'] / us / 1000:.0f} | {f'{copy / us:.1%}' if copy else '-'} "
            f"| {f'{theirs:.2f}' if theirs else '-'} | {f'{theirs / us:.2f}' if theirs else '-'} "
            f"| {number('windrow_host_us')} | {number(f'{other}_host_us')} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for engine in FUNCTIONS:
        parser.add_argument(f"--{engine}", type=pathlib.Path, help="its file, or with --cpu its library")
    parser.add_argument("--cpu", action="store_true", help="on the CPU beside PyTorch")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--record", type=pathlib.Path, help="write serving.json and .md there")
    args = parser.parse_args()
    device, dtypes, engines = "cuda", [torch.bfloat16], {e: {"windrow": f} for e, f in FUNCTIONS.items()}
    if args.cpu:
        torch.set_num_threads(args.threads)
        engines = {"torch": {"windrow": windrow.vllm, "torch": PerSequence}}
        if args.vllm:
            engines["vllm"] = {"windrow": windrow.vllm, "vllm": Compiled(args.vllm)}
        device, dtypes = "cpu", [torch.bfloat16, torch.float32]
    else:
        for engine in FUNCTIONS:
            if file := getattr(args, engine):
                engines[engine][engine] = triton_functions(engine, file)
    rows = []
    for dtype, dim, (engine, contestants) in itertools.product(dtypes, DIMS, engines.items()):
        like = {"dtype": dtype, "device": device}
        ask = lambda name, n, case, host=False: rows.append(
            {"beside": engine} | measure(name, dim, n, like, case, contestants, host)
        )
        # vLLM's kernels for the CPU take prompts in halves alone.
        is_missing = args.cpu and engine == "vllm" and dtype is torch.float32
        for n in [] if is_missing else SEQUENCES:
            ask("prefill", n, prefill(dim, n, like, engine))
        for n in BATCHES:
            ask("decode", n, decode(dim, n, 0, like, engine), dim == DIMS[0] and not args.cpu)
            if not args.cpu:
                ask("drafts", n, decode(dim, n, DRAFTS, like, engine))
    if args.cpu:
        machine = {"device": provenance.cpu(), "threads": args.threads, "torch": torch.__version__}
    else:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if not args.cpu and (args.vllm or args.sglang):
        import triton

        machine["triton"] = triton.__version__
    text = f"# {machine}\n\n{provenance.sentence()}\n\n" + table(rows)
    print(text)
    if args.record:
        args.record.mkdir(parents=True, exist_ok=True)
        whole = provenance.commit() | {"machine": machine, "rows": rows}
        provenance.write(args.record / "serving.json", whole)
        (args.record / "serving.md").write_text(text)


if __name__ == "__main__":
    main()
