"""The sharing of threads with PyTorch.

PyTorch splits its work over OpenMP's threads, which wait for more work in a loop for some milliseconds. Other threads
would find the cores busy with that. So Windrow's work runs on the same threads, and follows `torch.set_num_threads`.
"""

import ctypes
from pathlib import Path

import torch

from windrow import _native


def share() -> None:
    """Makes Windrow use the OpenMP runtime that PyTorch ships, if it ships one."""
    libraries = [*(Path(torch.__file__).parent / "lib").glob("libgomp*.so*")]
    if len(libraries) == 1:
        function = ctypes.CDLL(str(libraries[0])).GOMP_parallel
        _native.use_openmp(ctypes.cast(function, ctypes.c_void_p).value)
