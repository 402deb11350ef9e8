"""Random problems, each made by a number of its own, and how a result is compared with f64.

WINDROW_TEST_SEED is the number of the first problem, by default that of the day. WINDROW_TEST_PROBLEMS
is how many of each operator are tried.
"""

import datetime
import os
import random
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

SEED = int(os.environ.get("WINDROW_TEST_SEED", datetime.date.today().toordinal()))
# Problems of one seed do not meet those of the next days.
STEP = 1_000_003

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Half the distance of neighbouring numbers, relative, and of the smallest ones.
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# bf16 dot products of a CPU count numbers below 2^-126 as zero.
SMALLEST = {torch.float32: 2.0**-126, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126}
U = UNIT[torch.float32]


class Wrong(AssertionError):
    """A result that is not what PyTorch has in f64."""


class Random:
    """The choices and numbers of one problem; what was chosen is kept to be printed."""

    def __init__(self, seed: int, device: str) -> None:
        self.device = device
        self.chosen: dict[str, object] = {}
        self._random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def choose(self, name: str, options: list, weights: list[int] | None = None):
        self.chosen[name] = self._random.choices(options, weights)[0]
        return self.chosen[name]

    def maybe(self, name: str, probability: float = 0.5) -> bool:
        self.chosen[name] = self._random.random() < probability
        return self.chosen[name]

    def below(self, n: int) -> int:
        return self._random.randrange(n)

    def tensor(
        self, name: str, shape: list[int], dtype: torch.dtype, scale: float = 1.0, broadcast=()
    ) -> Tensor:
        """Normal numbers in a random layout; dimensions in `broadcast` may share their memory.

        What lies between the elements is NaN.
        """
        rank = len(shape)
        layouts = ["contiguous", "last", "permuted", "gaps", "permuted gaps"]
        layout = self._random.choice(layouts + ["broadcast"] * bool(broadcast))
        order, own = list(range(rank)), list(shape)
        if "permuted" in layout:
            self._random.shuffle(order)
        elif layout == "last" and rank > 2:
            order.append(order.pop(1))
        elif layout == "broadcast":
            own[self._random.choice(list(broadcast))] = 1
        steps, offsets = [1] * rank, [0] * rank
        if "gaps" in layout:
            steps = [self._random.choice([1, 1, 2, 3]) for _ in shape]
            offsets = [self._random.randrange(3) for _ in shape]
        extent = [o + n * s for o, n, s in zip(offsets, own, steps, strict=True)]
        memory = torch.full([extent[i] for i in order], float("nan"), dtype=dtype)
        view = memory.permute([order.index(i) for i in range(rank)]).to(self.device)
        for i in range(rank):
            view = view[(slice(None),) * i + (slice(offsets[i], offsets[i] + own[i] * steps[i], steps[i]),)]
        numbers = torch.randn(own, generator=self.generator) * scale
        view.copy_(numbers.to(dtype))
        view = view.expand(shape)
        self.chosen[name] = f"{shape} {str(dtype)[6:]} {layout}"
        return view

    def leaves(self, tensors: dict[str, Tensor | None]) -> list[str]:
        """Lets some of them, at least one, require gradients; returns their names."""
        present = [n for n, t in tensors.items() if t is not None]
        names = [n for n in present if self._random.random() < 0.8] or present[:1]
        for name in names:
            tensors[name] = tensors[name].detach().requires_grad_()
        return names


def each_problem(operator: str, device: str, problems: int, check: Callable[[Random], None]) -> None:
    """Runs `check` on so many problems; the first failure prints what repeats it."""
    problems = int(os.environ.get("WINDROW_TEST_PROBLEMS", problems))
    print(f"{operator} on {device}: {problems} problems, WINDROW_TEST_SEED={SEED}")
    for seed in range(SEED, SEED + problems * STEP, STEP):
        random = Random(seed, device)
        try:
            check(random)
        except Exception as e:  # noqa: BLE001: whatever it is, it has to name its problem
            why = str(e) if isinstance(e, Wrong) else traceback.format_exc()
            pytest.fail(
                f"WINDROW_TEST_SEED={seed} WINDROW_TEST_PROBLEMS=1 python -m pytest"
                f" 'tests/pytorch/test_against_pytorch.py::test_random_problems[{operator}-{device}]'\n"
                f"{random.chosen}\n{why}",
                pytrace=False,
            )


def compare(
    what: str, got: Tensor, want: Tensor, bound: Tensor, rounded: torch.dtype | None = None
) -> None:
    """Each element within `bound` of f64 and a rounding to its type, or to `rounded` if given."""
    if got.shape != want.shape:
        raise Wrong(f"{what}: {list(got.shape)} instead of {list(want.shape)}")
    dtype = rounded or got.dtype
    got = got.detach().double().cpu()
    allowed = bound + UNIT[dtype] * (want.abs() + bound) + SMALLEST[dtype]
    # NaN is not within any bound.
    bad = ~((got - want).abs() <= allowed)
    if bad.any():
        where = [i[0].item() for i in bad.nonzero(as_tuple=True)]
        at = tuple(where)
        raise Wrong(
            f"{what}: {bad.sum()} of {bad.numel()} wrong, first at {where}:"
            f" {got[at].item()} instead of {want[at].item()}, allowed {allowed[at].item():.3g}"
        )


def wide(t: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """In f64 on the CPU, contiguous; first rounded to `dtype` where autocast does that."""
    if t is None:
        return None
    t = t.detach() if dtype is None else t.detach().to(dtype)
    return t.double().cpu().contiguous()
