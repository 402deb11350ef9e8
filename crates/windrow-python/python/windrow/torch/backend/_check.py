"""The check of a compiled graph: its first call is compared with the graph as AOTAutograd gave it.

That graph is in functional form, so it can be run again without tracing. docs/notes/optimize-check.md says what is
compared and how far results may differ.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from windrow.torch._check_bound import Spread
from windrow.torch.backend._check_sums import Compared, compared, raised
from windrow.torch.backend._constants import Constants, Run
from windrow.torch.backend._layout import lies_as
from windrow.torch.backend._options import Options
from windrow.torch.backend._original import Original, Roundings, unrepeatable
from windrow.torch.choice import budget
from windrow.torch.choice.check import without_trials

_log = logging.getLogger(__name__.rpartition(".")[0])
# The number of runs with other roundings.
_DRAWS = 3
# The number of sizes that are compared for a graph of any size.
_SIZES = 3


class Check:
    """The check of one inference graph. While `is_pending`, calls go through `call`."""

    def __init__(self, module: fx.GraphModule, static: Sequence[int], options: Options, is_inductors: bool) -> None:
        """Copies the graph before the passes change it, and marks its nodes. `static`: the indices of the inputs that
        are parameters and buffers."""
        self.is_pending = True
        self._options, self._is_inductors = options, is_inductors
        self._original = Original(module, static, options.accuracy, is_inductors)
        self._compared: dict[fx.Node, Compared] = {}
        self._right: set[tuple[Any, ...]] = set()
        self._instead: Callable[..., Any] | None = None
        # The strides of results that are copied, because they lie otherwise than the tracer promised.
        self._strides: dict[int, Sequence[int]] = {}
        self._lock = threading.RLock()

    @staticmethod
    def of(module: fx.GraphModule, static: Sequence[int], options: Options, is_inductors: bool) -> "Check | None":
        """The check of a graph. None if the options turn it off, or if a second run would have visible effects."""
        if not options.check:
            return None
        why = unrepeatable(module.graph)
        if why is not None:
            _leave(options, f"a graph is not checked: {why}")
            return None
        return Check(module, static, options, is_inductors)

    def look(self, graph: fx.Graph, constants: Constants) -> None:
        """Finds, after the passes, what each convolution became."""
        self._compared = dict(compared(graph, constants.inputs))

    def named(self, modules: dict[fx.Node, str]) -> None:
        """Records which module computes which convolution."""
        for node, name in modules.items():
            if node in self._compared:
                self._compared[node].module = name

    def call(self, inputs: list[Any], compute: Run, constants: Sequence[Tensor], modules: Any) -> Any:
        """The graph's results: those of `compute` if they are right, otherwise PyTorch's. `compute` uses
        `constants` and `modules`."""
        if self._strides:
            return self._laid_out(compute(inputs))
        if self._instead is None:
            with self._lock:
                if self._instead is None:
                    sizes = (*(i for i in inputs if not isinstance(i, Tensor)),)
                    if not self.is_pending or sizes in self._right or _is_observed(inputs):
                        return compute(inputs)
                    return self._first(inputs, sizes, compute, constants, modules)
        given = [*inputs]
        inputs.clear()
        return self._instead(*given)

    def _first(
        self, inputs: list[Any], sizes: tuple[Any, ...], compute: Run, constants: Sequence[Tensor], modules: Any
    ) -> Any:
        given = [*inputs]
        inputs.clear()
        original, results = self._original, None
        try:
            wrong, expected = self._expected(given, constants, modules)
        except _NotChecked as error:
            # If this raises too, the input is wrong, and the next one may be right.
            results = compute(given)
            _leave(self._options, f"a graph is not checked: {error}")
            self._finish()
            return results
        before = {i: given[i].clone() for i in original.written}
        if wrong is None:
            try:
                with budget.apart([*expected.held(given), *before.values()]):
                    results = compute([*given])
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                wrong = f"it raises {raised(error)}"
            else:
                with _unseen():
                    wrong = expected.differ([*results, *(given[i] for i in original.written)])
        if wrong is None:
            assert results is not None
            strides = expected.strides(results)
            if strides:
                _leave(self._options, f"results {[*strides]} are copied, because they have other strides than PyTorch's")
            self._strides = strides
            self._right.add(sizes)
            if strides or not sizes or len(self._right) >= _SIZES:
                self._finish()
            return self._laid_out(results) if strides else results
        with torch.no_grad():
            for i, was in before.items():
                given[i].copy_(was)
        why = f"a graph runs as PyTorch's own, because the compiled one differs: {wrong}"
        _log.warning("%s", why)
        _leave(self._options, why)
        self._instead = original.pytorchs(bool(sizes), self._options.inductor if self._is_inductors else None)
        self._compared = {}
        return self._instead(*given)

    def _expected(
        self, given: list[Any], constants: Sequence[Tensor], modules: Any
    ) -> tuple[str | None, "_Expected"]:
        """The first wrong convolution, in words, or None; and the expected results."""
        found: list[str] = []
        at: dict[str, list[Compared]] = {}
        for one in self._compared.values():
            at.setdefault(one.result.name, []).append(one)
        original, accuracy = self._original, self._options.accuracy

        def look(name: str, values: dict[str, Any]) -> None:
            for one in at.get(name, ()):
                why = None if found else one.differs(values, constants, modules, accuracy)
                found.extend([f"`{original.module_of(one.sum.value.name)}`: {why}"] if why else [])

        read = {name: [n for one in several for n in one.reads()] for name, several in at.items()}
        try:
            with _unseen():
                expected = _Expected(original, original.run(given, look=look, read=read))
                for seed in range(0 if found else _DRAWS):
                    expected.add(original.run(given, Roundings(seed)))
        except (torch.OutOfMemoryError, MemoryError):
            raise _NotChecked("there was no memory for it") from None
        except Exception as error:
            raise _NotChecked(raised(error)) from None
        return (found[0] if found else None), expected

    def _laid_out(self, results: Sequence[Any]) -> list[Any]:
        """The results, in copies where they lie otherwise than promised."""
        copied = [*results]
        for i, strides in self._strides.items():
            copied[i] = results[i].new_empty_strided(results[i].shape, strides).copy_(results[i])
        return copied

    def _finish(self) -> None:
        """Ends the check and frees the copy of the graph. Calls still go through `call` if results are copied."""
        self.is_pending = bool(self._strides)
        self._compared = {}
        del self._original


class _NotChecked(Exception):
    """The reason why nothing can be compared."""


class _Expected:
    """The results of a graph, and how far rounding errors move them."""

    def __init__(self, original: Original, results: list[Any]) -> None:
        self.original, self.results = original, results
        is_tensor = lambda t: isinstance(t, Tensor)
        # A result may share memory with an input that the graph writes to.
        kept = [t.clone() if is_tensor(t) and original.written else t for t in results]
        self.spreads = [Spread(t, original.tier(t)) if is_tensor(t) else None for t in kept]

    def add(self, draw: list[Any]) -> None:
        for i, (moved, want) in enumerate(zip(draw, self.results, strict=True)):
            spread = self.spreads[i]
            if spread is None:
                continue
            if moved.shape != want.shape:
                # A result whose size depends on values is not compared.
                self.spreads[i] = None
            else:
                spread.add(moved)

    def held(self, inputs: Sequence[Any]) -> list[Tensor]:
        """The tensors whose memory is this object's alone."""
        tensors = [t for t in self.results if isinstance(t, Tensor)]
        tensors += [t for s in self.spreads if s is not None for t in (s.want, s.spread) if t is not None]
        models = {t.untyped_storage()._cdata for t in inputs if isinstance(t, Tensor)}
        return [t for t in tensors if t.untyped_storage()._cdata not in models]

    def differ(self, got: list[Any]) -> str | None:
        of = zip(got, self.results, self.spreads, self.original.results, self.original.strides, strict=True)
        for i, (g, want, spread, result, strides) in enumerate(of):
            if self.original.is_unset(result) or (spread is None and isinstance(want, Tensor)):
                continue
            if not isinstance(want, Tensor):
                if g != want:
                    return f"result {i} is {g!r} instead of {want!r}"
                continue
            kind = lambda t: (t.dtype, [*t.shape], str(t.device))
            if kind(g) != kind(want):
                return f"result {i} is {kind(g)} instead of {kind(want)}"
            if strides is not None and 0 in strides and not self._lies_right(i, g):
                # No copy can have such strides.
                return f"result {i} has strides {g.stride()} instead of {strides}"
            why = spread.differs(g)
            if why is not None:
                return f"of result {i} {why}"
        return None

    def strides(self, got: Sequence[Any]) -> dict[int, Sequence[int]]:
        """The promised strides of the results that have others."""
        promised = enumerate(self.original.strides[: len(got)])
        return {i: of for i, of in promised if of is not None and not self._lies_right(i, got[i])}

    def _lies_right(self, i: int, result: Tensor) -> bool:
        allowed = self.original.strides[i], self.results[i].stride()
        return any(lies_as(result, strides) for strides in allowed if strides is not None)


def _leave(options: Options, why: str) -> None:
    if options.report is not None:
        options.report.left("check", why)


@contextmanager
def _unseen() -> Iterator[None]:
    """A context in which no mode, transform or autocast sees the check's calls, and cuDNN tries no algorithms for them."""
    with (
        _disable_current_modes(),
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableAutocast(),
        without_trials(),
    ):
        yield


def _is_observed(inputs: Sequence[Any]) -> bool:
    """True if the calls are recorded, transformed or captured, or if an input is no plain tensor."""
    return (
        torch.compiler.is_compiling()
        or torch._guards.TracingContext.try_get() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        # PyTorch's compiler looks at custom operators at the first call.
        or not all(type(m).__module__.startswith("torch._functorch.") for m in _get_current_dispatch_mode_stack())
        or forward_ad._current_level >= 0
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        or any(isinstance(t, Tensor) and (type(t) not in (Tensor, nn.Parameter) or t.is_meta) for t in inputs)
    )
