"""Runs vLLM's own tests of its causal convolutions with Windrow's functions in place of its Triton kernels.

    python vllm_tests.py CHECKOUT [--device cpu|cuda] [--summary FILE] [pytest options]

CHECKOUT is vLLM's repository or its source package, of which the test file alone is taken. Nothing of vLLM runs but
that file: what it imports from vLLM are stand-ins, `vllm.platforms`, a seed and two constants. So this shows the
functions, not the engine. Needs einops. The summary is JSON: how many passed and were skipped, which failed, how often
each function was called, and the commit.
"""

import argparse
import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import windrow.vllm
from outcomes import Outcomes, names, write_summary

TESTS = "tests/kernels/mamba/test_causal_conv1d.py"
FUNCTIONS = ["causal_conv1d_fn", "causal_conv1d_update"]


class Platform:
    """What the tests ask of vLLM's platform."""

    def __init__(self, device: str) -> None:
        self.device_type = device

    def is_cuda_alike(self) -> bool:
        # The tests that ask for it run on any device here.
        return True

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_xpu(self) -> bool:
        return False

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"


def stand_ins(device: str) -> dict[str, int]:
    """Puts modules in place of vLLM's; counts the calls of the functions."""
    contents: dict[str, dict[str, Any]] = {
        "vllm.platforms": {"current_platform": Platform(device)},
        "vllm.utils.torch_utils": {"set_random_seed": torch.manual_seed},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "vllm.model_executor.layers.mamba.ops.causal_conv1d": {},
    }
    calls = dict.fromkeys(FUNCTIONS, 0)
    for name in FUNCTIONS:
        function = getattr(windrow.vllm, name)

        def counted(*args: Any, function: Any = function, name: str = name, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        functions = contents["vllm.model_executor.layers.mamba.ops.causal_conv1d"]
        functions[name] = functools.wraps(function)(counted)
    for name, content in contents.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            package = ".".join(parts[:i])
            module = sys.modules.setdefault(package, ModuleType(package))
            module.__path__ = []
        sys.modules[name].__dict__.update(content)
    return calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--summary", type=Path)
    options, rest = parser.parse_known_args()
    file = options.checkout / TESTS
    if not file.exists():
        parser.error(f"{file} is not there: vLLM's wheel and source package may leave tests out, its repository has it")
    calls = stand_ins(options.device)
    outcomes = Outcomes()
    tests = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null", f"--rootdir={file.parent}", str(file)]
    status = pytest.main([*tests, *rest], plugins=[outcomes])
    count = {o: len(names(outcomes.by_name, o)) for o in ("passed", "failed", "skipped")}
    if not all(calls.values()):
        print("a function was not called")
        status = status or 1
    print(f"vLLM's tests on {options.device}: {count}; calls: {calls}")
    if options.summary:
        what = {"peer": "vllm", "device": options.device, "status": int(status)}
        failures = {"failures": names(outcomes.by_name, "failed"), "calls": calls}
        write_summary(options.summary, what | count | failures)
    return status


if __name__ == "__main__":
    sys.exit(main())
