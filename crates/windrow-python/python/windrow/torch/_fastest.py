"""Windrow's operator or PyTorch's own, whichever is faster: measured when a problem first comes, unless it
is known already that ours has nothing better. Whose result is not PyTorch's within a bound is not measured.

The choice is made in the kernels of the operators, so it holds under torch.compile as well, and it is
remembered for the process. Nobody waits for a measurement: a call that comes during one, or in a graph
capture, takes PyTorch's operator and leaves the choice to a later call.

On CUDA a call costs the device's time and the interpreter's, and a model waits for that of which it takes more in
all. In a captured graph only the device's is left, so who is captured may be another than who is called.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from windrow._native import FilterCache
from windrow.torch import _memory
from windrow.torch._checking import Check
from windrow.torch._measuring import Seconds, shorter
from windrow.torch._measuring import times_of as _times

PYTORCH = "PyTorch"

# Ours has to take at most this share of PyTorch's time, and to save so many seconds: what is closer is decided by chance. In
# graphs more: of layers that save 0.5 to 1.5 us here every other one is slower there, of those that save more 3 of 200.
_SHARE, _LEAST, _LEAST_IN_GRAPHS = 0.97, 5e-7, 1.5e-6
# A filter that is packed for good on CUDA takes room from layers behind it, which may gain more by it. So beside one of so
# many bytes packing on each call is measured too, and taken unless the kept one saves this share of PyTorch's time.
_MUCH_KEPT, _KEPT_GAIN = 4 << 20, 0.02
# The same of a step under autocast on the CPU: measured are filters that are cast already, and PyTorch casts each once for
# its convolution and gradients.
_CAST_SHARE = 0.8
# Beside a convolution the interpreter is busy with what follows it, a normalisation, an activation, an addition: about so
# many times as long as with PyTorch's convolution (ResNet, MobileNet). `optimize` has made all of that one.
BESIDE, BESIDE_FUSED = 2.0, 0.0
# In a network our code is found out of the processor's caches, PyTorch's less so, since all that is beside shares it: a call
# takes so many times what was measured (MobileNet: 13 instead of 8 us, stages of Winograd 45 instead of 34).
_COLD = 1.5
# To take so many times as long as another contestant is too much to believe at once: beside other programs PyTorch's threads
# wait for each other for 40 ms in what takes them 1.
_HARD_TO_BELIEVE = 5.0
# What a layer's step of training has to gain on CUDA before any part of it is ours: so long the way to our
# operator and back through autograd keeps the interpreter beyond PyTorch's own. A step whose kernels wait
# for the interpreter gains nothing from faster ones.
_STEP_SECONDS = 1e-4

# `sizes`, what a problem is beside them, the device first, and the layer: hashed on each call, so plain tuples.
Problem = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contestant:
    """One way to compute something. `kept` and `scratch` are bytes that it needs: for good, and while it runs, with its
    results. `forget` drops what it keeps."""

    name: str
    run: Callable[[], Any]
    kept: int = 0
    scratch: int = 0
    forget: Callable[[], Any] = _nothing
    # Says that it will keep that much in a graph.
    promise: Callable[[], Any] = _nothing
    # True if there is no room for it but in a graph.
    is_for_graphs: bool = False
    # What it was held to, where it would take more.
    memory: int | None = None


@dataclass(frozen=True)
class Decision:
    """Who computes a problem, and why."""

    mode: str
    problem: Problem
    choice: str
    # The same where calls are captured in a graph.
    in_graph: str
    why: str
    is_measured: bool = True
    # The device's with PyTorch, and with the best beside it; None where one of them cannot.
    seconds: tuple[float, float] | None = None
    # What a model takes with PyTorch for this and what is beside it, and how much is beside it: as `BESIDE`.
    whole: Seconds = Seconds(0.0)
    around: float = BESIDE
    # False where room was missing: how much PyTorch needs is known only after a pass of the whole model.
    has_room: bool = True
    # By name, as measured so far.
    times: dict[str, Seconds] = field(default_factory=dict)
    # False where a later call measures again.
    is_final: bool = True
    # So often room was looked for by a layer, or times were measured.
    tries: int = 1
    # By name, bytes that ours is held to where there is no room for as many as are fastest.
    limits: dict[str, int] = field(default_factory=dict)

    def now(self) -> str:
        """Who computes a call that comes now."""
        return self.in_graph if self.in_graph != self.choice and is_captured(self.problem[1][0]) else self.choice


# By problem, which takes its time to hash, and mode. Of more problems than so many the oldest go.
_decisions: dict[Problem, dict[str, Decision]] = {}
_DECISIONS = 4096
# So many sizes of a layer are looked at; others follow the nearest of these, if that has between half and twice as many
# elements. Else a program whose images have a new size each time would measure all the time.
_MEASURED_SIZES = 8
_NEAR = 2.0
# By mode and what a problem is beside its sizes, those that were looked at.
_looked_at: dict[tuple[Any, ...], list[Decision]] = {}
# So often each layer looks for room: once a pass, and those before it in the first pass do not know what follows.
TRIES = 3
# Held during a measurement; never waited for.
_measuring = threading.Lock()


# Of the current stream. PyTorch's builds for the CPU have no such function, and no tensors with an index.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


def is_captured(device: torch.device) -> bool:
    """Whether calls on this device go into a graph now."""
    return device.type == "cuda" and _raw_stream(device.index) != 0 and torch.cuda.is_current_stream_capturing()


def goes_into_a_graph(tensor: torch.Tensor) -> bool | None:
    """The same for the device of a tensor, found sooner. None on the default stream, of number 0: that cannot be captured,
    so that the driver need not be asked, and calls before a capture are on another."""
    index = tensor.get_device()
    if index < 0 or _raw_stream(index) == 0:
        return None
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_ordinary(tensor: Any) -> bool:
    """False for the stand-ins of tracers and exporters. Sizes of these are not to be compared: that would fix them."""
    return type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter


is_traced = torch.compiler.is_dynamo_compiling
# What is found in the place of a parameter for which there is a property.
MISSING: Any = object()


def is_plainly_called(tensor: Any) -> bool:
    """Whether PyTorch's operator can be called past its function in Python: nobody looks at what functions are called."""
    return type(tensor) is torch.Tensor and not is_traced() and torch._C._len_torch_function_stack() == 0


def chosen(mode: str, problem: Problem) -> str | None:
    """Who computes this, if that was decided for good."""
    decision = _decisions.get(problem, {}).get(mode)
    return decision.now() if decision is not None and decision.is_final else None


def limits(mode: str, problem: Problem) -> dict[str, int]:
    """What ours is held to, by name."""
    decision = _decisions.get(problem, {}).get(mode)
    return {} if decision is None else decision.limits


def chosen_in_graphs(mode: str, problem: Problem) -> str | None:
    """Who computes this where it is captured, if that is somebody else."""
    decision = _decisions.get(problem, {}).get(mode)
    return None if decision is None or decision.in_graph == decision.choice else decision.in_graph


def is_room_for_another(
    mode: str, problem: Problem, device: torch.device, name: str, cache: FilterCache, kept: Callable[[], int]
) -> bool:
    """A problem is decided once, but each of a model's layers that have it keeps a filter of its own: whether there is room
    for that of `cache` as well, of `kept` bytes, if `name` is who computes this. What was refused often enough is not asked
    for again."""
    decision = _decisions.get(problem, {}).get(mode)
    if decision is None or name not in (decision.choice, decision.in_graph) or cache.bytes or cache.promised:
        return True
    if cache.refused(name) >= TRIES:
        return False
    is_for_graphs, bytes = decision.choice != name, kept()
    if not _memory.is_there_room(device, bytes, 0, in_graph=is_for_graphs):
        cache.refuse(name)
        return False
    if is_for_graphs:
        cache.promise(bytes)
    return True


def is_worth_it(modes: list[str], problem: Problem, device: torch.device, is_cast: bool) -> bool | None:
    """Whether any of the parts of a step had better be ours. None as long as one is not decided. `is_cast`: autocast casts
    what it is given."""
    gained = whole = 0.0
    decided = _decisions.get(problem, {})
    for mode in modes:
        decision = decided.get(mode)
        if decision is None or not decision.is_final:
            return None
        is_ours = decision.now() != PYTORCH
        if len(modes) == 1 or (is_ours and decision.seconds is None):
            return is_ours
        theirs, ours = decision.seconds or (0.0, 0.0)
        whole += theirs
        gained += (theirs - ours) * is_ours
    least = _STEP_SECONDS if device.type == "cuda" else 0.0
    share = _CAST_SHARE if is_cast and device.type == "cpu" else _SHARE
    return gained > max(least, (1 - share) * whole)


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
    layer: FilterCache | None = None,
    image: int = 0,
    around: float = BESIDE,
    check: Check | None = None,
) -> str:
    """Who computes what is not `chosen` yet: as for a problem of nearly this size, or after measuring. PyTorch,
    one of `others`, which are PyTorch's as well, or the first of `ours` that can; a text instead of these
    says why ours has nothing better. `layer`: which of those that have the problem asks; `image`: bytes that
    are no longer needed after it; `around`: as `BESIDE`; `check`: what a result has to be to be taken."""
    before = _decisions.get(problem, {}).get(mode)
    decision = None if before else _like_the_nearest(mode, problem)
    if decision is None:
        otherwise = before.now() if before else PYTORCH
        if is_captured(device):
            return otherwise
        if not _measuring.acquire(blocking=False):
            return otherwise
        try:
            decision = _contest(mode, problem, device, pytorch, ours, others, image, around, check, before)
        finally:
            _measuring.release()
        if not (decision.has_room and _is_believed(decision, before)):
            tries = before.tries + 1 if before else 1
            if layer is not None and not decision.has_room:
                layer.refuse(mode)
                tries = layer.refused(mode)
            decision = replace(decision, tries=tries, is_final=tries >= TRIES)
        if decision.is_final:
            while len(_looked_at) >= _DECISIONS:
                _looked_at.pop(next(iter(_looked_at)), None)
            _looked_at.setdefault((mode, *problem[1:]), []).append(decision)
    while len(_decisions) >= _DECISIONS and problem not in _decisions:
        _decisions.pop(next(iter(_decisions)), None)
    _decisions.setdefault(problem, {})[mode] = decision
    return decision.now()


def _is_believed(decision: Decision, before: Decision | None) -> bool:
    """Whether its times need not be measured again at a later call."""
    if decision.problem[1][0].type != "cpu":
        return True
    times = decision.times.values()
    if any(of.is_disturbed for of in times):
        return False
    shortest, longest = (of((t.device for t in times), default=0.0) for of in (min, max))
    # A second measurement that says the same is believed.
    return longest <= _HARD_TO_BELIEVE * shortest or (before is not None and before.choice == decision.choice)


def _like_the_nearest(mode: str, problem: Problem) -> Decision | None:
    others = _looked_at.get((mode, *problem[1:]), [])
    if len(others) < _MEASURED_SIZES:
        return None
    elements = problem[0][0].numel()
    nearest = min(others, key=lambda d: abs(d.problem[0][0].numel() - elements))
    if not elements / _NEAR <= nearest.problem[0][0].numel() <= elements * _NEAR:
        return None
    why = f"as for {list(nearest.problem[0][0])}"
    return replace(nearest, problem=problem, why=why, is_measured=False, is_final=True)


def _contest(
    mode: str,
    problem: Problem,
    device: torch.device,
    pytorch: Callable[[], Any],
    ours: Callable[[], Iterable[Contestant] | str],
    others: Sequence[Contestant],
    image: int,
    around: float,
    check: Check | None,
    before: Decision | None,
) -> Decision:
    failure = None
    try:
        result = pytorch()
        _memory.look(device, max(0, _bytes(result) - image))
        del result
    except RuntimeError as error:
        failure, check = error, None
    why: list[str] = []
    mine: list[Contestant] = []
    has_room = True
    contestants = ours()
    if isinstance(contestants, str):
        why.append(contestants)
    else:
        if failure is None:
            _memory.look_inside(device, pytorch)
        mine, has_room = _that_run(device, contestants, why, check)
    beside = [other for other in others if _runs(other, why, check)] + mine
    is_measured = bool(beside) or not isinstance(contestants, str)
    if not beside:
        if failure is not None:
            raise failure
        return Decision(mode, problem, PYTORCH, PYTORCH, ", ".join(why), is_measured, has_room=has_room)
    if failure is not None:
        name = next((c.name for c in beside if not c.is_for_graphs), beside[-1].name)
        limits = {c.name: c.memory for c in mine if c.memory is not None}
        return Decision(mode, problem, name, name, f"{PYTORCH}: {failure}", limits=limits)
    times = _times(device, [Contestant(PYTORCH, pytorch), *beside])
    if before is not None and device.type == "cpu":
        # The shortest of runs at several times.
        times = {name: shorter(of, before.times.get(name, of)) for name, of in times.items()}
    theirs = times[PYTORCH]
    gain = {c.name: _KEPT_GAIN if c.kept and len(mine) > 1 else 0.0 for c in beside}
    whole = theirs + Seconds(0.0, around * theirs.host)
    model = _of_a_model(mode, problem, around) + whole
    # This layer's part of what the model waits for.
    part = whole.device if model.device >= model.host else whole.host

    def of_a_call(c: Contestant) -> float:
        of = times[c.name]
        host = of.host * (_COLD if c in mine else 1.0)
        other = model + Seconds(of.device - theirs.device, host - theirs.host)
        return part + max(other.device, other.host) - max(model.device, model.host) + gain[c.name] * part

    choice = _fastest({c.name: of_a_call(c) for c in beside if not c.is_for_graphs}, part)
    of_graphs = {c.name: times[c.name].device + gain[c.name] * theirs.device for c in beside}
    in_graph = _fastest(of_graphs, theirs.device, _LEAST_IN_GRAPHS)
    for contestant in mine:
        if contestant.name == in_graph != choice:
            contestant.promise()
        if contestant.name != choice or contestant.memory is not None:
            contestant.forget()
    best = min(times[c.name].device for c in beside)
    why = [_told(*of) for of in times.items()] + why
    seconds = theirs.device, best
    limits = {c.name: c.memory for c in mine if c.memory is not None}
    why += [f"{name} held to {memory / 2**20:.1f} MiB" for name, memory in limits.items()]
    told = ", ".join(why)
    return Decision(
        mode,
        problem,
        choice,
        in_graph,
        told,
        seconds=seconds,
        whole=whole,
        around=around,
        has_room=has_room,
        times=times,
        limits=limits,
    )


def _of_a_model(mode: str, problem: Problem, around: float) -> Seconds:
    """What a model takes, with PyTorch, for what was measured before of as many images on this device: it waits for the
    slower of the device and the interpreter in all, not layer by layer. A patched and an optimized model are two."""
    like = (problem[0][0][0], problem[1][0], around)
    of_these = [d for d in decisions() if (d.problem[0][0][0], d.problem[1][0], d.around) == like]
    return sum((d.whole for d in of_these if (d.mode, d.problem) != (mode, problem)), Seconds(0.0))


def _fastest(times: dict[str, float], theirs: float, least: float = _LEAST) -> str:
    best = min(times, key=times.__getitem__, default=PYTORCH)
    return best if times.get(best, theirs) <= min(_SHARE * theirs, theirs - least) else PYTORCH


def _told(name: str, seconds: Seconds) -> str:
    called = f" called in {1e3 * seconds.host:.3g}" if seconds.host > 0 else ""
    return f"{name} {1e3 * seconds.device:.3g} ms{called}"


def _that_run(
    device: torch.device, contestants: Iterable[Contestant], why: list[str], check: Check | None
) -> tuple[list[Contestant], bool]:
    """The first for which there is room, after one run, which compiles and packs, and whether there was room for all that
    came before and for as much as it would take; if not, also one for which there would be in a graph. If it keeps much on
    CUDA, also the next. Adds to `why` what is wrong with others."""
    found: list[Contestant] = []
    has_room = True
    for contestant in contestants:
        is_room = _memory.is_there_room(device, contestant.kept, contestant.scratch)
        if found and not found[-1].is_for_graphs:
            if is_room and contestant.memory is None and _runs(contestant, why, check):
                found.append(contestant)
            break
        if contestant.memory is not None:
            has_room = False
        if not is_room:
            more = (contestant.kept + contestant.scratch) / 2**20
            why.append(f"{contestant.name} would need {more:.1f} MiB more")
            has_room = False
            if found or not _memory.is_there_room(device, contestant.kept, contestant.scratch, in_graph=True):
                continue
        if _runs(contestant, why, check):
            found.append(contestant if is_room else replace(contestant, is_for_graphs=True))
            if is_room and (device.type != "cuda" or contestant.kept <= _MUCH_KEPT):
                break
    return found, has_room


def _bytes(result: Any) -> int:
    tensors = result if isinstance(result, list | tuple) else [result]
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def _runs(contestant: Contestant, why: list[str], check: Check | None) -> bool:
    """Whether it computes this, and rightly."""
    try:
        result = contestant.run()
        fault = None if check is None else check.fault(result)
    except (RuntimeError, MemoryError) as error:
        why.append(f"{contestant.name}: {error}")
        return False
    if fault is not None:
        why.append(f"{contestant.name} {fault}")
        contestant.forget()
    return fault is None
