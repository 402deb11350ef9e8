"""The bits of an image do not depend on what else is in its batch."""

import pytest
import torch
import windrow
import windrow.torch
from torch import nn
from windrow import _native
from windrow.torch.backend import windrow as backend

BATCHES = [1, 2, 7]


class Block(nn.Module):
    def __init__(self, c, k, stride):
        super().__init__()
        self.first = nn.Conv2d(c, k, 3, stride, padding=1)
        self.second = nn.Conv2d(k, k, 3, padding=1)
        self.shortcut = nn.Conv2d(c, k, 1, stride)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.second(self.relu(self.first(x))) + self.shortcut(x))


def network(*more):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 7, 2, padding=3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    # The cost model takes another tile for one image of the last block than for several.
    blocks = [Block(32, 32, 1), Block(32, 64, 2), Block(64, 256, 2)]
    return nn.Sequential(*layers, *blocks, *more).eval()


def images(n=7, dtype=torch.float32, last=False):
    x = torch.randn(n, 3, 57, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def expect_same_bits(model, x):
    """The bits of each image in batches of several sizes."""
    whole = model(x)
    for n in BATCHES:
        for first in range(0, len(x), n):
            part = slice(first, first + n)
            assert torch.equal(model(x[part]), whole[part]), f"images {part}"
    return whole


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_patched(dtype, last):
    model, x = network().to(dtype), images(dtype=dtype, last=last)
    before = len(windrow.torch.decisions())
    with torch.no_grad():
        want = model(x)
        report = windrow.torch.patch(model, batch_invariant=True)
        got = expect_same_bits(model, x)
        # What ran before does not matter.
        assert torch.equal(expect_same_bits(model, x), got)
    assert len(windrow.torch.decisions()) == before
    assert not report.left and len(report.swapped) == 10
    assert "compared with PyTorch's" not in str(report)
    torch.testing.assert_close(got, want, atol=0.05 if dtype != torch.float32 else 1e-4, rtol=0.02)


def test_training_gives_the_bits_of_inference():
    model, x = network(), images()
    windrow.torch.patch(model, batch_invariant=True)
    with torch.no_grad():
        want = model(x)
    one = x[3:4].clone().requires_grad_()
    all = x.clone().requires_grad_()
    y = model(all)
    assert torch.equal(y, want)
    y.sum().backward()
    model(one).sum().backward()
    assert torch.equal(one.grad, all.grad[3:4])


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_compiled(rest):
    model, x = network(), images()
    told = {}

    class Report:
        def fused(self, name, what):
            told[name] = what

        def left(self, name, why):
            told[name] = why

    options = {"rest": rest, "batch_invariant": True, "report": Report()}
    compiled = torch.compile(model, backend=backend, options=options, dynamic=False)
    before = len(windrow.torch.decisions())
    with torch.no_grad():
        got = expect_same_bits(compiled, x)
        torch.testing.assert_close(got, model(x), atol=1e-4, rtol=0.02)
    assert len(windrow.torch.decisions()) == before
    assert not any("may depend" in why for why in told.values()), told


def test_optimized():
    model = network(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    x = images()
    optimized = windrow.torch.optimize(model[:6], batch_invariant=True)
    with torch.no_grad():
        expect_same_bits(optimized, x)
    # The linear layer of one image is PyTorch's, too.
    for given in (x, x[:1]):
        whole = windrow.torch.optimize(model, batch_invariant=True)
        with torch.no_grad():
            whole(given)
        left = whole.windrow_report.left
        assert "may depend on the batch" in left["8"], left
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="OptionError"):
        torch.compile(model, backend=backend, options={"batch_invariant": 3})(x)


def test_report_names_what_is_not_ours():
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 4),
            "norm": nn.BatchNorm2d(4),
            "group": nn.GroupNorm(2, 4),
            "attention": nn.MultiheadAttention(4, 2),
            "mean": nn.AdaptiveAvgPool2d(1),
            "three": nn.Conv3d(1, 1, 1),
            "wide": nn.Conv2d(1, 1, 1, dtype=torch.float64),
            "relu": nn.ReLU(),
            "gelu": nn.GELU(),
            "two": nn.Conv2d(1, 1, 1),
        }
    )
    report = windrow.torch.patch(model, batch_invariant=True)
    assert {"linear", "norm", "group", "attention", "mean", "wide"} <= report.left.keys()
    assert report.swapped.keys() == {"two", "three", "gelu"}
    assert "float64" in report.left["wide"]
    windrow.torch.unpatch(model)
    assert type(model["two"]) is nn.Conv2d and "accuracy" not in vars(model["two"])
    assert "batch_invariant" not in vars(model["gelu"])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gelu(dtype, approximate):
    x = torch.randn(7, 53)
    # Large elements, which are computed in another way.
    x[2, 3], x[5, 50], x[6, 0] = 9.0, -7.0, 1e4
    x = x.to(dtype)
    model = nn.Sequential(nn.GELU(approximate))
    want = model(x)
    report = windrow.torch.patch(model, batch_invariant=True)
    assert not report.left
    y = expect_same_bits(model, x)
    torch.testing.assert_close(y, want)
    assert torch.equal(windrow.torch.gelu(x, approximate, batch_invariant=True), y)
    x = x.requires_grad_()
    assert torch.equal(model(x), y)
    model(x).float().sum().backward()
    assert x.grad.shape == x.shape
    compiled = torch.compile(lambda x: windrow.torch.gelu(x, approximate, batch_invariant=True), backend="aot_eager")
    assert torch.equal(compiled(x.detach()), y)


def functions():
    w = torch.randn(512, 512, 3, 3)
    line = torch.randn(48, 40, 5)
    across = torch.randn(40, 24, 3, 3)
    of = windrow.torch
    yield of.conv2d, torch.randn(7, 512, 7, 7), w, {"padding": 1}
    yield of.conv1d, torch.randn(7, 40, 90), line, {}
    yield of.conv_transpose2d, torch.randn(7, 40, 9, 9), across, {"stride": 2}
    yield of.conv3d, torch.randn(7, 64, 3, 9, 9), torch.randn(64, 64, 1, 3, 3), {}
    yield of.conv_transpose1d, torch.randn(7, 40, 33), torch.randn(40, 24, 3), {"padding": 1}


@pytest.mark.parametrize("which", range(5))
def test_functions(which):
    function, x, w, options = list(functions())[which]
    for frozen in (False, True):
        run = lambda x, frozen=frozen: function(x, w, batch_invariant=True, frozen=frozen, **options)
        with torch.no_grad():
            y = expect_same_bits(run, x)
    assert torch.equal(expect_same_bits(run, x.requires_grad_()), y)
    with pytest.raises(ValueError, match="algorithm"):
        function(x, w, batch_invariant=True, algorithm="fastest")


def test_arrays():
    x, w = torch.randn(7, 512, 7, 7).numpy(), torch.randn(512, 512, 3, 3).numpy()
    run = lambda x, option: torch.from_numpy(windrow.conv2d(x, w, padding=1, batch_invariant=option))
    assert torch.equal(run(x, True)[2:3], run(x[2:3], True))
    plans = [windrow.Conv2dPlan(x[:n], w, padding=1, batch_invariant=True) for n in (1, 7)]
    assert plans[0].algorithm == plans[1].algorithm
    # Without the option the cost model looks at the batch.
    assert windrow.Conv2dPlan(x[:1], w, padding=1).algorithm != plans[0].algorithm


def test_text_of_an_accuracy():
    x, w = torch.randn(1, 4, 5, 5), torch.randn(4, 4, 3, 3)
    for text in ("batch_invariant", "exact batch_invariant"):
        _native.conv2d(x, w, accuracy=text)
    with pytest.raises(ValueError, match="accuracy"):
        _native.conv2d(x, w, accuracy="wrong batch_invariant")


@pytest.mark.parametrize("split", [None, [8, 16, 24]])
def test_causal_conv1d(split):
    x, weight = torch.randn(7, 48, 100), torch.randn(48, 4)

    def run(x):
        y = windrow.torch.causal_conv1d_fn(x, weight, activation="silu", split=split, batch_invariant=True)
        return y if split is None else torch.cat(y, 1)

    whole = expect_same_bits(run, x)
    x = x.requires_grad_()
    assert torch.equal(run(x), whole)
    (gradient,) = torch.autograd.grad(run(x).sum(), x)
    assert gradient.shape == x.shape
    y = windrow.causal_conv1d(x.detach().numpy(), weight.numpy(), activation="silu", batch_invariant=True)
    assert torch.equal(torch.from_numpy(y), whole)
    compiled = torch.compile(run, backend="aot_eager")
    assert torch.equal(compiled(x.detach()), whole)

