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
# The share of PyTorch's time that another implementation may take, and the seconds that it must save; smaller
# differences are chance. CUDA graphs need more: of layers that save 0.5 to 1.5 us here every second one is slower in
# a graph, of those that save more 3 of 200.
SHARE, LEAST, LEAST_IN_GRAPHS = 0.97, 5e-7, 1.5e-6
# The size from which a packed filter on CUDA takes noticeable room from later layers, which may gain more by it.
# Beside such a filter, packing on each call is measured too. The kept filter must save this share of PyTorch's time
# more.
MUCH_KEPT, KEPT_GAIN = 4 << 20, 0.02
# The interpreter's time for the operations around a convolution (normalisation, activation, addition), as a multiple
# of that for PyTorch's convolution (measured with ResNet and MobileNet). `optimize` has fused them.
BESIDE, BESIDE_FUSED = 2.0, 0.0
# The factor by which a call of Windrow takes longer in a network than measured. There its code is not in the
# processor's caches; PyTorch's usually is, because everything else shares it (MobileNet: 13 instead of 8 us, stages
# of Winograd 45 instead of 34).
COLD = 1.5
# The seconds that PyTorch's convolution costs more on the CPU among fused ones: it ends Windrow's call of those before
# it, starts another one for those after it, and threads of both wait for each other.
APART = 2e-5

# --- A step of training ---
# The seconds that a layer's training step must gain on CUDA before Windrow computes any part of it. The way to
# Windrow's operator and back through autograd keeps the interpreter longer by so much. A step whose kernels wait for
# the interpreter gains nothing from faster kernels.
STEP_SECONDS = 1e-4
# The value of `SHARE` under autocast on the CPU: filters are measured already cast, but PyTorch casts each filter
# once for its convolution and gradients.
CAST_SHARE = 0.8

# --- Decisions ---
# The factor between times on the CPU above which they are measured again: beside other programs PyTorch's threads may
# wait 40 ms for each other in an operator that takes 1.
HARD_TO_BELIEVE = 5.0
# The number of times that a layer looks for room. It looks once in each pass, and in the first pass early layers do
# not know what follows. Doubtful times are measured as often.
TRIES = 3
# The number of sizes of a layer that are measured. Other sizes follow the nearest of these, unless their number of
# elements differs by more than the factor `NEAR`. Otherwise a program with a new image size each time would always
# measure.
MEASURED_SIZES, NEAR = 8, 2.0
# The most problems that are remembered; the oldest are dropped.
DECISIONS = 4096

# --- Measuring ---
# The relative difference at which two samples of each candidate decide. More samples would only delay the first call.
CHANCE = 0.1
# The ratio of passed time to processor time from which a run counts as disturbed by other programs.
DISTURBED = 1.5
# The duration in seconds from which a run is repeated only once.
LONG = 0.05

# --- Memory ---
# The allowed growth, as a share of what PyTorch needs.
GROWTH = 0.1
# The bytes that are always allowed: memory pools grow by larger steps, and on CPUs PyTorch's libraries take as much.
FREE, FREE_ON_CPUS = 4 << 20, 64 << 20
# The share of a device's memory that CUDA graphs of all models of a process may keep at least: 2 to the minus this,
# four thousandths. With one image a tenth of PyTorch's memory holds few filters, and a graph gains most from kept
# filters.
FREE_IN_GRAPHS = 8


@dataclass(frozen=True)
class Seconds:
    """The time of a call: of the device and, on CUDA, of the interpreter before it."""

    device: float
    host: float = 0.0
    # True if other programs ran during each run.
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
    times: Times,
    others: Seconds = Seconds(0.0),
    around: float = BESIDE,
    for_graphs: Sequence[str] = (),
    apart: float = 0.0,
) -> Choice:
    """The choice that makes the model fastest. `times`: of PyTorch and of each candidate. `others`: the time of the
    model's other problems with PyTorch, as from `whole`. `for_graphs`: candidates that have room only in CUDA graphs.
    `apart`: what a call of PyTorch's costs beside its own time.

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
    return Choice(fastest(called, part + apart), fastest(in_graph, theirs.device, LEAST_IN_GRAPHS))


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
