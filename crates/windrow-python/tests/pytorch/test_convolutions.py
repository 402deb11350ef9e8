"""`conv1d`, `conv_transpose2d` and their modules, alone and as `patch` swaps them."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from common import TOLERANCE, compare_with_f64, each_device, each_dtype, leaf
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.flop_counter import FlopCounterMode
from windrow.torch import (
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    _fastest,
    conv1d,
    conv_transpose2d,
    freeze,
    optimize,
    patch,
    unfreeze,
    unpatch,
)

pytestmark = pytest.mark.usefixtures("nothing_decided")


@pytest.fixture(params=[0.5, 2.0], ids=["ours", "theirs"])
def factor(request, times):
    """What a measurement finds: the factor of ours."""
    times(request.param)
    return request.param


TRANSPOSED = [
    {},
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"stride": (2, 3), "output_padding": (0, 2), "groups": 4},
    {"groups": 8, "stride": 2},
    {"dilation": (2, 3), "output_padding": (1, 2), "padding": (3, 0)},
]
LINES = [
    {},
    {"padding": 3, "groups": 8},
    {"stride": 2, "padding": 1, "groups": 4},
    {"dilation": 3, "padding": "same"},
    {"padding": "valid"},
]


def transposed(options, dtype=torch.float32, device="cpu", layout=(0, 1, 2, 3)):
    """Tensors of a call."""
    groups = options.get("groups", 1)
    x = leaf(2, 8, 5, 6, dtype=dtype, device=device, layout=layout)
    k = 12 // groups if 12 % groups == 0 else 2
    weight = leaf(8, k, 3, 3, dtype=dtype, device=device)
    return x, weight, leaf(k * groups, dtype=dtype, device=device)


def lines(options, dtype=torch.float32, device="cpu", layout=(0, 1, 2)):
    x = leaf(2, 8, 19, dtype=dtype, device=device, layout=layout)
    weight = leaf(8, 8 // options.get("groups", 1), 3, dtype=dtype, device=device)
    return x, weight, leaf(8, dtype=dtype, device=device)


@each_device
@each_dtype
@pytest.mark.parametrize("algorithm", [None, "fastest"])
@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3)])
@pytest.mark.parametrize("options", TRANSPOSED, ids=str)
def test_transposed(device, dtype, algorithm, layout, options, factor):
    x, weight, bias = transposed(options, dtype, device, layout)
    for given in (None, bias):
        compare_with_f64(
            lambda x, w, b: conv_transpose2d(x, w, b, **options, algorithm=algorithm),
            lambda x, w, b: F.conv_transpose2d(x, w, b, **options),
            (x, weight, given),
        )
    if algorithm and x.is_contiguous():
        want = F.conv_transpose2d(x, weight, bias, **options)
        got = conv_transpose2d(x, weight, bias, **options, algorithm=algorithm)
        assert got.stride() == want.stride()


@each_device
@each_dtype
@pytest.mark.parametrize("algorithm", [None, "fastest"])
@pytest.mark.parametrize("layout", [(0, 1, 2), (0, 2, 1)])
@pytest.mark.parametrize("options", LINES, ids=str)
def test_lines(device, dtype, algorithm, layout, options, factor):
    x, weight, bias = lines(options, dtype, device, layout)
    for given in (None, bias):
        compare_with_f64(
            lambda x, w, b: conv1d(x, w, b, **options, algorithm=algorithm),
            lambda x, w, b: F.conv1d(x, w, b, **options),
            (x, weight, given),
        )
    got = conv1d(x, weight, bias, **options, algorithm=algorithm)
    assert got.stride() == F.conv1d(x, weight, bias, **options).stride()


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
def test_activation(activation):
    plain = {
        "relu": F.relu,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    }[activation]
    for function, reference, tensors in [
        (conv_transpose2d, F.conv_transpose2d, transposed({})),
        (conv1d, F.conv1d, lines({})),
    ]:
        call = lambda x, w, b: function(x, w, b, activation=activation)  # noqa: B023
        compare_with_f64(call, lambda x, w, b: plain(reference(x, w, b)), tensors)  # noqa: B023
        with torch.no_grad():
            want = plain(reference(*tensors))
            torch.testing.assert_close(call(*tensors), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("algorithm", [None, "fastest"])
def test_without_a_batch(algorithm):
    x, weight, bias = transposed({})
    for image in (x[0], x[:1]):
        want = F.conv_transpose2d(image, weight, bias, 2)
        got = conv_transpose2d(image, weight, bias, 2, algorithm=algorithm)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    x, weight, bias = lines({})
    for line in (x[0], x[:1]):
        torch.testing.assert_close(
            conv1d(line, weight, bias, algorithm=algorithm), F.conv1d(line, weight, bias), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("algorithm", [None, "fastest"])
def test_broadcast_and_overlapping_images(algorithm):
    """Of which a plan would say that their elements share memory."""
    _, weight, bias = transposed({})
    for x in (leaf(1, 8, 1, 1).expand(2, 8, 5, 6), leaf(2, 8, 9).unfold(2, 4, 1).detach().requires_grad_()):
        compare_with_f64(
            lambda x, w, b: conv_transpose2d(x, w, b, algorithm=algorithm),
            F.conv_transpose2d,
            (x.detach().requires_grad_(), weight, bias),
        )


@pytest.mark.parametrize("algorithm", [None, "fastest"])
def test_sizes_of_nothing_and_one(algorithm):
    x, weight, bias = transposed({})
    with torch.no_grad():
        assert conv_transpose2d(x[:0], weight, bias, 2, algorithm=algorithm).shape == (0, 12, 11, 13)
        one = x[:, :, :1, :1]
        want = F.conv_transpose2d(one, weight, bias, 3)
        got = conv_transpose2d(one, weight, bias, 3, algorithm=algorithm)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        x, weight, bias = lines({})
        assert conv1d(x[:0], weight, bias, algorithm=algorithm).shape == (0, 8, 17)
        got = conv1d(x[:, :, :3], weight, bias, algorithm=algorithm)
        torch.testing.assert_close(got, F.conv1d(x[:, :, :3], weight, bias), atol=1e-5, rtol=1e-5)
    if algorithm is None:
        # PyTorch's own refuses these: no channels, no pixels.
        assert torch.equal(
            conv_transpose2d(leaf(1, 0, 2, 2), leaf(0, 3, 1, 1), leaf(3)).new_zeros(1), torch.zeros(1)
        )
        assert conv_transpose2d(leaf(1, 2, 1, 1), leaf(2, 3, 2, 2), padding=1).shape == (1, 3, 0, 0)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda x, w: conv_transpose2d(x, w, output_padding=1), ValueError, "`output_padding` is [1, 1], expected"),
        (lambda x, w: conv_transpose2d(x, w, padding=-1), ValueError, "`padding` is -1, expected no negative"),
        (lambda x, w: conv_transpose2d(x, w, padding="same"), TypeError, "`padding` is 'same', expected an int"),
        (lambda x, w: conv_transpose2d(x, w, padding=9), ValueError, "`padding` is [9, 9], expected at most 3"),
        (lambda x, w: conv_transpose2d(x, w, stride=0), ValueError, "`stride` is [0, 0], expected at least 1"),
        (lambda x, w: conv_transpose2d(x, w, groups=3), ValueError, "`groups` is 3, expected a divisor"),
        (lambda x, w: conv_transpose2d(x[:, 1:], w), ValueError, "`input` has shape [2, 7, 5, 6]"),
        (lambda x, w: conv_transpose2d(x[0, 0], w), ValueError, "`input` has 2 dimensions"),
        (lambda x, w: conv_transpose2d(x[:, :, :0], w), ValueError, "`input` has shape [2, 8, 0, 6]"),
        (lambda x, w: conv_transpose2d(x, w[0]), ValueError, "`weight` has 3 dimensions"),
        (lambda x, w: conv_transpose2d(x.double(), w.double()), TypeError, "`input` is f64"),
        (lambda x, w: conv_transpose2d(x, w.half()), TypeError, "`weight` is f16"),
        (lambda x, w: conv_transpose2d(x, w, w[0, :1, 0, 0]), ValueError, "`bias` has shape [1], expected [12]"),
        (
            lambda x, w: conv_transpose2d(x, w, w[0, :1, 0, 0], algorithm="fastest"),
            ValueError,
            "`bias` has shape [1], expected [12]",
        ),
        (lambda x, w: conv_transpose2d(x, w, algorithm="direct"), ValueError, "`algorithm` is 'direct', expected"),
        (lambda x, w: conv1d(x[0, 0, 0], w[0]), ValueError, "`input` and `weight` have 1 and 3 dimensions"),
        (lambda x, w: conv1d(x[0], w), ValueError, "`input` and `weight` have 3 and 4 dimensions"),
        (lambda x, w: conv1d(x[0], w[0], stride=(1, 1)), ValueError, "`stride` is (1, 1), expected an int"),
        (lambda x, w: conv1d(x[0], w[0], padding="same", stride=2), ValueError, "`padding` is 'same'"),
    ],
)
def test_errors(call, kind, message):
    x, weight, _ = (t.detach() for t in transposed({}))
    with pytest.raises(kind) as error:
        call(x, weight)
    assert str(error.value).startswith(message), error.value


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize("algorithm", [None, "fastest"])
def test_vmap(algorithm):
    for function, reference, tensors in [
        (conv_transpose2d, F.conv_transpose2d, transposed({})),
        (conv1d, F.conv1d, lines({})),
    ]:
        x, weight, bias = (t.detach() for t in tensors)
        call = lambda x, w: function(x, w, bias, 2, algorithm=algorithm)  # noqa: B023
        images, filters = torch.stack([x, 2 * x]), torch.stack([weight, -weight])
        want = torch.stack([reference(i, w, bias, 2) for i, w in zip(images, filters, strict=True)])
        torch.testing.assert_close(torch.vmap(call)(images, filters), want, atol=1e-5, rtol=1e-5)


def test_double_backward_is_refused():
    for function, (x, weight, _) in [(conv_transpose2d, transposed({})), (conv1d, lines({}))]:
        (dx,) = torch.autograd.grad(function(x, weight).sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="double backward"):
            dx.sum().backward()


@each_device
@pytest.mark.parametrize("algorithm", [None, "fastest"])
def test_opcheck(device, algorithm):
    operator, backward = torch.ops.windrow.conv2d.default, torch.ops.windrow.conv2d_backward.default
    for x, options in [
        (leaf(2, 8, 5, 6, device=device), ([2, 1], [1, 0], [1, 1], 1, [1, 0])),
        (leaf(2, 8, 5, 6, device=device, layout=(0, 2, 3, 1)), ([1, 1], [1, 0], [1, 2], 1, [0, 0])),
        (leaf(2, 8, 9, device=device), ([1, 2], [0, 1], [1, 1], 2, None)),
        (leaf(2, 8, 9, device=device, layout=(0, 2, 1)), ([1, 1], [0, 1], [1, 2], 2, None)),
    ]:
        weight = leaf(8, 4, *[3] * (x.dim() - 2), device=device)
        bias = leaf(4 if x.dim() == 4 else 8, device=device)
        torch.library.opcheck(operator, (x, weight, bias, *options, None, None, algorithm, "changing"))
        tensors = [t.detach() for t in (x, weight, bias)]
        y = operator(*tensors, *options, None, None, algorithm, "kept")
        args = (torch.randn_like(y), *tensors, *options, None, algorithm, [True, True, True])
        torch.library.opcheck(backward, args)


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
        assert convolution._last[-1] is not None
        if device == "cpu":
            assert (convolution._pytorchs is None) == (factor < 1)
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
            assert type(other.up) is ConvTranspose2d and "_last" not in other.up.__dict__
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
    kinds = {Conv1d, ConvTranspose2d}
    assert {type(m) for m in fast.modules() if isinstance(m, (Conv1d, Conv2d, ConvTranspose2d))} == kinds
    assert [*fast.windrow_report.fused] == ["line", "dense", "up", "out"]
    with torch.no_grad():
        for _ in range(3):
            close(fast(x), plain(x))
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
    onnx = pytest.importorskip("onnx")
    evaluation = pytest.importorskip("onnx.reference")
    if dynamo:
        pytest.importorskip("onnxscript")
    plain, model, x = both()
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), file, dynamo=dynamo)
    exported = onnx.load(file)
    assert {node.domain for node in exported.graph.node} <= {"", "pkg.onnxscript.torch_lib"}
    session = evaluation.ReferenceEvaluator(exported)
    (y,) = session.run(None, {exported.graph.input[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(y.copy()), plain(x), atol=1e-5, rtol=1e-5)


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
    assert not _fastest.decisions()
