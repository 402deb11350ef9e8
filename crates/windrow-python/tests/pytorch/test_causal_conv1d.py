"""`windrow.torch.causal_conv1d_fn` and what belongs to it."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from common import ACTIVATIONS, DTYPES, compare_with_f64, each_device, each_dtype, leaf
from windrow.torch import (
    causal_conv1d_fn,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
)


def plain(x, weight, bias=None, initial_states=None, activation=None, seq_idx=None):
    """One sequence after the other, by PyTorch's own convolution."""
    width = weight.shape[-1]
    rows = []
    for b in range(x.shape[0]):
        marks = [0] * x.shape[2] if seq_idx is None else seq_idx[b].tolist()
        pieces, start = [], 0
        for mark, group in itertools.groupby(marks):
            end = start + len(list(group))
            piece = x[b : b + 1, :, start:end]
            if mark < 0:
                pieces.append(torch.zeros_like(piece))
            else:
                before = piece.new_zeros(1, x.shape[1], width - 1)
                if start == 0 and initial_states is not None:
                    before = initial_states[b : b + 1]
                joined = torch.cat([before, piece], dim=2)
                y = F.conv1d(joined, weight[:, None], bias, groups=x.shape[1])
                pieces.append(ACTIVATIONS[activation](y))
            start = end
        rows.append(torch.cat(pieces, dim=2))
    return torch.cat(rows)


@each_device
@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", [(0, 1, 2), (0, 2, 1)])
def test_values_and_gradients(device, dtype, activation, layout):
    for width, with_bias, wide in itertools.product([1, 2, 3, 4, 7], [False, True], [False, True]):
        wide_type = torch.float32 if wide else dtype
        x = leaf(2, 24, 37, dtype=dtype, device=device, layout=layout)
        weight = leaf(24, width, dtype=wide_type, device=device)
        bias = leaf(24, dtype=wide_type, device=device) if with_bias else None
        compare_with_f64(
            lambda x, w, b: causal_conv1d_fn(x, w, b, activation=activation),
            lambda x, w, b: plain(x, w, b, activation=activation),
            (x, weight, bias),
        )


@each_device
@each_dtype
def test_states_have_gradients(device, dtype):
    x, weight = leaf(2, 9, 5, dtype=dtype, device=device), leaf(9, 4, device=device)
    initial = leaf(2, 9, 3, dtype=dtype, device=device)

    def reference(x, weight, initial):
        joined = torch.cat([initial, x], dim=2)
        return plain(x, weight, None, initial, "silu"), joined[:, :, -3:]

    compare_with_f64(
        lambda x, w, s: causal_conv1d_fn(
            x, w, initial_states=s, return_final_states=True, activation="silu"
        ),
        reference,
        (x, weight, initial),
    )
    short = x[:, :, :2].detach().requires_grad_()
    compare_with_f64(
        lambda x, w, s: causal_conv1d_fn(
            x, w, initial_states=s, return_final_states=True, activation="silu"
        ),
        reference,
        (short, weight, initial),
    )


def test_final_states_out_is_written():
    x, weight = leaf(2, 9, 5, grad=False), leaf(9, 4, grad=False)
    memory = torch.zeros(2, 3, 9).transpose(1, 2)
    _, states = causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=memory)
    assert states is memory
    assert torch.equal(memory, x[:, :, -3:])


@each_device
@pytest.mark.parametrize("with_states", [False, True])
def test_packed_by_seq_idx(device, with_states):
    seq_idx = torch.tensor([[0] * 2 + [1] * 7 + [4] * 3, [3] * 9 + [-1] * 3], dtype=torch.int32)
    seq_idx = seq_idx.to(device)
    x, weight, bias = (leaf(*s, device=device) for s in [(2, 6, 12), (6, 4), (6,)])
    states = leaf(2, 6, 3, device=device) if with_states else None
    compare_with_f64(
        lambda x, w, b, s: causal_conv1d_fn(x, w, b, seq_idx, s, activation="silu"),
        lambda x, w, b, s: plain(x, w, b, s, "silu", seq_idx),
        (x, weight, bias, states),
    )


@each_device
def test_packed_by_cu_seqlens(device):
    cu_seqlens = torch.tensor([0, 2, 2, 9, 12], dtype=torch.int32, device=device)
    x, weight, states = (leaf(*s, device=device) for s in [(1, 6, 12), (6, 4), (4, 6, 3)])

    def reference(x, weight, states):
        pieces = [
            plain(x[:, :, a:b], weight, None, states[i : i + 1], "silu")
            for i, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist()))
            if b > a
        ]
        finals = [
            torch.cat([states[i], x[0, :, a:b]], dim=1)[:, -3:]
            for i, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist()))
        ]
        return torch.cat(pieces, dim=2), torch.stack(finals)

    compare_with_f64(
        lambda x, w, s: causal_conv1d_fn(
            x,
            w,
            initial_states=s,
            cu_seqlens=cu_seqlens,
            return_final_states=True,
            activation="silu",
        ),
        reference,
        (x, weight, states),
    )


@each_device
def test_dense_weight(device):
    x, weight, bias = (leaf(*s, device=device) for s in [(2, 3, 11), (5, 3, 4), (5,)])
    compare_with_f64(
        lambda x, w, b: causal_conv1d_fn(x, w, b, activation="relu"),
        lambda x, w, b: F.relu(F.conv1d(F.pad(x, (3, 0)), w, b)),
        (x, weight, bias),
    )


@each_device
@each_dtype
@pytest.mark.parametrize("steps", [None, 1, 3])
def test_update_equals_prefill(device, dtype, steps):
    x = leaf(2, 16, 20, dtype=dtype, device=device, grad=False)
    weight, bias = (leaf(*s, device=device, grad=False) for s in [(16, 4), (16,)])
    want = causal_conv1d_fn(x, weight, bias, activation="silu")
    state = torch.zeros(2, 16, 3, dtype=dtype, device=device)
    pieces = []
    for part in x.split(steps or 1, dim=2):
        if steps is None:
            y = causal_conv1d_update(part[:, :, 0], state, weight, bias, "silu")
            pieces.append(y[:, :, None])
        else:
            pieces.append(causal_conv1d_update(part, state, weight, bias, "silu"))
    torch.testing.assert_close(torch.cat(pieces, dim=2), want)
    assert torch.equal(state, x[:, :, -3:])


def test_update_has_no_gradient():
    weight = leaf(4, 4)
    y = causal_conv1d_update(leaf(2, 4, grad=False), torch.zeros(2, 4, 3), weight)
    assert not y.requires_grad or y.grad_fn is not None
    with torch.no_grad():
        z = causal_conv1d_update(leaf(2, 4, grad=False), torch.zeros(2, 4, 3), weight)
    assert not z.requires_grad


def test_double_backward_is_refused():
    x, weight = leaf(2, 4, 6), leaf(4, 4)
    (dx,) = torch.autograd.grad(causal_conv1d_fn(x, weight).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward: windrow.torch.causal_conv1d"):
        dx.sum().backward()


def test_varlen_states():
    x = leaf(12, 5, grad=False)
    cu_seqlens = torch.tensor([0, 2, 2, 9, 12], dtype=torch.int32)
    states = causal_conv1d_varlen_states(x, cu_seqlens, 4)
    assert states.shape == (4, 5, 4)
    for i, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        want = F.pad(x[a:b].T, (4, 0))[:, -4:]
        assert torch.equal(states[i], want)
    nothing = causal_conv1d_varlen_states(x[:0], torch.zeros(3, dtype=torch.int32), 4)
    assert nothing.shape == (2, 5, 4) and (nothing == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    x, weight = leaf(2, 4, 6), leaf(4, 4)
    with torch.autocast("cpu", dtype):
        y = causal_conv1d_fn(x, weight, activation="silu")
        y.float().sum().backward()
    assert y.dtype == dtype and x.grad.dtype == torch.float32


@pytest.mark.parametrize("grad", [False, True])
def test_compiled(grad):
    def function(x, weight, states):
        y, final = causal_conv1d_fn(
            x + 1, weight, initial_states=states, return_final_states=True, activation="silu"
        )
        return y * 2, final

    compiled = torch.compile(function, fullgraph=True)
    for layout in [(0, 1, 2), (0, 2, 1)]:
        for length in [6, 6, 11]:
            tensors = [
                leaf(2, 4, length, grad=grad, layout=layout),
                leaf(4, 4, grad=grad),
                leaf(2, 4, 3, grad=grad),
            ]
            got, want = compiled(*tensors), function(*tensors)
            torch.testing.assert_close(got, want)
            assert got[0].stride() == want[0].stride()
            if grad:
                ours = torch.autograd.grad([g.sum() for g in got], tensors)
                theirs = torch.autograd.grad([w.sum() for w in want], tensors)
                torch.testing.assert_close(ours, theirs)


def test_compiled_update():
    def step(x, state, weight):
        return causal_conv1d_update(x * 2, state, weight, None, "silu") + 1

    compiled = torch.compile(step, fullgraph=True)
    weight = leaf(4, 4, grad=False)
    states = [torch.zeros(2, 4, 3), torch.zeros(2, 4, 3)]
    for _ in range(5):
        x = leaf(2, 4, grad=False)
        torch.testing.assert_close(compiled(x, states[0], weight), step(x, states[1], weight))
        assert torch.equal(*states)


@each_device
def test_opcheck(device):
    x, weight, bias = (leaf(*s, device=device) for s in [(2, 4, 6), (4, 4), (4,)])
    channel_last = leaf(2, 4, 6, device=device, layout=(0, 2, 1))
    states = leaf(2, 4, 3, device=device)
    seq_idx = torch.zeros(2, 6, dtype=torch.int32, device=device)
    operator = torch.ops.windrow.causal_conv1d.default
    torch.library.opcheck(operator, (x, weight, bias, None, None, None, "silu", False))
    torch.library.opcheck(operator, (channel_last, weight, None, states, None, None, None, True))
    torch.library.opcheck(operator, (x, weight, bias, None, seq_idx, None, "silu", False))
    tensors = [t.detach() for t in (x, weight, bias)]
    dy = leaf(2, 4, 6, device=device, grad=False)
    torch.library.opcheck(
        torch.ops.windrow.causal_conv1d_backward.default,
        (dy, None, *tensors, None, None, None, "silu", [True, True, False, False]),
    )
    torch.library.opcheck(
        torch.ops.windrow.causal_conv1d_update.default,
        (dy[:, :, 0], states.detach(), *tensors[1:], "silu", None, None),
    )


def test_every_dtype_is_kept():
    for dtype in DTYPES:
        y = causal_conv1d_fn(leaf(1, 2, 3, dtype=dtype), leaf(2, 2))
        assert y.dtype == dtype
