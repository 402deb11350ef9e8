"""`windrow.torch.gelu` and `GELU`."""

import pytest
import torch
import torch.nn.functional as F
from common import compare_with_f64, each_device, each_dtype, leaf
from windrow.torch import GELU, gelu

each_form = pytest.mark.parametrize("approximate", ["none", "tanh"])


def plain(x, bias=None, gate=None, approximate="none"):
    x = x if bias is None else x + bias
    y = F.gelu(x, approximate=approximate)
    return y if gate is None else y * gate


@each_device
@each_dtype
@each_form
@pytest.mark.parametrize("layout", [(0, 1, 2), (2, 0, 1)])
def test_values_and_gradients(device, dtype, approximate, layout):
    x = leaf(3, 17, 40, dtype=dtype, device=device, layout=layout)
    bias = leaf(40, dtype=dtype, device=device)
    gate = leaf(3, 17, 40, dtype=dtype, device=device)
    for tensors in [(x,), (x, bias), (x, None, gate), (x, bias, gate)]:
        compare_with_f64(
            lambda x, bias=None, gate=None: gelu(x, approximate, bias=bias, gate=gate),
            lambda *t: plain(*t, approximate=approximate),
            tensors,
        )


def test_some_gradients_only():
    x, bias, gate = leaf(4, 8, grad=False), leaf(8), leaf(4, 8, grad=False)
    y = gelu(x, bias=bias, gate=gate)
    y.sum().backward()
    assert x.grad is None and gate.grad is None and bias.grad is not None


def test_gradient_of_a_sum():
    # The gradient that arrives is one number, broadcast by strides of zero.
    x = leaf(5, 6)
    y = x.detach().clone().requires_grad_()
    gelu(x).sum().backward()
    F.gelu(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_double_backward_is_refused():
    x = leaf(3, 4)
    (dx,) = torch.autograd.grad(gelu(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward: windrow.torch.gelu"):
        dx.sum().backward()


def test_module():
    module = GELU("tanh")
    assert isinstance(module, torch.nn.GELU)
    x = leaf(3, 4, grad=False)
    torch.testing.assert_close(module(x), F.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("grad", [False, True])
def test_compiled(grad):
    def function(x, bias, gate):
        return gelu(x * 2, "tanh", bias=bias, gate=gate) + 1

    compiled = torch.compile(function, fullgraph=True)
    for rows in [4, 4, 9]:
        tensors = [leaf(rows, 8, grad=grad), leaf(8, grad=grad), leaf(rows, 8, grad=grad)]
        y, want = compiled(*tensors), function(*tensors)
        torch.testing.assert_close(y, want)
        if grad:
            ours = torch.autograd.grad(y.sum(), tensors)
            theirs = torch.autograd.grad(want.sum(), tensors)
            torch.testing.assert_close(ours, theirs)


@each_device
def test_opcheck(device):
    x, bias, gate = leaf(3, 5, device=device), leaf(5, device=device), leaf(3, 5, device=device)
    for args in [(x, None, None), (x, bias, None), (x.detach().T, None, gate.detach().T)]:
        torch.library.opcheck(torch.ops.windrow.gelu.default, (*args, "none"))
    dy = leaf(3, 5, device=device, grad=False)
    tensors = [t.detach() for t in (x, bias, gate)]
    torch.library.opcheck(
        torch.ops.windrow.gelu_backward.default, (dy, *tensors, "tanh", [True, False, True])
    )
