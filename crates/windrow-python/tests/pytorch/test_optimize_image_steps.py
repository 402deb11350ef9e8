"""`optimize` on the CPU: means, gates and pooling as part of the call of the convolutions around them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from common import OURS, assert_close, leaf
from torch import nn
from windrow import _native
from windrow.torch import optimize
from windrow.torch._fused import FusedConv2d
from windrow.torch._image_step import ImageStep
from windrow.torch._sequence import Sequence


class Excitation(nn.Module):
    """A squeeze-and-excitation."""

    def __init__(self, c, gate, mean):
        super().__init__()
        self.down, self.up, self.gate, self.mean = nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 1), gate, mean

    def forward(self, x):
        g = self.gate(self.up(F.relu(self.down(self.mean(x)))))
        return g * x if isinstance(self.gate, nn.Sigmoid) else x * g


class Network(nn.Module):
    """As EfficientNet and ResNet."""

    def __init__(self, gate=None, mean=None, pool=None, c=20):
        super().__init__()
        self.first, self.pool = nn.Conv2d(3, c, 3, padding=1), pool or nn.MaxPool2d(3, 2, 1)
        self.deep = nn.Conv2d(c, c, 3, padding=1, groups=c)
        self.excitation = Excitation(c, gate or nn.Sigmoid(), mean or nn.AdaptiveAvgPool2d(1))
        self.last, self.average = nn.Conv2d(c, c, 1), nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(c, 5)

    def forward(self, x):
        x = self.pool(F.relu(self.first(x)))
        x = x + self.last(self.excitation(F.silu(self.deep(x))))
        return self.linear(self.average(x).flatten(1))


class Behind(nn.Module):
    """Anything between two convolutions."""

    def __init__(self, f, c=6):
        super().__init__()
        self.first, self.f, self.last = nn.Conv2d(3, c, 3), f, nn.Conv2d(c, 4, 1)
        self.gate = nn.Conv2d(c, c, 1)

    def forward(self, x):
        return self.f(self, F.relu(self.first(x)))


X = [2, 3, 17, 14]


@pytest.fixture(autouse=True)
def ours(nothing_decided, times):
    times(OURS)


@pytest.fixture
def modules(monkeypatch):
    """What is called as a module."""
    seen = []
    for kind in (FusedConv2d, ImageStep):
        own = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, *args, own=own: seen.append(self) or own(self, *args))
    return seen


def steps(graph):
    """The steps between convolutions."""
    return [m.operation for m in graph.modules() if isinstance(m, ImageStep) and m.operation != "channels_last"]


def copies(graph):
    return sum(isinstance(m, ImageStep) and m.operation == "channels_last" for m in graph.modules())


def sequences(graph):
    return [m for m in graph.modules() if isinstance(m, Sequence)]


def compare(model, fast, x, modules=None):
    """The first and later calls are right; later ones call no module."""
    want = copy.deepcopy(model).double()(x.double())
    # The second call without the check is remembered.
    for i in range(3):
        if modules is not None and i == 2:
            modules.clear()
        got = fast(x)
        for g, w in zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, want)), strict=True):
            assert_close(g, w)
    assert not modules
    return got


def check(model, graphs, x=None, among=None):
    """`among`: the steps of the graph."""
    with torch.no_grad():
        x = leaf(*X, grad=False) if x is None else x
        model = model.eval().to(x.dtype)
        # The comparison with PyTorch at the first call.
        checked = optimize(model)
        checked(x)
        assert "check" not in checked.windrow_report.left, checked.windrow_report
        fast = optimize(model, check=False)
        got, want = fast(x), model(x)
        results = (t if isinstance(t, tuple) else (t,) for t in (got, want))
        for g, w in zip(*results, strict=True):
            assert g.dtype == w.dtype and g.shape == w.shape
            # The stride of a dimension of size 1 says nothing, and PyTorch 2.8 gives others.
            assert all(n == 1 or by == its for n, by, its in zip(g.shape, g.stride(), w.stride(), strict=True))
        if x.dtype == torch.float32:
            compare(model, fast, x)
    if among is not None:
        # None for f64, of which Windrow computes nothing.
        assert [step for graph in graphs[-1:] for step in steps(graph)] == among
    return fast


MEANS = {
    "pool": nn.AdaptiveAvgPool2d(1),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "negative": lambda x: x.mean((-1, -2), True),
    "flat": lambda x: x.mean([2, 3])[:, :, None, None],
}


@pytest.mark.parametrize("gate", [nn.Sigmoid(), nn.Hardsigmoid()])
@pytest.mark.parametrize("mean", MEANS)
def test_a_network_is_one_sequence(gate, mean, graphs, modules):
    model = Network(gate, MEANS[mean]).eval()
    kind = type(gate).__name__.lower()
    fast = check(model, graphs, among=["max_pool2d", "mean", kind, "mean"])
    is_one = mean != "flat"
    assert len(sequences(graphs[-1])) == 2 - is_one
    if is_one:
        assert [n.op for n in graphs[-1].graph.nodes].count("call_module") == 1
    fused = fast.windrow_report.fused
    assert (fused["pool"], fused["average"]) == ("max_pool2d", "mean")
    assert fused["excitation"].endswith(f"product with {kind}")
    with torch.no_grad():
        for sizes in (X, [1, 3, 5, 1], [3, 3, 40, 33], X):
            compare(model, fast, leaf(*sizes, grad=False), modules)
        assert fast(torch.empty(0, *X[1:])).shape == (0, 5)


def test_efficientnet_is_one_sequence(graphs):
    models = pytest.importorskip("torchvision.models")
    with torch.inference_mode():
        fast = optimize(models.efficientnet_b0().eval(), check=False)
        fast(leaf(1, 3, 64, 64, grad=False))
    (one,) = sequences(graphs[-1])
    assert [n.op for n in graphs[-1].graph.nodes].count("call_module") == 1
    assert steps(one).count("sigmoid") == 16 and steps(one).count("mean") == 17


@pytest.mark.parametrize("bias", [True, False])
def test_the_linear_layer_of_one_image_is_part_of_the_sequence(bias, graphs, modules):
    model = Network()
    model.linear = nn.Linear(20, 5, bias)
    fast = check(model, graphs, leaf(1, *X[1:], grad=False), ["max_pool2d", "mean", "sigmoid", "mean"])
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    assert not any(node.target in products for node in graphs[-1].graph.nodes)
    assert len(sequences(graphs[-1])) == 1
    with torch.no_grad():
        compare(model, fast, leaf(1, *X[1:], grad=False), modules)
        # Of more images it is PyTorch's.
        compare(model, fast, leaf(*X, grad=False), modules)
        assert any(node.target in products for node in graphs[-1].graph.nodes)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.Tanh()])
def test_linear_layers_of_one_row_are_convolutions(activation, graphs):
    layers = nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 15 * 12, 33), activation, nn.Linear(33, 5, bias=False)
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        checked = optimize(model)
        checked(leaf(1, *X[1:], grad=False))
        compare(model, optimize(model, check=False), leaf(1, *X[1:], grad=False))
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    assert not any(node.target in products for node in graphs[-1].graph.nodes)
    convolutions = [m for m in graphs[-1].modules() if isinstance(m, FusedConv2d)]
    is_fused = not isinstance(activation, nn.Tanh)
    assert [m.activation is not None for m in convolutions] == [False, is_fused, False]


POOLS = [
    (nn.MaxPool2d(2), "max_pool2d"),
    (nn.MaxPool2d((2, 3), stride=1, padding=(1, 0)), "max_pool2d"),
    (nn.AvgPool2d(2), "avg_pool2d"),
    (nn.AvgPool2d(3, 1, count_include_pad=False), "avg_pool2d"),
    (nn.AvgPool2d(3, 2, 1), None),
    (nn.AvgPool2d(3, 2, 1, count_include_pad=False), None),
    (nn.MaxPool2d(2, ceil_mode=True), None),
    (nn.MaxPool2d(2, dilation=2), None),
    (nn.AvgPool2d(2, ceil_mode=True), None),
    (nn.AvgPool2d(2, divisor_override=3), None),
]


@pytest.mark.parametrize(("pool", "step"), POOLS)
def test_pooling(pool, step, graphs):
    check(Network(pool=pool), graphs, among=[*[step] * (step is not None), "mean", "sigmoid", "mean"])


def gated(m, x):
    return m.gate(x.mean((2, 3), keepdim=True))


def pooled_elsewhere(m, x):
    y, at = F.max_pool2d(x, 2, return_indices=True)
    return m.last(y), at.float()


BETWEEN = {
    "the mean is read again": lambda m, x: m.last(x * gated(m, x).sigmoid()) + x.mean((2, 3), keepdim=True)[:, :4],
    "the gate is read twice": lambda m, x: (m.last(x * gated(m, x).sigmoid()), gated(m, x)),
    "the image is read again": lambda m, x: (m.last(x * gated(m, x).sigmoid()), x),
    "the activated gate is read": lambda m, x: [m.last(x * g) + g[:, :4] for g in [gated(m, x).sigmoid()]][0],
    "an image of one pixel": lambda m, x: m.last((g := gated(m, x)) * g.sigmoid()),
    "a result": lambda m, x: (x * gated(m, x).sigmoid(), x.mean((2, 3))),
    "two means": lambda m, x: m.last(x.mean((2, 3), True).mean((2, 3), True)),
    "other means": lambda m, x: (m.last(x).mean((1, 2)), x.mean(), x.mean((2, 3), dtype=torch.float64).float()),
    "one image's gate": lambda m, x: m.last(x * m.gate(x.mean((2, 3), True)[:1]).sigmoid()),
    "indices": pooled_elsewhere,
}


@pytest.mark.parametrize("what", BETWEEN)
def test_between_convolutions(what, graphs):
    check(Behind(BETWEEN[what]), graphs)


def test_what_is_not_read_later_is_overwritten_only_then(graphs):
    """The same image, with and without a reader behind the gate, gives the same bits."""
    one, two = Behind(BETWEEN["a result"]).eval(), Behind(lambda m, x: (x * gated(m, x).sigmoid(), x)).eval()
    two.load_state_dict(one.state_dict())
    x = leaf(*X, grad=False)
    with torch.no_grad():
        fast = [optimize(model, check=False) for model in (one, two)]
        results = [[f(x) for _ in range(3)][2] for f in fast]
        assert torch.equal(results[0][0], results[1][0])
        assert_close(results[1][1], F.relu(copy.deepcopy(one.first).double()(x.double())))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_pytorchs(dtype, graphs):
    check(Network(), graphs, leaf(*X, dtype=dtype, grad=False), among=[])


def test_row_major_is_pytorchs(graphs, monkeypatch):
    from windrow.torch.backend import _compile

    monkeypatch.setattr(_compile, "to_channels_last", lambda *given: None)
    check(Network(), graphs, among=[])


def test_any_size(graphs, modules):
    model = Network().eval()
    fast = optimize(model, check=False)
    with torch.no_grad():
        for n, h in [(2, 16), (3, 16), (3, 20), (4, 25), (2, 31), (5, 9)]:
            compare(model, fast, leaf(n, 3, h, h + 1, grad=False), modules)
    assert len(graphs) < 5 and steps(graphs[-1]) == ["max_pool2d", "mean", "sigmoid", "mean"]


@pytest.mark.parametrize("by", [lambda x, y: F.interpolate(x, scale_factor=2.0), lambda x, y: F.interpolate(x, y.shape[2:])])
def test_upsampling_to_a_size_that_changes(by, graphs):
    """Of a graph for any size, an image of which only the size after upsampling is a number is PyTorch's."""

    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
            self.last = nn.Conv2d(8, 4, 3, padding=1)

        def forward(self, x):
            y = self.first(x)
            return self.last(by(self.second(y), y) + y)

    model = Pyramid().eval()
    fast = optimize(model)
    with torch.no_grad():
        for size in (32, 48, 64, 32):
            x = leaf(2, 3, size, size, grad=False)
            assert_close(fast(x), model(x))
    told = fast.windrow_report.left
    assert not [why for why in told.values() if "differs" in why], told


def test_nan_and_infinities_stay_where_they_are(graphs):
    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.same = nn.Conv2d(3, 3, 1, groups=3, bias=False)
            nn.init.ones_(self.same.weight)

        def forward(self, x):
            y = self.same(x)
            gate = self.same(y.mean((2, 3), keepdim=True))
            return F.max_pool2d(y, 3, 2, 1), F.avg_pool2d(y, 2), y.mean((2, 3)), y * gate.sigmoid()

    model, x = Raw().eval(), leaf(*X, grad=False)
    x[0, 0, 3, 4], x[0, 1, 5, 6], x[1, 2, 0, 0], x[1, 2, 9, 9] = [float(n) for n in ("nan", "inf", "-inf", "inf")]
    with torch.no_grad():
        fast = optimize(model, check=False)
        for _ in range(3):
            for g, w in zip(fast(x), model(x), strict=True):
                torch.testing.assert_close(g, w, equal_nan=True)
    assert steps(graphs[-1]) == ["mean", "max_pool2d", "avg_pool2d", "mean", "sigmoid"]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_the_copy_of_a_row_major_image_is_part_of_the_sequence(channels, graphs, modules):
    model = nn.Sequential(nn.Conv2d(channels, 20, 3), nn.ReLU(), nn.Conv2d(20, 4, 1)).eval()
    x = leaf(2, channels, 17, 14, grad=False)
    given = x.clone()
    fast = check(model, graphs, x)
    assert copies(graphs[-1]) == 1 and len(sequences(graphs[-1])) == 1
    with torch.no_grad():
        compare(model, fast, x, modules)
        # An image that another one is a part of, one in channels-last, and one that the sequence was not made for.
        for other in (leaf(4, channels, 17, 14, grad=False)[1:3], x.to(memory_format=torch.channels_last), x[:, :, ::2]):
            compare(model, fast, other)
    assert torch.equal(x, given)


def test_other_copies_are_pytorchs(graphs):
    # Of more channels, and of an image that something else reads too.
    check(nn.Sequential(nn.Conv2d(5, 20, 3), nn.ReLU(), nn.Conv2d(20, 4, 1)), graphs, leaf(2, 5, 9, 8, grad=False))
    assert copies(graphs[-1]) == 0
    check(Behind(lambda m, x: m.last(x)), graphs, leaf(2, 3, 9, 8, dtype=torch.float64, grad=False))
    assert copies(graphs[-1]) == 0

    class Twice(Behind):
        def forward(self, x):
            return self.last(F.relu(self.first(x))), x.cumsum(2)

    check(Twice(None), graphs)


def test_modules_by_themselves(modules):
    step, x = ImageStep("sigmoid"), leaf(*X, grad=False).contiguous(memory_format=torch.channels_last)
    gate = leaf(2, 3, 1, 1, grad=False)
    assert_close(step(x, gate), x.double() * gate.double().sigmoid())
    assert type(step.known(x, gate)) is _native.ImageStep
    assert type(step.known(x.contiguous(), gate)) is not _native.ImageStep
    # PyTorch records the gradient.
    given = x.clone().requires_grad_()
    step(given, gate).sum().backward()
    assert_close(given.grad, gate.double().sigmoid().expand_as(x))
    call = step.known(x, gate)
    assert call(x[:1], gate) is None and call(x, None) is None and call(x.contiguous(), gate) is None
    with pytest.raises(ValueError, match="operation"):
        _native.ImageStep.of("median", [1] * 6, x, None)
    for steps, results in [([(call, 0, None, None)], [2]), ([(call, 0, 1, None), (call, 2, 2, None)], [3])]:
        with pytest.raises(ValueError, match="fit"):
            _native.Conv2dSequence(2, steps, results, [])
    one = _native.Conv2dSequence(2, [(call, 0, 1, None), (call, 2, 1, None)], [3], [])
    with torch.no_grad():
        (twice,) = one([x, gate])
        assert torch.equal(twice, step(step(x, gate), gate))
        assert one([x.contiguous(), gate]) is None
