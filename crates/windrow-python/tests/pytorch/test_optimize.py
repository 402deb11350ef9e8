"""`optimize`: what is folded and fused, and that results are those of the model."""

import copy
import io
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from common import TOLERANCE, each_device, leaf, normal
from torch import nn
from windrow.torch import _fused, _known, _sequence, optimize
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
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.SiLU(), nn.GELU("tanh"), nn.Hardswish(), nn.LeakyReLU(0.2)])
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


@pytest.mark.parametrize(("device", "kind", "rest"), [
    ("cuda", nn.GroupNorm, "inductor"),
    ("cuda", nn.BatchNorm2d, "eager"),
    ("cpu", nn.GroupNorm, "eager"),
])  # fmt: skip
def test_who_computes_the_rest(device, kind, rest, monkeypatch):
    """If the user does not say."""
    from windrow.torch import backend
    from windrow.torch.backend import _options

    model, asked = nn.Sequential(nn.Conv2d(3, 4, 1), kind(*[2] * (kind is nn.GroupNorm), 4)), []
    monkeypatch.setattr(_options, "device_types", lambda inputs: {device})
    monkeypatch.setattr(backend, "_compiled", lambda graph, inputs, options: asked.append(options.rest) or graph)
    for given in (None, *_options.RESTS):
        optimize(model, rest=given)(torch.randn(1, 3, 4, 4))
        torch._dynamo.reset()
    assert asked == [rest, "inductor", "eager"]
    with pytest.raises(_options.OptionError, match="`rest` is 'fast', expected one of"):
        optimize(model, rest="fast")


def test_report_and_state():
    model = made()
    before = copy.deepcopy(model.state_dict())
    fast = optimize(model)
    fused = fast.windrow_report.fused
    assert not fused, "nothing has been compiled yet"
    fast(leaf(1, 4, 9, 9, grad=False))
    assert not fast.windrow_report.left
    assert {*fused} == {"0.first", "0.short.0", "0.second", "2.first", "2.short.0", "2.second", "3"}
    assert fused["3"] == "gelu" and fused["0.first"].endswith("activation='relu'): folded 0.norm, relu")
    assert fused["0.second"].endswith("activation='relu'): folded 0.after, added, relu")
    assert fused["0.short.0"].endswith("stride=(1, 1)): folded 0.short.1")
    assert "fused 2.first: FusedConv2d(8, 12, kernel_size=(3, 3), stride=(2, 2)" in str(fast.windrow_report)
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
    """An argument may be None."""

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


def test_arguments_with_defaults():
    model = Branching().eval()
    fast = optimize(model)
    report = fast.windrow_report
    x = leaf(2, 3, 9, 9, grad=False)
    fast(x)
    assert isinstance(fast, Branching) and [*report.fused] == ["stem.0", "rest", "up"]
    assert "folded stem.1, relu" in report.fused["stem.0"] and not report.left
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
    with pytest.raises(ValueError, match="`rest` is 'wrong'"):
        optimize(made(), rest="wrong")


def test_gradients_of_what_is_given():
    model = made()
    fast, x = optimize(model), leaf(1, 4, 9, 9)
    (got,) = torch.autograd.grad(fast(x).square().sum(), x)
    (want,) = torch.autograd.grad(model(x).square().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert not any(p.requires_grad for p in fast.parameters())


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


class Parts(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.decoder, self.breaks = nn.Sequential(nn.Conv2d(6, 4, 3), nn.SiLU()), breaks

    def encode(self, x):
        return self.encoder(x)

    def decode(self, x):
        return self.decoder(x)

    def forward(self, x):
        y = self.encode(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.decode(y)


@pytest.fixture
def ours(times, monkeypatch):
    """How many convolutions are computed as ones of Windrow's graphs."""
    times(0.5)
    seen = []
    forward, sequence = _fused.FusedConv2d.forward, _sequence.Sequence.forward
    monkeypatch.setattr(_fused.FusedConv2d, "forward", lambda self, *a: seen.append(1) or forward(self, *a))

    def counted(self, *args):
        before = len(seen)
        result = sequence(self, *args)
        # A first call calls its modules one by one.
        seen[before:] = [sum(isinstance(m, _fused.FusedConv2d) for m in self._modules.values())]
        return result

    monkeypatch.setattr(_sequence.Sequence, "forward", counted)

    def since():
        n = sum(seen)
        seen.clear()
        return n

    return since


def test_methods_and_children_are_compiled_too(ours):
    model = normal(Parts())
    fast, x = optimize(model, check=False), leaf(2, 4, 9, 9, grad=False)
    with torch.no_grad():
        for call in (lambda m: m.encode(x), lambda m: m.decoder(m.encoder(x)), lambda m: m.encoder[0](x)):
            torch.testing.assert_close(call(fast), call(model), rtol=1e-4, atol=1e-4)
            assert ours() > 0
    assert {*fast.windrow_report.fused} == {"encoder.0", "decoder.0"}


def test_graph_breaks_are_named(ours):
    model = normal(Parts(breaks=True))
    fast, x = optimize(model, check=False), leaf(2, 4, 9, 9, grad=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert ours() == 2 and {*fast.windrow_report.fused} == {"encoder.0", "decoder.0"}
    (name,) = fast.windrow_report.left
    assert name.startswith("the model, graph break at test_optimize.py:")


def test_modules_behind_a_graph_break_are_named(ours):
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.last = nn.ModuleList([made()[0], made()[0]]), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            # A graph break in a loop: Dynamo compiles what the loop calls, each kind of block once.
            for block in self.blocks:
                x = block(x)[:, :4]
                torch._dynamo.graph_break()
            return self.last(torch.cat([x, x], 1))

    model, x = Blocks().eval(), leaf(2, 4, 9, 9, grad=False)
    fast = optimize(model, check=False)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    names = [f"blocks.{i}.{name}" for i in range(2) for name in ("first", "short.0", "second")]
    assert {*fast.windrow_report.fused} == {*names, "last"}
    assert "folded blocks.1.norm, relu" in fast.windrow_report.fused["blocks.1.first"]


FACTOR = 2
IS_SHORT = torch.__version__ >= _known.OLDEST


class Reads(nn.Module):
    """All that a call may depend on beside its tensors."""

    def __init__(self):
        super().__init__()
        self.conv, self.scale, self.sizes = nn.Conv2d(4, 4, 3, padding=1), 2, [1, {"more": 1}]
        self.linear = nn.Linear(9, 9)

    def forward(self, x, shift=None):
        y = self.linear(self.conv(x) * self.scale) + self.sizes[1]["more"] * FACTOR
        return y if shift is None else (y + shift, y.relu())


class Doubled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


def transpose(m):
    m.conv.weight.data = m.conv.weight.data.transpose(0, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "scale", 3),
        lambda m: m.sizes[1].update(more=2),
        lambda m: setattr(m.conv, "padding", (0, 1)),
        lambda m: m.conv.register_forward_hook(lambda module, args, y: y + 1),
        lambda m: m.linear.register_forward_pre_hook(lambda module, args: args[0] + 1),
        lambda m: setattr(m, "conv", nn.Conv2d(4, 4, 3, padding=1, bias=False).requires_grad_(False)),
        lambda m: setattr(m.linear, "bias", None),
        lambda m: m.linear.weight.data.mul_(2),
        lambda m: m.linear.weight[0].mul_(2),
        lambda m: setattr(m.linear.weight, "data", m.linear.weight.data * 2),
        lambda m: m.linear.load_state_dict({name: 2 * t for name, t in m.linear.state_dict().items()}),
        lambda m: m.register_buffer("more", torch.ones(1)),
        lambda m: setattr(m.conv, "__class__", Doubled),
        lambda m: setattr(m.linear, "forward", lambda x: x),
        transpose,
        lambda m: m.double(),
        lambda m: globals().update(FACTOR=3),
    ],
)
def test_what_the_shorter_way_sees(change, ours, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 2)
    model, x = normal(Reads()), leaf(2, 4, 9, 9, grad=False)
    fast = optimize(model, check=False)
    with torch.no_grad():
        for m in (fast, model):
            m(x), m(x)
        calls = fast.__dict__["_windrow_run"].calls
        assert calls._short == IS_SHORT
        for given in ((x,), (x[:1].clone(), 1.5)):
            for _ in range(3):
                torch.testing.assert_close(fast(*given), model(*given), rtol=1e-4, atol=1e-4)
        assert calls._short == 6 * IS_SHORT
        torch.manual_seed(1)
        change(fast)
        torch.manual_seed(1)
        change(model)
        given = x.to(model.conv.weight.dtype)
        for _ in range(3):
            torch.testing.assert_close(fast(given), model(given), rtol=1e-4, atol=1e-4)


def test_what_does_not_take_the_shorter_way(ours):
    class Counts(Reads):
        def forward(self, x, shift=None):
            self.scale += 1
            return super().forward(x, shift)

    model, x = normal(Counts()), leaf(2, 4, 9, 9, grad=False)
    fast = optimize(model, check=False)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
    assert fast.scale == model.scale == 6 and fast.__dict__["_windrow_run"].calls._short == 0


@torch._dynamo.config.patch(recompile_limit=2)
def test_many_of_a_class_and_the_recompile_limit(ours):
    x = leaf(2, 4, 9, 9, grad=False)
    with torch.no_grad():
        for _ in range(4):
            fast = optimize(Parts().eval(), check=False)
            fast(x)
            assert ours() > 0 and not fast.windrow_report.left
        for given in (x.bfloat16(), x.double()):
            fast = fast.to(given.dtype)
            fast(given)
    (name,) = (n for n in fast.windrow_report.left if "recompile" in n)
    assert name == "the model, recompile limit"


ANOTHER = """
import sys, torch
from windrow.torch import _fused, _sequence, optimize
seen = []
for kind in (_fused.FusedConv2d, _sequence.Sequence):
    forward = kind.forward
    kind.forward = lambda self, *a, forward=forward: seen.append(1) or forward(self, *a)
fast, x, want = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    torch.testing.assert_close(fast(x), want, rtol=1e-4, atol=1e-4)
assert seen and type(fast).__name__ == "Sequential"
"""


def test_optimized_in_another_process(tmp_path):
    model = normal(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()))
    fast, x = optimize(model), leaf(1, 4, 9, 9, grad=False)
    with torch.no_grad():
        torch.save((fast, x, fast(x)), tmp_path / "model")
    subprocess.run([sys.executable, "-c", ANOTHER, tmp_path / "model"], check=True)


def test_frozen_is_not_stale(ours):
    model = normal(Parts())
    fast, x = optimize(model, check=False), leaf(2, 4, 9, 9, grad=False)
    copied, another = copy.deepcopy(model), nn.Conv2d(6, 4, 1, bias=False).requires_grad_(False)

    def change(what):
        for m in (fast, copied):
            what(m)

    with torch.no_grad():
        fast(x)
        for what in (
            lambda m: m.load_state_dict({n: t * 1.5 for n, t in model.state_dict().items()}),
            lambda m: m.encoder[0].weight.add_(0.1),
            lambda m: m.encoder[0].weight.data.mul_(1.1),
            lambda m: setattr(m.encoder[1], "running_mean", m.encoder[1].running_mean + 1),
            lambda m: m.decoder.__setitem__(0, copy.deepcopy(another)),
            lambda m: nn.init.ones_(m.decoder[0].weight),
        ):
            change(what)
            torch.testing.assert_close(fast(x), copied(x), rtol=1e-3, atol=1e-3)
            assert ours() > 0
    with torch.inference_mode():
        made_there = optimize(normal(Parts()), check=False)
        made_there(x)
        made_there.encoder[0].weight.mul_(2)
        want = made_there.decoder(F.relu(made_there.encoder[1](made_there.encoder[0](x))))
        torch.testing.assert_close(made_there(x), want, rtol=1e-4, atol=1e-4)


def test_calls_that_cannot_be_kept_do_not_look_at_all_parameters(monkeypatch):
    monkeypatch.setattr(_known, "OLDEST", (99,))
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), torch.randn(1, 3, 8, 8)
    fast = optimize(model)
    with torch.no_grad():
        fast(x)
        monkeypatch.setattr(_known, "_tensors", lambda module: pytest.fail("looked"))
        torch.testing.assert_close(fast(x), model(x))
