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
