"""Derivatives beyond `backward`, and writes that PyTorch has to hear of: right, or an error."""

import copy
import warnings

import pytest
import torch
import windrow
from common import each_device, leaf
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from windrow import _native
from windrow.torch import (
    _fused,
    _library,
    causal_conv1d_fn,
    causal_conv1d_update,
    conv1d,
    conv2d,
    conv_transpose2d,
    gelu,
    optimize,
    patch,
)


def operators(device):
    """Each operator as a function of one tensor, and such a tensor."""
    taps, filters = leaf(4, 3, device=device, grad=False), leaf(5, 4, 3, 3, device=device, grad=False)
    state = torch.zeros(2, 4, 2, device=device)
    image, line = leaf(2, 4, 6, 6, device=device), leaf(2, 4, 6, device=device)
    bias = leaf(6, device=device, grad=False)
    return {
        "gelu": (gelu, line),
        "gelu of bias": (lambda b: gelu(line.detach(), bias=b), bias),
        "gelu of gate": (lambda g: gelu(line.detach(), gate=g), line),
        "conv2d": (lambda x: conv2d(x, filters), image),
        "conv2d of weight": (lambda w: conv2d(image.detach(), w), filters),
        "conv1d": (lambda x: conv1d(x, taps[:, None], groups=4), line),
        "conv_transpose2d": (lambda x: conv_transpose2d(x, filters.transpose(0, 1), stride=2), image),
        "causal_conv1d": (lambda x: causal_conv1d_fn(x, taps, activation="silu"), line),
        "causal_conv1d of weight": (lambda w: causal_conv1d_fn(line.detach(), w), taps),
        "causal_conv1d_update": (lambda x: causal_conv1d_update(x, state, taps), line[:, :, 0]),
    }


each_operator = pytest.mark.parametrize("name", operators("cpu"))


@each_device
@each_operator
@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_is_refused(device, name, grad):
    function, x = operators(device)[name]
    x = x.detach().requires_grad_(grad)
    tangent = torch.ones_like(x)
    refused = pytest.raises(NotImplementedError, match="forward-mode")
    with refused:
        torch.func.jvp(function, (x,), (tangent,))
    with refused:
        torch.func.jacfwd(function)(x)
    with refused, forward_ad.dual_level():
        function(forward_ad.make_dual(x, tangent))
    with torch.no_grad(), refused, forward_ad.dual_level():
        function(forward_ad.make_dual(x, tangent))
    if name != "causal_conv1d_update":  # vmap refuses what writes.
        with refused:
            torch.func.jvp(torch.vmap(function), (x[None],), (tangent[None],))
    # Tensors without a derivative are welcome there.
    with forward_ad.dual_level():
        function(x)


@each_device
@each_operator
def test_forward_over_reverse_is_refused(device, name):
    function, x = operators(device)[name]
    if name == "causal_conv1d_update":
        pytest.skip("has no gradient")
    x = x.detach().requires_grad_()
    tangent = torch.ones_like(x)
    (y,) = (function(x),)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


@each_device
@each_operator
def test_functional_gradients(device, name):
    function, x = operators(device)[name]
    x = x.detach()
    energy = lambda x: function(x).square().sum()
    if name == "causal_conv1d_update":
        with pytest.raises(NotImplementedError, match="causal_conv1d_fn"):
            torch.func.grad(energy)(x)
        return

    def wanted(x):
        x = x.clone().requires_grad_()
        energy(x).backward()
        return x.grad

    close = lambda got, want: torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    close(torch.func.grad(energy)(x), wanted(x))
    close(torch.func.grad_and_value(energy)(x), (wanted(x), energy(x)))
    several = torch.stack([x, -x, x + 1])
    each = torch.stack([wanted(x) for x in several])
    close(torch.vmap(torch.func.grad(energy))(several), each)
    close(torch.func.grad(lambda xs: torch.vmap(energy)(xs).sum())(several), each)
    y, pull = torch.func.vjp(function, x)
    close((y, *pull(2 * y)), (function(x), wanted(x)))
    close(torch.func.jacrev(function)(x), torch.autograd.functional.jacobian(function, x))
    # Gradients outside a transform, of what it returns.
    outside = x.clone().requires_grad_()
    torch.func.vjp(energy, outside)[0].backward()
    close(outside.grad, wanted(x))
    for second in (torch.func.grad(lambda x: torch.func.grad(energy)(x).sum()), torch.func.hessian(energy)):
        with pytest.raises(NotImplementedError, match="double backward|forward-mode"):
            second(x)


def test_compiled_forward_mode_is_refused():
    compiled = torch.compile(lambda x: torch.func.jvp(gelu, (x,), (torch.ones_like(x),)))
    with pytest.raises(Exception, match="forward-mode"):
        compiled(torch.randn(3))


@each_device
def test_writes_are_counted(device):
    x, out = torch.randn(4, 6, device=device), torch.empty(4, 6, device=device)
    version = out._version
    windrow.gelu(x, out=out)
    assert out._version > version

    # What is saved for a gradient is not what it was: PyTorch must notice.
    a = torch.randn(4, 6, device=device, requires_grad=True)
    b = torch.randn(4, 6, device=device)
    y = (a * b).sum()
    windrow.gelu(b, out=b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()

    state = torch.randn(2, 4, 2, device=device)
    y = (state * torch.ones(2, 4, 2, device=device, requires_grad=True)).sum()
    causal_conv1d_update(torch.randn(2, 4, device=device), state, torch.randn(4, 3, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()

    image, weight = torch.randn(1, 2, 5, 5, device=device), torch.randn(3, 2, 3, 3, device=device)
    out = torch.empty(1, 3, 3, 3, device=device)
    version = out._version
    windrow.conv2d(image, weight, out=out)
    plan = windrow.Conv2dPlan(image, weight)
    plan(image, weight, out=out)
    assert out._version >= version + 2
    line = torch.randn(2, 4, 6, device=device)
    out = torch.empty_like(line)
    version = out._version
    windrow.causal_conv1d(line, torch.randn(4, 3, device=device), out=out)
    assert out._version > version


def test_writes_to_what_counts_nothing():
    with torch.inference_mode():
        x = torch.randn(4, 6)
        assert windrow.gelu(x, out=x) is x


def test_update_has_no_gradient_but_says_so():
    x = torch.randn(2, 4, requires_grad=True)
    with torch.profiler.profile():  # The dispatcher sees the call.
        y = causal_conv1d_update(x, torch.zeros(2, 4, 2), torch.randn(4, 3))
    with pytest.raises(NotImplementedError, match="causal_conv1d_fn"):
        y.sum().backward()


@pytest.mark.skipif(not hasattr(torch.library, "register_vmap"), reason="PyTorch 2.4 has vmap's own way only")
@each_device
@each_operator
def test_vmap_does_not_warn(device, name):
    """Nor does it ask to file an issue of an operator that PyTorch does not know."""
    function, x = operators(device)[name]
    if name == "causal_conv1d_update":
        pytest.skip("vmap refuses what writes")
    x, several = x.detach(), torch.stack([x.detach(), -x.detach(), x.detach() + 1], 1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        got = torch.vmap(function, 1, 1)(several)
        for i in range(3):
            torch.testing.assert_close(got.select(1, i), function(several.select(1, i)), atol=1e-5, rtol=1e-5)
        assert torch.vmap(function)(x[None][:0]).shape == (0, *function(x).shape)


@pytest.fixture(params=["first", "ours", "theirs"])
def model(request, nothing_decided, times):
    """A patched model, called before or not, and the same of PyTorch."""
    times(2.0 if request.param == "theirs" else 0.5)
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.GELU(),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        nn.ConvTranspose2d(6, 6, 2, stride=2),
        nn.Flatten(2),
        nn.Conv1d(6, 2, 5, 2),
    )
    model = patch(copy.deepcopy(plain)).model
    if request.param != "first":
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                for _ in range(4):
                    model(leaf(2, 3, 5, 6, grad=False))
    return plain, model


def test_transforms_of_patched_models(model):
    def outcomes(model):
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        several = {name: torch.stack([p, -p]) for name, p in parameters.items()}
        call = lambda parameters, x: torch.func.functional_call(model, parameters, (x,))
        energy = lambda parameters, x: call(parameters, x[None]).square().sum()
        x = torch.linspace(-1, 1, 2 * 3 * 5 * 6).reshape(2, 3, 5, 6)
        with torch.no_grad():
            model(x)
            without_gradients = torch.vmap(model)(x[None])
        yield without_gradients
        yield torch.vmap(model)(x[None])
        yield torch.vmap(call, (0, None))(several, x)
        yield torch.func.jvp(model, (x,), (x.cos(),))
        yield torch.func.vjp(model, x)[1](torch.ones_like(model(x)))
        yield torch.vmap(torch.func.grad(energy), (None, 0))(parameters, x)
        yield torch.func.hessian(energy, 1)(parameters, x[0, :, :2, :2])
        yield torch.func.functionalize(model)(x)

    plain, patched = model
    for got, want in zip(outcomes(patched), outcomes(plain), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("factor", [0.5, 2.0], ids=["ours", "theirs"])
def test_vmap_of_optimized_models(nothing_decided, times, factor):
    times(factor)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval().requires_grad_(False)
    model = optimize(plain)
    images = leaf(3, 2, 3, 7, 6, grad=False)
    for _ in range(3):
        torch.testing.assert_close(model(images[0]), plain(images[0]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.vmap(model)(images), torch.vmap(plain)(images), atol=1e-5, rtol=1e-5)


@pytest.fixture
def run(monkeypatch):
    """How often the dispatcher was called for the convolution of compiled graphs, and a call of it."""
    found, through = [], _fused.CONV2D_FUSED._op
    counted = lambda *args, **kwargs: found.append(1) or through(*args, **kwargs)
    short = _native.ShortOperator(counted, *_library._kernels["conv2d_fused"], _fused._LAYERS)
    monkeypatch.setattr(_fused.CONV2D_FUSED, "_op", short)
    x, weight, how = torch.randn(1, 4, 5, 5), torch.randn(4, 4, 3, 3), ([1, 1], [1, 1], [1, 1], 1, None, "exact")
    return found, lambda x=x, weight=weight: _fused.CONV2D_FUSED(x, weight, None, None, *how)


def test_the_dispatcher_is_called_where_it_has_to_do(run):
    found, call = run
    y = call()
    assert not found

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **kwargs or {})

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **kwargs or {})

    for mode in (Functions(), Calls()):
        seen = []
        with mode:
            torch.testing.assert_close(call(), y)
        assert _fused.CONV2D_FUSED in seen
    with torch.autocast("cpu", torch.bfloat16):
        assert call().dtype == torch.bfloat16
    each = torch.vmap(lambda x: call(x))(torch.randn(3, 1, 4, 5, 5))
    assert each.shape == (3, 1, 4, 5, 5) and len(found) >= 4
    with pytest.raises(NotImplementedError, match="no gradient"):
        call(weight=torch.randn(4, 4, 3, 3, requires_grad=True)).sum().backward()
    with FakeTensorMode() as mode:
        assert call(*map(mode.from_tensor, (torch.randn(1, 4, 5, 5), torch.randn(4, 4, 3, 3)))).shape == (1, 4, 5, 5)
