"""The choice between implementations, given their times: pure functions, and every constant with its reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

PYTORCH = "PyTorch"
CUDNN_FUSED = "cuDNN, fused"
# Windrow with a filter that is kept packed (there may turn out to be no room for that), or that is packed on each call;
# and gradients by Windrow.
KEPT, PACKED = "Windrow", "Windrow, packing on each call"
CHOICES = (PYTORCH, CUDNN_FUSED, KEPT, PACKED)

# --- The choice ---
# Another has to take at most this share of PyTorch's time, and to save at least so many seconds: closer ones are decided by
# chance. In graphs more: of layers that save 0.5 to 1.5 us here every other one is slower there, of those that save more 3 of
# 200.
SHARE, LEAST, LEAST_IN_GRAPHS = 0.97, 5e-7, 1.5e-6
# A filter that is packed for good on CUDA takes room from layers behind it, which may gain more by it. So beside one of at
# least so many bytes packing on each call is measured too, and taken unless the kept one saves this share of PyTorch's time.
MUCH_KEPT, KEPT_GAIN = 4 << 20, 0.02
# Beside a convolution the interpreter is busy with what follows it, a normalisation, an activation, an addition: about so
# many times as long as with PyTorch's convolution (ResNet, MobileNet). `optimize` has made all of that one.
BESIDE, BESIDE_FUSED = 2.0, 0.0
# In a network our code is not in the processor's caches, PyTorch's rather is, since everything else shares it: a call takes so
# many times what was measured (MobileNet: 13 instead of 8 us, stages of Winograd 45 instead of 34).
COLD = 1.5

# --- A step of training ---
# What a layer's step has to gain on CUDA, in seconds, before any part of it is ours: so long the way to our operator and back
# through autograd keeps the interpreter beyond PyTorch's own. A step whose kernels wait for the interpreter gains nothing
# from faster ones.
STEP_SECONDS = 1e-4
# `SHARE` under autocast on the CPU: filters are measured already cast, and PyTorch casts each once for its convolution and
# gradients.
CAST_SHARE = 0.8

# --- Decisions ---
# Times on the CPU that differ by more than this factor are measured again: beside other programs PyTorch's threads wait for
# each other for 40 ms in what takes them 1.
HARD_TO_BELIEVE = 5.0
# Each layer looks for room so often: once a pass, and those before it in the first pass do not know what follows. Times that
# are not believed are measured so often.
TRIES = 3
# So many sizes of a layer are measured; others follow the nearest of these, unless they have more than `NEAR` times as many
# elements or fewer. Else a program whose images have a new size each time would measure all the time.
MEASURED_SIZES, NEAR = 8, 2.0
# Of more problems than so many the oldest go.
DECISIONS = 4096

# --- Measuring ---
# Two samples of each that differ by more than this decide: more would only keep the first call waiting.
CHANCE = 0.1
# Other programs may keep this one from running while it is measured. A run was disturbed if so many times as long passed as
# the caller had a processor.
DISTURBED = 1.5
# Seconds: a run that takes at least so long is repeated once.
LONG = 0.05

# --- Memory ---
# Growth, as a share of what PyTorch needs.
GROWTH = 0.1
# So little is always there: pools of memory grow by larger steps, and PyTorch's libraries take as much on CPUs.
FREE, FREE_ON_CPUS = 4 << 20, 64 << 20
# Graphs may keep at least four thousandths, 2 to the minus this, of the device's memory, all models of a process together: of
# one image a tenth of what PyTorch needs holds few filters, and a graph gains most from filters that are kept.
FREE_IN_GRAPHS = 8


@dataclass(frozen=True)
class Seconds:
    """The time of a call: of the device and, on CUDA, of the interpreter before it."""

    device: float
    host: float = 0.0
    # Whether other programs ran in the midst of each run.
    is_disturbed: bool = False

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.device + other.device, self.host + other.host)


Times = Mapping[str, Seconds]


@dataclass(frozen=True)
class Choice:
    """The implementation for ordinary calls, and the one for calls that are captured in a CUDA graph."""

    called: str
    in_graph: str


def choose(
    times: Times, others: Seconds = Seconds(0.0), around: float = BESIDE, for_graphs: Sequence[str] = ()
) -> Choice:
    """The choice that makes the model fastest. `times`: of PyTorch and of each candidate. `others`: the time of the
    model's other problems with PyTorch, as from `whole`. `for_graphs`: candidates that have room only in CUDA graphs.

    A model is bound by the device's time or the interpreter's, whichever total is larger. In a captured graph only the
    device's time remains.
    """
    theirs, mine = times[PYTORCH], whole(times, around)
    model = others + mine
    # This layer's part of what the model waits for.
    part = mine.device if model.device >= model.host else mine.host
    candidates = [name for name in times if name != PYTORCH]
    gain = {name: KEPT_GAIN * (name == KEPT and PACKED in times) for name in candidates}

    def of_a_call(name: str) -> float:
        of = times[name]
        host = of.host * (COLD if name != CUDNN_FUSED else 1.0)
        after = model + Seconds(of.device - theirs.device, host - theirs.host)
        return part + max(after.device, after.host) - max(model.device, model.host) + gain[name] * part

    called = {name: of_a_call(name) for name in candidates if name not in for_graphs}
    in_graph = {name: times[name].device + gain[name] * theirs.device for name in candidates}
    return Choice(fastest(called, part), fastest(in_graph, theirs.device, LEAST_IN_GRAPHS))


def whole(times: Times, around: float) -> Seconds:
    """The model's time for a problem with PyTorch, including the operations around it; zero if it was not measured."""
    return Seconds(0.0) if PYTORCH not in times else times[PYTORCH] + Seconds(0.0, around * times[PYTORCH].host)


def fastest(times: Mapping[str, float], theirs: float, least: float = LEAST) -> str:
    """The fastest implementation; PyTorch unless another gains enough."""
    best = min(times, key=times.__getitem__, default=PYTORCH)
    return best if times.get(best, theirs) <= min(SHARE * theirs, theirs - least) else PYTORCH


def shortest(times: Times, before: Times) -> dict[str, Seconds]:
    """The shorter of two measurements of each candidate; it counts as disturbed only if both were."""

    def shorter(one: Seconds, other: Seconds) -> Seconds:
        less = min(one, other, key=lambda of: of.device)
        return replace(less, is_disturbed=one.is_disturbed and other.is_disturbed)

    return {name: shorter(of, before.get(name, of)) for name, of in times.items()}


def are_believed(times: Times, called: str, called_before: str | None) -> bool:
    """True if times on the CPU are clear enough, so that no later call needs to measure again."""
    if any(of.is_disturbed for of in times.values()):
        return False
    devices = [of.device for of in times.values()] or [0.0]
    # A second measurement that says the same is believed.
    return max(devices) <= HARD_TO_BELIEVE * min(devices) or called == called_before


def is_step_worth_it(parts: Sequence[tuple[bool, Times]], on_cuda: bool, is_cast: bool) -> bool:
    """True if Windrow should compute any part of a layer's training step. `parts`: for each part, whether Windrow won
    it, and its times. `is_cast`: autocast casts the operands."""
    gained = total = 0.0
    for is_ours, times in parts:
        is_compared = PYTORCH in times and len(times) > 1
        if len(parts) == 1 or (is_ours and not is_compared):
            return is_ours
        if is_compared:
            theirs = times[PYTORCH].device
            total += theirs
            gained += is_ours * (theirs - min(of.device for name, of in times.items() if name != PYTORCH))
    share = CAST_SHARE if is_cast and not on_cuda else SHARE
    return gained > max(STEP_SECONDS if on_cuda else 0.0, (1 - share) * total)


def nearest(elements: int, measured: Sequence[int]) -> int | None:
    """The index of the measured size whose decision a problem of `elements` elements takes. None: measure it."""
    if len(measured) < MEASURED_SIZES:
        return None
    best = min(range(len(measured)), key=lambda i: abs(measured[i] - elements))
    return best if elements / NEAR <= measured[best] <= elements * NEAR else None
