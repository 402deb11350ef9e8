"""The command of the Python package: `python -m windrow`, or `windrow` if pip has put it on the path.

It lists the devices that can be used, and checks the operators on them. Benchmarks, tuning and tensor files need the
whole command, which `cargo install windrow-cli` installs.
"""

import argparse
import signal
import sys
from collections import Counter, defaultdict

from windrow import __version__
from windrow._native import devices, verification_cases

_CASES_IF_QUICK = 2


def main(arguments: list[str] | None = None) -> int:
    """Runs the command with these arguments, or those of the process; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="windrow",
        description="Causal conv1d, Winograd conv2d and GELU, fast on CPU and GPU, with known accuracy.",
        epilog="For benchmarks, tuning and tensor files install the whole command: `cargo install windrow-cli`.",
    )
    parser.add_argument("--version", action="version", version=f"windrow {__version__}")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("devices", help="list the devices that can be used")
    verify = actions.add_parser(
        "verify", help="compare every operator with its f64 reference; exit status 1 if one differs"
    )
    verify.add_argument("--device", default="cpu", help="one of `windrow devices` (default: cpu)")
    verify.add_argument(
        "--quick",
        action="store_true",
        help=f"only {_CASES_IF_QUICK} cases for each algorithm, element type and layout",
    )
    options = parser.parse_args(arguments)
    if options.action == "devices":
        for name, description in devices():
            print(f"{name:<8} {description}")
        return 0
    return _verify(options.device, options.quick)


def _verify(device: str, quick: bool) -> int:
    if device not in dict(devices()):
        print(f"windrow: no device {device}; `windrow devices` lists them", file=sys.stderr)
        return 2
    seen: Counter[tuple[str, str, str, str]] = Counter()
    # By operator, algorithm and element type: elements, errors, largest error.
    rows: defaultdict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    failures = []
    for case in verification_cases(device):
        seen[case.kind] += 1
        if quick and seen[case.kind] > _CASES_IF_QUICK:
            continue
        row = rows[case.kind[:3]]
        try:
            checks = case()
        except Exception as error:  # Whatever it is, the other cases run.
            failures.append(f"{case!r}: {error}")
            continue
        for what, elements, errors, max_abs in checks:
            row[0], row[1], row[2] = row[0] + elements, row[1] + errors, max(row[2], max_abs)
            if errors:
                failures.append(f"{case!r}: {what}: {errors} of {elements} elements are errors")
    print(f"{'operator':<22}{'algorithm':<20}{'type':<6}{'elements':>12}{'errors':>8}{'max abs error':>15}")
    for (op, algorithm, dtype), (elements, errors, max_abs) in rows.items():
        print(f"{op:<22}{algorithm:<20}{dtype:<6}{elements:>12}{errors:>8}{max_abs:>15.1e}")
    print(f"{len(failures)} failed" if failures else "all results are within their tolerance")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def run() -> None:
    """The console script."""
    # A case runs outside of the interpreter, which could not act on Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())


if __name__ == "__main__":
    run()
