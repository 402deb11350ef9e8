"""The decoders of `video_decoders.py` in the size that people use, on a GPU: times, peak memory, errors, and who computed.

Each way has a process of its own. PyTorch's is first; the others get its result in f64, of weights and latents that are
rounded as those of the mode.
"""

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memory
import torch
import windrow.torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from windrow.torch.backend import windrow as backend

# The latents of 17 frames of 480x832, of an image of 1024x1024, and of 17 frames of 256x256.
LATENTS = {
    "AutoencoderKLWan": (1, 16, 5, 60, 104),
    "AutoencoderKLQwenImage": (1, 16, 1, 128, 128),
    "AutoencoderKLHunyuanVideo": (1, 16, 5, 32, 32),
}
# What is not the class's default, which diffusers 0.36 cannot make: it adds a tuple to a list.
CONFIGURATIONS: dict[str, dict[str, Any]] = {"AutoencoderKLQwenImage": {"dim_mult": [1, 2, 4, 4]}}
MODES = {"f32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
PYTORCH, COMPILED = "PyTorch", "torch.compile"
# A second process is no faster than the first where it compiles, so the slowest ways come last.
WAYS = (PYTORCH, "patch", "optimize", "backend", COMPILED)
CALLS, WARM_UP = 5, 3
KERNELS = 12


class Told:
    """A report of compiled graphs: what became of how many convolutions."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def fused(self, name: str, what: str) -> None:
        self.counts["taken"] += 1

    def left(self, name: str, why: str) -> None:
        self.counts[why[:80]] += 1


def measured(name: str, mode: str, ways: list[str], device: torch.device, small: bool) -> dict[str, Any]:
    """All ways of one decoder."""
    case: dict[str, Any] = {"decoder": name, "mode": mode, "latents": [*latents(name, small)]}
    with tempfile.TemporaryDirectory() as folder:
        for way in ways:
            arguments = [name, mode, way, str(device), str(int(small)), str(Path(folder) / "expected.pt")]
            run = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
            last = run.stdout.strip().rpartition("\n")[2]
            case[way] = json.loads(last) if run.returncode == 0 else {"raised": f"status {run.returncode}: {last[:300]}"}
            for of in ("ms", "peak MiB", "error"):
                if of in case[way] and of in case.get(PYTORCH, {}):
                    case[way][f"{of} / PyTorch's"] = round(case[way][of] / case[PYTORCH][of], 3)
            print(name, mode, way, case[way], flush=True)
    return case


def latents(name: str, small: bool) -> tuple[int, ...]:
    n, c, t, h, w = LATENTS[name]
    return (n, c, min(t, 3), h // 8, w // 8) if small else (n, c, t, h, w)


def main(name: str, mode: str, way: str, device: str, small: str, expected: str) -> None:
    """One way. Prints what was found in its last line."""
    import diffusers

    on, dtype = torch.device(device), MODES[mode]
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
    # Copies of a decoder share their code, of which more than eight kinds would run uncompiled.
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**CONFIGURATIONS.get(name, {})).eval().requires_grad_(False).to(on, dtype)
    model.encoder = nn.Identity()
    model.use_framewise_decoding = False
    z = torch.randn(latents(name, bool(int(small))), generator=torch.Generator().manual_seed(1)).to(on, dtype)
    if way == PYTORCH:
        torch.save(decoded(model.double(), z.double()).cpu(), expected)
        model.to(dtype)
    told = Told()
    start = time.perf_counter()
    _MADE[way](model, told)
    with torch.inference_mode():
        y = decoded(model, z)
        seconds = time.perf_counter() - start
        for _ in range(WARM_UP - 1):
            decoded(model, z)
        found: dict[str, Any] = {"ms": timed(lambda: decoded(model, z), on), "first call s": round(seconds, 1)}
        found["error"] = error(decoded(model, z), torch.load(expected))
        del y
        found |= peak(lambda: decoded(model, z), on)
        found |= {"convolutions": sum(isinstance(m, nn.Conv3d | nn.Conv2d) for m in model.decoder.modules())}
        found |= {"left": dict(told.counts), "problems by": who(), "kernels ms": kernels(lambda: decoded(model, z), on)}
    print(json.dumps(found))


def decoded(model: Any, z: Tensor) -> Tensor:
    return model.decode(z, return_dict=False)[0]


def timed(call: Callable[[], object], device: torch.device) -> float:
    """The median of calls in ms, each until the device has finished."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for _ in range(CALLS):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(times), 2)


def peak(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """The most memory during a call, with the weights: PyTorch's, and Windrow's packed filters. Nothing on a CPU."""
    if device.type != "cuda":
        return {}
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    memory._of_the_pool(device)
    call()
    torch.cuda.synchronize(device)
    return {"peak MiB": round((torch.cuda.max_memory_allocated(device) + memory._of_the_pool(device)) / 2**20, 1)}


def error(got: Tensor, want: Tensor) -> float:
    """Relative to the norm, in parts, since both in f64 may not fit beside each other."""
    parts = [(g.double().cpu(), w) for g, w in zip(got.split(1, 2), want.split(1, 2), strict=True)]
    off = sum(float((g - w).square().sum()) for g, w in parts)
    return float(f"{(off / sum(float(w.square().sum()) for _, w in parts)) ** 0.5:.4g}")


def who() -> dict[str, int]:
    return dict(Counter(decision.choice for decision in windrow.torch.decisions()))


def kernels(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """The device's time by kernel, the longest first."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize(device)
    times = {event.key[:100]: event.device_time_total / 1e3 for event in found.key_averages()}
    longest = sorted(times, key=times.__getitem__, reverse=True)[:KERNELS]
    return {"all": round(sum(times.values()), 2)} | {name: round(times[name], 2) for name in longest}


def _patched(model: Any, told: Told) -> None:
    report = windrow.torch.patch(model.decoder)
    told.counts["swapped"] = len(report.swapped)
    told.counts.update(why.partition(":")[0][:80] for why in report.left.values())


def _optimized(model: Any, told: Told) -> None:
    model.decoder = windrow.torch.optimize(model.decoder)


def _by_backend(model: Any, told: Told) -> None:
    model.decoder = torch.compile(model.decoder, backend=backend, dynamic=False, options={"report": told})


def _compiled(model: Any, told: Told) -> None:
    model.decoder = torch.compile(model.decoder, dynamic=False)


_MADE: dict[str, Callable[[Any, Told], None]] = {
    PYTORCH: lambda model, told: None,
    "patch": _patched,
    "optimize": _optimized,
    "backend": _by_backend,
    COMPILED: _compiled,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
