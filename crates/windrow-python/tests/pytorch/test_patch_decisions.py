"""How the algorithm "fastest" decides between Windrow and PyTorch, and what it measures for that."""

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from common import OURS, THEIRS, compare_with_f64, each_device, each_winner, known, leaf
from torch import nn
from windrow.torch import (
    Conv2d,
    _modules,
    _remembering,
    conv2d,
    freeze,
    optimize,
    patch,
)
from windrow.torch._filters import filter_cache
from windrow.torch.choice import convolution, decider, measure, policy, store
from windrow.torch.choice.policy import PYTORCH, Seconds
from windrow.torch.choice.problem import Options, key_of

pytestmark = pytest.mark.usefixtures("nothing_decided")


@each_device
@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 0)])
def test_gradients_are_decided_each_for_itself(device, wanted, monkeypatch):
    def half(device, runs):
        mine = [*runs][1]
        is_first = len(store.every()) % 2 == 0
        return {PYTORCH: Seconds(1.0), mine: Seconds(OURS if is_first else THEIRS)}

    monkeypatch.setattr(measure, "times_of", half)
    shapes = [(2, 6, 9, 8), (7, 6, 3, 3), (7,)]
    tensors = [leaf(*s, device=device, grad=bool(w)) for s, w in zip(shapes, wanted, strict=True)]
    for _ in range(2):
        compare_with_f64(
            lambda x, w, b: conv2d(x, w, b, algorithm="fastest"),
            lambda x, w, b: F.conv2d(x, w, b),
            tensors,
        )


@each_device
@pytest.mark.parametrize(("gradient", "is_pytorchs"), [(1.0, False), (100.0, True)])
def test_a_step_that_gains_little_is_pytorchs(device, gradient, is_pytorchs, monkeypatch):
    def found(device, runs):
        theirs = gradient if store.every() else 1.0
        ours = 0.5 if theirs == 1.0 else 2 * theirs
        return {PYTORCH: Seconds(theirs), [*runs][1]: Seconds(ours)}

    monkeypatch.setattr(measure, "times_of", found)
    x, weight = leaf(2, 4, 9, 10, device=device), leaf(6, 4, 3, 3, device=device)
    of = (x, weight, None, Options((1, 1), (0, 0), (1, 1), 1), None, False)
    for _ in range(2):
        assert (convolution.is_pytorchs(*of) is None) == (not store.every())
        conv2d(x, weight, algorithm="fastest").sum().backward()
    assert convolution.is_pytorchs(*of) == is_pytorchs


@each_device
@each_winner
def test_one_measurement_for_each_problem_and_mode(device, factor, times):
    measured = times(factor)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)).to(device)
    x = leaf(2, 4, 9, 10, device=device, grad=False)
    report = patch(model)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        assert len(measured) == 1  # Both layers have the same problem.
        model(leaf(1, 4, 9, 10, device=device, grad=False))
        assert len(measured) == 2
    for _ in range(3):
        model(x).sum().backward()
    modes = sorted({d.what for d in store.every()})
    assert modes == [
        "forward",
        "forward with a changing filter",
        "gradient of filter and bias",
        "gradient of the input",
    ]
    assert len(measured) == 5
    assert str(report).count("gradient of the input of float32 [2, 4, 9, 10]") == 2
    assert ("on cpu: PyTorch" in str(report) or device == "cuda") or factor == OURS


def test_other_sizes_follow_the_nearest(times):
    measured = times(THEIRS)
    weight = nn.Parameter(torch.randn(4, 3, 3, 3), requires_grad=False)
    for size in range(5, 17):
        x = leaf(1, 3, size, size, grad=False)
        torch.testing.assert_close(conv2d(x, weight, algorithm="fastest"), F.conv2d(x, weight))
    assert len(measured) == policy.MEASURED_SIZES
    follower = store.every()[-1]
    assert follower.choice == PYTORCH and "as for [1, 3, 1" in follower.reason
    # Twice as many elements are another problem.
    conv2d(leaf(1, 3, 18, 18, grad=False), weight, algorithm="fastest")
    assert len(measured) == policy.MEASURED_SIZES + 1


def test_sizes_where_nothing_is_faster_are_followed():
    """To ask an algorithm takes its time, too."""
    asked = []

    def ours(wanted):
        asked.append(1)
        return convolution.NOTHING_FASTER

    weight = torch.ones(4, 3, 3, 3)
    for size in range(100, 120):
        key = key_of(torch.ones(1, 3, size, size), weight, None, Options((1, 1), (0, 0), (1, 1), 1), None)
        assert decider.decide(decider.Question("forward", key, lambda: None, ours)).choice == PYTORCH
    assert len(asked) == policy.MEASURED_SIZES


def test_images_that_come_by_turns_are_remembered(times, monkeypatch):
    times(THEIRS)
    module = Conv2d(3, 4, 3)
    module.algorithm = "fastest"
    images = [leaf(1, 3, size, size, grad=False) for size in (6, 7, 8)]
    with torch.no_grad():
        for x in images * 3:
            module(x)
        found = []
        nothing = _modules.Found(is_final=False)
        monkeypatch.setattr(Conv2d, "_find", lambda self, *of: found.append(of) or nothing)
        monkeypatch.setattr(_remembering, "REMEMBERED", 3)
        for x in images * 2:
            torch.testing.assert_close(module(x), F.conv2d(x, module.weight, module.bias))
        assert not found
        # Not with another filter.
        module.weight = nn.Parameter(2 * module.weight)
        module(images[0])
        assert found


def test_decisions_are_bounded(times, monkeypatch):
    times(THEIRS)
    monkeypatch.setattr(policy, "DECISIONS", 5)
    for channels in range(1, 9):
        conv2d(torch.ones(1, channels, 4, 4), torch.ones(1, channels, 3, 3), algorithm="fastest")
    assert [d.key.layer[0][1] for d in store.every()] == [4, 5, 6, 7, 8]


def test_a_measurement_is_not_waited_for(monkeypatch):
    """Calls that come during one take PyTorch's operator, and decide nothing."""
    x, weight = leaf(1, 8, 9, 9, grad=False), leaf(8, 8, 3, 3, grad=False)
    inside, leave = threading.Event(), threading.Event()

    def slow(device, runs):
        inside.set()
        assert leave.wait(60)
        return {name: Seconds(1.0) for name in runs}

    monkeypatch.setattr(measure, "times_of", slow)
    thread = threading.Thread(target=conv2d, args=(x, weight), kwargs={"algorithm": "fastest"})
    thread.start()
    assert inside.wait(60)
    torch.testing.assert_close(conv2d(x, weight, algorithm="fastest"), F.conv2d(x, weight))
    assert not store.every()
    leave.set()
    thread.join()
    assert len(store.every()) == 1


@pytest.fixture
def captured(monkeypatch):
    """Calls this with whether the calls that follow are captured in a graph."""
    is_in_graph = [False]
    for module, name in ((store, "is_captured"), (decider, "is_captured"), (_modules, "goes_into_a_graph")):
        monkeypatch.setattr(module, name, lambda of: is_in_graph[0])
    return lambda now: is_in_graph.__setitem__(0, now)


def test_who_is_captured_may_be_another(monkeypatch, captured):
    """A call waits for the interpreter, which is busier with ours here; a graph does not."""
    ours = []

    def found(device, runs):
        ours.extend(name for name in runs if name != PYTORCH)
        return {PYTORCH: Seconds(1.0, 1.0), ours[0]: Seconds(0.5, 1.2)}

    monkeypatch.setattr(measure, "times_of", found)
    module = nn.Conv2d(8, 8, 3)
    patch(nn.ModuleList([module]))
    x = leaf(1, 8, 9, 9, grad=False)
    want = F.conv2d(x, module.weight, module.bias)
    theirs = []
    operator = lambda *of: theirs.append(of) or torch.conv2d(*of)
    monkeypatch.setattr(Conv2d, "_operator", staticmethod(operator))
    with torch.no_grad():
        module(x)
        # What is kept for graphs alone was let go of.
        cache = filter_cache(module.weight)
        assert cache.bytes == 0 and cache.promised > 0
        for _ in range(2):
            for is_in_graph in (False, False, False, True, True, True):
                captured(is_in_graph)
                theirs.clear()
                torch.testing.assert_close(module(x), want, atol=1e-5, rtol=1e-5)
                assert bool(theirs) != is_in_graph and known(module) in ([], [None])
    (decision,) = store.every()
    assert (decision.choice, [decision.in_graph]) == (PYTORCH, ours)


@pytest.mark.parametrize(("first", "is_ours"), [((1.0, 10.0), False), ((10.0, 1.0), True)])
def test_a_model_waits_for_its_device_or_for_the_interpreter(monkeypatch, first, is_ours):
    # Where it waits for the interpreter, what spares the device and not the interpreter gains nothing.
    def found(device, runs):
        if not store.every():
            return {name: Seconds(*first) for name in runs}
        return {name: Seconds(1.0, 1.2) for name in runs} | {PYTORCH: Seconds(3.0, 1.0)}

    monkeypatch.setattr(measure, "times_of", found)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)).eval()
    patch(model)
    with torch.no_grad():
        model(torch.randn(1, 3, 12, 12))
    one, other = store.every()
    assert one.choice == PYTORCH and other.in_graph != PYTORCH
    assert (other.choice != PYTORCH) == is_ours


def test_a_patched_model_does_not_wait_for_an_optimized_one(monkeypatch):
    def found(device, runs):
        if not store.every():
            return {name: Seconds(10.0, 1.0) for name in runs}
        return {name: Seconds(1.0, 1.2) for name in runs} | {PYTORCH: Seconds(2.0, 1.0)}

    monkeypatch.setattr(measure, "times_of", found)
    x = torch.randn(1, 3, 12, 12)
    models = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval() for _ in range(2)]
    patch(models[1])
    with torch.no_grad():
        for model in (optimize(models[0]), models[1]):
            model(x)
    assert [d.choice for d in store.every()] == [PYTORCH, PYTORCH]


@pytest.mark.parametrize(
    ("theirs", "ours", "called", "in_graph"),
    [
        # The device is what is waited for.
        ((1.0, 0.01), (0.5, 0.02), True, True),
        # The interpreter is.
        ((1.0, 0.5), (0.5, 0.6), False, True),
        ((1.0, 0.5), (0.99, 0.3), True, False),
        # Ours would make the model wait for it.
        ((1.0, 0.2), (0.5, 0.7), False, True),
    ],
)
def test_a_call_costs_device_and_interpreter(theirs, ours, called, in_graph, monkeypatch):
    monkeypatch.setattr(
        measure,
        "times_of",
        lambda device, runs: {PYTORCH: Seconds(*theirs), [*runs][1]: Seconds(*ours)},
    )
    with torch.no_grad():
        conv2d(leaf(1, 8, 9, 9), leaf(8, 8, 3, 3), algorithm="fastest")
    (decision,) = store.every()
    assert (decision.choice != PYTORCH, decision.in_graph != PYTORCH) == (called, in_graph)


def test_a_frozen_filter_is_decided_for_itself(times):
    times(OURS)
    module = Conv2d(8, 8, 3)
    module.algorithm = "fastest"
    x = leaf(1, 8, 9, 9, grad=False)
    with torch.no_grad():
        module(x)
        freeze(module)(x)
    modes = [d.what for d in store.every()]
    assert modes == ["forward", "forward with a frozen filter"]


@pytest.mark.parametrize(
    ("theirs", "ours", "samples"),
    [
        ([5, 1.0, 1.1], [5, 0.8, 0.8], 3),
        ([5, 1.0, 1.1], [5, 1.3, 1.3], 3),
        # As far as this may be chance, more are asked for.
        ([5, 1.0, 1.1, 1.0, 1.1, 1.1], [5, 0.8, 0.95, 0.8, 0.8, 0.8], 6),
        ([5, 0.85, 1.1, 1.1, 1.1], [5, 0.8, 0.8, 0.8, 0.8], 6),
        # A first one that took twice as long may be, but where it is long.
        ([15, 1.0, 1.1], [4, 1.3, 1.3], 3),
        ([80], [30], 1),
    ],
)
def test_clear_differences_end_a_measurement(theirs, ours, samples, monkeypatch):
    def clock(run, repeat):
        taken = run()
        given = {"theirs": theirs, "ours": ours}[taken]
        counts[taken] += 1
        return (given[min(counts[taken], len(given)) - 1] * 1e-3,) * 2

    counts = {"theirs": 0, "ours": 0}
    monkeypatch.setattr(measure, "_on_cpu", clock)
    found = measure.times_of(torch.device("cpu"), {PYTORCH: lambda: "theirs", "Windrow": lambda: "ours"})
    assert counts == {"theirs": samples, "ours": samples}
    assert (found["Windrow"].device < found[PYTORCH].device) == (ours[-1] < theirs[-1])


@pytest.mark.parametrize("has_begun", [False, True])
def test_the_device_waits_until_all_runs_are_queued(has_begun, monkeypatch):
    waited, ran = [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        def query(self):
            # Whether the device had done waiting before the last run was called.
            return has_begun and len(waited) == 1

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 40.0 if self.query() else 4.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", waited.append, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    seconds = measure._on_cuda(torch.device("cuda", 0), lambda: ran.append(1), 4)
    assert seconds == pytest.approx(1e-3)
    first = 4 * measure._CYCLES_A_RUN
    assert waited == ([first, first * measure._LONGER] if has_begun else [first])
    assert len(ran) == 4 * len(waited)
