"""The pure functions from times to a choice, by tables."""

import pytest
from windrow.torch.choice import policy
from windrow.torch.choice.policy import CUDNN_FUSED, KEPT, PACKED, PYTORCH, Seconds


@pytest.mark.parametrize("saved, is_ours", [(4e-7, False), (6e-7, True)])
def test_little_is_left_to_pytorch(saved, is_ours):
    theirs = 5e-6
    for least, gain in ((policy.LEAST, saved), (policy.LEAST_IN_GRAPHS, saved + 1e-6)):
        best = policy.fastest({"Windrow": theirs - gain}, theirs, least)
        assert (best == "Windrow") == is_ours
    # Of what takes long it is a share.
    assert policy.fastest({"Windrow": 0.98e-3}, 1e-3) == PYTORCH
    assert policy.fastest({"Windrow": 0.96e-3}, 1e-3) == "Windrow"
    assert policy.fastest({}, 1e-3) == PYTORCH


# Milliseconds of the device and of the interpreter.
@pytest.mark.parametrize(
    ("times", "others", "how", "called", "in_graph"),
    [
        # On the CPU.
        ({PYTORCH: (1.0, 0), KEPT: (0.9, 0)}, (0, 0), {}, KEPT, KEPT),
        ({PYTORCH: (1.0, 0), KEPT: (0.98, 0)}, (0, 0), {}, PYTORCH, PYTORCH),
        ({PYTORCH: (1.0, 0)}, (0, 0), {}, PYTORCH, PYTORCH),
        # PyTorch's costs something beside its own time.
        ({PYTORCH: (0.010, 0), KEPT: (0.028, 0)}, (0, 0), {"apart": 2e-5}, KEPT, PYTORCH),
        ({PYTORCH: (0.010, 0), KEPT: (0.031, 0)}, (0, 0), {"apart": 2e-5}, PYTORCH, PYTORCH),
        # The model waits for its device: what ours takes of the interpreter is hidden.
        ({PYTORCH: (1.0, 0.01), KEPT: (0.5, 0.03)}, (9, 1), {}, KEPT, KEPT),
        # It waits for the interpreter: what ours saves of the device is.
        ({PYTORCH: (1.0, 1.0), KEPT: (0.5, 1.0)}, (0, 9), {}, PYTORCH, KEPT),
        ({PYTORCH: (1.0, 1.0), KEPT: (1.0, 0.5)}, (0, 9), {}, KEPT, PYTORCH),
        # In a network ours takes more of the interpreter than was measured, cuDNN in one call does not.
        ({PYTORCH: (1.0, 1.0), KEPT: (1.0, 0.7)}, (0, 9), {"around": 0.0}, PYTORCH, PYTORCH),
        ({PYTORCH: (1.0, 1.0), CUDNN_FUSED: (1.0, 0.7)}, (0, 9), {"around": 0.0}, CUDNN_FUSED, PYTORCH),
        # A kept filter has to be worth its room.
        ({PYTORCH: (1.0, 0), KEPT: (0.50, 0), PACKED: (0.51, 0)}, (0, 0), {}, PACKED, PACKED),
        ({PYTORCH: (1.0, 0), KEPT: (0.50, 0), PACKED: (0.53, 0)}, (0, 0), {}, KEPT, KEPT),
        # There is room for it in graphs alone.
        ({PYTORCH: (1.0, 0), KEPT: (0.5, 0)}, (0, 0), {"for_graphs": [KEPT]}, PYTORCH, KEPT),
        ({PYTORCH: (1.0, 0), KEPT: (0.5, 0), PACKED: (0.8, 0)}, (0, 0), {"for_graphs": [KEPT]}, PACKED, KEPT),
    ],
)
def test_who_is_chosen(times, others, how, called, in_graph):
    milli = lambda of: Seconds(*(1e-3 * t for t in of))
    choice = policy.choose({name: milli(of) for name, of in times.items()}, milli(others), **how)
    assert (choice.called, choice.in_graph) == (called, in_graph)


@pytest.mark.parametrize(
    ("times", "called", "before", "are_believed"),
    [
        ({}, PYTORCH, None, True),
        ({PYTORCH: (1, False), KEPT: (2, False)}, PYTORCH, None, True),
        ({PYTORCH: (1, False), KEPT: (2, True)}, PYTORCH, PYTORCH, False),
        ({PYTORCH: (6, False), KEPT: (1, False)}, KEPT, None, False),
        ({PYTORCH: (6, False), KEPT: (1, False)}, KEPT, PYTORCH, False),
        ({PYTORCH: (6, False), KEPT: (1, False)}, KEPT, KEPT, True),
    ],
)
def test_which_times_are_believed(times, called, before, are_believed):
    seconds = {name: Seconds(of, is_disturbed=is_disturbed) for name, (of, is_disturbed) in times.items()}
    assert policy.are_believed(seconds, called, before) == are_believed


@pytest.mark.parametrize(
    ("parts", "on_cuda", "is_cast", "is_worth_it"),
    [
        # One part alone is what it is, whatever it gains.
        ([(True, 1e-6, 0.9e-6)], True, False, True),
        ([(False, 1e-3, 2e-3)], False, False, False),
        # Of a step on CUDA all parts together have to gain 0.1 ms, and 3 %.
        ([(True, 1e-3, 0.95e-3), (False, 1e-3, 2e-3)], True, False, False),
        ([(True, 1e-3, 0.85e-3), (False, 1e-3, 2e-3)], True, False, True),
        ([(True, 1e-3, 0.85e-3), (False, 9e-3, 10e-3)], True, False, False),
        # On the CPU 3 %, and a fifth of what autocast casts.
        ([(True, 1e-4, 0.9e-4), (False, 1e-4, 2e-4)], False, False, True),
        ([(True, 1e-4, 0.7e-4), (False, 1e-4, 2e-4)], False, True, False),
        ([(True, 1e-4, 0.5e-4), (False, 1e-4, 2e-4)], False, True, True),
        # What PyTorch cannot compute is ours.
        ([(True, None, 1e-3), (False, 1e-3, 2e-3)], True, False, True),
    ],
)
def test_whether_a_step_is_worth_it(parts, on_cuda, is_cast, is_worth_it):
    times = lambda theirs, ours: {} if theirs is None else {PYTORCH: Seconds(theirs), KEPT: Seconds(ours)}
    given = [(is_ours, times(theirs, ours)) for is_ours, theirs, ours in parts]
    assert policy.is_step_worth_it(given, on_cuda, is_cast) == is_worth_it


@pytest.mark.parametrize(
    ("elements", "measured", "index"),
    [
        (100, range(10, 80, 10), None),
        (55, range(10, 90, 10), 4),
        (160, range(10, 90, 10), 7),
        (161, range(10, 90, 10), None),
        (5, range(10, 90, 10), 0),
        (4, range(10, 90, 10), None),
    ],
)
def test_which_size_is_followed(elements, measured, index):
    assert policy.nearest(elements, [*measured]) == index


def test_the_shortest_of_all_measurements_counts():
    now = {PYTORCH: Seconds(3.0, is_disturbed=True), KEPT: Seconds(1.0, is_disturbed=True)}
    before = {PYTORCH: Seconds(2.0)}
    assert policy.shortest(now, before) == {PYTORCH: Seconds(2.0), KEPT: Seconds(1.0, is_disturbed=True)}
