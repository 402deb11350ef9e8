"""`windrow.torch.conv2d` and `Conv2d`."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import ACTIVATIONS, compare_with_f64, each_device, each_dtype, leaf
from torch import nn
from windrow.torch import GELU, Conv2d, conv2d
from windrow.torch._conv2d import accuracy_of

OPTIONS = [
    {},
    {"padding": 1},
    {"padding": (2, 1)},
    {"stride": 2, "padding": 1},
    {"dilation": (2, 1)},
    {"groups": 4, "padding": 1},
    {"padding": "same"},
    {"padding": "valid"},
]


@each_device
@each_dtype
@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 3, 1)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients(device, dtype, layout, options):
    groups = options.get("groups", 1)
    x = leaf(2, 8, 13, 11, dtype=dtype, device=device, layout=layout)
    weight = leaf(12, 8 // groups, 3, 3, dtype=dtype, device=device)
    for bias in [None, leaf(12, dtype=dtype, device=device)]:
        compare_with_f64(
            lambda x, w, b: conv2d(x, w, b, **options),
            lambda x, w, b: F.conv2d(x, w, b, **options),
            (x, weight, bias),
        )


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kernel", [(1, 1), (2, 3), (4, 4), (5, 1)])
def test_other_filters(kernel):
    x, weight = leaf(2, 3, 9, 10), leaf(4, 3, *kernel)
    for options in [{"padding": 1}, {"padding": "same"}, {"padding": "same", "dilation": 2}]:
        if options["padding"] == "same" and kernel[0] % 2 == 0:
            options = {"padding": "same"}
        compare_with_f64(
            lambda x, w: conv2d(x, w, **options),  # noqa: B023
            lambda x, w: F.conv2d(x, w, **options),  # noqa: B023
            (x, weight),
        )


@pytest.mark.parametrize("activation", list(filter(None, ACTIVATIONS)))
def test_activation(activation):
    plain = ACTIVATIONS[activation]
    x, weight, bias = leaf(2, 3, 9, 10), leaf(4, 3, 3, 3), leaf(4)
    compare_with_f64(
        lambda x, w, b: conv2d(x, w, b, activation=activation),
        lambda x, w, b: plain(F.conv2d(x, w, b)),
        (x, weight, bias),
    )
    with torch.no_grad():
        fused = conv2d(x, weight, bias, activation=activation)
        torch.testing.assert_close(fused, plain(F.conv2d(x, weight, bias)), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="activation"):
        conv2d(x, weight, bias, activation="mish")


def test_one_image():
    x, weight = leaf(3, 9, 10, grad=False), leaf(4, 3, 3, 3, grad=False)
    torch.testing.assert_close(conv2d(x, weight), F.conv2d(x, weight), atol=1e-4, rtol=1e-4)


def test_errors():
    x, weight = leaf(1, 3, 9, 10, grad=False), leaf(4, 3, 3, 3, grad=False)
    with pytest.raises(ValueError, match="'full', expected"):
        conv2d(x, weight, padding="full")
    with pytest.raises(ValueError, match="expected stride 1"):
        conv2d(x, weight, padding="same", stride=2)
    with pytest.raises(NotImplementedError):
        conv2d(x, weight, stride=2, algorithm="winograd_gemm_f4")
    with pytest.raises(TypeError, match="f64"):
        conv2d(x.double(), weight.double())


def test_lazily_negated_image():
    z, weight = torch.randn(1, 3, 9, 10, dtype=torch.complex64), leaf(4, 3, 3, 3, grad=False)
    assert z.conj().imag.is_neg()
    torch.testing.assert_close(conv2d(z.conj().imag, weight), -conv2d(z.imag, weight))


def test_double_backward_is_refused():
    x, weight = leaf(1, 3, 9, 10), leaf(4, 3, 3, 3)
    (dx,) = torch.autograd.grad(conv2d(x, weight).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward: windrow.torch.conv2d"):
        dx.sum().backward()


def test_a_gradient_notices_what_was_written_over():
    x, weight = leaf(1, 3, 9, 10), leaf(4, 3, 3, 3)
    y = conv2d(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_gradient_goes_by_the_dispatcher_where_that_has_more_to_do():
    """Recorded straight and through the dispatcher, as under a profiler, it is the same."""
    gradients = []
    x, weight = leaf(2, 3, 9, 10), leaf(4, 3, 3, 3)
    for is_profiled in (False, True):
        x.grad = weight.grad = None
        with torch.autograd.profiler.profile(enabled=is_profiled) as profile:
            conv2d(x, weight, padding=1).square().sum().backward()
        gradients.append((x.grad, weight.grad))
        if is_profiled:
            names = {event.name for event in profile.function_events}
            assert {"windrow::conv2d", "windrow::conv2d_backward"} <= names
    for straight, dispatched in zip(*gradients, strict=True):
        assert torch.equal(straight, dispatched)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes(mode):
    ours = Conv2d(3, 4, 3, padding=1, padding_mode=mode)
    plain = nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode)
    plain.load_state_dict(ours.state_dict())
    x = leaf(2, 3, 8, 8, grad=False)
    torch.testing.assert_close(ours(x), plain(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    module, x = Conv2d(4, 4, 3), leaf(1, 4, 9, 9)
    with torch.autocast("cpu", dtype):
        y = module(x)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert x.grad.dtype == module.weight.grad.dtype == torch.float32
    with torch.no_grad(), torch.autocast("cpu", dtype):
        assert module(x).dtype == dtype


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 3, 1)])
def test_compiled(training, layout):
    model = nn.Sequential(Conv2d(3, 8, 3, padding=1), GELU(), Conv2d(8, 4, 3), nn.Flatten())
    compiled = torch.compile(model, fullgraph=True)
    with torch.set_grad_enabled(training):
        for n in [2, 2, 5]:
            x = leaf(n, 3, 10, 12, layout=layout, grad=False)
            y, want = compiled(x), model(x)
            torch.testing.assert_close(y, want, atol=1e-4, rtol=1e-4)
            if training:
                parameters = list(model.parameters())
                ours = torch.autograd.grad(y.square().sum(), parameters)
                theirs = torch.autograd.grad(want.square().sum(), parameters)
                torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-4)


@each_device
@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 3, 1)])
def test_opcheck(device, layout):
    x = leaf(2, 3, 8, 9, device=device, layout=layout)
    weight, bias = leaf(4, 3, 3, 3, device=device), leaf(4, device=device)
    options = ([1, 1], [1, 1], [1, 1], 1, None)
    operator = torch.ops.windrow.conv2d.default
    for algorithm in (None, "fastest"):
        args = (x, weight, bias, *options, None, None, algorithm, "changing")
        torch.library.opcheck(operator, args)
    args = (x.detach(), weight.detach(), None, *options, "relu", "exact", "direct", "kept")
    torch.library.opcheck(operator, args)
    dy = leaf(2, 4, 8, 9, device=device, layout=layout, grad=False)
    tensors = [t.detach() for t in (x, weight, bias)]
    for algorithm in (None, "fastest"):
        args = (dy, *tensors, *options, None, algorithm, [True, True, True])
        torch.library.opcheck(torch.ops.windrow.conv2d_backward.default, args)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"padding": -1}, ValueError, "`padding` is -1, expected no negative number"),
        ({"padding": 1.0}, TypeError, "`padding` is 1.0, expected an int, or one for each direction"),
        ({"stride": (1, 1, 1)}, ValueError, "`stride` is (1, 1, 1), expected an int, or one for each"),
        ({"dilation": (1, "2")}, TypeError, "`dilation` is (1, '2'), expected an int"),
        ({"activation": "tanh"}, ValueError, "`activation` is 'tanh', expected one of"),
    ],
)
def test_wrong_options(options, kind, message):
    x, weight = leaf(1, 4, 8, 8), leaf(4, 4, 3, 3)
    with pytest.raises(kind) as error:
        conv2d(x, weight, **options)
    assert str(error.value).startswith(message)


def test_arguments_have_the_callers_names():
    with pytest.raises(ValueError, match="`input` has 2 dimensions"):
        conv2d(leaf(8, 8, grad=False), leaf(4, 4, 3, 3, grad=False))
    with pytest.raises(ValueError, match="`weight` has shape"):
        conv2d(leaf(1, 4, 8, 8), leaf(4, 3, 3, 3))
    with pytest.raises(TypeError, match="`input` is f64"):
        conv2d(leaf(1, 4, 8, 8, grad=False).double(), leaf(4, 4, 3, 3, grad=False).double())


def test_accuracy_is_that_of_pytorchs_convolutions(monkeypatch):
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.version, "hip", None)
    assert accuracy_of(None, on_gpu) == "tf32" and accuracy_of("exact", on_gpu) == "exact"
    assert accuracy_of(None, torch.zeros(1)) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert accuracy_of(None, on_gpu) is None
