"""A copy of a model for inference: normalisation folded into convolutions, what follows them fused."""

import copy
import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from windrow.torch._batch_norm import BatchNorm2d
from windrow.torch._conv2d import ACCURACIES
from windrow.torch._fused import FusedConv2d
from windrow.torch._gelu import GELU, gelu
from windrow.torch._group_norm import GroupNorm
from windrow.torch._graph import has_hooks, replace_module
from windrow.torch._layout import is_any_layout, pays_on_cpu, to_channels_last
from windrow.torch._modules import Conv2d, Convolution
from windrow.torch._patch import freeze, patch
from windrow.torch._pointwise import Pointwise, linear_to_convolutions
from windrow.torch._sequence import in_sequences


@dataclass
class OptimizeReport:
    """What `optimize` did: the convolutions with what was folded into them and fused to them, GELUs, and what was
    left with the reason."""

    fused: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"fused {name}: {what}" for name, what in self.fused.items()]
        lines += [f"left {name}: {why}" for name, why in self.left.items()]
        return "\n".join(lines) or "no convolution and no GELU in this model"


def optimize(model: nn.Module, accuracy: str | None = None) -> nn.Module:
    """A new module that computes what `model.eval()` does, faster; the model stays as it is.

    torch.fx traces the model, or the `nn.Sequential`s in it if its `forward` takes more than one tensor or
    branches on one. In what was traced, batch normalisations become part of the filters before them, and an
    addition and an activation (ReLU, ReLU6, SiLU, GELU) behind a convolution one operation with it. It is computed by
    PyTorch's operators, by what cuDNN has in one, or by Windrow, whichever is found fastest when a problem first
    comes. All other convolutions, GELUs and group normalisations are as `patch` leaves them, with frozen filters.

    The result owns its filters, which are buffers and taken to stay as they are; `load_state_dict` may replace them.
    It can be saved and loaded, compiled, and captured into CUDA graphs once it has run. No gradient flows through it.
    Its `windrow_report` says what was done. accuracy: as in `patch`.
    """
    if accuracy not in ACCURACIES:
        raise ValueError(f"`accuracy` is {accuracy!r}, expected one of {[*ACCURACIES]}")
    report = OptimizeReport()
    result = copy.deepcopy(model).eval().requires_grad_(False)
    result = _optimized(result, "", accuracy, report)
    rest = patch(result, accuracy)
    kinds = (FusedConv2d, Convolution, GELU, GroupNorm)
    modules = dict(result.named_modules())
    # Batch normalisations that were not folded are PyTorch's: they are another's in training only.
    report.fused |= {n: what for n, what in rest.swapped.items() if not isinstance(modules[n], BatchNorm2d)}
    report.left |= {n: why for n, why in rest.left.items() if not isinstance(modules[n], kinds)}
    _turn_filters(freeze(result))
    result.windrow_report = report
    return result.eval()


def _turn_filters(model: nn.Module) -> None:
    """Lays filters of halves on CUDA out in channels-last, for which cuDNN has its kernels. Row-major images are copied for them
    on each call; a filter that the model owns need not be, nor be kept once more."""

    def gains(conv: nn.Module) -> bool:
        if type(conv) is not Conv2d or conv.groups > 1 or not conv.weight.is_cuda or not conv.weight.is_contiguous():
            return False
        k, c, *size = conv.weight.shape
        return conv.weight.element_size() == 2 and k % 8 == 0 and c % 8 == 0 and max(size) > 1

    for conv in [m for m in model.modules() if gains(m)]:
        conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
        conv.is_turned = True


def _optimized(module: nn.Module, name: str, accuracy: str | None, report: OptimizeReport) -> nn.Module:
    """The module, or what takes its place."""
    if not any(isinstance(m, nn.Conv2d) for m in module.modules()) or _is_leaf(module):
        return module
    if _takes_one_tensor(module) and not has_hooks(module):
        try:
            traced = fx.GraphModule(module, _Tracer().trace(module), type(module).__name__)
        except Exception as error:  # Whatever a model's own code raises when it gets no tensor.
            if name == "":
                first = str(error).strip().partition("\n")[0]
                report.left["the model as a whole"] = f"torch.fx cannot trace it: {first}"
        else:
            prefix = f"{name}." if name else ""
            _drop_identities(traced)
            # Of a part, what is saved may be less than laying out its image and result.
            on_cuda = all(t.is_cuda for t in traced.parameters())
            on_cpu = all(t.is_cpu for t in traced.state_dict().values())
            is_last = name == "" and is_any_layout(traced) and (on_cuda or (on_cpu and pays_on_cpu(traced)))
            if is_last or on_cuda:
                linear_to_convolutions(traced)
            for what, how in _fuse(traced, accuracy):
                report.fused[prefix + what] = how
            if is_last:
                to_channels_last(traced)
            if on_cpu:
                in_sequences(traced)
            return traced
    for child_name, child in list(module.named_children()):
        path = f"{name}.{child_name}" if name else child_name
        setattr(module, child_name, _optimized(child, path, accuracy, report))
    return module


def _takes_one_tensor(module: nn.Module) -> bool:
    """Only then is it known what tracing stands for: an argument with a default may be None in some calls."""
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len(parameters) == 1 and all(p.kind in kinds and p.default is p.empty for p in parameters)


def _is_leaf(module: nn.Module) -> bool:
    is_known = type(module).__module__.startswith(("torch.nn", "torch.ao.nn", "windrow."))
    return (is_known and not isinstance(module, nn.Sequential)) or has_hooks(module)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_leaf(m)


def _fuse(traced: fx.GraphModule, accuracy: str | None) -> Iterator[tuple[str, str]]:
    """Changes the module in place; gives the names of convolutions, and what became of each."""
    graph = traced.graph
    modules = dict(traced.named_modules())
    names: set[str] = set()
    for node in list(graph.nodes):
        module = modules.get(node.target) if node.op == "call_module" else None
        if module is None or not _can_be_fused(module, node):
            continue
        tail, what = node, []
        if (norm := _only_user(tail)) is not None and (bn := _batch_norm(norm, modules)) is not None:
            weight, bias = _folded(module, bn)
            what.append(f"folded {norm.target}")
            tail = norm
        else:
            weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
        if (mul := _only_user(tail)) is not None and (factor := _factors(mul, tail, traced, weight)) is not None:
            weight, bias = _scaled(weight, bias, factor)
            what.append(f"folded {next(n for n in mul.all_input_nodes if n is not tail).target}")
            tail = mul
        residual = None
        if (add := _only_user(tail)) is not None and (other := _other_of_sum(add, tail)) is not None:
            if not _changes_between(node, add, modules):
                residual, tail = other, add
                what.append("added")
        activation = None
        if (after := _only_user(tail)) is not None:
            activation = _activation(after, modules)
            if activation is not None:
                tail = after
                what.append(activation)
        name = node.target
        while name in names:
            name += "_again"
        names.add(name)
        weight = weight.flatten(1) if type(module) is Pointwise else weight
        fused = FusedConv2d(weight, bias, _options(module), activation, accuracy)
        replace_module(traced, name, fused)
        # Where it was, but behind what is added.
        with graph.inserting_before(tail if residual is not None else node):
            inputs = node.args[:1] + (() if residual is None else (residual,))
            call = graph.call_module(name, inputs)
        tail.replace_all_uses_with(call)
        chain = [tail]
        while chain[-1] is not node:
            chain.append(next(a for a in chain[-1].all_input_nodes if _leads_to(a, node)))
        for old in chain:
            factors = [a for a in old.all_input_nodes if a.op == "get_attr" and len(a.users) == 1]
            for gone in [old, *factors]:
                graph.erase_node(gone)
        yield name, f"FusedConv2d({fused.extra_repr()})" + (f": {', '.join(what)}" if what else "")
    traced.delete_all_unused_submodules()
    graph.lint()
    traced.recompile()


def _leads_to(node: fx.Node, first: fx.Node) -> bool:
    """True if a chain of only users goes from `first` to `node`."""
    while first is not node and len(first.users) == 1:
        (first,) = first.users
    return first is node


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _can_be_fused(module: nn.Module, node: fx.Node) -> bool:
    return (
        type(module) in (nn.Conv2d, Conv2d, Pointwise)
        and module.padding_mode == "zeros"
        and getattr(module, "activation", None) is None
        and not is_parametrized(module)
        and not has_hooks(module)
        and _options(module) is not None
        and len(node.args) == 1
        and not node.kwargs
    )


def _options(module: nn.Conv2d) -> tuple[Any, ...] | None:
    """None for padding that is more at one end than at the other."""
    padding: Any = module.padding
    if isinstance(padding, str):
        total = [d * (r - 1) for d, r in zip(module.dilation, module.kernel_size, strict=True)]
        if padding == "same" and any(n % 2 for n in total):
            return None
        padding = [n // 2 for n in total] if padding == "same" else [0, 0]
    return module.stride, padding, module.dilation, module.groups


def _batch_norm(node: fx.Node, modules: dict[str, nn.Module]) -> nn.BatchNorm2d | None:
    module = modules.get(node.target) if node.op == "call_module" else None
    is_fixed = type(module) in (nn.BatchNorm2d, BatchNorm2d) and module.running_mean is not None
    return module if is_fixed and not has_hooks(module) else None


def _folded(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Filter and bias with the normalisation in them, computed in f64 and rounded once."""
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    bias = -norm.running_mean.double()
    if conv.bias is not None:
        bias = bias + conv.bias.double()
    bias = bias * scale
    if norm.bias is not None:
        bias = bias + norm.bias.double()
    weight = conv.weight.double() * scale[:, None, None, None]
    # `to` keeps the strides: a channels-last filter stays one.
    return weight.to(conv.weight.dtype).detach(), bias.to(conv.weight.dtype).detach()


_PRODUCTS: tuple[Any, ...] = (operator.mul, torch.mul, "mul")


def _factors(node: fx.Node, one: fx.Node, traced: fx.GraphModule, weight: Tensor) -> Tensor | None:
    """What the channels of `one` are multiplied with, if the node is a product with a tensor of the model, [channels, 1, 1]."""
    if node.op not in ("call_function", "call_method") or node.target not in _PRODUCTS or node.kwargs:
        return None
    other = [a for a in node.args if a is not one]
    if len(node.args) != 2 or len(other) != 1 or not isinstance(other[0], fx.Node) or other[0].op != "get_attr":
        return None
    *path, last = other[0].target.split(".")
    factor = getattr(traced.get_submodule(".".join(path)), last)
    fits = factor.shape == (weight.shape[0], 1, 1) and factor.dtype == weight.dtype
    return factor if fits else None


def _scaled(weight: Tensor, bias: Tensor | None, factor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Filter and bias times a factor for each output channel, [channels, 1, 1]."""
    by = factor.detach().double()
    scaled = (weight.double() * by[..., None]).to(weight.dtype)
    return scaled, None if bias is None else (bias.double() * by[:, 0, 0]).to(bias.dtype)


_SUMS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")


def _other_of_sum(node: fx.Node, one: fx.Node) -> fx.Node | None:
    """What is added to `one`, if the node is such a sum of two tensors."""
    if node.op not in ("call_function", "call_method") or node.target not in _SUMS:
        return None
    if node.kwargs or len(node.args) != 2 or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    first, second = node.args
    other = second if first is one else first
    return None if other is one else other


def _changes_between(first: fx.Node, last: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """True if what lies between may change a tensor in place: then the first cannot be computed later."""
    node = first.next
    while node is not last:
        if node.op == "call_module" and getattr(modules.get(node.target), "inplace", False):
            return True
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        is_operator = getattr(node.target, "__module__", "") == "_operator" and name in _IN_PLACE
        if node.op in ("call_method", "call_function") and (
            is_operator or node.kwargs.get("inplace") or (name.endswith("_") and not name.endswith("__"))
        ):
            return True
        node = node.next
    return False


_IN_PLACE = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "setitem"}

_ACTIVATIONS: dict[Any, str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    F.relu: "relu",
    F.relu_: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    "relu": "relu",
    "relu_": "relu",
    F.relu6: "relu6",
    F.silu: "silu",
}
_GELUS: tuple[Any, ...] = (nn.GELU, GELU, F.gelu, gelu)


def _activation(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    """Its name, if the node is nothing but an activation that a convolution can be fused with."""
    what: Any = node.target
    approximate = node.kwargs.get("approximate", "none")
    if node.op == "call_module":
        module = modules.get(node.target)
        if module is None or has_hooks(module):
            return None
        what, approximate = type(module), getattr(module, "approximate", "none")
    elif node.op not in ("call_function", "call_method"):
        return None
    if what in _GELUS and len(node.args) == 1 and {*node.kwargs} <= {"approximate"}:
        return "gelu_tanh" if approximate == "tanh" else "gelu"
    return _ACTIVATIONS.get(what) if {*node.kwargs} <= {"inplace"} else None


def _drop_identities(traced: fx.GraphModule) -> None:
    """Takes out what does nothing in evaluation."""
    modules = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        if node.op == "call_module":
            module = modules.get(node.target)
            gone = type(module) in (nn.Identity, nn.Dropout, nn.Dropout2d) and not has_hooks(module)
        else:
            gone = node.op == "call_function" and _does_nothing(node.target, node)
        if gone and isinstance(node.args[0], fx.Node):
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)


def _does_nothing(function: Callable[..., Any], node: fx.Node) -> bool:
    """Dropout of elements or of whole rows, told that this is no training."""
    if function in (F.dropout, F.dropout2d):
        return node.kwargs.get("training", True) is False
    if getattr(function, "__name__", "") == "stochastic_depth":
        training = node.args[3] if len(node.args) > 3 else node.kwargs.get("training", True)
        return training is False
    return False
