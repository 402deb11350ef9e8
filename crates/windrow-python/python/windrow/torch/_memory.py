"""Whether there is room for what Windrow needs beside PyTorch's own memory.

A patched model may need at most a tenth more than PyTorch alone has needed so far: for its weights and
what its layers make of an input. What is packed counts for good, scratch memory where PyTorch has needed
as much at another time. On CUDA PyTorch's allocator tells; on Linux's CPUs the resident memory since a
model was patched. Elsewhere nothing tells, and there is always room.
"""

import os
from pathlib import Path

import torch
from torch import nn

from windrow.torch import _filters

_SHARE = 0.1
# So little is always there: pools of memory grow by larger steps.
_FREE = 4 << 20

_STATM = Path("/proc/self/statm")
# Resident memory without the first patched model's, and the most that there was beside that.
_base: int | None = None
_peak = 0


def start(model: nn.Module) -> None:
    """Takes the memory of this process, without the model's, as not the model's."""
    global _base
    resident = _resident()
    if _base is None and resident is not None:
        tensors = [*model.parameters(), *model.buffers()]
        own = sum(t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu")
        _base = resident - own


def look(device: torch.device) -> None:
    """Called while the results of PyTorch's operator are there."""
    global _peak
    if device.type == "cpu":
        _peak = max(_peak, _in_use() or 0)


def is_there_room(device: torch.device, kept: int, scratch: int) -> bool:
    """For so many bytes for good, and so many more during a run."""
    if device.type == "cuda":
        peak, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    else:
        in_use = _in_use()
        if in_use is None:
            return True
        peak, now = _peak, in_use
    room = max(_FREE, int(_SHARE * peak)) - _filters.kept_bytes(device) - kept
    return room >= 0 and scratch <= room + max(0, peak - now)


def _in_use() -> int | None:
    """Of the CPU's memory, by the models, without what is packed."""
    resident = _resident()
    if resident is None:
        return None
    return resident - (_base or 0) - _filters.kept_bytes(torch.device("cpu"))


def _resident() -> int | None:
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
