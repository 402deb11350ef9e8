"""Calls from many threads, and the plans that they share."""

import os
import subprocess
import sys

import numpy as np
import pytest
import windrow
from windrow import _native

# A process of its own, where the first calls are first ones; one that hangs is ended.
SECONDS = 120

MANY_THREADS = """
import threading
import numpy as np, windrow

THREADS = 32
random = np.random.default_rng(0)
taps = random.standard_normal((64, 4)).astype(np.float32)
weight = random.standard_normal((96, 64, 3, 3)).astype(np.float32)
images = [random.standard_normal((1, 64, n, n)).astype(np.float32) for n in range(5, 15)]

def operators(x):
    y = windrow.conv2d(x, weight, padding=1, activation="relu")
    return windrow.gelu(y), windrow.causal_conv1d(x[0, None, :, 0], taps, activation="silu")

start, results = threading.Barrier(THREADS), [None] * THREADS

def call(i):
    start.wait()
    # Half of the threads want the same plan first, the others each another one.
    order = range(len(images)) if i % 2 else np.roll(range(len(images)), i // 2)
    results[i] = {n: operators(images[n]) for n in order}

threads = [threading.Thread(target=call, args=(i,)) for i in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for n, image in enumerate(images):
    want = operators(image)
    for result in results:
        assert all((got == w).all() for got, w in zip(result[n], want))
"""


FORK = """
import os, signal
import numpy as np, windrow

x = np.random.default_rng(0).standard_normal((2, 64, 40, 40)).astype(np.float32)
weight = np.ones((96, 64, 3, 3), np.float32)
want = windrow.conv2d(x, weight, padding=1)
child = os.fork()
if child == 0:
    # The threads of the parent are gone.
    signal.alarm(60)
    same = (windrow.conv2d(x, weight, padding=1) == want).all()
    # A plan that the parent did not make, perhaps by another algorithm.
    half = windrow.conv2d(x[:1], weight, padding=1)
    os._exit(0 if same and np.allclose(half, want[:1], atol=0.01) else 1)
assert os.waitpid(child, 0)[1] == 0
assert (windrow.conv2d(x, weight, padding=1) == want).all()
"""


def test_many_plans_in_many_threads():
    subprocess.run([sys.executable, "-c", MANY_THREADS], check=True, timeout=SECONDS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_computes_the_same():
    # Python warns of forks while there are threads, which is what this is about.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]
    subprocess.run(command, check=True, timeout=SECONDS)


def test_the_plan_used_longest_ago_is_dropped():
    weight = np.ones((1, 1, 1, 1), np.float32)

    def call(width):
        windrow.conv2d(np.ones((1, 1, 1, width), np.float32), weight)

    def widths():
        return [image[3] for image, _, _ in _native.conv2d_plans()]

    capacity = 256
    for width in range(1, capacity + 1):
        call(width)
    assert widths() == [*range(capacity, 0, -1)]
    call(1)
    call(capacity + 1)
    assert widths() == [capacity + 1, 1, *range(capacity, 2, -1)]
    call(capacity + 2)
    assert widths()[:3] == [capacity + 2, capacity + 1, 1] and 3 not in widths()
