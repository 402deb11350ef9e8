"""The layouts in which compiled graphs hand images to Windrow's operators, and what Inductor keeps."""

import pytest
import torch
import torch.nn.functional as F
from common import OURS, THEIRS, needs_driver
from torch import nn
from torch._inductor import config
from torch._inductor.compile_fx import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from windrow.torch import _conv2d, _fused
from windrow.torch.backend import _compile, _group_norm, _options, windrow

pytestmark = [
    pytest.mark.usefixtures("nothing_decided"),
    pytest.mark.skipif(torch.__version__ < _options.OLDEST, reason="an old PyTorch, which the backend refuses"),
]
LAST = torch.channels_last


@pytest.fixture
def given(monkeypatch):
    """The images and residuals that the operators were given, after `given.clear()`."""
    found = []

    def recorded(holder, name, places):
        own = getattr(holder, name)

        def function(*args):
            found.extend(args[i] for i in places if isinstance(args[i], torch.Tensor))
            return own(*args)

        monkeypatch.setattr(holder, name, function)

    recorded(_fused.CONV2D_FUSED, "_op", (0, 3))
    recorded(_conv2d, "way", (1,))
    return found


@pytest.fixture
def targets(monkeypatch):
    """The operators of each graph after the passes."""
    found = []
    made = _compile._Frozen.__init__

    def told(self, *args):
        made(self, *args)
        found.append([str(node.target) for node in self.module.graph.nodes if node.op == "call_function"])

    monkeypatch.setattr(_compile._Frozen, "__init__", told)
    return found


class Enlarged(nn.Module):
    """Convolutions of images that were enlarged, and of what a transposed convolution made."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(24, 8, 3, padding=1)

    def forward(self, x):
        y = F.leaky_relu(self.first(x), 0.2)
        y = F.leaky_relu(self.second(F.interpolate(y, scale_factor=2)), 0.2)
        return self.last(torch.cat([F.interpolate(y, scale_factor=2), self.up(y)], 1))


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return self.conv(x) + x


@pytest.mark.parametrize("is_last", [True, False], ids=["channels-last", "row-major image"])
@pytest.mark.parametrize("kind", [Enlarged, Added])
@config.patch(fx_graph_cache=False)
def test_no_operator_copies_its_image(kind, is_last, given, times):
    times(OURS)
    torch.manual_seed(0)
    model, x = kind().eval().to(memory_format=LAST), torch.randn(2, 8, 12, 10)
    if is_last:
        x = x.to(memory_format=LAST)
    fast = torch.compile(model, backend=windrow, options={"rest": "inductor", "check": False, "accuracy": "exact"})
    with torch.no_grad():
        want = model(x)
        fast(x)
        given.clear()
        got = fast(x)
    assert len(given) == (4 if kind is Enlarged else 2)
    assert all(t.is_contiguous(memory_format=LAST) for t in given)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


class Writing(nn.Module):
    """A convolution of an image that is overwritten afterwards."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        y = self.conv(x)
        x[:, :2].mul_(0.5)
        return y


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_an_image_that_the_graph_overwrites(rest, runs_uncompiled):
    model = Writing().requires_grad_(False)
    image = torch.randn(2, 3, 9, 10)
    ours, theirs = image.clone(), image.clone()
    fast = torch.compile(model, backend=windrow, options={"rest": rest, "accuracy": "exact", "check": False})
    with torch.no_grad():
        torch.testing.assert_close(fast(ours), model(theirs), rtol=1e-4, atol=1e-5)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, image)


@pytest.mark.parametrize("factor", [OURS, THEIRS])
def test_transposed_convolutions_are_left_where_pytorch_is_faster(factor, times, targets, runs_uncompiled):
    times(factor)
    model, x = nn.Sequential(nn.ConvTranspose2d(4, 6, 2, 2), nn.ReLU()).eval(), torch.randn(2, 4, 5, 7)
    numbers, told = torch.get_rng_state(), {}

    class Report:
        def fused(self, name, what):
            told[name] = what

        def left(self, name, why):
            told[name] = why

    fast = torch.compile(model, backend=windrow, options={"rest": "inductor", "check": False, "report": Report()})
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    ours, theirs = "windrow.conv2d.default", "aten.convolution.default"
    assert [t for t in targets[0] if t in (ours, theirs)] == [ours if factor == OURS else theirs]
    assert told == {"0": "conv_transpose2d" if factor == OURS else "PyTorch's operator was measured to be faster"}
    assert torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.skipif(needs_driver(), reason=f"PyTorch {torch.__version__} asks for a driver to lay them out")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_last", [True, False])
def test_group_norms_on_cuda(is_last, dtype):
    """Where the copy into row-major order comes before the conversion."""

    def function(x, weight, bias):
        return F.silu(F.group_norm(x, 4, weight, bias))

    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(2, 8, 6, 6, device="cuda", dtype=dtype)
        x = x.contiguous(memory_format=LAST) if is_last else x
        affine = [torch.empty(8, device="cuda", dtype=dtype) for _ in range(2)]
        traced = make_fx(function, select_decomp_table(), tracing_mode="fake")(x, *affine)
        assert _group_norm.by_channels(traced.graph) == is_last
        traced.graph.lint()
    over_images = [node for node in traced.graph.nodes if node.target is torch.ops.aten.var_mean.correction]
    assert [node.args[0].meta["val"].dtype for node in over_images] == [torch.float32]
    assert over_images[0].args[0].meta["val"].is_contiguous(memory_format=LAST) == is_last


class Attended(nn.Module):
    """A group normalisation of an image whose pixels a linear layer has computed, as behind attention."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8), nn.GroupNorm(2, 8)

    def forward(self, x):
        x = self.conv(x)
        y = self.linear(x.flatten(2).transpose(1, 2)).transpose(1, 2)
        return self.norm(y.reshape(x.shape))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 4, 6), (2, 3, 4, 6), (1, 3, 1, 5)])
def test_group_norms_behind_attention(shape, is_training, dynamic):
    model, x = Attended().train(is_training), torch.randn(shape)
    fast = torch.compile(model, backend=windrow, dynamic=dynamic, options={"rest": "eager", "accuracy": "exact"})
    with torch.set_grad_enabled(is_training):
        for _ in range(2):
            want, got = model(x), fast(x)
            torch.testing.assert_close(got, want)
            assert got.stride() == want.stride()
    if is_training:
        of = lambda y: torch.autograd.grad(y.square().sum(), [*model.parameters()])
        for g, w in zip(of(got), of(want), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
