"""The options of `torch.compile(model, backend="windrow")`."""

import functools
import operator
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses import FakeTensor

from windrow.torch._batch_invariant import accuracy_with
from windrow.torch._conv2d import ACCURACIES
from windrow.torch.backend._report import Report

_OWN = ("accuracy", "batch_invariant", "check", "freeze", "mode", "report", "rest")
RESTS = ("inductor", "eager")


# The oldest PyTorch on which all tests pass.
OLDEST = (2, 8)


class VersionError(RuntimeError):
    """The error for a PyTorch whose compiler the backend does not know."""


class OptionError(ValueError):
    """The error for an option, or a value of an option, that neither the backend nor Inductor knows."""


# A function of the constants, the graph's inputs and its results.
Ran = Callable[[Any, list[Any], Sequence[Any]], None]


@dataclass(frozen=True)
class Options:
    """The options of one compilation."""

    # The accuracy of convolutions, as in `patch`. It also says whether bits may depend on the batch.
    accuracy: str | None = None
    # True if values that depend on parameters alone are computed once, unless a gradient is needed.
    freeze: bool = True
    # The compiler of the rest: "inductor", or "eager" for PyTorch's operators one by one. None: what the graph suits.
    rest: str | None = None
    # True if a graph is compared with PyTorch's at its first call.
    check: bool = True
    # An object that is told what each convolution became; see `_report`.
    report: Report | None = None
    # A function that is told of each run of a graph with constants.
    ran: Ran | None = None
    # Inductor's own options.
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(mode: str | None, given: Mapping[str, Any] | None) -> "Options":
        """The options from `mode` and `options`. Raises OptionError for unknown ones, and VersionError for an old
        PyTorch."""
        expect_known_version()
        own = {name: value for name, value in (given or {}).items() if name in _OWN}
        inductor = {name.replace("-", "_"): value for name, value in (given or {}).items() if name not in _OWN}
        mode = own.pop("mode", mode)
        rest = own.pop("rest", None)
        accuracy, freeze = own.pop("accuracy", None), own.pop("freeze", True)
        check, report = own.pop("check", True), own.pop("report", None)
        _expect("accuracy", accuracy, ACCURACIES)
        batch_invariant = own.pop("batch_invariant", False)
        _expect("batch_invariant", batch_invariant, (True, False))
        accuracy = accuracy_with(accuracy, batch_invariant)
        _expect("freeze", freeze, (True, False))
        _expect("check", check, (True, False))
        _expect("rest", rest, (None, *RESTS))
        if inductor or mode not in (None, "default"):
            inductor = _of_mode(mode) | _known(inductor)
        if inductor:
            rest = rest or "inductor"
        return Options(accuracy, bool(freeze), rest, bool(check), report, inductor=inductor)


def expect_known_version() -> None:
    """Raises VersionError on an old PyTorch."""
    if torch.__version__ < OLDEST:
        raise VersionError(f"windrow compiles with PyTorch {'.'.join(map(str, OLDEST))} and newer, this is {torch.__version__}")


def _expect(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise OptionError(f"`{name}` is {value!r}, expected one of {[*known]}")


def _of_mode(mode: str | None) -> dict[str, Any]:
    import torch._inductor

    modes = torch._inductor.list_mode_options()
    _expect("mode", mode, (None, "default", *modes))
    return dict(modes.get(mode or "default", {}))


def _known(inductor: dict[str, Any]) -> dict[str, Any]:
    import torch._inductor

    known = torch._inductor.list_options()
    for name in inductor:
        if name not in known:
            raise OptionError(f"unknown option {name!r}, expected one of {[*_OWN]}, or of Inductor's: {known}")
    return inductor


def can_inductor(devices: set[str]) -> bool:
    """True if Inductor can compile for these types of devices. Warns once of what is missing."""
    lacks = _lacking(frozenset(devices))
    if lacks:
        warnings.warn(f"windrow: Inductor lacks {lacks} here, so what is no convolution runs uncompiled", stacklevel=2)
    return not lacks


def rest_of(graph: fx.GraphModule, inputs: Any) -> str:
    """The way to run the rest of an optimized model's graph if the user does not say. On CUDA PyTorch's group normalisation
    copies images in channels-last, and the convolution behind it copies its result back: with Inductor the decoder of
    Stable Diffusion's autoencoder takes a quarter of the time. Other graphs gain little, and Inductor's code calls
    operators in a longer way."""
    is_slow = "cuda" in device_types(inputs) and any(node.target is F.group_norm for node in graph.graph.nodes)
    return "inductor" if is_slow else "eager"


# PyTorch's functions that become part of one call on the CPU: convolutions, and what networks have between them. Linear
# layers do not: each is a call of its own, with Inductor too. Dropout is nothing in inference.
_IN_ONE_CALL = {
    *(torch.conv2d, F.conv2d, torch.conv_transpose2d, F.conv_transpose2d, F.batch_norm, F.pad, F.dropout, F.linear),
    *(torch.relu, torch.relu_, F.relu, F.relu6, F.hardtanh, F.leaky_relu, F.silu, F.hardswish, F.hardsigmoid, torch.sigmoid),
    *(operator.add, operator.iadd, torch.add, operator.mul, operator.imul, torch.mul, torch.cat, torch.concat),
    *(operator.getitem, torch.split, torch.chunk, torch.flatten, F.interpolate, torch.mean),
    *(F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.pixel_shuffle),
}
_METHODS_IN_ONE_CALL = {"add", "add_", "mul", "mul_", "relu", "relu_", "sigmoid", "mean", "flatten", "split", "chunk"}


def is_one_call(graph: fx.GraphModule, inputs: Any) -> bool:
    """True for an inference graph that is nearly all one native call on the CPU if PyTorch's operators compute what is left of
    it: f32 images of known sizes, convolutions, and what networks of convolutions have between them. With Inductor ten
    networks took 1.01 to 2.1 times as long (two threads of an EPYC, b4c8f7d)."""
    # AOTAutograd takes no other subclass of a tensor if operators run one by one (PyTorch 2.11).
    are_plain = all(type(t) in (torch.Tensor, torch.nn.Parameter, FakeTensor) for t in inputs)
    if torch.is_autocast_enabled("cpu") or not are_plain:
        return False
    is_trained = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    is_known = lambda t: all(isinstance(n, int) for n in t.shape)
    are_known = all(t.device.type == "cpu" and t.dtype in (torch.float32, torch.int64) and is_known(t) for t in inputs)
    if is_trained or not are_known:
        return False
    calls = [node for node in graph.graph.nodes if node.op.startswith("call_") and node.all_input_nodes]
    is_part = lambda node: node.target in (_METHODS_IN_ONE_CALL if node.op == "call_method" else _IN_ONE_CALL)
    return all(map(is_part, calls)) and any(node.target in (torch.conv2d, F.conv2d) for node in calls)


@functools.cache
def _lacking(devices: frozenset[str]) -> str | None:
    if "cuda" in devices:
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton"
    if "cpu" in devices and not _has_cpp_compiler():
        return "a C++ compiler"
    return None


def _has_cpp_compiler() -> bool:
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        return shutil.which(get_cpp_compiler()) is not None
    except Exception:  # What PyTorch raises where it finds none differs with its version.
        return False


def device_types(inputs: Any) -> set[str]:
    return {t.device.type for t in inputs if isinstance(t, torch.Tensor)}
