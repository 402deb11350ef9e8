"""The pass that sums the statistics of group normalisations channel by channel."""

import pytest
import torch
from torch import nn
from windrow.torch.backend import _compile, _options, windrow

pytestmark = [
    pytest.mark.usefixtures("nothing_decided"),
    pytest.mark.skipif(torch.__version__ < _options.OLDEST, reason="an old PyTorch, which the backend refuses"),
]


@pytest.fixture
def changed(monkeypatch, times, runs_uncompiled):
    """The number of normalisations that the pass changed in each graph."""
    times(0.5)
    found = []
    by_channels = _compile.by_channels
    monkeypatch.setattr(_compile, "by_channels", lambda graph: found.append(by_channels(graph)))

    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def error(model, x):
    """That of the compiled model and that of PyTorch's, against f64."""
    fast = torch.compile(model, backend=windrow, options={"check": False})
    with torch.no_grad():
        got, theirs = fast(x), model(x)
        want = model.double()(x.double())
    of = lambda y: ((y.double() - want).norm() / want.norm()).item()
    return of(got), of(theirs)


def normalised(groups, affine=True):
    norm = nn.GroupNorm(groups, 12, affine=affine)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return nn.Sequential(norm, nn.SiLU()).eval()


def image(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("shape", [(2, 12, 5, 7), (1, 12, 1, 2), (3, 12, 16, 16)])
def test_statistics_by_channels(shape, groups, affine, dtype, changed):
    ours, theirs = error(normalised(groups, affine=affine).to(dtype), image(*shape, dtype=dtype))
    assert changed == [1]
    assert ours <= 1.5 * theirs + 1e-6


def test_a_mean_far_from_zero(changed):
    x = image(2, 12, 16, 16) + 1e3 * torch.arange(12)[:, None, None]
    ours, theirs = error(normalised(3), x)
    assert changed == [1]
    assert ours <= 1.5 * theirs + 1e-6


def test_a_convolution_in_front(changed):
    model = nn.Sequential(nn.Conv2d(4, 12, 3, padding=1), normalised(3)).eval().to(memory_format=torch.channels_last)
    ours, theirs = error(model, image(2, 4, 8, 8))
    assert changed == [1]
    assert ours <= 1.5 * theirs + 2e-6


@pytest.mark.parametrize(
    ("groups", "x"),
    [
        (3, torch.randn(2, 12, 5, 7)),
        (12, image(2, 12, 5, 7)),
        (3, torch.randn(2, 12, 35)),
        (3, image(2, 12, 1, 1)),
    ],
    ids=["row-major", "a channel a group", "lines", "a pixel"],
)
def test_what_is_left(groups, x, changed):
    model = normalised(groups)
    with torch.no_grad():
        got = torch.compile(model, backend=windrow, options={"check": False})(x)
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
    assert changed == [0]


def test_sizes_that_change(changed):
    model = normalised(3)
    fast = torch.compile(model, backend=windrow, dynamic=True, options={"check": False})
    with torch.no_grad():
        for n, h in ((2, 5), (3, 8)):
            x = image(n, 12, h, 7)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert not any(changed)
