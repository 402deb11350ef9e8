"""Later calls of fused convolutions, which native code computes as earlier ones: what they notice, and who sees them."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
import windrow.torch
from common import OURS, THEIRS, each_device, each_winner
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from windrow.torch import _fused
from windrow.torch._fused import CONV2D_FUSED, CONV2D_INTO, FusedConv2d

pytestmark = pytest.mark.usefixtures("nothing_decided")
LAST = torch.channels_last
OPTIONS = [1, 1], [1, 1], [1, 1], 1


@pytest.fixture
def first(monkeypatch):
    """The images of calls that come to Python."""
    seen = []
    own = FusedConv2d.computed
    monkeypatch.setattr(FusedConv2d, "computed", lambda self, x, *rest: seen.append(x) or own(self, x, *rest))
    return seen


def tensors(device="cpu", channels=8, size=10):
    image = torch.randn(2, channels, size, size, device=device)
    return image, torch.randn(8, channels, 3, 3, device=device), torch.randn(8, device=device)


def called(x, weight, bias, residual=None, activation="relu"):
    return CONV2D_FUSED(x, weight, bias, residual, *OPTIONS, activation, None)


def expected(x, weight, bias, residual=None):
    y = F.conv2d(x.double(), weight.double(), bias.double(), padding=1)
    return (y if residual is None else y + residual.double()).relu()


def check(y, *of):
    torch.testing.assert_close(y.double(), expected(*of), rtol=1e-4, atol=1e-4)


@each_device
@each_winner
def test_calls_by_turns(device, factor, times, first):
    times(factor)
    x, weight, bias = tensors(device)
    residual = torch.randn(2, 8, 10, 10, device=device)
    kinds = [(x, None), (x, residual), (x.to(memory_format=LAST), None), (x[:1], None), (x[..., 1:], None)]
    kinds += [(x.to(memory_format=LAST), residual.to(memory_format=LAST)), (x, residual.to(memory_format=LAST))]
    with torch.no_grad():
        for turn in range(4):
            for image, beside in kinds:
                y = called(image, weight, bias, beside)
                check(y, image, weight, bias, beside)
                assert y.stride() == F.conv2d(image, weight, padding=1).stride()
            first[len(first) * (turn < 3) :] = []
    assert first == []


@each_device
@each_winner
def test_results_in_their_place(device, factor, times, first):
    times(factor)
    x, weight, bias = tensors(device)
    x = x.to(memory_format=LAST)
    whole = torch.zeros(2, 24, 10, 10, device=device).to(memory_format=LAST)
    with torch.no_grad():
        for turn in range(4):
            out = whole[:, 8:16]
            version = whole._version
            assert CONV2D_INTO(x, weight, bias, None, *OPTIONS, "relu", None, out) is None
            assert whole._version > version
            check(out, x, weight, bias)
            assert not whole[:, :8].any() and not whole[:, 16:].any()
            whole.zero_()
            first[len(first) * (turn < 3) :] = []
    assert first == []


def test_other_memory_of_the_filter(times, capfd):
    times(OURS)
    x, weight, bias = tensors()
    with torch.no_grad():
        for _ in range(3):
            check(called(x, weight, bias), x, weight, bias)
        weight.data = torch.randn_like(weight)
        bias.data = torch.randn_like(bias)
        for _ in range(3):
            check(called(x, weight, bias), x, weight, bias)
        # Each call has another bias.
        for _ in range(40):
            bias = torch.randn(8)
            check(called(x, weight, bias), x, weight, bias)
    # PyTorch 2.8 says so of memory whose object outlives it.
    assert "Deallocating" not in capfd.readouterr().err


def test_nothing_is_kept_of_a_filter_that_is_gone(times):
    times(OURS)
    x, weight, bias = tensors()
    with torch.no_grad():
        for _ in range(3):
            called(x, weight, bias)
    how = (*OPTIONS, "relu", None)
    module = weakref.ref(_fused._LAYERS.find(weight, bias, how))
    assert module() is not None and _fused._LAYERS.find(weight, None, how) is None
    del weight
    gc.collect()
    assert module() is None


def test_whoever_sees_operators_sees_known_ones(times):
    times(OURS)
    x, weight, bias = tensors()

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with torch.no_grad():
        for _ in range(3):
            want = called(x, weight, bias)
        for mode in (Dispatched(), Function()):
            seen = []
            with mode:
                assert torch.equal(called(x, weight, bias), want)
            assert CONV2D_FUSED in seen
        with torch.profiler.profile() as profile:
            called(x, weight, bias)
        assert any("conv2d_fused" in event.key for event in profile.key_averages())
        with torch.autocast("cpu", torch.bfloat16):
            assert called(x, weight, bias).dtype == torch.bfloat16
        batched = torch.vmap(lambda image: called(image[None], weight, bias)[0])(x)
        torch.testing.assert_close(batched, want, rtol=1e-4, atol=1e-4)
        assert called(torch.ones(2, 8, 10, 10, device="meta"), weight.to("meta"), bias.to("meta")).is_meta
    # The operator has no gradient, and says so.
    y = called(x, weight.requires_grad_(), bias)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_types_and_strides_that_only_pytorch_knows(dtype, times):
    times(OURS)
    # All strides are even, as those of imaginary parts.
    x = torch.randn(2, 8, 20, 20, dtype=dtype)[:, :, ::2, ::2]
    weight = torch.randn(8, 8, 3, 6, dtype=dtype)[..., ::2]
    with torch.no_grad():
        want = F.conv2d(x, weight, padding=1)
        for _ in range(4):
            torch.testing.assert_close(called(x, weight, None, activation=None), want, rtol=1e-4, atol=1e-4)


def test_wrong_tensors_are_errors(times):
    times(OURS)
    x, weight, bias = tensors()
    with torch.no_grad():
        for _ in range(3):
            called(x, weight, bias)
        for wrong in (x[:, :4], x.long(), x[0, 0, 0]):
            with pytest.raises((RuntimeError, ValueError, TypeError)):
                called(wrong, weight, bias)
        for few in ((), (x,), (x, weight, bias, None, *OPTIONS)):
            with pytest.raises((RuntimeError, TypeError)):
                CONV2D_FUSED(*few)
        check(called(x, weight, bias), x, weight, bias)


@each_winner
def test_modules(factor, times, first):
    times(factor)
    x, weight, bias = tensors()
    module = FusedConv2d(weight, bias, OPTIONS, "relu")
    with torch.no_grad():
        for _ in range(4):
            check(module(x), x, weight, bias)
        for other in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
            assert "_calls" not in other.__dict__
            other.weight = other.weight + 1
            for _ in range(4):
                check(other(x), x, other.weight, bias)
        module._buffers["weight"] = weight * 2
        for _ in range(4):
            check(module(x), x, weight * 2, bias)


def test_what_is_forgotten_is_decided_again(times):
    measured = times(OURS)
    x, weight, bias = tensors()
    with torch.no_grad():
        for _ in range(4):
            called(x, weight, bias)
        before = len(measured)
        assert windrow.torch.decisions()[0].choice == "Windrow"
        windrow.torch.forget()
        measured = times(THEIRS)
        for _ in range(4):
            check(called(x, weight, bias), x, weight, bias)
    assert before > 0 and windrow.torch.decisions()[0].choice == "PyTorch"


def test_threads(times):
    times(OURS)
    layers = [tensors(size=size) for size in (6, 10, 40)]
    wrong = []

    def work():
        with torch.no_grad():
            for _ in range(50):
                for of in layers:
                    if not torch.allclose(called(*of).double(), expected(*of), rtol=1e-4, atol=1e-4):
                        wrong.append(of)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnCuda:
    BUSY_CYCLES = 10_000_000

    @each_winner
    def test_other_streams_and_graphs(self, factor, times):
        times(factor)
        x, weight, bias = tensors("cuda")
        values = x.clone()
        with torch.no_grad():
            for _ in range(4):
                check(called(x, weight, bias), x, weight, bias)
            torch.cuda.synchronize()
            side = torch.cuda.Stream()
            for _ in range(4):
                x.fill_(float("nan"))
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(self.BUSY_CYCLES)
                    x.copy_(values)
                    y = called(x, weight, bias)
                    torch.cuda._sleep(self.BUSY_CYCLES)
                    x.fill_(float("nan"))
                side.synchronize()
                check(y, values, weight, bias)
            x.copy_(values)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = called(x, weight, bias)
            for seed in range(3):
                x.copy_(torch.randn_like(x))
                graph.replay()
                check(y, x, weight, bias)
            check(called(x, weight, bias), x, weight, bias)

    def test_the_setting_of_tf32(self, times):
        times(OURS)
        x, weight, bias = tensors("cuda", channels=256)
        with torch.no_grad():
            exact, rounded = [], []
            for _ in range(3):
                for allowed, results in ((False, exact), (True, rounded)):
                    torch.backends.cudnn.allow_tf32 = allowed
                    results.append(FusedConv2d.forward(FusedConv2d(weight, bias, OPTIONS, "relu"), x))
            module = FusedConv2d(weight, bias, OPTIONS, "relu")
            for _ in range(4):
                torch.backends.cudnn.allow_tf32 = False
                assert torch.equal(module(x), exact[-1])
                torch.backends.cudnn.allow_tf32 = True
                assert torch.equal(module(x), rounded[-1])

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
    def test_a_device_that_is_not_the_current_one(self, times):
        times(OURS)
        with torch.no_grad():
            for device in ("cuda:1", "cuda:0", "cuda:1"):
                of = tensors(device)
                for _ in range(4):
                    y = called(*of)
                    assert y.device == of[0].device
                    check(y, *of)
