"""Runs flash-linear-attention's own tests of its short convolutions with Windrow's backend registered.

    python flash_linear_attention.py CHECKOUT [--summary FILE] [pytest options]

CHECKOUT is fla's repository (its package has no tests), of which both the tests and the library are taken; what that needs
has to be installed: Triton, and so a GPU. Nothing of the tests is changed. The summary is JSON: how many passed
and were skipped, which failed, how often each function of the backend was called, and the commit.
"""

import argparse
import functools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import windrow.compat.causal_conv1d
import windrow.fla
from outcomes import Outcomes, names, write_summary

FUNCTIONS = ["fwd", "bwd", "update_states", "update"]


def count_calls() -> dict[str, int]:
    """Of each function of the backend, from now on."""
    calls = {f"causal_conv1d_{name}": 0 for name in FUNCTIONS}
    for name in calls:
        function = getattr(windrow.fla._Functions, name)

        def counted(*args: Any, function: Any = function, name: str = name, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        setattr(windrow.fla._Functions, name, functools.wraps(function)(counted))
    return calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--summary", type=Path)
    options, rest = parser.parse_known_args()
    summary = options.summary and options.summary.absolute()
    os.chdir(options.checkout)
    sys.path.insert(0, str(Path.cwd()))
    # Half of the tests are those of its backend "cuda", which calls causal_conv1d.
    windrow.compat.causal_conv1d.install()
    import fla

    calls = count_calls()
    windrow.fla.register()
    outcomes = Outcomes()
    tests = ["-q", "-p", "no:cacheprovider", "tests/modules/test_conv.py", *rest]
    status = pytest.main(tests, plugins=[outcomes])
    count = {o: len(names(outcomes.by_name, o)) for o in ("passed", "failed", "skipped")}
    if not all(calls.values()):
        print("a function of the backend was not called")
        status = status or 1
    print(f"fla {fla.__version__}: {count}; calls: {calls}")
    if summary:
        what = {"peer": "flash-linear-attention", "version": fla.__version__, "status": int(status)}
        failures = {"failures": names(outcomes.by_name, "failed"), "calls": calls}
        write_summary(summary, what | count | failures)
    return status


if __name__ == "__main__":
    sys.exit(main())
