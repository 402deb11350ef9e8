"""The packed forms of filters, kept as long as the filter's memory lives.

Rust decides by the filter's content whether a packed form is still valid; nothing here is trusted for that. This file
only finds and drops packed forms. It finds them by the filter's storage, an object that all tensors over the same
memory share and that PyTorch keeps as long as the memory lives. So compiled graphs, which call the operator without the
module, use the packed forms too. And no parameter carries a reference to them, which would show in copies and pickles
and would make `torch.utils.swap_tensors` fail.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from windrow import _native

# The identity of a filter over its storage: device, type, offset, shape, strides.
_Part = tuple[Any, ...]
_Filters = dict[_Part, _native.FilterCache]

# The caches by the address of the storage object, with a weak reference that removes the entry.
_storages: dict[int, tuple[weakref.ref[Any], _Filters]] = {}

# A flat buffer may hold all filters of a model. More than this are another division of it on each call.
_FILTERS_OF_A_STORAGE = 1024


def filter_cache(weight: Tensor, lasts: bool = False) -> _native.FilterCache | None:
    """The cache for packed forms of `weight`. None if the memory may not outlive the call: `weight` is no parameter,
    was not seen before, and `lasts` is False."""
    return _cache(weight, weight.dtype, lasts)


# Packed forms, and whether nobody looks if they are still those of the filter; None where none are kept.
Filters = tuple[_native.FilterCache, bool] | None


def kept_with(weight: Tensor, is_frozen: bool, lasts: bool = False) -> Callable[[], Filters]:
    """A function that finds the cache of a filter. It looks anew on each call, because the filter's memory may have
    changed."""

    def found() -> Filters:
        cache = filter_cache(weight, lasts)
        return None if cache is None else (cache, is_frozen)

    return found


def unkept() -> Filters:
    """The cache of a filter that changes: none."""
    return None


def forget(weight: Tensor) -> None:
    """Drops the packed forms of a filter that has changed although it was frozen."""
    known = _storages.get(id(weight.untyped_storage()))
    if known is not None:
        for cache in known[1].values():
            cache.clear()


def adopt(cast: Tensor, weight: Tensor) -> None:
    """Makes `cast`, made from `weight` for one call, share the packed forms of `weight`."""
    cache = _cache(weight, cast.dtype)
    if cache is not None:
        filters, _ = _filters_over_memory_of(cast)
        filters[_part(cast, cast.dtype)] = cache


def kept_bytes(device: torch.device, and_promised: bool = False) -> int:
    """The bytes of all packed forms on a device; with `and_promised` also of those that CUDA graphs will pack."""
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
    """The caches over the tensor's storage, and whether this storage is new."""
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
