"""What torch.fx makes of a module, or why that would not be what the module does.

torch.fx runs `forward` once, with stand-ins for tensors. What that run does beside calling operators is lost: a state that it
keeps, a flag that it sets, a random number that it draws. All of these are looked for, on a copy of the module.
"""

import builtins
import copy
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from windrow.torch._graph import IN_PLACE, is_tensor, is_wrapped, writes
from windrow.torch._precision import may_use_tf32

# What these of timm and torchvision do is known without a look into them.
NORM_ACT, FROZEN_NORM = ("timm.layers.norm_act", "BatchNormAct2d"), ("torchvision.ops.misc", "FrozenBatchNorm2d")


class Unsound(Exception):
    """Why a graph would compute something else than the module."""


def is_leaf(module: nn.Module) -> bool:
    """A module that graphs call and nobody looks into."""
    kind = type(module)
    is_known = kind.__module__.startswith(("torch.nn.", "torch.ao.nn.", "torch.jit.", "windrow."))
    is_known = is_known or (kind.__module__, kind.__name__) in (NORM_ACT, FROZEN_NORM)
    is_container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return (is_known and not is_container) or is_wrapped(module)


def traced(module: nn.Module) -> fx.GraphModule:
    """A graph over the modules that `module` consists of. Raises `Unsound`, or what its `forward` raises."""
    for name, part in module.named_modules():
        if name and not isinstance(part, fx.GraphModule) and type(part).__call__ is not nn.Module.__call__:
            raise Unsound(f"`{name}` has a `__call__` of its own")
    copied = copy_sharing_parameters(module)
    held: list[Any] = []
    before, numbers, tracer = _state(copied, held), random_states(), _Tracer()
    try:
        with _tracing, _tensors_to_models():
            graph = tracer.trace(copied)
        if random_states() != numbers:
            raise Unsound("its forward draws random numbers")
    finally:
        set_random_states(numbers)
    constants = [name for name in vars(copied) if name.startswith("_tensor_constant") and name not in vars(module)]
    after = {key: value for key, value in _state(copied, held).items() if key[1] not in constants}
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            raise Unsound(f"its forward changes `{key[1]}`")
    for source in writes(graph, dict(copied.named_modules())):
        if source.op == "get_attr":
            raise Unsound(f"its forward writes to `{source.target}`")
    for name in constants:
        setattr(module, name, getattr(copied, name))
    try:
        return fx.GraphModule(module, graph, type(module).__name__)
    finally:
        for name in constants:
            delattr(module, name)


def copy_sharing_parameters(module: nn.Module, *shared: Any) -> Any:
    """A copy with the same parameters; and with what else is `shared`."""
    memo = {id(p): p for p in module.parameters()} | {id(thing): thing for thing in shared}
    return copy.deepcopy(module, memo)


class _Proxy(fx.Proxy):
    """Records `y += x` as what writes to y."""


# One at a time: torch.fx and what follows replace functions of everybody's.
_tracing = threading.RLock()


@contextmanager
def _tensors_to_models() -> Iterator[None]:
    """Lets stand-ins be tensors to a model that asks with `isinstance`. PyTorch asks as well, and is told what they are: its
    compiled parts would take them for memory of tensors, so that a `__class__` must not say it."""
    asked, plain = builtins.isinstance, torch.empty(0)

    def isinstance_of(thing: Any, kinds: Any) -> bool:
        if type(thing) is _Proxy and is_tensor(thing.node):
            asking = sys._getframe(1).f_globals.get("__name__", "")
            if asking == "torch._jit_internal" or not asking.startswith(("torch.", "windrow.")):
                return asked(plain, kinds)
        return asked(thing, kinds)

    builtins.isinstance = isinstance_of  # type: ignore[assignment]
    try:
        yield
    finally:
        builtins.isinstance = asked


def _in_place(name: str, method: str) -> Any:
    def record(self: fx.Proxy, other: Any) -> Any:
        if not is_tensor(self.node):
            return NotImplemented
        return self.tracer.create_proxy("call_method", method, (self, other), {})

    record.__name__ = name
    return record


for _name, _method in IN_PLACE.items():
    setattr(_Proxy, _name, _in_place(_name, _method))


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__()
        self._surroundings = _surroundings()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_leaf(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, dict) and type(a) is not dict and not type(a).__module__.startswith("torch.fx."):
            # torch.fx makes plain ones of these.
            raise Unsound(f"its forward makes a {type(a).__name__}")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _surroundings() != self._surroundings:
            raise Unsound("its forward sets flags, such as those of autocast")
        return super().create_node(*args, **kwargs)


def _surroundings() -> tuple[Any, ...]:
    """What operators depend on beside their arguments."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.amp.is_autocast_available(kind)]
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    tf32 = may_use_tf32(), may_use_tf32(is_linear=True)
    return *casts, *tf32, torch.backends.cudnn.enabled, torch.are_deterministic_algorithms_enabled()


def random_states() -> tuple[Any, ...]:
    import numpy.random

    cpu = torch.get_rng_state().numpy().tobytes()
    theirs = numpy.random.get_state()
    cuda = [s.cpu().numpy().tobytes() for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else []
    return cpu, cuda, random.getstate(), (theirs[0], theirs[1].tobytes(), *theirs[2:])


def set_random_states(states: tuple[Any, ...]) -> None:
    import numpy as np

    cpu, cuda, python, theirs = states
    as_tensor = lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8)
    torch.set_rng_state(as_tensor(cpu))
    if cuda:
        torch.cuda.set_rng_state_all([as_tensor(s) for s in cuda])
    random.setstate(python)
    np.random.set_state((theirs[0], np.frombuffer(theirs[1], np.uint32), *theirs[2:]))


def _state(module: nn.Module, held: list[Any]) -> dict[tuple[int, str], Any]:
    """By module and attribute, what tells if it was set or written to. `held` keeps what is known by its address."""
    found = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key in ("_parameters", "_buffers", "_modules"):
                for inner, tensor in value.items():
                    found[id(part), f"{name}.{inner}".lstrip(".")] = _seen(tensor, held)
            else:
                found[id(part), f"{name}.{key}".lstrip(".")] = _seen(value, held)
    return found


def _seen(value: Any, held: list[Any], depth: int = 8) -> Any:
    held.append(value)
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if depth and isinstance(value, dict):
        return id(value), [(id(k), _seen(v, held, depth - 1)) for k, v in value.items()]
    if depth and isinstance(value, list | tuple | set):
        return id(value), [_seen(v, held, depth - 1) for v in value]
    return id(value)
