"""The stand-in for `import causal_conv1d`."""

import subprocess
import sys

import pytest
import torch
from common import leaf
from windrow.compat import causal_conv1d, causal_conv1d_cuda
from windrow.compat.causal_conv1d import causal_conv1d_interface as interface
from windrow.compat.causal_conv1d import causal_conv1d_varlen as varlen
from windrow.compat.causal_conv1d.cpp_functions import (
    causal_conv1d_bwd_function,
    causal_conv1d_fwd_function,
    causal_conv1d_update_function,
)


def test_install():
    code = """
import windrow.compat.causal_conv1d
windrow.compat.causal_conv1d.install()
windrow.compat.causal_conv1d.install()
import importlib.util
assert importlib.util.find_spec("causal_conv1d") is not None
import causal_conv1d
from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn as fn
from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states
from causal_conv1d.cpp_functions import causal_conv1d_fwd_function
from causal_conv1d.causal_conv1d_interface import causal_conv1d_ref, causal_conv1d_update_ref
import causal_conv1d_cuda
assert fn is causal_conv1d_fn and causal_conv1d.__version__ == "1.7.0"
assert causal_conv1d_cuda.causal_conv1d_fwd
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "causal_conv1d" not in sys.modules


def test_another_package_is_not_replaced(tmp_path):
    (tmp_path / "causal_conv1d.py").write_text("")
    code = """
import causal_conv1d, windrow.compat.causal_conv1d
try:
    windrow.compat.causal_conv1d.install()
except RuntimeError as e:
    assert "another causal_conv1d" in str(e)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_functions_below_autograd():
    x, weight, bias = leaf(2, 6, 9), leaf(6, 4), leaf(6)
    y = causal_conv1d.causal_conv1d_fn(x, weight, bias, activation="silu")
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, [x, weight, bias], dy)
    with torch.no_grad():
        states = torch.zeros(2, 6, 3)
        forward = causal_conv1d_fwd_function(x, weight, bias, None, None, states, True)
        assert torch.equal(forward, y) and torch.equal(states, x[:, :, -3:])
        dx = torch.zeros_like(x)
        got = causal_conv1d_bwd_function(
            x, weight, bias, dy, None, None, None, dx, False, True
        )
        assert got[0] is dx and got[3] is None
        for g, w in zip(got, want, strict=False):
            assert torch.equal(g, w)
        state = torch.zeros(2, 6, 3)
        step = causal_conv1d_update_function(x[:, :, 0], state, weight, bias, True, None, None)
        torch.testing.assert_close(step, y[:, :, 0])


FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("of_weight", FLOATS)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_types_of_x_and_weight_apart(dtype, of_weight, width, activation):
    """Each with each, as the original computes them: sums in f32, gradients in the type of what they are of."""
    x, weight, bias = leaf(2, 6, 9, dtype=dtype), leaf(6, width, dtype=of_weight), leaf(6, dtype=of_weight)
    states = leaf(2, 6, width - 1, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias, states)]
    for given in (None, states):
        how = {"initial_states": given, "activation": activation, "return_final_states": True}
        y, final = interface.causal_conv1d_fn(x, weight, bias, **how)
        before = None if given is None else wide[3]
        want, want_final = interface.causal_conv1d_ref(*wide[:3], before, True, None, activation)
        tolerance = {"atol": 3e-2, "rtol": 2e-2} if dtype != torch.float32 else {"atol": 1e-5, "rtol": 1e-5}
        torch.testing.assert_close(y, want.to(dtype), **tolerance)
        torch.testing.assert_close(final, want_final.to(dtype))
        got = torch.autograd.grad(y.float().sum(), [x, weight, bias])
        theirs = torch.autograd.grad(want.sum(), wide[:3])
        for g, t, w in zip(got, theirs, (x, weight, bias), strict=True):
            assert g.dtype == w.dtype
            torch.testing.assert_close(g.double(), t, atol=0.3, rtol=4e-2)
    with torch.no_grad():
        state = torch.zeros(2, 6, max(1, width - 1), dtype=dtype)
        other = state.clone()
        for column in range(3):
            step = interface.causal_conv1d_update(x[..., column], state, weight, bias, activation)
            want = interface.causal_conv1d_update_ref(x[..., column], other, weight.float(), bias.float(), activation)
            torch.testing.assert_close(step, want, **tolerance)
        assert torch.equal(state, other)


def test_a_type_that_nobody_computes_is_refused():
    x, weight = torch.randn(2, 6, 9), torch.randn(6, 4, dtype=torch.float64)
    with pytest.raises(TypeError, match="weight"):
        interface.causal_conv1d_fn(x, weight)
    with pytest.raises(TypeError, match="weight"):
        interface.causal_conv1d_update(x[..., 0], torch.zeros(2, 6, 3), weight)


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("activation", [None, "swish"])
def test_references(length, activation):
    x, weight, bias, states = leaf(2, 6, length), leaf(6, 4), leaf(6), leaf(2, 6, 3)
    for given in (None, states):
        out = torch.empty(2, 6, 3)
        y, final = interface.causal_conv1d_ref(x, weight, bias, given, True, out, activation)
        want, want_final = interface.causal_conv1d_fn(x, weight, bias, None, given, True, None, activation)
        assert final is out
        torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(final, want_final)
    for lengths in (None, torch.tensor([0, 7], dtype=torch.int32)):
        state, other = torch.randn(2, 6, 12), torch.empty(2, 6, 12)
        other.copy_(state)
        with torch.no_grad():
            y = interface.causal_conv1d_update_ref(x, state, weight, bias, activation, lengths)
            want = interface.causal_conv1d_update(x, other, weight, bias, activation, lengths)
        torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)
        assert torch.equal(state, other)
    with pytest.raises(NotImplementedError, match="`activation` is 'relu'"):
        interface.causal_conv1d_ref(x, weight, activation="relu")
    tokens, bounds = torch.randn(10, 6), torch.tensor([0, 2, 2, 10], dtype=torch.int32)
    states = varlen.causal_conv1d_varlen_states(tokens, bounds, 4)
    assert torch.equal(states, varlen.causal_conv1d_varlen_states_ref(tokens, bounds, 4))


def test_the_extension():
    """As mamba_ssm up to 2.2.4 calls it, and as causal-conv1d from 1.5.1 on does."""
    x, weight, bias, states = leaf(2, 6, 9), leaf(6, 4), leaf(6), leaf(2, 6, 3)
    y = causal_conv1d.causal_conv1d_fn(x, weight, bias, initial_states=states, activation="silu")
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, [x, weight, bias, states], dy)
    with torch.no_grad():
        assert torch.equal(causal_conv1d_cuda.causal_conv1d_fwd(x, weight, bias, None, states, None, True), y)
        out = torch.empty_like(y)
        assert causal_conv1d_cuda.causal_conv1d_fwd(x, weight, bias, None, states, out, None, True) is None
        assert torch.equal(out, y)
        dx = torch.empty_like(x)
        got = causal_conv1d_cuda.causal_conv1d_bwd(x, weight, bias, dy, None, states, None, dx, True, True)
        assert got[0] is dx and all(map(torch.equal, got, want))
        outs = [torch.zeros_like(t) for t in (x, weight, bias, states)]
        left = causal_conv1d_cuda.causal_conv1d_bwd(x, weight, bias, dy, None, states, None, *outs, True)
        assert left is None and all(map(torch.equal, outs, want))
        ours, theirs = torch.zeros(2, 6, 3), torch.zeros(2, 6, 3)
        step = causal_conv1d.causal_conv1d_update(x[..., 0], ours, weight, bias, "silu")
        rest = (x[..., 0], theirs, weight, bias)
        assert torch.equal(causal_conv1d_cuda.causal_conv1d_update(*rest, True, None, None), step)
        theirs.zero_()
        out = torch.empty_like(step)
        assert causal_conv1d_cuda.causal_conv1d_update(*rest, out, True, None, None) is None
        assert torch.equal(out, step) and torch.equal(ours, theirs)
