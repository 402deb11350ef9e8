"""`optimize` on the CPU: convolutions that follow each other in one call, and when they are called one by one."""

import copy
import threading

import pytest
import torch
from common import OURS, leaf
from torch import nn
from windrow import _native
from windrow.torch import forget, optimize
from windrow.torch._fused import FusedConv2d
from windrow.torch._sequence import Sequence


class Residual(nn.Module):
    """As MobileNetV2's, with a result in the middle that is read at the end."""

    def __init__(self, c=8):
        super().__init__()
        self.up = nn.Sequential(nn.Conv2d(c, 2 * c, 1), nn.BatchNorm2d(2 * c), nn.ReLU6())
        self.deep = nn.Sequential(nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c), nn.ReLU6())
        self.down = nn.Conv2d(2 * c, c, 1)

    def forward(self, x):
        y = self.up(x)
        z = x + self.down(self.deep(y))
        return z, y.mean((2, 3))


X = [2, 8, 9, 7]


@pytest.fixture(autouse=True)
def ours(nothing_decided, times):
    times(OURS)


@pytest.fixture
def made(graphs):
    """What a compiled model calls; its modules are those that are called: `convolution_0` is up, and so on."""

    def graph(dtype=torch.float32):
        with torch.no_grad():
            optimize(Residual().eval().to(dtype), check=False)(leaf(*X, dtype=dtype, grad=False))
        return copy.deepcopy(graphs[-1])

    return graph


def sequence(fast):
    (found,) = (m for m in fast.modules() if isinstance(m, Sequence))
    return found


def single(fast, i):
    return sequence(fast).get_submodule(f"convolution_{i}")


def singly(fast, x):
    """Results of calls one by one."""
    other = copy.deepcopy(fast)
    for module in other.modules():
        if isinstance(module, FusedConv2d):
            module.register_forward_hook(lambda *_: None)
    return other(x)


@pytest.fixture
def calls(monkeypatch):
    """How many convolutions are called as modules."""
    seen = []
    forward = FusedConv2d.forward
    monkeypatch.setattr(FusedConv2d, "forward", lambda self, *args: seen.append(self) or forward(self, *args))

    def since():
        n = len(seen)
        seen.clear()
        return n

    return since


def same(got, want):
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w) and g.stride() == w.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_call_gives_the_bits_of_single_ones(dtype, made, calls):
    fast = made(dtype)
    with torch.inference_mode():
        for shape in (X, [1, 8, 1, 1], X, [1, 8, 1, 1]):
            x = leaf(*shape, dtype=dtype, grad=False)
            want = singly(fast, x)
            fast(x)
            calls()
            same(fast(x), want)
            assert calls() == 0
            last = x.contiguous(memory_format=torch.channels_last)
            same(fast(last), singly(fast, last))


@pytest.mark.parametrize("threads", [1, 2])
def test_images_larger_than_the_cache(threads, made, calls):
    """Some convolutions are computed together, by bands of rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fast = made()
        with torch.inference_mode():
            for rows in (300, 521):
                x = leaf(1, 8, rows, 256, grad=False).contiguous(memory_format=torch.channels_last)
                want = singly(fast, x)
                fast(x)
                calls()
                same(fast(x), want)
                assert calls() == 0
    finally:
        torch.set_num_threads(before)


def test_hooks_of_all_modules_see_every_call(made, calls):
    fast, x = made(), leaf(*X, grad=False)
    seen = []
    with torch.no_grad():
        fast(x), fast(x), calls()
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
        fast(x)
        handle.remove()
        assert calls() == 3 and sum(isinstance(m, FusedConv2d) for m in seen) == 3
        fast(x)
        assert calls() == 0


def test_what_was_changed_is_called(made, calls):
    fast, x = made(), leaf(*X, grad=False)
    with torch.no_grad():
        fast(x), fast(x)
        module = single(fast, 2)
        # Another memory; the address is compared.
        module.weight.data = 3 * module.weight.data
        same(fast(x), singly(fast, x))
        fast(x), calls()
        fast(x)
        assert calls() == 0
        forget()
        fast(x)
        assert calls() == 3, "decided anew"


def test_one_that_is_pytorchs_is_between_two_calls(made, calls, monkeypatch):
    fast, x = made(), leaf(*X, grad=False)
    with torch.no_grad():
        want = singly(fast, x)
        deep = single(fast, 1)
        given = []

        def known(x, residual):
            given.append(x)
            return deep(x, residual)

        monkeypatch.setattr(deep, "known", lambda *_: known)
        fast(x), calls()
        for _ in range(2):
            same(fast(x), want)
        assert calls() == len(given) == 2
        (stages,) = sequence(fast)._stages.values()
        assert [(s.first, s.last, s.call is None) for s in stages] == [(0, 1, False), (1, 2, True), (2, 4, False)]


def test_where_modules_are_called(made, calls):
    fast, x = made(), leaf(*X, grad=False)
    with torch.no_grad():
        want = [fast(x) for _ in range(2)][1]
        calls()
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                assert fast(x)[0].dtype == torch.bfloat16
        assert calls() == 6
        torch.testing.assert_close([*torch.jit.trace(fast, x)(x)], [*want])
        torch.testing.assert_close([*copy.deepcopy(fast).double()(x.double())], [w.double() for w in want])
        assert fast(torch.empty(0, 8, 9, 7))[0].shape == (0, 8, 9, 7)
        # PyTorch's tools put tensors of their own into modules for a while.
        fast(x), calls()
        same(fast(x), want)
        assert calls() == 0
    with pytest.raises(NotImplementedError, match="no gradient"):
        fast(leaf(*X))[0].sum().backward()


def test_threads(made):
    fast, x = made(), leaf(*X, grad=False)
    n, results = torch.get_num_threads(), [None] * 8
    with torch.no_grad():
        want = [fast(x) for _ in range(2)][1]
        for threads in (1, 2):
            torch.set_num_threads(threads)
            same(fast(x), want)
        torch.set_num_threads(n)

    def call(i):
        with torch.no_grad():
            results[i] = [fast(x) for _ in range(5)][4]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        same(result, want)


def test_steps_that_do_not_fit_are_an_error(made):
    fast, x = made(), leaf(*X, grad=False)
    with torch.no_grad():
        image = x.contiguous(memory_format=torch.channels_last)
        up = single(fast, 0)
        up(image)
        call = up.known(image, None).call
    filters = [(up.weight, up.bias)]
    for steps, results in [
        ([(call, 0, None, None), (call, 1, None, None)], [2]),
        ([(call, 1, None, None)], [1]),
        ([(call, 0, 0, None)], [1]),
        ([(call, 0, None, None)], [0]),
        ([(call, 0, None, None)], [1, 1]),
        ([], []),
    ]:
        with pytest.raises(ValueError, match="step"):
            _native.Conv2dSequence(1, steps, results, filters * len(steps))
    for wrong in ([], filters * 2, [(up.weight, None)], [(up.bias, up.weight)], [(up.weight[:, :4], up.bias)]):
        with pytest.raises(ValueError, match="filters"):
            _native.Conv2dSequence(1, [(call, 0, None, None)], [1], wrong)
    for flat in (1, 0, 2):
        with pytest.raises(ValueError, match="pixel"):
            _native.Conv2dSequence(1, [(call, 0, None, None)], [1], filters, [flat])
    one = _native.Conv2dSequence(1, [(call, 0, None, None)], [1], filters)
    with torch.no_grad():
        assert torch.equal(one([image])[0], up(image))
        assert one([image[:1]]) is None and one([]) is None and one([image, image]) is None


class Classifier(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.last, self.both = nn.Linear(16, 5), both

    def forward(self, x):
        mean = self.features(x)
        return (self.last(mean.flatten(1)), mean) if self.both else self.last(mean.flatten(1))


@pytest.mark.parametrize("both", [False, True])
def test_a_result_of_one_pixel_is_a_matrix(both, graphs):
    model, x = Classifier(both).eval(), leaf(1, *X[1:], grad=False)
    fast = optimize(model, check=False)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x))
        assert len(sequence(graphs[-1]).flat) == 1
        y = fast(x)
        torch.testing.assert_close(singly(graphs[-1], x), y if both else (y,))


@pytest.mark.parametrize(
    "change",
    [
        lambda w, b: setattr(w, "data", w.data.clone()),
        lambda w, b: setattr(b, "data", b.data.clone()),
        lambda w, b: setattr(w, "data", w.data[:, :4]),
        lambda w, b: setattr(w, "data", w.data.double()),
        lambda w, b: setattr(w, "__class__", type("Other", (torch.Tensor,), {})),
    ],
)
def test_filters_that_lie_elsewhere_are_not_read(change, made):
    fast = made()
    with torch.no_grad():
        image = leaf(*X, grad=False).contiguous(memory_format=torch.channels_last)
        up = single(fast, 0)
        up(image)
        call, weight, bias = up.known(image, None).call, up.weight, up.bias
        one = _native.Conv2dSequence(1, [(call, 0, None, None)], [1], [(weight, bias)])
        assert one([image]) is not None
        change(weight, bias)
        assert one([image]) is None
