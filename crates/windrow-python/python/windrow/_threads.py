"""Threads shared with PyTorch.

PyTorch splits its work over OpenMP's threads, which wait for the next piece of work in a loop for some
milliseconds. Threads of our own would find the cores busy with that, so ours runs on the same ones; it
follows `torch.set_num_threads` thereby.
"""

import ctypes
from pathlib import Path

import torch

from windrow import _native


def share() -> None:
    """Uses the OpenMP runtime that PyTorch brings, if it brings one."""
    libraries = [*(Path(torch.__file__).parent / "lib").glob("libgomp*.so*")]
    if len(libraries) == 1:
        function = ctypes.CDLL(str(libraries[0])).GOMP_parallel
        _native.use_openmp(ctypes.cast(function, ctypes.c_void_p).value)
