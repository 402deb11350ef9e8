"""For which memory the algorithm "fastest" looks before it takes Windrow."""

import pytest
import torch
import torch.nn.functional as F
import windrow.torch
from common import OURS, leaf
from torch import nn
from windrow import _native
from windrow.torch import Conv2d, _conv2d_fastest, _fastest, conv2d, patch
from windrow.torch._filters import filter_cache

pytestmark = pytest.mark.usefixtures("nothing_decided")


def test_room_for_results_is_looked_for(times, monkeypatch):
    times(OURS)
    asked = []
    monkeypatch.setattr(
        _fastest._memory, "is_there_room", lambda device, kept, scratch: asked.append(scratch) or True
    )
    x, weight = leaf(3, 8, 9, 9), leaf(16, 8, 3, 3)
    y = conv2d(x, weight, algorithm="fastest")
    assert asked.pop() >= y.nbytes and not asked
    y.sum().backward()
    of_input, of_filter = asked
    assert of_input >= x.nbytes and of_filter >= weight.nbytes


def test_room_is_looked_for_again(times, monkeypatch):
    """What PyTorch needs is not known before the first pass is over."""
    times(OURS)
    room = [False, False, True]
    monkeypatch.setattr(_fastest._memory, "is_there_room", lambda *_, **how: room[0])
    module = Conv2d(8, 8, 3)
    module.algorithm = "fastest"
    x = leaf(1, 8, 9, 9, grad=False)
    with torch.no_grad():
        for choice in (_fastest.PYTORCH, _fastest.PYTORCH, _conv2d_fastest.KEPT):
            module(x)
            (decision,) = _fastest.decisions()
            assert decision.choice == choice and decision.is_final == (choice != _fastest.PYTORCH)
            room.pop(0)


def test_pieces_that_there_is_room_for(times, monkeypatch):
    """What PyTorch needs may turn out to be more, so ours is not held to them before room was looked for often enough."""
    times(OURS)
    monkeypatch.setattr(_fastest._memory, "is_there_room", lambda *_, **how: True)
    weight = nn.Parameter(torch.randn(8, 8, 3, 3), requires_grad=False)
    x, options = leaf(1, 8, 9, 9, grad=False), _conv2d_fastest.Options((1, 1), (0, 0), (1, 1), 1)
    monkeypatch.setattr(
        _conv2d_fastest.Ours, "within", lambda ours, x, is_kept: ours.held(5 << 20) if is_kept else ours
    )
    cache = filter_cache(weight)
    for is_final in (False, False, True):
        way = (x, weight, None, options, None, None, lambda: (cache, False))
        run, is_decided = _conv2d_fastest.way(*way)
        (decision,) = _fastest.decisions()
        assert decision.choice == _conv2d_fastest.KEPT and decision.is_final == is_decided == is_final
        assert decision.limits == {_conv2d_fastest.KEPT: 5 << 20} and "held to 5.0 MiB" in decision.why
        assert run.named["memory"] == 5 << 20
        torch.testing.assert_close(run(x), F.conv2d(x, weight), atol=1e-4, rtol=1e-4)
        assert (cache.bytes > 0) == is_final


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pieces_give_the_same_bits(layout):
    torch.backends.cudnn.allow_tf32 = False
    x = torch.randn(32, 256, 30, 30, device="cuda").contiguous(memory_format=layout)
    weight = torch.randn(256, 256, 3, 3, device="cuda")
    peaks, results = [], []
    for memory in (None, 40 << 20, 0):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results.append(_native.conv2d(x, weight, algorithm="winograd_gemm_f4", memory=memory))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert peaks[0] > peaks[1] >= peaks[2]


def test_memory_that_is_not_there(times, monkeypatch):
    measured = times(OURS)
    monkeypatch.setattr(_fastest._memory, "is_there_room", lambda *_, **how: False)
    x, weight = leaf(1, 8, 9, 9, grad=False), leaf(8, 8, 3, 3, grad=False)
    torch.testing.assert_close(conv2d(x, weight, algorithm="fastest"), F.conv2d(x, weight))
    (decision,) = _fastest.decisions()
    assert decision.choice == _fastest.PYTORCH and "MiB more" in decision.why and not measured


def test_no_room_on_a_cpu(monkeypatch):
    """PyTorch computes then, and nobody looks for room in graphs."""
    monkeypatch.setattr(_fastest._memory, "_peak", 0)
    monkeypatch.setattr(_fastest._memory, "_in_use", lambda: 1 << 40)
    monkeypatch.setattr(_fastest._memory, "look", lambda *_: None)
    monkeypatch.setattr(_fastest._memory, "_FREE_ON_CPUS", 0)
    weight, x = torch.randn(512, 64, 3, 3), torch.randn(1, 64, 40, 41)
    assert torch.equal(conv2d(x, weight, algorithm="fastest"), F.conv2d(x, weight))


def test_room_for_a_single_layer_on_a_cpu(times, monkeypatch):
    """A tenth of what it needs with PyTorch holds no scratch memory of ours."""
    measured = times(OURS)
    monkeypatch.setattr(_fastest._memory, "_peak", 20 << 20)
    monkeypatch.setattr(_fastest._memory, "_in_use", lambda: 20 << 20)
    model = patch(nn.Sequential(nn.Conv2d(256, 256, 3, padding=1))).model
    with torch.no_grad():
        model(torch.randn(1, 256, 56, 56))
    (decision,) = _fastest.decisions()
    assert measured and decision.choice == _conv2d_fastest.KEPT and decision.is_final, decision.why


def test_no_room_for_a_packed_filter(times, monkeypatch):
    times(OURS)
    monkeypatch.setattr(
        _fastest._memory, "is_there_room", lambda device, kept, scratch, in_graph=False: kept == 0
    )
    module = Conv2d(8, 8, 3)
    module.algorithm = "fastest"
    x = leaf(1, 8, 9, 9, grad=False)
    with torch.no_grad():
        for _ in range(2):
            want = F.conv2d(x, module.weight, module.bias)
            torch.testing.assert_close(module(x), want, atol=1e-4, rtol=1e-4)
    (decision,) = _fastest.decisions()
    assert decision.choice == _conv2d_fastest.PACKED


@pytest.mark.parametrize("way", ["patch", "optimize"])
def test_room_is_looked_for_by_each_layer(times, monkeypatch, way):
    """A problem is decided once; layers that share it have filters of their own, which count."""
    times(OURS)
    model = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)]).eval().requires_grad_(False)
    x = leaf(1, 8, 9, 9, grad=False)
    want = model(x)
    if way == "patch":
        patch(model)
        convolutions = [*model]
    else:
        model = windrow.torch.optimize(model, check=False)
        convolutions = [m for m in model.modules() if hasattr(m, "weight")]
    of = lambda module: filter_cache(module.weight, lasts=True).bytes
    packed = lambda: sum(map(of, convolutions))
    limit, asked = [2.5], []

    def is_there_room(device, kept, scratch, in_graph=False):
        asked.append(kept)
        return packed() + kept <= limit[0] * max(asked)

    monkeypatch.setattr(_fastest._memory, "is_there_room", is_there_room)
    with torch.no_grad():
        for _ in range(_fastest.TRIES + 1):
            torch.testing.assert_close(model(x), want, atol=1e-4, rtol=1e-4)
        assert [of(m) > 0 for m in convolutions] == [True, True, False, False]
        # That is settled now.
        before = len(asked)
        limit[0] = 10
        torch.testing.assert_close(model(x), want, atol=1e-4, rtol=1e-4)
        assert len(asked) == before and packed() <= 2.5 * max(asked)


@pytest.fixture
def on_cuda(monkeypatch):
    """What its allocator has given, and what is packed there, in MiB; the device has 4 GiB."""
    has = {"allocated": 0, "packed": 0, "promised": 0}

    def packed(device, and_promised=False):
        return has["promised" if and_promised else "packed"] << 20

    class Properties:
        total_memory = 4 << 30

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: has["allocated"] << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1 << 40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(_fastest._memory._filters, "kept_bytes", packed)
    monkeypatch.setattr(_fastest._memory, "_theirs", {})
    return has


def test_room_is_a_tenth_of_what_pytorch_needs(on_cuda):
    """Whatever cuDNN's trials took."""
    memory, device = _fastest._memory, torch.device("cuda:0")

    def is_room(kept, scratch=0, **how):
        return memory.is_there_room(device, kept << 20, scratch << 20, **how)

    assert is_room(4) and not is_room(5)
    on_cuda["allocated"] = 800
    memory.look(device, 200 << 20)
    assert is_room(100) and not is_room(101)
    # A result may be as large as PyTorch's.
    assert is_room(100, 200) and not is_room(100, 201) and is_room(0, 300)
    on_cuda["allocated"] = 300
    memory.look(device, 100 << 20)
    assert is_room(100, 700) and not is_room(101)
    on_cuda |= {"packed": 60, "promised": 90}
    assert is_room(40) and not is_room(41)
    assert is_room(10, in_graph=True) and not is_room(11, in_graph=True)


def test_graphs_have_a_share_of_the_device(on_cuda):
    memory, device = _fastest._memory, torch.device("cuda:0")
    on_cuda["promised"] = 1
    on_cuda["allocated"] = 10
    memory.look(device, 0)
    assert memory.is_there_room(device, 15 << 20, 0, in_graph=True)
    assert not memory.is_there_room(device, 16 << 20, 0, in_graph=True)


@pytest.mark.parametrize(
    ("kept", "time_kept", "time_packed", "room", "choice"),
    [
        (54, 0.5, 0.6, 100, "KEPT"),
        # So little is not worth what other layers may gain by the room.
        (54, 0.5, 0.515, 100, "PACKED"),
        (54, 0.5, 0.4, 100, "PACKED"),
        # Little memory is kept without a look at what packing takes, as is any without room for the other.
        (3, 0.5, 0.4, 100, "KEPT"),
        (54, 0.5, 0.4, 60, "KEPT"),
    ],
)
def test_a_filter_is_kept_where_that_gains_time(on_cuda, monkeypatch, kept, time_kept, time_packed, room, choice):
    names = {"KEPT": _conv2d_fastest.KEPT, "PACKED": _conv2d_fastest.PACKED, "PyTorch": _fastest.PYTORCH}
    seconds = {"KEPT": time_kept, "PACKED": time_packed, "PyTorch": 1.0}
    monkeypatch.setattr(
        _fastest, "_times", lambda device, of: {names[n]: _fastest.Seconds(seconds[n]) for n in names}
    )
    monkeypatch.setattr(_fastest._memory, "look_inside", lambda *_: None)
    on_cuda["allocated"] = 10 * room
    forgotten = []
    contestants = [
        _fastest.Contestant(names["KEPT"], list, kept << 20, 0, forget=lambda: forgotten.append(1)),
        _fastest.Contestant(names["PACKED"], list, 0, (kept + 10) << 20),
    ]
    problem = (((8,),), (torch.device("cuda:0"),), ())
    decided = ("forward", problem, torch.device("cuda:0"), list, lambda: contestants)
    monkeypatch.setattr(_fastest, "is_captured", lambda device: False)
    assert _fastest.decide(*decided) == names[choice]
    assert bool(forgotten) == (choice == "PACKED")
