"""More than 2^31 elements, and more channels, images, sequences and positions than a grid of CUDA has blocks.

    WINDROW_TEST_LARGE=1 pytest tests/pytorch/test_large.py

On a GPU of at least 48 GB; beside PyTorch in f32, piece by piece.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from windrow.torch import causal_conv1d_fn, conv2d, gelu

pytestmark = [
    pytest.mark.skipif(not os.environ.get("WINDROW_TEST_LARGE"), reason="WINDROW_TEST_LARGE is not set"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PIECE = 1 << 26


def numbers(*shape: int, dtype: torch.dtype = torch.float16, scale: float = 1.0) -> Tensor:
    """Normal numbers, other ones everywhere."""
    x = torch.empty(shape, dtype=dtype, device="cuda")
    for piece in x.view(-1).split(PIECE):
        piece.normal_(0.0, scale)
    return x


def require_close(got: Tensor, want: Tensor) -> None:
    """Within a rounding to f16 and the roundings of some terms of about 1: what is read or written in the wrong
    place is off by more."""
    error = (got.float() - want.float()).abs()
    assert bool((error <= 2.0**-10 * want.float().abs() + 2.0**-10).all()), error.max().item()


def convolved(x: Tensor, weight: Tensor, number: Tensor | None = None) -> Tensor:
    """Of four taps; `number`: of the sequence that a position belongs to."""
    l, padded = x.shape[2], F.pad(x, (3, 0))
    terms = [weight[:, k, None] * padded[:, :, k : k + l] for k in range(4)]
    if number is not None:
        before = F.pad(number, (3, 0), value=-1)
        terms = [term * (before[k : k + l] == number) for k, term in enumerate(terms)]
    return sum(terms)


@pytest.fixture(autouse=True)
def _empty_cache():
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate):
    x = numbers((1 << 31) + 4099).requires_grad_()
    y = gelu(x, approximate)
    dy = numbers(x.numel())
    (dx,) = torch.autograd.grad(y, x, dy)
    for parts in zip(*(t.detach().split(PIECE) for t in (x, y, dy, dx)), strict=True):
        a = parts[0].float().requires_grad_()
        want = F.gelu(a, approximate=approximate)
        require_close(parts[1], want)
        require_close(parts[3], torch.autograd.grad(want, a, parts[2].float())[0])


CONVOLUTIONS = {
    "elements": [2, 70_000, 15_500],
    "channels": [2, 140_000, 20],
    "batches": [140_000, 6, 24],
    "positions": [1, 16, 10_000_003],
}


@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("what", CONVOLUTIONS)
def test_causal_conv1d(what, channel_last):
    b, d, l = CONVOLUTIONS[what]
    x = numbers(b, l, d).transpose(1, 2) if channel_last else numbers(b, d, l)
    # In f32: sums over ten million positions are beyond the range of f16.
    weight, bias = numbers(d, 4, dtype=torch.float32, scale=0.5), numbers(d)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = causal_conv1d_fn(x, weight, bias, activation="silu")
    dy = torch.empty_like(y)
    dy.copy_(1.0 / 64 * torch.arange(l, device="cuda").remainder(7))
    dx, dweight = torch.autograd.grad(y, leaves, dy)
    channels = max(1, PIECE // (b * l))
    for start in range(0, d, channels):
        at = slice(start, start + channels)
        a, w = (t.detach().float().requires_grad_() for t in (x[:, at], weight[at]))
        want = F.silu(convolved(a, w) + bias[at, None].float())
        require_close(y[:, at], want)
        da, dw = torch.autograd.grad(want, (a, w), dy[:, at].float())
        require_close(dx[:, at], da)
        largest = dw.abs().max()
        require_close(dweight[at] / largest, dw / largest)


@pytest.mark.parametrize("channel_last", [False, True])
def test_sequences(channel_last):
    count, d = 140_000, 6
    lengths = torch.arange(count, device="cuda").remainder(9)
    ends = lengths.cumsum(0)
    l = int(ends[-1])
    x = numbers(1, l, d).transpose(1, 2) if channel_last else numbers(1, d, l)
    weight = numbers(d, 4, scale=0.5)
    cu_seqlens = torch.cat([ends.new_zeros(1), ends]).int()
    y = causal_conv1d_fn(x, weight, cu_seqlens=cu_seqlens)
    number = torch.repeat_interleave(torch.arange(count, device="cuda"), lengths)
    require_close(y, convolved(x.float(), weight.float(), number))


# Of x, k, groups.
IMAGES = {
    "elements": ([140, 64, 500, 500], 64, 1),
    "images": ([140_000, 16, 8, 8], 16, 1),
    "input channels": ([1, 66_000, 6, 6], 16, 1),
    "output channels": ([2, 16, 6, 6], 66_000, 1),
    "groups": ([1, 66_000, 9, 9], 66_000, 66_000),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("accuracy", ["fp32", "half"])
@pytest.mark.parametrize("what", IMAGES)
def test_conv2d(what, accuracy, channels_last):
    (n, c, h, w), k, groups = IMAGES[what]
    x = numbers(n, h, w, c).permute(0, 3, 1, 2) if channels_last else numbers(n, c, h, w)
    weight = numbers(k, c // groups, 3, 3, scale=(9 * c / groups) ** -0.5)
    y = conv2d(x, weight, padding=1, groups=groups, accuracy=accuracy)
    images = max(1, PIECE // (max(c, k) * h * w))
    for start in {0, n // 3, (n - images) // 2, max(0, n - images)}:
        at = slice(start, start + images)
        want = F.conv2d(x[at].float(), weight.float(), padding=1, groups=groups)
        if accuracy == "fp32":
            require_close(y[at], want)
        else:
            # Operands of transforms are rounded to f16: see docs/notes/conv2d-cuda.md.
            assert (y[at].float() - want).abs().max() < 0.05
