"""The check of an optimized model: finds what is wrong, nothing else, and leaves no trace."""

import copy
import io
import random

import numpy as np
import pytest
import torch
from common import OURS, THEIRS
from networks import image, network
from torch import nn
from windrow.torch import _check, optimize
from windrow.torch._by_graph import ByGraph
from windrow.torch._check import Checked
from windrow.torch._fused import FusedConv2d
from windrow.torch._sequence import Sequence

pytestmark = pytest.mark.usefixtures("nothing_decided")


def fused(model):
    return [m for part in model.modules() if isinstance(part, ByGraph) for m in part._windrow_graph.modules()]


def why(model):
    return model.windrow_report.left.get("the model")


def drop_a_bias(model, monkeypatch):
    module = next(m for m in fused(model) if isinstance(m, FusedConv2d) and m.bias is not None)
    # Not that of the model, whose memory it may be.
    module.bias = module.bias.clone()
    module.bias[module.bias.abs().argmax()] = 0


def change_an_activation(model, monkeypatch):
    module = next(m for m in fused(model) if isinstance(m, FusedConv2d) and m.activation == "relu")
    module.activation = "gelu"


def repeat_a_border_row(model, monkeypatch):
    one, forward = [m for m in fused(model) if isinstance(m, FusedConv2d)][1], FusedConv2d.forward
    one.is_wrong = True

    def wrong(self, *args):
        y = forward(self, *args)
        if getattr(self, "is_wrong", False):
            y[:, :, -1] = y[:, :, -2]
        return y

    monkeypatch.setattr(FusedConv2d, "forward", wrong)


def miss_a_residual(model, monkeypatch):
    forward = FusedConv2d.forward
    monkeypatch.setattr(FusedConv2d, "forward", lambda self, x, residual=None: forward(self, x))


def miss_a_residual_in_the_graph(model, monkeypatch):
    sequence = next(m for m in fused(model) if isinstance(m, Sequence) and any(r is not None for _, r in m.steps))
    at = next(i for i, (_, residual) in enumerate(sequence.steps) if residual is not None)
    sequence.steps[at] = (sequence.steps[at][0], None)


FAULTS = [drop_a_bias, change_an_activation, repeat_a_border_row, miss_a_residual, miss_a_residual_in_the_graph]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(20))
def test_faults_are_found(seed, dtype, times, monkeypatch):
    model, x = network(seed, dtype), image(dtype)
    times(OURS if seed % 2 else THEIRS)
    fast = optimize(model)
    with torch.no_grad():
        fast(x), fast(x)
        assert why(fast) is None, "no fault, no alarm"
        for fault in FAULTS:
            fast = optimize(model)
            with monkeypatch.context() as context:
                fault(fast, context)
                y = fast(x)
            assert why(fast) is not None, fault
            torch.testing.assert_close(y, model(x), atol=0.05, rtol=0.05)
            assert not any(isinstance(m, ByGraph) for m in fast.modules())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="without CUDA nothing is TF32")
@pytest.mark.parametrize("seed", range(20))
def test_faults_are_found_in_tf32(seed, times, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    model, x = network(seed).cuda(), image().cuda()
    times(OURS if seed % 2 else THEIRS)
    with torch.no_grad():
        fast = optimize(model)
        fast(x), fast(x)
        assert why(fast) is None
        for fault in FAULTS[:4]:
            fast = optimize(model)
            with monkeypatch.context() as context:
                fault(fast, context)
                fast(x)
            assert why(fast) is not None, fault


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(20))
def test_a_stale_filter_is_found(seed, dtype, times):
    times(OURS)
    model = network(seed, dtype)
    fast = optimize(model)
    with torch.no_grad():
        fast(image(dtype)), fast(image(dtype))
        weight = fast.get_submodule("2").second.weight
        # No version tells of it.
        weight.data[:] = weight.data.flip(0)
        x = image(dtype, batch=1)
        y = fast(x)
        assert "`2.second`" in why(fast)
        model.get_submodule("2").second.weight[:] = weight
        torch.testing.assert_close(y, model(x), atol=0.05, rtol=0.05)


def test_the_report_names_the_module():
    fast = optimize(network(0))
    drop_a_bias(fast, None)
    fast(image())
    assert "`0`: " in why(fast) and "because the optimized one differs" in str(fast.windrow_report)
    assert not any("FusedConv2d" in what for what in fast.windrow_report.fused.values())


def test_without_a_check(monkeypatch):
    monkeypatch.setattr(_check, "_first", lambda *_: pytest.fail("checked"))
    model, x = network(1), image()
    with torch.no_grad():
        torch.testing.assert_close(optimize(model, check=False)(x), model(x), atol=1e-4, rtol=1e-4)
    assert not isinstance(optimize(model, check=False), Checked)
    assert not isinstance(optimize(nn.Sequential(nn.Linear(3, 3))), Checked)


@pytest.fixture
def checks(monkeypatch):
    """Kinds of inputs that were checked."""
    seen, first = [], _check._first
    monkeypatch.setattr(_check, "_first", lambda *args: seen.append(args[2]) or first(*args))

    def since():
        n = len(seen)
        seen.clear()
        return n

    return since


def test_each_kind_once(checks):
    fast, x = optimize(network(2)), image()
    with torch.no_grad():
        fast(x), fast(x.clone())
        assert checks() == 1
        for other in (x[:1], x.contiguous(memory_format=torch.channels_last), x[..., :18].clone()):
            for _ in range(2):
                torch.testing.assert_close(fast(other), fast(other.clone()))
        assert checks() == 3
        with torch.autocast("cpu", torch.bfloat16):
            fast(x), fast(x)
        assert checks() == 1
        for other in (copy.deepcopy(fast),):
            other(x)
        assert checks() == 0
    assert why(fast) is None


def test_many_shapes(checks, monkeypatch):
    monkeypatch.setattr(_check, "_SHAPES", 3)
    fast = optimize(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval())
    with torch.no_grad():
        for size in range(5, 15):
            fast(torch.randn(1, 3, size, 6))
        done = len(fast._windrow_check.right)
        assert done == 10 and fast._windrow_check.any_shape.popitem()[1] == 3
        fast(torch.randn(1, 3, 5, 6).bfloat16().float().double().float()[0])
        assert len(fast._windrow_check.right) == 11


def test_what_is_wrong_is_the_models_error(checks):
    fast = optimize(network(3))
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError)):
            fast(torch.randn(1, 4, 8, 8))
    assert why(fast) is None and checks() == 2
    with torch.no_grad():
        torch.testing.assert_close(fast(image()).shape, network(3)(image()).shape)


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


def test_no_trace():
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
    assert why(fast) is None and fast.windrow_report.fused
    for (g, gm), (w, wm) in zip(got, want, strict=True):
        torch.testing.assert_close(g, w), torch.testing.assert_close(gm, wm)
    torch.testing.assert_close(mine, theirs)
    assert fast.calls == model.calls and fast.seen == model.seen
    torch.testing.assert_close(fast.past, model.past)
    torch.testing.assert_close(fast.mean, model.mean)


def test_a_state_that_a_graph_does_not_know():
    """A helper that torch.fx does not look into keeps what it is given."""

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
    assert checks() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_not_in_a_capture(checks):
    model, x = network(4).cuda(), image().cuda()
    fast = optimize(model)
    with torch.no_grad():
        fast(x), fast(x)
        assert checks() == 1 and why(fast) is None
        graph, other = torch.cuda.CUDAGraph(), x[:1].clone()
        fast(other)
        checks()
        with torch.cuda.graph(graph):
            fast(other + 0), fast(x[:, :, :16].clone())
        assert checks() == 0


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
        assert checks() == 1 and why(double) is None
        other = optimize(network(5))
        other(x)
        state = {name: 2 * value if "weight" in name else value for name, value in model.state_dict().items()}
        other.load_state_dict(state), model.load_state_dict(state)
        checks()
        torch.testing.assert_close(other(x[:1]), model(x[:1]), atol=1e-3, rtol=1e-3)
        assert checks() == 1 and why(other) is None


@pytest.mark.parametrize("given", [lambda y: y.argmax(1), lambda y: y > 0, lambda y: (y.topk(2, 1).indices, y.shape, "word")])
def test_results_that_are_no_numbers(given):
    class Chosen(nn.Sequential):
        def forward(self, x):
            return given(super().forward(x))

    model, x = Chosen(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1)).eval(), image()
    fast = optimize(model)
    with torch.no_grad():
        for _ in range(2):
            fast(x)
        assert why(fast) is None
        wrong = optimize(model)
        drop_a_bias(wrong, None)
        wrong(x)
        assert why(wrong) is not None
