"""What the steps of `optimize` do alike with what torch.fx traced."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn


def is_wrapped(module: nn.Module) -> bool:
    """True if a call does more than the `forward` of its class: hooks, a `forward` on the instance, an own `__call__`."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return True
    return type(module).__call__ is not nn.Module.__call__ and not isinstance(module, fx.GraphModule)


def replace_module(traced: fx.GraphModule, name: str, module: nn.Module) -> None:
    """Puts the module where `name` says, of an earlier one or not."""
    *path, last = name.split(".")
    setattr(traced.get_submodule(".".join(path)), last, module)


def attribute(module: nn.Module, name: str) -> Any:
    """What a dotted name says, of a module or a tensor in it."""
    *path, last = name.split(".")
    return getattr(module.get_submodule(".".join(path)), last)


# Operators in place, as methods of tensors: torch.fx itself makes new tensors of them.
IN_PLACE = {
    "__iadd__": "add_",
    "__isub__": "sub_",
    "__imul__": "mul_",
    "__itruediv__": "div_",
    "__ifloordiv__": "floor_divide_",
    "__imod__": "remainder_",
    "__ipow__": "pow_",
    "__iand__": "__iand__",
    "__ior__": "__ior__",
    "__ixor__": "__ixor__",
    "__ilshift__": "__ilshift__",
    "__irshift__": "__irshift__",
}
# Results of these share memory with what they are given.
_VIEWS = {
    "getattr", "getitem", "__getitem__", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "permute",
    "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "squeeze", "unsqueeze", "expand", "expand_as", "narrow",
    "select", "chunk", "split", "tensor_split", "unbind", "t", "contiguous", "to", "type", "type_as", "float", "half",
    "bfloat16", "double", "detach", "diagonal", "unfold", "as_strided", "real", "imag", "view_as_real", "dropout",
    "dropout2d", "stochastic_depth", "adjoint", "positive", "alias", "ravel",
}  # fmt: skip
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout2d)


def name_of(node: fx.Node) -> str:
    """Of the function or method that is called."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def written(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """What a node writes to; None if it writes to nothing."""
    if node.op == "call_module":
        first = node.args[0] if node.args else None
        is_in_place = bool(getattr(modules.get(str(node.target)), "inplace", False))
    elif node.op in ("call_method", "call_function"):
        name = name_of(node)
        first = node.args[0] if node.args else None
        is_in_place = (
            (name.endswith("_") and not name.endswith("__"))
            or name in IN_PLACE
            or f"__{name}__" in IN_PLACE
            or name in ("__setitem__", "setitem")
            or bool(node.kwargs.get("inplace"))
        )
        if node.kwargs.get("out") is not None:
            first, is_in_place = node.kwargs["out"], True
    else:
        return None
    return first if is_in_place and isinstance(first, fx.Node) else None


def origin(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node:
    """Whose memory a result may lie in: the first of a chain of views and of operations in place."""
    while node.op not in ("placeholder", "get_attr"):
        is_view = node.op in ("call_method", "call_function") and name_of(node) in _VIEWS
        is_view = is_view or (node.op == "call_module" and isinstance(modules.get(str(node.target)), _VIEW_MODULES))
        before = written(node, modules) or (node.args[0] if is_view and node.args else None)
        if not isinstance(before, fx.Node):
            return node
        node = before
    return node


def writes(graph: fx.Graph, modules: dict[str, nn.Module]) -> Iterator[fx.Node]:
    """Origins of what the nodes of a graph write to."""
    for node in graph.nodes:
        if (target := written(node, modules)) is not None:
            yield origin(target, modules)


_SIZES = {
    "size", "dim", "ndimension", "numel", "nelement", "item", "tolist", "stride", "storage_offset", "element_size",
    "get_device", "data_ptr", "is_contiguous", "is_floating_point", "is_complex", "len", "int", "float", "bool", "getattr",
}  # fmt: skip


def is_tensor(node: Any) -> bool:
    """False for what is surely or probably none: a size, a number made of sizes. An argument of the model counts as one."""
    if isinstance(node, Tensor):
        return True
    if not isinstance(node, fx.Node):
        return False
    if node.op in ("placeholder", "get_attr", "call_module"):
        return True
    name, module = name_of(node), getattr(node.target, "__module__", "") or ""
    if node.op == "call_method":
        return name not in _SIZES
    if name in _SIZES:
        return False
    if module in ("_operator", "operator", "builtins", "math"):
        return any(is_tensor(a) for a in node.args)
    return True
