"""`torch.compile(model, backend="windrow")`: what is allowed there, and that results are those of the model."""

import copy
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from common import OURS, compare_with_f64, each_device, leaf
from torch import nn
from windrow.torch import backend, patch
from windrow.torch.backend import OptionError, VersionError, _compile, _options, windrow

pytestmark = [
    pytest.mark.usefixtures("nothing_decided"),
    pytest.mark.skipif(torch.__version__ < _options.OLDEST, reason="an old PyTorch, which the backend refuses"),
]
each_rest = pytest.mark.parametrize("rest", ["eager", "inductor"])


def compiled(model, rest="eager", dynamic=None, fullgraph=False, **options):
    # The check would put PyTorch's results for wrong ones.
    options = {"rest": rest, "check": False, **options}
    return torch.compile(model, backend=windrow, dynamic=dynamic, fullgraph=fullgraph, options=options)


class Net(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.second, self.line = nn.Conv2d(c, c, 3, stride=2), nn.Conv1d(c, 4, 3)
        self.up = nn.ConvTranspose1d(4, 2, 3, stride=2, output_padding=1)

    def forward(self, x):
        y = F.relu(self.norm(self.first(x)))
        return self.up(self.line(self.second(y).flatten(2)))


def close(got, model, x, scale=1.0):
    want = copy.deepcopy(model).double()(x.double())
    tolerance = scale * {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[got.dtype]
    assert (got.double() - want).norm() <= tolerance * want.norm(), (got.double() - want).norm() / want.norm()


@each_device
@each_rest
def test_inference(rest, device, monkeypatch, times):
    times(OURS)
    model = Net().eval().to(device)
    fast = compiled(model, rest, fullgraph=True)
    x = leaf(2, 3, 12, 10, device=device, grad=False)
    found = []
    made = _compile._Frozen.__init__
    told = lambda self, *args: (made(self, *args), found.append(self.what))[0]
    monkeypatch.setattr(_compile._Frozen, "__init__", told)
    with torch.no_grad():
        for _ in range(2):
            close(fast(x), model, x)
    ((folded, fused, others),) = found
    assert len(folded) == 1 and fused == ["conv2d, relu", "conv2d"] and others == 2


@each_rest
def test_training(rest):
    model = Net().train()
    fast = compiled(copy.deepcopy(model), rest)
    x = leaf(2, 3, 12, 10)
    wide = copy.deepcopy(model).double()
    for _ in range(2):
        for got, want in zip(*(step(net, image) for net, image in ((fast, x), (wide, wider(x)))), strict=True):
            assert (got.double() - want).norm() <= 1e-5 * want.norm() + 1e-5
    assert torch.allclose(fast.norm.running_mean.double(), wide.norm.running_mean, atol=1e-5)


def wider(x):
    return x.detach().double().requires_grad_()


def step(net, image):
    """The result and all gradients."""
    net.zero_grad()
    y = net(image)
    y.square().sum().backward()
    grads = [y, image.grad, *(p.grad for p in net.parameters())]
    image.grad = None
    return grads


@pytest.mark.parametrize("autocast", [False, True])
@each_rest
def test_convolutions_left_in_training(rest, autocast, factor, monkeypatch):
    called, training = set(), _compile._training

    def kept(module, options):
        training(module, options)
        called.update(str(node.target) for node in module.graph.nodes if node.op == "call_function")

    monkeypatch.setattr(_compile, "_training", kept)
    model = Net().train()
    fast = compiled(copy.deepcopy(model), rest)
    x = leaf(2, 3, 12, 10)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = step(fast, x)
    for ours, want in zip(got, step(copy.deepcopy(model).double(), wider(x)), strict=True):
        assert (ours.double() - want).norm() <= (5e-2 if autocast else 1e-5) * want.norm() + 1e-5
    # A convolution in bf16 whose step PyTorch computes faster is left to it as a whole.
    who = {name.partition(".")[0] for name in called if "convolution" in name or "conv2d" in name}
    assert who == {"windrow" if factor == OURS or not autocast else "aten"}


def test_gradients_of_every_kind():
    def function(x, w, b, up):
        y = F.conv2d(x, w, b, 2, 1)
        return F.conv_transpose2d(y, up, None, 2, 1, 1)

    tensors = [leaf(2, 4, 9, 8), leaf(6, 4, 3, 3), leaf(6), leaf(6, 2, 3, 3)]
    compare_with_f64(compiled(function), function, tensors)


def test_in_half_precision_under_autocast():
    model = Net().eval()
    fast = compiled(model)
    x = leaf(2, 3, 12, 10, grad=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = fast(x)
    assert y.dtype == torch.bfloat16
    close(y, model, x)


def test_sizes_that_change():
    model = Net().eval()
    fast = compiled(model, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for size in ((2, 3, 12, 10), (1, 3, 9, 14), (3, 3, 20, 20)):
            x = leaf(*size, grad=False)
            close(fast(x), model, x)


class Broken(Net):
    def forward(self, x):
        y = self.first(x)
        torch._dynamo.graph_break()
        if y.mean() > 1e9:
            return y
        return F.silu(self.norm(y) + 1)


def test_graph_breaks():
    model = Broken().eval()
    x = leaf(2, 3, 12, 10, grad=False)
    with torch.no_grad():
        close(compiled(model)(x), model, x)


def test_hooks():
    model = Net().eval()
    seen = []
    model.first.register_forward_hook(lambda module, args, y: seen.append(1) or 2 * y)
    fast = compiled(model)
    x = leaf(2, 3, 12, 10, grad=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_patched_model():
    model, patched = Net().eval(), Net().eval()
    patched.load_state_dict(model.state_dict())
    patch(patched)
    x = leaf(2, 3, 12, 10, grad=False)
    with torch.no_grad():
        close(compiled(patched)(x), model, x)


def test_states_are_kept():
    model = Net().train()
    fast, plain = compiled(copy.deepcopy(model)), copy.deepcopy(model)
    x = leaf(4, 3, 12, 10, grad=False)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast.norm.running_var, plain.norm.running_var)
    assert fast.norm.num_batches_tracked == 3


@pytest.mark.parametrize(
    "options, words",
    [
        ({"acuracy": "exact"}, "unknown option 'acuracy'.*'accuracy'"),
        ({"accuracy": "best"}, "`accuracy` is 'best'.*'exact'"),
        ({"rest": "nobody"}, "`rest` is 'nobody'.*'inductor'"),
        ({"mode": "fastest"}, "`mode` is 'fastest'.*'max-autotune'"),
    ],
)
def test_unknown_options(options, words):
    with pytest.raises(OptionError, match=words):
        windrow(torch.fx.symbolic_trace(nn.ReLU()), [], options=options)


def test_an_old_version(monkeypatch):
    monkeypatch.setattr(_options, "OLDEST", (99, 0))
    with pytest.raises(VersionError, match="with PyTorch 99.0 and newer, this is 2"):
        windrow(torch.fx.symbolic_trace(nn.ReLU()), [])


def test_options_of_inductor():
    asked = _options.Options.of(None, {"mode": "reduce-overhead", "max_autotune": False, "rest": "inductor"})
    assert asked.inductor == {"triton.cudagraphs": True, "max_autotune": False}
    assert _options.Options.of("max-autotune", None).inductor["max_autotune"] is True


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(_options, "_has_cpp_compiler", lambda: False)
    _options._lacking.cache_clear()
    model = Net().eval()
    x = leaf(2, 3, 12, 10, grad=False)
    with torch.no_grad(), pytest.warns(UserWarning, match="lacks a C\\+\\+ compiler"):
        close(compiled(model, "inductor")(x), model, x)
    _options._lacking.cache_clear()


class Told:
    def __init__(self):
        self.of = {}

    def fused(self, name, what):
        self.of[name] = what

    left = fused


@each_rest
def test_a_report_names_modules(rest, times):
    class Names(Net):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU())
            self.wide = nn.Conv3d(1, 1, 1)
            self.inner = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.scale = nn.Parameter(torch.ones(8, 1, 1))

        def forward(self, x):
            y = F.relu(self.norm(self.first(x)))
            y = y + self.body(y)
            y = self.inner(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * self.scale
            return self.wide(self.line(self.second(y).flatten(2))[:, None, None])

    times(OURS)
    report, model, x = Told(), Names().eval(), leaf(2, 3, 12, 10, grad=False)
    with torch.no_grad():
        close(compiled(model, rest, fullgraph=True, report=report)(x), model, x)
    of = "FusedConv2d(8, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1)"
    linear = {
        "inner.1": "FusedConv2d(8, 16, kernel_size=(1, 1), stride=(1, 1), activation='gelu'): gelu",
        "inner.3": "FusedConv2d(16, 8, kernel_size=(1, 1), stride=(1, 1)): folded mul",
    }
    assert report.of == {
        "first": of.replace("8, 8", "3, 8", 1) + ", activation='relu'): folded norm, relu",
        "body.0": of + ", activation='gelu'): folded body.1, gelu",
        "second": "FusedConv2d(8, 8, kernel_size=(3, 3), stride=(2, 2))",
        "line": "conv2d",
        "wide": "FusedConv2d(1, 1, kernel_size=(1, 1, 1), stride=(1, 1, 1))",
    } | linear


class Gated(nn.Module):
    """What networks of convolutions have between them."""

    def __init__(self, more=None):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.gate, self.more = nn.Conv2d(8, 8, 1), more or nn.Identity()
        self.line = nn.Linear(8, 2)

    def forward(self, x):
        y = F.silu(self.norm(self.first(x)))
        y = self.more(y * self.gate(F.adaptive_avg_pool2d(y, 1)).sigmoid() + y)
        return self.line(F.max_pool2d(torch.cat([y, y], 1), 2)[:, :8].mean([2, 3]))


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "is_one, change",
    [
        (True, lambda model: model),
        (False, lambda model: Gated(nn.GroupNorm(2, 8)).eval()),
        (False, lambda model: model.to(torch.bfloat16)),
        (False, lambda model: nn.Sequential(nn.Flatten(), nn.Linear(192, 2)).eval()),
    ],
)
def test_who_computes_the_rest_of_networks_on_the_cpu(is_one, change, monkeypatch):
    """By default."""
    found = []
    for name in ("by_eager", "by_inductor"):
        monkeypatch.setattr(backend, name, lambda graph, *_, name=name: found.append(name) or graph)
    model = change(Gated().eval())
    x = torch.randn(1, 3, 8, 8).to(next(model.parameters()).dtype)

    def asked(x=x, dynamic=False, **options):
        torch._dynamo.reset()
        found.clear()
        torch.compile(model, backend=windrow, dynamic=dynamic, options=options)(x)
        return found == ["by_eager"]

    with torch.no_grad():
        assert asked() == asked(accuracy="exact") == is_one
        assert not asked(rest="inductor") and asked(rest="eager")
        assert not asked(mode="max-autotune") and not asked(epilogue_fusion=True)
        assert not asked(dynamic=True) and not asked(x.as_subclass(Sub))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not asked()
    assert not asked(), "training"
    torch._dynamo.reset()


WARM = """
import sys, torch
from torch import nn
from torch._dynamo.utils import counters
from windrow.torch.backend import windrow
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.AvgPool2d(2), nn.Softmax(1)).eval()
x = torch.randn(1, 3, 8, 8)
with torch.no_grad():
    y = torch.compile(model, backend=windrow)(x)
    torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_bypass"])
"""


def test_a_second_process_compiles_nothing(tmp_path):
    told = []
    for _ in range(2):
        own = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
        # Measured again beside other programs, another choice may give another graph.
        own["WINDROW_DECISIONS"] = str(tmp_path / "decisions")
        told.append(subprocess.run([sys.executable, "-c", WARM], env=own, capture_output=True, text=True, check=True).stdout)
    assert [*map(str.split, told)] == [["0", "0"], ["1", "0"]]


def test_found_by_name():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (place,) = project["project"]["entry-points"]["torch_dynamo_backends"].values()
    assert place == f"{windrow.__module__}:{windrow.__qualname__}"
