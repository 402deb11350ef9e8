"""Packed forms of filters, kept for as long as the memory of the filter lives.

Whether a packed form still belongs to the filter is decided by the filter's content, in Rust; nothing
here is trusted for that. What is found here is only where to look, and when to forget: under the storage
of the filter, which all tensors over one memory share and which PyTorch keeps as one object for as long
as the memory lives. So the packed forms serve compiled graphs too, which call the operator without the
module; and no parameter carries a reference of ours, which would show in copies and pickles and make
`torch.utils.swap_tensors` fail.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from windrow import _native

# What a filter is, over its storage: device, type, offset, shape, strides.
_Part = tuple[Any, ...]
_Filters = dict[_Part, _native.FilterCache]

# By the address of the storage as a Python object: a weak reference, which takes the entry along.
_storages: dict[int, tuple[weakref.ref[Any], _Filters]] = {}

# A flat buffer may hold all filters of a model. More than this are another division of it on each call.
_FILTERS_OF_A_STORAGE = 1024


def filter_cache(weight: Tensor, lasts: bool = False) -> _native.FilterCache | None:
    """Where packed forms of `weight` are kept; None where nothing says that its memory outlives the
    call: neither `lasts`, nor is it a parameter, nor was it seen before."""
    return _cache(weight, weight.dtype, lasts)


# Packed forms, and whether nobody looks if they are still those of the filter; None where none are kept.
Filters = tuple[_native.FilterCache, bool] | None


def kept_with(weight: Tensor, is_frozen: bool, lasts: bool = False) -> Callable[[], Filters]:
    """Finds what is kept with a filter, on each call anew: its memory may be another then."""

    def found() -> Filters:
        cache = filter_cache(weight, lasts)
        return None if cache is None else (cache, is_frozen)

    return found


def unkept() -> Filters:
    """Of a filter that changes."""
    return None


def forget(weight: Tensor) -> None:
    """Drops the packed forms of a filter that changes although it was frozen."""
    known = _storages.get(id(weight.untyped_storage()))
    if known is not None:
        for cache in known[1].values():
            cache.clear()


def adopt(cast: Tensor, weight: Tensor) -> None:
    """Lets `cast`, made from `weight` for one call, use packed forms that are kept with `weight`."""
    cache = _cache(weight, cast.dtype)
    if cache is not None:
        filters, _ = _filters_over_memory_of(cast)
        filters[_part(cast, cast.dtype)] = cache


def kept_bytes(device: torch.device, and_promised: bool = False) -> int:
    """Memory of all that is packed on a device, and of what graphs are going to pack."""
    caches = {}
    for _, filters in list(_storages.values()):
        for part, cache in list(filters.items()):
            if part[0] == device:
                caches[id(cache)] = cache
    return sum(max(c.bytes, c.promised if and_promised else 0) for c in caches.values())


def _cache(weight: Tensor, dtype: torch.dtype, lasts: bool = False) -> _native.FilterCache | None:
    try:
        filters, is_new = _filters_over_memory_of(weight)
    except (NotImplementedError, RuntimeError):  # A tensor without memory.
        return None
    if is_new and not (lasts or isinstance(weight, nn.Parameter)):
        return None
    part = _part(weight, dtype)
    cache = filters.get(part)
    if cache is None:
        if len(filters) >= _FILTERS_OF_A_STORAGE:
            filters.clear()
        cache = filters.setdefault(part, _native.FilterCache())
    return cache


def _filters_over_memory_of(tensor: Tensor) -> tuple[_Filters, bool]:
    """The filters known over the tensor's storage, and whether that is seen for the first time."""
    storage = tensor.untyped_storage()
    key = id(storage)
    known = _storages.get(key)
    if known is not None and known[0]() is storage:
        return known[1], False
    filters: _Filters = {}
    _storages[key] = weakref.ref(storage, lambda _: _storages.pop(key, None)), filters
    return filters, True


def _part(tensor: Tensor, dtype: torch.dtype) -> _Part:
    return tensor.device, dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
