"""What a record was measured on, the commit and the machine, and how a record is written."""

import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# What an earlier process has decided is no part of a record.
os.environ.setdefault("WINDROW_DECISIONS", "off")


def commit() -> dict[str, Any]:
    """`commit`, its hash, and `clean`: false if the tree differed from it, records aside.

    In a copy of the tree without its history they come from the variable WINDROW_COMMIT: the hash,
    with `-dirty` after it if the tree differed. Both are None where nothing says.
    """
    if given := os.environ.get("WINDROW_COMMIT"):
        return {"commit": given.removesuffix("-dirty"), "clean": not given.endswith("-dirty")}
    try:
        status = _git("status", "--porcelain", "--", ".", ":!benchmarks/record")
        return {"commit": _git("rev-parse", "HEAD"), "clean": not status}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "clean": None}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def sentence(measured: dict[str, Any] | None = None) -> str:
    """The same for a text, of now or of a record: `Commit 0123456789ab.`"""
    measured = measured or commit()
    if measured["commit"] is None:
        return "Commit unknown."
    return f"Commit {measured['commit'][:12]}{'' if measured['clean'] else ', with changes'}."


def cpu() -> str:
    """The CPU's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text())):
        return found[1]
    return platform.processor() or platform.machine()


def machine() -> str:
    """The folder of this machine and the CPUs that this process may use, as `cargo xtask record` names it."""
    return f"{'-'.join(re.findall('[a-z0-9]+', cpu().lower()))}-{len(os.sched_getaffinity(0))}-threads"


WIDTH = 2_000
"""Characters that a value may take on one line of a record."""


def write(path: Path, record: dict[str, Any]) -> None:
    """Writes a record as JSON with one case a line, the form that `cargo xtask readme --check` asks for."""
    path.write_text(_lines(record, 0) + "\n")


def _lines(value: Any, depth: int) -> str:
    """One element a line for the outermost value, a list of lists or objects, and whatever is longer than WIDTH."""
    flat = json.dumps(value)
    if not isinstance(value, dict | list) or not value:
        return flat
    is_list = isinstance(value, list)
    is_case = depth > 0 and not (is_list and all(isinstance(element, dict | list) for element in value))
    if is_case and len(flat) <= WIDTH:
        return flat
    names = [""] * len(value) if is_list else [f"{json.dumps(str(name))}: " for name in value]
    elements = value if is_list else value.values()
    indent = "\n" + " " * (depth + 1)
    inner = [f"{indent}{name}{_lines(element, depth + 1)}" for name, element in zip(names, elements, strict=True)]
    start, end = "[]" if is_list else "{}"
    return start + ",".join(inner) + indent[:-1] + end
