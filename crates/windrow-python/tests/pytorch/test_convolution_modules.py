"""`Conv1d` and `ConvTranspose2d`, as `patch` and `optimize` put them in place of PyTorch's."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from common import TOLERANCE, each_device, each_dtype, exported, known, leaf
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.flop_counter import FlopCounterMode
from windrow.torch import (
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    conv1d,
    conv_transpose2d,
    freeze,
    optimize,
    patch,
    unfreeze,
    unpatch,
)
from windrow.torch.choice import store

pytestmark = pytest.mark.usefixtures("nothing_decided")


class Both(nn.Module):
    """Depthwise over time, then up; a residual, so that shapes have to be right."""

    def __init__(self):
        super().__init__()
        self.line = nn.Conv1d(12, 12, 4, padding=3, groups=12)
        self.dense = nn.Conv1d(12, 12, 3, padding="same", padding_mode="circular")
        self.up = nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1)
        self.out = nn.ConvTranspose2d(6, 3, 3, stride=2, output_padding=1, dilation=2)

    def forward(self, x):
        x = x + F.silu(self.line(x)[:, :, : x.shape[2]])
        x = x + self.dense(x)
        return self.out(self.up(x.unflatten(1, (4, 3))))


def both(device="cpu", dtype=torch.float32):
    plain = Both().to(device, dtype).eval()
    model = copy.deepcopy(plain)
    assert list(patch(model).swapped) == ["line", "dense", "up", "out"]
    return plain, model, leaf(2, 12, 7, device=device, dtype=dtype, grad=False)


def close(got, want, dtype=torch.float32):
    scale = want.abs().max().item()
    torch.testing.assert_close(got, want, atol=4 * TOLERANCE[dtype] * scale, rtol=0)
    assert got.stride() == want.stride()


@each_device
@each_dtype
def test_patched(device, dtype, factor):
    plain, model, x = both(device, dtype)
    for _ in range(4):
        with torch.no_grad():
            close(model(x), plain(x), dtype)
    for convolution in (model.line, model.up):
        _, _, remembered = convolution._remembered
        assert len(remembered) == 1
        if device == "cpu":
            assert (None not in known(convolution)) == (factor < 1)
    for _ in range(4):
        for module in (model, plain):
            module.zero_grad()
            module(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad.stride() == theirs.grad.stride()
            if dtype is torch.float32:
                torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-2, rtol=1e-3)
    said = str(patch(Both()).model) + str(patch(model))
    assert "already" in said and "ConvTranspose2d(4, 6" in said


def test_report_names_what_was_decided(factor):
    model = Both()
    report = patch(model)
    with torch.no_grad():
        model(leaf(2, 12, 7, grad=False))
    lines = str(report).split("\n")
    who = "Windrow" if factor < 1 else "PyTorch"
    for name, shape in [("line", [2, 12, 7]), ("up", [2, 4, 3, 7])]:
        (at,) = (i for i, line in enumerate(lines) if line.startswith(f"swapped {name}: "))
        assert lines[at + 1].startswith(f"    forward of float32 {shape} on cpu: {who} (")
    assert len([line for line in lines if line.startswith("    forward")]) == 4


def test_filters_that_change_and_are_promised_not_to(factor):
    plain, model, x = both()
    with torch.no_grad():
        for _ in range(3):
            close(model(x), plain(x))
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            ours.mul_(1.5), theirs.mul_(1.5)
        close(model(x), plain(x))
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            ours.data = theirs.data = ours.data * 0.5
        for _ in range(3):
            close(model(x), plain(x))
        freeze(model)
        assert model.line.frozen and model.up.frozen
        for _ in range(4):
            close(model(x), plain(x))
        assert not unfreeze(model).up.frozen


def test_unpatched(factor):
    plain, model, x = both()
    with torch.no_grad():
        for _ in range(3):
            model(x)
    kinds = [type(m) for m in unpatch(model).children()]
    assert kinds == [nn.Conv1d, nn.Conv1d, nn.ConvTranspose2d, nn.ConvTranspose2d]
    assert model.up.__dict__.keys() == plain.up.__dict__.keys()
    assert torch.equal(model(x), plain(x))
    patch(model).model.up.activation = "relu"
    with pytest.raises(ValueError, match="`up` has activation 'relu', which nn.ConvTranspose2d has not"):
        unpatch(model)


def test_copies_and_states(factor):
    plain, model, x = both()
    with torch.no_grad():
        want = plain(x)
        for _ in range(3):
            model(x)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other.up) is ConvTranspose2d and not {"_known", "_remembered"} & other.up.__dict__.keys()
            close(other(x), want)
        assert model.state_dict().keys() == plain.state_dict().keys()
        other = Both()
        patch(other)
        other(x)
        other.load_state_dict(plain.state_dict())
        close(other(x), want)
    double = copy.deepcopy(model).double()
    assert torch.equal(double(x.double()), plain.double()(x.double()))


def test_given_output_size(factor):
    plain, model, _ = both()
    x = leaf(2, 4, 5, 6, grad=False)
    with torch.no_grad():
        for size in ([10, 13], [2, 6, 11, 12]):
            for _ in range(2):
                close(model.up(x, size), plain.up(x, size))
        close(model.up(x[0], [11, 12]), plain.up(x[0], [11, 12]))
        with pytest.raises(ValueError, match="output size"):
            model.up(x, [30, 30])


def test_an_option_that_is_set_is_seen(factor):
    plain, model, _ = both()
    x, line = leaf(2, 4, 5, 6, grad=False), leaf(2, 12, 7, grad=False)
    with torch.no_grad():
        for _ in range(4):
            model.up(x), model.line(line)
        for convolution in (plain.up, model.up):
            convolution.output_padding = (1, 0)
        close(model.up(x), plain.up(x))
        for convolution in (plain.line, model.line):
            convolution.padding = (0,)
        close(model.line(line), plain.line(line))
        model.up.activation = model.line.activation = "relu"
        close(model.up(x), plain.up(x).relu())
        close(model.line(line), plain.line(line).relu())


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [2, "same"])
def test_padding_modes(mode, padding, factor):
    plain = nn.Conv1d(6, 6, 4, padding=padding, padding_mode=mode, groups=6)
    model = copy.deepcopy(nn.Sequential(plain))
    patch(model)
    x = leaf(2, 6, 9, grad=False)
    with torch.no_grad():
        for _ in range(2):
            close(model(x), plain(x))
            close(model(x[0]), plain(x[0]))


def test_parametrized():
    model = nn.Sequential(weight_norm(nn.Conv1d(4, 4, 3)), weight_norm(nn.ConvTranspose2d(4, 4, 3)))
    report = patch(model)
    assert not report.swapped and "parametrized" in report.left["0"] and "parametrized" in report.left["1"]
    plain, model, _ = both()
    x = leaf(2, 4, 5, 6, grad=False)
    with torch.no_grad():
        for _ in range(3):
            model.up(x)
    for module in (plain, model):
        weight_norm(module.up).parametrizations.weight.original0.data.mul_(2)
    for _ in range(3):
        close(model.up(x), plain.up(x))


@each_device
@pytest.mark.parametrize("training", [False, True])
def test_autocast(device, training, factor):
    plain, model, x = both(device)
    for _ in range(3):
        with torch.set_grad_enabled(training):
            with torch.autocast(device, torch.bfloat16):
                y, want = model(x), plain(x)
            assert y.dtype == want.dtype == torch.bfloat16
            close(y, want, torch.bfloat16)
            if training:
                y.float().square().sum().backward()
                assert model.up.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("training", [False, True])
def test_compiled(training, factor):
    plain, model, _ = both()
    compiled = torch.compile(model, fullgraph=True)
    with torch.set_grad_enabled(training):
        for n in (2, 2, 5):
            x = leaf(n, 12, 7, grad=False)
            y, want = compiled(x), plain(x)
            close(y, want)
            if training:
                ours = torch.autograd.grad(y.square().sum(), list(model.parameters()))
                theirs = torch.autograd.grad(want.square().sum(), list(plain.parameters()))
                torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_in_a_graph(factor):
    plain, model, x = both("cuda")
    with torch.no_grad():
        for _ in range(3):
            model(x)
        plain(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        for _ in range(2):
            x.normal_()
            graph.replay()
            close(y, plain(x))


def test_optimized(factor):
    plain, _, x = both()
    fast = optimize(plain)
    with torch.no_grad():
        for _ in range(3):
            close(fast(x), plain(x))
        assert {*fast.windrow_report.fused} == {"line", "dense", "up", "out"}
        file = io.BytesIO()
        torch.save(fast, file)
        file.seek(0)
        close(torch.load(file, weights_only=False)(x), plain(x))


def test_traced_and_scripted(factor):
    plain, model, x = both()
    with torch.no_grad():
        want = plain(x)
        graph = torch.fx.symbolic_trace(model)
        called = [n.target for n in graph.graph.nodes if n.op == "call_function"]
        assert called.count(conv1d) == 2 and called.count(conv_transpose2d) == 2
        close(graph(x), want)
        close(torch.jit.trace(model, x, check_trace=False)(x), want)
        for convolutions in ((), (model.line, model.up)):
            for convolution in convolutions:
                convolution.activation = "relu"
            for _ in range(3):
                want = model(x)
            torch.jit.save(torch.jit.script(model), saved := io.BytesIO())
            saved.seek(0)
            close(torch.jit.load(saved)(x), want)
        size = [10, 13]
        up, x = nn.Sequential(plain.up), leaf(2, 4, 5, 6, grad=False)
        patch(up)
        close(torch.jit.script(up[0])(x, size), plain.up(x, size))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx(dynamo, tmp_path):
    plain, model, x = both()
    y = exported(model, x, dynamo, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(y, plain(x), atol=1e-5, rtol=1e-5)


def test_flop_counter():
    plain, model, x = both()

    def flops(call):
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops()

    assert flops(lambda: model(x)) == flops(lambda: plain(x)) > 0
    # Of groups PyTorch counts more for gradients of the filter.
    x = leaf(2, 4, 5, 6)
    of_up = [flops(lambda: m.up(x).sum().backward()) for m in (model, plain)]
    assert of_up[0] == of_up[1] == 3 * flops(lambda: model.up(x))
    line = leaf(2, 12, 7)
    assert flops(lambda: model.line(line).sum().backward()) == 3 * 2 * 2 * 10 * 12 * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_called_steps_of_transposed_convolutions_are_pytorchs():
    module = nn.ConvTranspose2d(8, 8, 2, 2, device="cuda")
    patch(nn.Sequential(module))
    module(torch.randn(2, 8, 9, 9, device="cuda")).sum().backward()
    assert not store.every()
