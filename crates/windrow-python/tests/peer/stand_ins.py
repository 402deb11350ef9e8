"""Stand-ins for an engine's modules, with functions whose calls are counted; and the run of its tests."""

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from outcomes import Outcomes, names, write_summary


def put(contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Puts modules of these names with these contents in place of the engine's."""
    for name, content in contents.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            package = ".".join(parts[:i])
            module = sys.modules.setdefault(package, ModuleType(package))
            module.__path__ = []
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
        sys.modules[name].__dict__.update(content)


def counted(functions: Mapping[str, Callable[..., Any]], calls: dict[str, int]) -> dict[str, Callable[..., Any]]:
    """The same functions, which count their calls by name."""

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        calls[name] = 0

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    return {name: wrap(name, function) for name, function in functions.items()}


def run_tests(
    engine: str, device: str, files: list[Path], calls: dict[str, int], summary: Path | None, rest: list[str]
) -> int:
    """Runs these test files alone, says how they ended and writes it down."""
    outcomes = Outcomes()
    tests = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null", f"--rootdir={files[0].parent}"]
    status = int(pytest.main([*tests, *map(str, files), *rest], plugins=[outcomes]))
    count = {o: len(names(outcomes.by_name, o)) for o in ("passed", "failed", "skipped")}
    if not all(calls.values()):
        print("a function was not called")
        status = status or 1
    print(f"{engine}'s tests on {device}: {count}; calls: {calls}")
    if summary:
        what = {"peer": engine, "device": device, "status": status, "files": [file.name for file in files]}
        lists = {f"names_{o}": names(outcomes.by_name, o) for o in ("failed", "skipped")}
        write_summary(summary, what | count | lists | {"calls": calls})
    return status
