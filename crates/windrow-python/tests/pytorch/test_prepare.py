"""Plans that are made ahead of decisions, several at the same time."""

import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from common import OURS, THEIRS, leaf
from torch import nn
from windrow import _native
from windrow.torch._filters import kept_with
from windrow.torch.backend import _choice, _fuse, _options, windrow
from windrow.torch.choice import convolution
from windrow.torch.choice.candidates import Conv
from windrow.torch.choice.problem import Options

pytestmark = [
    pytest.mark.usefixtures("nothing_decided"),
    pytest.mark.skipif(torch.__version__ < _options.OLDEST, reason="an old PyTorch, which the backend refuses"),
]


@pytest.fixture
def prepared(monkeypatch):
    """What is prepared, and the plans that there are then. The CPU is taken for a device whose kernels are compiled."""
    for module in (convolution, _fuse):
        monkeypatch.setattr(module, "compiles", lambda device: True)
    found, own = [], _native.conv2d_prepare

    def prepare(convolutions, threads):
        errors = own(convolutions, threads)
        found.append((convolutions, errors, plans()))
        return errors

    monkeypatch.setattr(_native, "conv2d_prepare", prepare)
    return found


def plans():
    return Counter((*map(tuple, of[:2]), of[2]) for of in _native.conv2d_plans())


def described(c=8, **more):
    named = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "activation": None, "accuracy": None}
    image, filter = torch.empty(1, c, 9, 11), torch.empty(c, c, 3, 3)
    of = {"device": "cpu", "dtype": "float32", "x": (image.shape, image.stride()), "named": {**named, "memory": None}}
    of |= {"weight": (filter.shape, filter.stride()), "has_bias": False, "residual": False}
    return of | {"is_kept": True, "unless": [], "much": None} | more


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_loses_no_other_plan(threads):
    channels = [100 * threads + n for n in range(5)]
    wrong = [described(97, device="cuda:4000"), described(weight=((8, 7, 3, 3), (63, 9, 3, 1)))]
    wrong += [described(dtype="complex64")]
    errors = _native.conv2d_prepare([*wrong, *map(described, channels)], threads)
    assert "cuda" in errors[0] and "weight" in errors[1] and "complex64" in errors[2] and errors[3:] == [None] * 5
    made = {shape[1] for shape, *_ in plans()}
    assert {*channels} <= made and 97 not in made
    before = plans()
    for c in channels:
        _native.conv2d_bytes(torch.empty(1, c, 9, 11), torch.empty(c, c, 3, 3), None, described()["named"], False, True)
    assert plans() == before


def test_plans_that_are_needed_alone_are_made():
    image, filter = torch.empty(1, 91, 9, 11), torch.empty(91, 91, 3, 3)
    algorithm = _native.conv2d_algorithm(image, filter, None, described()["named"], True)
    large = (1, 92, 40, 40), (147200, 1600, 40, 1)
    given = [described(91, unless=["cudnn", algorithm]), described(92, x=large, much=1)]
    assert _native.conv2d_prepare(given, 2) == [None, None]
    made = [shape[1] for shape, *_ in plans()]
    # The one that keeps its filter, and the one that packs on each call.
    assert made.count(91) == 0 and made.count(92) == 2


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_calls_find_the_plans(is_fused, layout, activation, prepared, times):
    times(OURS)
    x, weight = leaf(1, 12, 10, 10, grad=False), leaf(12, 12, 3, 3, grad=False)
    bias, residual = leaf(12, grad=False), leaf(1, 12, 10, 10, grad=False).contiguous(memory_format=layout)
    residual = residual if is_fused else None
    options = Options([1, 1], [1, 1], [1, 1], 1)
    kept = kept_with(weight, is_frozen=is_fused, lasts=True)
    # As a model is: one of image and filter is enough.
    given = Conv(weight.contiguous(memory_format=layout), bias, options, activation, None, kept, is_fused)
    convolution.prepare([(given, x, residual)])
    ((_, errors, before),) = prepared
    assert errors == [None]
    y = convolution.way(given, x, residual).run(x, residual)
    want = F.conv2d(x, weight, bias, padding=1)
    want = want if residual is None else want + residual
    assert plans() == before and (y - (want if activation is None else want.relu())).abs().max() < 1e-4
    # Nothing is left to prepare of what is decided for PyTorch.
    convolution.store.clear()
    times(THEIRS)
    convolution.way(given, x, residual)
    convolution.prepare([(given, x, residual)])
    assert len(prepared) == 1


class Blocks(nn.Module):
    def __init__(self, c=10):
        super().__init__()
        self.first = nn.Conv2d(3, c, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for _ in range(4))
        self.short, self.last = nn.Conv2d(c, c, 1), nn.Conv2d(c, 2 * c, 3, stride=2)

    def forward(self, x):
        y = F.relu(self.first(x))
        for i in (0, 2):
            inside = self.norms[i + 1](self.convs[i + 1](F.relu(self.norms[i](self.convs[i](y)))))
            y = F.relu(inside + (self.short(y) if i else y))
        return self.last(F.silu(y))


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_a_graph_is_prepared_at_once(rest, prepared, factor, runs_uncompiled):
    model, x = Blocks().eval().requires_grad_(False), torch.randn(1, 3, 12, 12)
    with torch.no_grad():
        fast = torch.compile(model, backend=windrow, options={"rest": rest, "check": False})
        got = fast(x)
        ((convolutions, errors, before),) = prepared
        # Equal ones are prepared once.
        assert errors == [None] * 5 and len(convolutions) == 5
        if factor == OURS or rest == "eager":
            assert plans() == before
        assert (got - model(x)).abs().max() < 1e-4


def test_a_decided_problem_is_asked_for_without_tensors(monkeypatch, times, runs_uncompiled):
    made, own = [], _choice._like
    monkeypatch.setattr(_choice, "_like", lambda t, generator: made.append(t) or own(t, generator))
    measured = times(THEIRS)
    convs = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(5))).eval().requires_grad_(False)
    with torch.no_grad():
        torch.compile(convs, backend=windrow, options={"rest": "inductor", "check": False})(torch.randn(1, 8, 9, 9))
    # Image, filter, bias and no residual.
    assert len(measured) == 1 and len(made) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_second_process_compiles_nothing(tmp_path):
    program = """
import torch, windrow.torch
from torch import nn
from windrow.torch.backend import windrow
convs = [nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, 8, 1)]
model = nn.Sequential(*convs).eval().requires_grad_(False).cuda()
with torch.no_grad():
    torch.compile(model, backend=windrow, options={"rest": "eager"})(torch.randn(2, 16, 32, 32, device="cuda"))
"""
    environment = {**os.environ, "WINDROW_CACHE_DIR": str(tmp_path)}
    environment.pop("WINDROW_DECISIONS", None)
    environment.pop("WINDROW_TUNE_CACHE", None)
    states = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program], check=True, env=environment)
        # An entry is written anew by whoever compiles it.
        states.append({path: path.stat().st_mtime_ns for path in (tmp_path / "cuda").iterdir()})
    assert states[0] and states[0] == states[1]
