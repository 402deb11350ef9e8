"""Windrow's operator or PyTorch's own, whichever is faster: measured when a problem first comes, unless it
is known already that ours has nothing better.

The choice is made in the kernels of the operators, so it holds under torch.compile as well, and it is
remembered for the process. Nobody waits for a measurement: a call that comes during one, or in a graph
capture, takes PyTorch's operator and leaves the choice to a later call.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
    """One way to compute something. `kept` and `scratch` are bytes that it needs: for good, and while it runs, with its
    results. `forget` drops what it keeps."""

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
    # Of PyTorch, and of the best beside it; None where one of them cannot.
    seconds: tuple[float, float] | None = None
    # False where room was missing: how much PyTorch needs is known only after a pass of the whole model.
    is_final: bool = True
    tries: int = 1


# By problem, which takes its time to hash, and mode. Of more problems than so many the oldest go.
_decisions: dict[Problem, dict[str, Decision]] = {}
_DECISIONS = 4096
# So many sizes of a layer are measured; others follow the nearest of these. Else a program whose
# images have a new size each time would measure all the time.
_MEASURED_SIZES = 8
# So often room is looked for.
_TRIES = 3
# Held during a measurement; never waited for.
_measuring = threading.Lock()


def chosen(mode: str, problem: Problem) -> str | None:
    """Who computes this, if that was decided for good."""
    decision = _decisions.get(problem, {}).get(mode)
    return decision.choice if decision is not None and decision.is_final else None


def is_worth_it(modes: list[str], problem: Problem, device: torch.device) -> bool | None:
    """Whether any of the parts of a step had better be ours. None as long as one is not decided."""
    gained = whole = 0.0
    decided = _decisions.get(problem, {})
    for mode in modes:
        decision = decided.get(mode)
        if decision is None or not decision.is_final:
            return None
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
    ours: Callable[[], Iterable[Contestant] | str],
    others: Sequence[Contestant] = (),
    least: float = 0.0,
) -> str:
    """Who computes what is not `chosen` yet: as for a problem of nearly this size, or after measuring. PyTorch,
    one of `others`, which are PyTorch's as well, or the first of `ours` that can; a text instead of these
    says why ours has nothing better. `least` is how many seconds have to be gained."""
    before = _decisions.get(problem, {}).get(mode)
    decision = None if before else _like_the_nearest(mode, problem)
    if decision is None:
        otherwise = before.choice if before else PYTORCH
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return otherwise
        if not _measuring.acquire(blocking=False):
            return otherwise
        try:
            decision = _contest(mode, problem, device, pytorch, ours, others, least)
        finally:
            _measuring.release()
        tries = before.tries + 1 if before else 1
        is_final = decision.is_final or tries >= _TRIES
        decision = replace(decision, tries=tries, is_final=is_final)
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
    ours: Callable[[], Iterable[Contestant] | str],
    others: Sequence[Contestant],
    least: float,
) -> Decision:
    failure = None
    try:
        result = pytorch()
        _memory.look(device)
        del result
    except RuntimeError as error:
        failure = error
    why: list[str] = []
    mine, has_room = None, True
    contestants = ours()
    if isinstance(contestants, str):
        why.append(contestants)
    else:
        mine, has_room = _first_that_runs(device, contestants, why)
    beside = [other for other in others if _runs(other, why)] + ([mine] if mine else [])
    is_measured = bool(beside) or not isinstance(contestants, str)
    if not beside:
        if failure is not None:
            raise failure
        return Decision(mode, problem, PYTORCH, ", ".join(why), is_measured, is_final=has_room)
    if failure is not None:
        return Decision(mode, problem, beside[-1].name, f"{PYTORCH}: {failure}")
    times = _times(device, [Contestant(PYTORCH, pytorch), *beside])
    best = min(beside, key=lambda c: times[c.name])
    seconds = times[PYTORCH], times[best.name]
    is_faster = seconds[1] <= min(_SHARE * seconds[0], seconds[0] - least)
    choice = best.name if is_faster else PYTORCH
    if mine is not None and choice != mine.name and mine.forget is not None:
        mine.forget()
    why = [f"{name} {1e3 * seconds:.3g} ms" for name, seconds in times.items()] + why
    return Decision(mode, problem, choice, ", ".join(why), seconds=seconds, is_final=has_room)


def _first_that_runs(
    device: torch.device, contestants: Iterable[Contestant], why: list[str]
) -> tuple[Contestant | None, bool]:
    """After one run, which compiles and packs; and whether there was room for all that came before. Adds to `why`
    what is wrong with others."""
    has_room = True
    for contestant in contestants:
        if not _memory.is_there_room(device, contestant.kept, contestant.scratch):
            more = (contestant.kept + contestant.scratch) / 2**20
            why.append(f"{contestant.name} would need {more:.1f} MiB more")
            has_room = False
        elif _runs(contestant, why):
            _memory.ran(device)
            return contestant, has_room
    return None, has_room


def _runs(contestant: Contestant, why: list[str]) -> bool:
    try:
        contestant.run()
    except (RuntimeError, MemoryError) as error:
        why.append(f"{contestant.name}: {error}")
        return False
    return True


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
