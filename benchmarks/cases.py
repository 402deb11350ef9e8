"""What is measured: cases with their data, from which every engine makes its own inputs."""

import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

LAYERS = Path(__file__).parent / "layers" / "cnn18.csv"
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def _random(shape: tuple[int, ...], dtype: str, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(DTYPES[dtype])


@dataclass(frozen=True)
class Conv2d:
    """A 3x3 convolution, stride 1, no padding."""

    dtype: str
    n: int
    c: int
    h: int
    w: int
    k: int

    def __str__(self) -> str:
        return f"conv2d {self.dtype} n{self.n} c{self.c} {self.h}x{self.w} k{self.k}"

    @property
    def work(self) -> tuple[float, str]:
        """Operations of the direct algorithm."""
        return 2e-9 * self.n * self.k * self.c * 9 * (self.h - 2) * (self.w - 2), "GFLOP/s"

    @cached_property
    def x(self) -> Tensor:
        return _random((self.n, self.c, self.h, self.w), self.dtype, 0).relu()

    @cached_property
    def weight(self) -> Tensor:
        return _random((self.k, self.c, 3, 3), self.dtype, 1, (9 * self.c) ** -0.5)


@dataclass(frozen=True)
class Gelu:
    """GELU of a square matrix."""

    dtype: str
    approximate: str
    size: int

    def __str__(self) -> str:
        return f"gelu {self.dtype} {self.approximate} {self.size}x{self.size}"

    @property
    def work(self) -> tuple[float, str]:
        """Bytes read and written."""
        return 2e-9 * self.size**2 * DTYPES[self.dtype].itemsize, "GB/s"

    @cached_property
    def x(self) -> Tensor:
        return _random((self.size, self.size), self.dtype, 0)


@dataclass(frozen=True)
class CausalConv1d:
    """Prefill: width 4, bias, SiLU."""

    dtype: str
    b: int
    d: int
    l: int
    channel_last: bool = False

    def __str__(self) -> str:
        layout = " NLC" if self.channel_last else ""
        return f"causal_conv1d {self.dtype} {self.b}x{self.d}x{self.l}{layout}"

    @property
    def work(self) -> tuple[float, str]:
        """Bytes read and written."""
        return 2e-9 * self.b * self.d * self.l * DTYPES[self.dtype].itemsize, "GB/s"

    @cached_property
    def x(self) -> Tensor:
        if self.channel_last:
            return _random((self.b, self.l, self.d), self.dtype, 0).transpose(1, 2)
        return _random((self.b, self.d, self.l), self.dtype, 0)

    @cached_property
    def weight(self) -> Tensor:
        return _random((self.d, 4), self.dtype, 1, 0.5)

    @cached_property
    def bias(self) -> Tensor:
        return _random((self.d,), self.dtype, 2)


@dataclass(frozen=True)
class Decode(CausalConv1d):
    """One decode step: width 4, bias, SiLU, state updated in place."""

    l: int = 1

    def __str__(self) -> str:
        return f"causal_conv1d_update {self.dtype} {self.b}x{self.d}"

    @property
    def work(self) -> tuple[float, str]:
        """Bytes read and written: x, the state twice, y, weight and bias."""
        elements = self.b * self.d * (1 + 3 + 3 + 1) + self.d * 5
        return 1e-9 * elements * DTYPES[self.dtype].itemsize, "GB/s"

    @cached_property
    def state(self) -> Tensor:
        return _random((self.b, self.d, 3), self.dtype, 3)


@dataclass(frozen=True)
class Overhead:
    """What a call costs when there is nothing to compute."""

    def __str__(self) -> str:
        return "overhead of a call"

    @property
    def work(self) -> tuple[float, str]:
        return 1e-6, "calls/us"


def suites() -> dict[str, list]:
    """All cases by suite."""
    with LAYERS.open() as file:
        rows = csv.reader(line for line in file if not line.startswith("#"))
        layers = [tuple(int(v) for v in row[1:]) for row in rows]
    # The layers with 64 and 128 images at 4 and 8: the same work an image, a sixteenth of the time.
    layers = [(n // 16, *rest) for n, *rest in layers]
    prefill = [(1, 64, 2048), (1, 2048, 2048), (2, 4096, 512)]
    found = {f"conv2d-{t}": [Conv2d(t, *layer) for layer in layers] for t in DTYPES}
    found["gelu"] = [
        Gelu(t, a, s) for t in DTYPES for a in ("tanh", "none") for s in (1024, 2048, 4096)
    ]
    found["causal_conv1d"] = [
        CausalConv1d(t, *s, channel_last=last)
        for t in DTYPES
        for s in prefill
        for last in (False, True)
    ]
    found["causal_conv1d_update"] = [Decode(t, 8, 4096) for t in DTYPES]
    found["overhead"] = [Overhead()]
    return found
