"""Causal convolutions whose taps are some tokens apart: `dilation`."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import windrow
from common import ACTIVATIONS, compare_with_f64, each_device, each_dtype, leaf
from windrow.torch import causal_conv1d_fn


def plain(x, weight, bias=None, state=None, activation=None, *, dilation):
    """By PyTorch's convolution behind zeros or a state."""
    groups = x.shape[1] if weight.dim() == 2 else 1
    history = (weight.shape[-1] - 1) * dilation
    joined = F.pad(x, (history, 0)) if state is None else torch.cat([state, x], 2)
    weight = weight[:, None] if weight.dim() == 2 else weight
    return ACTIVATIONS[activation](F.conv1d(joined, weight, bias, dilation=dilation, groups=groups))


@each_device
@each_dtype
@pytest.mark.parametrize("layout", [(0, 1, 2), (0, 2, 1)])
@pytest.mark.parametrize("shape", [(24,), (7, 24)], ids=["depthwise", "dense"])
def test_values_and_gradients(device, dtype, layout, shape):
    for width, dilation, length in itertools.product([1, 3, 4], [2, 9, 64], [37, 130]):
        x = leaf(2, 24, length, dtype=dtype, device=device, layout=layout)
        weight, bias = leaf(*shape, width, device=device), leaf(shape[0], device=device)
        compare_with_f64(
            lambda x, w, b: causal_conv1d_fn(x, w, b, activation="silu", dilation=dilation),
            lambda x, w, b: plain(x, w, b, activation="silu", dilation=dilation),
            (x, weight, bias),
        )


@each_device
@pytest.mark.parametrize("length", [5, 40])
def test_states_have_gradients(device, length):
    x, weight, initial = leaf(2, 9, length, device=device), leaf(9, 4, device=device), leaf(2, 9, 21, device=device)
    compare_with_f64(
        lambda x, w, s: causal_conv1d_fn(x, w, initial_states=s, return_final_states=True, dilation=7),
        lambda x, w, s: (plain(x, w, state=s, dilation=7), torch.cat([s, x], 2)[:, :, -21:]),
        (x, weight, initial),
    )


@each_device
def test_packed_sequences(device):
    x, weight, states = leaf(1, 9, 60, device=device), leaf(9, 3, device=device), leaf(4, 9, 10, device=device)
    starts = torch.tensor([0, 3, 3, 31, 60], device=device)
    pieces = [slice(0, 3), slice(3, 3), slice(3, 31), slice(31, 60)]

    def apart(x, w, s):
        # PyTorch computes no output of no tokens.
        full = [(i, p) for i, p in enumerate(pieces) if p.start < p.stop]
        ys = [plain(x[:, :, p], w, state=s[i : i + 1], dilation=5) for i, p in full]
        last = [torch.cat([s[i : i + 1], x[:, :, p]], 2)[:, :, -10:] for i, p in enumerate(pieces)]
        return torch.cat(ys, 2), torch.cat(last)

    packed = lambda x, w, s: causal_conv1d_fn(
        x, w, initial_states=s, return_final_states=True, cu_seqlens=starts, dilation=5
    )
    compare_with_f64(packed, apart, (x, weight, states))
    numbers = torch.tensor([[0] * 3 + [4] * 28 + [1] * 29], dtype=torch.int32, device=device)
    y = causal_conv1d_fn(x, weight, seq_idx=numbers, dilation=5)
    torch.testing.assert_close(y, causal_conv1d_fn(x, weight, cu_seqlens=starts, dilation=5))


def test_split_and_batch_invariant():
    x, weight = leaf(3, 24, 50), leaf(24, 4)
    whole = causal_conv1d_fn(x, weight, activation="silu", dilation=6, batch_invariant=True)
    ys = causal_conv1d_fn(x, weight, activation="silu", dilation=6, split=[8, 16], batch_invariant=True)
    assert torch.equal(torch.cat(ys, 1), whole)
    for row in range(3):
        alone = causal_conv1d_fn(x[row : row + 1], weight, activation="silu", dilation=6, batch_invariant=True)
        assert torch.equal(alone, whole[row : row + 1])
    (dx,) = torch.autograd.grad(torch.cat(ys, 1).square().sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(whole.square().sum(), x)[0])


def test_a_dilation_of_one_changes_nothing():
    x, weight = leaf(2, 24, 50, grad=False), leaf(24, 4, grad=False)
    assert torch.equal(causal_conv1d_fn(x, weight, dilation=1), causal_conv1d_fn(x, weight))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("split", [None, [8, 16]])
def test_compiled(grad, split):
    x, weight = leaf(2, 24, 40, grad=grad), leaf(24, 4, grad=grad)

    def function(x, w):
        y, last = causal_conv1d_fn(x, w, activation="silu", return_final_states=True, dilation=5, split=split)
        return torch.cat(y, 1) * 2 if split else y * 2, last

    y, last = torch.compile(function, fullgraph=True, backend="aot_eager")(x, weight)
    want, want_last = function(x, weight)
    assert torch.equal(y, want) and torch.equal(last, want_last) and last.shape == (2, 24, 15)
    if grad:
        got = torch.autograd.grad(y.square().sum(), (x, weight))
        torch.testing.assert_close(got, torch.autograd.grad(want.square().sum(), (x, weight)))


@each_device
def test_opcheck(device):
    x, weight, states = leaf(2, 9, 20, device=device), leaf(9, 4, device=device), leaf(2, 9, 6, device=device)
    args = (x, weight, None, states, None, None, "silu", True, False, 2)
    torch.library.opcheck(torch.ops.windrow.causal_conv1d.default, args)


def test_bad_dilations():
    x, weight = leaf(2, 24, 5, grad=False), leaf(24, 4, grad=False)
    for dilation in (0, -1):
        with pytest.raises(ValueError, match="`dilation` is 0, expected at least 1"):
            causal_conv1d_fn(x, weight, dilation=dilation)
        with pytest.raises(ValueError, match="`dilation` is 0"):
            windrow.causal_conv1d(x.numpy(), weight.numpy(), dilation=dilation)
    with pytest.raises(ValueError, match="history"):
        causal_conv1d_fn(x, weight, dilation=2**62)
    with pytest.raises(ValueError, match="initial_states"):
        causal_conv1d_fn(x, weight, initial_states=torch.zeros(2, 24, 3), dilation=2)


def test_numpy():
    x = np.arange(6, dtype=np.float32).reshape(1, 1, 6)
    y, state = windrow.causal_conv1d(x, np.array([[10, 1]], np.float32), dilation=2, return_final_states=True)
    assert y.tolist() == [[[0, 1, 2, 13, 24, 35]]] and state.tolist() == [[[4, 5]]]
