"""Group normalisations that `patch` swaps, beside PyTorch's own in f64."""

import copy

import pytest
import torch
import torch.nn.functional as F
import windrow.torch
from torch import nn
from windrow.torch import _group_norm

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
# Images and channels by size, with groups that are large, of sizes that are no powers of two among them.
LARGE = [
    ((1, 128, 256, 256), 32),
    ((1, 64, 192, 320), 32),
    ((2, 96, 96, 160), 3),
    ((3, 8, 520_192), 4),
    ((1, 24, 32, 48, 80), 6),
]


def relative(y, want):
    return ((y.double() - want).norm() / want.norm()).item()


@pytest.fixture
def in_parts(monkeypatch):
    """Counts what was computed in parts."""
    calls = []
    own = _group_norm.group_norm
    monkeypatch.setattr(_group_norm, "group_norm", lambda *args: calls.append(1) or own(*args))
    return calls


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape, groups", LARGE)
@pytest.mark.parametrize("affine", [True, False])
def test_large_groups(shape, groups, dtype, affine, in_parts):
    # A mean far from zero, that differs between channels, and images of other sizes of values.
    x = torch.randn(shape, device="cuda") * torch.rand(shape[0], shape[1], *[1] * (len(shape) - 2), device="cuda")
    x = (x + 10 * torch.randn(shape[1], *[1] * (len(shape) - 2), device="cuda")).to(dtype)
    norm = nn.GroupNorm(groups, shape[1], affine=affine, device="cuda")
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    norm = norm.to(dtype)
    model = nn.Sequential(norm).eval()
    parameters = (None, None) if not affine else (norm.weight.double(), norm.bias.double())
    want = F.group_norm(x.double(), groups, *parameters, norm.eps)
    theirs = relative(F.group_norm(x, groups, norm.weight, norm.bias, norm.eps), want)
    windrow.torch.patch(model)
    with torch.no_grad():
        y = model(x)
    assert in_parts and y.dtype == dtype and y.shape == x.shape and y.is_contiguous()
    assert relative(y, want) <= 1.5 * theirs + 1e-7


def image_of_channels(shape, dtype, memory_format):
    """An image whose mean is far from zero and differs between channels."""
    x = torch.randn(shape, device="cuda") * torch.rand(*shape[:2], 1, 1, device="cuda")
    x = x + 10 * torch.randn(shape[1], 1, 1, device="cuda")
    return x.to(dtype).contiguous(memory_format=memory_format)


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape, groups", [((1, 128, 256, 256), 32), ((2, 96, 101, 163), 3), ((3, 512, 64, 64), 512)])
@pytest.mark.parametrize("affine", [True, False])
def test_channels_last(shape, groups, dtype, affine):
    x = image_of_channels(shape, dtype, torch.channels_last)
    parameters = [torch.randn(shape[1], device="cuda").to(dtype) if affine else None for _ in range(2)]
    want = F.group_norm(x.double(), groups, *[p if p is None else p.double() for p in parameters])
    theirs = relative(F.group_norm(x, groups, *parameters), want)
    assert _group_norm.pays_in_channels_last(x, groups)
    y = _group_norm.group_norm_in_channels_last(x, groups, *parameters, 1e-5)
    assert y.dtype == dtype and y.stride() == x.stride()
    assert relative(y, want) <= 1.5 * theirs + 1e-7


@cuda
def test_other_layouts_are_pytorchs():
    x = image_of_channels((1, 64, 160, 160), torch.float32, torch.contiguous_format)
    for image in (x, x.double(), x.contiguous(memory_format=torch.channels_last)[..., :8]):
        assert not _group_norm.pays_in_channels_last(image, 32)
        y = _group_norm.group_norm_in_channels_last(image, 32, None, None, 1e-5)
        assert torch.equal(y, F.group_norm(image, 32))


@cuda
def test_channels_last_results_are_contiguous_as_pytorchs(in_parts):
    x = torch.randn(1, 64, 256, 256, device="cuda").contiguous(memory_format=torch.channels_last)
    norm = nn.GroupNorm(32, 64, device="cuda")
    want = norm(x)
    windrow.torch.patch(norm)
    with torch.no_grad():
        y = norm(x)
    assert in_parts and y.stride() == want.stride()
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


@cuda
def test_nan_and_infinities_stay_in_their_groups(in_parts):
    x = torch.randn(2, 8, 256, 512, device="cuda")
    x[0, 0, 3, 4], x[1, 7, 0, 0] = float("nan"), float("inf")
    norm = nn.GroupNorm(4, 8, device="cuda")
    want = norm(x)
    windrow.torch.patch(norm)
    with torch.no_grad():
        y = norm(x)
    assert in_parts
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5, equal_nan=True)


@cuda
def test_the_rest_is_pytorchs(in_parts):
    norm = nn.GroupNorm(4, 8, device="cuda")
    large = torch.randn(1, 8, 256, 512, device="cuda")
    small, double, odd = large[..., :10].contiguous(), large.double(), torch.randn(1, 8, 333, 1001, device="cuda")[..., :-2]
    wants = [norm(large), norm(small), norm(odd)]
    windrow.torch.patch(norm)
    # Gradients, small groups, groups of an odd number of elements, other types, autocast.
    assert torch.equal(norm(large), wants[0]) and norm(large).requires_grad
    with torch.no_grad():
        assert torch.equal(norm(small), wants[1])
        assert torch.equal(norm(odd), wants[2])
        assert copy.deepcopy(norm).double()(double).dtype == torch.float64
        with torch.autocast("cuda", torch.bfloat16):
            assert norm(large.bfloat16()).dtype == torch.float32
    assert not in_parts


@cuda
def test_graphs_and_compile(in_parts):
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU()).cuda().eval()
    x = torch.randn(1, 8, 256, 512, device="cuda")
    want = model(x).detach()
    windrow.torch.patch(model)
    with torch.no_grad():
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = model(x)
        graph.replay()
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
        assert in_parts
        torch.testing.assert_close(torch.compile(model)(x), want, rtol=1e-5, atol=1e-5)


def test_patch_swaps_and_restores():
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.GroupNorm(4, 4, affine=False))
    x = torch.randn(2, 4, 5, 6)
    want = model(x)
    report = windrow.torch.patch(model)
    assert [*report.swapped] == ["0", "1"]
    assert all(what.startswith("GroupNorm(") for what in report.swapped.values()) and not report.left
    assert torch.equal(model(x), want)
    model(x).sum().backward()
    assert model[0].weight.grad is not None
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(x), want)
    windrow.torch.unpatch(model)
    assert type(model[0]) is nn.GroupNorm


@pytest.mark.parametrize("affine", [True, False])
def test_later_calls_are_the_same(affine):
    norm = nn.GroupNorm(2, 4, affine=affine)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    plain = copy.deepcopy(norm)
    windrow.torch.patch(norm)
    for shape in ([2, 4, 5, 6], [2, 4, 5, 6], [3, 4, 7], [3, 4, 7], [2, 4, 5, 6]):
        x = torch.randn(shape, requires_grad=True)
        assert torch.equal(norm(x), plain(x))
        assert torch.equal(*(torch.autograd.grad(n(x).square().sum(), x)[0] for n in (norm, plain)))
    assert torch.equal(copy.deepcopy(norm)(x), plain(x))
    if affine:
        for n in (norm, plain):
            nn.utils.parametrize.register_parametrization(n, "weight", nn.Softplus(), unsafe=True)
        assert torch.equal(norm(x), plain(x))
    x = x.double()
    assert torch.equal(norm.double()(x), plain.double()(x))


def test_errors_are_pytorchs():
    model = nn.GroupNorm(2, 4)
    windrow.torch.patch(model)
    for wrong in (torch.randn(2, 6, 3), torch.randn(4), torch.randn(1, 2, 1)):
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError)):
                model(wrong)
