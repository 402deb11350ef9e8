"""Derivatives beyond `backward`, and writes that PyTorch has to hear of: right, or an error."""

import pytest
import torch
import windrow
from common import each_device, leaf
from torch.autograd import forward_ad
from windrow.torch import causal_conv1d_fn, causal_conv1d_update, conv2d, gelu


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


@each_operator
def test_functional_gradients_are_refused(name):
    # PyTorch's words, for all operators registered from Python.
    function, x = operators("cpu")[name]
    x = x.detach()
    refused = pytest.raises((RuntimeError, ValueError), match="functorch|gradient")
    with refused:
        torch.func.grad(lambda x: function(x).sum())(x)
    with refused:
        torch.func.vjp(function, x)[1](torch.ones_like(function(x)))
    with refused:
        torch.func.jacrev(function)(x)


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
