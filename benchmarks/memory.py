"""Peak memory of a network: its weights, its input, and its fourth pass or step of training, after the trials by which
libraries choose algorithms; Windrow's end with the third.

On CUDA it is what PyTorch's allocator gave out, and what Windrow took from the driver's pool beside that:
packed filters. On a CPU it is the resident memory. Only a process of its own can tell: in one that ran other
networks before, a model finds more room.

    python benchmarks/memory.py DEVICE NAME MODE BATCH pytorch|windrow|optimized infer|train [ACCURACY]
"""

import ctypes
import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import networks
import torch
from contestants import MODES, Case, original


def peak(device: torch.device, title: str, side: str, kind: str) -> int:
    """As this file's `main` finds it in a process of its own, for a case of this title."""
    name, mode, *accuracy, batch = title.split()
    arguments = [str(device), name, mode, batch, side, kind, *accuracy]
    command = [sys.executable, __file__, *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def _of_the_pool(device: torch.device) -> int:
    """The most that was in use of the driver's memory pool since the last call."""
    cuda, pool, most = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
    used_mem_high = 8
    for status in (
        cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), device.index or 0),
        cuda.cuMemPoolGetAttribute(pool, used_mem_high, ctypes.byref(most)),
        cuda.cuMemPoolSetAttribute(pool, used_mem_high, ctypes.byref(ctypes.c_uint64(0))),
    ):
        if status != 0:
            raise RuntimeError(f"CUDA error {status} of the memory pool")
    return most.value


def resident(field: str) -> int:
    """Bytes of this process, as its status names them."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s*(\d+) kB", status)[1])


def main(
    device: str, name: str, mode: str, batch: str, side: str, kind: str, accuracy: str | None = None
) -> None:
    on = torch.device(device)
    network = (networks.TRAINED if kind == "train" else networks.NETWORKS)[name]
    case = Case(network, name, MODES[mode], int(batch), kind, on, accuracy=accuracy)
    print((_on_cuda if on.type == "cuda" else _on_cpu)(case, side))


def _started(case: Case, side: str) -> Callable[[], object]:
    """The call, without what it was made from."""
    call = case.start(side)
    networks.built.cache_clear(), original.cache_clear()
    gc.collect()
    return call


def _on_cuda(case: Case, side: str) -> int:
    call = _started(case, side)
    call(), call(), call()
    torch.cuda.synchronize(case.device)
    torch.cuda.reset_peak_memory_stats(case.device)
    _of_the_pool(case.device)
    call()
    torch.cuda.synchronize(case.device)
    return torch.cuda.max_memory_allocated(case.device) + _of_the_pool(case.device)


def _on_cpu(case: Case, side: str) -> int:
    torch.randn(64, 64) @ torch.randn(64, 64)
    before = resident("VmRSS")
    call = _started(case, side)
    call(), call(), call()
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
    # Resets the peak.
    Path("/proc/self/clear_refs").write_text("5")
    call()
    return resident("VmHWM") - before


if __name__ == "__main__":
    main(*sys.argv[1:])
