"""Swapping modules of an existing model."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from windrow.torch import _memory
from windrow.torch._conv2d import FASTEST, Conv2d
from windrow.torch._fastest import decisions
from windrow.torch._gelu import GELU


@dataclass
class PatchReport:
    """What `patch` did to `model`: names of the modules swapped, and of those left with the reason.

    Printed, it also says what was decided so far for the problems that the convolutions have met.
    """

    model: nn.Module
    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        modules = dict(self.model.named_modules())
        lines = []
        for name, what in self.swapped.items():
            lines.append(f"swapped {name}: {what}")
            if isinstance(modules.get(name), Conv2d):
                lines += [f"    {line}" for line in _decided(modules[name])]
        lines += [f"left {name}: {why}" for name, why in self.left.items()]
        if not lines:
            return "no nn.Conv2d and no nn.GELU in this model"
        if any(isinstance(m, Conv2d) and not m.frozen for m in modules.values()):
            lines.append(
                "each call looks whether a filter has changed since it was packed; "
                "windrow.torch.freeze(model) promises that none does, unfreeze(model) takes it back"
            )
        return "\n".join(lines)


def _decided(module: Conv2d) -> Iterator[str]:
    layer = module.layer()
    for decision in decisions():
        sizes, rest, of_layer = decision.problem
        if of_layer == layer:
            shape, device, dtype = [*sizes[0]], rest[0], str(rest[1]).removeprefix("torch.")
            yield f"{decision.mode} of {dtype} {shape} on {device}: {decision.choice} ({decision.why})"


def patch(model: nn.Module) -> PatchReport:
    """Makes Windrow compute the 3x3 convolutions and GELUs of a model, where that is faster.

    Modules of exactly the types `nn.Conv2d` and `nn.GELU` become `windrow.torch.Conv2d` and `GELU` in
    place: parameters, hooks, device and training mode stay as they are, and so do references to the
    modules. Convolutions other than 3x3 with stride 1, dilation 1 and one group are left: Winograd
    does not apply to them.

    A convolution that was swapped is computed by Windrow or by PyTorch's own operator, whichever is
    faster: each of them is run a few times when a problem (sizes, types, layouts) first comes, and so
    is each gradient. Windrow's may need at most a tenth more memory than PyTorch alone. Where all that is
    Windrow's in a step of training would gain too little, the whole step is PyTorch's.
    """
    report = PatchReport(model)
    for name, module in model.named_modules():
        if type(module) is nn.GELU:
            module.__class__ = GELU
            report.swapped[name] = f"GELU(approximate={module.approximate!r})"
        elif type(module) is nn.Conv2d:
            winograd = (
                module.kernel_size == (3, 3)
                and module.stride == (1, 1)
                and module.dilation == (1, 1)
                and module.groups == 1
            )
            if winograd:
                module.__class__ = Conv2d
                module.algorithm = FASTEST
                report.swapped[name] = f"Conv2d({module.extra_repr()})"
            else:
                report.left[name] = f"Conv2d({module.extra_repr()}) is no 3x3 with stride 1"
        elif isinstance(module, (Conv2d, GELU)):
            report.left[name] = f"{type(module).__name__}({module.extra_repr()}) is Windrow's already"
    if report.swapped:
        _memory.start(model)
    return report


def freeze(model: nn.Module) -> nn.Module:
    """Promises that the filters of a model's `windrow.torch.Conv2d` do not change from here on, in
    whatever way; what is packed is not compared with them any more. Returns the model.

    A filter that is replaced (`module.weight = ...`, `weight.data = ...`, `model.to(...)`) is packed
    anew all the same, and one whose gradient is wanted is packed on each call.
    """
    return _set_frozen(model, True)


def unfreeze(model: nn.Module) -> nn.Module:
    """Takes the promise of `freeze` back: filters may change again. Returns the model."""
    return _set_frozen(model, False)


def _set_frozen(model: nn.Module, frozen: bool) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Conv2d):
            module.frozen = frozen
    return model
