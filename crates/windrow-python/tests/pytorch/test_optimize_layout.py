"""`optimize`: channels-last inside, and linear layers of images as convolutions."""

import copy

import pytest
import torch
from common import OURS, THEIRS, TOLERANCE, each_device, leaf
from torch import nn
from windrow.torch import optimize
from windrow.torch._fused import FusedConv2d
from windrow.torch._sequence import Sequence

pytestmark = pytest.mark.usefixtures("nothing_decided")


class Called(nn.Module):
    """What a function makes of the modules that it is given by name."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


def close(got, model, x):
    want = copy.deepcopy(model).double()(x.double())
    assert got.shape == want.shape
    error = (got.double() - want).norm() / want.norm()
    assert error <= 3 * TOLERANCE[got.dtype], error


@pytest.fixture
def seen(monkeypatch):
    """The strides of the image that the first convolution is given."""
    found = []
    single, several = FusedConv2d.forward, Sequence.forward
    monkeypatch.setattr(FusedConv2d, "forward", lambda self, *of: found.append(of[0].stride()) or single(self, *of))
    monkeypatch.setattr(Sequence, "forward", lambda self, *of: found.append(of[0].stride()) or several(self, *of))

    def first(fast, x):
        found.clear()
        fast(x)
        return found[0]

    return first


def is_last(strides):
    return strides[1] < strides[3]


X = [2, 6, 8, 7]
LAYOUTS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_inside_and_outside(layout, dtype, seen):
    model = nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 5, 2)).eval().to(dtype)
    x = leaf(*X, dtype=dtype, grad=False).contiguous(memory_format=layout)
    fast = optimize(model)
    with torch.inference_mode():
        for _ in range(3):
            y = fast(x)
            assert y.stride() == model(x).stride()
            close(y, model, x)
        assert is_last(seen(fast, x))
        close(fast(x[0]), model, x[0])


@each_device
def test_devices_have_rules_of_their_own(device, seen):
    """On CUDA one image of f32 stays as it is; many images do not, nor do f16 and bf16."""
    model = nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 2)).eval().to(device)
    x = leaf(16, *X[1:], grad=False).to(device)
    fast, half = optimize(model), optimize(copy.deepcopy(model).half())
    with torch.inference_mode():
        for images in (16, 1):
            given = x[:images]
            assert is_last(seen(fast, given)) == (device == "cpu" or images == 16)
            y = fast(given)
            assert y.is_contiguous()
            close(y, model, given)
            assert is_last(seen(half, given.half()))
            assert half(given.half()).is_contiguous()


def test_parts_of_a_model_have_a_layout_of_their_own(seen):
    def branches(m, x):
        return m.part(x) if x.sum() > 0 else x

    model = Called(branches, part=nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1))).eval()
    x = leaf(*X, grad=False).abs()
    fast = optimize(model)
    with torch.inference_mode():
        assert is_last(seen(fast, x)) and fast(x).is_contiguous()
        close(fast(x), model, x)
    assert "part.0" in fast.windrow_report.fused
    assert any("graph break" in name for name in fast.windrow_report.left)


def test_depthwise_of_bf16_stay(seen):
    model = nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 5, 1)).eval()
    x = leaf(*X, grad=False)
    with torch.inference_mode():
        assert is_last(seen(optimize(model), x))
        assert not is_last(seen(optimize(model.bfloat16()), x.bfloat16()))


def test_results_of_several_kinds():
    outputs = lambda m, x: {"image": m.conv(x), "rows": [m.conv(x).flatten(1), x]}
    model = Called(outputs, conv=nn.Conv2d(6, 8, 3)).eval()
    x = leaf(*X, grad=False)
    with torch.inference_mode():
        got, want = optimize(model)(x), model(x)
        assert got["image"].stride() == want["image"].stride()
        torch.testing.assert_close(got, want)
        assert got["rows"][1] is x


@pytest.mark.parametrize(
    "after",
    [lambda m, x: m.conv(x).view(2, -1), lambda m, x: m.conv(x) * float(m.conv(x).stride(1))],
    ids=["view", "stride"],
)
def test_models_that_see_strides_keep_them(after):
    model = Called(after, conv=nn.Conv2d(6, 8, 3)).eval()
    x = leaf(*X, grad=False)
    with torch.inference_mode():
        close(optimize(model)(x), model, x)


class Block(nn.Module):
    """As ConvNeXt's."""

    def __init__(self, c=6, bias=True, activation=None, scale=(6, 1, 1)):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, padding=1, groups=c)
        self.norm = nn.LayerNorm(c)
        self.up, self.down = nn.Linear(c, 4 * c, bias), nn.Linear(4 * c, c, bias)
        self.activation = activation or nn.GELU()
        self.scale = nn.Parameter(torch.rand(*scale) + 0.5)

    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = torch.permute(self.down(self.activation(self.up(y))), [0, 3, 1, 2])
        y = self.scale * y
        y += x
        return y


@each_device
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.ReLU6(), nn.SiLU()])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_of_images(device, layout, activation, bias):
    model = Block(bias=bias, activation=activation).eval().to(device)
    x = leaf(*X, device=device, grad=False).contiguous(memory_format=layout)
    fast = optimize(model)
    name = type(activation).__name__.lower()
    assert fast.up.weight.shape == model.up.weight.shape
    with torch.inference_mode():
        for _ in range(2):
            y = fast(x)
            assert y.stride() == model(x).stride()
            close(y, model, x)
        close(fast(x[:1]), model, x[:1])
    fused = fast.windrow_report.fused
    assert "FusedConv2d(6, 24, kernel_size=(1, 1)" in fused["up"] and name in fused["up"].split("): ")[1]
    assert fused["down"].endswith("): folded mul, added") and {*fused} == {"conv", "up", "down"}


def test_factors_that_are_not_of_channels_stay():
    model = Block(scale=(8, 7)).eval()
    fast = optimize(model)
    x = leaf(*X, grad=False)
    with torch.inference_mode():
        close(fast(x), model, x)
    assert fast.windrow_report.fused and all("folded" not in what for what in fast.windrow_report.fused.values())


def to_last(x):
    return x.permute(0, 2, 3, 1)


def back(x):
    return x.permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: back(m.linear(to_last(m.conv(x)))) + back(m.linear(to_last(m.conv(-x)))),
        lambda m, x: m.linear(m.conv(x).transpose(1, 3)),
        lambda m, x: back(m.norm(m.linear(to_last(m.conv(x))))),
        lambda m, x: back(torch.softmax(m.linear(to_last(m.conv(x))), -1)),
        lambda m, x: back(m.linear(to_last(m.conv(x))) * to_last(m.conv(x)).mean()),
    ],
    ids=["shared", "another order", "a norm behind", "another operator", "another user"],
)
def test_other_linear_layers_stay(function):
    model = Called(function, conv=nn.Conv2d(6, 8, 3), linear=nn.Linear(8, 8), norm=nn.LayerNorm(8)).eval()
    fast = optimize(model)
    x = leaf(*X, grad=False)
    with torch.inference_mode():
        close(fast(x), model, x)
    assert [*fast.windrow_report.fused] == ["conv"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="without CUDA nothing is TF32")
@pytest.mark.parametrize("factor", [OURS, THEIRS])
def test_linear_layers_round_as_pytorchs_do(monkeypatch, times, factor):
    times(factor)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    conv, linear = nn.Conv2d(64, 64, 1, bias=False), nn.Linear(64, 96)
    conv.weight.data = torch.eye(64)[:, :, None, None]
    model = Called(lambda m, x: back(m.linear(to_last(m.conv(x)))), conv=conv, linear=linear).cuda().eval()
    x = leaf(2, 64, 12, 12, device="cuda", dtype=torch.float16, grad=False).float()
    with torch.inference_mode():
        close(optimize(model)(x), model, x)


def test_saved_and_compiled(times):
    # Measured, the copy could choose another algorithm, with other bits.
    times(OURS)
    model = nn.Sequential(nn.Conv2d(6, 6, 1), Block()).eval()
    x = leaf(*X, grad=False)
    fast = optimize(model)
    with torch.no_grad():
        want = fast(x)
        assert torch.equal(copy.deepcopy(fast)(x), want)
        other = optimize(nn.Sequential(nn.Conv2d(6, 6, 1), Block()).eval())
        other.load_state_dict(fast.state_dict())
        torch.testing.assert_close(other(x), want)
        compiled = torch.compile(fast, fullgraph=True)
        for n in (2, 1):
            torch.testing.assert_close(compiled(x[:n]), want[:n])
