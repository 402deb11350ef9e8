"""Patched models in what takes models apart: torch.fx, TorchScript, ONNX, and PyTorch's counter."""

import copy
import io
import pickle

import pytest
import torch
from common import exported, leaf
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils.flop_counter import FlopCounterMode
from windrow.torch import Conv2d, causal_conv1d_fn, causal_conv1d_update, conv2d, gelu, optimize, patch

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture
def models():
    """A model, and the same patched."""
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(8, 8, 3, padding="same"),
        nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect", bias=False),
        nn.GELU("tanh"),
    ).eval()
    model = copy.deepcopy(plain)
    assert len(patch(model).swapped) == 5
    return plain, model


def same(y, want):
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)


def test_symbolic_trace(models):
    plain, model = models
    x = leaf(2, 3, 9, 8)
    graph = torch.fx.symbolic_trace(model)
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(conv2d) == 3 and called.count(gelu) == 2
    want = plain(x)
    for module in (graph, pickle.loads(pickle.dumps(graph)), torch.compile(graph)):
        y = module(x)
        same(y, want)
        same(*(torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for out in (y, want)))


@pytest.mark.parametrize("factor", [0.5, 2.0], ids=["ours", "theirs"])
def test_symbolic_trace_of_a_model_that_was_called(models, nothing_decided, times, factor):
    times(factor)
    plain, model = models
    x = leaf(2, 3, 9, 8, grad=False)
    with torch.no_grad():
        for _ in range(4):
            model(x)
        same(torch.fx.symbolic_trace(model)(x), plain(x))


@pytest.mark.parametrize("factor", [0.5, 2.0], ids=["ours", "theirs"])
@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_model_that_was_called(models, nothing_decided, times, factor, strict):
    times(factor)
    plain, model = models
    x, other = leaf(2, 3, 9, 8, grad=False), leaf(3, 3, 12, 8, grad=False)
    dim = torch.export.Dim
    # Until PyTorch 2.5 each has a name.
    dynamic = ({0: getattr(dim, "AUTO", None) or dim("n"), 2: getattr(dim, "AUTO", None) or dim("h")},)
    with torch.no_grad():
        for exported in (model, optimize(plain)):
            for _ in range(4):
                exported(x)
            program = torch.export.export(exported, (x,), dynamic_shapes=dynamic, strict=strict)
            for image in (x, other):
                same(program.module()(image), plain(image))


def test_fake_tensors_after_real_ones(models, nothing_decided, times):
    times(0.5)
    _, model = models
    x = leaf(2, 3, 9, 8, grad=False)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for calls in (2, 5):
            for _ in range(calls):
                with unset_fake_temporarily():
                    model(x)
            y = model(mode.from_tensor(x))
            assert type(y) is FakeTensor and y.shape == (2, 4, 9, 8)


def test_create_feature_extractor(models):
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    plain, model = models
    x = leaf(2, 3, 9, 8, grad=False)
    with torch.no_grad():
        features = extraction.create_feature_extractor(model, {"1": "gelu", "3": "last"})(x)
        same(features["gelu"], plain[:2](x))
        same(features["last"], plain[:4](x))


def test_prepare_fx(models):
    quantization = pytest.importorskip("torch.ao.quantization")
    from torch.ao.quantization.quantize_fx import prepare_fx

    plain, model = models
    x = leaf(2, 3, 9, 8, grad=False)
    prepared = prepare_fx(model, quantization.get_default_qconfig_mapping(), (x,))
    same(prepared(x), plain(x))


def test_script(models):
    plain, model = models
    for activation in [None, "relu", "silu", "gelu", "gelu_tanh"]:
        model[0].activation = activation
        x = leaf(2, 3, 9, 8, grad=False)
        want = plain[1:](conv2d(x, plain[0].weight, plain[0].bias, padding=1, activation=activation))
        torch.jit.save(torch.jit.script(model), saved := io.BytesIO())
        saved.seek(0)
        same(torch.jit.load(saved)(x), want)


@pytest.mark.parametrize("grad", [False, True])
def test_trace(models, grad):
    plain, model = models
    x = leaf(2, 3, 9, 8, grad=grad)
    with torch.set_grad_enabled(grad):
        # PyTorch's check compares the names of values as well, which hang on the frames above.
        traced = torch.jit.trace(model, x, check_trace=False)
        assert "windrow::conv2d" in str(traced.inlined_graph)
        y, want = traced(x), plain(x)
        same(y, want)
        if grad:
            same(*(torch.autograd.grad(out.sum(), x)[0] for out in (y, want)))


@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx(models, dynamo, tmp_path):
    plain, model = models
    model[0].activation = "relu"
    x = leaf(2, 3, 9, 8, grad=False)
    y = exported(model, x, dynamo, tmp_path)
    with torch.no_grad():
        same(y, plain[1:](plain[0](x).relu()))


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_flop_counter(models):
    plain, model = models
    x = leaf(2, 3, 9, 8)
    assert flops(lambda: model(x).sum().backward()) == flops(lambda: plain(x).sum().backward()) > 0
    grouped = Conv2d(8, 8, 3, groups=4)
    y = leaf(1, 8, 6, 6, grad=False)
    assert flops(lambda: grouped(y)) == 2 * 16 * 8 * 2 * 9
    x, taps = leaf(2, 6, 10), leaf(6, 4)
    assert flops(lambda: causal_conv1d_fn(x, taps).sum().backward()) == 3 * 2 * 2 * 6 * 10 * 4
    state = torch.zeros(2, 6, 3)
    step, taps = x.detach()[:, :, 0], taps.detach()
    assert flops(lambda: causal_conv1d_update(step, state, taps)) == 2 * 2 * 6 * 4
