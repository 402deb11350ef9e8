"""Leaky ReLU, whose name has its slope, and hardswish, in every function and module."""

import copy
import io
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import windrow
from common import OURS, THEIRS, compare_with_f64, leaf, normal
from torch import nn
from windrow._activation_names import leaky_relu, slope_of, steepest_slope
from windrow.torch import causal_conv1d_fn, conv2d, conv3d, conv_transpose2d, optimize, patch
from windrow.torch._activations import activation_of
from windrow.torch.backend import _options
from windrow.torch.backend import windrow as windrow_backend

pytestmark = pytest.mark.usefixtures("nothing_decided")
needs_backend = pytest.mark.skipif(torch.__version__ < _options.OLDEST, reason="an old PyTorch, which the backend refuses")
SLOPES = [0.2, 0.01, 0.0, 1.5, -0.5]
each_slope = pytest.mark.parametrize("slope", SLOPES)


def test_names_have_slopes():
    names = ["leaky_relu(0.2)", "leaky_relu", "leaky_relu(0.0)", "leaky_relu(1.5)", "leaky_relu(-0.5)"]
    assert [leaky_relu(slope) for slope in SLOPES] == names
    assert [slope_of(name) for name in names] == SLOPES
    assert slope_of("leaky_relu(2e-1)") == 0.2 and leaky_relu(3) == "leaky_relu(3)"
    for slope in (math.inf, -math.inf, math.nan, 3.5e38):
        assert leaky_relu(slope) is None
    for name in ("relu", "leaky_relu(", "leaky_relu()", "leaky_relu(inf)", "leaky_relu(1e39)", "leaky_relu(+-1)"):
        assert slope_of(name) is None
    assert slope_of("leaky_relu( 0.2)") is slope_of("leaky_relu(1_0)") is slope_of("leaky_relu(0.2))") is None
    assert [steepest_slope(name) for name in (None, "relu", "leaky_relu(0.2)", "leaky_relu(-7)")] == [1, 1, 1, 7]


WRONG = ["leaky_relu(", "leaky_relu()", "leaky_relu(x)", "leaky_relu(nan)", "leaky_relu(1e39)", "leaky_relu(0.2) ", "relu(0.2)"]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_names_are_errors(name):
    x, weight, taps = np.ones((1, 2, 4, 4), np.float32), np.ones((2, 2, 1, 1), np.float32), np.ones((2, 3), np.float32)
    for call in (
        lambda: windrow.conv2d(x, weight, activation=name),
        lambda: windrow.causal_conv1d(x[0], taps[:2, :1].repeat(3, 1), activation=name),
        lambda: conv2d(torch.from_numpy(x), torch.from_numpy(weight), activation=name),
    ):
        with pytest.raises(ValueError, match="`activation` is|`negative_slope` is"):
            call()


@each_slope
def test_functions(slope):
    name, plain = leaky_relu(slope), lambda y: F.leaky_relu(y, slope)
    x, weight, bias = leaf(2, 3, 9, 8), leaf(4, 3, 3, 3), leaf(4)
    compare_with_f64(
        lambda x, w, b: conv2d(x, w, b, activation=name), lambda x, w, b: plain(F.conv2d(x, w, b)), (x, weight, bias)
    )
    compare_with_f64(
        lambda x, w, b: conv_transpose2d(x, w, b, activation=name),
        lambda x, w, b: plain(F.conv_transpose2d(x, w, b)),
        (x, leaf(3, 4, 3, 3), bias),
    )
    compare_with_f64(
        lambda x, w, b: conv3d(x, w, b, activation=name),
        lambda x, w, b: plain(F.conv3d(x, w, b)),
        (leaf(1, 3, 4, 6, 5), leaf(4, 3, 2, 3, 3), bias),
    )
    compare_with_f64(
        lambda x, w, b: causal_conv1d_fn(x, w, b, activation=name),
        lambda x, w, b: plain(F.conv1d(F.pad(x, (3, 0)), w[:, None], b, groups=4)),
        (leaf(2, 4, 11), leaf(4, 4), bias),
    )
    with torch.no_grad():
        torch.testing.assert_close(conv2d(x, weight, bias, activation=name), plain(F.conv2d(x, weight, bias)))


@pytest.mark.parametrize("name", ["leaky_relu(0.2)", "leaky_relu(0)", "leaky_relu(-0.5)", "hardswish"])
def test_limits(name):
    x = torch.tensor([-math.inf, -1e30, -3.0, 0.0, 3.0, 1e30, math.inf, math.nan]).reshape(1, 1, 1, 8)
    with torch.no_grad():
        y = conv2d(x, torch.ones(1, 1, 1, 1), activation=name)
    want = F.hardswish(x) if name == "hardswish" else F.leaky_relu(x, slope_of(name))
    # The limit, where PyTorch has NaN: infinity times 0.
    want[..., 0] = want[..., 0].nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    torch.testing.assert_close(y, want, rtol=1e-6, atol=0, equal_nan=True)


def model_of(activation):
    layers = [nn.Conv2d(3, 8, 3, padding=1), activation, nn.Conv2d(8, 4, 3, bias=False), copy.deepcopy(activation)]
    return normal(nn.Sequential(*layers))


ACTIVATIONS = [*(nn.LeakyReLU(slope, inplace=slope == 0.2) for slope in SLOPES), nn.Hardswish()]
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)


def name_of(activation):
    return leaky_relu(activation.negative_slope) if isinstance(activation, nn.LeakyReLU) else "hardswish"


TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
each_rest = pytest.mark.parametrize("rest", ["eager", "inductor"])


def close(got, want):
    torch.testing.assert_close(got, want, atol=TOLERANCES[got.dtype], rtol=TOLERANCES[got.dtype])


@needs_backend
@each_activation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_rest
def test_optimized(activation, dtype, rest, times, runs_uncompiled):
    times(OURS)
    model, x = model_of(activation).to(dtype), leaf(2, 3, 8, 9, dtype=dtype, grad=False)
    fast = optimize(model, rest=rest)
    with torch.no_grad():
        close(fast(x), model(x))
    report = fast.windrow_report
    assert [*report.fused.values()] == [f"{FUSED[i]}, activation='{name_of(activation)}'): {name_of(activation)}" for i in (0, 1)]
    assert not report.left


FUSED = [
    "FusedConv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1)",
    "FusedConv2d(8, 4, kernel_size=(3, 3), stride=(1, 1), bias=False",
]


@needs_backend
@each_activation
@each_rest
def test_in_half_precision_under_autocast(activation, rest, times, runs_uncompiled):
    times(OURS)
    model, x = model_of(activation), leaf(2, 3, 8, 9, grad=False)
    fast = optimize(model, rest=rest)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, want = fast(x), model(x)
    assert got.dtype == want.dtype == torch.bfloat16
    close(got, want)
    assert [what.split(": ")[-1] for what in fast.windrow_report.fused.values()] == [name_of(activation)] * 2


@needs_backend
@each_activation
@pytest.mark.parametrize("autocast", [False, True])
@each_rest
def test_training(activation, autocast, rest, times, runs_uncompiled):
    times(OURS)
    model = model_of(activation).train()
    fast = torch.compile(copy.deepcopy(model), backend=windrow_backend, options={"rest": rest})
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for got, want in zip(*(step(net, leaf(2, 3, 8, 9)) for net in (fast, model)), strict=True):
            assert (got - want).norm() <= (5e-2 if autocast else 1e-5) * want.norm() + 1e-6


def step(net, x):
    """The result and all gradients."""
    torch.manual_seed(1)
    with torch.no_grad():
        x.normal_()
    y = net(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("name", ["leaky_relu", "leaky_relu(-0.5)", "hardswish"])
@pytest.mark.parametrize("factor", [OURS, THEIRS])
def test_modules(name, factor, times):
    times(factor)
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    plain = copy.deepcopy(model)
    function = activation_of(name)
    patch(model)
    model[0].activation = name
    x = leaf(2, 3, 8, 9)
    for _ in range(3):
        close(model(x), function(plain(x)))
    got, want = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (model, lambda x: function(plain(x))))
    close(got, want)
    torch.jit.save(torch.jit.script(model), saved := io.BytesIO())
    saved.seek(0)
    close(torch.jit.load(saved)(x), function(plain(x)))
    fullgraph = torch.compile(lambda x: conv2d(x, plain[0].weight, activation=name), backend="eager", fullgraph=True)
    close(fullgraph(x), function(F.conv2d(x, plain[0].weight)))
