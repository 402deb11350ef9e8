"""A copy of a model for inference: normalisation folded into convolutions, what follows them fused."""

import copy
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from windrow.torch._activations import SPELLED
from windrow.torch._batch_norm import BatchNorm2d
from windrow.torch._by_graph import ByGraph, Fold, put_before, undo
from windrow.torch._check import Check, Checked
from windrow.torch._conv2d import ACCURACIES
from windrow.torch._fused import FusedConv2d
from windrow.torch._gelu import GELU, gelu
from windrow.torch._group_norm import GroupNorm
from windrow.torch._graph import attribute, is_tensor, is_wrapped, replace_module, written
from windrow.torch._layout import is_any_layout, pays_on_cpu, to_channels_last
from windrow.torch._modules import Conv2d, Convolution
from windrow.torch._patch import freeze, patch
from windrow.torch._pointwise import Pointwise, linear_to_convolutions
from windrow.torch._sequence import in_sequences
from windrow.torch._trace import FROZEN_NORM, NORM_ACT, Unsound, is_leaf, traced


@dataclass
class OptimizeReport:
    """The report of `optimize`: the convolutions with what was folded into them and fused with them, the GELUs, and
    what was left unchanged, with the reason."""

    fused: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"fused {name}: {what}" for name, what in self.fused.items()]
        lines += [f"left {name}: {why}" for name, why in self.left.items()]
        return "\n".join(lines) or "no convolution and no GELU in this model"


def optimize(model: nn.Module, accuracy: str | None = None, check: bool = True) -> nn.Module:
    """A new module that computes the same as `model.eval()`, faster; the model itself does not change.

    torch.fx traces the model, or the modules in it whose `forward` takes one argument if that of the model takes more or
    branches on one. In what was traced, batch normalisations become part of the filters before them, and an
    addition and an activation (ReLU, ReLU6, SiLU, GELU) behind a convolution one operation with it. It is computed by
    PyTorch's operators, by what cuDNN has in one, or by Windrow, whichever is found fastest when a problem first
    comes. All other convolutions, GELUs and group normalisations are as `patch` leaves them, with frozen filters.

    The result is of the model's class, with its attributes, methods and modules, and owns its filters. These are taken to
    stay as they are; `load_state_dict` may replace them, also by those of the model. It can be saved and loaded, compiled,
    and captured into CUDA graphs once it has run. No gradient flows through it. Its `windrow_report` says what was done.
    accuracy: as in `patch`.

    check: the first call for each kind of input (types, shapes, layout, flags) is compared with the model's, in results and in
    each convolution; where one differs, the result is as `patch` leaves the model from there on, and the report says why.
    """
    if accuracy not in ACCURACIES:
        raise ValueError(f"`accuracy` is {accuracy!r}, expected one of {[*ACCURACIES]}")
    report = OptimizeReport()
    result = copy.deepcopy(model)
    for module in [*result.modules()]:
        undo(module)
    result.eval().requires_grad_(False)
    _optimize(result, "", accuracy, report)
    rest = patch(result, accuracy)
    kinds = (FusedConv2d, Convolution, GELU, GroupNorm)
    modules, called = dict(result.named_modules()), _called(result)
    # Batch normalisations that were not folded are PyTorch's: they are another's in training only.
    report.fused |= {
        n: what for n, what in rest.swapped.items() if modules[n] in called and not isinstance(modules[n], BatchNorm2d)
    }
    report.left |= {n: why for n, why in rest.left.items() if not isinstance(modules[n], kinds)}
    report.left |= _not_folded(modules)
    _turn_filters([m for m in freeze(result).modules() if m in called])
    for module in modules.values():
        if isinstance(module, ByGraph):
            module._watch()
    result.windrow_report = report
    if check and any(isinstance(m, ByGraph) for m in modules.values()):
        put_before(result, Checked)
        result.__dict__["_windrow_check"] = Check(accuracy)
    return result.eval()


def _not_folded(modules: dict[str, nn.Module]) -> dict[str, str]:
    """Why normalisations by numbers of their own are none that a filter could take up."""
    parts = [(name, m) for name, m in modules.items() if isinstance(m, ByGraph)]
    folded = {f"{name}.{f.norm}".lstrip(".") for name, m in parts for f in m._windrow_folds}
    left = {}
    for name, module in modules.items():
        kind = type(module)
        is_own = not kind.__module__.startswith(("torch.nn.", "windrow."))
        if name in folded or not isinstance(getattr(module, "running_var", None), Tensor):
            continue
        if isinstance(module, nn.BatchNorm2d) and module.training:
            left[name] = f"{kind.__name__} is not folded: it stays in training"
        elif is_own:
            left[name] = f"{kind.__module__}.{kind.__qualname__} is not folded into a convolution before it"
    return left


def _called(model: nn.Module) -> set[nn.Module]:
    """The modules that calls reach: of what is computed by a graph, those of the graph."""
    called, beside = set(), set()
    for module in model.modules():
        if isinstance(module, ByGraph):
            called |= {*module._windrow_graph.modules()}
            beside |= {*module.modules()}
    return called | ({*model.modules()} - beside)


def _turn_filters(modules: Iterable[nn.Module]) -> None:
    """Lays filters of halves on CUDA out in channels-last, for which cuDNN has its kernels. Row-major images are copied for them
    on each call; a filter that the model owns need not be, nor be kept once more."""

    def gains(conv: nn.Module) -> bool:
        if type(conv) is not Conv2d or conv.groups > 1 or not conv.weight.is_cuda or not conv.weight.is_contiguous():
            return False
        k, c, *size = conv.weight.shape
        return conv.weight.element_size() == 2 and k % 8 == 0 and c % 8 == 0 and max(size) > 1

    for conv in [m for m in modules if gains(m)]:
        conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
        conv.is_turned = True


def _optimize(module: nn.Module, name: str, accuracy: str | None, report: OptimizeReport) -> None:
    """Gives the module, or modules in it, a graph."""
    if not any(isinstance(m, nn.Conv2d) for m in module.modules()) or is_leaf(module):
        return
    if _takes_one_argument(module):
        try:
            graph = traced(module)
        except Unsound as why:
            report.left[name or _WHOLE] = f"not fused as a whole: {why}"
        except Exception as error:  # Whatever a model's own code raises when it gets no tensor.
            if name == "":
                first = str(error).strip().partition("\n")[0]
                report.left[_WHOLE] = f"torch.fx cannot trace it: {first}"
        else:
            _by_graph(module, graph, name, accuracy, report)
            return
    for child_name, child in module.named_children():
        _optimize(child, f"{name}.{child_name}" if name else child_name, accuracy, report)


_WHOLE = "the model as a whole"


def _by_graph(
    module: nn.Module, graph: fx.GraphModule, name: str, accuracy: str | None, report: OptimizeReport
) -> None:
    _split_activations(graph)
    _drop_identities(graph)
    # Of a part, what is saved may be less than laying out its image and result.
    on_cuda = all(t.is_cuda for t in graph.parameters())
    on_cpu = all(t.is_cpu for t in graph.state_dict().values())
    is_last = name == "" and is_any_layout(graph) and (on_cuda or (on_cpu and pays_on_cpu(graph)))
    if is_last or on_cuda:
        linear_to_convolutions(graph)
    folds = []
    for fold, what in _fuse(module, graph, accuracy):
        report.fused[f"{name}.{fold.fused}" if name else fold.fused] = what
        folds.append(fold)
    if not folds and not is_last:
        return
    if is_last:
        to_channels_last(graph)
    if on_cpu:
        in_sequences(graph)
    put_before(module, ByGraph)
    module.__dict__ |= {"_windrow_graph": graph, "_windrow_folds": folds}


def _takes_one_argument(module: nn.Module) -> bool:
    """Only then is it known what tracing stands for: an argument with a default may be None in some calls."""
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len(parameters) == 1 and all(p.kind in kinds and p.default is p.empty for p in parameters)


def _fuse(module: nn.Module, graph_module: fx.GraphModule, accuracy: str | None) -> Iterator[tuple[Fold, str]]:
    """Changes the graph in place; gives what became of each convolution, and says so in words."""
    graph = graph_module.graph
    modules = dict(graph_module.named_modules())
    names: set[str] = set()
    for node in list(graph.nodes):
        conv = modules.get(node.target) if node.op == "call_module" else None
        if conv is None or not _can_be_fused(conv, node):
            continue
        tail, what = node, []
        fold = Fold(node.target, node.target)
        if (norm := _only_user(tail)) is not None and _is_foldable(norm, modules):
            fold, tail = replace(fold, norm=norm.target), norm
            what.append(f"folded {norm.target}")
        if (mul := _only_user(tail)) is not None and (factor := _factor(mul, tail, graph_module, conv)) is not None:
            fold, tail = replace(fold, factor=factor), mul
            what.append(f"folded {factor}")
        residual = None
        if (add := _only_user(tail)) is not None and (other := _other_of_sum(add, tail, modules)) is not None:
            if not _changes_between(node, add, modules):
                residual, tail, fold = other, add, replace(fold, is_added=True)
                what.append("added")
        if (after := _only_user(tail)) is not None and (activation := _activation(after, modules)) is not None:
            tail, fold = after, replace(fold, activation=activation)
            what.append(activation)
        name = node.target
        while name in names:
            name += "_again"
        names.add(name)
        fold = replace(fold, fused=name)
        fused = FusedConv2d(*fold.filter(module), _options(conv), fold.activation, accuracy)
        replace_module(graph_module, name, fused)
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
        yield fold, f"FusedConv2d({fused.extra_repr()})" + (f": {', '.join(what)}" if what else "")
    graph_module.delete_all_unused_submodules()
    graph.lint()
    graph_module.recompile()


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
        and not is_wrapped(module)
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


def _is_foldable(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """True for a normalisation by numbers that stay, and not by those of a batch."""
    module: Any = modules.get(node.target) if node.op == "call_module" else None
    if module is None or is_wrapped(module) or len(node.args) != 1 or node.kwargs:
        return False
    if type(module) in (nn.BatchNorm2d, BatchNorm2d):
        return module.running_mean is not None and not module.training
    return (type(module).__module__, type(module).__name__) == FROZEN_NORM


def _split_activations(traced: fx.GraphModule) -> None:
    """Makes two modules of timm's normalisations with an activation in them."""
    modules = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        module: Any = modules.get(node.target) if node.op == "call_module" else None
        if module is None or (type(module).__module__, type(module).__name__) != NORM_ACT or is_wrapped(module):
            continue
        if type(module.drop) is not nn.Identity or len(node.args) != 1 or node.kwargs:
            continue
        norm = nn.BatchNorm2d(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        norm._parameters, norm._buffers = module._parameters, module._buffers
        replace_module(traced, node.target, norm.train(module.training))
        if type(module.act) is not nn.Identity:
            replace_module(traced, f"{node.target}_act", module.act)
            with traced.graph.inserting_after(node):
                act = traced.graph.call_module(f"{node.target}_act", (node,))
            node.replace_all_uses_with(act, lambda user, act=act: user is not act)
    traced.recompile()


_PRODUCTS: tuple[Any, ...] = (operator.mul, torch.mul, "mul")


def _factor(node: fx.Node, one: fx.Node, traced: fx.GraphModule, conv: nn.Module) -> str | None:
    """What the channels of `one` are multiplied with, if the node is a product with a tensor of the model, [channels, 1, 1]."""
    if node.op not in ("call_function", "call_method") or node.target not in _PRODUCTS or node.kwargs:
        return None
    other = [a for a in node.args if a is not one]
    if len(node.args) != 2 or len(other) != 1 or not isinstance(other[0], fx.Node) or other[0].op != "get_attr":
        return None
    name = str(other[0].target)
    factor, weight = attribute(traced, name), conv.weight
    fits = factor.shape == (weight.shape[0], 1, 1) and factor.dtype == weight.dtype
    return name if fits and not name.rpartition(".")[2].startswith("_tensor_constant") else None


_SUMS: tuple[Any, ...] = (operator.add, torch.add, "add", "add_")


def _other_of_sum(node: fx.Node, one: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """What is added to `one`, if the node is such a sum of two tensors, and writes to no other than `one`."""
    if node.op not in ("call_function", "call_method") or node.target not in _SUMS:
        return None
    if node.kwargs or len(node.args) != 2 or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    if written(node, modules) not in (None, one):
        return None
    first, second = node.args
    other = second if first is one else first
    return other if other is not one and is_tensor(other) else None


def _changes_between(first: fx.Node, last: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """True if what lies between may change a tensor in place: then the first cannot be computed later."""
    node = first.next
    while node is not last:
        if written(node, modules) is not None:
            return True
        node = node.next
    return False


def _activation(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    """Its name, if the node is nothing but an activation that a convolution can be fused with."""
    what: Any = node.target
    approximate = node.kwargs.get("approximate", "none")
    if node.op == "call_module":
        module = modules.get(node.target)
        if module is None or is_wrapped(module):
            return None
        what, approximate = type(module), getattr(module, "approximate", "none")
    elif node.op not in ("call_function", "call_method"):
        return None
    if what in (GELU, gelu) and len(node.args) == 1:
        what = nn.GELU
    return SPELLED.get((what, approximate)) if {*node.kwargs} <= {"approximate", "inplace"} else None


def _drop_identities(traced: fx.GraphModule) -> None:
    """Takes out what does nothing in evaluation."""
    modules = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        if node.op == "call_module":
            module = modules.get(node.target)
            gone = type(module) is nn.Identity or (
                type(module) in (nn.Dropout, nn.Dropout2d) and not module.training
            )
            gone = gone and not is_wrapped(module)
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
