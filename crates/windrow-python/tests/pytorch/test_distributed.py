"""Windrow's modules and operators in models that PyTorch distributes: one process per rank, as a
job has them. This file is the test and, run with arguments, one of the processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel
from windrow.torch import GELU, Conv2d, causal_conv1d_fn

WORLD = 2
# Enough for a gathered weight to come to lie where an earlier value of it lay.
STEPS = 12
SECONDS = 240


class Network(nn.Module):
    """[n, 3, 12, 12] -> [n, 5], through each of the operators."""

    def __init__(self):
        super().__init__()
        convolutions = Conv2d(3, 16, 3, padding=1), Conv2d(16, 8, 3)
        self.features = nn.Sequential(convolutions[0], GELU(), convolutions[1], GELU("tanh"))
        self.taps = nn.Parameter(torch.randn(8, 4) / 2)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        y = self.features(x).flatten(2)
        return self.head(causal_conv1d_fn(y, self.taps, activation="silu").mean(-1))


def distributed_data_parallel(model, device):
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def fully_sharded_data_parallel(model, device):
    return fsdp.FullyShardedDataParallel(model, device_id=device, use_orig_params=True)


def fully_sharded_by_module(model, device):
    mesh = dist.device_mesh.init_device_mesh(device.type, (WORLD,))
    sharded = [fsdp.fully_shard(module, mesh=mesh) for module in (model.features, model)]
    for module in sharded:
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            # Else PyTorch 2.8 asks gloo for means, and gets sums.
            module.set_force_sum_reduction_for_comms(True)
    return sharded[-1]


WRAPPERS = {f.__name__: f for f in [distributed_data_parallel, fully_sharded_data_parallel]}
if hasattr(fsdp, "fully_shard"):  # From PyTorch 2.6 on.
    WRAPPERS[fully_sharded_by_module.__name__] = fully_sharded_by_module


def train(model, batches):
    """The losses of some steps, and the output after the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for x, target in batches:
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        with torch.no_grad():
            model(x)  # Packs filters, which the next step changes.
    with torch.no_grad():
        return torch.stack(losses), model(batches[0][0])


def process(wrapper, backend, rank, store):
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    alone, shared = Network().to(device), Network().to(device)
    shared.load_state_dict(alone.state_dict())
    x, target = torch.randn(STEPS, 4 * WORLD, 3, 12, 12), torch.randn(STEPS, 4 * WORLD, 5)
    batches = list(zip(x.to(device), target.to(device), strict=True))
    mine = [(x.chunk(WORLD)[rank], target.chunk(WORLD)[rank]) for x, target in batches]

    want_losses, want = train(alone, batches)
    losses, got = train(WRAPPERS[wrapper](shared, device), mine)
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / WORLD, want_losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, want.chunk(WORLD)[rank], rtol=1e-3, atol=1e-4)
    assert want_losses.diff().abs().min() > 1e-3, "the model has to change"
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_training_equals_one_process(wrapper, backend, tmp_path):
    if backend == "nccl" and torch.cuda.device_count() < WORLD:
        pytest.skip("fewer than two GPUs")
    command = [sys.executable, "-X", "faulthandler", Path(__file__), wrapper, backend]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), tmp_path / "store"], stderr=subprocess.PIPE, text=True
        )
        for rank in range(WORLD)
    ]
    try:
        outcomes = [(rank.communicate(timeout=SECONDS)[1], rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(status == 0 for _, status in outcomes), "\n".join(words for words, _ in outcomes)


if __name__ == "__main__":
    process(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    # Not by way of the interpreter's end: gloo's threads may still let go of tensors, for which they need the interpreter,
    # and a thread that asks for it then is ended in the midst of a destructor, which aborts the process.
    sys.stderr.flush()
    os._exit(0)
