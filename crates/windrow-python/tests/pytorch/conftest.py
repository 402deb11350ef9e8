"""Makes the helpers of this folder importable, and the results repeatable."""

import sys
from pathlib import Path

import pytest
import torch
from windrow.torch import _fastest
from windrow.torch._fastest import PYTORCH, Seconds

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
    _fastest._decisions.clear()
    _fastest._looked_at.clear()
    yield
    _fastest._decisions.clear()
    _fastest._looked_at.clear()


@pytest.fixture
def times(monkeypatch):
    """What a measurement finds, by contestant; the factor is ours."""
    measured = []

    def set_times(factor):
        def found(device, contestants):
            measured.append([c.name for c in contestants])
            return {c.name: Seconds(1.0 if c.name == PYTORCH else factor) for c in contestants}

        monkeypatch.setattr(_fastest, "_times", found)
        return measured

    return set_times


@pytest.fixture(params=[OURS, THEIRS], ids=["ours", "theirs"])
def factor(request, times):
    """Each of both, of all measurements of a test."""
    times(request.param)
    return request.param
