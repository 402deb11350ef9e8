"""Channels-last inside of an optimized model, whatever the layout of the image that it is given."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from windrow.torch._graph import is_wrapped, writes

# What sees how a tensor lies in memory: `view` raises where its dimensions do not lie next to each other.
_SEE_STRIDES = {"view", "view_as", "as_strided", "stride", "is_contiguous", "data_ptr", "storage_offset", "numpy"}


# On CUDA, of so many images on, f32 is faster in channels-last: networks of 64 take 0.84 to 0.99 of the time and of one 0.96
# to 1.13. Halves are for any number: 0.41 to 0.98, and once 1.06.
_IMAGES_ON_CUDA = 8


def is_any_layout(traced: fx.GraphModule) -> bool:
    """Whether what was traced computes the same in channels-last."""
    modules = dict(traced.named_modules())
    for node in traced.graph.nodes:
        if node.op in ("call_method", "call_function"):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            if name in _SEE_STRIDES or _is_random(name):
                return False
        elif node.op == "call_module":
            module = modules[node.target]
            if is_wrapped(module) or (module.training and _is_random(type(module).__name__)):
                return False
    # What is written to the image must not be written to a copy of it.
    return all(source.op != "placeholder" for source in writes(traced.graph, modules))


def _is_random(name: str) -> bool:
    """Random numbers are drawn in the order of memory."""
    parts = ("rand", "dropout", "bernoulli", "normal_", "uniform_", "exponential_", "multinomial", "rrelu", "stochastic")
    return any(part in name.lower() for part in parts)


def pays_on_cpu(traced: fx.GraphModule) -> bool:
    """Windrow's convolutions and PyTorch's pooling are faster in channels-last, but not 1x1 filters of bf16, of which models
    of depthwise filters consist."""
    filters = [m for m in traced.modules() if isinstance(m, nn.Conv2d)]
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
    """An image in channels-last where that is faster; as it is under transforms of `torch.func`, where not every version of
    PyTorch can lay it out."""

    def forward(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() != 4 or not _pays(x) or _is_transformed():
            return x
        return x.contiguous(memory_format=torch.channels_last)


def _pays(x: Tensor) -> bool:
    if not x.is_cuda:
        return x.is_cpu
    # What is compiled for any number of images must not ask for it.
    return x.dtype != torch.float32 or torch.compiler.is_compiling() or x.shape[0] >= _IMAGES_ON_CUDA


def _is_transformed() -> bool:
    return not torch.compiler.is_dynamo_compiling() and torch._C._are_functorch_transforms_active()


class LaidOutAs(nn.Module):
    """A result, row-major if x is."""

    def forward(self, y: Any, x: Any) -> Any:
        if isinstance(y, Tensor) and y.dim() == 4 and isinstance(x, Tensor) and x.is_contiguous():
            return y.contiguous()
        return y
