"""Graphs whose operators run one by one keep the operators that enlarge images."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from windrow.torch.backend import _options, _upsampling, windrow

pytestmark = [
    pytest.mark.usefixtures("nothing_decided"),
    pytest.mark.skipif(torch.__version__ < _options.OLDEST, reason="an old PyTorch, which the backend refuses"),
]

SIZES = {
    "nearest": (6, 5), "nearest-exact": (6, 5), "bilinear": (6, 5), "bicubic": (6, 5), "linear": (6,),
    "trilinear": (3, 4, 5),
}  # fmt: skip


class Enlarged(nn.Module):
    def __init__(self, **how):
        super().__init__()
        dims = len(SIZES[how["mode"]])
        self.conv, self.how = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](3, 4, 1), how

    def forward(self, x):
        return F.interpolate(self.conv(x), **self.how)


def compiled(model, rest="eager", **more):
    torch._dynamo.reset()
    return torch.compile(model, backend=windrow, options={"rest": rest, "check": False}, **more)


def operators(call):
    call()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    names = {event.key.removeprefix("aten::") for event in profiled.key_averages()}
    return {name for name in names if "upsample" in name or name == "_unsafe_index"}


@pytest.mark.parametrize("mode", SIZES)
@pytest.mark.parametrize("how", ["scale_factor", "size", "antialias"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_they_stay_whole(mode, how, dynamic):
    if how == "antialias" and mode not in ("bilinear", "bicubic"):
        pytest.skip("PyTorch has none")
    size = [2 * n + 1 for n in SIZES[mode]]
    more = {"scale_factor": {"scale_factor": 2}, "size": {"size": size}, "antialias": {"size": size, "antialias": True}}
    model = Enlarged(mode=mode, **more[how]).eval()
    layouts = [torch.contiguous_format, *[torch.channels_last] * (len(size) == 2)]
    for layout in layouts:
        fast = compiled(model, dynamic=dynamic or None)
        with torch.no_grad():
            for larger in (0, 2):
                x = torch.randn(2, 3, *(n + larger for n in SIZES[mode])).contiguous(memory_format=layout)
                got, want = fast(x), model(x)
                torch.testing.assert_close(got, want)
                assert got.stride() == want.stride()
            names = operators(lambda: fast(x))
        assert names and all("upsample" in name for name in names)


class Like(nn.Module):
    """An image as large as another one, as in pyramids of features."""

    def __init__(self, **how):
        super().__init__()
        self.conv, self.how = nn.Conv2d(3, 4, 1), how

    def forward(self, x, like):
        return F.interpolate(self.conv(x), size=like.shape[2:], **self.how)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("more", [{}, {"align_corners": True}, {"antialias": True}], ids=str)
def test_sizes_that_change(mode, more, grad):
    if more and "nearest" in mode:
        pytest.skip("PyTorch has none")
    if grad and mode == "bicubic" and "antialias" in more:
        pytest.skip("PyTorch's tracer has no gradient of it for such sizes")
    model = Like(mode=mode, **more)
    fast = compiled(model)
    with torch.set_grad_enabled(grad):
        for larger in (0, 2, 3):
            x, like = torch.randn(2, 3, 6 + larger, 5 + larger), torch.randn(1, 1, 11 + larger, 12 + 2 * larger)
            torch.testing.assert_close(fast(x, like), model(x, like))
            if grad:
                gradients = [torch.autograd.grad(m(x, like).square().sum(), model.conv.weight) for m in (fast, model)]
                torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-4)
        # PyTorch has no whole gradient of bilinear and bicubic ones for such sizes.
        names = operators(lambda: fast(x, like))
        assert "nearest" not in mode or (names and all("upsample" in name for name in names))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_gradients(mode):
    model = Enlarged(mode=mode, scale_factor=2)
    other, x = copy.deepcopy(model), torch.randn(2, 3, 6, 5)
    fast = compiled(model)

    def step(call):
        call(x).square().sum().backward()

    step(fast), step(other)
    torch.testing.assert_close(model.conv.weight.grad, other.conv.weight.grad, rtol=1e-4, atol=1e-4)
    assert operators(lambda: step(fast)) >= {f"upsample_{mode}2d", f"upsample_{mode}2d_backward"}


def test_afterwards_the_tracer_is_as_before():
    operator = torch.ops.aten.upsample_nearest2d.vec
    before = dict(operator.py_kernels)
    with pytest.raises(ZeroDivisionError), _upsampling.whole_upsampling():
        assert dict(operator.py_kernels) != before
        1 / 0  # noqa: B018
    assert dict(operator.py_kernels) == before
    compiled(Enlarged(mode="nearest", scale_factor=2))(torch.randn(1, 3, 4, 4))
    assert dict(operator.py_kernels) == before


def test_other_threads_enlarge_images_meanwhile():
    x, found = torch.randn(1, 3, 4, 4), []
    with _upsampling.whole_upsampling():
        thread = threading.Thread(target=lambda: found.append(F.interpolate(x, scale_factor=2)))
        thread.start(), thread.join()
    assert torch.equal(found[0], F.interpolate(x, scale_factor=2))
