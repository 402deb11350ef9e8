"""Makes the helpers of this folder importable, and the results repeatable."""

import os
import sys
from pathlib import Path

import pytest
import torch

# What one test decides is nothing that another may find.
os.environ["WINDROW_DECISIONS"] = "off"
from windrow.torch.choice import measure, store
from windrow.torch.choice.policy import PYTORCH, Seconds

sys.path.insert(0, str(Path(__file__).parent))
from common import OURS, THEIRS


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    # conv2d follows it, and the tests' tolerances are those of f32.
    torch.backends.cudnn.allow_tf32 = False
    torch.compiler.reset()


@pytest.fixture
def nothing_decided():
    """Of what is fastest, before a test and after it."""
    store.clear()
    yield
    store.clear()


@pytest.fixture
def times(monkeypatch):
    """What a measurement finds, by candidate; the factor is ours."""
    measured = []

    def set_times(factor):
        def found(device, runs):
            measured.append([*runs])
            return {name: Seconds(1.0 if name == PYTORCH else factor) for name in runs}

        monkeypatch.setattr(measure, "times_of", found)
        return measured

    return set_times


@pytest.fixture(params=[OURS, THEIRS], ids=["ours", "theirs"])
def factor(request, times):
    """Each of both, of all measurements of a test."""
    times(request.param)
    return request.param


@pytest.fixture
def runs_uncompiled(monkeypatch):
    """Inductor's graphs are run, and not compiled."""

    def run(graph, inputs, **how):
        def boxed(inputs):
            return graph.forward(*inputs)

        boxed._boxed_call = True
        return boxed

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", run)


@pytest.fixture
def graphs(monkeypatch):
    """What compiled models call where PyTorch's operators run one by one."""
    from windrow.torch.backend import _compile

    found, own = [], _compile.to_modules

    def kept(*args):
        bind, names = own(*args)

        def bound(constants):
            found.append(bind(constants))
            return found[-1]

        return bound, names

    monkeypatch.setattr(_compile, "to_modules", kept)
    return found
