"""The bound on how far results of an optimized model may differ from those of the model; docs/notes/optimize-check.md
derives it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windrow.torch._precision import may_use_tf32

# No normal number is so many deviations from zero in as many tries as a network has elements.
DEVIATIONS = 8.0
# Deviation of one of Winograd's outputs beside a direct sum's, by the largest tile that is taken: F6 in f32, F4 where
# operands are rounded to fewer bits and the products are a GPU's, F1 where they are a CPU's, which sums in f32.
GROWTH_F32, GROWTH_ROUNDED, GROWTH_CPU = 46.3, 7.2, 1.7
_F32 = 2.0**-24
_UNITS = {torch.float64: 2.0**-53, torch.float32: _F32, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}
# Results within the sum of these in rows and columns depend on one tile.
_REACH = 1, 2, 4
# The elements that are compared, or moved, at a time.
PIECE = 1 << 22


@dataclass(frozen=True)
class Tier:
    """An accuracy tier: the unit roundoff of an operand and of a result, and how much an algorithm amplifies rounding
    errors."""

    unit: float
    out: float
    growth: float
    # True if sums read operands as they are and are made in f32.
    is_exact: bool = False

    def of_sums(self, terms: int, is_folded: bool) -> float:
        """A distance that the errors of two sums, which nothing but roundings tells apart, stay within, relative to the
        root of the sum of squares of the products. `is_folded`: the filter of one was rounded once more."""
        of_f32 = _F32 * math.sqrt(terms + 48)
        if self.is_exact:
            return DEVIATIONS * (2 * GROWTH_F32 * of_f32 + self.unit * is_folded)
        return 2 * DEVIATIONS * self.growth * (2 * self.unit + of_f32)


def tier_of(dtype: torch.dtype, device: torch.device, accuracy: str | None) -> Tier:
    """The tier of results of this type. Under autocast it is lower than that of the arguments."""
    out = _UNITS.get(dtype, _F32)
    on_cuda = device.type != "cpu"
    if dtype in (torch.float16, torch.bfloat16):
        return Tier(out, out, GROWTH_ROUNDED) if on_cuda else Tier(out, out, GROWTH_CPU, is_exact=True)
    if accuracy == "half":
        return Tier(_UNITS[torch.bfloat16], out, GROWTH_ROUNDED)
    is_rounded = accuracy is None and on_cuda and (may_use_tf32() or may_use_tf32(is_linear=True))
    if accuracy == "tf32" or is_rounded:
        return Tier(2.0**-11, out, GROWTH_ROUNDED)
    return Tier(out, out, GROWTH_F32)


def largest_nearby(squares: Tensor) -> Tensor:
    """The largest value among the results that may depend on the same tile. It is found by doubling; `max_pool2d` takes
    13 times as long."""
    for dim in (-2, -1):
        for is_before in (False, True):
            for step in _REACH:
                rest = squares.shape[dim] - step
                if rest > 0:
                    first, last = squares.narrow(dim, 0, rest), squares.narrow(dim, step, rest)
                    larger = squares.clone()
                    torch.maximum(first, last, out=larger.narrow(dim, step if is_before else 0, rest))
                    squares = larger
    return squares


def beyond(got: Tensor, want: Tensor, bound: Tensor) -> str | None:
    """The number of wrong elements and the worst one, in words; None if every element is within its bound. An element
    whose bound is infinite only has to be finite. One whose reference is not finite may be anything."""
    error = (got - want).abs()
    wrong = torch.where(want.isfinite() & bound.isfinite(), ~(error <= bound), want.isfinite() & ~got.isfinite())
    if not wrong.any():
        return None
    number = int(wrong.sum())
    worst = torch.where(wrong, (error / bound.clamp(min=1e-300)).nan_to_num(nan=float("inf")), 0.0).argmax()
    place = [int(i) for i in torch.unravel_index(worst, want.shape)]
    g, w, b = (float(t.expand_as(want)[tuple(place)]) for t in (got, want, bound))
    return f"{number} of {want.numel()} elements differ, {place} most: {g:.6g} instead of {w:.6g}, within {b:.2g}"


def moved(x: Tensor, unit: float, generator: torch.Generator) -> Tensor:
    """The tensor with each element moved by one rounding, up or down."""
    y = torch.empty_like(x)
    for part, to in zip(_pieces(x), _pieces(y), strict=True):
        wide = part.float() if x.element_size() < 4 else part
        signs = torch.randint(0, 2, part.shape, generator=generator, device=x.device, dtype=torch.int8)
        # The factor is exact, and a rounding to the nearest of a number that one unit was added to is a step of its type.
        to.copy_(signs.to(wide.dtype).mul_(4 * unit).add_(1 - 2 * unit).mul_(wide))
    return y


def _pieces(x: Tensor) -> Sequence[Tensor]:
    """The parts of a tensor that are computed one after the other, so that little memory is taken."""
    number = x.numel() // PIECE + 1
    return (x,) if number == 1 else x.tensor_split(number, dim=max(range(x.dim()), key=x.size))


class Spread:
    """The distance by which rounding errors move a result."""

    def __init__(self, want: Tensor, tier: Tier) -> None:
        self.tier, self.is_exact = tier, not (want.is_floating_point() or want.is_complex())
        self.want = want if self.is_exact else self._widened(want)
        self.most = 0
        self.spread: Tensor | None = None

    @staticmethod
    def _widened(value: Tensor) -> Tensor:
        value = torch.view_as_real(value) if value.is_complex() else value
        return value.to(torch.float64 if value.device.type == "cpu" else torch.promote_types(value.dtype, torch.float32))

    def add(self, draw: Tensor) -> None:
        """Adds a run: `draw` is the result with other rounding errors."""
        if self.is_exact:
            self.most = max(self.most, int((draw != self.want).sum()))
            return
        distance = (self._widened(draw) - self.want).abs_()
        self.spread = distance if self.spread is None else torch.maximum(self.spread, distance)

    def differs(self, got: Tensor) -> str | None:
        """The fault of a result, in words; None if it is within the bound, or if no run was added."""
        if self.is_exact:
            return self._differs_exactly(got)
        if self.want.numel() == 0 or self.spread is None:
            return None
        spread = self.spread.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        size = self.want.where(self.want.isfinite(), 0).abs()
        # Three draws may all be small by chance: no element is taken for surer than the mean one.
        spread = spread.clamp(min=float(spread.square().mean().sqrt()))
        of_results = 4 * self.tier.out * (size + float(size.square().mean().sqrt()))
        return beyond(self._widened(got), self.want, DEVIATIONS * self.tier.growth * spread + of_results)

    def _differs_exactly(self, got: Tensor) -> str | None:
        """The fault of a result that is not floating-point. If rounding errors change some of its elements, up to about
        ten times as many may differ here."""
        count, most = int((got != self.want).sum()), self.most
        if count <= 10 * (most + 1) and (most or count <= max(1, got.numel() // 1000)):
            return None
        return f"{count} of {got.numel()} elements differ, where roundings change {most}"
