"""`conv1d` and `conv_transpose2d`."""

import pytest
import torch
import torch.nn.functional as F
from common import ACTIVATIONS, compare_with_f64, each_device, each_dtype, leaf
from windrow.torch import conv1d, conv_transpose1d, conv_transpose2d

pytestmark = pytest.mark.usefixtures("nothing_decided")


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("function", "sides"), [(conv_transpose1d, [4096]), (conv_transpose2d, [64, 64])])
def test_overlaps_are_summed_before_they_are_rounded(function, sides, dtype):
    """PyTorch rounds at every one where oneDNN does not compute it, and stays at 256 in bf16."""
    ones = torch.ones(1, 1, *sides, dtype=dtype)
    assert function(ones, ones, padding=[side - 1 for side in sides]).item() == 4096


@pytest.mark.parametrize("activation", list(filter(None, ACTIVATIONS)))
def test_activation(activation):
    plain = ACTIVATIONS[activation]
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
