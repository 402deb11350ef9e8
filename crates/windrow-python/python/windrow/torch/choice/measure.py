"""The timing of candidates: a few runs in turns."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from windrow.torch.choice.policy import CHANCE, DISTURBED, LONG, Seconds

# The functions to measure, by name, PyTorch's first.
Runs = Mapping[str, Callable[[], Any]]


def times_of(device: torch.device, runs: Runs) -> dict[str, Seconds]:
    """The time of each candidate over a few runs in turns: the median on CUDA, the minimum on the CPU. On the CPU other
    programs can only add time, and PyTorch's second call of a layer took up to ten times as long as its sixth. Every
    candidate has run once before."""
    passed: dict[str, list[float]] = {name: [] for name in runs}

    def clock(name: str, repeat: int) -> float:
        if device.type == "cuda":
            return _on_cuda(device, runs[name], repeat)
        on_processor, all = _on_cpu(runs[name], repeat)
        passed[name].append(all)
        return on_processor

    times = {name: [clock(name, 1)] for name in runs}
    once = {name: samples[0] for name, samples in times.items()}
    longest = max(once.values())
    # A factor of two is no chance on a device, nor for what is longer than a processor is taken away for. What takes
    # long is measured well enough by one more run.
    if longest < 2 * min(once.values()) or longest < (1e-3 if device.type == "cuda" else LONG):
        rounds = 5 if longest < LONG else 1
        repeat = max(1, min(20, round(3e-4 / max(min(once.values()), 1e-6))))
        for _ in range(rounds):
            for name in runs:
                times[name].append(clock(name, repeat))
            if _is_clear([samples[1:] for samples in times.values()]):
                break
    # Nobody waits for the interpreter where the device is busy for so long.
    is_short = device.type == "cuda" and min(once.values()) < 1e-3
    hosts = _host_times(device, runs) if is_short else {}
    if device.type == "cuda":
        return {name: Seconds(statistics.median(samples), hosts.get(name, 0.0)) for name, samples in times.items()}
    shortest = {name: min(zip(samples, passed[name], strict=True)) for name, samples in times.items()}
    return {name: Seconds(of, is_disturbed=all > DISTURBED * of) for name, (of, all) in shortest.items()}


def _is_clear(times: Sequence[Sequence[float]]) -> bool:
    """True if every candidate differs from PyTorch, the first one, by more than chance so far."""
    theirs, *others = times
    return len(theirs) > 1 and all(
        max(ours) < (1 - CHANCE) * min(theirs) or min(ours) > (1 + CHANCE) * max(theirs) for ours in others
    )


# The processor time of the caller, which takes part in every computation, and waits for others in a loop.
_processor_time = (
    time.thread_time if time.get_clock_info("thread_time").resolution < 1e-6 else time.perf_counter
)


def _on_cpu(run: Callable[[], Any], repeat: int) -> tuple[float, float]:
    """The seconds during which the calling thread had a processor, and the seconds that passed."""
    start, of_caller = time.perf_counter(), _processor_time()
    for _ in range(repeat):
        run()
    of_caller, end = _processor_time() - of_caller, time.perf_counter()
    return of_caller / repeat, (end - start) / repeat


# The device waits so long, at 2 GHz, for the interpreter to call all runs of a measurement: a millisecond for twenty.
# If this is not long enough, the device waits longer by this factor.
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


def _host_times(device: torch.device, runs: Runs) -> dict[str, float]:
    """The interpreter's time of single calls, with the device idle. Launches into a busy queue are cheaper."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    with torch.cuda.device(device):
        for _ in range(_HOST_SAMPLES):
            for name, run in runs.items():
                torch.cuda.current_stream().synchronize()
                start = time.perf_counter()
                run()
                samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(of) for name, of in samples.items()}
