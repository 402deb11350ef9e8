"""A copy of a model for inference, whose calls are compiled by the backend."""

import copy
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from windrow.torch._calls import MISSING
from windrow.torch._conv2d import ACCURACIES
from windrow.torch._derived import RUN, Derived, derived, parts_of, undo
from windrow.torch._known import Calls, Graph
from windrow.torch._names import Names
from windrow.torch._patch import unpatch
from windrow.torch._unseen import Unseen, UnseenError


@dataclass
class OptimizeReport:
    """The report of `optimize`: the convolutions with what was folded into them and fused with them, and what was left,
    with the reason. It fills as modules are compiled, at the first call for each kind of input."""

    fused: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"fused {name}: {what}" for name, what in self.fused.items()]
        lines += [f"left {name}: {why}" for name, why in self.left.items()]
        return "\n".join(lines) or "nothing has been compiled yet"


@dataclass
class _Part:
    """A module of an optimized model, as the report and the backend are told of it."""

    report: OptimizeReport
    name: str
    options: dict[str, Any]

    def path(self, name: str) -> str:
        return f"{self.name}.{name}".strip(".") or _WHOLE

    def fused(self, name: str, what: str) -> None:
        self.report.fused[self.path(name)] = what
        self.report.left.pop(self.path(name), None)

    def left(self, name: str, why: str) -> None:
        if self.path(name) not in self.report.fused:
            self.report.left[self.path(name)] = why


@dataclass
class _Told:
    """What the backend tells of one graph."""

    part: _Part
    names: Names

    def fused(self, name: str, what: str) -> None:
        self.names.told[name] = what
        self.part.fused(name, what)

    def left(self, name: str, why: str) -> None:
        self.part.left(name, why)


_WHOLE = "the model"


def optimize(
    model: nn.Module,
    accuracy: str | None = None,
    check: bool = True,
    rest: str | None = None,
    batch_invariant: bool = False,
) -> nn.Module:
    """A new module that computes the same as `model.eval()`, faster; the model itself does not change.

    Windrow's backend of `torch.compile` compiles the calls of the new module, with its option `freeze`. Normalisations
    and other scales and shifts of channels become part of the filters before them. An addition and an activation after
    a convolution become one operation with it. You need no example input, because a module is compiled at its first
    call for a kind of input. If you call a module inside the model, also by a method of the model, it is compiled by
    itself.

    The result is of the model's class, with its attributes, methods and modules, and its `state_dict` has the same
    names. It can be copied, saved and loaded, compiled, and captured into CUDA graphs once it has run. If you write to
    its parameters or buffers, the next call uses the new values (not always for a write through `.data`: see
    docs/python.md). Its parameters get no gradients. Its attribute `windrow_report` says what was done.

    accuracy: as in `patch`.
    check: if true, the first call of each compiled graph is compared with PyTorch's operators.
    rest: the way to run everything but convolutions: "eager" for PyTorch's operators one by one, or "inductor". None
    means "inductor" for graphs on CUDA with group normalisations, otherwise "eager".

    batch_invariant: if true, the bits of an image's result do not depend on the other images in its batch, as in `patch`.

    Raises ValueError for other values, and VersionError if PyTorch is too old for the backend.
    """
    if accuracy not in ACCURACIES:
        raise ValueError(f"`accuracy` is {accuracy!r}, expected one of {[*ACCURACIES]}")
    # Older versions of PyTorch have not all that the backend imports.
    from windrow.torch.backend._options import RESTS, OptionError, expect_known_version

    expect_known_version()
    if rest not in (None, *RESTS):
        raise OptionError(f"`rest` is {rest!r}, expected one of {[None, *RESTS]}")
    # Parameters made in inference_mode would not count writes to them.
    with torch.inference_mode(False):
        result: Any = copy.deepcopy(model)
    for module in [*result.modules()]:
        undo(module)
    unpatch(result).eval().requires_grad_(False)
    report = OptimizeReport()
    options = {"accuracy": accuracy, "batch_invariant": batch_invariant, "check": check, "rest": rest}
    for name, module in [*result.named_modules()]:
        if module is result or (_holds_a_convolution(module) and _is_called(module)):
            module.__class__ = derived(type(module), Compiled)
            module.__dict__["_windrow_part"] = _Part(report, name, options)
    result.windrow_report = report
    return result  # type: ignore[no-any-return]


def _holds_a_convolution(module: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())


def _is_called(module: nn.Module) -> bool:
    """False for lists and dictionaries, and for what TorchScript has compiled."""
    has_forward = type(module).forward is not nn.Module.forward and type(module).forward is not nn.ModuleList.forward
    return has_forward and not isinstance(module, torch.jit.ScriptModule)


class Compiled(Derived):
    """A module whose calls are compiled."""

    # None of what a class makes of itself, as `nn.Sequential` makes slices.
    _windrow_part: _Part | None = None

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        is_observed = self._windrow_part is None or _is_observed(args, kwargs)
        run = None if is_observed else self.__dict__.get(RUN)
        if run is None:
            kind = parts_of(type(self))[0]
            if is_observed or _is_captured():
                return kind.forward(self, *args, **kwargs)
            run = self.__dict__.setdefault(RUN, _Run(self, kind, self._windrow_part))
        return run(self, *args, **kwargs)


class _Run:
    """The compiled `forward` of one module."""

    def __init__(self, module: nn.Module, kind: type[nn.Module], part: _Part) -> None:
        self.module = weakref.ref(module)
        self.part, self.graphs, self.told, self.waits = part, 0, -1, False
        self.unseen: list[Unseen] = []
        # True if calls run uncompiled.
        self.is_left = False
        self.forward = _own(kind.forward)
        self.compiled: Callable[..., Any] = torch.compile(self.forward, backend=self._compile)
        self.calls = Calls(self.forward)
        self.graph: Graph | None = None

    def _compile(self, graph: Any, inputs: Any) -> Any:
        from windrow.torch.backend import compiled_with

        self.graphs += 1
        self.graph = self.calls.graph()
        codes = torch._guards.TracingContext.get_traced_code() or []
        try:
            unseen = Unseen(codes, self.module())
        except UnseenError as what:
            self._leave_state(f"{what} reads `__dict__` and runs uncompiled: PyTorch's compiler sees no change of it")
            if codes[0] is self.forward.__code__:
                # Nothing has run yet.
                raise
            raise torch._dynamo.exc.SkipFrame(str(what)) from None
        if unseen.name:
            self.unseen.append(unseen)
        reason = getattr(graph, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            first = str(reason.reason).strip().partition("\n")[0]
            where = "".join(f" at {Path(f.filename).name}:{f.lineno}" for f in reason.user_stack[-1:])
            self.part.report.left[self._named(f"graph break{where}")] = first
        names = Names.given_to(graph, inputs, self.module())
        self.graph.new = lambda given: self._tell(names.others(given))
        compiled = compiled_with(graph, inputs, self.part.options | {"report": _Told(self.part, names)}, self.graph.ran)
        if not self.waits:
            self.waits = True
            _hook_guards.begin()
        return compiled

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.is_left or (self.unseen and not self._is_same_state()):
            return self.forward(module, *args, **kwargs)
        result = MISSING if kwargs else self.calls.result(args)
        if result is not MISSING:
            return result
        before = self.graphs
        self.calls.begin()
        try:
            result = self.compiled(module, *args, **kwargs)
            if self.graphs == before + 1 and self.graph is not None:
                self.calls.compiled(module, self.graph)
            if not kwargs:
                self.calls.end(module, args, result)
            return result
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, UnseenError):
                raise
            self.is_left = True
            return self.forward(module, *args, **kwargs)
        finally:
            if self.graphs != self.told:
                self._look()

    def _look(self) -> None:
        """After a call that has compiled something, and after the first one."""
        self.told = self.graphs
        if self.waits:
            self.waits = False
            _hook_guards.end()
        entries = len(torch._dynamo.eval_frame._debug_get_cache_entry_list(self.forward.__code__))
        if entries == 0 and not self.is_left:
            self.part.left("", "PyTorch compiles nothing of its forward, only modules in it")
        if entries >= torch._dynamo.config.recompile_limit:
            why = f"compiled for {entries} kinds of input, PyTorch's recompile limit: other kinds run uncompiled"
            self.part.report.left[self._named("recompile limit")] = why

    def _is_same_state(self) -> bool:
        if all(unseen.is_same() for unseen in self.unseen):
            return True
        self.is_left = True
        names = ", ".join(unseen.name for unseen in self.unseen)
        self._leave_state(f"what {names} reads of `__dict__` has changed, so later calls run uncompiled")
        return False

    def _tell(self, fused: dict[str, str]) -> None:
        for name, what in fused.items():
            self.part.fused(name, what)

    def _leave_state(self, why: str) -> None:
        self.part.report.left[self._named("state")] = why

    def _named(self, what: str) -> str:
        return f"{self.part.path('')}, {what}"


class _HookGuards:
    """Makes Dynamo guard the hooks of modules. By default it does not, and would not call hooks that come later. It makes
    guards after it has called the backend, as a setting says."""

    def __init__(self) -> None:
        self._lock, self._wanted, self._before = threading.Lock(), 0, True

    def begin(self) -> None:
        config = torch._dynamo.config
        with self._lock:
            if self._wanted == 0:
                self._before, config.skip_nnmodule_hook_guards = config.skip_nnmodule_hook_guards, False
            self._wanted += 1

    def end(self) -> None:
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0:
                torch._dynamo.config.skip_nnmodule_hook_guards = self._before


_hook_guards = _HookGuards()


def _own(forward: Any) -> Any:
    """The same function with code of its own. Dynamo keeps and counts what it compiles by code, which all modules of a
    class share."""
    if isinstance(forward, types.FunctionType) and not forward.__module__.startswith("torch."):
        own = types.FunctionType(
            forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
        )
        own.__kwdefaults__ = forward.__kwdefaults__
        return own

    # PyTorch's own functions are compiled as part of another.
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


def _is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _is_observed(args: Any, kwargs: Any) -> bool:
    """True where somebody records or transforms what is called, or tensors are no plain ones."""
    if (
        torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or forward_ad._current_level >= 0
    ):
        return True
    if len(args) == 1 and type(args[0]) is Tensor and not kwargs:
        return args[0].is_meta
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) or hasattr(leaf, "node")]
    return any(type(leaf) not in (Tensor, nn.Parameter) or leaf.is_meta for leaf in given)
