"""What is decided for has PyTorch's result, and what `accuracy="exact"` promises for data that come later."""

import copy

import pytest
import torch
import torch.nn.functional as F
from common import ACTIVATIONS, DTYPES, OURS, each_device, each_dtype, leaf
from torch import nn
from windrow.torch import conv2d, optimize, patch
from windrow.torch.choice import check as checks
from windrow.torch.choice import store
from windrow.torch.choice.candidates import Windrow
from windrow.torch.choice.check import check_of
from windrow.torch.choice.gradients import Backward
from windrow.torch.choice.policy import PYTORCH
from windrow.torch.choice.problem import Options

pytestmark = pytest.mark.usefixtures("nothing_decided")

# Pixels without data, as rasters, depth cameras and masks have them.
NO_DATA = [-9999.0, 1e9, torch.finfo(torch.float32).min, float("nan"), float("inf")]
OPTIONS = Options([1, 1], [1, 1], [1, 1], 1)


def dropped_bias(x, weight, bias, residual, activation):
    bias = bias.clone()
    bias[1] = 0
    return whole(x, weight, bias, residual, activation)


def missing_residual(x, weight, bias, residual, activation):
    residual = residual.clone()
    residual[:, 2] = 0
    return whole(x, weight, bias, residual, activation)


def wrong_activation(x, weight, bias, residual, activation):
    return whole(x, weight, bias, residual, None if activation else "relu")


def wrong_border_row(x, weight, bias, residual, activation):
    y = whole(x, weight, bias, residual, activation)
    y[-1, :, -1] = whole(x.roll(1, 2), weight, bias, residual, activation)[-1, :, -1]
    return y


def stale_filter(x, weight, bias, residual, activation):
    weight = weight.clone()
    weight[3] *= 1.02 if x.dtype is torch.float64 else 1.5
    return whole(x, weight, bias, residual, activation)


def not_a_number(x, weight, bias, residual, activation):
    y = whole(x, weight, bias, residual, activation)
    y[0, 0, 0, 0] = float("nan")
    return y


def whole(x, weight, bias, residual, activation):
    y = F.conv2d(x, weight, bias, padding=1)
    return ACTIVATIONS[activation](y if residual is None else y + residual)


FAULTS = [dropped_bias, missing_residual, wrong_activation, wrong_border_row, stale_filter, not_a_number]


def given(dtype, device="cpu"):
    x, residual = leaf(3, 16, 20, 22, grad=False), leaf(3, 5, 20, 22, grad=False)
    # As behind a ReLU, with an image that is dark in one half.
    x = x.relu()
    x[1, :, :, 9:] = 0
    weight, bias = 0.1 * leaf(5, 16, 3, 3, grad=False), torch.rand(5) + 0.5
    return [t.to(device, dtype) for t in (x, weight, bias, residual)]


def check(x, weight, bias, residual, activation):
    finish = lambda y, part: ACTIVATIONS[activation](y + residual[part])
    return check_of(x, weight, bias, OPTIONS, None, finish, residual)


@each_dtype
@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("channels", [5, 2])
def test_faults_are_found(channels, fault, activation, dtype, monkeypatch):
    """With the filters of so many channels at a time."""
    monkeypatch.setattr(checks, "_OF_A_FILTER", channels * 16 * 9 + 1)
    tensors = given(dtype)
    wide = [t.double() for t in tensors]
    of = check(*tensors, activation)
    assert of.fault(whole(*wide, activation).to(dtype)) is None
    assert of.fault(whole(*tensors, activation)) is None
    what = of.fault(fault(*wide, activation).to(dtype))
    assert what is not None and ("differs from PyTorch by" in what or "gives nan where PyTorch gives" in what)


@each_dtype
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("of_input", [True, False])
def test_faults_of_gradients_are_found(of_input, bias, dtype):
    x, weight, b, dy = given(dtype)
    b, needs = b if bias else None, (True, False, False) if of_input else (False, True, bias)
    of = Backward(dy, x, weight, b, OPTIONS, None).check(needs)
    wide = [None if t is None else t.double() for t in (dy, x, weight, b)]
    grads = Backward(*wide, OPTIONS, None).computed(needs, (False, False, False))
    grads = [None if g is None else g.to(dtype) for g in grads]
    assert of.fault(grads) is None
    for gradient in grads:
        if gradient is not None:
            kept = gradient.clone()
            gradient[..., -1] = gradient.flip(0)[..., -1]
            assert "differs from PyTorch by" in of.fault(grads)
            gradient.copy_(kept)


@each_device
def test_a_wrong_result_is_not_taken(device, times, monkeypatch):
    times(OURS)
    straight = Windrow.straight

    def wrong(self, x, residual=None):
        run = straight(self, x, residual)
        return lambda: run() + (x.sum(1, keepdim=True)[..., :1, :1] + 1)

    monkeypatch.setattr(Windrow, "straight", wrong)
    model = nn.Sequential(nn.Conv2d(8, 8, 5, padding=2)).to(device)
    plain, x = copy.deepcopy(model), leaf(2, 8, 14, 14, device=device, grad=False)
    report = patch(model)
    with torch.no_grad():
        for fast in (model, optimize(plain)):
            torch.testing.assert_close(fast(x), plain(x))
    assert {decision.choice for decision in store.every()} == {PYTORCH}
    assert "differs from PyTorch by" in str(report)


def test_wrong_gradients_are_not_taken(times, monkeypatch):
    times(OURS)
    ours = Backward._by_windrow
    monkeypatch.setattr(Backward, "_by_windrow", lambda *of: [None if g is None else 1.1 * g for g in ours(*of)])
    module = nn.Conv2d(4, 4, 3)
    patch(nn.ModuleList([module]))
    x = leaf(2, 4, 9, 9)
    wanted = [x, module.weight, module.bias]
    want = torch.autograd.grad(F.conv2d(x, module.weight, module.bias).square().sum(), wanted)
    for _ in range(3):
        torch.testing.assert_close(torch.autograd.grad(module(x).square().sum(), wanted), want)
    by_mode = {d.what: (d.choice, d.reason) for d in store.every()}
    for mode in ("gradient of the input", "gradient of filter and bias"):
        assert by_mode[mode][0] == PYTORCH and "differs from PyTorch by" in by_mode[mode][1]


def seen_from(shape, at):
    """Where outputs of 3x3 filters with padding 1 do not see a pixel."""
    far = torch.ones(shape, dtype=torch.bool)
    far[at - 1 : at + 2, at - 1 : at + 2] = False
    return far


def assert_right_where_it_is_not_seen(y, x, weight, bias, far):
    want = F.conv2d(x.double(), weight.double(), None if bias is None else bias.double(), padding=1)
    error = (y.double() - want)[..., far].abs().max()
    assert error < 1e-5, error
    # NaN and infinities stay where the definition has them.
    assert y[..., far].isfinite().all() and y.isnan().logical_not()[..., far].all()


@pytest.mark.parametrize("value", NO_DATA)
@pytest.mark.parametrize("channels", [8, 64])
def test_pixels_without_data_when_it_is_decided(value, channels, times):
    times(OURS)
    plain = nn.Conv2d(channels, 32, 3, padding=1)
    model, x = nn.Sequential(copy.deepcopy(plain)), leaf(2, channels, 40, 40, grad=False)
    patch(model)
    x[1, 0, 20, 20] = value
    far = seen_from((40, 40), 20)
    with torch.no_grad():
        for fast in (model, optimize(nn.Sequential(copy.deepcopy(plain)))):
            for _ in range(3):
                assert_right_where_it_is_not_seen(fast(x), x, plain.weight, plain.bias, far)


@pytest.mark.parametrize("value", NO_DATA)
def test_gradients_without_data_when_they_are_decided(value, times):
    times(OURS)
    module = nn.Conv2d(32, 16, 3, padding=1, bias=False)
    patch(nn.ModuleList([module]))
    x, dy = leaf(2, 32, 40, 40), leaf(2, 16, 40, 40, grad=False)
    dy[1, 0, 20, 20] = value
    turned = module.weight.detach().transpose(0, 1).flip(2, 3)
    for _ in range(3):
        (dx,) = torch.autograd.grad(module(x), x, dy)
        assert_right_where_it_is_not_seen(dx, dy, turned, None, seen_from((40, 40), 20))


@pytest.mark.parametrize("value", NO_DATA)
def test_exact_sums_are_a_promise_for_later_data(value, times):
    """Of who is decided for on clean data."""
    times(OURS)
    plain = nn.Conv2d(16, 32, 3, padding=1)
    module = copy.deepcopy(plain)
    assert 'not with accuracy="exact"' in str(patch(nn.ModuleList([copy.deepcopy(plain)])))
    assert 'accuracy="exact"' not in str(patch(nn.ModuleList([module]), accuracy="exact"))
    fast = optimize(nn.Sequential(copy.deepcopy(plain)), accuracy="exact")
    function = lambda x: conv2d(x, plain.weight, plain.bias, padding=1, accuracy="exact")
    clean, far = leaf(1, 16, 40, 40, grad=False), seen_from((40, 40), 20)
    x = clean.clone()
    x[0, 3, 20, 20] = value
    with torch.no_grad():
        for computed in (module, fast, function):
            computed(clean)
            assert_right_where_it_is_not_seen(computed(x), x, plain.weight, plain.bias, far)
    assert {d.choice for d in store.every()} != {PYTORCH}
    image, dy = leaf(1, 16, 40, 40), torch.randn(1, 32, 40, 40)
    turned = plain.weight.detach().transpose(0, 1).flip(2, 3)
    torch.autograd.grad(module(image), image, dy)
    dy[0, 3, 20, 20] = value
    (dx,) = torch.autograd.grad(module(image), image, dy)
    assert_right_where_it_is_not_seen(dx, dy, turned, None, far)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c, k, side, options", [
    (3, 64, 56, OPTIONS),
    (64, 64, 28, OPTIONS),
    (256, 64, 14, OPTIONS),
    (64, 64, 14, Options([2, 2], [1, 1], [1, 1], 1)),
    (64, 64, 14, Options([1, 1], [1, 1], [1, 1], 64)),
    (64, 32, 9, Options([2, 2], [0, 0], [1, 1], 1, [1, 1])),
])  # fmt: skip
def test_windrows_own_results_are_within_the_bound(c, k, side, options, dtype, times):
    """Every one of its measurements: no false alarm."""
    measured = times(OURS)
    x = leaf(2, c, side, side, dtype=dtype)
    is_transposed = options.output_padding is not None
    shape = (c, k // options.groups) if is_transposed else (k, c // options.groups)
    weight = (leaf(*shape, 3, 3, grad=False) / (c * 9 / options.groups) ** 0.5).to(dtype).requires_grad_()
    bias = leaf(k, dtype=dtype)
    if is_transposed:
        module = nn.ConvTranspose2d(c, k, 3, 2, output_padding=1)
    else:
        module = nn.Conv2d(c, k, 3, options.stride, 1, groups=options.groups)
    module.weight, module.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
    patch(nn.ModuleList([module]))
    module(x).sum().backward()
    with torch.no_grad():
        module(x)
    decisions = store.every()
    assert len(measured) == len(decisions) == 4
    assert not any("differs" in d.reason or "gives" in d.reason for d in decisions), [d.reason for d in decisions]
