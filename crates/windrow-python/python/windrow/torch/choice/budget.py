"""Whether there is room for what Windrow needs beside PyTorch's own memory.

A patched model may need at most a tenth more than PyTorch alone has needed so far: for its weights and
what its layers make of an input. What is packed counts for good, results and scratch memory where PyTorch has
needed as much at another time. On CUDA PyTorch's allocator tells; on Linux's CPUs the resident memory since a
model was patched. Elsewhere nothing tells, and there is always room.

On CPUs what is packed does not count: for one image a model needs little more than its filters, so that a
tenth would forbid to keep any, just where packing them on each call costs more than it gains; and main
memory is what machines have most of. Nor does scratch memory that is less than what PyTorch's libraries take
themselves: of a block or a single layer a tenth holds none of it.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from windrow.torch import _filters
from windrow.torch.choice import policy

_STATM = Path("/proc/self/statm")
# Resident memory without the first patched model's, and the most that there was beside that.
_base: int | None = None
_peak = 0
# By device, what PyTorch's allocator has given at most for PyTorch alone, as far as is known.
_theirs: dict[torch.device, int] = {}


def start(model: nn.Module) -> None:
    """Takes the memory of this process, without the model's, as not the model's."""
    global _base
    resident = _resident()
    if _base is None and resident is not None:
        own = sum(_bytes(t) for t in [*model.parameters(), *model.buffers()] if t.device.type == "cpu")
        _base = resident - own


def _bytes(tensor: torch.Tensor) -> int:
    """Of a tensor's memory. None are counted of a parameter that has no size yet, nor of a tensor that is not strided."""
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, ValueError):
        return 0


def look(device: torch.device, more: int) -> None:
    """Called while the results of PyTorch's operator are there. What follows a convolution, a normalisation or an activation,
    makes as much as its result once more, while its image may go: it needs `more` bytes.

    The allocator's own peak would not do on CUDA: cuDNN's trials of its algorithms take many times what a pass of the
    model needs, and they and ours are in it for good.
    """
    global _peak
    if device.type == "cpu":
        _peak = max(_peak, _in_use() or 0)
    else:
        _theirs[device] = max(torch.cuda.memory_allocated(device) + more, _theirs.get(device, 0))


def look_inside(device: torch.device, run: Callable[[], object]) -> None:
    """Counts what PyTorch's operator takes beside its result, when it has chosen its algorithm."""
    if device.type == "cuda":
        now, before = torch.cuda.memory_allocated(device), _given(device)
        run()
        _theirs[device] = max(now + _given(device) - before, _theirs.get(device, 0))


def _given(device: torch.device) -> int:
    """Bytes that PyTorch's allocator has given so far, whatever came back since."""
    return int(torch.cuda.memory_stats(device).get("allocated_bytes.all.allocated", 0))


def look_ahead(device: torch.device, image: int, result: int) -> None:
    """The same before a convolution of an image of so many bytes: each layer of a model says what is there when it comes."""
    if device.type == "cuda":
        look(device, result + max(0, result - image))


def is_there_room(device: torch.device, kept: int, scratch: int, in_graph: bool = False) -> bool:
    """For so many bytes for good, and so many more during a run, its results among them; `in_graph`: for what is packed only
    where it is captured, which on CPUs nothing is."""
    if device.type == "cuda":
        room, beside = _on_cuda(device, in_graph)
    else:
        in_use = _in_use()
        if in_use is None or in_graph:
            return not in_graph
        room, beside, kept = max(policy.FREE_ON_CPUS, int(policy.GROWTH * _peak)), max(0, _peak - in_use), 0
    return (kept == 0 or kept <= room) and scratch <= max(0, room - kept) + beside


def most(device: torch.device) -> int:
    """Bytes for which there is room on a CUDA device, for good and during a run together."""
    room, beside = _on_cuda(device)
    return max(0, room) + beside


def _on_cuda(device: torch.device, in_graph: bool = False) -> tuple[int, int]:
    """Room for what is packed or else more than PyTorch has needed, and how much more that was at another time than now."""
    peak, now = _theirs.get(device, 0), torch.cuda.memory_allocated(device)
    free = torch.cuda.get_device_properties(device).total_memory >> policy.FREE_IN_GRAPHS if in_graph else policy.FREE
    packed = _filters.kept_bytes(device, and_promised=in_graph)
    return max(free, int(policy.GROWTH * peak)) - packed, max(0, peak - now)


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
