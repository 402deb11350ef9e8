"""`optimize`: what is folded and fused, and that results are those of the model."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from common import TOLERANCE, each_device, leaf, normal
from torch import nn
from windrow.torch import Conv2d, ConvTranspose2d, _fused, optimize
from windrow.torch.choice import policy, store

pytestmark = pytest.mark.usefixtures("nothing_decided")


@pytest.fixture(params=[0.5, 2.0], ids=["ours", "theirs"])
def winner(request, times):
    times(request.param)
    return "Windrow" if request.param < 1 else policy.PYTORCH


class Block(nn.Module):
    """With a shortcut, as in ResNet."""

    def __init__(self, c, k, stride, activation):
        super().__init__()
        self.first = nn.Conv2d(c, k, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(k)
        self.second = nn.Conv2d(k, k, 3, padding="same")
        self.after = nn.BatchNorm2d(k, affine=False)
        self.short = nn.Sequential(nn.Conv2d(c, k, 1, stride), nn.BatchNorm2d(k))
        self.activation = activation

    def forward(self, x):
        y = self.activation(self.norm(self.first(x)))
        y = F.dropout(self.after(self.second(y)), 0.5, training=self.training)
        y += self.short(x)
        return self.activation(y)


def made(activation=None, dtype=torch.float32, device="cpu"):
    """A model with statistics that do something."""
    first = Block(4, 8, 1, activation or nn.ReLU(inplace=True))
    model = nn.Sequential(first, nn.Dropout(), Block(8, 12, 2, nn.SiLU()), nn.GELU())
    return normal(model).to(device, dtype)


def close(got, model, x, scale=1):
    want = copy.deepcopy(model).double()(x.double())
    error = (got.double() - want).norm() / want.norm()
    assert error <= scale * TOLERANCE[got.dtype], error


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.SiLU(), nn.GELU("tanh"), nn.Hardswish()])
def test_values(device, dtype, layout, activation, winner):
    model = made(activation, dtype, device).to(memory_format=layout)
    x = leaf(2, 4, 12, 11, dtype=dtype, device=device, grad=False).contiguous(memory_format=layout)
    fast = optimize(model)
    with torch.inference_mode():
        for _ in range(2):
            y = fast(x)
            assert y.dtype == dtype and y.stride() == model(x).stride()
            close(y, model, x, 3 if dtype == torch.float32 else 2)
        close(fast(x[:1]), model, x[:1], 3 if dtype == torch.float32 else 2)
    decided = {d.choice for d in store.every() if d.times}
    assert decided == {winner} or device == "cuda"


def test_report_and_state():
    model = made()
    before = copy.deepcopy(model.state_dict())
    fast = optimize(model)
    fused = fast.windrow_report.fused
    assert not fast.windrow_report.left
    assert {*fused} == {"0.first", "0.short.0", "0.second", "2.first", "2.short.0", "2.second", "3"}
    assert fused["0.first"].endswith("activation='relu'): folded 0.norm, relu")
    assert fused["0.second"].endswith("activation='relu'): folded 0.after, added, relu")
    assert fused["0.short.0"].endswith("stride=(1, 1)): folded 0.short.1")
    assert "fused 2.first: FusedConv2d(8, 12, kernel_size=(3, 3), stride=(2, 2)" in str(fast.windrow_report)
    assert not any(isinstance(m, (nn.BatchNorm2d, nn.Dropout)) for m in fast._windrow_graph.modules())
    assert not any(p.requires_grad for p in fast.parameters()) and not fast.training
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


def test_saved_and_loaded():
    model, other = made(), made()
    x = leaf(1, 4, 9, 9, grad=False)
    fast = optimize(model)
    with torch.no_grad():
        want = fast(x)
        file = io.BytesIO()
        torch.save(fast, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded(x), want) and str(loaded.windrow_report) == str(fast.windrow_report)
        assert torch.equal(copy.deepcopy(fast)(x), want)
        # Filters that have been packed already are replaced.
        replaced = optimize(other)
        replaced(x)
        replaced.load_state_dict(fast.state_dict())
        torch.testing.assert_close(replaced(x), want)


@each_device
def test_compiled(device, winner):
    model = made(device=device)
    fast = torch.compile(optimize(model), fullgraph=True)
    with torch.no_grad():
        for n in (2, 2, 3):
            x = leaf(n, 4, 12, 10, device=device, grad=False)
            close(fast(x), model, x, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_in_a_graph():
    model = made(device="cuda")
    fast = optimize(model)
    x = leaf(2, 4, 12, 10, device="cuda", grad=False)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fast(x)
        for _ in range(2):
            x.normal_()
            graph.replay()
            close(y, model, x, 3)


@each_device
def test_autocast(device):
    model = made(device=device)
    fast = optimize(model)
    x = leaf(2, 4, 12, 10, device=device, grad=False)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        for _ in range(2):
            y = fast(x)
    assert y.dtype == torch.bfloat16
    close(y, model, x, 3)


class Branching(nn.Module):
    """Not to be traced: neither what depends on a value, nor what an argument might be None in."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.rest = nn.Conv2d(4, 4, 3, padding_mode="reflect", padding=1)
        self.up = nn.ConvTranspose2d(4, 2, 2)

    def forward(self, x, scale=None):
        y = self.rest(self.stem(x))
        if scale is not None:
            y = y * scale
        return self.up(y)


def test_what_is_not_traced():
    model = Branching().eval()
    fast = optimize(model)
    report = fast.windrow_report
    assert isinstance(fast, Branching) and [*report.fused] == ["stem.0", "rest", "up"]
    assert "folded 1, relu" in report.fused["stem.0"] and not report.left
    assert type(fast.rest) is Conv2d and fast.rest.frozen
    assert type(fast.up) is ConvTranspose2d and fast.up.frozen
    x = leaf(2, 3, 9, 9, grad=False)
    with torch.no_grad():
        for scale in (None, torch.tensor(2.0)):
            torch.testing.assert_close(fast(x, scale), model(x, scale), atol=1e-4, rtol=1e-4)


class Sums(nn.Module):
    """Sums that must not be taken for a shortcut, or only with care."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.c = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.a(x) + 1
        z = self.b(y)
        y = y.mul_(2)  # `b` has to have read it before.
        y = F.relu(y + z)
        wide = self.c(y)
        wide = wide + y.mean((2, 3), keepdim=True)  # Broadcast.
        twice = self.c(wide)
        return torch.relu(twice) + twice, self.c(y).add(wide), wide + self.c(y).mean((2, 3), keepdim=True)


def test_sums(winner):
    model = Sums().eval()
    fast = optimize(model)
    x = leaf(2, 4, 7, 8, grad=False)
    with torch.no_grad():
        for _ in range(2):
            for got, want in zip(fast(x), model(x), strict=True):
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@each_device
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_is_added_in_the_convolution(layout, device, times):
    """As the result lies, else after it: broadcast, of another layout or type."""
    times(0.5)
    x = leaf(2, 6, 9, 8, device=device, grad=False).contiguous(memory_format=layout)
    weight, bias = leaf(6, 6, 3, 3, device=device, grad=False), leaf(6, device=device, grad=False)
    layer = _fused.FusedConv2d(weight, bias, ([1, 1], [1, 1], [1, 1], 1), "relu6")
    sums = F.conv2d(x.double(), weight.double(), bias.double(), padding=1)
    like = 4 * torch.randn_like(x)
    other = torch.channels_last if layout is torch.contiguous_format else torch.contiguous_format
    rows = torch.stack([like, like], 3)[:, :, :, 0]
    residuals = [like, like.contiguous(memory_format=other), rows, like[:1], like[:, :1], like.double()]
    with torch.no_grad():
        for residual in residuals * 3:
            y = layer(x, residual)
            want = F.relu6(sums + residual)
            torch.testing.assert_close(y.double(), want, atol=1e-5, rtol=1e-5)
            assert y.stride() == x.stride() or residual.dtype != x.dtype
    added = {d.key.how.after.beside.is_added for d in store.every() if d.times and d.key.how.after.beside}
    # On a GPU it may be cuDNN's.
    assert added == {True, False} or device != "cpu"


def test_what_is_wrong_is_an_error():
    with pytest.raises(ValueError, match="`accuracy` is 'wrong'"):
        optimize(nn.Conv2d(1, 1, 1), accuracy="wrong")
    fast = optimize(made())
    with pytest.raises(NotImplementedError, match="no gradient"):
        fast(leaf(1, 4, 9, 9)).sum().backward()


def test_what_only_pytorch_computes():
    layers = [nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3), nn.GELU("tanh"), nn.GELU()]
    model = nn.Sequential(*layers).double().eval()
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(optimize(model)(x), model(x))


def test_one_image_without_a_batch():
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    x = leaf(3, 8, 8, grad=False)
    with torch.no_grad():
        torch.testing.assert_close(optimize(convolution)(x), convolution(x), atol=1e-4, rtol=1e-4)
    assert type(optimize(convolution)._windrow_graph.get_submodule("0")) is _fused.FusedConv2d


@each_device
def test_later_calls_follow_their_tensors(device, winner):
    model = made(device=device)
    optimized = optimize(model)
    images = [torch.randn(n, 4, 9, 10, device=device) for n in (2, 1)]
    with torch.inference_mode():
        for x in [*images * 2, *images[:1] * 3, images[1]]:
            close(optimized(x), model, x)
        state = {name: 2 * value for name, value in optimized.state_dict().items()}
        doubled = optimize(model)
        doubled.load_state_dict(state)
        optimized.load_state_dict(state)
        torch.testing.assert_close(optimized(images[1]), doubled(images[1]))
