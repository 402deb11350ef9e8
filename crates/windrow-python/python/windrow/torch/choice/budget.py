"""The memory budget of Windrow beside PyTorch's own memory.

A patched model may need at most a tenth more than PyTorch alone has needed so far, for its weights and the results of
its layers. Packed filters count for good. Results and scratch memory count only as far as they exceed what PyTorch has
needed at another time. On CUDA PyTorch's allocator gives the numbers; on Linux's CPUs they are the resident memory
since a model was patched. On other systems there are no numbers, so there is always room.

On CPUs packed filters do not count. For a single image a model needs little more memory than its filters, so a tenth
would allow no packed filter at all, exactly where packing on each call costs more than it gains; and main memory is
rarely scarce. Scratch memory does not count either as long as it is less than what PyTorch's own libraries take: a
tenth of a block's or a single layer's memory would hold none of it.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from windrow.torch import _filters
from windrow.torch.choice import policy

_STATM = Path("/proc/self/statm")
# Resident memory without the first patched model's, and the most that there was beside that.
_base: int | None = None
_peak = 0
# The peak memory of PyTorch alone, by device, as far as it is known.
_theirs: dict[torch.device, int] = {}
# The bytes that stand beside the convolution of a graph that is being compiled, which do not exist yet.
_beside = 0
# The bytes in use that no model needs: copies that a check holds.
_apart = 0


def start(model: nn.Module) -> None:
    """Records the memory that this process has before the model, so that only the model's memory counts."""
    global _base
    resident = _resident()
    if _base is None and resident is not None:
        own = sum(_bytes(t) for t in [*model.parameters(), *model.buffers()] if t.device.type == "cpu")
        _base = resident - own


def _bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's memory: 0 for a parameter that has no size yet, and for a tensor that is not strided."""
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, ValueError):
        return 0


def look(device: torch.device, more: int) -> None:
    """Records the memory in use; called while the results of PyTorch's operator exist. The layer that follows
    (normalisation, activation) makes a result of the same size, while the image may go: this takes `more` bytes.

    On CUDA the allocator's own peak is no measure: it includes cuDNN's trials of its algorithms, which take many times
    what a pass of the model needs, and the trials of ours.
    """
    global _peak
    if device.type == "cpu":
        _peak = max(_peak, _in_use() or 0)
    else:
        _theirs[device] = max(_allocated(device) + more, _theirs.get(device, 0))


def look_inside(device: torch.device, run: Callable[[], object]) -> None:
    """Records the memory that PyTorch's operator takes beside its result, once it has chosen its algorithm."""
    if device.type == "cuda":
        now, before = _allocated(device), _given(device)
        run()
        _theirs[device] = max(now + _given(device) - before, _theirs.get(device, 0))


def _allocated(device: torch.device) -> int:
    """The bytes of PyTorch's allocator that are in use, without those of a check."""
    return torch.cuda.memory_allocated(device) - _apart


def _given(device: torch.device) -> int:
    """The bytes that PyTorch's allocator has handed out so far, freed ones included."""
    return int(torch.cuda.memory_stats(device).get("allocated_bytes.all.allocated", 0))


def look_ahead(device: torch.device, image: int, result: int) -> None:
    """Records the memory in use before a convolution runs. Every layer of a model reports this when it is called."""
    if device.type == "cuda":
        look(device, result + max(0, result - image))


def expect(device: torch.device, more: int) -> None:
    """Records that PyTorch is going to need so many bytes more than are in use now."""
    if device.type == "cuda":
        look(device, more)


@contextmanager
def beside(bytes: int) -> Iterator[None]:
    """A context in which so many bytes count as in use, too."""
    global _beside
    before, _beside = _beside, bytes
    try:
        yield
    finally:
        _beside = before


@contextmanager
def apart(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """A context in which these tensors do not count as in use. A check holds them beside the model, which will never need
    as much again."""
    global _apart
    held = {t.untyped_storage()._cdata: _bytes(t) for t in tensors}
    before, _apart = _apart, sum(held.values())
    try:
        yield
    finally:
        _apart = before


def is_there_room(device: torch.device, kept: int, scratch: int, in_graph: bool = False) -> bool:
    """True if there is room for `kept` bytes for good and `scratch` bytes during a run, including its results.
    `in_graph`: for filters that are packed only inside a captured CUDA graph; always False on CPUs, which capture none.
    """
    if device.type == "cuda":
        room, beside = _on_cuda(device, in_graph)
    else:
        in_use = _in_use()
        if in_use is None or in_graph:
            return not in_graph
        room, beside, kept = max(policy.FREE_ON_CPUS, int(policy.GROWTH * _peak)), max(0, _peak - in_use), 0
    return (kept == 0 or kept <= room) and scratch <= max(0, room - kept) + beside


def most(device: torch.device) -> int:
    """The bytes for which a CUDA device has room, for good and during a run together."""
    room, beside = _on_cuda(device)
    return max(0, room) + beside


def _on_cuda(device: torch.device, in_graph: bool = False) -> tuple[int, int]:
    """The room for packed filters and anything else beyond PyTorch's peak; and by how much this peak exceeds the memory
    in use now."""
    peak, now = _theirs.get(device, 0), _allocated(device) + _beside
    free = torch.cuda.get_device_properties(device).total_memory >> policy.FREE_IN_GRAPHS if in_graph else policy.FREE
    packed = _filters.kept_bytes(device, and_promised=in_graph)
    return max(free, int(policy.GROWTH * peak)) - packed, max(0, peak - now)


def _in_use() -> int | None:
    """The CPU memory that the models use, without packed filters."""
    resident = _resident()
    if resident is None:
        return None
    return resident - (_base or 0) - _filters.kept_bytes(torch.device("cpu")) - _apart


def _resident() -> int | None:
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
