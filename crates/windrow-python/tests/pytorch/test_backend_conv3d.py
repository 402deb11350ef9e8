"""Convolutions of videos in compiled graphs, and the frames that causal ones read before a chunk."""

import copy

import pytest
import torch
import torch.nn.functional as F
from common import OURS, THEIRS, each_device, each_dtype
from torch import Tensor, nn
from windrow.torch import optimize
from windrow.torch._library import OPERATORS
from windrow.torch.backend import _compile, _layout, _options, windrow
from windrow.torch.choice.candidates import Windrow
from windrow.torch.choice.problem import is_laid_out_last

pytestmark = [
    pytest.mark.usefixtures("nothing_decided"),
    pytest.mark.skipif(torch.__version__ < _options.OLDEST, reason="an old PyTorch, which the backend refuses"),
]
each_rest = pytest.mark.parametrize("rest", ["eager", "inductor"])
LIMITS = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Told:
    """What the report says of each convolution; several may have the same module."""

    def __init__(self) -> None:
        self.fused_ones, self.left_ones = [], []

    def fused(self, name: str, what: str) -> None:
        self.fused_ones.append(what.partition("): ")[2] or what)

    def left(self, name: str, why: str) -> None:
        self.left_ones.append(why)


def compiled(model, rest, dynamic=None, check=True, **options):
    return torch.compile(model, backend=windrow, dynamic=dynamic, options={"rest": rest, "check": check, **options})


def close(got, want):
    assert got.shape == want.shape and got.dtype in LIMITS
    assert (got.double() - want).norm() <= LIMITS[got.dtype] * want.norm()


class Causal(nn.Module):
    """A causal convolution in one of the forms in which models write it."""

    def __init__(self, form, kernel=(3, 3, 3), dilation=(1, 1, 1), stride=1, c=5, k=6):
        super().__init__()
        padding = (0, *((0, 0) if form.startswith("zeros around") else (n // 2 for n in kernel[1:])))
        self.conv = nn.Conv3d(c, k, kernel, stride, padding, dilation)
        self.form, self.frames = form, (kernel[0] - 1) * dilation[0]

    def forward(self, x, cache):
        n, form = self.frames, self.form
        h, w = (size // 2 for size in self.conv.kernel_size[1:])
        if form == "zeros":
            x = F.pad(x, (0, 0, 0, 0, n, 0))
        elif form == "zeros around":
            x = F.pad(x, (w, w, h, h, n, 0))
        elif form == "zeros around frames":
            x = F.pad(torch.cat([cache[:, :, 1:], x], dim=2), (w, w, h, h, 1, 0))
        elif form == "frames":
            x = torch.cat([cache, x], dim=2)
        elif form == "single frames":
            x = torch.cat([*cache.split(1, dim=2), x], dim=-3)
        elif form == "first frame":
            x = torch.cat([x[:, :, :1].repeat(1, 1, n, 1, 1), x], dim=2)
        elif form == "replicated":
            x = F.pad(x, (0, 0, 0, 0, n, 0), mode="replicate")
        elif form == "both sides":
            x = F.pad(x, (0, 0, 0, 0, n, n))
        elif form == "other frames":
            x = torch.cat([cache, cache, x], dim=2)
        elif form == "shared":
            x = torch.cat([cache, x], dim=2)
            return self.conv(x) + x.mean()
        return self.conv(x)


FORMS = {
    "zeros": "causal", "zeros around": "causal", "zeros around frames": "causal", "frames": "causal",
    "single frames": "causal", "first frame": "causal", "replicated": "causal_repeat",
    "both sides": "", "other frames": "", "shared": "",
}  # fmt: skip


@each_device
@each_dtype
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, dtype, device, factor) -> None:
    model, how = Causal(form).to(device, dtype).eval(), {"dtype": dtype, "device": device}
    x, cache = torch.randn(2, 5, 4, 7, 6, **how), torch.randn(2, 5, 2, 7, 6, **how)
    told, wide = Told(), copy.deepcopy(model).double()
    fast = compiled(model, "eager", report=told)
    with torch.no_grad():
        want = wide(x.double(), cache.double())
        for _ in range(3):
            close(fast(x, cache), want)
        (what,) = told.fused_ones
        last = torch.channels_last_3d
        close(fast(x.to(memory_format=last), cache.to(memory_format=last)), want)
    assert (FORMS[form] or "FusedConv2d") in what and ("causal" in what) == bool(FORMS[form])


@each_device
@pytest.mark.parametrize("form", ["zeros around", "frames", "first frame"])
def test_what_inductor_compiles(form, device, times) -> None:
    times(OURS)
    model, told = Causal(form).eval().to(device), Told()
    x, cache = torch.randn(2, 5, 4, 7, 6, device=device), torch.randn(2, 5, 2, 7, 6, device=device)
    with torch.no_grad():
        close(compiled(model, "inductor", report=told)(x, cache), copy.deepcopy(model).double()(x.double(), cache.double()))
    assert "causal" in told.fused_ones[0]


@pytest.mark.parametrize("kernel, dilation, stride", [((3, 1, 1), 1, 1), ((2, 3, 3), 2, 1), ((3, 3, 3), 1, (2, 1, 1))])
def test_other_filters(kernel, dilation, stride, factor) -> None:
    dilation = (dilation, 1, 1)
    frames = (kernel[0] - 1) * dilation[0]
    x, cache = torch.randn(1, 5, 5, 7, 6), torch.randn(1, 5, frames, 7, 6)
    for form in ("zeros", "frames"):
        model, told = Causal(form, kernel, dilation, stride).eval(), Told()
        with torch.no_grad():
            want = copy.deepcopy(model).double()(x.double(), cache.double())
            close(compiled(model, "eager", report=told)(x, cache), want)
        assert ("causal" in told.fused_ones[0]) == (stride == 1)


class Block(nn.Module):
    def __init__(self, c=6):
        super().__init__()
        self.first, self.second, self.norm = nn.Conv3d(c, c, 3), nn.Conv3d(c, c, 3, padding=(0, 1, 1)), nn.BatchNorm3d(c)

    def forward(self, x, cache):
        y = F.silu(self.norm(self.first(F.pad(x, (1, 1, 1, 1, 2, 0)))))
        return F.relu(self.second(torch.cat([cache, y], 2)) + x), y[:, :, -2:]


@each_device
@each_rest
def test_everything_around_a_convolution(rest, device, times) -> None:
    times(OURS)
    model, told = Block().eval().to(device), Told()
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    x, cache = torch.randn(2, 6, 4, 7, 6, device=device), torch.randn(2, 6, 2, 7, 6, device=device)
    wide, fast = copy.deepcopy(model).double(), compiled(model, rest, report=told)
    with torch.no_grad():
        for _ in range(2):
            for got, want in zip(fast(x, cache), wide(x.double(), cache.double()), strict=True):
                close(got, want)
        model.first.weight.mul_(2)
        wide.first.weight.mul_(2)
        close(fast(x, cache)[0], wide(x.double(), cache.double())[0])
    assert told.fused_ones[:2] == ["folded norm, silu, causal", "added, relu, causal"] and not told.left_ones


class Chunk(Block):
    """A block whose second result is a view or a copy."""

    def __init__(self, is_copied):
        super().__init__(8)
        self.is_copied = is_copied

    def forward(self, x, cache):
        y, last = super().forward(x, cache)
        return y, last.clone() if self.is_copied else last


@pytest.mark.parametrize("is_copied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_videos_are_written_as_kernels_read_them(dtype, is_copied, times, monkeypatch) -> None:
    """Kernels of one GPU read channels-last: videos are written so, while results stay row-major."""
    times(OURS)
    monkeypatch.setattr(_layout, "_reads_channels_last", Tensor.is_contiguous)
    given, own = [], Windrow.__call__

    def call(self, x, residual=None, out=None, **frames):
        given.append((is_laid_out_last(x), out is not None and out.is_contiguous()))
        return own(self, x, residual, out, **frames)

    monkeypatch.setattr(Windrow, "__call__", call)
    model = Chunk(is_copied).to(dtype).eval()
    x, cache = torch.randn(2, 8, 4, 7, 6, dtype=dtype), torch.randn(2, 8, 2, 7, 6, dtype=dtype)
    fast, wants = compiled(model, "inductor", check=False), copy.deepcopy(model).double()(x.double(), cache.double())
    with torch.no_grad():
        for _ in range(2):
            given.clear()
            for got, want in zip(fast(x, cache), wants, strict=True):
                close(got, want)
                assert got.stride() == want.stride()
    # The first result goes to the second convolution alone if a copy of its frames is a result of the graph.
    assert given == [(True, not is_copied), (True, True)]


@each_device
@each_dtype
@pytest.mark.parametrize("activation", [None, "silu"])
def test_row_major_results(activation, dtype, device, factor) -> None:
    """The result of a channels-last video is row-major if that is asked for, whoever computes it."""
    how = {"dtype": dtype, "device": device}
    x = torch.randn(2, 8, 4, 7, 6, **how).to(memory_format=torch.channels_last_3d)
    cache, weight, bias = torch.randn(2, 8, 2, 7, 6, **how), torch.randn(6, 8, 3, 3, 3, **how) / 15, torch.randn(6, **how)
    residual = torch.randn(2, 6, 4, 7, 6, **how)
    wide = [t.double() for t in (torch.cat([cache, x], 2), weight, bias)]
    want = F.conv3d(*wide, padding=(0, 1, 1)) + residual.double()
    want = F.silu(want) if activation else want
    of = [1, 1, 1], [0, 1, 1], [1, 1, 1], 1, activation, None
    for _ in range(2):
        got = OPERATORS.conv3d_fused(x, weight, bias, residual, cache, "causal", *of, True)
        close(got, want)
        assert got.is_contiguous()


class Cached(nn.Module):
    """A convolution that PyTorch's operator computes from a concatenation, and results that share memory with a part."""

    def __init__(self, of):
        super().__init__()
        self.conv, self.of = nn.Conv3d(5, 6, 3), of

    def forward(self, x, cache):
        x = F.silu(x)
        return self.conv(torch.cat([cache, x], 2)), self.of(x)


SHARED = {
    "last frames": lambda x: x[:, :, -2:].clone(),
    "all of it": lambda x: x.clone(),
    "a view": lambda x: x[:, :, :1].transpose(0, 1),
    "part of a split": lambda x: x.split(1, 2)[1],
}


@each_device
@pytest.mark.parametrize("is_fixed", [True, False], ids=["fixed", "copied"])
@pytest.mark.parametrize("of", SHARED)
def test_results_lie_as_promised(of, is_fixed, device, times, monkeypatch) -> None:
    """Not as the concatenation in which Inductor puts the video. Otherwise they are copied, and the graph stays."""
    times(THEIRS)
    if not is_fixed:
        monkeypatch.setattr(_compile, "fix_shared_results", lambda graph: None)
    model, told = Cached(SHARED[of]).eval().to(device), Told()
    fast = compiled(model, "inductor", dynamic=False, report=told)
    x, cache = torch.randn(2, 5, 2, 7, 6, device=device), torch.randn(2, 5, 2, 7, 6, device=device)
    with torch.no_grad():
        wants = model(x, cache)
        for _ in range(3):
            for got, want in zip(fast(x, cache), wants, strict=True):
                assert got.stride() == want.stride() and torch.allclose(got, want, atol=1e-5)
        if is_fixed:
            assert got.untyped_storage().nbytes() <= x.untyped_storage().nbytes()
    copies = [why for why in told.left_ones if "copied" in why or "differs" in why]
    assert not copies if is_fixed else copies in ([], ["results [1] are copied, because they have other strides than PyTorch's"])
    if of == "last frames" and device == "cpu":
        assert is_fixed or copies


@each_rest
def test_any_number_of_frames(rest, times) -> None:
    times(OURS)
    model, cache = Causal("frames").eval(), torch.randn(1, 5, 2, 7, 6)
    wide, fast = copy.deepcopy(model).double(), compiled(model, rest, dynamic=True)
    with torch.no_grad():
        for frames in (4, 5, 3, 2, 9):
            x = torch.randn(1, 5, frames, 7, 6)
            close(fast(x, cache), wide(x.double(), cache.double()))


def test_chunks_agree_with_the_whole(times) -> None:
    times(OURS)
    model, x = Causal("frames").eval(), torch.randn(1, 5, 9, 7, 6)
    fast = compiled(model, "eager")
    with torch.no_grad():
        state, parts = torch.zeros(1, 5, 2, 7, 6), []
        for chunk in x.split([1, 2, 4, 2], 2):
            parts.append(fast(chunk, state))
            state = torch.cat([state, chunk], 2)[:, :, -2:]
        close(torch.cat(parts, 2), copy.deepcopy(model).double()(x.double(), torch.zeros(1, 5, 2, 7, 6).double()))


@each_rest
def test_training(rest, factor) -> None:
    model = nn.Sequential(nn.Conv3d(1, 1, 1, bias=False), nn.Conv3d(1, 2, (1, 3, 3))).to(torch.bfloat16)
    with torch.no_grad():
        model[0].weight.fill_(1)
    fast = compiled(copy.deepcopy(model), rest)
    x = torch.ones(2, 1, 64, 12, 12, dtype=torch.bfloat16)
    wide = copy.deepcopy(model).double()
    for net, given in ((fast, x), (wide, x.double())):
        net(given).sum().backward()
    for one, two in zip(fast.parameters(), wide.parameters(), strict=True):
        assert (one.grad.double() - two.grad).norm() <= 3e-2 * two.grad.norm()


def test_what_is_left(times) -> None:
    times(OURS)
    told = Told()
    model = nn.Sequential(nn.ConvTranspose3d(2, 2, 2), nn.Conv3d(2, 2, 2)).double()
    x = torch.randn(1, 2, 3, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(compiled(model, "eager", report=told)(x), model(x))
    assert told.left_ones == ["PyTorch's operator: a convolution of torch.float64, 5 dimensions"] * 2


@each_device
@pytest.mark.parametrize("winner", [OURS, THEIRS])
def test_optimize(winner, device, times) -> None:
    times(winner)
    model = Block().eval().to(device)
    x, cache = torch.randn(2, 6, 4, 7, 6, device=device), torch.randn(2, 6, 2, 7, 6, device=device)
    fast, wide = optimize(model), copy.deepcopy(model).double()
    with torch.no_grad():
        for _ in range(3):
            for got, want in zip(fast(x, cache), wide(x.double(), cache.double()), strict=True):
                close(got, want)
