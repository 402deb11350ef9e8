"""Whether there is room for what Windrow needs beside PyTorch's own memory.

A patched model may need at most a tenth more than PyTorch alone has needed so far: for its weights and
what its layers make of an input. What is packed counts for good, results and scratch memory where PyTorch has
needed as much at another time. On CUDA PyTorch's allocator tells; on Linux's CPUs the resident memory since a
model was patched. Elsewhere nothing tells, and there is always room.

On CPUs what is packed does not count: for one image a model needs little more than its filters, so that a
tenth would forbid to keep any, just where packing them on each call costs more than it gains; and main
memory is what machines have most of.
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
# By device, what PyTorch's allocator has given at most: for PyTorch alone as far as is known, and as it was read
# after a run of ours, whose scratch memory is of that allocator too.
_theirs: dict[torch.device, int] = {}
_with_ours: dict[torch.device, int] = {}


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
        return
    peak = torch.cuda.max_memory_allocated(device)
    if peak > _with_ours.get(device, 0):
        _theirs[device] = max(peak, _theirs.get(device, 0))


def ran(device: torch.device) -> None:
    """Called after the first run of an operator of ours."""
    if device.type == "cuda":
        _with_ours[device] = torch.cuda.max_memory_allocated(device)


def is_there_room(device: torch.device, kept: int, scratch: int) -> bool:
    """For so many bytes for good, and so many more during a run, its results among them."""
    if device.type == "cuda":
        look(device)
        peak, now = _theirs.get(device, 0), torch.cuda.memory_allocated(device)
        packed = _filters.kept_bytes(device)
    else:
        in_use = _in_use()
        if in_use is None:
            return True
        peak, now, packed, kept = _peak, in_use, 0, 0
    room = max(_FREE, int(_SHARE * peak)) - packed
    # Results and scratch memory may be as much as PyTorch has needed at another time, even if there is no room otherwise.
    return (kept == 0 or kept <= room) and scratch <= max(0, room - kept) + max(0, peak - now)


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
