"""The decisions of this process."""

import threading
from dataclasses import dataclass, field
from typing import Any, Literal

from windrow.torch._calls import is_captured
from windrow.torch.choice import policy
from windrow.torch.choice.policy import PYTORCH, Seconds
from windrow.torch.choice.problem import Key, Problem

Source = Literal["measured", "stored", "set by the user", "a size nearby", "not measured"]


@dataclass(frozen=True)
class Decision:
    """The implementation that computes a problem, and the reason.

    `problem`, `device`, `choice`, `in_graph`, `microseconds`, `reason`, `is_final` and `source` are for users; the
    other attributes may change.
    """

    what: str
    key: Problem
    # PyTorch, cuDNN or Windrow.
    choice: str
    # The same, for calls that are captured in a CUDA graph.
    in_graph: str
    reason: str
    # False if a later call decides again: other programs ran, or memory was missing.
    is_final: bool = True
    source: Source = "measured"
    # The times measured so far, by name.
    times: dict[str, Seconds] = field(default_factory=dict)
    # The factor `policy.BESIDE` or `policy.BESIDE_FUSED`.
    around: float = policy.BESIDE
    # False if there was not enough memory. A later call may find more: how much PyTorch needs is known only after a
    # pass of the whole model.
    has_room: bool = True
    # The number of times that room was looked for by a layer, or that times were measured.
    tries: int = 1
    # The memory limits in bytes, by name, if there is not enough room for the fastest way.
    limits: dict[str, int] = field(default_factory=dict)
    # The algorithm of Windrow's that the user has named.
    algorithm: str | None = None

    @property
    def problem(self) -> str:
        """The problem in words."""
        return f"{self.what} of {self.key}"

    @property
    def device(self) -> str:
        """The device's name, such as `cpu` or `cuda:0`."""
        return str(self.key.how.device)

    @property
    def microseconds(self) -> dict[str, float]:
        """The time of a run by each implementation: the device's time on CUDA, the calling thread's on the CPU. Empty
        if nothing was measured."""
        return {name: 1e6 * of.device for name, of in self.times.items()}

    @property
    def is_by_hand(self) -> bool:
        return self.source == "set by the user"

    def now(self) -> str:
        """The implementation for a call that is made now."""
        return self.in_graph if self.in_graph != self.choice and is_captured(self.key.how.device) else self.choice

    def __str__(self) -> str:
        return f"{self.problem} on {self.device}: {self.choice} ({self.reason})"


# The decisions by problem (whose hash takes time), and by the part of it that is computed.
_decisions: dict[Key, dict[str, Decision]] = {}
# The measured decisions, by all that a problem is beside its sizes.
_measured: dict[Any, list[Decision]] = {}
# Held during a measurement; never waited for.
measuring = threading.Lock()


def get(what: str, key: Key) -> Decision | None:
    decided = _decisions.get(key)
    return None if decided is None else decided.get(what)


def final(what: str, key: Key) -> Decision | None:
    """The decision for this problem if it is final."""
    decision = get(what, key)
    return decision if decision is not None and decision.is_final else None


def put(decision: Decision) -> None:
    while len(_decisions) >= policy.DECISIONS and decision.key not in _decisions:
        _decisions.pop(next(iter(_decisions)), None)
    _decisions.setdefault(decision.key, {})[decision.what] = decision


def put_measured(decision: Decision) -> None:
    while len(_measured) >= policy.DECISIONS:
        _measured.pop(next(iter(_measured)), None)
    _measured.setdefault((decision.what, *decision.key[1:]), []).append(decision)


def measured(what: str, key: Key) -> list[Decision]:
    """The measured decisions for the same layer in other sizes."""
    return _measured.get((what, *key[1:]), [])


def every() -> list[Decision]:
    """All decisions, the oldest first."""
    return [decision for decided in list(_decisions.values()) for decision in list(decided.values())]


def clear() -> None:
    _decisions.clear()
    _measured.clear()


def of_a_model(what: str, key: Key, around: float) -> Seconds:
    """The model's time with PyTorch for all other problems measured so far with as many images on this device. A
    patched and an optimized model count as two models."""
    like = (key[0][0][0], key[1][0], around)
    others = [d for d in every() if (d.key[0][0][0], d.key[1][0], d.around) == like and (d.what, d.key) != (what, key)]
    return sum((policy.whole(d.times, around) for d in others), Seconds(0.0))
