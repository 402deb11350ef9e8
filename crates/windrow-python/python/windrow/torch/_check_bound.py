"""How far results of an optimized model may be from those of the model: docs/notes/optimize-check.md derives it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windrow.torch._activations import activation_of
from windrow.torch._by_graph import Fold
from windrow.torch._graph import attribute
from windrow.torch._precision import may_use_tf32

# No normal number is so many deviations from zero in as many tries as a network has elements.
DEVIATIONS = 8.0
# Deviation of one of Winograd's outputs beside a direct sum's, by the largest tile that is taken: F6 in f32, F4 where
# operands are rounded to fewer bits and the products are a GPU's, F1 where they are a CPU's, which sums in f32.
GROWTH_F32, GROWTH_ROUNDED, GROWTH_CPU = 46.3, 7.2, 1.7
_F32 = 2.0**-24
_UNITS = {torch.float64: 2.0**-53, torch.float32: _F32, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}
# Results within so many rounds of a row and of a column depend on one tile.
_TILE = 15


@dataclass(frozen=True)
class Tier:
    """What one rounding of an operand is, and what more than that an algorithm of it may be off."""

    unit: float
    out: float
    growth: float

    def of_sums(self, terms: int) -> float:
        """Deviation of a sum of products, relative to the root of the sum of their squares."""
        return self.growth * (2 * self.unit + _F32 * math.sqrt(terms + 48))


def tier_of(dtype: torch.dtype, device: torch.device, accuracy: str | None) -> Tier:
    """Of results of a type. Under autocast it is lower than that of the arguments."""
    out = _UNITS.get(dtype, _F32)
    on_cuda = device.type != "cpu"
    if dtype in (torch.float16, torch.bfloat16):
        return Tier(out, out, GROWTH_ROUNDED if on_cuda else GROWTH_CPU)
    if accuracy == "half":
        return Tier(_UNITS[torch.bfloat16], out, GROWTH_ROUNDED)
    is_rounded = accuracy is None and on_cuda and (may_use_tf32() or may_use_tf32(is_linear=True))
    if accuracy == "tf32" or is_rounded:
        return Tier(2.0**-11, out, GROWTH_ROUNDED)
    return Tier(out, out, GROWTH_F32)


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
            squares = _largest_nearby(squares)
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


def _largest_nearby(squares: Tensor) -> Tensor:
    half = _TILE // 2
    rows = F.max_pool2d(squares, (_TILE, 1), 1, (half, 0))
    return F.max_pool2d(rows, (1, _TILE), 1, (0, half))


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


def beyond(got: Tensor, want: Tensor, bound: Tensor) -> str | None:
    """Says where and by how much, if an element is off by more than its bound. Where the value is not finite, that is asked."""
    error = (got - want).abs()
    wrong = torch.where(want.isfinite() & bound.isfinite(), ~(error <= bound), want.isfinite() & ~got.isfinite())
    if not wrong.any():
        return None
    number = int(wrong.sum())
    worst = torch.where(wrong, (error / bound.clamp(min=1e-300)).nan_to_num(nan=float("inf")), 0.0).argmax()
    place = [int(i) for i in torch.unravel_index(worst, want.shape)]
    g, w, b = (float(t.expand_as(want)[tuple(place)]) for t in (got, want, bound))
    return f"{number} of {want.numel()} elements differ, {place} most: {g:.6g} instead of {w:.6g}, within {b:.2g}"


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
        wide = x.double() if x.dtype == torch.float32 and unit <= _F32 else x.float() if x.element_size() < 4 else x
        signs = torch.randint(0, 2, x.shape, generator=generator, device=x.device, dtype=torch.int8)
        # A rounding to the nearest of a number that one unit was added to is a step of that type.
        moved = wide * (1 + 2 * unit * (2 * signs.to(wide.dtype) - 1))
        return moved.to(x.dtype)

    def __enter__(self) -> "Roundings":
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


def _lower(x: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def differs_by_values(got: Tensor, want: Tensor, draws: list[Tensor], accuracy: str | None) -> str | None:
    """What is wrong with a result of the model. `draws`: the same with roundings of their own."""
    if not (want.is_floating_point() or want.is_complex()):
        return _differs_exactly(got, want, draws)
    if want.is_complex():
        got, want, draws = torch.view_as_real(got), torch.view_as_real(want), [torch.view_as_real(d) for d in draws]
    dtype = want.dtype
    tier = tier_of(_lower(want) if want.is_floating_point() else dtype, want.device, accuracy)
    wide = torch.float64 if want.device.type == "cpu" else torch.promote_types(dtype, torch.float32)
    got, want, draws = got.to(wide), want.to(wide), [d.to(wide) for d in draws]
    if want.numel() == 0:
        return None
    spread = torch.stack([(d - want).abs() for d in draws]).amax(0).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    finite = want.where(want.isfinite(), 0)
    # Three draws may all be small by chance: no element is taken for surer than the mean one.
    spread = spread.clamp(min=float(spread.square().mean().sqrt()))
    bound = DEVIATIONS * tier.growth * spread + 4 * tier.out * (finite.abs() + float(finite.square().mean().sqrt()))
    return beyond(got, want, bound)


def _differs_exactly(got: Tensor, want: Tensor, draws: list[Tensor]) -> str | None:
    """Of numbers that are none of f32: those that roundings move may move by ours, and some more."""
    count = int((got != want).sum())
    most = max((int((d != want).sum()) for d in draws), default=0)
    if count <= 10 * (most + 1) and (most or count <= max(1, want.numel() // 1000)):
        return None
    return f"{count} of {want.numel()} elements differ, where roundings change {most}"


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
        moved = [o[i][1] for o in others if i < len(o) and type(o[i][1]) is type(w)]
        if isinstance(w, Tensor):
            kind = lambda t: (t.shape, t.dtype, t.device)
            if kind(g) != kind(w):
                if any(kind(m) != kind(w) for m in moved):
                    return None
                return f"the result{path} is {g.dtype} {[*g.shape]} on {g.device} instead of {w.dtype} {[*w.shape]}"
            moved = [m for m in moved if kind(m) == kind(w)]
            why = differs_by_values(g, w, moved, accuracy) if moved else None
            if why is not None:
                return f"of the result{path} {why}"
        elif isinstance(w, float):
            as_tensors = [torch.tensor([v], dtype=torch.float64).float() for v in (g, w, *moved)]
            if differs_by_values(as_tensors[0], as_tensors[1], as_tensors[2:] or [as_tensors[1]], accuracy):
                return f"the result{path} is {g} instead of {w}"
        elif g != w and all(m == w for m in moved):
            return f"the result{path} is {g!r} instead of {w!r}"
    return None if len(ours) == len(theirs) else "the result has more parts than the model's"
