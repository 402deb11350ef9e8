"""Runs SGLang's own tests of its causal convolutions with Windrow's functions in place of its Triton kernels.

    python sglang_tests.py CHECKOUT [--device cpu|cuda] [--summary FILE] [pytest options]

CHECKOUT is SGLang's repository, of which the test file alone is taken. Nothing of SGLang runs but that file: what it
imports from SGLang are stand-ins. So this shows the functions, not the engine. Needs einops. The summary is JSON: how
many passed and were skipped, which failed, how often each function was called, and the commit.
"""

import argparse
import sys
from pathlib import Path

import windrow.sglang
from stand_ins import counted, put, run_tests

# Where the file has been in its repository, the newest place first.
TESTS = ["test/registered/layers/mamba/test_causal_conv1d.py", "test/srt/layers/attention/mamba/test_causal_conv1d.py"]
FUNCTIONS = ["causal_conv1d_fn", "causal_conv1d_update"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--summary", type=Path)
    options, rest = parser.parse_known_args()
    file = next((options.checkout / name for name in TESTS if (options.checkout / name).exists()), None)
    if file is None:
        parser.error(f"{options.checkout / TESTS[0]} is not there: SGLang's package leaves tests out")
    calls: dict[str, int] = {}
    functions = counted({name: getattr(windrow.sglang, name) for name in FUNCTIONS}, calls)
    nothing = lambda *args, **kwargs: None
    put({name: {"PAD_SLOT_ID": -1, **functions} for name in windrow.sglang._MODULES})
    put(
        {
            "sglang.srt.utils": {"get_device": lambda: options.device},
            "sglang.test.test_utils": {"empty_gpu_cache": nothing},
            "sglang.test.ci.ci_register": {"register_cuda_ci": nothing, "register_amd_ci": nothing},
        }
    )
    return run_tests("sglang", options.device, [file], calls, options.summary, rest)


if __name__ == "__main__":
    sys.exit(main())
