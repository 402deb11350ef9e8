"""Decisions that are made while other programs keep this one from running."""

import time

import pytest
import torch
from common import leaf
from torch import nn
from windrow.torch import patch
from windrow.torch.choice import measure, store
from windrow.torch.choice.policy import PYTORCH, TRIES, Seconds

pytestmark = pytest.mark.usefixtures("nothing_decided")


@pytest.fixture
def measured(monkeypatch):
    """What measurements find, one after the other: PyTorch's seconds, ours, and whether they were disturbed."""

    def each(*measurements):
        left = [*measurements]

        def found(device, runs):
            theirs, ours, is_disturbed = left.pop(0)
            return {name: Seconds(theirs if name == PYTORCH else ours, is_disturbed=is_disturbed) for name in runs}

        monkeypatch.setattr(measure, "times_of", found)
        return left

    return each


def call(times):
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    patch(model)
    x = leaf(1, 3, 8, 8, grad=False)
    with torch.no_grad():
        for _ in range(times):
            model(x)
    (decision,) = store.every()
    return decision


def test_a_disturbed_measurement_decides_for_now(measured):
    left = measured((60e-3, 20e-3, True), (1e-3, 2e-3, False))
    decision = call(1)
    assert decision.choice != PYTORCH and not decision.is_final
    decision = call(1)
    assert decision.choice == PYTORCH and decision.is_final and not left


def test_the_shortest_of_all_measurements_counts(measured):
    measured((3e-3, 1e-3, True), (2e-3, 9e-3, True), (4e-3, 9e-3, False))
    decision = call(3)
    assert {seconds.device for seconds in decision.times.values()} == {2e-3, 1e-3}
    assert decision.choice != PYTORCH and decision.is_final


def test_measurements_end(measured):
    left = measured(*[(1e-3, 2e-3, True)] * (TRIES + 1))
    decision = call(TRIES + 2)
    assert decision.is_final and len(left) == 1


@pytest.mark.parametrize(
    ("measurements", "is_ours"),
    [
        # PyTorch's threads waited for their turn the first time.
        ([(60e-3, 2e-3, False), (1e-3, 2e-3, False)], False),
        # f16 on the CPU takes it so long.
        ([(60e-3, 2e-3, False), (58e-3, 2e-3, False)], True),
        ([(1e-3, 60e-3, False), (3e-3, 0.5e-3, False)], True),
    ],
)
def test_what_is_hard_to_believe_is_measured_again(measured, measurements, is_ours):
    left = measured(*measurements)
    assert not call(1).is_final
    decision = call(1)
    assert decision.is_final and not left and (decision.choice != PYTORCH) == is_ours


def test_what_is_believed_is_not(measured):
    left = measured((4e-3, 1e-3, False), (1e-3, 4e-3, False))
    assert call(3).choice != PYTORCH and len(left) == 1


@pytest.mark.skipif(measure._processor_time is time.perf_counter, reason="no clock of a thread's processor time")
def test_time_without_a_processor_does_not_count():
    def busy(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    def theirs():
        time.sleep(0.02)
        busy(1e-3)

    found = measure.times_of(torch.device("cpu"), {PYTORCH: theirs, "Windrow": lambda: busy(2e-3)})
    assert found[PYTORCH].device < found["Windrow"].device and found[PYTORCH].is_disturbed
