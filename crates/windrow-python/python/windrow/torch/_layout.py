"""Channels-last inside of an optimized model on the CPU, whatever the layout of the image that it is given."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from windrow.torch._graph import has_hooks

# What sees how a tensor lies in memory: `view` raises where its dimensions do not lie next to each other.
_SEE_STRIDES = {"view", "view_as", "as_strided", "stride", "is_contiguous", "data_ptr", "storage_offset", "numpy"}


def channels_last_pays(traced: fx.GraphModule) -> bool:
    """Whether what was traced computes the same in channels-last, and faster: on the CPU Windrow's convolutions and
    PyTorch's pooling do, but not 1x1 filters of bf16, of which models of depthwise filters consist."""
    modules = dict(traced.named_modules())
    for node in traced.graph.nodes:
        if node.op in ("call_method", "call_function"):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            if name in _SEE_STRIDES:
                return False
        elif node.op == "call_module" and has_hooks(modules[node.target]):
            return False
    if any(not t.is_cpu for t in traced.state_dict().values()):
        return False
    filters = [m for m in modules.values() if isinstance(m, nn.Conv2d)]
    if any(m.weight.dtype == torch.bfloat16 for m in filters):
        return all(m.weight.shape[1] > 1 or m.groups == 1 for m in filters)
    return True


def to_channels_last(traced: fx.GraphModule) -> None:
    """Lays out the input on the way in, and images among the results as it was on the way out."""
    graph = traced.graph
    traced.add_module(_IN, InChannelsLast())
    traced.add_module(_OUT, LaidOutAs())
    (given,) = (node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(given):
        image = graph.call_module(_IN, (given,))
    given.replace_all_uses_with(image, lambda user: user is not image)
    (output,) = (node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(output):
        laid_out = lambda y: given if y is image else graph.call_module(_OUT, (y, given))
        output.args = fx.map_arg(output.args, laid_out)
    graph.lint()
    traced.recompile()


# Modules, not functions: these would be traced again when a model is loaded.
_IN, _OUT = "_image_in_channels_last", "_result_laid_out"


class InChannelsLast(nn.Module):
    """An image in channels-last, on the CPU; as it is under transforms of `torch.func`, where not every version of PyTorch can
    lay it out."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or not x.is_cpu or _is_transformed():
            return x
        return x.contiguous(memory_format=torch.channels_last)


def _is_transformed() -> bool:
    return not torch.compiler.is_dynamo_compiling() and torch._C._are_functorch_transforms_active()


class LaidOutAs(nn.Module):
    """A result, row-major if x is."""

    def forward(self, y: Any, x: Tensor) -> Any:
        if isinstance(y, Tensor) and y.dim() == 4 and y.is_cpu and x.is_contiguous():
            return y.contiguous()
        return y
