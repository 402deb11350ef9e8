"""Concatenations of channels in compiled graphs: their parts are written where they lie, and values stay PyTorch's."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import OURS, needs_driver
from torch import nn
from torch._inductor import config
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from windrow.torch import _fused
from windrow.torch.backend import _check_sums, _compile, _concat, _options, windrow

pytestmark = [
    pytest.mark.usefixtures("nothing_decided"),
    pytest.mark.skipif(torch.__version__ < _options.OLDEST, reason="an old PyTorch, which the backend refuses"),
]
LAST = torch.channels_last


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(_concat, "_LEAST", 0)
    # Inductor's cache knows nothing of the layouts that nodes ask for.
    with config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def conv(c, k, size=3, **options):
    return nn.Conv2d(c, k, size, padding=size // 2, **options)


class Dense(nn.Module):
    """Each convolution reads all before it; the last one's result and the image are added."""

    def __init__(self, activation=F.relu):
        super().__init__()
        self.enter, self.activation = conv(3, 8, 1), activation
        self.convs = nn.ModuleList([conv(8, 4), conv(12, 4), conv(16, 4), conv(20, 8)])

    def forward(self, x):
        parts = [self.enter(x)]
        for one in self.convs[:-1]:
            parts.append(self.activation(one(torch.cat(parts, 1))))
        return parts[0] + self.convs[-1](torch.cat(parts, 1))


class Split(nn.Module):
    """The block C2f: half of the channels through pairs, and all of them concatenated."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = conv(3, 16, 1), conv(32, 8, 1)
        self.pairs = nn.ModuleList(nn.ModuleList([conv(8, 8), conv(8, 8)]) for _ in range(2))

    def forward(self, x):
        parts = [*F.silu(self.enter(x)).chunk(2, 1)]
        for first, second in self.pairs:
            parts.append(parts[-1] + F.silu(second(F.silu(first(parts[-1])))))
        return self.leave(torch.cat(parts, 1))


class Added(Split):
    """The same with the residual in front of the activation, so that a convolution adds it."""

    def forward(self, x):
        parts = [*F.silu(self.enter(x)).chunk(2, 1)]
        for first, second in self.pairs:
            parts.append(F.silu(parts[-1] + second(F.silu(first(parts[-1])))))
        return self.leave(torch.cat(parts, 1))


class Skips(nn.Module):
    """A U-Net of two levels."""

    def __init__(self):
        super().__init__()
        self.down, self.inner, self.up = conv(3, 8), conv(8, 8), conv(16, 4)

    def forward(self, x):
        y = F.relu(self.down(x))
        inner = F.relu(self.inner(F.max_pool2d(y, 2)))
        return self.up(torch.cat([y, F.interpolate(inner, scale_factor=2)], 1))


class Nested(nn.Module):
    """A concatenation of concatenations, with a part that stands in it twice, and one of another convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.last = conv(3, 8), conv(3, 4), conv(12, 4), conv(28, 4)

    def forward(self, x):
        a, b = F.relu(self.first(x)), self.second(x)
        inner = torch.cat([a, b], 1)
        c = self.third(inner)
        return self.last(torch.cat([inner, c, inner[:, 4:], c], 1)), torch.cat([c, a[:, 2:]], 1)


class Read(nn.Module):
    """Parts and concatenations that are results too, or that other operators read."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = conv(3, 8), conv(8, 4), conv(12, 4)

    def forward(self, x):
        a = F.relu(self.first(x))
        b = self.second(a)
        both = torch.cat([a, b], 1)
        part = torch.cat([both, x], 1)
        return a, both, part, self.last(both), b.flatten(1).sum(1), part.mean((2, 3)), both.permute(0, 2, 3, 1)


NETWORKS = [Dense, Split, Added, Skips, Nested, Read]


@pytest.fixture
def written(monkeypatch, times):
    """For each graph, the number of convolutions that write to their place, and the operators."""
    times(OURS)
    found = []
    made = _compile._Frozen.__init__

    def told(self, *args):
        write = _compile.write_in_place

        def counted(*given):
            found.append(write(*given))
            return found[-1]

        monkeypatch.setattr(_compile, "write_in_place", counted)
        made(self, *args)
        monkeypatch.setattr(_compile, "write_in_place", write)

    monkeypatch.setattr(_compile._Frozen, "__init__", told)
    return found


def compiled(model, rest, **options):
    return torch.compile(model, backend=windrow, options={"rest": rest, "accuracy": "exact", "check": False, **options})


@pytest.mark.parametrize("rest", ["eager", "inductor"])
@pytest.mark.parametrize("network", NETWORKS)
def test_values_are_pytorchs(network, rest, written):
    torch.manual_seed(0)
    for dtype, layout in ((torch.float32, LAST), (torch.bfloat16, LAST), (torch.float32, torch.contiguous_format)):
        if rest == "inductor" and dtype is torch.bfloat16 and network not in (Dense, Added):
            continue
        model = network().to(dtype, memory_format=layout).requires_grad_(False)
        x = torch.randn(2, 3, 12, 10).to(dtype).contiguous(memory_format=layout)
        want = copy.deepcopy(model).double()(x.double())
        torch._dynamo.reset()
        fast = compiled(model, rest)
        for _ in range(2):
            with torch.no_grad():
                got, plain = fast(x), model(x)
            for g, w, p in zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, want, plain)), strict=True):
                assert g.stride() == p.stride()
                error = (g.double() - w).abs().max() / w.abs().max()
                assert error <= (1e-5 if dtype is torch.float32 else 2e-2), (dtype, layout, error)
    # Pooling reads an image with gaps more slowly, so the skip is concatenated as before.
    assert max(written) > 0 or network is Skips


def test_any_size_is_concatenated_as_before(written):
    model = Dense().to(memory_format=LAST).requires_grad_(False)
    fast = torch.compile(model, backend=windrow, dynamic=True, options={"rest": "eager", "accuracy": "exact"})
    with torch.no_grad():
        for size in (12, 9):
            x = torch.randn(2, 3, size, 10).contiguous(memory_format=LAST)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert {*written} == {0}


def copies(call):
    """The operators of PyTorch that a call runs and that copy images."""
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        call()
    names = [event.name.removeprefix("aten::") for event in seen.events()]
    return {name: names.count(name) for name in ("cat", "copy_") if name in names}


@pytest.mark.parametrize(("network", "copied", "by_convolutions"), [(Dense, 1, 4), (Added, 2, 3), (Split, 2, 1)])
def test_nothing_is_concatenated(network, copied, by_convolutions, written):
    model = network().to(memory_format=LAST).requires_grad_(False)
    x = torch.randn(2, 3, 12, 10).contiguous(memory_format=LAST)
    fast = compiled(model, "eager")
    with torch.no_grad():
        fast(x)
    # The image of a dense block is copied once, because it is added to a result that does not lie in the buffer. Under
    # a profiler, the operator asks who computes it with a residual that does not lie there.
    assert copies(lambda: fast(x)) == ({"copy_": copied} if copied else {})
    assert written == [by_convolutions]


@pytest.mark.parametrize(("dtype", "small"), [(torch.float32, 4), (torch.bfloat16, 0)])
def test_parts_of_a_small_image_are_in_place_if_all_is_one_call(dtype, small, written, monkeypatch):
    monkeypatch.setattr(_concat, "_LEAST", 1 << 17)
    model = Dense().to(dtype, memory_format=LAST).requires_grad_(False)
    with torch.no_grad():
        for size in (12, 160):
            torch._dynamo.reset()
            compiled(model, "eager")(torch.randn(2, 3, size, size).to(dtype, memory_format=LAST))
    assert written == [small, 4]


class Held(nn.Module):
    """A part, and many convolutions before it is concatenated."""

    def __init__(self, depth):
        super().__init__()
        self.first, self.last = conv(3, 8), conv(16, 4)
        self.between = nn.ModuleList(conv(8, 8) for _ in range(depth))

    def forward(self, x):
        y = first = F.relu(self.first(x))
        for one in self.between:
            y = F.relu(one(y))
        return self.last(torch.cat([first, y], 1))


@pytest.mark.parametrize(("depth", "by_convolutions"), [(4, 2), (5, 0)])
def test_a_buffer_is_held_for_few_convolutions(depth, by_convolutions, written):
    model = Held(depth).to(memory_format=LAST).requires_grad_(False)
    x = torch.randn(2, 3, 12, 10).contiguous(memory_format=LAST)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, "eager")(x), model(x), rtol=1e-4, atol=1e-5)
    assert written == [by_convolutions]


@pytest.mark.skipif(needs_driver(), reason=f"PyTorch {torch.__version__} asks for a driver to lay them out")
@pytest.mark.parametrize(
    ("device", "is_inductors", "reader", "parts"),
    [("cpu", False, F.relu, 2), ("cuda", True, F.relu, 2), ("cuda", False, F.relu, 0), ("cuda", False, torch.clone, 2)],
)
def test_strided_images_on_cuda_are_for_convolutions(device, is_inductors, reader, parts):
    def function(x, first, second, last):
        a = F.conv2d(x, first, padding=1)
        both = torch.cat([a, F.conv2d(a, second, padding=1)], 1)
        return F.conv2d(reader(both), last)

    with FakeTensorMode(), torch.no_grad():
        filters = [torch.empty(shape, device=device) for shape in ((8, 8, 3, 3), (4, 8, 3, 3), (4, 12, 1, 1))]
        x = torch.empty(2, 8, 6, 6, device=device).contiguous(memory_format=LAST)
        graph = make_fx(function, tracing_mode="fake")(x, *filters).graph
        found = lambda: [n for n in graph.nodes if n.target is torch.ops.aten.convolution.default]
        assert len(_concat.concatenate_in_place(graph, found, is_inductors)) == parts
    graph.lint()


def test_training_graphs_stay(written):
    model = Dense().to(memory_format=LAST)
    fast, x = copy.deepcopy(model), torch.randn(2, 3, 12, 10).contiguous(memory_format=LAST)
    got, want = compiled(fast, "eager")(x), model(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    got.sum().backward()
    want.sum().backward()
    for ours, theirs in zip(fast.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)
    assert written == []


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_changed_filters_are_seen(rest, written, runs_uncompiled):
    model = Added().to(memory_format=LAST).requires_grad_(False)
    x = torch.randn(2, 3, 12, 10).contiguous(memory_format=LAST)
    fast = compiled(model, rest)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
            for parameter in model.parameters():
                parameter.mul_(1.5)
    assert max(written) > 0


def test_inductor_hands_over_ranges_of_channels(written, monkeypatch):
    given = []
    into = _fused.CONV2D_INTO._op

    def seen(x, *rest):
        # Not the stand-ins of tracers.
        given.extend([(x, rest[-1])] * (type(x) is torch.Tensor))
        return into(x, *rest)

    monkeypatch.setattr(_fused.CONV2D_INTO, "_op", seen)
    model = Dense().to(memory_format=LAST).requires_grad_(False)
    x = torch.randn(2, 3, 12, 10).contiguous(memory_format=LAST)
    fast = compiled(model, "inductor")
    with torch.no_grad():
        fast(x)
    # The operator is called where PyTorch looks at its kernel too.
    assert {(x.shape[1], out.stride(3)) for x, out in given} == {(3, 20), (8, 20), (12, 20), (16, 20)}
    inside = [t for t in given if t[0].shape[1] > 3]
    assert all(x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() for x, out in inside)


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_each_convolution_is_compared(rest, written, monkeypatch):
    seen = []
    differs = _check_sums.Compared.differs
    monkeypatch.setattr(_check_sums.Compared, "differs", lambda self, *a: seen.append(self) or differs(self, *a))
    model = Added().to(memory_format=LAST).requires_grad_(False)
    x = torch.randn(2, 3, 12, 10).contiguous(memory_format=LAST)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, rest, check=True)(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(seen) == 6
    assert sum(one.place is not None for one in seen) == 3


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_a_wrong_convolution_is_found(rest, written, monkeypatch):
    own = _fused.FusedConv2d.computed

    def wrong(self, x, residual, out=None):
        y = own(self, x, residual, out)
        return y if out is None or y is None else y.mul_(1.01)

    monkeypatch.setattr(_fused.FusedConv2d, "computed", wrong)
    model = Dense().to(memory_format=LAST).requires_grad_(False)
    x = torch.randn(2, 3, 12, 10).contiguous(memory_format=LAST)
    left = []
    report = SimpleNamespace(fused=lambda name, what: None, left=lambda name, why: left.append(name))
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, rest, check=True, report=report)(x), model(x))
    assert left == ["check"]
