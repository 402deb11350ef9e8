"""Swapping modules of an existing model."""

from dataclasses import dataclass, field

from torch import nn

from windrow.torch._conv2d import Conv2d
from windrow.torch._gelu import GELU


@dataclass
class PatchReport:
    """What `patch` did: names of the modules swapped, and of those left with the reason."""

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"swapped {name}: {what}" for name, what in self.swapped.items()]
        lines += [f"left {name}: {why}" for name, why in self.left.items()]
        return "\n".join(lines) or "no nn.Conv2d and no nn.GELU in this model"


def patch(model: nn.Module) -> PatchReport:
    """Makes Windrow compute the 3x3 convolutions and GELUs of a model.

    Modules of exactly the types `nn.Conv2d` and `nn.GELU` become `windrow.torch.Conv2d` and `GELU` in
    place: parameters, hooks, device and training mode stay as they are, and so do references to the
    modules. Convolutions other than 3x3 with stride 1, dilation 1 and one group are left: Winograd
    does not apply to them.
    """
    report = PatchReport()
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
                report.swapped[name] = f"Conv2d({module.extra_repr()})"
            else:
                report.left[name] = f"Conv2d({module.extra_repr()}) is no 3x3 with stride 1"
    return report
