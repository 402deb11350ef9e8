"""The decision between Windrow's operator and PyTorch's own. The first call of a problem times both, unless Windrow is
known to have nothing faster. A candidate whose result differs from PyTorch's by more than a bound is not timed.

The decision is made inside the operators' kernels, so it also holds under torch.compile. No call waits for a
measurement: a call that comes while another thread measures, or while a graph is captured, uses PyTorch's operator, and
a later call decides.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from windrow._native import FilterCache
from windrow.torch._calls import is_captured
from windrow.torch.choice import budget, disk, measure, policy, store
from windrow.torch.choice.check import Check
from windrow.torch.choice.policy import KEPT, PYTORCH, TRIES
from windrow.torch.choice.problem import FUSED, FUSED_UNKEPT, Key, named
from windrow.torch.choice.store import Decision


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Candidate:
    """One way to compute a problem. It needs `kept` bytes for good and `scratch` bytes while it runs, including its
    results. `forget` drops what it keeps."""

    name: str
    run: Callable[[], Any]
    kept: int = 0
    scratch: int = 0
    forget: Callable[[], Any] = _nothing
    # Reserves the kept memory for a CUDA graph.
    promise: Callable[[], Any] = _nothing
    # True if there is room for it only in CUDA graphs.
    is_for_graphs: bool = False
    # The memory limit that it was given, if it would take more without one.
    memory: int | None = None


@dataclass(frozen=True)
class Question:
    """A problem to decide: how PyTorch computes it, and Windrow's candidates."""

    what: str
    key: Key
    pytorch: Callable[[], Any]
    # A function that returns Windrow's candidates, the best first, or a text that says why there are none. Given a
    # decision, it returns the candidates that the decision may name.
    ours: Callable[[Decision | None], Iterable[Candidate] | str]
    # Other candidates of PyTorch, such as cuDNN's fused convolution.
    others: Sequence[Candidate] = ()
    # The cache with the packed filter of the layer that asks.
    cache: FilterCache | None = None
    # The bytes of the image, which may be freed afterwards.
    image: int = 0
    # The factor `policy.BESIDE` or `policy.BESIDE_FUSED`.
    around: float = policy.BESIDE
    # The check that a result must pass.
    check: Check | None = None

    @property
    def device(self) -> torch.device:
        return self.key[1][0]  # type: ignore[no-any-return]


def decide(question: Question) -> Decision:
    """The decision for a problem: that of the user, of an earlier process, of a problem of nearly the same size, or one
    that is measured now."""
    before = store.get(question.what, question.key)
    decision = None if before else _like_the_nearest(question)
    if decision is None:
        if is_captured(question.device) or not store.measuring.acquire(blocking=False):
            return before or _decision_of(question, policy.Choice(PYTORCH, PYTORCH), "not decided yet", is_final=False)
        try:
            decision = _known(question, before) or _measured(question, before)
        finally:
            store.measuring.release()
    store.put(decision)
    return decision


def expected(what: str, key: Key) -> Decision | None:
    """The decision that `decide` is going to find for a problem without a measurement; None if it measures."""
    others = store.measured(what, key)
    index = policy.nearest(math.prod(key[0][0]), [d.key.elements for d in others])
    known = store.get(what, key) or (None if index is None else others[index])
    return known or disk.recall(what, named(key))


def _decision_of(question: Question, choice: policy.Choice, reason: str, **more: Any) -> Decision:
    key = named(question.key)
    return Decision(question.what, key, choice.called, choice.in_graph, reason, around=question.around, **more)


def _like_the_nearest(question: Question) -> Decision | None:
    others, key = store.measured(question.what, question.key), named(question.key)
    index = policy.nearest(key.elements, [d.key.elements for d in others])
    if index is None:
        return None
    like = others[index]
    return replace(like, key=key, reason=f"as for {[*like.key.sizes[0]]}", source="a size nearby", is_final=True)


def _known(question: Question, before: Decision | None) -> Decision | None:
    """The decision of the user or of an earlier process, after its result was compared. If it is None, the problem must
    be measured."""
    wanted = before if before and before.is_by_hand else None
    if before is None:
        wanted = disk.recall(question.what, named(question.key))
    if wanted is None or _run_pytorch(question) is not None:
        return None
    decision, why = replace(wanted, is_final=True, around=question.around), list[str]()
    names = {wanted.choice, wanted.in_graph} - {PYTORCH}
    ours = question.ours(wanted) if names else []
    for candidate in [] if isinstance(ours, str) else itertools.chain(question.others, ours):
        if candidate.name in names:
            names.remove(candidate.name)
            is_for_graphs = candidate.name != wanted.choice
            if not wanted.is_by_hand and not _is_room(question.device, candidate, is_for_graphs):
                return None
            if not _runs_correctly(candidate, why, question.check):
                decision, names = replace(decision, choice=PYTORCH, in_graph=PYTORCH, reason=why[0]), set()
                disk.keep(decision)
            elif is_for_graphs:
                candidate.promise()
                candidate.forget()
        if not names:
            break
    if names:
        return None
    if not decision.is_by_hand:
        store.put_measured(decision)
    return decision


def _measured(question: Question, before: Decision | None) -> Decision:
    decision = _contest(question, before)
    called_before = before.choice if before else None
    is_on_cpu = question.device.type == "cpu"
    if not decision.has_room or (is_on_cpu and not policy.are_believed(decision.times, decision.choice, called_before)):
        tries = before.tries + 1 if before else 1
        if question.cache is not None and not decision.has_room:
            question.cache.refuse(question.what)
            tries = question.cache.refused(question.what)
        decision = replace(decision, tries=tries, is_final=tries >= TRIES)
    if decision.is_final:
        store.put_measured(decision)
        disk.keep(decision)
    return decision


def _contest(question: Question, before: Decision | None) -> Decision:
    failure = _run_pytorch(question)
    check = None if failure else question.check
    why: list[str] = []
    windrow: list[Candidate] = []
    has_room = True
    ours = question.ours(None)
    if isinstance(ours, str):
        why.append(ours)
    else:
        if failure is None:
            budget.look_inside(question.device, question.pytorch)
        windrow, has_room = _runnable_candidates(question.device, ours, why, check)
    others = [candidate for candidate in question.others if _runs_correctly(candidate, why, check)]
    candidates, limits = others + windrow, {c.name: c.memory for c in windrow if c.memory is not None}
    if failure is not None:
        if not candidates:
            raise failure
        name = next((c.name for c in candidates if not c.is_for_graphs), candidates[-1].name)
        return _decision_of(question, policy.Choice(name, name), f"{PYTORCH}: {failure}", limits=limits)
    if not candidates:
        source = "not measured" if isinstance(ours, str) else "measured"
        only = policy.Choice(PYTORCH, PYTORCH)
        return _decision_of(question, only, ", ".join(why), source=source, has_room=has_room)
    times = measure.times_of(question.device, {PYTORCH: question.pytorch, **{c.name: c.run for c in candidates}})
    if before is not None and question.device.type == "cpu":
        times = policy.shortest(times, before.times)
    model = store.of_a_model(question.what, question.key, question.around)
    for_graphs = [c.name for c in candidates if c.is_for_graphs]
    is_in_a_sequence = question.device.type == "cpu" and question.what in (FUSED, FUSED_UNKEPT)
    apart = policy.APART if is_in_a_sequence else 0.0
    choice = policy.choose(times, model, question.around, for_graphs, apart)
    for candidate in windrow:
        if candidate.name == choice.in_graph != choice.called:
            candidate.promise()
        if candidate.name != choice.called or candidate.memory is not None:
            candidate.forget()
    held = [f"{name} held to {memory / 2**20:.1f} MiB" for name, memory in limits.items()]
    reason = ", ".join([*(_described(*of) for of in times.items()), *why, *held])
    return _decision_of(question, choice, reason, has_room=has_room, times=times, limits=limits)


def _run_pytorch(question: Question) -> RuntimeError | None:
    """Runs PyTorch's operator and records the memory that it needs. Returns PyTorch's error if there is one."""
    try:
        result = question.pytorch()
        budget.look(question.device, max(0, _bytes(result) - question.image))
    except RuntimeError as error:
        return error
    return None


def _bytes(result: Any) -> int:
    tensors = result if isinstance(result, list | tuple) else [result]
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def _described(name: str, seconds: policy.Seconds) -> str:
    called = f" called in {1e3 * seconds.host:.3g}" if seconds.host > 0 else ""
    return f"{name} {1e3 * seconds.device:.3g} ms{called}"


def _is_room(device: torch.device, candidate: Candidate, in_graph: bool = False) -> bool:
    return budget.is_there_room(device, candidate.kept, candidate.scratch, in_graph)


def _runnable_candidates(
    device: torch.device, candidates: Iterable[Candidate], why: list[str], check: Check | None
) -> tuple[list[Candidate], bool]:
    """The candidates to time, and whether there was room for everything that they would take. Each candidate has run
    once, so its kernels are compiled and its filter is packed. The faults of other candidates are added to `why`.

    The candidates to time are the first one that has room and, if there is one before it, one that has room only in
    CUDA graphs. On CUDA, if the first one keeps much memory, the next candidate is timed too.
    """
    found: list[Candidate] = []
    has_room = True
    for candidate in candidates:
        is_room = _is_room(device, candidate)
        if found and not found[-1].is_for_graphs:
            if is_room and candidate.memory is None and _runs_correctly(candidate, why, check):
                found.append(candidate)
            break
        has_room = has_room and is_room and candidate.memory is None
        if not is_room:
            more = (candidate.kept + candidate.scratch) / 2**20
            why.append(f"{candidate.name} would need {more:.1f} MiB more")
            if found or not _is_room(device, candidate, in_graph=True):
                continue
        if _runs_correctly(candidate, why, check):
            found.append(candidate if is_room else replace(candidate, is_for_graphs=True))
            if is_room and (device.type != "cuda" or candidate.kept <= policy.MUCH_KEPT):
                break
    return found, has_room


def _runs_correctly(candidate: Candidate, why: list[str], check: Check | None) -> bool:
    """True if the candidate can compute this problem and its result is right. If not, the reason is added to `why`."""
    try:
        result = candidate.run()
        fault = None if check is None else check.fault(result)
    except (RuntimeError, MemoryError) as error:
        why.append(f"{candidate.name}: {error}")
        return False
    if fault is not None:
        why.append(f"{candidate.name} {fault}")
        candidate.forget()
    return fault is None


def is_room_for_another(decision: Decision, cache: FilterCache, kept: Callable[[], int]) -> bool:
    """True if there is room for the packed filter of `cache`, of `kept` bytes. A problem is decided once, but each
    layer with this problem keeps a filter of its own. After several refusals the answer stays False."""
    if KEPT not in (decision.choice, decision.in_graph) or cache.bytes or cache.promised:
        return True
    if cache.refused(KEPT) >= TRIES:
        return False
    is_for_graphs, bytes = decision.choice != KEPT, kept()
    if not budget.is_there_room(decision.key.how.device, bytes, 0, is_for_graphs):
        cache.refuse(KEPT)
        return False
    if is_for_graphs:
        cache.promise(bytes)
    return True
