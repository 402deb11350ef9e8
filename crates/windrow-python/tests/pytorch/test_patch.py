"""`patch`, and the algorithm "fastest" of the convolutions that it swaps: Windrow's or PyTorch's."""

import copy
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import windrow.torch
from common import compare_with_f64, each_device, each_dtype, leaf
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from windrow.torch import (
    GELU,
    Conv2d,
    _conv2d_fastest,
    _fastest,
    _modules,
    conv2d,
    freeze,
    patch,
    patched,
    unpatch,
)
from windrow.torch._fastest import PYTORCH, Seconds
from windrow.torch._filters import filter_cache

pytestmark = pytest.mark.usefixtures("nothing_decided")


OURS, THEIRS = 0.5, 2.0
each_winner = pytest.mark.parametrize("factor", [OURS, THEIRS], ids=["ours", "theirs"])


def test_patch():
    shared = nn.Conv2d(8, 8, 3, padding=1)
    model = nn.ModuleDict(
        {
            "stem": nn.Conv2d(3, 8, 7, stride=2),
            "body": nn.Sequential(shared, nn.GELU("tanh"), shared),
            "down": nn.Conv2d(8, 8, 3, stride=2),
            "depthwise": nn.Conv2d(8, 8, 3, groups=8),
            "up": nn.ConvTranspose2d(8, 8, 2, stride=2),
            "line": nn.Conv1d(8, 8, 3, groups=8),
            "volume": nn.Conv3d(8, 8, 2),
        }
    )
    x = leaf(1, 8, 9, 9, grad=False)
    want = model["body"](x)
    weight = shared.weight
    report = patch(model)
    assert report.model is model
    assert list(report.swapped) == ["stem", "body.0", "body.1", "down", "depthwise", "up", "line"]
    assert list(report.left) == ["volume"]
    assert "swapped body.0: Conv2d(8, 8" in str(report) and "left volume: torch.nn.modules" in str(report)
    assert "swapped up: ConvTranspose2d(8, 8" in str(report) and "swapped line: Conv1d(8, 8" in str(report)
    assert "freeze(model)" in str(report) and "forward" not in str(report)
    assert type(shared) is Conv2d and shared.weight is weight
    assert type(model["body"][1]) is GELU
    with torch.no_grad():
        torch.testing.assert_close(model["body"](x), want, atol=1e-4, rtol=1e-4)
    assert "    forward of float32 [1, 8, 9, 9] on cpu: " in str(report)
    again = patch(model)
    assert not again.swapped and "left body.0: Conv2d(8, 8" in str(again)
    assert "Windrow's already" in str(again)
    assert "no convolution" in str(patch(nn.Linear(2, 2)))
    freeze(model)
    assert "freeze(model)" not in str(report)


class NewGELUActivation(nn.Module):
    """As libraries have their own."""


class Padded(nn.Conv2d):
    pass


def test_what_is_left_is_named_with_the_reason():
    model = nn.ModuleDict(
        {
            "own": NewGELUActivation(),
            "subclass": Padded(2, 2, 3),
            "normed": weight_norm(nn.Conv2d(2, 2, 3)),
            "lazy": nn.LazyConv2d(2, 3),
            "up": nn.ConvTranspose1d(2, 2, 3),
            "normed up": weight_norm(nn.ConvTranspose2d(2, 2, 3)),
            "linear": nn.Linear(2, 2),
        }
    )
    report = patch(model)
    assert not report.swapped
    reasons = {name: why.partition(" ")[2] for name, why in report.left.items()}
    assert reasons == {
        "own": "is no nn.GELU; where it computes the same, put windrow.torch.GELU in its place",
        "subclass": "is a class of its own, whose forward may be another",
        "normed": "is parametrized: patch the model before that",
        "lazy": "has no weights yet: run the model, then patch it",
        "up": "Windrow has nothing faster",
        "normed up": "is parametrized: patch the model before that",
    }
    assert report.left["subclass"].startswith(f"{Padded.__module__}.Padded ")


def test_unpatch():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU("tanh"), Conv2d(8, 8, 3), GELU())
    before = [{**m.__dict__} for m in model]
    x = leaf(1, 3, 9, 9, grad=False)
    want = model(x)
    patch(model)
    freeze(model)
    assert unpatch(model) is model
    assert [type(m) for m in model] == [nn.Conv2d, nn.GELU, Conv2d, GELU]
    assert all(m.__dict__ == b for m, b in zip([*model][:2], before, strict=False))
    torch.testing.assert_close(model(x), want, atol=1e-4, rtol=1e-4)
    copied = copy.deepcopy(patch(model).model)
    assert type(unpatch(copied)[0]) is nn.Conv2d and type(model[0]) is Conv2d
    model[0].activation = "relu"
    with pytest.raises(ValueError, match="`0` has activation 'relu'"):
        unpatch(model)
    assert type(model[0]) is Conv2d and type(model[1]) is GELU


def test_patched_for_a_block():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU())
    with pytest.raises(KeyError), patched(model) as report:
        assert [*report.swapped] == ["0", "1"] and type(model[0]) is Conv2d
        with patched(model) as inner:
            assert not inner.swapped
        assert type(model[0]) is Conv2d
        raise KeyError
    assert [type(m) for m in model] == [nn.Conv2d, nn.GELU]


@each_device
@each_dtype
@each_winner
@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 3, 1)])
def test_values_and_gradients(device, dtype, factor, layout, times):
    times(factor)
    x = leaf(2, 8, 13, 11, dtype=dtype, device=device, layout=layout)
    weight = leaf(12, 8, 3, 3, dtype=dtype, device=device)
    for bias in [None, leaf(12, dtype=dtype, device=device)]:
        for _ in range(2):
            compare_with_f64(
                lambda x, w, b: conv2d(x, w, b, padding=1, algorithm="fastest"),
                lambda x, w, b: F.conv2d(x, w, b, padding=1),
                (x, weight, bias),
            )
    decisions = _fastest.decisions()
    assert len({d.mode for d in decisions}) == 4
    # cuDNN's are PyTorch's without a measurement.
    assert {d.choice == _fastest.PYTORCH for d in decisions if d.is_measured} == {factor == THEIRS}


@each_device
@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 0)])
def test_gradients_are_decided_each_for_itself(device, wanted, monkeypatch):
    def half(device, contestants):
        mine = contestants[1].name
        is_first = len(_fastest.decisions()) % 2 == 0
        return {_fastest.PYTORCH: Seconds(1.0), mine: Seconds(OURS if is_first else THEIRS)}

    monkeypatch.setattr(_fastest, "_times", half)
    shapes = [(2, 6, 9, 8), (7, 6, 3, 3), (7,)]
    tensors = [leaf(*s, device=device, grad=bool(w)) for s, w in zip(shapes, wanted, strict=True)]
    for _ in range(2):
        compare_with_f64(
            lambda x, w, b: conv2d(x, w, b, algorithm="fastest"),
            lambda x, w, b: F.conv2d(x, w, b),
            tensors,
        )


@each_device
def test_what_is_remembered_hides_no_option(device, times):
    times(THEIRS)
    module = nn.Conv2d(3, 4, 3, padding=1).to(device)
    patch(nn.ModuleList([module]))
    x = leaf(1, 3, 6, 6, device=device)
    for _ in range(3):
        y = module(x)
        y.sum().backward()
    assert module._pytorchs is not None
    module.activation = "relu"
    torch.testing.assert_close(module(x), F.relu(y))
    module.activation, module.padding = None, (0, 0)
    assert module(x).shape == (1, 4, 4, 4)


@each_device
@pytest.mark.parametrize(("gradient", "is_pytorchs"), [(1.0, False), (100.0, True)])
def test_a_step_that_gains_little_is_pytorchs(device, gradient, is_pytorchs, monkeypatch):
    def found(device, contestants):
        theirs = gradient if _fastest.decisions() else 1.0
        ours = 0.5 if theirs == 1.0 else 2 * theirs
        return {_fastest.PYTORCH: Seconds(theirs), contestants[1].name: Seconds(ours)}

    monkeypatch.setattr(_fastest, "_times", found)
    x, weight = leaf(2, 4, 9, 10, device=device), leaf(6, 4, 3, 3, device=device)
    of = (x, weight, None, _conv2d_fastest.Options((1, 1), (0, 0), (1, 1), 1), None, False)
    for _ in range(2):
        assert (_conv2d_fastest.is_pytorchs(*of) is None) == (not _fastest.decisions())
        conv2d(x, weight, algorithm="fastest").sum().backward()
    assert _conv2d_fastest.is_pytorchs(*of) == is_pytorchs


@each_device
@each_winner
@pytest.mark.parametrize("image", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("filters", [torch.contiguous_format, torch.channels_last])
def test_layout_is_that_of_pytorch(device, factor, image, filters, times):
    times(factor)
    module = nn.Conv2d(4, 6, 3).to(device, memory_format=filters)
    x = leaf(2, 4, 9, 10, device=device, grad=False).contiguous(memory_format=image)
    with torch.no_grad():
        want = module(x)
        patch(module_list := nn.ModuleList([module]))
        for call in (module, torch.compile(module_list[0], fullgraph=True)):
            for _ in range(2):
                y = call(x)
                assert y.stride() == want.stride()
                torch.testing.assert_close(y, want, atol=1e-4, rtol=1e-4)


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
    modes = sorted({d.mode for d in _fastest.decisions()})
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
    for size in range(5, 40):
        x = leaf(1, 3, size, size, grad=False)
        torch.testing.assert_close(conv2d(x, weight, algorithm="fastest"), F.conv2d(x, weight))
    assert len(measured) == _fastest._MEASURED_SIZES
    follower = _fastest.decisions()[-1]
    assert follower.choice == _fastest.PYTORCH and "as for [1, 3, 1" in follower.why


def test_decisions_are_bounded(times, monkeypatch):
    times(THEIRS)
    monkeypatch.setattr(_fastest, "_DECISIONS", 5)
    for channels in range(1, 9):
        conv2d(torch.ones(1, channels, 4, 4), torch.ones(1, channels, 3, 3), algorithm="fastest")
    assert [d.problem[2][0][1] for d in _fastest.decisions()] == [4, 5, 6, 7, 8]


@each_winner
def test_compiled(factor, times):
    times(factor)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 4, 3))
    plain = copy.deepcopy(model)
    patch(model)
    compiled = torch.compile(model, fullgraph=True)
    for n in [2, 2, 5]:
        x = leaf(n, 3, 10, 12, grad=False)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), plain(x), atol=1e-4, rtol=1e-4)
        y, want = compiled(x), plain(x)
        torch.testing.assert_close(y, want, atol=1e-4, rtol=1e-4)
        ours = torch.autograd.grad(y.square().sum(), list(model.parameters()))
        theirs = torch.autograd.grad(want.square().sum(), list(plain.parameters()))
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-4)
    assert {d.choice == _fastest.PYTORCH for d in _fastest.decisions()} == {factor == THEIRS}


@each_device
@each_winner
@pytest.mark.parametrize("training", [False, True])
def test_autocast(device, factor, training, times):
    times(factor)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3)).to(device)
    plain = copy.deepcopy(model)
    patch(model)
    x = leaf(2, 4, 9, 10, device=device, grad=False)
    for _ in range(2):
        with torch.set_grad_enabled(training):
            with torch.autocast(device, torch.bfloat16):
                y, want = model(x), plain(x)
            assert y.dtype == want.dtype == torch.bfloat16
            torch.testing.assert_close(y, want, atol=3e-2, rtol=3e-2)
            if training:
                y.float().square().sum().backward()
                assert model[0].weight.grad.dtype == torch.float32
    decided = {d.problem[1][1] for d in _fastest.decisions()}
    assert decided == {torch.bfloat16}


def test_what_only_pytorch_computes():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3), nn.GELU("tanh")).double()
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    want = model(x)
    patch(model)
    y = model(x)
    assert torch.equal(y, want)
    y.sum().backward()
    assert torch.equal(model(x[0]), model(x)[0])
    assert not _fastest.decisions()
    with pytest.raises(RuntimeError, match="same dtype|type"):
        model(x.float())
    with pytest.raises(RuntimeError, match="channels"):
        model(torch.randn(2, 4, 9, 9, dtype=torch.float64))
    assert model(x[:0]).shape == (0, 4, 5, 5)


@each_device
@each_winner
@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 3, 1)])
@pytest.mark.parametrize(
    ("filter", "options"),
    [
        ((8, 8, 1, 1), {}),
        ((12, 8, 3, 3), {"stride": 2, "padding": 1}),
        ((12, 8, 5, 3), {"dilation": (1, 2), "padding": (2, 0)}),
        ((8, 1, 3, 3), {"groups": 8, "padding": 1}),
        ((16, 2, 3, 3), {"groups": 4, "stride": (2, 1)}),
    ],
)
def test_every_convolution(device, factor, layout, filter, options, times):
    times(factor)
    x = leaf(2, 8, 11, 12, device=device, layout=layout)
    weight, bias = leaf(*filter, device=device), leaf(filter[0], device=device)
    for _ in range(2):
        compare_with_f64(
            lambda x, w, b: conv2d(x, w, b, **options, algorithm="fastest"),
            lambda x, w, b: F.conv2d(x, w, b, **options),
            (x, weight, bias),
        )


@each_winner
def test_the_module_finds_pytorchs_by_itself(factor, times):
    times(factor)
    model = nn.Sequential(nn.Conv2d(4, 4, 1))
    patch(model)
    x = leaf(1, 4, 6, 6, grad=False)
    with torch.no_grad():
        for _ in range(3):
            model(x)
    run = model[0]._last[-1]
    assert run is not None and (model[0]._pytorchs is not None) == (factor == THEIRS)


@each_device
@each_dtype
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_way_of_later_calls(device, dtype, frozen, layout, times):
    times(OURS)
    module = nn.Conv2d(4, 6, 3, padding=1).to(device, dtype, memory_format=layout).requires_grad_(False)
    patch(nn.ModuleList([module]))
    module.frozen = frozen
    images = [torch.randn(n, 4, 7, 8, device=device, dtype=dtype) for n in (1, 2)]
    images = [x.contiguous(memory_format=layout) for x in images]
    # cuDNN's and oneDNN's sums, and ours.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}

    def agrees(module, x, **how):
        y = module(x)
        options = {"padding": module.padding, **how}
        want = F.conv2d(x, module.weight, module.bias, **options)
        torch.testing.assert_close(y, want, **tolerance)
        assert y.stride() == want.stride()

    def is_there(module):
        return module._ours[0] is not None

    # cuDNN has nothing to gain from itself: there is no call of ours to remember.
    decided_for_ours = False
    for x in images:
        for _ in range(4):
            agrees(module, x)
        decided_for_ours |= is_there(module)
    if device == "cpu":
        assert decided_for_ours
    x = images[1]
    # A copy begins anew.
    other = copy.deepcopy(module)
    assert not is_there(other)
    agrees(other, x)
    # Other memory, also where the module was told that the filter stays as it is.
    module.weight.data = torch.randn_like(module.weight)
    agrees(module, x)
    module.weight.data = module.weight.data.clone(memory_format=torch.preserve_format)
    for _ in range(3):
        agrees(module, x)
    if not frozen:
        module.weight.data.mul_(2)
        agrees(module, x)
    module.bias = None
    for _ in range(3):
        agrees(module, x)
    # Gradients and options.
    leaf = x.clone().requires_grad_()
    module(leaf).sum().backward()
    assert leaf.grad is not None
    agrees(module, x)
    module.padding = (0, 1)
    for _ in range(3):
        agrees(module, x)
    other_format = torch.contiguous_format if layout is torch.channels_last else torch.channels_last
    for _ in range(3):
        agrees(module, x.contiguous(memory_format=other_format))
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        module(x.double())
    module.activation = "relu"
    torch.testing.assert_close(module(x), F.relu(F.conv2d(x, module.weight, padding=(0, 1))), **tolerance)


@each_device
@each_winner
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_way_of_later_steps_of_training(device, factor, layout, times):
    times(factor)
    plain = nn.Conv2d(4, 6, 3, padding=1, device=device).to(memory_format=layout)
    module = patch(copy.deepcopy(nn.ModuleList([plain]))).model[0]
    images = [torch.randn(2, 4, 7, 8, device=device) for _ in range(2)]
    images[1] = images[1].contiguous(memory_format=layout)

    def step(conv, x, wants_x):
        x = x.clone().requires_grad_(wants_x)
        conv.zero_grad()
        y = conv(x)
        y.square().sum().backward()
        kept = conv.bias is not None and conv.bias.grad is not None
        return y, x.grad, conv.weight.grad, conv.bias.grad if kept else None

    def agree(times=3):
        for x in images:
            for wants_x in (False, True):
                if not (wants_x or plain.weight.requires_grad):
                    continue
                for _ in range(times):
                    for got, want in zip(*(step(c, x, wants_x) for c in (module, plain)), strict=True):
                        assert (got is None) == (want is None)
                        if got is not None:
                            torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-4)
                            assert got.stride() == want.stride()

    agree()
    is_ours = type(module._last[-1]).__name__ == "Training"
    if device == "cpu":
        assert is_ours == (factor == OURS)
    # A filter that an optimizer writes, one whose memory is another, one that nobody trains, no bias.
    with torch.no_grad():
        module.weight.mul_(2), plain.weight.mul_(2)
    agree(1)
    module.weight.data, plain.weight.data = (c.weight.data.clone() for c in (module, plain))
    agree(2)
    for convolution in (module, plain):
        convolution.bias.requires_grad_(False)
    agree(2)
    for convolution in (module, plain):
        convolution.weight.requires_grad_(False)
        convolution.bias.requires_grad_(True)
    agree()
    for convolution in (module, plain):
        convolution.weight.requires_grad_(True)
        convolution.bias = None
    agree()
    with torch.autograd.profiler.profile():
        agree(1)
    x = images[0].clone().requires_grad_()
    with torch.inference_mode():
        torch.testing.assert_close(module(images[0]), plain(images[0]), atol=1e-3, rtol=1e-4)
    (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    if is_ours:
        with pytest.raises(NotImplementedError, match="double backward: windrow.torch.conv2d"):
            dx.sum().backward()


def test_the_way_of_later_calls_ends_with_the_memory(times):
    times(OURS)
    module = nn.Conv2d(4, 4, 3).requires_grad_(False)
    patch(nn.ModuleList([module]))
    x = leaf(1, 4, 6, 6, grad=False)
    for _ in range(3):
        module(x)
    call, _ = module._ours
    weight, bias = module.weight, module.bias
    assert torch.equal(call(x, weight, bias), module(x))
    assert call(x[:, :, 1:], weight, bias) is None
    assert call(x, weight.clone(), bias) is None
    assert call(x, weight, None) is None
    assert call(x.double(), weight, bias) is None
    assert call(x.clone().requires_grad_(), weight, bias) is None
    storage = weakref.ref(weight.untyped_storage())
    weight.data = weight.data.clone()
    assert storage() is None and call(x, weight, bias) is None


def test_later_calls_bring_images_into_the_layout_of_the_filter_once(times, monkeypatch):
    times(OURS)
    module = nn.Conv2d(4, 4, 3).requires_grad_(False).to(memory_format=torch.channels_last)
    patch(nn.ModuleList([module]))
    x = leaf(2, 4, 6, 6, grad=False)
    for _ in range(3):
        module(x)
    copies = []
    bring = _conv2d_fastest.in_layout
    monkeypatch.setattr(_conv2d_fastest, "in_layout", lambda *a: copies.append(a) or bring(*a))
    y = module(x)
    assert len(copies) == 1 and y.is_contiguous(memory_format=torch.channels_last)
    want = F.conv2d(x, module.weight, module.bias)
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)
    # Images of other strides are not of this way.
    call, _ = module._ours
    assert call(x.contiguous(memory_format=torch.channels_last), module.weight, module.bias) is None
    for other in (x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3)):
        want = F.conv2d(other, module.weight, module.bias)
        torch.testing.assert_close(module(other), want, atol=1e-5, rtol=1e-5)


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


def test_accuracy_of_a_model():
    model = nn.Sequential(nn.Conv2d(4, 4, 3))
    with pytest.raises(ValueError, match="`accuracy` is 'wrong'"):
        patch(model, accuracy="wrong")
    patch(model, accuracy="half")
    assert model[0].accuracy == "half" and "accuracy" not in unpatch(model)[0].__dict__


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
    weight, x = torch.randn(512, 64, 3, 3), torch.randn(1, 64, 40, 41)
    assert torch.equal(conv2d(x, weight, algorithm="fastest"), F.conv2d(x, weight))


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
        model = windrow.torch.optimize(model)
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


def test_a_measurement_is_not_waited_for(monkeypatch):
    """Calls that come during one take PyTorch's operator, and decide nothing."""
    x, weight = leaf(1, 8, 9, 9, grad=False), leaf(8, 8, 3, 3, grad=False)
    inside, leave = threading.Event(), threading.Event()

    def slow(device, contestants):
        inside.set()
        assert leave.wait(60)
        return {c.name: Seconds(1.0) for c in contestants}

    monkeypatch.setattr(_fastest, "_times", slow)
    thread = threading.Thread(target=conv2d, args=(x, weight), kwargs={"algorithm": "fastest"})
    thread.start()
    assert inside.wait(60)
    torch.testing.assert_close(conv2d(x, weight, algorithm="fastest"), F.conv2d(x, weight))
    assert not _fastest.decisions()
    leave.set()
    thread.join()
    assert len(_fastest.decisions()) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_winner
def test_in_a_graph(factor, times):
    measured = times(factor)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)).cuda()
    plain = copy.deepcopy(model)
    patch(model)
    x = leaf(2, 8, 12, 12, device="cuda", grad=False)
    with torch.no_grad():
        plain(x)
        for is_decided in (False, True):
            if is_decided:
                model(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = model(x)
            assert bool(measured) == is_decided
            for _ in range(2):
                x.normal_()
                graph.replay()
                torch.testing.assert_close(y, plain(x), atol=1e-3, rtol=1e-3)


@each_device
def test_measured(device):
    """The real clock: whatever it finds, results are right."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 32, 3)).to(device)
    plain = copy.deepcopy(model)
    report = patch(model)
    x = leaf(2, 16, 20, 20, device=device, grad=False)
    for _ in range(2):
        y, want = model(x), plain(x)
        torch.testing.assert_close(y, want, atol=1e-4, rtol=1e-4)
        y.sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x), atol=1e-4, rtol=1e-4)
    assert len(_fastest.decisions()) == 7
    assert " ms" in str(report)


def test_readme():
    page = (Path(__file__).parents[2] / "README.md").read_text()
    (program,) = re.findall(r"```python\n(import torch\n.*?)```", page, re.DOTALL)
    exec(program, {})


@pytest.fixture
def captured(monkeypatch):
    """Calls this with whether the calls that follow are captured in a graph."""
    is_in_graph = [False]
    for module in (_fastest, _modules):
        monkeypatch.setattr(module, "is_captured", lambda device: is_in_graph[0])
    return lambda now: is_in_graph.__setitem__(0, now)


def test_who_is_captured_may_be_another(monkeypatch, captured):
    """A call waits for the interpreter, which is busier with ours here; a graph does not."""
    ours = []

    def found(device, contestants):
        ours.extend(c.name for c in contestants if c.name != PYTORCH)
        return {PYTORCH: Seconds(1.0, 1.0), ours[0]: Seconds(0.5, 1.2)}

    monkeypatch.setattr(_fastest, "_times", found)
    module = nn.Conv2d(8, 8, 3)
    patch(nn.ModuleList([module]))
    x = leaf(1, 8, 9, 9, grad=False)
    want = F.conv2d(x, module.weight, module.bias)
    who = lambda: module._last[3] if module._ours[0] is None else module._ours[0]
    with torch.no_grad():
        module(x)
        # What is kept for graphs alone was let go of.
        cache = filter_cache(module.weight)
        assert cache.bytes == 0 and cache.promised > 0
        for _ in range(2):
            for is_in_graph in (False, False, False, True, True, True):
                captured(is_in_graph)
                torch.testing.assert_close(module(x), want, atol=1e-5, rtol=1e-5)
                assert (who() is _modules.PYTORCHS) != is_in_graph
                assert module._ours == _modules._NO_CALL
    (decision,) = _fastest.decisions()
    assert (decision.choice, [decision.in_graph]) == (PYTORCH, ours)


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
        _fastest,
        "_times",
        lambda device, contestants: {PYTORCH: Seconds(*theirs), contestants[1].name: Seconds(*ours)},
    )
    with torch.no_grad():
        conv2d(leaf(1, 8, 9, 9), leaf(8, 8, 3, 3), algorithm="fastest")
    (decision,) = _fastest.decisions()
    assert (decision.choice != PYTORCH, decision.in_graph != PYTORCH) == (called, in_graph)


def test_a_frozen_filter_is_decided_for_itself(times):
    times(OURS)
    module = Conv2d(8, 8, 3)
    module.algorithm = "fastest"
    x = leaf(1, 8, 9, 9, grad=False)
    with torch.no_grad():
        module(x)
        freeze(module)(x)
    modes = [d.mode for d in _fastest.decisions()]
    assert modes == ["forward", "forward with a frozen filter"]


def test_parameters_that_become_others(times):
    """A module of PyTorch's looks for them on each call, where `nn.utils` may have put a property."""
    times(THEIRS)
    module = nn.Conv2d(8, 8, 3)
    patch(nn.ModuleList([module]))
    x = leaf(1, 8, 9, 9, grad=False)
    with torch.no_grad():
        for _ in range(3):
            module(x)
        assert module._pytorchs is not None
        weight = nn.utils.parametrizations.weight_norm(module)
        module.parametrizations.weight.original0.mul_(2)
        for _ in range(3):
            want = F.conv2d(x, weight.weight, module.bias)
            torch.testing.assert_close(module(x), want, atol=1e-5, rtol=1e-5)


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


def test_graphs_have_a_thousandth_of_the_device(on_cuda):
    memory, device = _fastest._memory, torch.device("cuda:0")
    on_cuda["promised"] = 1
    on_cuda["allocated"] = 10
    memory.look(device, 0)
    assert memory.is_there_room(device, 3 << 20, 0, in_graph=True)
    assert not memory.is_there_room(device, 4 << 20, 0, in_graph=True)
