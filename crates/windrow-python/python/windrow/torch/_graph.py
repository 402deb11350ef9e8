"""What the steps of `optimize` do alike with what torch.fx traced."""

from torch import fx, nn


def has_hooks(module: nn.Module) -> bool:
    """Then it does what nobody traced."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def replace_module(traced: fx.GraphModule, name: str, module: nn.Module) -> None:
    """Puts the module where `name` says, of an earlier one or not."""
    *path, last = name.split(".")
    setattr(traced.get_submodule(".".join(path)), last, module)
