"""The interpreter's time for a call of a compiled network: torch.compile beside `backend="windrow"` and `optimize`.

    python benchmarks/host_time.py --device cuda:0|cpu [--profile] OUT.json

A network of 32 small convolutions with normalisations, additions and activations gets tiny images, so that what is timed
is everything but the arithmetic. Times are in microseconds. On CUDA `call` is the time until a call returns, after which
the device still computes: the median of calls that each start on an idle device, and `least` of these. `in a row`: of
many calls that follow each other, until the device has finished, for each call. The network's parameters are ordinary
ones, or such as `torch.inference_mode()` makes, which do not count writes. `--profile` also prints where the time goes.
Needs `windrow` on PYTHONPATH.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import provenance
import torch
import windrow.torch
from torch import Tensor, nn
from windrow.torch.backend import windrow as backend

CHANNELS, SIZE, BLOCKS = 8, 8, 16
CALLS, IN_A_ROW = 200, 20
# Calls in which a graph is compiled, checked, and it is decided who computes a layer.
WARM_UP = 8
MODES = {"f32": (torch.float32, torch.contiguous_format), "bf16 channels-last": (torch.bfloat16, torch.channels_last)}
Way = Callable[[nn.Module], Callable[[Tensor], Tensor]]
WAYS: dict[str, Way] = {
    "PyTorch": lambda model: model,
    "torch.compile": torch.compile,
    "backend": lambda model: torch.compile(model, backend=backend),
    "backend, freeze=False": lambda model: torch.compile(model, backend=backend, options={"freeze": False}),
    "backend, rest=eager": lambda model: torch.compile(model, backend=backend, options={"rest": "eager"}),
    "optimize": windrow.torch.optimize,
    "optimize, rest=inductor": lambda model: windrow.torch.optimize(model, rest="inductor"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2))
        self.first_norm, self.second_norm = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.first_norm(self.first(x)))
        return self.activation(self.second_norm(self.second(y)) + x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu or cuda:N")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    options = parser.parse_args()
    device = options.device
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else provenance.cpu()
    rows = []
    for mode in MODES if device.type == "cuda" else ["f32"]:
        for of_inference_mode in (False, True):
            for way in WAYS:
                row = {"way": way, "mode": mode, "parameters of inference_mode": of_inference_mode}
                rows.append(row | measured(WAYS[way], mode, of_inference_mode, device, options.profile))
                print(rows[-1], flush=True)
                record = {**provenance.commit(), "device": name, "torch": torch.__version__, "rows": rows}
                provenance.write(options.out, record)


def measured(way: Way, mode: str, of_inference_mode: bool, device: torch.device, is_profiled: bool) -> dict[str, Any]:
    torch.compiler.reset()
    windrow.torch.forget()
    torch.manual_seed(0)
    dtype, memory_format = MODES[mode]
    with torch.inference_mode(of_inference_mode):
        model = nn.Sequential(*(Block() for _ in range(BLOCKS))).eval().requires_grad_(False)
        model = model.to(device, dtype, memory_format=memory_format)
    x = torch.randn(1, CHANNELS, SIZE, SIZE, device=device).to(dtype, memory_format=memory_format)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with torch.inference_mode():
        call = way(model)
        for _ in range(WARM_UP):
            call(x)
        alone = [timed(lambda: call(x), wait) for _ in range(CALLS)]
        in_a_row = statistics.median(timed(lambda: repeated(call, x, wait), wait) for _ in range(CALLS // IN_A_ROW)) / IN_A_ROW
        if is_profiled:
            profiled(call, x, wait)
    who: dict[str, int] = {}
    for decision in windrow.torch.decisions():
        who[decision.choice] = who.get(decision.choice, 0) + 1
    times = {"call": round(statistics.median(alone), 1), "least": round(min(alone), 1)}
    return times | {"in a row": round(in_a_row, 1), "kinds of layers by": who}


def timed(run: Callable[[], object], wait: Callable[[], object]) -> float:
    """Microseconds."""
    wait()
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def repeated(call: Callable[[Tensor], Tensor], x: Tensor, wait: Callable[[], object]) -> None:
    for _ in range(IN_A_ROW):
        call(x)
    wait()


def profiled(call: Callable[[Tensor], Tensor], x: Tensor, wait: Callable[[], object]) -> None:
    profile = cProfile.Profile()
    for _ in range(CALLS):
        wait()
        profile.runcall(call, x)
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
