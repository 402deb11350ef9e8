"""For which memory the algorithm "fastest" looks before it takes Windrow."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import windrow.torch
from common import OURS, leaf
from torch import nn
from windrow import _native
from windrow.torch import Conv2d, conv2d, optimize, patch
from windrow.torch._filters import filter_cache, kept_with
from windrow.torch._fused import FusedConv2d
from windrow.torch.choice import budget, convolution, decider, measure, policy, store
from windrow.torch.choice.candidates import Conv, Windrow
from windrow.torch.choice.decider import Candidate, Question
from windrow.torch.choice.policy import KEPT, PACKED, PYTORCH, TRIES, Seconds
from windrow.torch.choice.problem import Options, key_of

pytestmark = pytest.mark.usefixtures("nothing_decided")


def test_room_for_results_is_looked_for(times, monkeypatch):
    times(OURS)
    asked = []
    monkeypatch.setattr(
        budget, "is_there_room", lambda device, kept, scratch, in_graph: asked.append(scratch) or True
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
    monkeypatch.setattr(budget, "is_there_room", lambda *_: room[0])
    module = Conv2d(8, 8, 3)
    module.algorithm = "fastest"
    x = leaf(1, 8, 9, 9, grad=False)
    with torch.no_grad():
        for choice in (PYTORCH, PYTORCH, KEPT):
            module(x)
            (decision,) = store.every()
            assert decision.choice == choice and decision.is_final == (choice != PYTORCH)
            room.pop(0)


def test_pieces_that_there_is_room_for(times, monkeypatch):
    """What PyTorch needs may turn out to be more, so ours is not held to them before room was looked for often enough."""
    times(OURS)
    monkeypatch.setattr(budget, "is_there_room", lambda *_: True)
    weight = nn.Parameter(torch.randn(8, 8, 3, 3), requires_grad=False)
    x, options = leaf(1, 8, 9, 9, grad=False), Options((1, 1), (0, 0), (1, 1), 1)
    monkeypatch.setattr(
        Windrow, "within", lambda ours, x, is_kept: replace(ours, memory=5 << 20) if is_kept else ours
    )
    cache = filter_cache(weight)
    for is_final in (False, False, True):
        way = convolution.way(Conv(weight, None, options, None, None, kept_with(weight, False)), x)
        (decision,) = store.every()
        assert decision.choice == KEPT and decision.is_final == way.is_final == is_final
        assert decision.limits == {KEPT: 5 << 20} and "held to 5.0 MiB" in decision.reason
        assert way.run.named["memory"] == 5 << 20
        torch.testing.assert_close(way.run(x), F.conv2d(x, weight), atol=1e-4, rtol=1e-4)
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
    monkeypatch.setattr(budget, "is_there_room", lambda *_: False)
    x, weight = leaf(1, 8, 9, 9, grad=False), leaf(8, 8, 3, 3, grad=False)
    torch.testing.assert_close(conv2d(x, weight, algorithm="fastest"), F.conv2d(x, weight))
    (decision,) = store.every()
    assert decision.choice == PYTORCH and "MiB more" in decision.reason and not measured


def test_no_room_on_a_cpu(monkeypatch):
    """PyTorch computes then, and nobody looks for room in graphs."""
    monkeypatch.setattr(budget, "_peak", 0)
    monkeypatch.setattr(budget, "_in_use", lambda: 1 << 40)
    monkeypatch.setattr(budget, "look", lambda *_: None)
    monkeypatch.setattr(policy, "FREE_ON_CPUS", 0)
    weight, x = torch.randn(512, 64, 3, 3), torch.randn(1, 64, 40, 41)
    assert torch.equal(conv2d(x, weight, algorithm="fastest"), F.conv2d(x, weight))


def test_room_for_a_single_layer_on_a_cpu(times, monkeypatch):
    """A tenth of what it needs with PyTorch holds no scratch memory of ours."""
    measured = times(OURS)
    monkeypatch.setattr(budget, "_peak", 20 << 20)
    monkeypatch.setattr(budget, "_in_use", lambda: 20 << 20)
    model = patch(nn.Sequential(nn.Conv2d(256, 256, 3, padding=1))).model
    with torch.no_grad():
        model(torch.randn(1, 256, 56, 56))
    (decision,) = store.every()
    assert measured and decision.choice == KEPT and decision.is_final, decision.reason


def test_no_room_for_a_packed_filter(times, monkeypatch):
    times(OURS)
    monkeypatch.setattr(
        budget, "is_there_room", lambda device, kept, scratch, in_graph: kept == 0
    )
    module = Conv2d(8, 8, 3)
    module.algorithm = "fastest"
    x = leaf(1, 8, 9, 9, grad=False)
    with torch.no_grad():
        for _ in range(2):
            want = F.conv2d(x, module.weight, module.bias)
            torch.testing.assert_close(module(x), want, atol=1e-4, rtol=1e-4)
    (decision,) = store.every()
    assert decision.choice == PACKED


@pytest.mark.parametrize("way", ["patch", "optimize"])
def test_room_is_looked_for_by_each_layer(times, monkeypatch, graphs, way):
    """A problem is decided once; layers that share it have filters of their own, which count."""
    times(OURS)
    model = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)]).eval().requires_grad_(False)
    x = leaf(1, 8, 9, 9, grad=False)
    want = model(x)
    if way == "patch":
        patch(model)
        convolutions = lambda: [*model]
    else:
        model = optimize(model, check=False)
        convolutions = lambda: [m for graph in graphs for m in graph.modules() if isinstance(m, FusedConv2d)]
    of = lambda module: filter_cache(module.weight, lasts=True).bytes
    packed = lambda: sum(map(of, convolutions()))
    limit, asked = [2.5], []

    def is_there_room(device, kept, scratch, in_graph=False):
        asked.append(kept)
        return packed() + kept <= limit[0] * max(asked)

    monkeypatch.setattr(budget, "is_there_room", is_there_room)
    with torch.no_grad():
        for _ in range(TRIES + 1):
            torch.testing.assert_close(model(x), want, atol=1e-4, rtol=1e-4)
        assert [of(m) > 0 for m in convolutions()] == [True, True, False, False]
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
    monkeypatch.setattr(budget._filters, "kept_bytes", packed)
    monkeypatch.setattr(budget, "_theirs", {})
    return has

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [1, 3])
def test_a_copy_of_the_image_takes_memory_only_if_it_is_made(size):
    """Kernels for f16 read images in channels-last where they lie, if the address lets them."""
    n, c, h, w = 2, 64, 40, 40
    memory = torch.randn(n * c * h * w + 1, device="cuda", dtype=torch.float16)
    weight = torch.randn(32, c, size, size, device="cuda", dtype=torch.float16)
    images = [memory[at : at + n * c * h * w].view(n, h, w, c).permute(0, 3, 1, 2) for at in (0, 1)]
    named = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "activation": None, "accuracy": None}
    scratch = [_native.conv2d_bytes(image, weight, None, {**named, "memory": None}, False, True)[1] for image in images]
    if scratch[0] == scratch[1]:
        pytest.skip("the cost model has chosen an algorithm that reads any address")
    assert scratch[1] - scratch[0] >= images[0].nbytes
    for image in images:
        got, want = conv2d(image, weight), F.conv2d(image.double(), weight.double())
        assert (got.double() - want).abs().max() <= 1e-2 * want.abs().max()



def test_room_is_a_tenth_of_what_pytorch_needs(on_cuda):
    """Whatever cuDNN's trials took."""
    memory, device = budget, torch.device("cuda:0")

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


def test_graphs_tell_what_they_need_before_they_run(on_cuda):
    memory, device = budget, torch.device("cuda:0")

    def is_room(kept, scratch):
        return memory.is_there_room(device, kept << 20, scratch << 20)

    on_cuda["allocated"] = 100
    memory.expect(device, 900 << 20)
    assert is_room(100, 900) and not is_room(101, 900) and not is_room(100, 901)
    with memory.beside(300 << 20):
        assert is_room(100, 600) and not is_room(100, 601)
    assert is_room(100, 900)
    memory.expect(torch.device("cpu"), 1 << 40)
    assert not is_room(101, 900)


def test_what_a_check_holds_is_no_models(on_cuda):
    """A tensor and a view of it are 32 MiB together."""
    memory, device, held = budget, torch.device("cuda:0"), torch.empty(32 << 20, dtype=torch.uint8)

    def is_room(kept, scratch):
        return memory.is_there_room(device, kept << 20, scratch << 20)

    on_cuda["allocated"] = 532
    with memory.apart([held, held[: 1 << 20]]):
        memory.look(device, 100 << 20)
        assert is_room(60, 100) and not is_room(61, 100) and not is_room(60, 101)
    on_cuda["allocated"] = 500
    assert is_room(60, 100) and not is_room(61, 100) and not is_room(60, 101)


def test_graphs_have_a_share_of_the_device(on_cuda):
    memory, device = budget, torch.device("cuda:0")
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
    names = {"KEPT": KEPT, "PACKED": PACKED, "PyTorch": PYTORCH}
    seconds = {"KEPT": time_kept, "PACKED": time_packed, "PyTorch": 1.0}
    monkeypatch.setattr(
        measure, "times_of", lambda device, runs: {names[n]: Seconds(seconds[n]) for n in names if names[n] in runs}
    )
    monkeypatch.setattr(budget, "look_inside", lambda *_: None)
    on_cuda["allocated"] = 10 * room
    forgotten = []
    candidates = [
        Candidate(names["KEPT"], list, kept << 20, 0, forget=lambda: forgotten.append(1)),
        Candidate(names["PACKED"], list, 0, (kept + 10) << 20),
    ]
    options = Options((1, 1), (0, 0), (1, 1), 1)
    sizes, how, layer = key_of(torch.ones(1, 8, 9, 9), torch.ones(8, 8, 3, 3), None, options, None)
    key = (sizes, (torch.device("cuda:0"), *how[1:]), layer)
    for module in (store, decider):
        monkeypatch.setattr(module, "is_captured", lambda device: False)
    decision = decider.decide(Question("forward", key, list, lambda wanted: candidates))
    assert decision.choice == names[choice]
    assert bool(forgotten) == (choice == "PACKED")
