"""PyTorch's build for ROCm, by a stand-in: nobody has run it on a device yet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The folder that `cargo xtask amd` makes, with the emulator of AMD's chips as the libraries of ROCm.
EMULATOR = os.environ.get("WINDROW_TEST_HIP")


@pytest.mark.skipif(EMULATOR is None, reason="WINDROW_TEST_HIP names no folder with the emulator of AMD's chips")
def test_tensors_that_say_cuda():
    environment = {**os.environ, "WINDROW_HIP_PATH": EMULATOR, "WINDROW_EMULATOR_CHIP": "gfx942"}
    environment["WINDROW_EMULATOR_CACHE"] = str(Path(EMULATOR, "objects"))
    environment["WINDROW_CACHE_DIR"] = str(Path(EMULATOR, "cache"))
    program = Path(__file__).with_name("rocm_program.py")
    result = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and "all as on the CPU" in result.stdout, result.stderr
