"""What PyTorch compiles with: results of every operator lie as its fake kernel says, and as PyTorch's own do."""

import random
from zlib import crc32

import pytest
import torch
import torch.nn.functional as F
from common import OURS, THEIRS
from torch import nn
from windrow.torch import _library, patch

pytestmark = pytest.mark.usefixtures("nothing_decided")


def laid_out(generator, *shape):
    """A tensor in some layout: rows of it, in channels-last by each of two ways, any order, with gaps."""
    kind = generator.choice(["plain", "last", "last", "any", "gaps"])
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    if kind == "plain" or (kind == "last" and last is None):
        return torch.randn(shape)
    if kind == "last":
        # One channel has other strides by `to` than by `contiguous`.
        return torch.randn(shape).to(memory_format=last)
    order = generator.sample(range(len(shape)), len(shape))
    sizes = [shape[d] + (kind == "gaps") * generator.choice([0, 1]) for d in order]
    given = torch.randn(sizes)[tuple(slice(0, shape[d]) for d in order)]
    return given.permute(sorted(range(len(shape)), key=lambda i: order[i]))


def convolution(g, is_transposed, is_line, algorithm):
    n, groups = g.choice([1, 2]), g.choice([1, 1, 2])
    c, k = groups * g.choice([1, 1, 3]), groups * g.choice([1, 2])
    r = g.choice([1, 1, 2, 3])
    size = [r + g.choice([0, 2]) for _ in range(1 if is_line else 2)]
    x = laid_out(g, n, c, *size)
    filter = (c, k // groups) if is_transposed else (k, c // groups)
    weight = laid_out(g, *filter, *[r] * len(size))
    bias = g.choice([None, torch.randn(k)])
    stride = [1, g.choice([1, 2])] if is_line else [g.choice([1, 2])] * 2
    more = [0, 0] if is_transposed else None
    return (x, weight, bias, stride, [0, 0], [1, 1], groups, more), (None, algorithm)


def cases(g):
    """Calls of each operator: its name and arguments."""
    for is_transposed in (False, True):
        for is_line in (False, True):
            for algorithm in (None, "fastest"):
                given, (accuracy, algorithm) = convolution(g, is_transposed, is_line, algorithm)
                yield "conv2d", (*given, "relu", accuracy, algorithm, g.choice(["kept", "changing"]))
                y = torch.ops.windrow.conv2d(*given, None, accuracy, algorithm, "changing")
                needs = g.choice([(True, True, given[2] is not None), (True, False, False), (False, True, False)])
                dy = laid_out(g, *y.shape)
                yield "conv2d_backward", (dy, *given, accuracy, algorithm, list(needs))
                if not is_transposed and not is_line:
                    x, weight, bias, *options, groups, _ = given
                    residual = g.choice([None, laid_out(g, *y.shape)])
                    yield "conv2d_fused", (x, weight, bias, residual, *options, groups, "silu", None)
                    # Some channels of an image, and a residual that lies alike.
                    layout = g.choice([torch.contiguous_format, torch.channels_last])
                    n, k, h, w = y.shape
                    wide = [torch.randn(n, k + 3, h, w).contiguous(memory_format=layout) for _ in range(2)]
                    out, beside = (t[:, 1 : 1 + k] for t in wide)
                    residual = g.choice([None, beside])
                    yield "conv2d_into", (x, weight, bias, residual, *options, groups, "silu", None, out)
    groups, frames = g.choice([1, 2]), g.choice([1, 2])
    x = laid_out(g, g.choice([1, 2]), groups * g.choice([1, 3]), 3, 4, 4)
    weight = laid_out(g, groups * g.choice([1, 2]), x.shape[1] // groups, frames, 2, 2)
    given = (x, weight, g.choice([None, torch.randn(weight.shape[0])]))
    options, algorithm = ([g.choice([1, 2])] * 3, [0, 1, 1], [1, 1, 1], groups, None), g.choice([None, "fastest"])
    yield "conv2d", (*given, *options, "relu", None, algorithm, g.choice(["kept", "changing"]))
    y = torch.ops.windrow.conv2d(*given, *options, None, None, algorithm, "changing")
    needs = [True, True, given[2] is not None]
    yield "conv2d_backward", (laid_out(g, *y.shape), *given, *options, None, algorithm, needs)
    options = ([1] * 3, *options[1:4])
    yield "conv2d_fused", (*given, None, *options, "silu", None)
    initial = g.choice([None, laid_out(g, *x.shape[:2], frames - 1, *x.shape[3:])]) if frames > 1 else None
    way = "causal" if initial is not None else g.choice(["causal", "causal_repeat"])
    y = torch.ops.windrow.conv3d_fused(*given, None, initial, way, *options, None, None, False)
    residual = g.choice([None, laid_out(g, *y.shape)])
    yield "conv3d_fused", (*given, residual, initial, way, *options, "silu", None, g.choice([False, True]))
    n, l, d, width = g.choice([1, 2]), g.choice([1, 5]), g.choice([1, 3]), g.choice([1, 2, 4])
    shape = g.choice([(l, d), (n, l, d)])
    x, gate = laid_out(g, *shape), laid_out(g, *shape)
    yield "gelu", (x, torch.randn(d), g.choice([None, gate]), "tanh")
    yield "gelu_backward", (laid_out(g, *shape), x, torch.randn(d), gate, "none", [True, True, True])
    x, weight, bias = laid_out(g, n, d, l), laid_out(g, d, width), torch.randn(d)
    states = g.choice([None, laid_out(g, n, d, width - 1)])
    rest = (states, None, None, "silu")
    yield "causal_conv1d", (x, weight, bias, *rest, g.choice([False, True]))
    split = g.choice([[d], [1, d - 1], [1, 1, d - 2]]) if d > 2 else [d]
    yield "causal_conv1d_split", (x, weight, bias, states, None, None, split, "silu", g.choice([False, True]))
    dy, needs = laid_out(g, n, d, l), [True, True, True, states is not None]
    yield "causal_conv1d_backward", (dy, None, x, weight, bias, *rest, needs)
    yield "causal_conv1d_update", (x, laid_out(g, n, d, width), weight, bias, None, None, None)


def significant(t):
    """The strides that tell where elements are: of dimensions of one element they do not."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1] if t.numel() else []


def outcome(result):
    results = [] if result is None else result if isinstance(result, list | tuple) else [result]
    return [(t.dtype, t.shape, significant(t)) for t in results]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("factor", [OURS, THEIRS], ids=["ours", "theirs"])
def test_every_operator(seed, factor, times):
    times(factor)
    for round in range(12):
        g = random.Random(crc32(f"{seed} {round}".encode()))
        for name, args in cases(g):
            operator = getattr(_library.OPERATORS, name).default
            fake = outcome(operator(*[a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]))
            described = [(a.shape, a.stride()) if isinstance(a, torch.Tensor) else a for a in args]
            assert outcome(operator(*args)) == fake, (name, described)
            if name == "conv2d_into":
                want = torch.ops.windrow.conv2d_fused(*args[:-1])
                torch.testing.assert_close(args[-1], want, atol=1e-4, rtol=1e-4, check_stride=False)


def test_every_operator_is_among_them():
    names = {name for name, _ in cases(random.Random(0))}
    registered = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    assert {name for library, _, name in registered if library == _library.NAMESPACE} <= names


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("factor", [OURS, THEIRS], ids=["ours", "theirs"])
def test_patched_modules_lay_results_out_as_pytorch(seed, factor, times):
    times(factor)
    g = random.Random(seed)
    kinds = [(nn.Conv2d, F.conv2d), (nn.ConvTranspose2d, F.conv_transpose2d)]
    for _ in range(10):
        kind, _function = g.choice(kinds)
        groups = g.choice([1, 1, 2])
        c, k = groups * g.choice([1, 1, 2]), groups * g.choice([1, 3])
        module = kind(c, k, 3, groups=groups)
        with torch.no_grad():
            module.weight = nn.Parameter(laid_out(g, *module.weight.shape))
        x = laid_out(g, 2, c, 5, 4)
        model = nn.Sequential(module)
        with torch.no_grad():
            want = model(x)
            patch(model)
            for _ in range(3):
                got = model(x)
                assert significant(got) == significant(want), (x.stride(), module.weight.stride())
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_transposed_convolution_of_one_channel_compiles():
    model = nn.Sequential(nn.ConvTranspose2d(1, 6, 3, 2, 1, 1), nn.ReLU()).eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        want = model(x)
        patch(model)
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), want, atol=1e-4, rtol=1e-4)


def test_grey_images_in_channels_last(factor):
    model = nn.Sequential(nn.Conv2d(1, 8, 3)).to(memory_format=torch.channels_last)
    x = torch.randn(1, 1, 8, 8).to(memory_format=torch.channels_last)
    with torch.no_grad():
        want = model(x)
        patch(model)
        for _ in range(3):
            assert model(x).stride() == want.stride()
