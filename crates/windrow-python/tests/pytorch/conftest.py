"""Makes the helpers of this folder importable, and the results repeatable."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    # conv2d follows it, and the tests' tolerances are those of f32.
    torch.backends.cudnn.allow_tf32 = False
    torch.compiler.reset()
