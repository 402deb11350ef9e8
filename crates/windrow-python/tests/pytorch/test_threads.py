"""One module called from many threads, from the first call on."""

import subprocess
import sys

import pytest
from common import DEVICES

SECONDS = 180

SCRIPT = """
import sys, threading
import torch, windrow.torch

THREADS = 32
device = sys.argv[1]
torch.manual_seed(0)
torch.backends.cudnn.allow_tf32 = False
module = windrow.torch.Conv2d(128, 256, 3, padding=1).to(device)
x = torch.randn(1, 128, 14, 14, device=device)
want = torch.nn.functional.conv2d(x.double(), module.weight.double(), module.bias.double(), padding=1)
start, results = threading.Barrier(THREADS), [None] * THREADS

def call(i):
    start.wait()
    for _ in range(4):
        if i % 4:
            with torch.no_grad():
                y = module(x)
        else:
            y = module(x)
            y.sum().backward()
    results[i] = y.detach()

threads = [threading.Thread(target=call, args=(i,)) for i in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert all(((y - want).abs() <= 1e-5 * want.abs().max()).all() for y in results)
"""


@pytest.mark.parametrize("device", DEVICES)
def test_one_module_in_many_threads(device):
    subprocess.run([sys.executable, "-c", SCRIPT, device], check=True, timeout=SECONDS)


FLUSHING = """
import torch, windrow.torch

torch.manual_seed(0)
torch.set_num_threads(2)
# Subnormal numbers, and numbers whose products with the weights are.
x = torch.randn(2, 64, 64, 64) * 1e-38
conv2d, causal = torch.randn(32, 64, 3, 3), torch.randn(64, 4)
calls = {
    "gelu": lambda: windrow.torch.gelu(x),
    "causal_conv1d": lambda: windrow.torch.causal_conv1d_fn(x.flatten(2), causal),
    "conv2d": lambda: windrow.torch.conv2d(x, conv2d, padding=1),
    "7x7": lambda: windrow.torch.conv2d(x, torch.ones(4, 64, 7, 7)),
}
for name, call in calls.items():
    bits = []
    for flushes in [False, True, False]:
        assert torch.set_flush_denormal(flushes)
        torch.set_num_threads(1)
        one = call().view(torch.int32)
        torch.set_num_threads(2)
        assert all(torch.equal(call().view(torch.int32), one) for _ in range(5)), (name, flushes)
        bits.append(one)
    assert torch.equal(bits[0], bits[2]) and not torch.equal(bits[0], bits[1]), name
"""


def test_all_threads_compute_in_the_callers_mode():
    """Which `torch.set_flush_denormal` sets for one thread."""
    subprocess.run([sys.executable, "-c", FLUSHING], check=True, timeout=SECONDS)
