"""Windrow's operator or PyTorch's own, whichever is faster: measured when a problem first comes.

The choice is made in the kernels of the operators, so it holds under torch.compile as well, and it is
remembered for the process. Nobody waits for a measurement: a call that comes during one, or in a graph
capture, takes PyTorch's operator and leaves the choice to a later call.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from windrow.torch import _memory

PYTORCH = "PyTorch"

# Ours has to take at most this share of PyTorch's time: what is closer is decided by chance.
_SHARE = 0.97
# What a layer's step of training has to gain on CUDA before any part of it is ours: so long the way to our
# operator and back through autograd keeps the interpreter beyond PyTorch's own. A step whose kernels wait
# for the interpreter gains nothing from faster ones.
_STEP_SECONDS = 1e-4

# `sizes`, what a problem is beside them, and the layer: hashed on each call, so plain tuples.
Problem = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class Contestant:
    """One way to compute something. `kept` and `scratch` are bytes that it needs beside PyTorch's
    tensors: for good, and while it runs. `forget` drops what it keeps."""

    name: str
    run: Callable[[], Any]
    kept: int = 0
    scratch: int = 0
    forget: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Decision:
    """Who computes a problem, and why."""

    mode: str
    problem: Problem
    choice: str
    why: str
    is_measured: bool = True
    # Of PyTorch, and of the best of ours; None where one of them cannot.
    seconds: tuple[float, float] | None = None


# By problem, which takes its time to hash, and mode. Of more problems than so many the oldest go.
_decisions: dict[Problem, dict[str, Decision]] = {}
_DECISIONS = 4096
# So many sizes of a layer are measured; others follow the nearest of these. Else a program whose
# images have a new size each time would measure all the time.
_MEASURED_SIZES = 8
# Held during a measurement; never waited for.
_measuring = threading.Lock()


def chosen(mode: str, problem: Problem) -> str | None:
    """Who computes this, if that was decided."""
    decision = _decisions.get(problem, {}).get(mode)
    return None if decision is None else decision.choice


def is_worth_it(modes: list[str], problem: Problem, device: torch.device) -> bool:
    """Whether any of the parts of a step had better be ours. True as long as one is not decided."""
    gained = whole = 0.0
    decided = _decisions.get(problem, {})
    for mode in modes:
        decision = decided.get(mode)
        if decision is None:
            return True
        if decision.choice != PYTORCH and decision.seconds is None:
            return True
        theirs, ours = decision.seconds or (0.0, 0.0)
        whole += theirs
        if decision.choice != PYTORCH:
            gained += theirs - ours
    least = _STEP_SECONDS if device.type == "cuda" and len(modes) > 1 else 0.0
    return gained > max(least, (1 - _SHARE) * whole)


def decisions() -> list[Decision]:
    """All of them, the oldest first."""
    return [decision for of_modes in list(_decisions.values()) for decision in list(of_modes.values())]


def decide(
    mode: str,
    problem: Problem,
    device: torch.device,
    pytorch: Callable[[], Any],
    ours: Callable[[], Iterable[Contestant]],
) -> str:
    """Who computes what is not `chosen` yet, PyTorch or the name of one of `ours`: as for a problem of
    nearly this size, or after measuring."""
    decision = _like_the_nearest(mode, problem)
    if decision is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return PYTORCH
        if not _measuring.acquire(blocking=False):
            return PYTORCH
        try:
            decision = _contest(mode, problem, device, pytorch, ours)
        finally:
            _measuring.release()
    while len(_decisions) >= _DECISIONS and problem not in _decisions:
        _decisions.pop(next(iter(_decisions)), None)
    _decisions.setdefault(problem, {})[mode] = decision
    return decision.choice


def _like_the_nearest(mode: str, problem: Problem) -> Decision | None:
    sizes, *rest = problem
    others = [
        d for d in decisions() if d.is_measured and d.mode == mode and [*d.problem[1:]] == rest
    ]
    if len(others) < _MEASURED_SIZES:
        return None
    elements = sizes[0].numel()
    nearest = min(others, key=lambda d: abs(d.problem[0][0].numel() - elements))
    why = f"as for {list(nearest.problem[0][0])}"
    return Decision(mode, problem, nearest.choice, why, is_measured=False, seconds=nearest.seconds)


def _contest(
    mode: str,
    problem: Problem,
    device: torch.device,
    pytorch: Callable[[], Any],
    ours: Callable[[], Iterable[Contestant]],
) -> Decision:
    failure = None
    try:
        result = pytorch()
        _memory.look(device)
        del result
    except RuntimeError as error:
        failure = error
    why: list[str] = []
    mine = _first_that_runs(device, ours(), why)
    if mine is None:
        if failure is not None:
            raise failure
        return Decision(mode, problem, PYTORCH, ", ".join(why))
    if failure is not None:
        return Decision(mode, problem, mine.name, f"{PYTORCH}: {failure}")
    times = _times(device, [Contestant(PYTORCH, pytorch), mine])
    seconds = times[PYTORCH], times[mine.name]
    choice = mine.name if seconds[1] <= _SHARE * seconds[0] else PYTORCH
    if choice == PYTORCH and mine.forget is not None:
        mine.forget()
    why = [f"{name} {1e3 * seconds:.3g} ms" for name, seconds in times.items()] + why
    return Decision(mode, problem, choice, ", ".join(why), seconds=seconds)


def _first_that_runs(
    device: torch.device, contestants: Iterable[Contestant], why: list[str]
) -> Contestant | None:
    """After one run, which compiles and packs. Adds to `why` what is wrong with others."""
    for contestant in contestants:
        if not _memory.is_there_room(device, contestant.kept, contestant.scratch):
            more = (contestant.kept + contestant.scratch) / 2**20
            why.append(f"{contestant.name} would need {more:.1f} MiB more")
            continue
        try:
            contestant.run()
        except (RuntimeError, MemoryError) as error:
            why.append(f"{contestant.name}: {error}")
        else:
            return contestant
    return None


def _times(device: torch.device, contestants: list[Contestant]) -> dict[str, float]:
    """Medians of a few runs in turns, in seconds. Each contestant has run once before."""
    clock = _on_cuda if device.type == "cuda" else _on_cpu
    times = {c.name: [clock(device, c.run, 1)] for c in contestants}
    once = {name: samples[0] for name, samples in times.items()}
    # A factor of two is no chance; and what takes long is measured well enough by one more run.
    if max(once.values()) < 2 * min(once.values()) or max(once.values()) < 1e-3:
        rounds = 5 if max(once.values()) < 0.05 else 1
        repeat = max(1, min(20, round(3e-4 / max(min(once.values()), 1e-6))))
        for _ in range(rounds):
            for c in contestants:
                times[c.name].append(clock(device, c.run, repeat))
    return {name: statistics.median(samples) for name, samples in times.items()}


def _on_cpu(device: torch.device, run: Callable[[], Any], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        run()
    return (time.perf_counter() - start) / repeat


def _on_cuda(device: torch.device, run: Callable[[], Any], repeat: int) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeat):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / repeat
