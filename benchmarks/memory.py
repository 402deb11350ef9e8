"""Peak memory of a network: its weights, its input, and one pass or step of training.

On CUDA it is the device's memory in use, whoever allocated it, since Windrow's workspaces and packed
filters are not PyTorch's. On a CPU it is the resident memory, which only a process of its own can
tell:

    python benchmarks/memory.py DEVICE NAME MODE BATCH pytorch|windrow infer|train
"""

import ctypes
import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def on_cuda(start: Callable[[], Callable[[], object]], device: torch.device) -> int:
    """`start` builds what is measured and returns its call."""
    pool = _Pool(device)
    torch.cuda.synchronize(device)
    gc.collect()
    pool.give_back()
    before = _used(device)
    call = start()
    # Algorithms are chosen by trials that take more memory than what follows.
    call(), call()
    pool.give_back()
    call()
    torch.cuda.synchronize(device)
    return _used(device) - before


def _used(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class _Pool:
    """The driver's memory pool, made to keep what is freed, so that use only grows, as that of
    PyTorch's allocator does."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda, self.pool = device, ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        self._check(self.cuda.cuDeviceGetDefaultMemPool(ctypes.byref(self.pool), device.index))
        release_threshold, all_of_it = 4, ctypes.c_uint64(2**64 - 1)
        self._check(
            self.cuda.cuMemPoolSetAttribute(self.pool, release_threshold, ctypes.byref(all_of_it))
        )

    def give_back(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        self._check(self.cuda.cuMemPoolTrimTo(self.pool, ctypes.c_size_t(0)))

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"CUDA error {status} of the memory pool")


def on_cpu(*arguments: str) -> int:
    """As this file's `main` finds it for these arguments."""
    command = [sys.executable, __file__, "cpu", *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s*(\d+) kB", status)[1])


def main(device: str, name: str, mode: str, batch: str, side: str, kind: str) -> None:
    import networks
    from contestants import MODES, Case, original

    torch.randn(64, 64) @ torch.randn(64, 64)
    network = (networks.TRAINED if kind == "train" else networks.NETWORKS)[name]
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
    before = _resident("VmRSS")
    case = Case(network, name, MODES[mode], int(batch), kind, torch.device(device))
    call = case.start(side)
    networks.built.cache_clear(), original.cache_clear()
    call(), call()
    gc.collect()
    trim(0)
    # Resets the peak.
    Path("/proc/self/clear_refs").write_text("5")
    call()
    print(_resident("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
