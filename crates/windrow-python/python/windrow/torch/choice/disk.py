"""The decisions on disk, beside the tuner's tables, so that a second process measures nothing.

A file has a table for each environment: the versions, device and settings on which times depend. A process reads the
file once and replaces it as a whole; any number of processes may do so at once. A file that is damaged, or whose tables
are all for other environments, is ignored with a `DecisionsWarning`.
"""

import atexit
import contextlib
import hashlib
import json
import math
import os
import platform
import re
import stat
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from windrow._native import __version__
from windrow.torch.choice import policy
from windrow.torch.choice.policy import Seconds
from windrow.torch.choice.problem import Problem
from windrow.torch.choice.store import Decision

_FORMAT = "windrow decisions 1"
# The longest file that is read, in bytes, and how long another process may hold the lock, in seconds: the tuner's.
_LIMIT, _PATIENCE = 64 << 20, 5.0
# Writing may take this share of the time; what is left is written when the process ends.
_SHARE_OF_TIME = 0.05
_SIZES = re.compile(r"\[\d+(, \d+)*\]")

Environment = dict[str, str]
# The stored part of a decision, by group (all of a problem but its sizes) and by sizes.
Entries = dict[str, dict[str, dict[str, Any]]]


class DecisionsWarning(UserWarning):
    """The warning that a file of decisions cannot be used or written."""


@dataclass
class _Table:
    path: Path | None
    environment: Environment
    entries: Entries
    # The entries that are not on disk yet.
    new: Entries = field(default_factory=dict)
    can_be_written: bool = True
    # When it was written, and how long that took.
    written: float = 0.0
    took: float = 0.0


_tables: dict[Any, _Table] = {}
_lock = threading.RLock()
_warned: set[str] = set()


def recall(what: str, key: Problem) -> Decision | None:
    """The decision of an earlier process for this problem, or for one of nearly the same size."""
    if _is_off():
        return None
    with _lock:
        sizes = _table(key.how.device).entries.get(_group(what, key), {})
        entry, reason = sizes.get(_sizes(key)), None
        if entry is None:
            measured = [size for size, of in sizes.items() if of["source"] == "stored"]
            index = policy.nearest(key.elements, [_elements(size) for size in measured])
            if index is None:
                return None
            entry, reason = sizes[measured[index]], f"as for {measured[index]}"
    times = {name: Seconds(1e-6 * device, 1e-6 * host) for name, (device, host) in entry["microseconds"].items()}
    choice = (entry["choice"], entry["in_graph"], reason or entry["reason"])
    decision = Decision(what, key, *choice, is_final=False, source=entry["source"], times=times)
    return replace(decision, algorithm=entry.get("algorithm"))


def keep(decision: Decision) -> None:
    """Stores a decision for other processes. It is left out if it holds for this process only: provisional, measured
    beside other programs, or made for want of memory."""
    is_final = decision.is_final and not any(of.is_disturbed for of in decision.times.values())
    holds_elsewhere = (is_final or decision.is_by_hand) and decision.has_room and not decision.limits
    if not holds_elsewhere or _is_off():
        return
    microseconds = {name: [round(1e6 * t, 3) for t in (of.device, of.host)] for name, of in decision.times.items()}
    entry: dict[str, Any] = {"choice": decision.choice, "in_graph": decision.in_graph, "reason": decision.reason}
    entry |= {"source": decision.source if decision.is_by_hand else "stored", "microseconds": microseconds}
    if decision.algorithm is not None:
        entry["algorithm"] = decision.algorithm
    with _lock:
        table = _table(decision.key.how.device)
        if table.path is None:
            return
        for entries in (table.entries, table.new):
            entries.setdefault(_group(decision.what, decision.key), {})[_sizes(decision.key)] = entry
        if time.monotonic() - table.written >= table.took / _SHARE_OF_TIME:
            _write(table)


def flush() -> None:
    """Writes the decisions that are not on disk yet."""
    with _lock:
        for table in _tables.values():
            _write(table)


def forget() -> None:
    """Removes the decisions for this process's devices from the disk too."""
    if _is_off():
        return
    devices = [torch.device("cpu")]
    if torch.cuda.is_initialized():
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    with _lock:
        for device in devices:
            table = _table(device)
            table.entries, table.new = {}, {}
            if table.path is not None and table.path.exists():
                _write(table, is_emptied=True)
        reset()


def reset() -> None:
    """Drops the loaded tables, so that the files are read again when needed."""
    _tables.clear()
    _warned.clear()


def _is_off() -> bool:
    return os.environ.get("WINDROW_DECISIONS") == "off"


def _group(what: str, key: Problem) -> str:
    order = ", channels-last" if key.how.is_last else ""
    return f"{what} of {str(key.how.dtype).removeprefix('torch.')}{order}, {key.without_sizes()}"


def _sizes(key: Problem) -> str:
    return key.image().partition(" ")[2]


def _elements(sizes: str) -> int:
    return math.prod(int(n) for n in re.findall(r"\d+", sizes.partition("]")[0]))


def _table(device: torch.device) -> _Table:
    environment = environment_of(device)
    path = _path(environment)
    known = (path, *environment.values())
    table = _tables.get(known)
    if table is None:
        tables = None if path is None else _read(path)
        own = [t["entries"] for t in tables or [] if t["environment"] == environment]
        if tables and not own:
            _warn(path, f"it is for {tables[0]['environment']}, this is {environment}")
        table = _tables[known] = _Table(path, environment, _checked(path, own[0] if own else {}))
    return table


def environment_of(device: torch.device) -> Environment:
    """The environment: all that times depend on beside the problem."""
    backends = torch.backends
    flags = {
        "deterministic": torch.are_deterministic_algorithms_enabled() or backends.cudnn.deterministic,
        "cudnn": backends.cudnn.enabled,
        "benchmark": backends.cudnn.benchmark,
        "mkldnn": torch._C._get_mkldnn_enabled(),
    }
    settings = ", ".join(name for name, is_set in flags.items() if is_set)
    return {"windrow": __version__, "torch": torch.__version__, **_device(device), "settings": settings}


@cache
def _device(device: torch.device) -> Environment:
    if device.type == "cpu":
        return {"device": _cpu(), "driver": ""}
    of = torch.cuda.get_device_properties(device)
    name = f"{of.name}, {of.multi_processor_count} multiprocessors, {of.total_memory >> 20} MiB"
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "")()
    runtime = torch.version.cuda or torch.version.hip
    return {"device": name, "driver": f"{driver}, {runtime}, cuDNN {torch.backends.cudnn.version()}"}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    model = values.get("model name") or platform.processor() or platform.machine()
    # A virtual machine may hide instructions of the model.
    features = hashlib.sha256(values.get("flags", "").encode()).hexdigest()[:8]
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, {features}"


def _path(environment: Environment) -> Path | None:
    named = os.environ.get("WINDROW_DECISIONS", "")
    if named:
        return Path(named)
    folder = _folder()
    if folder is None:
        return None
    words = re.findall("[a-z0-9]+", " ".join(environment[k] for k in ("device", "windrow", "torch")).lower())
    # Names of files end at 255 bytes.
    digest = hashlib.sha256("\n".join(environment.values()).encode()).hexdigest()[:12]
    return folder / f"decisions-{'-'.join(words)[:150]}-{digest}.json"


def _folder() -> Path | None:
    """The folder of the tuner's tables."""
    of = lambda name, *rest: Path(value, *rest) if (value := os.environ.get(name)) else None
    tables = of("WINDROW_TUNE_CACHE")
    cached = of("WINDROW_CACHE_DIR") or of("XDG_CACHE_HOME", "windrow") or of("HOME", ".cache", "windrow")
    cached = cached or of("LOCALAPPDATA", "windrow")
    return tables or (cached / "tuning" if cached else None)


def _warn(path: Path | None, reason: object) -> None:
    text = f"decisions in {path}: {reason}"
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, DecisionsWarning, stacklevel=2)


def _read(path: Path) -> list[dict[str, Any]] | None:
    try:
        with _opened(path, os.O_RDONLY) as number, open(number, "rb", closefd=False) as file:
            text = file.read(_LIMIT + 1)
        if len(text) > _LIMIT:
            raise ValueError(f"more than {_LIMIT} bytes")
        value = json.loads(text)
        if not isinstance(value, dict) or value.get("format") != _FORMAT or not isinstance(value.get("tables"), list):
            raise ValueError(f"no {_FORMAT!r}")
        for table in value["tables"]:
            if not isinstance(table["environment"], dict) or not isinstance(table["entries"], dict):
                raise ValueError("a table that is none")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _warn(path, f"ignored: {error}")
        return None
    return list(value["tables"])


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """A context with a regular file opened, without waiting for another process."""
    # Before it is opened: opening a device may have effects.
    if path.exists() and not path.is_file():
        raise OSError("no regular file")
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0), 0o644)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("no regular file")
        yield file
    finally:
        os.close(file)


def _checked(path: Path | None, entries: Any) -> Entries:
    """The entries without those that are no valid decision."""
    checked: Entries = {}
    for group, sizes in entries.items():
        for size, entry in sizes.items() if isinstance(sizes, dict) else [("", sizes)]:
            if _is_entry(entry) and _SIZES.match(size):
                checked.setdefault(group, {})[size] = entry
            else:
                _warn(path, f"ignored: {size} in {group!r} is no decision")
    return checked


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.get("source") not in ("stored", "set by the user"):
        return False
    times, is_number = entry.get("microseconds"), lambda t: isinstance(t, int | float) and 0 <= t < math.inf
    return (
        entry.get("choice") in policy.CHOICES
        and entry.get("in_graph") in policy.CHOICES
        and isinstance(entry.get("reason"), str)
        and isinstance(entry.get("algorithm"), str | None)
        and isinstance(times, dict)
        and {*times} <= {*policy.CHOICES}
        and all(isinstance(of, list) and len(of) == 2 and all(map(is_number, of)) for of in times.values())
    )


def _write(table: _Table, is_emptied: bool = False) -> None:
    """Writes a table's new entries, merged with the entries in the file."""
    path = table.path
    if path is None or not table.can_be_written or not (table.new or is_emptied):
        return
    start = time.monotonic()
    partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            tables = _read(path) or []
            own = next((t for t in tables if t["environment"] == table.environment), None)
            if own is None:
                tables.append(own := {"environment": table.environment, "entries": {}})
            own["entries"] = _checked(path, own["entries"])
            if is_emptied:
                tables.remove(own)
            for group, sizes in table.new.items():
                own["entries"][group] = {**own["entries"].get(group, {}), **sizes}
            partial.write_text(json.dumps({"format": _FORMAT, "tables": tables}, indent=1) + "\n")
            os.replace(partial, path)
            table.new = {}
    except OSError as error:
        table.can_be_written = False
        _warn(path, f"not written: {error}")
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    table.written = time.monotonic()
    table.took = table.written - start


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A context that holds the lock. The lock is a file of its own, because the table is replaced and a lock is lost
    with its file."""
    with _opened(path, os.O_RDWR | os.O_CREAT) as file:
        end = time.monotonic() + _PATIENCE
        while not _try_lock(file):
            if time.monotonic() > end:
                raise TimeoutError(f"{path}: another process holds the lock")
            time.sleep(0.01)
        yield


def _try_lock(file: int) -> bool:
    """True if the lock was taken; it lasts until the file is closed."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        lock = lambda: msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    else:
        lock = lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        lock()
    except OSError:
        return False
    return True


atexit.register(flush)
