"""Where an optimized model differs from the modules that it was made of."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windrow.torch._activations import activation_of
from windrow.torch._by_graph import Fold
from windrow.torch._check_bound import DEVIATIONS, Spread, beyond, largest_nearby, moved, tier_of
from windrow.torch._graph import attribute


def differs_from_its_modules(
    module: nn.Module, fold: Fold, args: tuple[Any, ...], y: Tensor, accuracy: str | None
) -> str | None:
    """What is wrong with the result of one convolution, beside what the modules that it stands for give of the same image."""
    x, residual = args[0], args[1] if len(args) > 1 else None
    conv: Any = module.get_submodule(fold.conv)
    if fold.is_added is (residual is None):
        return "the addition is missing" if fold.is_added else "there is an addition too many"
    if y.numel() == 0 or not y.is_floating_point():
        return None
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    with torch.autocast(y.device.type, enabled=False):
        image, weight = x.to(wide), conv.weight.to(wide)
        how = _options(conv)
        weight = weight[:, :, None, None] if weight.dim() == 2 else weight
        bias = None if conv.bias is None else conv.bias.to(wide)
        terms = weight[0].numel()
        want = F.conv2d(image, weight, bias, **how)
        # Sums of squares, of the operands that are rounded.
        squares = F.conv2d(image.square(), weight.square(), None, **how).clamp(min=0)
        if weight.shape[-1] > 1 or weight.shape[-2] > 1:
            squares = largest_nearby(squares)
        scale, shift = _scale(module, fold, want)
        want, size = want * scale + shift, squares.sqrt() * scale.abs()
        inner = want.abs() + shift.abs() + (0 if bias is None else (bias.view(-1, 1, 1) * scale).abs())
        if residual is not None:
            want, inner = want + residual.to(wide), inner + residual.to(wide).abs()
        want = activation_of(fold.activation)(want)
    tier = tier_of(y.dtype, y.device, accuracy)
    # Twice, because the other is no exact value either.
    bound = 1.13 * (2 * DEVIATIONS * tier.of_sums(terms) * size + (4 * tier.out + 2.0**-20) * inner)
    return beyond(y.to(wide), want, bound)


def _options(conv: Any) -> dict[str, Any]:
    if isinstance(conv, nn.Linear):
        return {}
    return {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation, "groups": conv.groups}


def _scale(module: nn.Module, fold: Fold, like: Tensor) -> tuple[Tensor, Tensor]:
    """What the sums are multiplied with, and what is added to them, in each channel."""
    scale, shift = like.new_ones(1), like.new_zeros(1)
    if fold.norm is not None:
        norm: Any = module.get_submodule(fold.norm)
        scale = (norm.running_var.to(like.dtype) + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight.to(like.dtype)
        shift = -norm.running_mean.to(like.dtype) * scale
        shift = shift if norm.bias is None else shift + norm.bias.to(like.dtype)
    if fold.factor is not None:
        by = attribute(module, fold.factor).to(like.dtype).flatten()
        scale, shift = scale * by, shift * by
    return scale.view(-1, 1, 1), shift.view(-1, 1, 1)


class Roundings:
    """Hooks that move what the modules of a model are given, by one rounding up or down."""

    def __init__(self, model: nn.Module, accuracy: str | None, seed: int) -> None:
        self.accuracy, self.seed, self.generators = accuracy, seed, dict[torch.device, torch.Generator]()
        is_inner = lambda m: not any(True for _ in m.children())
        self.handles = [m.register_forward_pre_hook(self) for m in model.modules() if is_inner(m)]

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self.moved(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)

    def moved(self, x: Tensor) -> Tensor:
        generator = self.generators.get(x.device)
        if generator is None:
            generator = self.generators[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        unit = tier_of(_lower(x), x.device, self.accuracy).unit
        return moved(x, unit, generator)

    def __enter__(self) -> "Roundings":
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


def _lower(x: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def leaves(value: Any, path: str = "", depth: int = 6) -> Iterator[tuple[str, Any]]:
    """What a result consists of, with where it is; containers and objects come as their types."""
    if isinstance(value, Tensor | int | float | complex | str | bytes) or value is None or depth == 0:
        yield path, value
    elif isinstance(value, dict):
        yield path, (type(value), [*map(str, value)])
        for key, part in value.items():
            yield from leaves(part, f"{path}[{key!r}]", depth - 1)
    elif isinstance(value, list | tuple):
        yield path, (type(value), len(value))
        for i, part in enumerate(value):
            yield from leaves(part, f"{path}[{i}]", depth - 1)
    else:
        yield path, type(value)
        for key, part in getattr(value, "__dict__", {}).items():
            yield from leaves(part, f"{path}.{key}", depth - 1)


def differs(got: Any, want: Any, draws: list[Any], accuracy: str | None) -> str | None:
    """What is wrong with a result of any structure."""
    ours, theirs = [*leaves(got)], [*leaves(want)]
    others = [[*leaves(d)] for d in draws]
    for i, (path, w) in enumerate(theirs):
        if i >= len(ours) or ours[i][0] != path or type(ours[i][1]) is not type(w):
            given = type(ours[i][1] if i < len(ours) else None).__name__
            return f"the result{path} is a {given} instead of a {type(w).__name__}"
        g = ours[i][1]
        draws = [o[i][1] for o in others if i < len(o) and type(o[i][1]) is type(w)]
        if isinstance(w, Tensor):
            kind = lambda t: (t.shape, t.dtype, t.device)
            if kind(g) != kind(w):
                if any(kind(m) != kind(w) for m in draws):
                    return None
                return f"the result{path} is {g.dtype} {[*g.shape]} on {g.device} instead of {w.dtype} {[*w.shape]}"
            draws = [m for m in draws if kind(m) == kind(w)]
            why = _differs_by_values(g, w, draws, accuracy)
            if why is not None:
                return f"of the result{path} {why}"
        elif isinstance(w, float):
            as_tensors = [torch.tensor([v], dtype=torch.float64).float() for v in (g, w, *draws)]
            if _differs_by_values(as_tensors[0], as_tensors[1], as_tensors[2:] or [as_tensors[1]], accuracy):
                return f"the result{path} is {g} instead of {w}"
        elif g != w and all(m == w for m in draws):
            return f"the result{path} is {g!r} instead of {w!r}"
    return None if len(ours) == len(theirs) else "the result has more parts than the model's"


def _differs_by_values(got: Tensor, want: Tensor, draws: list[Tensor], accuracy: str | None) -> str | None:
    spread = Spread(want, tier_of(_lower(want) if want.is_floating_point() else want.dtype, want.device, accuracy))
    for draw in draws:
        spread.add(draw)
    return spread.differs(got) if draws else None
