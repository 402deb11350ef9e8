"""`optimize` on the CPU: networks that concatenate, add and upsample are one call of a sequence, whose steps write to
channels of images that other steps write to as well."""

import copy

import pytest
import torch
import torch.nn.functional as F
from common import OURS, THEIRS, assert_close, leaf
from torch import nn
from windrow import _native
from windrow.torch import optimize
from windrow.torch._fused import FusedConv2d
from windrow.torch._image_step import ImageStep
from windrow.torch._sequence import Memory, Sequence


def conv(c, k, size=3, stride=1):
    return nn.Conv2d(c, k, size, stride, padding=size // 2)


class Block(nn.Module):
    """C2f of detectors: half of the channels through pairs with sums, and all of them concatenated."""

    def __init__(self, c, k):
        super().__init__()
        self.enter, self.leave, self.half = conv(c, k, 1), conv(2 * k, k, 1), k // 2
        self.pairs = nn.ModuleList(nn.ModuleList([conv(k // 2, k // 2), conv(k // 2, k // 2)]) for _ in range(2))

    def forward(self, x):
        parts = [*F.silu(self.enter(x)).chunk(2, 1)]
        for first, second in self.pairs:
            parts.append(parts[-1] + F.silu(second(F.silu(first(parts[-1])))))
        return F.silu(self.leave(torch.cat(parts, 1)))


class Detector(nn.Module):
    """Two levels, pooled in three sizes below, upsampled and concatenated again."""

    def __init__(self):
        super().__init__()
        self.first, self.down = conv(3, 16), conv(16, 32, 3, 2)
        self.block, self.below, self.above = Block(32, 32), conv(128, 32, 1), Block(48, 16)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x):
        x = F.silu(self.first(x))
        y = self.block(F.silu(self.down(x)))
        pools = [y]
        for _ in range(3):
            pools.append(self.pool(pools[-1]))
        y = F.silu(self.below(torch.cat(pools, 1)))
        y = F.interpolate(y, scale_factor=2)
        return self.above(torch.cat([y, x], 1))


class Dense(nn.Module):
    """As DenseNet: each layer normalises and reads all before it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = conv(3, 16), nn.BatchNorm2d(40)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (16, 24, 32))
        self.convs = nn.ModuleList(conv(c, 8) for c in (16, 24, 32))

    def forward(self, x):
        parts = [self.first(x)]
        for norm, layer in zip(self.norms, self.convs, strict=True):
            parts.append(layer(F.relu(norm(torch.cat(parts, 1)))))
        return F.relu(self.last(torch.cat(parts, 1))).mean((2, 3))


class Skips(nn.Module):
    """A U-Net: a part is read far below as well. Its results are a concatenation, a part of it and channels of it."""

    def __init__(self):
        super().__init__()
        self.down, self.inner, self.up = conv(3, 8), conv(8, 8), conv(16, 8)

    def forward(self, x):
        y = F.relu(self.down(x))
        inner = F.relu(self.inner(F.max_pool2d(y, 2)))
        both = torch.cat([y, F.interpolate(inner, scale_factor=2)], 1)
        return self.up(both), both, y, both[:, 3:9]


NETWORKS = [Detector, Dense, Skips]
X = [2, 3, 16, 12]


def last(*sizes, dtype=torch.float32):
    return leaf(*sizes, dtype=dtype, grad=False).contiguous(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def ours(nothing_decided, times):
    times(OURS)


def made(kind, seed=0):
    torch.manual_seed(seed)
    model = kind().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean), nn.init.uniform_(module.weight)
    return model


def whole(result):
    return result if isinstance(result, tuple) else (result,)


def sequences(graph):
    return [m for m in graph.modules() if isinstance(m, Sequence)]


def compare(fast, model, x):
    """Three calls, of which the last is remembered."""
    want = whole(copy.deepcopy(model).double()(x.double()))
    like = whole(model(x))
    for _ in range(3):
        got = whole(fast(x))
        for g, w, own in zip(got, want, like, strict=True):
            assert_close(g, w)
            assert g.stride() == own.stride()
    return got


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_is_one_sequence(kind, graphs, monkeypatch):
    model = made(kind)
    with torch.no_grad():
        checked = optimize(model)
        checked(last(*X))
        assert "check" not in checked.windrow_report.left, checked.windrow_report
        fast = optimize(model, check=False)
        compare(fast, model, last(*X))
        (one,) = sequences(graphs[-1])
        assert [n.op for n in graphs[-1].graph.nodes].count("call_module") == 1
        # Nothing is concatenated, added or copied in front of the sequence.
        others = {n.target for n in graphs[-1].graph.nodes if n.op == "call_function"}
        aten = torch.ops.aten
        assert not others & {aten.cat.default, aten.add.Tensor, aten.copy_.default, aten.empty_strided.default}
        assert any(isinstance(step.by, Memory) for step in one.steps)
        called = []
        for module in (FusedConv2d, ImageStep):
            monkeypatch.setattr(module, "forward", lambda *_: called.append(1))
        fast(last(*X))
        assert not called
        monkeypatch.undo()
        for sizes in ([1, 3, 8, 8], [3, 3, 40, 32], X):
            compare(fast, model, last(*sizes))


@pytest.mark.parametrize("kind", NETWORKS)
def test_one_call_gives_the_bits_of_single_ones(kind, graphs):
    model, x = made(kind), last(*X)
    with torch.no_grad():
        fast = optimize(model, check=False)
        fast(x)
        results = [whole(fast(x)) for _ in range(3)]
        (one,) = sequences(graphs[-1])
        assert [len(stages) for stages in one._stages.values()] == [1]
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        results.append(whole(fast(x)))
        handle.remove()
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("kind", NETWORKS)
def test_one_that_is_pytorchs_is_between_two_calls(kind, which, graphs):
    """What it reads or writes may be channels of memory of the call before it."""
    model, x = made(kind), last(*X)
    with torch.no_grad():
        fast = optimize(model, check=False)
        fast(x)
        (one,) = sequences(graphs[-1])
        names = [name for name, module in one._modules.items() if isinstance(module, ImageStep) or which != 3]
        module = one._modules[names[which * (len(names) - 1) // 4]]
        run = module._pytorchs if isinstance(module, ImageStep) else module.forward
        module.__dict__["known"] = lambda *given, run=run: lambda *given: run(*given)
        # PyTorch 2.8 compiles before the first call, which is then remembered.
        one._forget()
        for stages in (None, 1, 1):
            compare(fast, model, x)
            if stages is not None:
                (found,) = one._stages.values()
                assert any(stage.call is None for stage in found) and any(stage.call for stage in found)


def test_when_pytorch_is_faster_its_results_are_put_in_place(times, graphs):
    times(THEIRS)
    for kind in NETWORKS:
        model, x = made(kind), last(*X)
        with torch.no_grad():
            compare(optimize(model, check=False), model, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype, graphs):
    for kind in NETWORKS:
        model, x = made(kind).to(dtype), last(*X, dtype=dtype)
        with torch.no_grad():
            fast = optimize(model, check=False)
            for _ in range(3):
                for got, want in zip(whole(fast(x)), whole(model(x)), strict=True):
                    assert got.dtype == dtype and got.shape == want.shape and got.stride() == want.stride()
                    torch.testing.assert_close(got, want, rtol=0.1, atol=0.1)


def test_row_major_images(graphs, monkeypatch):
    from windrow.torch.backend import _compile

    monkeypatch.setattr(_compile, "to_channels_last", lambda *given: None)
    for kind in NETWORKS:
        model = made(kind)
        with torch.no_grad():
            compare(optimize(model, check=False), model, leaf(*X, grad=False))


class Between(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.first, self.f, self.last = conv(3, 8), f, conv(8, 4)

    def forward(self, x):
        return self.last(self.f(F.relu(self.first(x))))


OTHERS = {
    "another scale": lambda x: F.interpolate(x, scale_factor=3),
    "a scale that is no number of pixels": lambda x: F.interpolate(x, scale_factor=1.5),
    "rows and columns": lambda x: F.interpolate(x, size=(4 * x.shape[2], x.shape[3])),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "a factor of the sum": lambda x: torch.add(x, x[:, :8].flip(1), alpha=2),
    "a sum with a number": lambda x: x + 1,
    "a sum with one channel": lambda x: x + x[:, :1],
    "a sum with itself": lambda x: x + x,
    "slices with a step": lambda x: x[:, ::2].repeat(1, 2, 1, 1),
    "slices from behind": lambda x: torch.cat([x[:, -3:], x[:, :-3]], 1),
    "parts of other sizes": lambda x: torch.cat([*x.split([1, 2, 5], 1)][::-1], 1),
    "rows": lambda x: torch.cat([x[:, :, 1:], x[:, :, :1]], 2),
    "one channel": lambda x: torch.cat([x[:, :1], x[:, 1:]], 1),
    "no channels": lambda x: torch.cat([x[:, :0], x], 1),
    "averages": lambda x: torch.cat([F.avg_pool2d(x, 3, 1)[:, :4], F.max_pool2d(x, 3, 1)[:, 4:]], 1),
    "indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
}


@pytest.mark.parametrize("what", OTHERS)
def test_between_convolutions(what):
    model = Between(OTHERS[what]).eval()
    with torch.no_grad():
        fast = optimize(model, check=False)
        for sizes in (X, [1, 3, 8, 8], [1, 3, 3, 3]):
            compare(fast, model, last(*sizes))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.complex64])
def test_channels_of_other_types_beside_convolutions(dtype):
    class Beside(Between):
        def forward(self, x, other):
            return self.last(F.relu(self.first(x))), other[:, 1:3], self.first(x).to(dtype)[:, 2:4]

    model, other = Beside(None).eval(), torch.arange(4).reshape(1, 4, 1, 1).to(dtype)
    with torch.no_grad():
        fast = optimize(model, check=False)
        for _ in range(3):
            for got, want in zip(fast(last(*X), other), model(last(*X), other), strict=True):
                assert got.dtype == want.dtype and got.shape == want.shape
            assert torch.equal(fast(last(*X), other)[1], other[:, 1:3])


def test_steps_by_themselves():
    x, other = (last(*X) for _ in range(2))
    large = torch.full([2, 8, 16, 12], 5.0).contiguous(memory_format=torch.channels_last)
    place = large[:, 2:5]
    add, double, move = ImageStep("add"), ImageStep("upsample", (2, 1, 1, 1, 0, 0)), ImageStep("copy")
    assert torch.equal(add(x, other, place), x + other) and torch.equal(place, x + other)
    assert (large[:, :2] == 5).all() and (large[:, 5:] == 5).all()
    assert torch.equal(double(x), x.repeat_interleave(2, 2))
    assert torch.equal(move(place, None, large[:, 5:]), place)
    for step, given in [(add, (x, other, place)), (double, (x, None)), (move, (place, None, x.clone()))]:
        assert type(step.known(*given)) is _native.ImageStep
    # Rows of another size, other types, and channels that are apart.
    assert type(add.known(x, other[:, :, :1])) is not _native.ImageStep
    assert type(add.known(x, other.double())) is not _native.ImageStep
    assert type(move.known(x, None, x.contiguous())) is not _native.ImageStep
    call = add.known(x, other, place)
    assert call(x, other, large[:, 3:6]) is not None
    assert call(x, other, x.contiguous()) is None and call(x, other[:1], place) is None
    # PyTorch records the gradient.
    given = x.clone().requires_grad_()
    add(given, other).sum().backward()
    assert torch.equal(given.grad, torch.ones_like(x))


def test_views_of_sequences():
    x = last(*X)
    step = ImageStep("add").known(x, x.clone())
    view, memory = _native.ImageView.channels, _native.ImageView.memory
    assert view(x, 0, 4) is None and view(x.contiguous(), 0, 1) is None and view(x[0], 0, 1) is None
    assert memory(x[:, :2]) is None and memory(x[:, :, ::2]) is None
    assert view(x, 1, 2) is not None and memory(x) is not None
    buffer, wide = memory(torch.cat([x, x], 1)), torch.cat([x, x], 1)
    left, right = view(wide, 0, 3), view(wide, 3, 3)
    to_left = ImageStep("add").known(x, x.clone(), wide[:, :3])
    to_right = ImageStep("add").known(wide[:, :3], x.clone(), wide[:, 3:])
    steps = [
        (buffer, None, None, None),
        (left, 2, None, None),
        (right, 2, None, None),
        (to_left, 0, 1, 3),
        (to_right, 3, 1, 4),
    ]
    one = _native.Conv2dSequence(2, steps, [2], [])
    other = last(*X)
    (got,) = one([x, other])
    assert torch.equal(got, torch.cat([x + other, x + other + other], 1))
    assert one([x, other[:, :, :1]]) is None
    # An image as the memory.
    given = torch.zeros_like(wide)
    steps = [(view(wide, 3, 3), 2, None, None), (to_left, 0, 1, 3), (step, 0, 1, None)]
    with pytest.raises(ValueError, match="fit"):
        _native.Conv2dSequence(3, [(view(wide, 4, 2), 2, None, None), *steps[1:]], [5], [])
    one = _native.Conv2dSequence(3, steps, [5], [])
    one([x, other, given])
    assert torch.equal(given[:, 3:], x + other) and not given[:, :3].any()
    assert one([x, other, x]) is None
    # Results are no parts of others, steps write to no memory that they read, and views write nowhere.
    for wrong, results, message in [
        (steps, [4], "results"),
        ([(buffer, 0, None, None)], [2], "fit"),
        ([(buffer, None, None, None), (left, 2, None, 0)], [2], "fit"),
        ([(view(x, 0, 3), 0, None, None), (step, 2, 1, 0)], [3], "writes over"),
        ([(to_left, 0, 1, 5)], [2], "fit"),
    ]:
        with pytest.raises(ValueError, match=message):
            _native.Conv2dSequence(3 if wrong is steps else 2, wrong, results, [])
    with pytest.raises(ValueError, match="no step computes"):
        _native.Conv2dSequence(0, [(buffer, None, None, None)], [0], [])
    # Memory that nobody writes to is there nevertheless, also for who reads it.
    steps = [(memory(x), None, None, None), (step, 1, 0, None)]
    (unwritten,) = _native.Conv2dSequence(1, steps, [2], [])([x])
    assert unwritten.shape == x.shape
    (empty, _) = _native.Conv2dSequence(2, [(buffer, None, None, None), (step, 0, 1, None)], [2, 3], [])([x, other])
    assert empty.shape == wide.shape and empty.stride() == wide.stride()


def test_what_the_sequence_says():
    model = made(Detector)
    with torch.no_grad():
        fast = optimize(model)
        fast(last(*X))
    fused = fast.windrow_report.fused
    assert any("add" in what for what in fused.values()), fused
