"""`causal_conv1d_fn(cp_group=..)`: sequences whose tokens are divided among processes. This file is the test and, run
with arguments, one of the processes."""

import itertools
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common import ACTIVATIONS, DTYPES, assert_close, leaf
from torch.nn import functional as F
from windrow.torch import causal_conv1d_fn

SECONDS = 240
# Tokens of each rank. Those with fewer than width - 1 pass on what they receive.
LENGTHS = {
    2: [(16, 16), (24, 13), (3, 40), (9, 2), (2, 9), (0, 5), (5, 0), (1, 1)],
    3: [(16, 16, 16), (20, 7, 9), (7, 1, 9), (4, 0, 8), (8, 2, 0), (1, 1, 1), (0, 0, 4)],
}
LAYOUTS = [(0, 1, 2), (0, 2, 1)]


def whole(lengths, width, dtype, layout, device, dense=False, dilation=1):
    """x, weight, bias, initial states, and gradients of the output and the final states of all tokens: the same tensors
    on each rank."""
    torch.manual_seed(sum(lengths) + width)
    make = lambda *shape, **more: leaf(*shape, device=device, **more)
    outputs, length = 24, sum(lengths)
    x = make(2, 16 if dense else outputs, length, dtype=dtype, layout=layout)
    weight = make(outputs, 16, width) if dense else make(outputs, width, dtype=dtype)
    states = [make(2, x.shape[1], (width - 1) * dilation, dtype=dtype) for _ in range(2)]
    dy = make(2, outputs, length, dtype=dtype, layout=layout, grad=False)
    return [x, weight, make(outputs, dtype=dtype), states[0]], dy, states[1].detach()


def reference(x, weight, bias, initial, activation, dilation):
    """In f64, by PyTorch's convolution."""
    joined = torch.cat([initial, x], 2)
    groups = x.shape[1] if weight.dim() == 2 else 1
    taps = weight[:, None] if weight.dim() == 2 else weight
    y = F.conv1d(joined, taps, bias, dilation=dilation, groups=groups)
    return ACTIVATIONS[activation](y), joined[:, :, x.shape[2] :]


def compare(
    lengths, width, dtype, layout, activation, device, dense=False, with_initial=True, with_states=True, dilation=1
):
    """The parts' results have the bits of the whole's on one device, and gradients summed over ranks are near f64."""
    rank, case = dist.get_rank(), (lengths, width, dtype, layout, activation)
    tensors, dy, dfinal = whole(lengths, width, dtype, layout, device, dense, dilation)
    reach = (width - 1) * dilation
    x, weight, bias, initial = tensors
    initial = initial if with_initial else None
    start = sum(lengths[:rank])
    mine = slice(start, start + lengths[rank])
    options = {"activation": activation, "return_final_states": True, "dilation": dilation}

    part = x.detach()[:, :, mine].requires_grad_()
    own = [t.detach().requires_grad_() for t in (weight, bias)]
    first = initial.detach().requires_grad_() if initial is not None and rank == 0 else None
    y, states = causal_conv1d_fn(part, *own, initial_states=first, **options, cp_group=dist.group.WORLD)
    is_last = rank == len(lengths) - 1
    results = [(y, dy[:, :, mine])] + [(states, dfinal)] * (with_states and is_last)
    torch.autograd.backward(*zip(*results, strict=True))

    want, final = causal_conv1d_fn(x, weight, bias, initial_states=initial, **options)
    torch.autograd.backward([want, final], [dy, dfinal * with_states])
    joined = torch.cat([torch.zeros_like(dfinal) if initial is None else initial, x], 2)
    assert torch.equal(states, joined[:, :, mine.stop : mine.stop + reach])
    assert not is_last or torch.equal(states, final)

    wide = [t.detach().double().requires_grad_() for t in tensors]
    wide_initial = wide[3] if with_initial else torch.zeros_like(wide[3])
    exact, exact_final = reference(*wide[:3], wide_initial, activation, dilation)
    torch.autograd.backward([exact, exact_final], [dy.double(), dfinal.double() * with_states])
    assert_close(y.detach(), exact.detach()[:, :, mine], exact.abs().max())
    assert_close(part.grad, wide[0].grad[:, :, mine], wide[0].grad.abs().max())
    if not dense:
        assert torch.equal(y, want[:, :, mine])
        # A gradient of the final states that reaches an earlier rank is added last there. On GPUs a part with states may
        # have another kernel than the whole, which adds in another order.
        if device == "cpu" and (is_last or not with_states or sum(lengths[rank + 1 :]) >= reach):
            assert torch.equal(part.grad, x.grad[:, :, mine]), case
            assert first is None or torch.equal(first.grad, initial.grad), case
    if first is not None:
        assert_close(first.grad, wide[3].grad)
    assert y.stride(1) < y.stride(2) or layout == (0, 1, 2) or lengths[rank] < 2
    for got, of in zip(own, wide[1:3], strict=True):
        total = got.grad.float()
        dist.all_reduce(total)
        assert_close(total.to(dtype), of.grad)


def values_and_gradients(device, world):
    # A GPU compiles kernels for each width and activation.
    is_cpu = device == "cpu"
    for lengths, width, layout in itertools.product(LENGTHS[world], [2, 4, 7] if is_cpu else [4], LAYOUTS):
        compare(lengths, width, torch.float32, layout, "silu", device)
    for lengths, layout in itertools.product(LENGTHS[world], LAYOUTS):
        compare(lengths, 3, torch.float32, layout, "silu", device, dilation=5)
    even = LENGTHS[world][0]
    for dtype, activation, layout in itertools.product(DTYPES, ACTIVATIONS if is_cpu else [None, "silu"], LAYOUTS):
        compare(even, 4, dtype, layout, activation, device, with_initial=False, with_states=False)
    for lengths in LENGTHS[world]:
        compare(lengths, 4, torch.bfloat16, (0, 2, 1), "silu", device, with_states=False)
        compare(lengths, 4, torch.float32, (0, 1, 2), "silu", device, dense=True)


def states_of_every_rank(device, world):
    """Final states of ranks in the middle have gradients, too."""
    rank, lengths, width = dist.get_rank(), LENGTHS[world][-2], 4
    (x, weight, bias, initial), _, dfinal = whole(lengths, width, torch.float32, (0, 1, 2), device)
    start = sum(lengths[:rank])
    part = x.detach()[:, :, start : start + lengths[rank]].requires_grad_()
    given = initial if rank == 0 else None
    _, states = causal_conv1d_fn(part, weight, bias, None, given, True, cp_group=dist.group.WORLD)
    (states * dfinal).sum().backward()
    joined = torch.cat([initial, x], 2)
    want = sum((joined[:, :, e : e + width - 1] * dfinal).sum() for e in itertools.accumulate(lengths))
    dx, dinitial = torch.autograd.grad(want, [x, initial])
    torch.testing.assert_close(part.grad, dx[:, :, start : start + lengths[rank]])
    if rank == 0:
        torch.testing.assert_close(initial.grad, dinitial)


def other_options(device, world):
    rank, group = dist.get_rank(), dist.group.WORLD
    lengths = LENGTHS[world][1]
    (x, weight, bias, _), _, _ = whole(lengths, 4, torch.float32, (0, 1, 2), device)
    start = sum(lengths[:rank])
    mine = slice(start, start + lengths[rank])
    part = x.detach()[:, :, mine]
    want = causal_conv1d_fn(x, weight, bias, activation="silu")[:, :, mine]
    got = causal_conv1d_fn(part, weight, bias, activation="silu", batch_invariant=True, cp_group=group)
    assert torch.equal(got, want)
    memory = torch.zeros(2, 24, 3, device=device)
    _, states = causal_conv1d_fn(
        part, weight, bias, return_final_states=True, final_states_out=memory, cp_group=group
    )
    joined = torch.cat([torch.zeros_like(memory), x], 2)
    assert states is memory and torch.equal(memory, joined[:, :, mine.stop : mine.stop + 3])
    one = causal_conv1d_fn(part, weight[:, :1], activation="silu", cp_group=group)
    assert torch.equal(one, causal_conv1d_fn(part, weight[:, :1], activation="silu"))
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        want = causal_conv1d_fn(x, weight, bias)[:, :, mine]
        assert torch.equal(causal_conv1d_fn(part, weight, bias, cp_group=group), want) and want.dtype == torch.bfloat16
    # Only the first of these needs a gradient.
    dx = torch.autograd.grad(causal_conv1d_fn(part.requires_grad_(), weight.detach(), cp_group=group).sum(), part)[0]
    want = torch.autograd.grad(causal_conv1d_fn(x, weight.detach()).sum(), x)[0][:, :, mine]
    assert torch.equal(dx, want)
    (dx,) = torch.autograd.grad(causal_conv1d_fn(part, weight, cp_group=group).sum(), part, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward: windrow.torch.causal_conv1d"):
        dx.sum().backward()


def compiled(device, world):
    """A graph break, and the same values."""
    lengths, rank = LENGTHS[world][0], dist.get_rank()
    (x, weight, bias, _), _, _ = whole(lengths, 4, torch.float32, (0, 1, 2), device)
    start = sum(lengths[:rank])
    part = x.detach()[:, :, start : start + lengths[rank]]

    def function(x, weight):
        return causal_conv1d_fn(x + 1, weight, bias, activation="silu", cp_group=dist.group.WORLD) * 2

    results = [f(part, weight) for f in (function, torch.compile(function, backend="eager"))]
    torch.testing.assert_close(results[1], results[0])
    grads = [torch.autograd.grad(r.sum(), weight)[0] for r in results]
    torch.testing.assert_close(grads[1], grads[0])


def errors(device, world):
    """Wrong arguments of one rank, which sends nothing: the call after them works."""
    rank, group = dist.get_rank(), dist.group.WORLD
    x, weight = torch.randn(1, 8, 6, device=device), torch.randn(8, 4, device=device)
    index = torch.zeros(1, 6, dtype=torch.int32, device=device)
    wrong = {
        "`seq_idx` is given, expected None with `cp_group`": {"seq_idx": index},
        "`cu_seqlens` is given, expected None with `cp_group`": {"cu_seqlens": index[0, :2]},
        "`split` is given, expected None with `cp_group`": {"split": [8]},
        "`activation` is tanh": {"activation": "tanh"},
    }
    states = torch.zeros(1, 8, 3, device=device)
    if rank == 0:
        wrong["`initial_states` has shape"] = {"initial_states": states[:, :, :2]}
        for message, options in wrong.items():
            with pytest.raises(ValueError, match=message):
                causal_conv1d_fn(x, weight, **options, cp_group=group)
        with pytest.raises(ValueError, match="`weight` has shape"):
            causal_conv1d_fn(x, weight[:4], cp_group=group)
        with pytest.raises(TypeError, match="`cp_group` is 3, expected a torch.distributed.ProcessGroup"):
            causal_conv1d_fn(x, weight, cp_group=3)
    if rank == 1:
        with pytest.raises(ValueError, match="is given on rank 1 of `cp_group`, expected on rank 0 only"):
            causal_conv1d_fn(x, weight, initial_states=states, cp_group=group)
    alone = dist.new_group([0])
    if rank == 0:
        assert torch.equal(causal_conv1d_fn(x, weight, cp_group=alone), causal_conv1d_fn(x, weight))
    else:
        with pytest.raises(TypeError, match="expected a torch.distributed.ProcessGroup with this process"):
            causal_conv1d_fn(x, weight, cp_group=alone)
    compare(LENGTHS[world][0], 4, torch.float32, (0, 1, 2), None, device)


def a_rank_that_does_not_call(device, world):
    """The others get an error when the group's time is over."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        begin = time.monotonic()
        with pytest.raises(RuntimeError):
            causal_conv1d_fn(torch.randn(1, 8, 6), torch.randn(8, 4), cp_group=group)
        assert time.monotonic() - begin < 30
    dist.barrier()


def process(backend, rank, world, store):
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    values_and_gradients(device, world)
    states_of_every_rank(device, world)
    other_options(device, world)
    errors(device, world)
    if world == 2:
        compiled(device, world)
    if backend == "gloo":
        a_rank_that_does_not_call(device, world)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_parts_equal_the_whole(backend, world, tmp_path):
    if backend == "nccl" and torch.cuda.device_count() < world:
        pytest.skip(f"fewer than {world} GPUs")
    command = [sys.executable, "-X", "faulthandler", Path(__file__), backend]
    arguments = [[*command, str(rank), str(world), tmp_path / "store"] for rank in range(world)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen(a, stderr=subprocess.PIPE, text=True, env=environment) for a in arguments]
    try:
        outcomes = [(rank.communicate(timeout=SECONDS)[1], rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(status == 0 for _, status in outcomes), "\n".join(words for words, _ in outcomes)


if __name__ == "__main__":
    process(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    # As in test_distributed.py: gloo's threads may still need the interpreter, which would end before them.
    sys.stderr.flush()
    os._exit(0)
