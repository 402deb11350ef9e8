"""An optimized model checks itself: the first call for each kind of input is compared with the model's.

All that is compared is computed by copies, which share the filters. So the model itself is called once, as it would be without
the check, and nothing but the time tells that there was one.
"""

import copy
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from windrow.torch._by_graph import ByGraph, Derived, derived, parts_of, undo
from windrow.torch._check_modules import Roundings, differs, differs_from_its_modules
from windrow.torch._fused import FusedConv2d
from windrow.torch._patch import unpatch
from windrow.torch._precision import may_use_tf32
from windrow.torch._trace import random_states, set_random_states

# Calls that are compared: later ones go shorter ways than the first, and a state shows from the second on.
_CALLS = 3
# Of the model with roundings of their own.
_DRAWS = 3
# After so many shapes that were right, others of as many dimensions are taken to be.
_SHAPES = 32

_busy = threading.RLock()


class Check:
    """What was found of a model. Copies begin with it, too."""

    def __init__(self, accuracy: str | None) -> None:
        self.accuracy = accuracy
        self.right: set[Any] = set()
        self.any_shape: dict[Any, int] = {}

    def add(self, kind: Any, without_shapes: Any) -> None:
        self.right.add(kind)
        self.any_shape[without_shapes] = self.any_shape.get(without_shapes, 0) + 1


class Checked(Derived):
    """A model whose calls are checked; that of an optimized one."""

    _windrow_check: Check | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        check = self._windrow_check
        if check is None or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        kind = _kind(args, kwargs)
        if kind in check.right or _is_observed(args, kwargs):
            return super().forward(*args, **kwargs)
        with _busy:
            is_right = kind in check.right or _first(self, check, kind, args, kwargs)
        if is_right:
            return super().forward(*args, **kwargs)
        # As `patch` leaves it, from here on.
        return type(self).forward(self, *args, **kwargs)


def _kind(args: Any, kwargs: Any) -> Any:
    given = _told(args), _told(kwargs) if kwargs else None
    flags = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), may_use_tf32(), may_use_tf32(is_linear=True)
    return *given, *flags, _casts()


def _casts() -> Any:
    if not torch._C._is_any_autocast_enabled():
        return None
    return *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),


def _told(value: Any, is_shape: bool = True) -> Any:
    """Kind of an argument: a number is any number, and a word is itself."""
    if isinstance(value, Tensor):
        rest = type(value), value.dtype, value.device, value.requires_grad
        if is_shape:
            return value.shape, value.stride(), *rest
        layouts = [torch.contiguous_format, torch.channels_last] if value.dim() == 4 else [torch.contiguous_format]
        return value.dim(), *(value.is_contiguous(memory_format=layout) for layout in layouts), *rest
    if isinstance(value, list | tuple):
        return type(value), *(_told(v, is_shape) for v in value)
    if isinstance(value, dict):
        return type(value), *((str(k), _told(v, is_shape)) for k, v in value.items())
    return value if value is None or isinstance(value, bool | str) else type(value)


def _is_observed(args: Any, kwargs: Any) -> bool:
    """True where somebody records, transforms or captures what is called, or tensors are no plain ones."""
    if (
        torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or forward_ad._current_level >= 0
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    ):
        return True
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) or hasattr(leaf, "node")]
    return any(type(leaf) not in (Tensor, nn.Parameter) or leaf.is_meta for leaf in given)


def _first(model: Any, check: Check, kind: Any, args: Any, kwargs: Any) -> bool:
    """Whether the model may stay what it is; if not, it is changed."""
    if _has_hooks(model):
        return True
    for part in model.modules():
        if isinstance(part, ByGraph) and part._windrow_graph is not None:
            part._is_as_it_was()
    coarse = (_told(args, False), _told(kwargs, False), kind[2:])
    if check.any_shape.get(coarse, 0) >= _SHAPES:
        check.right.add(kind)
        return True
    numbers = random_states()
    try:
        with torch.no_grad():
            why = _Comparison(model, check.accuracy, (args, kwargs), numbers).wrong()
    except (torch.OutOfMemoryError, MemoryError):
        model.windrow_report.left["check"] = "there was no memory for it"
        check.right.add(kind)
        return True
    except _BothRaise:
        return True
    except _NotChecked as error:
        model.windrow_report.left["check"] = f"not checked: {error}"
        check.right.add(kind)
        return True
    finally:
        set_random_states(numbers)
    if why is None:
        check.add(kind, coarse)
        return True
    report = model.windrow_report
    report.fused = {name: what for name, what in report.fused.items() if not what.startswith("FusedConv2d(")}
    report.left["the model"] = f"is as `patch` leaves it, because the optimized one differs: {why}"
    for module in [*model.modules()]:
        undo(module)
    return False


def _has_hooks(model: nn.Module) -> bool:
    """Hooks would see the calls of the check, too."""
    everywhere = modules_of_torch._global_forward_hooks or modules_of_torch._global_forward_pre_hooks
    return bool(everywhere) or any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class _BothRaise(Exception):
    """The input is wrong, and the model says so itself."""


class _NotChecked(Exception):
    """Why nothing can be compared."""


class _Raised:
    """What a call raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __str__(self) -> str:
        first = str(self.error).strip().partition("\n")[0]
        return f"{type(self.error).__name__}: {first}"


class _Comparison:
    """Of one input; `numbers`: the random numbers' states at its call."""

    def __init__(self, model: Any, accuracy: str | None, given: Any, numbers: Any) -> None:
        self.model, self.accuracy, self.given, self.numbers = model, accuracy, given, numbers

    def wrong(self) -> str | None:
        """What differs, and where."""
        reference = self._calls(self._reference())
        want = [next(reference), next(reference)]
        is_stateful = not _has_the_same_bits(*want)
        want.append(next(reference) if is_stateful else want[0])
        ours = self._calls(self._optimized())
        got = [next(ours) for _ in range(_CALLS)]
        draws = []
        for seed in range(_DRAWS):
            moved = self._reference()
            with Roundings(moved, self.accuracy, seed):
                calls = self._calls(moved)
                draws.append([next(calls) for _ in range(_CALLS if is_stateful else 1)])
        if isinstance(want[0], _Raised):
            if isinstance(got[0], _Raised):
                raise _BothRaise
            return f"the model raises {want[0]}"
        for call, (g, w) in enumerate(zip(got, want, strict=True)):
            others = [d[min(call, len(d) - 1)] for d in draws]
            why = self._differs(g, w, [d for d in others if not isinstance(d, _Raised)])
            if why is not None:
                return f"{why}{f' in call {call + 1}' if call else ''}; {self._where()}"
        return self._of_modules()

    def _differs(self, got: Any, want: Any, draws: list[Any]) -> str | None:
        if isinstance(got, _Raised) or isinstance(want, _Raised):
            if isinstance(got, _Raised) and isinstance(want, _Raised):
                return None
            return f"it raises {got}" if isinstance(got, _Raised) else f"the model raises {want}"
        why = differs(got[0], want[0], [d[0] for d in draws], self.accuracy)
        if why is None:
            why = differs(got[1], want[1], [d[1] for d in draws], self.accuracy)
            why = why and f"what became of its arguments: {why}"
        return why

    def _calls(self, model: nn.Module) -> Iterator[Any]:
        """Results of calls with the same input, with what became of that, or what they raised."""
        set_random_states(self.numbers)
        while True:
            args, kwargs = cloned(self.given)
            try:
                y = model(*args, **kwargs)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                yield _Raised(error)
            else:
                yield cloned(y, of_all=False), (args, kwargs)

    def _reference(self) -> Any:
        """The model as it was, with today's filters."""
        graphs = {id(m._windrow_graph): None for m in self.model.modules() if isinstance(m, ByGraph)}
        copied = self._copied(graphs)
        for module in [*copied.modules()]:
            undo(module)
        return unpatch(copied)

    def _optimized(self) -> Any:
        shared: dict[int, Any] = {}
        for part in self.model.modules():
            if isinstance(part, ByGraph) and part._windrow_graph is not None:
                for fused in part._windrow_graph.modules():
                    if isinstance(fused, FusedConv2d):
                        shared |= {id(t): t for t in fused._buffers.values()}
        copied = self._copied(shared)
        original, *kinds = parts_of(type(copied))
        copied.__class__ = derived(original, *(k for k in kinds if k is not Checked)) if len(kinds) > 1 else original
        for module in copied.modules():
            if isinstance(module, ByGraph) and module._windrow_graph is not None:
                module._watch()
        return copied

    def _copied(self, memo: dict[int, Any]) -> Any:
        """What a model keeps may be anything."""
        memo |= {id(p): p for p in self.model.parameters()}
        memo |= {id(self.model.windrow_report): None, id(self.model._windrow_check): None}
        try:
            return copy.deepcopy(self.model, memo)
        except Exception as error:
            raise _NotChecked(f"the model cannot be copied: {error}") from None

    def _of_modules(self) -> str | None:
        """The first convolution that does not give what the modules that it stands for give of the same image."""
        model, found = self._optimized(), list[str]()
        for name, part in model.named_modules():
            if not isinstance(part, ByGraph) or part._windrow_graph is None:
                continue
            for fold in part._windrow_folds:

                def look(_: Any, args: Any, y: Any, part: Any = part, fold: Any = fold, name: str = name) -> None:
                    if not found:
                        why = differs_from_its_modules(part, fold, args, y, self.accuracy)
                        found.extend([f"`{f'{name}.{fold.fused}'.lstrip('.')}`: {why}"] if why else [])

                part._windrow_graph.get_submodule(fold.fused).register_forward_hook(look)
        next(self._calls(model))
        return found[0] if found else None

    def _where(self) -> str:
        """The first convolution that gives something else, or is given something else than in the model."""
        why = self._of_modules()
        if why is not None:
            return f"first in {why}"
        seen: list[dict[str, list[Tensor]]] = [{}, {}]
        models = self._reference(), self._optimized()
        for model, images in zip(models, seen, strict=True):
            for name, part in [*self.model.named_modules()]:
                if isinstance(part, ByGraph):
                    own: Any = model.get_submodule(name)
                    inner = own._windrow_graph if model is models[1] else own
                    for fold in part._windrow_folds:
                        path = f"{name}.{fold.conv}".lstrip(".")
                        look = lambda _, args, path=path, to=images: to.setdefault(path, []).append(args[0].clone())
                        name_of_it = fold.fused if model is models[1] else fold.conv
                        inner.get_submodule(name_of_it).register_forward_pre_hook(look)
            next(self._calls(model))
        for path, given in seen[0].items():
            others = seen[1].get(path, [])
            if len(given) != len(others):
                return f"`{path}` is called {len(others)} times instead of {len(given)}"
            for ours, theirs in zip(others, given, strict=True):
                if ours.dim() != theirs.dim():
                    continue
                off = (ours - theirs).abs().max() if ours.shape == theirs.shape else None
                if off is None or not off <= 0.05 * theirs.abs().max():
                    return f"first in what `{path}` is given"
        return "behind the last convolution"


def cloned(value: Any, of_all: bool = True) -> Any:
    """The same with memory of its own; `of_all`: also of what is no tensor."""
    found, spec = tree_flatten(value)
    memo: dict[int, Any] = {}

    def clone(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) not in memo:
                memo[id(leaf)] = leaf.detach().clone()
            return memo[id(leaf)]
        try:
            return copy.deepcopy(leaf) if of_all else leaf
        except Exception:  # Whatever an argument may be: both models are given the same one.
            return leaf

    return tree_unflatten([clone(leaf) for leaf in found], spec)


def _has_the_same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, _Raised) or isinstance(other, _Raised):
        return isinstance(one, _Raised) and isinstance(other, _Raised)
    for a, b in zip(tree_leaves(one), tree_leaves(other), strict=False):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or not ((a == b) | ((a != a) & (b != b))).all():
                return False
        elif isinstance(a, int | float) and a != b:
            return False
    return True
