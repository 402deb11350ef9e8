"""How long contestants take, by a few runs in turns."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

# Two samples of each that differ by more than this decide: more would only keep the first call waiting.
_CHANCE = 0.1
# Other programs may keep this one from running while it is measured. A run was disturbed if so many times as long
# passed as the caller had a processor.
_DISTURBED = 1.5


class Runner(Protocol):
    """What is measured."""

    @property
    def name(self) -> str: ...

    @property
    def run(self) -> Callable[[], Any]: ...


@dataclass(frozen=True)
class Seconds:
    """That a call takes: the device, and before that, on CUDA, the interpreter."""

    device: float
    host: float = 0.0
    # Whether other programs ran in the midst of each run.
    is_disturbed: bool = False

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.device + other.device, self.host + other.host)


def shorter(one: Seconds, other: Seconds) -> Seconds:
    """The shorter time, disturbed if both were."""
    less = min(one, other, key=lambda of: of.device)
    return replace(less, is_disturbed=one.is_disturbed and other.is_disturbed)


# Seconds from which on a run is long: it is repeated once.
_LONG = 0.05


def times_of(device: torch.device, contestants: Sequence[Runner]) -> dict[str, Seconds]:
    """Of a few runs in turns the median on CUDA, the shortest on the CPU: other programs only add to it, and PyTorch's
    second call of a layer took up to ten times what the sixth took. Each contestant has run once before."""
    passed: dict[str, list[float]] = {c.name: [] for c in contestants}

    def clock(device: torch.device, c: Runner, repeat: int) -> float:
        if device.type == "cuda":
            return _on_cuda(device, c.run, repeat)
        on_processor, all = _on_cpu(c.run, repeat)
        passed[c.name].append(all)
        return on_processor

    times = {c.name: [clock(device, c, 1)] for c in contestants}
    once = {name: samples[0] for name, samples in times.items()}
    longest = max(once.values())
    # A factor of two is no chance on a device, nor for what is longer than a processor is taken away for. What takes
    # long is measured well enough by one more run.
    if longest < 2 * min(once.values()) or longest < (1e-3 if device.type == "cuda" else _LONG):
        rounds = 5 if longest < _LONG else 1
        repeat = max(1, min(20, round(3e-4 / max(min(once.values()), 1e-6))))
        for _ in range(rounds):
            for c in contestants:
                times[c.name].append(clock(device, c, repeat))
            if _is_clear([samples[1:] for samples in times.values()]):
                break
    # Nobody waits for the interpreter where the device is busy for so long.
    is_short = device.type == "cuda" and min(once.values()) < 1e-3
    hosts = _host_times(device, contestants) if is_short else {}
    if device.type == "cuda":
        return {name: Seconds(statistics.median(samples), hosts.get(name, 0.0)) for name, samples in times.items()}
    shortest = {name: min(zip(samples, passed[name], strict=True)) for name, samples in times.items()}
    return {name: Seconds(of, is_disturbed=all > _DISTURBED * of) for name, (of, all) in shortest.items()}


def _is_clear(times: Sequence[Sequence[float]]) -> bool:
    """Whether each differs from PyTorch, the first, by more than chance in what was measured so far."""
    theirs, *others = times
    return len(theirs) > 1 and all(
        max(ours) < (1 - _CHANCE) * min(theirs) or min(ours) > (1 + _CHANCE) * max(theirs) for ours in others
    )


# Of the caller, which takes part in all that is computed, and waits for others in a loop.
_processor_time = (
    time.thread_time if time.get_clock_info("thread_time").resolution < 1e-6 else time.perf_counter
)


def _on_cpu(run: Callable[[], Any], repeat: int) -> tuple[float, float]:
    """Seconds that the caller had a processor, and that passed."""
    start, of_caller = time.perf_counter(), _processor_time()
    for _ in range(repeat):
        run()
    of_caller, end = _processor_time() - of_caller, time.perf_counter()
    return of_caller / repeat, (end - start) / repeat


# The device waits so long, at 2 GHz, for the interpreter to call all runs of a measurement: a millisecond for twenty.
# Where that is not long enough, it waits longer by this factor.
_CYCLES_A_RUN, _LONGER = 100_000, 8


def _on_cuda(device: torch.device, run: Callable[[], Any], repeat: int) -> float:
    cycles = repeat * _CYCLES_A_RUN
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for more in (1, _LONGER):
            torch.cuda._sleep(more * cycles)
            start.record()
            for _ in range(repeat):
                run()
            end.record()
            is_queued = not start.query()
            end.synchronize()
            if is_queued:
                break
        return start.elapsed_time(end) * 1e-3 / repeat


_HOST_SAMPLES = 15


def _host_times(device: torch.device, contestants: Sequence[Runner]) -> dict[str, float]:
    """What calls keep the interpreter, one at a time for a device that waits: in a queue, launches are cheaper."""
    samples: dict[str, list[float]] = {c.name: [] for c in contestants}
    with torch.cuda.device(device):
        for _ in range(_HOST_SAMPLES):
            for c in contestants:
                torch.cuda.current_stream().synchronize()
                start = time.perf_counter()
                c.run()
                samples[c.name].append(time.perf_counter() - start)
    return {name: statistics.median(of) for name, of in samples.items()}
