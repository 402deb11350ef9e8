"""The check of an optimized model's graphs (test_backend_check.py has more of it): finds what is wrong, and leaves no trace."""

import copy
import io
import random

import numpy as np
import pytest
import torch
from common import OURS, THEIRS
from faults import FAULTS, drop_a_bias, keep_a_stale_filter
from networks import image, network
from torch import nn
from windrow.torch import optimize
from windrow.torch.backend import _check

pytestmark = pytest.mark.usefixtures("nothing_decided")


def why(model):
    return next((what for name, what in model.windrow_report.left.items() if name.endswith("check")), None)


@pytest.fixture
def checks(monkeypatch):
    """First calls that were compared."""
    seen, first = [], _check.Check._first
    monkeypatch.setattr(_check.Check, "_first", lambda self, *args: seen.append("call") or first(self, *args))

    def since():
        found = [*seen]
        seen.clear()
        return found

    return since


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, dtype, times, monkeypatch):
    seed = FAULTS.index(fault)
    model, x = network(seed, dtype), image(dtype)
    times(OURS if seed % 2 else THEIRS)
    with torch.no_grad():
        fast = optimize(model)
        fast(x), fast(x)
        assert why(fast) is None, "no fault, no alarm"
        with monkeypatch.context() as context:
            fault(context)
            fast = optimize(model)
            y = fast(x)
        assert "runs as PyTorch's own" in why(fast)
        assert torch.equal(y, model(x)) and torch.equal(fast(x), y)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="without CUDA nothing is TF32")
@pytest.mark.parametrize("seed", range(10))
def test_faults_are_found_in_tf32(seed, times, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    model, x = network(seed).cuda(), image().cuda()
    times(OURS if seed % 2 else THEIRS)
    with torch.no_grad():
        fast = optimize(model)
        fast(x), fast(x)
        assert why(fast) is None
        for fault in FAULTS[:4]:
            with monkeypatch.context() as context:
                fault(context)
                fast = optimize(model)
                fast(x)
            assert why(fast) is not None, fault


def test_the_report_names_the_module(monkeypatch):
    keep_a_stale_filter(monkeypatch)
    fast = optimize(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    with torch.no_grad():
        fast(image())
    assert "`0`: " in why(fast) and "because the compiled one differs" in str(fast.windrow_report)


def test_without_a_check(checks):
    model, x = network(1), image()
    with torch.no_grad():
        torch.testing.assert_close(optimize(model, check=False)(x), model(x), atol=1e-4, rtol=1e-4)
    assert not checks()


def test_each_kind_once(checks):
    fast, x = optimize(network(2)), image()
    with torch.no_grad():
        fast(x), fast(x.clone())
        assert checks() == ["call"]
        other = x.contiguous(memory_format=torch.channels_last)
        for _ in range(2):
            torch.testing.assert_close(fast(other), fast(other.clone()))
        with torch.autocast("cpu", torch.bfloat16):
            fast(x), fast(x)
        assert checks() == ["call"] * 2
        fast(x), fast(other)
        assert not checks()
    assert why(fast) is None


def test_what_is_wrong_is_the_models_error(checks):
    fast = optimize(network(3))
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError)):
                fast(torch.randn(1, 4, 8, 8))
        assert why(fast) is None
        torch.testing.assert_close(fast(image()).shape, network(3)(image()).shape)
        assert why(fast) is None


class Keeps(nn.Module):
    """Whose result depends on the calls before, and on random numbers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.seen, self.past = 0, [], {"x": torch.zeros(1)}

    def forward(self, x, scale=1.0):
        y = self.body(x)
        self.mean += y.mean((0, 2, 3))
        self.calls += 1
        self.seen.append(self.calls)
        self.past["x"] = self.past["x"] + y.mean()
        x += 1
        noise = torch.rand_like(y) + random.random() + np.random.rand()
        return {"y": y * self.past["x"] + noise, "calls": self.calls}, self.mean * scale


# With which PyTorch 2.11 breaks the graph.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_no_trace(checks):
    model = Keeps().eval()
    fast, x = optimize(model), image()
    mine, theirs = x.clone(), x.clone()
    with torch.no_grad():
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        want = [model(theirs) for _ in range(3)]
        after = torch.rand(1), random.random(), np.random.rand()
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        got = [fast(mine) for _ in range(3)]
        assert (torch.rand(1), random.random(), np.random.rand()) == after
    assert why(fast) is None and fast.windrow_report.fused and "call" in checks()
    for (g, gm), (w, wm) in zip(got, want, strict=True):
        torch.testing.assert_close(g, w), torch.testing.assert_close(gm, wm)
    torch.testing.assert_close(mine, theirs)
    assert fast.calls == model.calls and fast.seen == model.seen
    torch.testing.assert_close(fast.past, model.past)
    torch.testing.assert_close(fast.mean, model.mean)


def test_a_state_that_a_graph_does_not_know():
    """A module that passes for one of PyTorch's keeps what it is given."""

    class Past(nn.BatchNorm2d):
        pass

    Past.__module__ = "torch.nn.modules.of_a_test"
    Past.forward = lambda self, x: (x + len(self.__dict__.setdefault("calls", [])), self.calls.append(1))[0]
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Past(4), nn.Conv2d(4, 4, 3)).eval()
    fast, x = optimize(model), image()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)
    assert why(fast) is None and len(model.get_submodule("2").calls) == 3


def test_where_it_does_not_run(checks):
    model, x = network(4), image()
    with torch.no_grad():
        torch.jit.trace(optimize(model), x, check_trace=False)
        torch.func.vmap(optimize(model))(x[None])
        torch.export.export(optimize(model), (x,))
        torch.compile(optimize(model), backend="eager")(x)
    assert "call" not in checks()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_not_in_a_capture(checks):
    model, x = network(4).cuda(), image().cuda()
    fast = optimize(model)
    with torch.no_grad():
        fast(x), fast(x)
        assert "call" in checks() and why(fast) is None
        graph, other = torch.cuda.CUDAGraph(), x[:1].clone()
        fast(other)
        checks()
        with torch.cuda.graph(graph):
            fast(other + 0), fast(x[:, :, :16].clone())
        assert "call" not in checks()


def test_saved_copied_and_moved(checks):
    model, x = network(5), image()
    fast = optimize(model)
    with torch.no_grad():
        want = fast(x)
        torch.save(fast, file := io.BytesIO())
        file.seek(0)
        for other in (copy.deepcopy(fast), torch.load(file, weights_only=False)):
            assert type(other) is type(fast) and isinstance(other, nn.Sequential)
            torch.testing.assert_close(other(x), want)
            assert [*other.state_dict()] == [*model.state_dict()]
        checks()
        double = copy.deepcopy(fast).double()
        torch.testing.assert_close(double(x.double()).float(), want, atol=1e-4, rtol=1e-4)
        assert "call" in checks() and why(double) is None
        other = optimize(network(5))
        other(x)
        state = {name: 2 * value if "weight" in name else value for name, value in model.state_dict().items()}
        other.load_state_dict(state), model.load_state_dict(state)
        checks()
        torch.testing.assert_close(other(x[:1]), model(x[:1]), atol=1e-3, rtol=1e-3)
        assert why(other) is None


@pytest.mark.parametrize("given", [lambda y: y.argmax(1), lambda y: y > 0, lambda y: (y.topk(2, 1).indices, y.shape, "word")])
def test_results_that_are_no_numbers(given, monkeypatch):
    class Chosen(nn.Sequential):
        def forward(self, x):
            return given(super().forward(x))

    model, x = Chosen(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1)).eval(), image()
    fast = optimize(model)
    with torch.no_grad():
        for _ in range(2):
            fast(x)
        assert why(fast) is None
        drop_a_bias(monkeypatch)
        wrong = optimize(model)
        wrong(x)
        assert why(wrong) is not None
