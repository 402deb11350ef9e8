"""The stand-in for `import causal_conv1d`."""

import subprocess
import sys

import torch
from common import leaf
from windrow.compat import causal_conv1d
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
assert fn is causal_conv1d_fn and causal_conv1d.__version__ == "1.7.0"
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
