"""On a GPU: streams, graphs, compiled functions, and arrays of every library."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import windrow
from common import each_dtype, leaf
from windrow.torch import causal_conv1d_fn, causal_conv1d_update, conv2d, gelu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# A few milliseconds of work, so that what is not ordered after it comes too early.
BUSY_CYCLES = 10_000_000


def calls(device="cuda"):
    """A call of each operator, and the tensor that it reads."""
    x = leaf(2, 64, 96, device=device, grad=False)
    image = leaf(2, 16, 12, 12, device=device, grad=False)
    weight, filters = (leaf(*s, device=device, grad=False) for s in [(64, 4), (24, 16, 3, 3)])
    return {
        "gelu": (lambda: gelu(x), x),
        "causal_conv1d": (lambda: causal_conv1d_fn(x, weight, activation="silu"), x),
        "conv2d": (lambda: conv2d(image, filters, padding=1), image),
    }


each_call = pytest.mark.parametrize("name", ["gelu", "causal_conv1d", "conv2d"])


@each_call
def test_ordered_on_the_current_stream(name):
    call, x = calls()[name]
    want, values = call(), x.clone()
    x.fill_(float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY_CYCLES)
        x.copy_(values)
        y = call()
        torch.cuda._sleep(BUSY_CYCLES)
        x.fill_(float("nan"))
    side.synchronize()
    assert torch.equal(y, want)


@each_call
def test_in_a_graph(name):
    call, x = calls()[name]
    call()  # Compiles the kernel, which a capture does not allow.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, call())


def test_decoding_in_a_graph():
    x, weight = leaf(2, 64, device="cuda", grad=False), leaf(64, 4, device="cuda", grad=False)
    state = torch.zeros(2, 64, 3, device="cuda")
    causal_conv1d_update(x, state, weight, None, "silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = causal_conv1d_update(x, state, weight, None, "silu")
    state.zero_()
    tokens = leaf(2, 64, 5, device="cuda", grad=False)
    want = causal_conv1d_fn(tokens, weight, activation="silu")
    for t in range(5):
        x.copy_(tokens[:, :, t])
        graph.replay()
        torch.testing.assert_close(y, want[:, :, t])
    assert torch.equal(state, tokens[:, :, -3:])


@each_dtype
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(dtype, mode):
    x = leaf(2, 16, 24, dtype=dtype, device="cuda", grad=False)
    weight = leaf(16, 4, dtype=dtype, device="cuda", grad=False)

    def function(x):
        return gelu(causal_conv1d_fn(x * 2, weight, activation="silu") + 1)

    compiled = torch.compile(function, fullgraph=True, mode=mode)
    for _ in range(4):
        torch.testing.assert_close(compiled(x).clone(), function(x), atol=2e-2, rtol=2e-2)


def test_copied_in_and_out():
    x, weight = np.random.randn(2, 6, 9).astype(np.float32), np.random.randn(6, 4).astype(np.float32)
    want = windrow.causal_conv1d(x, weight, activation="silu")
    for given in (x, np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1)):
        y, states = windrow.causal_conv1d(
            given, weight, activation="silu", return_final_states=True, device="cuda:0"
        )
        assert type(y) is np.ndarray
        np.testing.assert_allclose(y, want, atol=1e-5)
        assert (states == x[:, :, -3:]).all()
    memory = np.zeros((2, 18, 6), np.float32)
    out = memory[:, ::2].transpose(0, 2, 1)
    assert windrow.causal_conv1d(x, weight, activation="silu", out=out, device="cuda:0") is out
    np.testing.assert_allclose(out, want, atol=1e-5)
    assert (memory[:, 1::2] == 0).all()

    state = np.zeros((2, 6, 3), np.float32)
    y = windrow.causal_conv1d_update(x[:, :, 0], state, weight, None, "silu", device="cuda:0")
    np.testing.assert_allclose(y, want[:, :, 0], atol=1e-5)
    assert (state[:, :, 2] == x[:, :, 0]).all() and (state[:, :, :2] == 0).all()

    image, filters = np.random.randn(1, 8, 9, 9), np.random.randn(4, 8, 3, 3)
    image, filters = image.astype(np.float32), filters.astype(np.float32)
    want = windrow.conv2d(image, filters)
    np.testing.assert_allclose(windrow.conv2d(image, filters, device="cuda:0"), want, atol=1e-3)
    plan = windrow.Conv2dPlan(image, filters, device="cuda:0")
    assert "cuda:0" in plan.explain()
    np.testing.assert_allclose(plan(image, plan.pack(filters)), want, atol=1e-3)
    with pytest.raises(ValueError, match="`x` is on cuda:0, expected cpu"):
        windrow.gelu(torch.randn(3, device="cuda"), device="cpu")


def test_devices_that_do_not_match():
    x, weight = torch.randn(1, 4, 6, device="cuda"), torch.randn(4, 4)
    with pytest.raises(ValueError, match="weight"):
        windrow.causal_conv1d(x, weight)


@each_dtype
def test_cupy(dtype):
    cupy = pytest.importorskip("cupy")
    if dtype == torch.bfloat16:
        pytest.skip("CuPy has no bfloat16")
    x = cupy.asarray(np.random.randn(3, 40), str(dtype).removeprefix("torch."))
    y = windrow.gelu(x)
    assert isinstance(y, cupy.ndarray) and y.dtype == x.dtype
    want = F.gelu(torch.from_dlpack(x).double())
    torch.testing.assert_close(torch.from_dlpack(y).double(), want, atol=2e-3, rtol=2e-3)
    out = cupy.zeros_like(x)
    assert windrow.gelu(x, out=out) is out and (out == y).all()


def test_jax():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX does not see the GPU")
    values = np.random.randn(3, 40).astype(np.float32)
    y = windrow.gelu(jax.numpy.asarray(values))
    assert isinstance(y, jax.Array)
    np.testing.assert_allclose(np.asarray(y), windrow.gelu(values), atol=1e-5)


FORK = """
import os, sys
import torch, windrow, windrow.torch

x = torch.randn(2, 16, 12, 12, device="cuda")
module = windrow.torch.Conv2d(16, 16, 3).cuda()
with torch.no_grad():
    module(x)
torch.cuda.synchronize()
# NumPy's array needs nothing of PyTorch, which would notice the fork by itself.
image, weight = x.cpu().numpy(), module.weight.detach().cpu().numpy()
child = os.fork()
if child == 0:
    try:
        windrow.conv2d(image, weight, device="cuda:0")
    except RuntimeError as error:
        os._exit(0 if "fork" in str(error) else 2)
    finally:
        os._exit(1)
_, status = os.waitpid(child, 0)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_process_gets_an_error():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)


def wrong_indices():
    """Calls with a wrong index, and what the error says of it."""
    x, weight = leaf(1, 64, 8, device="cuda", grad=False), leaf(64, 4, device="cuda", grad=False)
    token, state = leaf(2, 64, device="cuda", grad=False), torch.zeros(3, 64, 3, device="cuda")

    def packed(*bounds):
        indices = torch.tensor(bounds, device="cuda", dtype=torch.int32)
        return lambda: causal_conv1d_fn(x, weight, cu_seqlens=indices)

    def step(**indices):
        given = {name: torch.tensor(v, device="cuda", dtype=torch.int32) for name, v in indices.items()}
        return lambda: causal_conv1d_update(token, state, weight, **given)

    slots = {"conv_state_indices": [2, 0]}
    return {
        "past the end": (packed(0, 3, 9, 8), r"cu_seqlens`\[[23]\] is [98], .* 0 to 8"),
        "falling": (packed(0, 5, 3, 8), r"cu_seqlens`\[2\] is 3"),
        "negative": (packed(0, -5, 8), r"cu_seqlens`\[1\] is -5"),
        "late start": (packed(1, 5, 8), r"cu_seqlens`\[0\] is 1"),
        "early end": (packed(0, 5, 7), r"cu_seqlens`\[2\] is 7"),
        "no state": (step(conv_state_indices=[1, 3]), r"conv_state_indices`\[1\] is 3, .* below 3"),
        "no length": (step(cache_seqlens=[4, -2], **slots), r"cache_seqlens`\[1\] is -2"),
    }, [packed(0, 0, 3, 8), packed(0, 8, 8), step(conv_state_indices=[-1, 2]), step(cache_seqlens=[4, 0], **slots)]


@pytest.mark.parametrize("captured", [False, True])
def test_wrong_indices_are_reported(captured):
    wrong, right = wrong_indices()
    for call in right:
        call()
    for call, message in wrong.values():
        run = call
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            run = graph.replay
        for _ in range(2):
            run()
            torch.cuda.synchronize()
            # A run without indices is none of the reports' business; the next one with indices hears once.
            gelu(torch.zeros(4, device="cuda"))
            with pytest.raises(IndexError, match=message):
                right[0]()
            for call in right:
                call()
            torch.cuda.synchronize()
