"""Torch tensors through the functions that take any array."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import windrow
import windrow.torch
from common import each_device, each_dtype, leaf
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode


@each_device
@each_dtype
def test_tensors_in_tensors_out(device, dtype):
    x = leaf(3, 40, dtype=dtype, device=device, grad=False)
    y = windrow.gelu(x)
    assert type(y) is torch.Tensor and y.dtype == dtype and y.device == x.device
    torch.testing.assert_close(y, F.gelu(x), atol=1e-2, rtol=1e-2)
    out = torch.empty_like(x.T).T
    assert windrow.gelu(x, out=out) is out
    assert torch.equal(out, y)


def test_result_is_an_ordinary_tensor():
    y = windrow.gelu(torch.randn(300, 300))
    y += 1
    assert y.untyped_storage().nbytes() >= y.nbytes
    assert not y.requires_grad and torch.equal(y.clone(), y)


def test_layout_of_results_is_that_of_empty_like():
    generator = torch.Generator().manual_seed(0)
    for _ in range(500):
        rank = int(torch.randint(1, 5, (), generator=generator))
        shape = torch.randint(1, 4, (rank,), generator=generator).tolist()
        steps = torch.randint(1, 3, (rank,), generator=generator).tolist()
        order = torch.randperm(rank, generator=generator).tolist()
        base = torch.randn([n * s for n, s in zip(shape, steps, strict=True)])
        x = base[tuple(slice(None, None, s) for s in steps)].permute(order)
        if rank > 1 and torch.rand((), generator=generator) < 0.2:
            x = x[:, :1].expand(x.shape)
        want = torch.empty_like(x)
        assert windrow.gelu(x).stride() == want.stride(), (x.shape, x.stride())


def test_lazily_negated_tensor_is_not_misread():
    z = torch.randn(4, 5, dtype=torch.complex64)
    x = z.conj().imag
    assert x.is_neg()
    with pytest.raises(ValueError, match="resolve_neg"):
        windrow.gelu(x)
    torch.testing.assert_close(windrow.torch.gelu(x), F.gelu(x))


def test_tensors_without_memory():
    with pytest.raises(ValueError, match="cannot be used in place"):
        windrow.gelu(torch.randn(3).to_sparse())
    with pytest.raises(ValueError, match="cannot be used in place"):
        windrow.gelu(torch.empty(3, device="meta"))


def test_meta_tensors_give_shapes():
    x = torch.empty(2, 3, 8, 9, device="meta")
    assert windrow.torch.gelu(x).shape == x.shape
    weight = torch.empty(4, 3, 3, 3, device="meta")
    assert windrow.torch.conv2d(x, weight).shape == (2, 4, 6, 7)


def test_short_cut_is_taken_only_where_nothing_is_lost():
    plain = windrow._native.is_plain
    x, w = torch.randn(3), torch.nn.Parameter(torch.randn(3))
    assert plain(x, None, x.half()) and plain()
    assert not plain(x, w)
    with torch.no_grad():
        assert plain(x, w)
    assert not plain(x, 3)
    with FlopCounterMode(display=False):
        assert not plain(x)
    with torch.profiler.profile():
        assert not plain(x)
    seen = []
    traced = torch.jit.trace(lambda t: seen.append(plain(t)) or t + 1, x, check_trace=False)
    assert seen == [False] and traced(x) is not None
    with torch.inference_mode():
        assert plain(torch.randn(3))


def test_traced_graphs_hold_the_operator():
    graph = make_fx(lambda x: windrow.torch.gelu(x) + 1)(torch.randn(3))
    assert "windrow.gelu" in graph.code


def test_vmap():
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.vmap(windrow.torch.gelu, in_dims=1)(x), F.gelu(x).T)


def test_profiler_sees_the_operators():
    x = torch.randn(3)
    with torch.profiler.profile() as profile:
        windrow.torch.gelu(x)
    assert "windrow::gelu" in {e.key for e in profile.key_averages()}


def test_numpy_functions_do_not_import_torch():
    code = "import sys, windrow; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
