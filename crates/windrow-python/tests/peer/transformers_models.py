"""Runs transformers' own tests of models with a short convolution, with Windrow's stand-in for causal_conv1d and without.

    python transformers_models.py CHECKOUT [--models a,b] [--jobs N] [--summary FILE]

CHECKOUT is transformers' repository (its package has no tests), of which both the tests and the library are taken; what that
needs has to be installed, and nothing is downloaded: tests that would are left to fail, both ways. The same set of
tests has to pass. The summary is JSON: how many passed both ways, which passed in one only, how often the stand-in was
called, and the commit. `--jobs` models are tested at a time.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from outcomes import Outcomes, names, write_summary

# What computes the functions of the stand-in.
KERNELS = {
    "causal_conv1d_fn": ["causal_conv1d"],
    "causal_conv1d_update": ["causal_conv1d_update", "causal_conv1d_update_if_plain"],
}
MODELS = ["mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "lfm2", "qwen3_next"]


def run(checkout: Path, model: str, with_stand_in: bool, out: Path) -> int:
    """Runs a model's tests in this process."""
    import pytest

    calls = dict.fromkeys(KERNELS, 0)
    if with_stand_in:
        import windrow.compat.causal_conv1d as stand_in
        from windrow import _native

        # The kernels, which torch.compile does not look into: a count in the functions would compile them anew.
        for name, kernels in KERNELS.items():
            for kernel in kernels:

                def counted(function: Any, name: str = name) -> Any:
                    @functools.wraps(function)
                    def call(*args: Any, **kwargs: Any) -> Any:
                        result = function(*args, **kwargs)
                        calls[name] += result is not None
                        return result

                    return call

                setattr(_native, kernel, counted(getattr(_native, kernel)))
        stand_in.install()
    os.chdir(checkout)
    sys.path[:0] = [str(checkout / "src"), str(checkout)]
    outcomes = Outcomes()
    tests = f"tests/models/{model}/test_modeling_{model}.py"
    status = pytest.main(["-q", "-p", "no:cacheprovider", "--tb=no", tests], plugins=[outcomes])
    import transformers

    outcomes.write(out, calls=calls, version=transformers.__version__)
    return status


def both(checkout: Path, model: str) -> dict[str, Any]:
    results = {}
    # Nothing of a test may depend on the network being there or not.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for side in ["windrow", "plain"]:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "outcomes.json"
            command = [sys.executable, __file__, str(checkout), "--models", model, "--run", side]
            with (Path(folder) / "log").open("w") as log:
                subprocess.run(
                    [*command, "--summary", str(out)], env=environment, stdout=log, stderr=log
                )
            results[side] = json.loads(out.read_text()) if out.exists() else {}
            if not results[side].get("outcomes"):
                return {"no_test_ran": (Path(folder) / "log").read_text()}
    ours, plain = (results[side]["outcomes"] for side in ["windrow", "plain"])
    passed = {side: set(names(o, "passed")) for side, o in [("windrow", ours), ("plain", plain)]}
    return {
        "transformers": results["plain"]["version"],
        "passed": len(passed["windrow"] & passed["plain"]),
        "passed_only_with_windrow": sorted(passed["windrow"] - passed["plain"]),
        "passed_only_without": sorted(passed["plain"] - passed["windrow"]),
        "failed_both": sorted({*names(ours, "failed")} & {*names(plain, "failed")}),
        "skipped": len(names(plain, "skipped")),
        "calls": results["windrow"]["calls"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--summary", type=Path)
    # One side in this process, whose outcomes go to the summary.
    parser.add_argument("--run", choices=["windrow", "plain"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    if options.run:
        return run(checkout, options.models, options.run == "windrow", options.summary)
    models: dict[str, Any] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(lambda model: {model: both(checkout, model)}, options.models.split(",")):
            models |= found
            ((model, result),) = found.items()
            if log := result.get("no_test_ran"):
                print(f"{model}: no test ran\n{log}")
                continue
            calls = sum(result["calls"].values())
            print(f"{model}: {result['passed']} passed both ways, {calls} calls of the stand-in", flush=True)
            for side in ["passed_only_with_windrow", "passed_only_without"]:
                for name in result[side]:
                    print(f"  {side}: {name}")
            if options.summary:
                write_summary(options.summary, {"models": models})
    one_way = ["no_test_ran", "passed_only_with_windrow", "passed_only_without"]
    return 1 if any(model.get(name) for model in models.values() for name in one_way) else 0


if __name__ == "__main__":
    sys.exit(main())
