"""The functions that replace modules of an existing model."""

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from windrow.torch._batch_invariant import NOT_PROMISED, accuracy_with, is_promised
from windrow.torch._batch_norm import BatchNorm2d
from windrow.torch._conv2d import ACCURACIES, FASTEST
from windrow.torch._gelu import GELU
from windrow.torch._group_norm import GroupNorm
from windrow.torch._modules import Conv1d, Conv2d, Conv3d, Convolution, ConvTranspose1d, ConvTranspose2d
from windrow.torch._subclass import inserted, original_of, own_name
from windrow.torch.choice import budget, store
from windrow.torch.choice.problem import TYPES


@dataclass
class PatchReport:
    """The report of `patch`: the names of the modules that were swapped, and of those that were not, with the reason.

    Printed, it also shows the decisions so far for the problems that the convolutions have met.
    """

    model: nn.Module
    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        modules = dict(self.model.named_modules())
        lines = []
        for name, what in self.swapped.items():
            lines.append(f"swapped {name}: {what}")
            if isinstance(modules.get(name), Convolution):
                lines += [f"    {line}" for line in _decided(modules[name])]
        lines += [f"left {name}: {why}" for name, why in self.left.items()]
        if not lines:
            return "no convolution and no GELU in this model"
        decides = lambda m: isinstance(m, Convolution) and m.algorithm == FASTEST
        if any(decides(m) and m.accuracy != "exact" for m in modules.values()):
            lines.append(
                "results are compared with PyTorch's when a problem is decided, not later: pixels such as -9999 or 1e9 "
                'may then take digits from outputs that do not see them, but not with accuracy="exact"'
            )
        if any(isinstance(m, Convolution) and not m.frozen for m in modules.values()):
            lines.append(
                "each call looks whether a filter has changed since it was packed; "
                "windrow.torch.freeze(model) promises that none does, unfreeze(model) takes it back"
            )
        return "\n".join(lines)


def _decided(module: Convolution) -> Iterator[str]:
    layer = module.layer()
    for decision in store.every():
        if decision.key.layer == layer:
            problem = f"{decision.what} of {decision.key.image()} on {decision.device}"
            yield f"{problem}: {decision.choice} ({decision.reason})"


# Set on the modules that were swapped, beside the options that they have beyond PyTorch's.
_MARK = "_was_patched"
_OPTIONS = ("activation", "accuracy", "algorithm", "batch_invariant", "frozen", *Convolution.FOUND_OUT)
_OWN = {
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
    nn.ConvTranspose1d: ConvTranspose1d,
    nn.ConvTranspose2d: ConvTranspose2d,
    nn.GELU: GELU,
    nn.GroupNorm: GroupNorm,
    nn.BatchNorm2d: BatchNorm2d,
}


def patch(model: nn.Module, accuracy: str | None = None, batch_invariant: bool = False) -> PatchReport:
    """Makes Windrow compute the convolutions and GELUs of a model, each if that is faster.

    Modules of exactly the types `nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d`, `nn.ConvTranspose1d`, `nn.ConvTranspose2d` and
    `nn.GELU` become modules of `windrow.torch` in place. If the class of a module derives from one of the first three
    and its `forward` calls theirs, as causal convolutions do, it keeps its `forward`, and Windrow computes what that
    calls. A module is left if it or its class has an attribute, method, buffer, parameter or submodule with the name of
    an option of Windrow's modules, such as `activation`. Parameters, hooks, device, training mode and references to the
    modules stay. The report, whose `model` is the model, names every convolution and every GELU that was left, with the
    reason. A GELU that a `forward` calls as a function is not found, because it is no module. `nn.GroupNorm` and
    `nn.BatchNorm2d` are swapped too, for CUDA: group normalisation of few large groups in inference, and batch
    normalisation of few long channels of row-major batches in training, are faster with other operators of PyTorch. If
    `patch` raises an error, it has changed nothing.

    A swapped convolution is computed by Windrow or by PyTorch's own operator, whichever is faster. The first call of a
    problem (sizes, types, layouts) runs each of them a few times. The first call of each gradient does so too. If
    Windrow would call cuDNN, as PyTorch does, nothing is measured and PyTorch computes the problem. On CUDA Windrow may
    need at most a tenth more memory than PyTorch alone. If Windrow would gain too little in a training step, PyTorch
    computes the whole step.

    accuracy: the accuracy of the swapped convolutions, as in `conv2d`. None means that of PyTorch's own convolutions:
    PyTorch's flags decide for f32, and f16 and bf16 are summed in f32. "half" allows algorithms that round the operands
    to f16 or bf16.

    batch_invariant: if true, Windrow computes every convolution that it supports, nothing is measured, and the bits of an
    image's result do not depend on the other images in its batch. Of other modules only GELU is swapped. The report
    also names each other module whose bits may depend on the batch, such as linear layers, normalisations and
    attention. Functions that a `forward` calls are not found.

    `unpatch` undoes `patch`, and `patched` patches a model for the time of a block.
    """
    if accuracy not in ACCURACIES:
        raise ValueError(f"`accuracy` is {accuracy!r}, expected one of {[*ACCURACIES]}")
    report = PatchReport(model)
    swapped = []
    for name, module in model.named_modules():
        why = _why_left(module)
        if why is None and batch_invariant:
            why = _why_not_promised(module)
        if why is not None:
            report.left[name] = why
        elif (kind := _ours(module)) is not None:
            report.swapped[name] = f"{kind.__name__}({module.extra_repr()})"
            swapped.append((module, kind))
    # All of the model or, if something fails, nothing.
    if swapped:
        budget.start(model)
    kinds = [type(module) for module, _ in swapped]
    try:
        for module, kind in swapped:
            module.__class__ = kind
            setattr(module, _MARK, True)
            if isinstance(module, Convolution):
                module.algorithm = None if batch_invariant else FASTEST
                module.accuracy = accuracy_with(accuracy, batch_invariant)
            elif isinstance(module, GELU) and batch_invariant:
                module.batch_invariant = True
    except BaseException:
        for (module, _), kind in zip(swapped, kinds, strict=True):
            _take_back(module, kind)
        raise
    return report


def unpatch(model: nn.Module) -> nn.Module:
    """Restores PyTorch's classes of the modules that `patch` has swapped. Returns the model.

    Modules that you made from classes of `windrow.torch` do not change. What other code has added to a swapped module
    stays: a `forward` on the instance, parametrizations, the class that `fully_shard` makes. If the class of a swapped
    module was replaced by one that derives from a class of `windrow.torch` and that somebody wrote, the module does not
    change, and a warning names it. If a swapped module has been given an `activation`, which PyTorch's module cannot
    have, `unpatch` raises ValueError and changes nothing.
    """
    swapped = {name: m for name, m in model.named_modules() if getattr(m, _MARK, False) is True}
    for name, module in swapped.items():
        if getattr(module, "activation", None) is not None:
            theirs = f"nn.{type(module).__name__}"
            raise ValueError(f"`{name}` has activation {module.activation!r}, which {theirs} has not")
    _restore(swapped)
    return model


@contextmanager
def patched(
    model: nn.Module, accuracy: str | None = None, batch_invariant: bool = False
) -> Iterator[PatchReport]:
    """A context in which a model is patched: `with windrow.torch.patched(model) as report:`. At its end the swapped
    modules get PyTorch's classes back."""
    report = patch(model, accuracy, batch_invariant)
    modules = dict(model.named_modules())
    swapped = {name: modules[name] for name in report.swapped}
    try:
        yield report
    finally:
        _restore(swapped)


def _restore(swapped: dict[str, nn.Module]) -> None:
    known: dict[type, type | None] = {ours: theirs for theirs, ours in _OWN.items()}
    kept = []
    for name, module in swapped.items():
        kind = _restored(type(module), known)
        if kind is None:
            kept.append(f"`{name}`, whose class {type(module).__qualname__} derives from Windrow's")
            continue
        _take_back(module, kind)
    if kept:
        warnings.warn(f"unpatch leaves {', '.join(kept)}", stacklevel=3)


def _take_back(module: nn.Module, kind: type) -> None:
    """Gives a module the class that it had, and removes what `patch` has set."""
    if kind is not type(module):
        module.__class__ = kind
    for attribute in (_MARK, *_OPTIONS):
        module.__dict__.pop(attribute, None)


def _restored(kind: type, known: dict[type, type | None]) -> type | None:
    """The class with PyTorch's class in the place of Windrow's. A class that a program generated, as `parametrize` and
    `fully_shard` do, is generated again; for one that somebody wrote the result is None."""
    if kind not in known and (original := original_of(kind)) is not None:
        known[kind] = original
    if kind not in known:
        bases = [_restored(base, known) if issubclass(base, tuple(_OWN.values())) else base for base in kind.__bases__]
        restored: type | None = kind
        if tuple(bases) != kind.__bases__:
            parts = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
            is_made = not _is_written(kind) and None not in bases
            restored = type(kind)(kind.__name__, tuple(filter(None, bases)), parts) if is_made else None
        known[kind] = restored
    return known[kind]


def _is_written(kind: type) -> bool:
    """True if the class comes from a class statement: it is found by its name, or was defined in a function."""
    return "<locals>" in kind.__qualname__ or getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind


def _ours(module: nn.Module) -> type[nn.Module] | None:
    """The class of Windrow that takes the place of a module's. None if there is none."""
    kind = type(module)
    made = _OWN.get(kind) or _inserted(module)
    return made if isinstance(made, type) else None


def _inserted(module: nn.Module) -> type[nn.Module] | str | None:
    """The class of a module that derives from a convolution, with Windrow's convolution in it; or why there is none."""
    theirs = next((base for base in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(module, base)), None)
    if theirs is None:
        return None
    clash = _clash(module, theirs)
    return inserted(type(module), theirs, _OWN[theirs]) if clash is None else clash


def _clash(module: nn.Module, theirs: type[nn.Module]) -> str | None:
    """The reason why a module of PyTorch's class `theirs`, or derived from it, cannot have Windrow's attributes."""
    name = own_name(module, theirs, _OWN[theirs], (_MARK, *_OPTIONS))
    return None if name is None else f"has a `{name}` of its own"


def _why_left(module: nn.Module) -> str | None:
    """The reason why `patch` leaves a convolution, GELU or normalisation. None for modules that it swaps and for all
    other modules."""
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in _OWN:
        clash = _clash(module, kind)
        return None if clash is None else f"{name} {clash}"
    if isinstance(module, tuple(_OWN.values())):
        return f"{kind.__name__}({module.extra_repr()}) is Windrow's already"
    if isinstance(module, tuple(_OWN)):
        if is_parametrized(module):
            return f"{name} is parametrized: patch the model before that"
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            return f"{name} has no weights yet: run the model, then patch it"
        made = _inserted(module)
        if made is None:
            return f"{name} is a class of its own, whose forward may be another"
        return None if isinstance(made, type) else f"{name} {made}"
    if isinstance(module, nn.modules.conv._ConvNd):
        return f"{name}: Windrow has nothing faster"
    if re.search("ge(l|gl)u", kind.__name__, re.IGNORECASE):
        return f"{name} is no nn.GELU; where it computes the same, put windrow.torch.GELU in its place"
    return None


def _why_not_promised(module: nn.Module) -> str | None:
    """The reason why the bits of a module may depend on the batch. None for modules that `patch` swaps, for those that
    add nothing up, and for those that only contain others."""
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind is nn.GELU:
        return None
    if kind in _OWN and isinstance(module, nn.modules.conv._ConvNd):
        types = {p.dtype for p in module.parameters()}
        return f"{name} of {', '.join(map(str, types - {*TYPES}))}: {NOT_PROMISED}" if types - {*TYPES} else None
    is_whole = isinstance(module, nn.MultiheadAttention) or not [*module.children()]
    return f"{name}: {NOT_PROMISED}" if is_whole and not is_promised(module) else None


def freeze(model: nn.Module) -> nn.Module:
    """Records your promise that the filters of a model's `windrow.torch` convolutions will not change. Each packed
    filter is compared with its filter once more, and then not in later calls. Returns the model.

    A filter that is replaced (`module.weight = ...`, `weight.data = ...`, `model.to(...)`) is still packed again. A
    filter whose gradient is wanted is packed on each call.
    """
    return _set_frozen(model, True)


def unfreeze(model: nn.Module) -> nn.Module:
    """Ends the promise of `freeze`: filters may change again. Returns the model."""
    return _set_frozen(model, False)


def _set_frozen(model: nn.Module, frozen: bool) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Convolution):
            module.frozen = frozen
    return model
