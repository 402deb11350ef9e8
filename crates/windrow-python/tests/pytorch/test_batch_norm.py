"""Batch normalisations that `patch` swaps, beside PyTorch's own in f64."""

import copy

import pytest
import torch
import windrow.torch
from torch import nn
from windrow.torch import _batch_norm, optimize

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
# With few channels that are long, of sizes that are no powers of two among them.
LONG = [(64, 64, 112, 112), (256, 7, 80, 79), (20, 96, 224, 224)]


@pytest.fixture
def in_parts(monkeypatch):
    """Counts what was computed in parts."""
    calls = []
    own = _batch_norm.BatchNorm2d._in_parts
    count = lambda self, input: calls.append(1) or own(self, input)
    monkeypatch.setattr(_batch_norm.BatchNorm2d, "_in_parts", count)
    return calls


def relative(y, want):
    return ((y.double() - want).norm() / want.norm()).item()


def step(norm, x, dy):
    """The result, gradients and statistics of a step of training."""
    x = x.detach().requires_grad_()
    y = norm(x)
    y.backward(dy.to(y.dtype))
    grads = [p.grad for p in norm.parameters()]
    return [y.detach(), x.grad, *grads, norm.running_mean, norm.running_var]


def made(shape, dtype):
    """A batch with means far from zero, that differ between channels and images, and its gradient."""
    scale = torch.rand(shape[1], 1, 1, device="cuda") + 0.1
    x = torch.randn(shape, device="cuda") * scale + 5 * torch.randn(shape[1], 1, 1, device="cuda")
    x += torch.randn(shape[0], 1, 1, 1, device="cuda")
    return x.to(dtype), torch.randn(shape, device="cuda").to(dtype)


def norm_of(channels, **options):
    norm = nn.BatchNorm2d(channels, device="cuda", **options)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


@cuda
@pytest.mark.parametrize("shape", LONG)
@pytest.mark.parametrize("affine", [True, False])
def test_a_step(shape, affine, in_parts):
    x, dy = made(shape, torch.float32)
    norm = norm_of(shape[1], affine=affine, momentum=0.3)
    want = step(copy.deepcopy(norm).double(), x.double(), dy.double())
    theirs = step(copy.deepcopy(norm), x, dy)
    windrow.torch.patch(norm)
    ours = step(norm, x, dy)
    assert in_parts and norm.num_batches_tracked == 1
    for mine, other, exact in zip(ours, theirs, want, strict=True):
        assert mine.dtype == other.dtype and mine.stride() == other.stride()
        assert relative(mine, exact) <= 1.5 * relative(other, exact) + 2e-7


@cuda
@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_gradients_that_are_wanted(wanted, in_parts):
    x, dy = made((128, 32, 64, 64), torch.float32)
    norm = norm_of(32)
    norm.weight.requires_grad_(wanted[1])
    norm.bias.requires_grad_(wanted[2])
    plain = copy.deepcopy(norm)
    windrow.torch.patch(norm)
    grads = []
    for module in (norm, plain):
        image = x.clone().requires_grad_(wanted[0])
        module(image).backward(dy)
        grads.append([image.grad, module.weight.grad, module.bias.grad])
    assert in_parts
    for mine, theirs, is_wanted in zip(*grads, wanted, strict=True):
        assert (mine is not None) == is_wanted == (theirs is not None)
        if is_wanted:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@cuda
def test_second_derivatives_are_pytorchs(in_parts):
    x, dy = made((128, 16, 64, 64), torch.float32)
    norm = norm_of(16)
    plain = copy.deepcopy(norm)
    windrow.torch.patch(norm)
    seconds = []
    for module in (norm, plain):
        image = x.clone().requires_grad_()
        (first,) = torch.autograd.grad((module(image) * dy).sum(), image, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), [image, module.weight]))
    assert in_parts
    for mine, theirs in zip(*seconds, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())


@cuda
def test_statistics_alone_and_none(in_parts):
    x, _ = made((128, 32, 64, 64), torch.float32)
    norm = norm_of(32, track_running_stats=False)
    want = norm(x)
    windrow.torch.patch(norm)
    torch.testing.assert_close(norm(x), want, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), want, rtol=1e-4, atol=1e-4)
    assert len(in_parts) == 2


@cuda
def test_graphs(in_parts):
    x, dy = made((64, 64, 112, 112), torch.float32)
    model = nn.Sequential(nn.Conv2d(64, 64, 1, device="cuda"), norm_of(64))
    windrow.torch.patch(model)
    x.requires_grad_()

    def run():
        y = model(x)
        return y.detach(), *torch.autograd.grad(y, [x], dy)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        of_graph = run()
    before = model[1].running_mean.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert in_parts and not torch.equal(model[1].running_mean, before)
    for captured, called in zip(of_graph, run(), strict=True):
        torch.testing.assert_close(captured, called, rtol=1e-3, atol=1e-4 * called.abs().max().item())


@cuda
def test_halves_are_pytorchs(in_parts):
    x, _ = made((128, 64, 112, 112), torch.float16)
    norm = norm_of(64)
    plain = copy.deepcopy(norm)
    windrow.torch.patch(norm)
    assert torch.equal(norm(x), plain(x)) and not in_parts


@cuda
@pytest.mark.parametrize(
    "shape, last", [((128, 64, 64, 64), True), ((4, 64, 28, 28), False), ((128, 256, 64, 64), False)]
)
def test_others_are_pytorchs(shape, last, in_parts):
    x, _ = made(shape, torch.float32)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    norm = norm_of(shape[1])
    plain = copy.deepcopy(norm)
    windrow.torch.patch(norm)
    assert torch.equal(norm(x), plain(x)) and not in_parts
    assert torch.equal(norm.eval()(x), plain.eval()(x)) and not in_parts


@cuda
def test_nan_stays_in_its_channel(in_parts):
    x, _ = made((128, 16, 64, 64), torch.float32)
    x[3, 5, 2, 1] = float("nan")
    norm = norm_of(16)
    windrow.torch.patch(norm)
    y = norm(x)
    assert in_parts and y[:, 5].isnan().all() and not y[:, [*range(5), *range(6, 16)]].isnan().any()


def test_on_the_cpu_it_is_pytorchs():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None), nn.BatchNorm2d(4, affine=False))
    plain = copy.deepcopy(model)
    report = windrow.torch.patch(model)
    assert [*report.swapped] == ["0", "1", "2"]
    x = torch.randn(3, 4, 9, 8)
    assert torch.equal(model(x), plain(x))
    assert all(torch.equal(*pair) for pair in zip(model.buffers(), plain.buffers(), strict=True))
    assert torch.equal(model.eval()(x), plain.eval()(x))
    for training in (False, True):
        scripted = torch.jit.script(copy.deepcopy(model).train(training))
        assert torch.equal(scripted(x), plain.train(training)(x))
    assert type(windrow.torch.unpatch(model)[0]) is nn.BatchNorm2d


class Doubled(nn.Module):
    """What stands in the place of a parameter."""

    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.1}]
)
def test_in_inference_it_is_pytorchs(options):
    norm = nn.BatchNorm2d(4, **options)
    for t in norm.state_dict().values():
        if t.is_floating_point():
            nn.init.uniform_(t, 0.5, 2)
    norm.eval()
    plain = copy.deepcopy(norm)
    windrow.torch.patch(norm)
    for x in (torch.randn(3, 4, 9, 8), torch.randn(2, 4, 0, 2), torch.randn(2, 4, 1, 1, dtype=torch.bfloat16)):
        ours, theirs = norm.to(x.dtype), plain.to(x.dtype)
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0, equal_nan=True)
        x.requires_grad_(True)
        gradients = [torch.autograd.grad(n(x).sum(), x)[0] for n in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=0, atol=0, equal_nan=True)
    x = torch.randn(2, 3, 4, 9, 8)
    norm.float(), plain.float()
    if norm.track_running_stats:
        assert torch.equal(torch.vmap(norm)(x), torch.vmap(plain)(x))
    assert torch.equal(torch.compile(norm, backend="eager", fullgraph=True)(x[0]), plain(x[0]))
    if norm.affine:
        for n in (norm, plain):
            nn.utils.parametrize.register_parametrization(n, "weight", Doubled())
        assert torch.equal(norm(x[0]), plain(x[0])) and not torch.equal(norm(x[0]), x[0])


def test_others_see_what_is_called():
    seen = []

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    norm = nn.BatchNorm2d(4).eval()
    windrow.torch.patch(norm)
    with Seeing():
        norm(torch.randn(2, 4, 3, 3))
    assert nn.functional.batch_norm in seen
    for wrong in (torch.randn(4, 4), torch.randn(2, 5, 3, 3)):
        with pytest.raises((ValueError, RuntimeError)):
            norm(wrong)


def test_a_patched_one_is_folded():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(1, 3, 9, 9)
    want = model(x)
    windrow.torch.patch(model)
    optimized = optimize(model)
    torch.testing.assert_close(optimized(x), want, rtol=1e-4, atol=1e-5)
    assert optimized.windrow_report.fused["0"].endswith("folded 1, relu")
