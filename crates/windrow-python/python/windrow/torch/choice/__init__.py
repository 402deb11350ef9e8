"""The choice between Windrow and PyTorch for convolutions: the decisions, and how to change them."""

import textwrap
from typing import Any

import torch

from windrow import _native
from windrow.torch._remembering import forget_all
from windrow.torch.choice import disk, store
from windrow.torch.choice.disk import DecisionsWarning
from windrow.torch.choice.policy import KEPT, PACKED, PYTORCH
from windrow.torch.choice.problem import GRADIENTS, UNKEPT, After, as_image, is_video
from windrow.torch.choice.store import Decision

__all__ = [
    "Decision",
    "Decisions",
    "DecisionsWarning",
    "UnknownAlgorithmError",
    "UnknownProblemError",
    "UnsupportedAlgorithmError",
    "decide",
    "decisions",
    "forget",
]


class UnknownProblemError(LookupError):
    """The error for a problem without a decision."""


class UnknownAlgorithmError(ValueError):
    """The error for a name that is neither "pytorch", nor "windrow", nor an algorithm."""


class UnsupportedAlgorithmError(NotImplementedError):
    """The error for an algorithm that cannot compute the problem."""


# Columns of the table: their names and widths; the problem takes the rest of 100.
_COLUMNS = {"choice": 24, "us by PyTorch": 13, "by others": 9, "final": 5, "source": 8}
_REST = 100 - sum(_COLUMNS.values()) - 2 * len(_COLUMNS)


class Decisions(list[Decision]):
    """A list of decisions, the oldest first; it prints as a table."""

    def __str__(self) -> str:
        lines = [_row([*_COLUMNS, "problem: reason"])]
        for decision in self:
            times = decision.microseconds
            others = [of for name, of in times.items() if name != PYTORCH]
            told = lambda of: "" if of is None else f"{of:.4g}"
            numbers = [told(times.get(PYTORCH)), told(min(others, default=None))]
            in_graph = f" (in graphs {decision.in_graph})" if decision.in_graph != decision.choice else ""
            is_final = "yes" if decision.is_final else "no"
            what = f"{decision.problem} on {decision.device}: {decision.reason}"
            lines.append(_row([decision.choice + in_graph, *numbers, is_final, decision.source, what]))
        return "\n".join(lines)


def _row(cells: list[str]) -> str:
    widths = [*_COLUMNS.values(), _REST]
    wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for i in range(max(map(len, wrapped))):
        parts = [part[i] if i < len(part) else "" for part in wrapped]
        lines.append("  ".join(f"{part:{width}}" for part, width in zip(parts, widths, strict=True)).rstrip())
    return "\n".join(lines)


def decisions() -> Decisions:
    """The decisions of this process for convolutions of `patch`, `optimize` and `algorithm="fastest"`, and why."""
    return Decisions(store.every())


def forget() -> None:
    """Forgets all decisions, also those made by `decide`: in this process, and in the file that keeps them for this
    machine. The next call of each problem decides again. CUDA graphs that were captured before do not change."""
    store.clear()
    disk.forget()
    forget_all()


def decide(problem: Decision | str, who: str) -> None:
    """Sets who computes a problem that `decisions()` lists, for its next call and all later ones, in later processes
    too. `who` is "pytorch", "windrow", or one of Windrow's algorithms (`windrow.Conv2dPlan.algorithms`). The next call
    compares the result with PyTorch's. If the result is wrong, PyTorch computes the problem.

    Raises UnknownProblemError, UnknownAlgorithmError, or UnsupportedAlgorithmError if the algorithm cannot compute it.
    """
    told = problem.problem if isinstance(problem, Decision) else problem
    found = [d for d in store.every() if d.problem == told]
    if not found:
        raise UnknownProblemError(f"{told!r} is no problem that windrow.torch.decisions() lists")
    # All of them or, if the algorithm cannot compute one, none.
    for decision in [_by_hand(d, who) for d in found]:
        store.put(decision)
        disk.keep(decision)
    forget_all()


def _by_hand(decision: Decision, who: str) -> Decision:
    choice, algorithm = PYTORCH, None
    if who != "pytorch":
        choice = PACKED if decision.what in UNKEPT else KEPT
        algorithm = None if who == "windrow" else who
    if algorithm is not None:
        _expect_supported(decision, algorithm)
    how: dict[str, Any] = {"is_final": choice == PYTORCH, "source": "set by the user", "algorithm": algorithm}
    of = (decision.what, decision.key, choice, choice, f"set to {who}")
    return Decision(*of, times=decision.times, around=decision.around, **how)


def _expect_supported(decision: Decision, algorithm: str) -> None:
    try:
        _native.Conv2dPlan(torch.empty(1, 1, 4, 4), torch.empty(1, 1, 3, 3), algorithm=algorithm)
    except ValueError as error:
        raise UnknownAlgorithmError(f'{error}, "pytorch" or "windrow"') from None
    except NotImplementedError:
        pass  # Another problem may have it.
    key, options = decision.key, decision.key.options
    if decision.what in GRADIENTS or options.output_padding is not None:
        raise UnsupportedAlgorithmError(f'{decision.problem}: expected "pytorch" or "windrow", not {algorithm!r}')
    made = {"dtype": key.how.dtype, "device": key.how.device}
    x = torch.empty_strided(*key.sizes, **made)
    filter, after = torch.empty_strided(key.layer[0], key.how.filter_strides, **made), key.how.after
    if isinstance(after, After):
        after = after.activation if after.beside is None or after.beside.is_added else None
    named: Any = {"activation": after, "accuracy": key.how.accuracy, "algorithm": algorithm}
    named |= dict(zip(options._fields[:4], options[:4], strict=True))
    try:
        if is_video(filter):
            # What an algorithm computes does not depend on the size of videos.
            sizes = [d * (n - 1) + 1 for n, d in zip(filter.shape[2:], options.dilation, strict=True)]
            _native.conv3d(x.new_empty(1, x.shape[1], *sizes), filter, None, **named)
            return
        _native.Conv2dPlan(as_image(x, x), as_image(filter, x), None, **named)
    except NotImplementedError as error:
        raise UnsupportedAlgorithmError(f"{decision.problem}: {error}") from None
