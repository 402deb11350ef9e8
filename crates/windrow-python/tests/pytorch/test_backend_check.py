"""The check of a compiled graph: finds what is wrong, nothing else, and leaves no trace."""

import copy
import gc
import logging
import weakref

import pytest
import torch
import torch.nn.functional as F
from common import OURS, THEIRS, leaf
from faults import FAULTS, change_an_activation, drop_a_bias, keep_a_stale_filter
from networks import image, network
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from windrow.torch import _check_bound
from windrow.torch._fused import FusedConv2d
from windrow.torch.backend import _check, _check_sums, _options, windrow
from windrow.torch.choice import budget

pytestmark = [
    pytest.mark.usefixtures("nothing_decided"),
    pytest.mark.skipif(torch.__version__ < _options.OLDEST, reason="an old PyTorch, which the backend refuses"),
]


class Report:
    def __init__(self):
        self.fused_, self.left_ = {}, {}

    def fused(self, name, what):
        self.fused_[name] = what

    def left(self, name, why):
        self.left_[name] = why


def compiled(model, rest="eager", dynamic=None, **options):
    """The model, and what its report says of the check."""
    report = Report()
    torch._dynamo.reset()
    fast = torch.compile(model, backend=windrow, dynamic=dynamic, options={"rest": rest, "report": report, **options})
    return fast, lambda: report.left_.get("check")


@pytest.fixture
def checks(monkeypatch):
    """First calls that were compared, and convolutions."""
    seen, first, look = [], _check.Check._first, _check.Check.look
    looked = lambda self, *args: (look(self, *args), seen.append(len(self._compared)))
    monkeypatch.setattr(_check.Check, "_first", lambda self, *args: seen.append("call") or first(self, *args))
    monkeypatch.setattr(_check.Check, "look", looked)

    def since():
        found = [*seen]
        seen.clear()
        return found

    return since


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(10))
def test_faults_are_found(seed, dtype, times, monkeypatch, checks):
    model, x = network(seed, dtype), image(dtype)
    times(OURS if seed % 2 else THEIRS)
    fast, why = compiled(model)
    with torch.no_grad():
        fast(x), fast(x)
        convolutions, call = checks()
        assert call == "call" and convolutions == sum(isinstance(m, nn.Conv2d) for m in model.modules())
        assert why() is None, "no fault, no alarm"
        want = model(x)
        # Each with four networks of each type: a compilation takes a second.
        for fault in (FAULTS[seed % 5], FAULTS[(seed + 2) % 5]):
            fast, why = compiled(model)
            with monkeypatch.context() as context:
                fault(context)
                y = fast(x)
            assert why() is not None and "runs as PyTorch's own" in why(), fault
            assert torch.equal(y, want) and torch.equal(fast(x), want)


@pytest.mark.parametrize("is_folded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_activations_that_differ_little_are_told_apart(dtype, is_folded, times, monkeypatch):
    """ReLU and GELU, by at most 0.17, where sums are larger."""
    times(OURS)
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(16) if is_folded else nn.Identity()
    model = nn.Sequential(nn.Conv2d(16, 16, 3), norm, nn.ReLU()).eval().to(dtype)
    x = image(dtype, 2).repeat(1, 6, 1, 1)[:, :16] * (4 if is_folded else 16)
    with torch.no_grad():
        if is_folded:
            norm.running_var.copy_(model[0](x).float().var((0, 2, 3)) / 2)
        assert 1.2 < model[:2](x).float().std() < 40
        fast, why = compiled(model)
        fast(x)
        assert why() is None
        change_an_activation(monkeypatch)
        fast, why = compiled(model)
        fast(x)
    assert why() is not None and "differ" in why()


class Permuted(nn.Module):
    """Views that only permuted results have, as those of MobileViT."""

    def __init__(self):
        super().__init__()
        self.conv, self.line = nn.Conv2d(3, 8, 3, padding=1), nn.Conv1d(4, 4, 3)

    def forward(self, x):
        y = F.gelu(self.conv(x).permute(0, 2, 3, 1)) + 1
        return self.line(y.permute(0, 3, 1, 2).view(x.shape[0], 4, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_stay_where_values_are_moved(dtype, times, checks):
    times(OURS)
    fast, why = compiled(Permuted().eval().to(dtype))
    with torch.no_grad():
        fast(image(dtype))
    assert why() is None and checks()[1:] == ["call"]


class Kinds(nn.Module):
    """Convolutions of every kind, with results that are compared in several parts."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(6, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.groups, self.depthwise = nn.Conv2d(12, 18, 3, groups=3), nn.Conv2d(18, 18, 3, groups=18)
        self.up, self.up_groups = nn.ConvTranspose2d(18, 7, 2, stride=2), nn.ConvTranspose2d(18, 8, 2, stride=2, groups=2)
        self.line = nn.Conv1d(7, 5, 3)

    def forward(self, x):
        y = self.depthwise(self.groups(self.norm(self.first(x)).relu()))
        up = self.up(y)
        return up, self.up_groups(y), self.line(up.flatten(2))


@pytest.mark.parametrize("piece", [1, 500, 3000, 1 << 22])
def test_parts_of_results(piece, times, monkeypatch):
    """Whatever their size, the bounds are those of the whole."""
    times(OURS)
    monkeypatch.setattr(_check_bound, "PIECE", piece)
    monkeypatch.setattr(_check_sums, "PIECE", piece)
    found, own = [], _check_sums.beyond
    monkeypatch.setattr(_check_sums, "beyond", lambda got, want, bound: found.append(bound) or own(got, want, bound))
    torch.manual_seed(0)
    model, x = Kinds().eval(), leaf(2, 6, 14, 12, grad=False)
    fast, why = compiled(model)
    with torch.no_grad():
        fast(x)
    assert why() is None
    assert len(found) == {1: 12 + 3 + 18 + 7 + 2 + 5, 1 << 22: 6}.get(piece, len(found))
    whole = [*found]
    found.clear()
    monkeypatch.setattr(_check_sums, "PIECE", 1 << 22)
    fast, why = compiled(model)
    with torch.no_grad():
        fast(x)
    each = iter(whole)
    for want in found:
        parts = []
        while sum(t.shape[1] for t in parts) < want.shape[1]:
            parts.append(next(each))
        torch.testing.assert_close(torch.cat(parts, 1), want)


@pytest.mark.parametrize("seed", [0, 3])
def test_faults_are_found_beside_inductor(seed, times, monkeypatch, checks):
    times(OURS)
    model, x = network(seed), image()
    fast, why = compiled(model, "inductor")
    with torch.no_grad():
        fast(x), fast(x)
        assert why() is None and checks()[1:] == ["call"]
        want = model(x)
        for fault in FAULTS[:2] + FAULTS[3:]:
            # Inductor's part is not what is tried.
            fast, why = compiled(model, "inductor")
            with monkeypatch.context() as context:
                fault(context)
                y = fast(x)
            assert why() is not None, fault
            torch.testing.assert_close(y, want, atol=1e-4, rtol=1e-4)


class Keeps(nn.Module):
    """Whose result depends on the calls before, and on random numbers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.norm = nn.BatchNorm2d(4).train()
        self.register_buffer("mean", torch.zeros(4))
        self.past = torch.zeros(1)

    def forward(self, x):
        y = self.norm(self.body.eval()(x))
        self.mean += y.mean((0, 2, 3))
        self.past = self.past + y.mean()
        x += 1
        return {"y": y * self.past + torch.rand_like(y), "mean": self.mean * 2, "x": x}, x[0]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_no_trace(is_wrong, monkeypatch, checks):
    torch.manual_seed(1)
    model = Keeps()
    other = copy.deepcopy(model)
    fast, why = compiled(other)
    x = image()
    mine, theirs = x.clone(), x.clone()
    if is_wrong:
        drop_a_bias(monkeypatch)
    with torch.no_grad():
        torch.manual_seed(3)
        want = [model(theirs) for _ in range(3)]
        after = torch.rand(1)
        torch.manual_seed(3)
        got = [fast(mine) for _ in range(3)]
        assert torch.rand(1) == after
    assert (why() is not None) == is_wrong and "call" in checks()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(other.past, model.past)
    torch.testing.assert_close(other.state_dict(), model.state_dict())


def test_each_graph_once_and_sizes_three_times(checks):
    model = network(2)
    fast, why = compiled(model)
    with torch.no_grad():
        fast(image()), fast(image()), fast(image())
        assert checks()[1:] == ["call"]
        fast, why = compiled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval(), dynamic=True)
        for size in (5, 6, 6, 5, 7, 8, 9):
            fast(torch.randn(2, 3, size, 6))
        assert checks() == [1, "call", "call", "call"]
    assert why() is None


def test_a_stale_filter_is_found_at_another_size():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU()).eval()
    fast, why = compiled(model, dynamic=True)
    with torch.no_grad():
        fast(torch.randn(2, 3, 7, 6))
        # Neither a version nor the sample tells of it.
        model[0].weight.data[3, 1] += 1
        x = torch.randn(2, 3, 8, 6)
        y = fast(x)
        assert "`0`: " in why()
        torch.testing.assert_close(y, model(x))


def test_without_a_check(checks):
    fast, why = compiled(network(1), check=False)
    with torch.no_grad():
        fast(image())
    assert checks() == [] and why() is None


def test_what_is_compared_is_dropped(monkeypatch):
    made, init = [], _check.Original.__init__
    monkeypatch.setattr(_check.Original, "__init__", lambda self, *args: made.append(weakref.ref(self)) or init(self, *args))
    model, x = network(1), image()
    fast, why = compiled(model)
    with torch.no_grad():
        fast(x)
    gc.collect()
    assert [one() for one in made] == [None]


def test_the_module_is_named_and_a_warning_given_once(monkeypatch, caplog):
    keep_a_stale_filter(monkeypatch)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ModuleDict({"part": nn.Conv2d(4, 4, 3)})["part"]).eval()
    fast, why = compiled(model)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "windrow.torch.backend"):
        for _ in range(3):
            fast(image())
    assert "`0`: " in why() and "elements differ" in why()
    assert [record.getMessage() for record in caplog.records] == [why()]


def test_what_raises(monkeypatch):
    """The compiled graph alone, or the model."""
    model, x = network(3), image()
    fast, why = compiled(model)
    with monkeypatch.context() as context:
        context.setattr(FusedConv2d, "forward", lambda self, *args: 1 / 0)
        with torch.no_grad():
            assert torch.equal(fast(x), model(x))
    assert "ZeroDivisionError" in why()

    class Chosen(nn.Module):
        def forward(self, x, i):
            return F.relu(x.index_select(0, i))

    fast, why = compiled(Chosen())
    with torch.no_grad():
        with pytest.raises(IndexError):
            fast(x, torch.tensor([5]))
        assert why() is None
        assert torch.equal(fast(x, torch.tensor([1])), F.relu(x[1:2]))


class Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


def test_where_it_does_not_run(checks):
    model, x = network(4), image()
    fast, why = compiled(model)
    with torch.no_grad():
        with Seeing():
            fast(x)
        assert "call" not in checks()
        # PyTorch 2.11 never compiles what a mode saw first.
        torch.compiler.reset()
        fast, why = compiled(network(4))
        fast(x)
        assert "call" in checks()
    fast, why = compiled(network(4).train())
    fast(x).sum().backward()
    assert checks() == [] and why() is None


def published(name, *shape):
    torchvision = pytest.importorskip("torchvision")
    return getattr(torchvision.models, name)(*shape, num_classes=10)


class Unet(nn.Module):
    """With group norms, and two levels."""

    def __init__(self, c=16):
        super().__init__()
        block = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU())
        self.first, self.inner, self.last = block(3, c), block(c, 2 * c), block(3 * c, c)
        self.down, self.up = nn.Conv2d(c, c, 3, 2, 1), nn.ConvTranspose2d(2 * c, 2 * c, 2, 2)
        self.out = nn.Conv2d(c, 2, 1)

    def forward(self, x):
        y = self.first(x)
        return self.out(self.last(torch.cat([y, self.up(self.inner(self.down(y)))], 1)))


class Next(nn.Module):
    """A block of ConvNeXt."""

    def __init__(self, c=16):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c)
        self.wide, self.narrow, self.factor = nn.Linear(c, 4 * c), nn.Linear(4 * c, c), nn.Parameter(torch.rand(c, 1, 1))

    def forward(self, x):
        y = self.narrow(F.gelu(self.wide(self.norm(self.conv(x).permute(0, 2, 3, 1)))))
        return x + self.factor * y.permute(0, 3, 1, 2)


NETWORKS = {
    "resnet18": lambda: published("resnet18"),
    "mobilenet_v2": lambda: published("mobilenet_v2"),
    # With two layers in each of its four blocks: 121 take half a minute to compile.
    "densenet": lambda: published("DenseNet", 8, (2, 2, 2, 2), 16),
    "unet": Unet,
    # Filters of as many images as results, and of others, with and without groups.
    "transposed": lambda: nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 2, 2), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), nn.ReLU()),
    ),
    "convnext": lambda: nn.Sequential(nn.Conv2d(3, 16, 4, 4), Next(), Next(), nn.Conv2d(16, 8, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_alarm(name, dtype, factor, checks):
    torch.manual_seed(0)
    model = NETWORKS[name]().eval().to(dtype)
    fast, why = compiled(model)
    x = torch.randn(2, 3, 32, 32).to(dtype)
    with torch.no_grad():
        fast(x)
    convolutions = sum(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in model.modules())
    linear = sum(isinstance(m, nn.Linear) for m in model.modules()) if name == "convnext" else 0
    assert why() is None and checks() == [convolutions + linear, "call"]


def test_no_alarm_beside_inductor(times, checks):
    times(OURS)
    model = Unet().eval()
    fast, why = compiled(model, "inductor")
    with torch.no_grad():
        fast(torch.randn(2, 3, 16, 16))
    assert why() is None and checks()[1:] == ["call"]


def test_the_budget_does_not_count_what_the_check_holds(times, monkeypatch):
    times(OURS)
    seen, own = [], budget.apart

    def spy(tensors):
        seen.append(sum(t.nbytes for t in tensors))
        return own(tensors)

    monkeypatch.setattr(budget, "apart", spy)
    model, x = nn.Conv2d(3, 4, 1).eval(), image(torch.float32)
    fast, _ = compiled(model)
    with torch.no_grad():
        y = fast(x)
        fast(x)
    # The result; its numbers, and how far they move, in f64.
    assert seen == [5 * y.nbytes] and budget._apart == 0
