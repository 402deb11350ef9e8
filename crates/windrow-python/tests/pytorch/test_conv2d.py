"""`windrow.torch.conv2d`, `Conv2d` and `patch`."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from common import compare_with_f64, each_device, each_dtype, leaf
from torch import nn
from windrow.torch import GELU, Conv2d, conv2d, patch

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


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
def test_activation(activation):
    plain = {
        "relu": F.relu,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    }[activation]
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


def close(module, x):
    with torch.no_grad():
        want = F.conv2d(x, module.weight, module.bias, padding=1)
        torch.testing.assert_close(module(x), want, atol=1e-4, rtol=1e-4)


def test_packed_filter_follows_the_weight():
    module = Conv2d(16, 24, 3, padding=1).eval()
    x = leaf(2, 16, 20, 20, grad=False)
    close(module, x)
    close(module, x)
    with torch.no_grad():
        module.weight.mul_(2)
    close(module, x)
    module.weight.data = torch.randn_like(module.weight)
    close(module, x)
    module.weight = nn.Parameter(torch.randn_like(module.weight))
    close(module, x)
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})
    close(module, x)
    optimizer = torch.optim.Adam(module.parameters())
    module(x).square().sum().backward()
    optimizer.step()
    close(module, x)
    # Another image size may want another packing of the same filter.
    close(module, leaf(1, 16, 4, 4, grad=False))
    close(module, x)
    with torch.inference_mode():
        made_inside = Conv2d(16, 24, 3, padding=1)
        y = made_inside(x)
    assert y.shape == (2, 24, 20, 20)


def test_module_is_copied_and_saved():
    module = Conv2d(4, 4, 3, padding=1).eval()
    x = leaf(1, 4, 9, 9, grad=False)
    close(module, x)
    for twin in [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]:
        with torch.no_grad():
            twin.weight.mul_(3)
        close(twin, x)
    close(module, x)


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
    options = ([1, 1], [1, 1], [1, 1], 1)
    operator = torch.ops.windrow.conv2d.default
    torch.library.opcheck(operator, (x, weight, bias, *options, None, None, None))
    torch.library.opcheck(
        operator, (x.detach(), weight.detach(), None, *options, "relu", "exact", "direct")
    )
    dy = leaf(2, 4, 8, 9, device=device, layout=layout, grad=False)
    torch.library.opcheck(
        torch.ops.windrow.conv2d_backward.default,
        (dy, x.detach(), weight.detach(), bias.detach(), *options, None, [True, True, True]),
    )


def test_patch():
    shared = nn.Conv2d(8, 8, 3, padding=1)
    model = nn.ModuleDict(
        {
            "stem": nn.Conv2d(3, 8, 7, stride=2),
            "body": nn.Sequential(shared, nn.GELU("tanh"), shared),
            "down": nn.Conv2d(8, 8, 3, stride=2),
            "depthwise": nn.Conv2d(8, 8, 3, groups=8),
        }
    )
    x = leaf(1, 8, 9, 9, grad=False)
    want = model["body"](x)
    weight = shared.weight
    report = patch(model)
    assert list(report.swapped) == ["body.0", "body.1"]
    assert list(report.left) == ["stem", "down", "depthwise"]
    assert "swapped body.0: Conv2d(8, 8" in str(report) and "left stem" in str(report)
    assert type(shared) is Conv2d and shared.weight is weight
    assert type(model["body"][1]) is GELU
    torch.testing.assert_close(model["body"](x), want, atol=1e-4, rtol=1e-4)
    assert not patch(model).swapped
    assert "no nn.Conv2d" in str(patch(nn.Linear(2, 2)))
