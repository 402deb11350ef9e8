"""`patch`: what it swaps and leaves, and what swapped modules compute."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from common import THEIRS, compare_with_f64, each_device, each_dtype, each_winner, leaf
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from windrow.torch import (
    GELU,
    Conv2d,
    conv2d,
    freeze,
    patch,
    patched,
    unpatch,
)
from windrow.torch.choice import policy, store

pytestmark = pytest.mark.usefixtures("nothing_decided")


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
            "video": nn.Conv3d(8, 8, 2),
            "volume": nn.ConvTranspose3d(8, 8, 2),
        }
    )
    x = leaf(1, 8, 9, 9, grad=False)
    want = model["body"](x)
    weight = shared.weight
    report = patch(model)
    assert report.model is model
    assert list(report.swapped) == ["stem", "body.0", "body.1", "down", "depthwise", "up", "line", "video"]
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
    def forward(self, x):
        return nn.functional.conv2d(x, self.weight, self.bias, padding="same")


def test_what_is_left_is_named_with_the_reason():
    model = nn.ModuleDict(
        {
            "own": NewGELUActivation(),
            "subclass": Padded(2, 2, 3),
            "normed": weight_norm(nn.Conv2d(2, 2, 3)),
            "lazy": nn.LazyConv2d(2, 3),
            "volume": nn.ConvTranspose3d(2, 2, 3),
            "normed up": weight_norm(nn.ConvTranspose2d(2, 2, 3)),
            "linear": nn.Linear(2, 2),
        }
    )
    report = patch(model)
    assert not report.swapped
    reasons = {name: why.partition(" ")[2] for name, why in report.left.items()}
    assert reasons == {
        "own": "is no nn.GELU; where it computes the same, put windrow.torch.GELU in its place",
        "subclass": "has a forward in which no call of PyTorch's was found",
        "normed": "is parametrized: patch the model before that",
        "lazy": "has no weights yet: run the model, then patch it",
        "volume": "Windrow has nothing faster",
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
    decisions = store.every()
    assert len({d.what for d in decisions}) == 4
    # cuDNN's are PyTorch's without a measurement.
    assert {d.choice == policy.PYTORCH for d in decisions if d.times} == {factor == THEIRS}


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
    assert {d.choice == policy.PYTORCH for d in store.every()} == {factor == THEIRS}


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
    decided = {d.key.how.dtype for d in store.every()}
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
    assert not store.every()
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


def test_accuracy_of_a_model():
    model = nn.Sequential(nn.Conv2d(4, 4, 3))
    with pytest.raises(ValueError, match="`accuracy` is 'wrong'"):
        patch(model, accuracy="wrong")
    patch(model, accuracy="half")
    assert model[0].accuracy == "half" and "accuracy" not in unpatch(model)[0].__dict__


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
    assert len(store.every()) == 7
    assert " ms" in str(report)


def test_readme():
    page = (Path(__file__).parents[2] / "README.md").read_text()
    (program,) = re.findall(r"```python\n(import torch\n.*?)```", page, re.DOTALL)
    exec(program, {})
